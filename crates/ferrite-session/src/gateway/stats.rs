//! The counters of a gateway.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Gateway;
use crate::in_process::CommandPaths;

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) valkey_sessions: AtomicU64,
    pub(super) ferrite_sessions: AtomicU64,
    pub(super) tcp_sessions: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) engine_failures: AtomicU64,
    pub(super) paths: CommandPaths,
}

/// The counters of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct GatewayStats {
    /// The number of sessions that are open now.
    pub sessions: usize,
    /// The number of clients that have connected with Valkey Over RDMA.
    pub valkey_sessions: u64,
    /// The number of Ferrite peers that have connected.
    pub ferrite_sessions: u64,
    /// The number of other clients that have connected, all over TCP.
    pub tcp_sessions: u64,
    /// The number of clients that the gateway itself has rejected: beyond the maximum number of
    /// clients, by protected mode, or because a Valkey Over RDMA connection could not be set up.
    pub refused: u64,
    /// The number of clients that got no session because connecting to the engine failed, or
    /// because protected mode asked the engine whether it needs a password and got an error.
    pub engine_failures: u64,
    /// The number of sessions that were asked to end ([`Gateway::kill`], [`Gateway::kill_for`]).
    pub killed: u64,
    /// The number of bytes of commands that sessions have passed to the engine, proxied or called
    /// in-process.
    pub to_engine_bytes: u64,
    /// The number of bytes sent to clients.
    pub to_client_bytes: u64,
    /// The number of commands that were called in-process.
    pub called: u64,
    /// The number of commands of in-process sessions that went over their proxy connections.
    pub proxied: u64,
    /// The number of sessions that were pinned to the proxy path.
    pub pinned: u64,
    /// The number of sessions that were ended because all sessions together held more memory than
    /// the engine's `maxmemory-clients`.
    pub evicted: u64,
}

impl Gateway {
    /// Returns the counters of the gateway.
    #[must_use]
    pub fn stats(&self) -> GatewayStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters {
            valkey_sessions,
            ferrite_sessions,
            tcp_sessions,
            refused,
            engine_failures,
            paths,
        } = &*self.counters;
        let (to_engine_bytes, to_client_bytes) = self.sessions.moved();
        GatewayStats {
            sessions: self.sessions.count(),
            valkey_sessions: of(valkey_sessions),
            ferrite_sessions: of(ferrite_sessions),
            tcp_sessions: of(tcp_sessions),
            refused: of(refused),
            engine_failures: of(engine_failures),
            killed: of(&self.sessions.killed),
            to_engine_bytes,
            to_client_bytes,
            called: of(&paths.called),
            proxied: of(&paths.proxied),
            pinned: of(&paths.pinned),
            evicted: of(&self.sessions.evicted),
        }
    }
}
