//! One suite for streams on every provider: what software that knows TCP relies on.
//!
//! `lab_streams` runs it on Soft-RoCE devices in the lab's guest, `fake_streams` on the fake
//! provider, `tcp_streams` over TCP. A test is an async function of a [`Scene`], run by tokio on
//! two threads, with a fabric on each of two hosts.

pub(crate) mod bytes;
pub(crate) mod ends;
pub(crate) mod pressure;
pub(crate) mod together;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Fabric, Rdma, Stream, StreamListener};
use ferrite_verbs::Verbs;

/// Longer than anything here takes, on the slowest kernel.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

/// A device and the address it is reached by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host {
    pub(crate) device: &'static str,
    pub(crate) ip: IpAddr,
}

impl Host {
    pub(crate) fn new(device: &'static str, ip: &str) -> Self {
        Self { device, ip: ip.parse().expect("an address") }
    }

    fn any_port(&self) -> SocketAddr {
        SocketAddr::new(self.ip, 0)
    }
}

/// Two hosts that can reach each other.
#[derive(Clone)]
pub(crate) struct Scene {
    /// None: over TCP.
    verbs: Option<Verbs>,
    hosts: [Host; 2],
    /// How much less is to be done where everything takes longer.
    pub(crate) work_divisor: usize,
}

/// A test of the suite.
pub(crate) trait Test: AsyncFnOnce(Scene) {}
impl<F: AsyncFnOnce(Scene)> Test for F {}

/// Runs a test, which must end in time.
pub(crate) fn run(verbs: Option<Verbs>, hosts: [Host; 2], work_divisor: usize, test: impl Test) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let scene = Scene { verbs, hosts, work_divisor };
    runtime.block_on(async {
        tokio::time::timeout(TEST_TIMEOUT, test(scene)).await.expect("in time")
    });
    // Drivers end by themselves when their fabric has no user and no link.
    let begun = Instant::now();
    while runtime.metrics().num_alive_tasks() > 0 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "fabrics that do not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A stream from `a` to `b`, and the fabrics.
pub(crate) struct Pair {
    pub(crate) a: Stream,
    pub(crate) b: Stream,
    pub(crate) fabrics: Fabrics,
}

pub(crate) struct Fabrics {
    a: Fabric,
    b: Fabric,
    from: SocketAddr,
    pub(crate) listener: StreamListener,
}

impl Scene {
    pub(crate) fn is_tcp(&self) -> bool {
        self.verbs.is_none()
    }

    /// Fabrics that run, and a listener on the first host.
    pub(crate) fn fabrics(&self, config: &Config) -> Fabrics {
        let [b_host, a_host] = &self.hosts;
        let [a, b] = [a_host, b_host].map(|host| {
            let builder = match &self.verbs {
                Some(verbs) => Fabric::builder(verbs).rdma(Rdma::Require).device(host.device),
                None => Fabric::system().rdma(Rdma::Forbid),
            };
            let fabric = builder.config(config.clone()).build();
            let fabric = fabric.expect("a fabric");
            tokio::spawn(fabric.drive());
            fabric
        });
        let listener = StreamListener::bind(&b, b_host.any_port()).expect("to listen");
        Fabrics { a, b, from: a_host.any_port(), listener }
    }

    pub(crate) async fn pair(&self) -> Pair {
        self.pair_with(&Config::default()).await
    }

    pub(crate) async fn pair_with(&self, config: &Config) -> Pair {
        let fabrics = self.fabrics(config);
        let [a, b] = fabrics.meet().await;
        Pair { a, b, fabrics }
    }
}

impl Fabrics {
    pub(crate) async fn meet(&self) -> [Stream; 2] {
        let (a, b) = futures_util::join!(self.call(), self.listener.accept());
        [a.expect("connect"), b.expect("accept").0]
    }

    async fn call(&self) -> io::Result<Stream> {
        self.call_at(self.listener.local_addr()).await
    }

    pub(crate) async fn call_at(&self, peer: SocketAddr) -> io::Result<Stream> {
        Stream::connect_with(&self.a, peer, &ConnectOptions::new().local(self.from)).await
    }

    pub(crate) fn of_caller(&self) -> &Fabric {
        &self.a
    }

    /// WaitSet until no link is left; then no memory may be.
    pub(crate) async fn clear(self) {
        let Self { a, b, listener, .. } = self;
        drop(listener);
        for fabric in [a, b] {
            while fabric.stats().links > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let stats = fabric.pool().stats();
            assert_eq!(stats.send.in_use_bytes, 0, "memory of sends that nobody gave back");
            assert_eq!(fabric.stats().in_flight, 0, "requests that nobody waits for");
        }
    }
}

impl Pair {
    /// Drops both ends; then nothing may be left.
    pub(crate) async fn end(self) {
        let Self { a, b, fabrics } = self;
        drop((a, b));
        fabrics.clear().await;
    }
}

/// Bytes that differ by their place in the stream, from a place on.
pub(crate) fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len)
        .map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
        .collect()
}

/// Numbers that choose an order, and can be replayed by their seed: xorshift64*.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }

    /// A length up to `most`, small ones as often as large ones.
    pub(crate) fn length(&mut self, most: usize) -> usize {
        let bits = self.below(most.ilog2() as usize + 1);
        1 + self.below((2 << bits).min(most))
    }
}

/// Makes every test of the suite a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(@ $run, bytes:
            of_every_size, random_sizes, from_where_it_lies, vectored, without_a_copy, nothing_is_nothing, other_channels_are_not_bytes);
        run_suite!(@ $run, ends:
            half_close_both_ways, dropped_stream_delivers, dropped_write_half, dropped_read_half, reunited,
            aborted_is_no_end, aborted_here, writing_after_the_end, writing_to_nobody, nobody_listens);
        run_suite!(@ $run, pressure:
            slow_reader_stops_the_writer, memory_runs_out, others_have_the_memory, small_messages_only, cancelled);
        run_suite!(@ $run, together:
            both_ways_at_once, many_streams, relay, on_one_thread);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::streams::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
