//! Fabrics on the lab's hosts, driven by threads of their own.

use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_fabric::{Config, Fabric, Rdma};

use super::{TEST_TIMEOUT, slowdown, verbs};
use crate::wait::{join, until};

/// Returns settings with which a dead or stalled peer is detected within [`stalled_after`]. This is
/// sooner than the 18 s of the default settings.
#[must_use]
pub fn short_timeouts() -> Config {
    Config {
        keepalive: Duration::from_secs(1) * slowdown(),
        peer_timeout: Duration::from_secs(1) * slowdown(),
        close_timeout: Duration::from_secs(1) * slowdown(),
        ..Config::default()
    }
}

/// Returns the longest time until a fabric gives up a silent peer: the time until the keepalive,
/// plus the time for an answer.
#[must_use]
pub fn stalled_after(config: &Config) -> Duration {
    // The accepting side waits a third longer before it sends a keepalive.
    config.keepalive * 4 / 3 + config.peer_timeout
}

/// A fabric, and the thread that drives it.
#[derive(Debug)]
pub struct Host {
    /// The fabric, which requires RDMA.
    pub fabric: Fabric,
    driver: JoinHandle<()>,
}

impl Host {
    /// Builds a fabric on these devices, and starts the thread that drives it.
    ///
    /// # Panics
    /// If the devices cannot be used, or the thread cannot be started.
    #[must_use]
    pub fn new(devices: &[&str], config: Config) -> Self {
        let builder = devices
            .iter()
            .fold(Fabric::builder(&verbs()).rdma(Rdma::Require), |builder, device| {
                builder.device(*device)
            });
        let fabric = builder.config(config).build().expect("a fabric");
        let driver = fabric.spawn_thread().expect("a thread");
        Self { fabric, driver }
    }

    /// Checks that no resources of the links are left, and that the fabric ends. The caller must
    /// have dropped all links.
    ///
    /// # Panics
    /// If a resource is left, or if the links or the driver thread do not end in time.
    #[track_caller]
    pub fn finish(self) {
        let Self { fabric, driver } = self;
        // Links close within the close timeout. Links whose requests are still in flight 2 s later
        // are removed by force. Another 2 s are a margin.
        let limit = fabric.config().close_timeout + Duration::from_secs(4) * slowdown();
        until(limit, "links are gone", || fabric.stats().links == 0);
        let stats = fabric.stats();
        // In all tests, a receive buffer fills its block of memory exactly.
        let posted = stats.receives_posted * u64::from(fabric.config().recv_buffer_size);
        assert_eq!(stats.memory.receive.in_use_bytes, posted, "receive memory is left: {stats:?}");
        assert_eq!(stats.memory.send.in_use_bytes, 0, "send memory is left: {stats:?}");
        assert_eq!((stats.in_flight, stats.memory.quarantined_bytes), (0, 0), "{stats:?}");
        drop(fabric);
        join(driver, TEST_TIMEOUT, "the thread that drives the fabric ends");
    }
}
