//! What clients, troubles and whoever watches have in common.

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
    /// Read by whoever works on keys; written to empty them.
    pub(crate) flow: tokio::sync::RwLock<()>,
    /// How often everything was emptied.
    pub(crate) flushes: AtomicU64,
    /// Which of the two engines takes writes.
    pub(crate) primary: AtomicUsize,
    /// By engine.
    pub(crate) sockets: [PathBuf; 2],
    pub(crate) rdma: [SocketAddr; 2],
    pub(crate) tcp: [SocketAddr; 2],
    /// The clients' side.
    pub(crate) local: SocketAddr,
    pub(crate) fabric: Fabric,
    pub(crate) connector: Connector,
    /// That goes over TCP if need be.
    pub(crate) yielding: Connector,
    /// By client: its next connection ends in the middle.
    pub(crate) interrupts: Vec<AtomicBool>,
    pub(crate) over: AtomicBool,
    /// When the wire was last mended, and what was done last.
    pub(crate) cut: Mutex<Option<Instant>>,
    pub(crate) trouble: Mutex<String>,
    pub(crate) commands: AtomicU64,
    pub(crate) checked: AtomicU64,
    /// Connections that ended in the middle.
    pub(crate) settled: AtomicU64,
    pub(crate) refusals: AtomicU64,
    pub(crate) connected: AtomicU64,
    pub(crate) unconnected: AtomicU64,
    /// Why the last of them failed, by way.
    pub(crate) failures: Mutex<BTreeMap<Way, String>>,
    /// How often peers came that break rules, and how many of them were refused because of those
    /// before.
    pub(crate) hostile_rounds: AtomicU64,
    pub(crate) turned_away: AtomicU64,
    /// The longest that an engine took to give up a connection.
    pub(crate) longest_ms: AtomicU64,
}

impl World {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    pub(crate) fn was_cut_since(&self, begun: Instant) -> bool {
        self.cut.lock().expect("no panic").is_some_and(|mended| mended >= begun)
    }

    /// For who looks at a failure.
    pub(crate) fn state(&self) -> String {
        let failures = self.failures.lock().expect("no panic");
        format!("during: {}; last failures: {failures:?}", self.trouble.lock().expect("no panic"))
    }
}
