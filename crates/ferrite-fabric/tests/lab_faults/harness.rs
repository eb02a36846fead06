//! Fabrics on threads of their own, waits with deadlines, and checks for leaks.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_verbs::{Verbs, cm};

/// Device and address of the peer and of the local host.
pub(crate) const HOSTS: [(&str, &str); 2] = [PEER, OWN];
pub(crate) const PEER: (&str, &str) = ("rxe1", "10.0.0.1");
pub(crate) const OWN: (&str, &str) = ("rxe2", "10.0.0.2");
/// Longer than anything here takes without a fault, on the slowest kernel.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn verbs() -> Verbs {
    Verbs::system().expect("rdma-core")
}

/// Returns the factor for deadlines: 1 on User-Mode Linux, more where everything is emulated and
/// slower.
pub(crate) fn slowdown() -> u32 {
    if std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml") { 4 } else { 1 }
}

/// Returns an address of a host with a port that the system picks.
pub(crate) fn any_port((_, ip): (&str, &str)) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), 0)
}

/// Returns settings under which a dead or stalled peer is detected within `stalled_after`, instead
/// of a quarter of a minute.
pub(crate) fn short_timeouts() -> Config {
    Config {
        keepalive: Duration::from_secs(1) * slowdown(),
        peer_timeout: Duration::from_secs(1) * slowdown(),
        close_timeout: Duration::from_secs(1) * slowdown(),
        ..Config::default()
    }
}

/// Returns how long it takes at most to give up a silent peer: until the keepalive, and then until
/// the time for an answer is over.
pub(crate) fn stalled_after(config: &Config) -> Duration {
    // The accepting side waits a third longer before it sends a keepalive.
    config.keepalive * 4 / 3 + config.peer_timeout
}

/// Runs a future on this thread with a time limit. The fabrics are driven by threads of their own.
#[track_caller]
pub(crate) fn within<F: Future>(limit: Duration, what: &str, future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let deadline = Instant::now() + limit;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "{what}: not ready after {limit:?}");
        std::thread::park_timeout(left);
    }
}

/// Waits until `condition` holds, with a time limit.
#[track_caller]
pub(crate) fn until(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not so after {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the result of a thread, which must end within the time limit.
#[track_caller]
pub(crate) fn join<T>(thread: JoinHandle<T>, limit: Duration, what: &str) -> T {
    until(limit, what, || thread.is_finished());
    thread.join().unwrap_or_else(|_| panic!("{what}: the thread panicked"))
}

/// A fabric, and the thread that drives it.
pub(crate) struct Host {
    pub(crate) fabric: Fabric,
    driver: JoinHandle<()>,
}

impl Host {
    pub(crate) fn new(devices: &[&str], config: Config) -> Self {
        let builder = devices
            .iter()
            .fold(Fabric::builder(&verbs()).rdma(Rdma::Require), |builder, device| {
                builder.device(*device)
            });
        let fabric = builder.config(config).build().expect("a fabric");
        let driver = fabric.spawn_thread().expect("a thread");
        Self { fabric, driver }
    }

    /// Checks that nothing is left of the links, which were all dropped, and that the fabric ends.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { fabric, driver } = self;
        // The close timeout, plus 2 s to give up requests in flight, after which links are removed
        // by force.
        let limit = fabric.config().close_timeout + Duration::from_secs(4) * slowdown();
        until(limit, "links are gone", || fabric.stats().links == 0);
        let stats = fabric.stats();
        // In all tests a receive fills its block exactly.
        let posted = stats.receives_posted * u64::from(fabric.config().recv_buffer_size);
        assert_eq!(stats.memory.receive.in_use_bytes, posted, "receive memory: {stats:?}");
        assert_eq!(stats.memory.send.in_use_bytes, 0, "send memory: {stats:?}");
        assert_eq!((stats.in_flight, stats.memory.quarantined_bytes), (0, 0), "{stats:?}");
        drop(fabric);
        join(driver, TEST_TIMEOUT, "the driver thread ends");
    }
}

/// Checks at the end of a test that the kernel and this process hold no more RDMA objects than
/// before.
pub(crate) struct LeakCheck(BTreeMap<String, u64>);

impl LeakCheck {
    pub(crate) fn begin() -> Self {
        Self::with(&HOSTS)
    }

    /// Starts the check for tests that use only these devices. librdmacm keeps devices open once it
    /// has opened them, so it opens them here.
    pub(crate) fn with(hosts: &[(&str, &str)]) -> Self {
        for host in hosts.iter().copied() {
            drop(cm::Listener::bind(&verbs(), any_port(host), 1).expect("a listener"));
        }
        Self(resources())
    }

    /// Checks that nothing is left after everything was dropped. Fewer objects than at the start
    /// are fine: an earlier test may have released its objects meanwhile.
    #[track_caller]
    pub(crate) fn end(self) {
        let left = || -> Vec<(String, u64)> {
            let more =
                |(what, count): &(String, u64)| *count > self.0.get(what).copied().unwrap_or(0);
            resources().into_iter().filter(more).collect()
        };
        // Identifiers linger in timewait, and the objects of a killed process disappear after the
        // process.
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !left().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(left(), [], "more than at the start: {:?}", self.0);
        assert_eq!(ferrite_verbs::leaked_objects(), 0, "some objects could not be released");
    }
}

/// Returns the counts that must not grow when a program uses its device again: file descriptors,
/// and objects on the device except memory regions (pools grow).
pub(crate) fn held_on(device: &str) -> BTreeMap<String, u64> {
    let counts = |what: &str| what.starts_with(device) && !what.ends_with(" mr") || what == "fds";
    resources().into_iter().filter(|(what, _)| counts(what)).collect()
}

/// Returns the kernel's objects by device and kind ("rxe1 qp" → 1), and our file descriptors.
fn resources() -> BTreeMap<String, u64> {
    let out = Command::new("rdma").args(["resource", "show"]).output().expect("rdma");
    let text = String::from_utf8(out.stdout).expect("text");
    // 0: rxe1: qp 1 cq 0 pd 0 mr 0 ctx 0 srq 0 cm_id 0
    let mut held = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(1);
        let device = words.next().expect("a device").trim_end_matches(':').to_owned();
        while let (Some(kind), Some(count)) = (words.next(), words.next()) {
            held.insert(format!("{device} {kind}"), count.parse().expect("a count"));
        }
    }
    let fds = std::fs::read_dir("/proc/self/fd").expect("fds").count() as u64;
    held.insert("fds".to_owned(), fds);
    held
}
