//! The settings of a gateway.

use std::time::Duration;

use crate::engine::EngineAddress;
use crate::stream::ValkeyConfig;

/// The settings of a [`Gateway`](super::Gateway).
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The address of the engine.
    pub engine: EngineAddress,
    /// How long connecting to the engine may take, including the check whether it requires a
    /// password (default 5 s).
    pub engine_timeout: Duration,
    /// The maximum number of sessions; further clients are rejected (default 10,000).
    pub max_clients: usize,
    /// Whether to reject clients from other hosts while the engine requires no password (default
    /// true). To the engine, all clients of the gateway seem to come from this host, so its own
    /// protected mode would accept them.
    pub protected_mode: bool,
    /// How long sessions may take to finish pending commands when the gateway shuts down (default
    /// 5 s).
    pub drain_timeout: Duration,
    /// Whether the engine keeps running when the gateway shuts down, so that waiting for its
    /// replies makes sense (default true). False if both shut down together.
    pub engine_keeps_running: bool,
    /// The settings for clients of Valkey Over RDMA.
    pub valkey: ValkeyConfig,
    /// The name of the sender in errors to rejected clients (default `Ferrite gateway`).
    pub name: &'static str,
    /// The advice in protected mode's error: how to allow clients from other hosts without a
    /// password. The default is for `ferrite gateway`.
    pub unprotect_hint: &'static str,
}

impl GatewayConfig {
    /// Returns the default settings for a gateway in front of this engine.
    #[must_use]
    pub fn new(engine: EngineAddress) -> Self {
        Self {
            engine,
            engine_timeout: Duration::from_secs(5),
            max_clients: 10_000,
            protected_mode: true,
            drain_timeout: Duration::from_secs(5),
            engine_keeps_running: true,
            valkey: ValkeyConfig::default(),
            name: "Ferrite gateway",
            unprotect_hint: "start the gateway with --protected-mode no",
        }
    }
}
