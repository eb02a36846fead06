//! Fabrics on threads of their own, waits with deadlines, and what must not be left over.

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

/// The peer's, then the own: device and address.
pub(crate) const HOSTS: [(&str, &str); 2] = [PEER, OWN];
pub(crate) const PEER: (&str, &str) = ("rxe1", "10.0.0.1");
pub(crate) const OWN: (&str, &str) = ("rxe2", "10.0.0.2");
/// Longer than anything here takes that is not a fault, on the slowest kernel.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn verbs() -> Verbs {
    Verbs::system().expect("rdma-core")
}

/// Where everything is emulated it takes longer: what is a deadline on User-Mode Linux is
/// multiplied by this.
pub(crate) fn pace() -> u32 {
    if std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml") { 4 } else { 1 }
}

/// An address of a host with a port that the system picks.
pub(crate) fn any_port((_, ip): (&str, &str)) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), 0)
}

/// Settings under which a dead or stuck peer is found within `stalled_after`, not within a quarter
/// of a minute.
pub(crate) fn quick() -> Config {
    Config {
        keepalive: Duration::from_secs(1) * pace(),
        peer_timeout: Duration::from_secs(1) * pace(),
        close_timeout: Duration::from_secs(1) * pace(),
        ..Config::default()
    }
}

/// When a silent peer is given up at the latest: it is asked after one time, and waited for during
/// the other.
pub(crate) fn stalled_after(config: &Config) -> Duration {
    // the called side waits a third longer before it asks
    config.keepalive * 4 / 3 + config.peer_timeout
}

/// Runs a future on this thread; it must end in time. Fabrics are driven by their own threads.
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
        assert!(!left.is_zero(), "{what}: nothing after {limit:?}");
        std::thread::park_timeout(left);
    }
}

/// WaitSet until `condition`; it must come in time.
#[track_caller]
pub(crate) fn until(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not after {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The result of a thread; it must end in time.
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

    /// All links were let go of: nothing of them is left, and the fabric ends.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { fabric, driver } = self;
        // The time to close, and that to give up what is in flight (2 s), after which links are
        // gone by force.
        let limit = fabric.config().close_timeout + Duration::from_secs(4) * pace();
        until(limit, "links are gone", || fabric.stats().links == 0);
        let stats = fabric.stats();
        // A receive lies in a block that fits it, and no test has other receives than of whole
        // blocks.
        let posted = stats.receives_posted * u64::from(fabric.config().recv_buffer_size);
        assert_eq!(stats.memory.receive.in_use_bytes, posted, "receive memory: {stats:?}");
        assert_eq!(stats.memory.send.in_use_bytes, 0, "send memory: {stats:?}");
        assert_eq!((stats.in_flight, stats.memory.quarantined_bytes), (0, 0), "{stats:?}");
        drop(fabric);
        join(driver, TEST_TIMEOUT, "the fabric's thread ends");
    }
}

/// What the kernel and this process held for RDMA when the test began.
pub(crate) struct Clean(BTreeMap<String, u64>);

impl Clean {
    pub(crate) fn begin() -> Self {
        Self::with(&HOSTS)
    }

    /// Where only these devices are used. librdmacm keeps devices open once it has opened them:
    /// here, not later.
    pub(crate) fn with(hosts: &[(&str, &str)]) -> Self {
        for host in hosts.iter().copied() {
            drop(cm::Listener::bind(&verbs(), any_port(host), 1).expect("a listener"));
        }
        Self(resources())
    }

    /// Everything was dropped: nothing is left. (Less than at the start is well: a test before has
    /// let go meanwhile.)
    #[track_caller]
    pub(crate) fn end(self) {
        let left = || -> Vec<(String, u64)> {
            let more =
                |(what, count): &(String, u64)| *count > self.0.get(what).copied().unwrap_or(0);
            resources().into_iter().filter(more).collect()
        };
        // Identifiers linger in timewait, and the objects of a killed process go after it.
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !left().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(left(), [], "more than at the start: {:?}", self.0);
        assert_eq!(ferrite_verbs::leaked_objects(), 0, "everything could be released");
    }
}

/// What a program cannot have more of by using its device again: objects on a device, except memory
/// regions (pools grow), and file descriptors.
pub(crate) fn held_on(device: &str) -> BTreeMap<String, u64> {
    let counts = |what: &str| what.starts_with(device) && !what.ends_with(" mr") || what == "fds";
    resources().into_iter().filter(|(what, _)| counts(what)).collect()
}

/// What the kernel holds, by kind ("rxe1 qp" → 1), and our file descriptors.
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
