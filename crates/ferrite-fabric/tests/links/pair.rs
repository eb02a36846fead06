//! Two fabrics on two hosts, both driven by hand from one thread, and a link between them.
//!
//! Every wait has a deadline. A future is polled again only after its waker was called, so that a
//! lost wake-up fails the test.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::{Buf, BufMut, Pool};
use ferrite_fabric::{Config, ConnectOptions, Connecting, Error, Fabric, Link, Listener, Message};
use futures_util::join;

use super::{Fixture, Host, TEST_TIMEOUT};

/// One end of a link.
pub(crate) struct End {
    pub(crate) fabric: Fabric,
    pub(crate) link: Link,
}

/// Both ends of a link: `a` connected, `b` accepted.
pub(crate) struct Pair {
    pub(crate) a: End,
    pub(crate) b: End,
    pub(crate) listener: Listener,
}

impl Pair {
    pub(crate) fn new(fixture: &Fixture) -> Self {
        Self::with(fixture, &Config::default())
    }

    pub(crate) fn with(fixture: &Fixture, config: &Config) -> Self {
        Self::of(fixture, config, config)
    }

    /// Gives each fabric settings of its own.
    pub(crate) fn of(fixture: &Fixture, a: &Config, b: &Config) -> Self {
        let [b_host, a_host] = &fixture.hosts;
        let (a, b) = (fixture.fabric(a_host, a), fixture.fabric(b_host, b));
        let mut listener = b.listen(b_host.any_port()).expect("listen");
        let [a_link, b_link] = open_link(&a, a_host, &b, &mut listener);
        Self { a: End { fabric: a, link: a_link }, b: End { fabric: b, link: b_link }, listener }
    }

    /// Opens another link between the two fabrics.
    pub(crate) fn another(&mut self, fixture: &Fixture) -> [Link; 2] {
        open_link(&self.a.fabric, &fixture.hosts[1], &self.b.fabric, &mut self.listener)
    }

    pub(crate) fn drive<F: Future>(&self, future: F) -> F::Output {
        drive(&[&self.a.fabric, &self.b.fabric], future)
    }

    pub(crate) fn until(&self, what: &str, condition: impl FnMut() -> bool) {
        until(&[&self.a.fabric, &self.b.fabric], what, condition);
    }

    /// Drives both fabrics for a while.
    pub(crate) fn run_for(&self, time: Duration) {
        run_for(&[&self.a.fabric, &self.b.fabric], time);
    }

    /// Returns `(from, to)` for both directions.
    pub(crate) fn directions(&self) -> [(&End, &End); 2] {
        [(&self.a, &self.b), (&self.b, &self.a)]
    }

    /// Waits for the next message at `to`.
    pub(crate) fn receive(&self, to: &End) -> Message {
        self.drive(to.link.recv()).expect("a message")
    }

    /// Closes both ends of the link cleanly, then checks that nothing is left.
    pub(crate) fn end(self) {
        let (a, b) = self.drive(async { join!(self.a.link.close(), self.b.link.close()) });
        assert!(a.is_ok() && b.is_ok(), "closing: {a:?}, {b:?}");
        self.clear();
    }

    /// Drops everything, whatever the state of the link, then checks that nothing is left.
    pub(crate) fn clear(self) {
        let Self { a, b, listener } = self;
        drop((a.link, b.link, listener));
        clear([a.fabric, b.fabric]);
    }
}

/// Waits until the fabrics, which have no users any more, have no links left. Then drops them and
/// checks that all memory was returned.
pub(crate) fn clear<const N: usize>(fabrics: [Fabric; N]) {
    let driven: Vec<&Fabric> = fabrics.iter().collect();
    until(&driven, "no link is left", || fabrics.iter().all(|fabric| fabric.stats().links == 0));
    for fabric in &fabrics {
        assert_eq!(fabric.stats().in_flight, 0, "requests are still in flight");
    }
    let pools = fabrics.map(|fabric| fabric.pool().clone());
    for pool in &pools {
        assert_unused(pool);
    }
}

pub(crate) fn assert_unused(pool: &Pool) {
    let stats = pool.stats();
    let left = (stats.send.in_use_bytes, stats.receive.in_use_bytes, stats.quarantined_bytes);
    assert_eq!(left, (0, 0, 0), "memory was not returned: {stats:?}");
}

/// Starts a connect from `host`, over the device of that host.
pub(crate) fn connect(from: &Fabric, host: &Host, to: &Listener) -> Connecting {
    from.connect_with(to.local_addr(), &ConnectOptions::new().local(host.any_port()))
}

/// Opens a link from `a` on `host` to `b`, and returns both ends.
pub(crate) fn open_link(a: &Fabric, host: &Host, b: &Fabric, listener: &mut Listener) -> [Link; 2] {
    let calling = connect(a, host, listener);
    let (a, b) = drive(&[a, b], async { join!(calling, listener.accept()) });
    [a.expect("connect"), b.expect("accept")]
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Drives fabrics until a future is ready.
pub(crate) fn drive<F: Future>(fabrics: &[&Fabric], future: F) -> F::Output {
    let flag = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&flag));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        if flag.0.swap(false, Ordering::AcqRel)
            && let Poll::Ready(output) = future.as_mut().poll(&mut context)
        {
            return output;
        }
        if pass(fabrics) == 0 && Instant::now() > deadline {
            let ready = future.as_mut().poll(&mut context).is_ready();
            assert!(!ready, "a future is ready, but its waker was not called");
            let stats: Vec<_> = fabrics.iter().map(|fabric| fabric.stats()).collect();
            panic!("a future was not ready within the time limit: {stats:#?}");
        }
    }
}

/// Polls each fabric once and yields if there was nothing to do: the lab's guest has few CPUs, and
/// one of them emulates the device.
pub(crate) fn pass(fabrics: &[&Fabric]) -> usize {
    let done = fabrics.iter().map(|fabric| fabric.poll()).sum();
    if done == 0 {
        std::thread::yield_now();
    }
    done
}

/// Drives fabrics until a condition holds.
pub(crate) fn until(fabrics: &[&Fabric], what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !condition() {
        if pass(fabrics) == 0 && Instant::now() > deadline {
            let stats: Vec<_> = fabrics.iter().map(|fabric| fabric.stats()).collect();
            panic!("not within the time limit: {what}: {stats:#?}");
        }
    }
}

/// Drives fabrics for a while.
pub(crate) fn run_for(fabrics: &[&Fabric], time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        pass(fabrics);
    }
}

/// Polls a future once.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    match std::pin::Pin::new(future).poll(&mut context) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Returns bytes that depend on the position and on `seed`.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    pattern_from(seed, 0, len)
}

/// Returns `len` bytes of [`pattern`] from `offset` on. The offset is a multiple of 8.
pub(crate) fn pattern_from(seed: u64, offset: usize, len: usize) -> Vec<u8> {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(len + 8);
    let mut at = (seed.wrapping_mul(STEP) | 1).wrapping_add(STEP.wrapping_mul(offset as u64 / 8));
    while bytes.len() < len {
        at = at.wrapping_add(STEP);
        bytes.extend_from_slice(&(at ^ at >> 29).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Returns a buffer with these bytes.
pub(crate) fn buffer(fabric: &Fabric, bytes: &[u8]) -> BufMut {
    let mut buf = fabric.buffer(bytes.len()).expect("memory");
    buf.copy_from_slice(bytes);
    buf
}

/// Returns a buffer with these bytes that is ready to be sent.
pub(crate) fn filled(fabric: &Fabric, bytes: &[u8]) -> Buf {
    buffer(fabric, bytes).freeze()
}

/// Returns the error of an operation that must fail.
pub(crate) fn failed<T>(result: Result<T, Error>, what: &str) -> Error {
    result.err().unwrap_or_else(|| panic!("should have failed: {what}"))
}
