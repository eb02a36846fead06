//! The state that clients, faults and the monitor share.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use ferrite_fabric::Fabric;
use ferrite_session::Connector;

use crate::client::Way;

pub(crate) struct World {
    /// Clients hold a read lock while they use keys; FLUSHALL holds the write lock.
    pub(crate) flow: tokio::sync::RwLock<()>,
    /// How often FLUSHALL has run.
    pub(crate) flushes: AtomicU64,
    /// The index of the engine that accepts writes.
    pub(crate) primary: AtomicUsize,
    /// The Unix sockets of the engines.
    pub(crate) sockets: [PathBuf; 2],
    pub(crate) rdma: [SocketAddr; 2],
    pub(crate) tcp: [SocketAddr; 2],
    /// The clients' local address.
    pub(crate) local: SocketAddr,
    pub(crate) fabric: Fabric,
    pub(crate) connector: Connector,
    /// A connector that falls back to TCP.
    pub(crate) falling_back: Connector,
    /// For each client, whether its current connection is to be broken off.
    pub(crate) interrupts: Vec<AtomicBool>,
    pub(crate) over: AtomicBool,
    /// When the wire was last restored.
    pub(crate) cut: Mutex<Option<Instant>>,
    /// The current fault, or the last one.
    pub(crate) fault: Mutex<String>,
    pub(crate) commands: AtomicU64,
    pub(crate) checked: AtomicU64,
    /// Number of connections that were lost in the middle of commands.
    pub(crate) settled: AtomicU64,
    pub(crate) refusals: AtomicU64,
    pub(crate) connected: AtomicU64,
    /// Number of failed attempts to connect.
    pub(crate) unconnected: AtomicU64,
    /// The last failure to connect, by transport.
    pub(crate) failures: Mutex<BTreeMap<Way, String>>,
    /// The number of rounds in which peers violated the protocol.
    pub(crate) hostile_rounds: AtomicU64,
    /// How many of these peers were rejected because of earlier violations.
    pub(crate) rejected: AtomicU64,
    /// The longest time that an engine took to give up a connection.
    pub(crate) longest_ms: AtomicU64,
}

impl World {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    pub(crate) fn was_cut_since(&self, start: Instant) -> bool {
        self.cut.lock().expect("no panic").is_some_and(|restored| restored >= start)
    }

    /// Describes the current fault and the last failures, for messages about a failed test.
    pub(crate) fn state(&self) -> String {
        let failures = self.failures.lock().expect("no panic");
        format!("during: {}; last failures: {failures:?}", self.fault.lock().expect("no panic"))
    }
}
