//! One test suite for streams over every transport: what software written for TCP relies on.
//!
//! `lab_streams` runs it on Soft-RoCE devices in the lab's guest, `fake_streams` on the fake
//! provider, `tcp_streams` over TCP. A test is an async function that takes a [`StreamFixture`].
//! Tokio runs it on two threads, with a fabric on each of two hosts.

pub(crate) mod bytes;
pub(crate) mod ends;
pub(crate) mod pressure;
pub(crate) mod together;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ferrite_fabric::{Config, ConnectOptions, Fabric, Rdma, Stream, StreamListener};
use ferrite_testkit::wait::until_async;
use ferrite_testkit::{Random, until};
use ferrite_verbs::Verbs;

/// The limit for every test. Nothing takes this long, even on the slowest kernel.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

/// A device and the address at which it is reachable.
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
pub(crate) struct StreamFixture {
    /// The RDMA provider, or `None` to run over TCP.
    verbs: Option<Verbs>,
    hosts: [Host; 2],
    /// Divides the amount of work, for targets where everything is slower.
    pub(crate) work_divisor: usize,
}

/// A test of the suite.
pub(crate) trait Test: AsyncFnOnce(StreamFixture) {}
impl<F: AsyncFnOnce(StreamFixture)> Test for F {}

/// Runs a test, which must end within the time limit.
pub(crate) fn run(verbs: Option<Verbs>, hosts: [Host; 2], work_divisor: usize, test: impl Test) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let fixture = StreamFixture { verbs, hosts, work_divisor };
    runtime.block_on(async {
        tokio::time::timeout(TEST_TIMEOUT, test(fixture)).await.expect("the test ends in time");
    });
    // The drivers end by themselves when their fabric has no user and no link.
    until(TEST_TIMEOUT, "the end of all fabrics", || runtime.metrics().num_alive_tasks() == 0);
}

/// A stream from `a` to `b`, and their fabrics.
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

impl StreamFixture {
    pub(crate) fn is_tcp(&self) -> bool {
        self.verbs.is_none()
    }

    /// Builds two running fabrics, and a listener on the first host.
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
        let listener = StreamListener::bind(&b, b_host.any_port()).expect("listen");
        Fabrics { a, b, from: a_host.any_port(), listener }
    }

    pub(crate) async fn pair(&self) -> Pair {
        self.pair_with(&Config::default()).await
    }

    pub(crate) async fn pair_with(&self, config: &Config) -> Pair {
        let fabrics = self.fabrics(config);
        let [a, b] = fabrics.open_stream().await;
        Pair { a, b, fabrics }
    }
}

impl Fabrics {
    pub(crate) async fn open_stream(&self) -> [Stream; 2] {
        let (a, b) = futures_util::join!(self.connect(), self.listener.accept());
        [a.expect("connect"), b.expect("accept").0]
    }

    async fn connect(&self) -> io::Result<Stream> {
        self.connect_to(self.listener.local_addr()).await
    }

    pub(crate) async fn connect_to(&self, peer: SocketAddr) -> io::Result<Stream> {
        Stream::connect_with(&self.a, peer, &ConnectOptions::new().local(self.from)).await
    }

    pub(crate) fn connecting_fabric(&self) -> &Fabric {
        &self.a
    }

    /// Waits until no link is left, then checks that no send memory is in use and no request is in
    /// flight.
    pub(crate) async fn clear(self) {
        let Self { a, b, listener, .. } = self;
        drop(listener);
        for fabric in [a, b] {
            until_async("the end of all links", async || fabric.stats().links == 0).await;
            let stats = fabric.pool().stats();
            assert_eq!(stats.send.in_use_bytes, 0, "send memory was not returned");
            assert_eq!(fabric.stats().in_flight, 0, "requests are still in flight");
        }
    }
}

impl Pair {
    /// Drops both ends, then checks that nothing is left.
    pub(crate) async fn end(self) {
        let Self { a, b, fabrics } = self;
        drop((a, b));
        fabrics.clear().await;
    }
}

/// Returns bytes that depend on their position in the stream, starting at `from`.
pub(crate) fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len)
        .map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
        .collect()
}

/// Returns a random length up to `most`. Small lengths are as frequent as large ones.
pub(crate) fn length(random: &mut Random, most: usize) -> usize {
    let bits = random.index(most.ilog2() as usize + 1);
    1 + random.index((2 << bits).min(most))
}

/// Turns every test of the suite into a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(@ $run, bytes:
            every_size_arrives, random_sizes, writes_pool_buffers, vectored_writes,
            reads_without_copying, empty_reads_and_writes, ignores_messages_on_other_channels,
            samples_latency);
        run_suite!(@ $run, ends:
            half_close_both_ways, dropped_stream_delivers, dropped_write_half, dropped_read_half,
            reunites_halves_of_one_stream, abort_by_the_peer_is_an_error, local_abort_is_an_error,
            write_after_shutdown_fails, writer_fails_when_the_peer_leaves,
            refused_when_nobody_listens);
        run_suite!(@ $run, pressure:
            slow_reader_stops_the_writer, writer_waits_for_memory, works_without_free_memory,
            peer_accepts_only_small_messages, cancelling_loses_nothing);
        run_suite!(@ $run, together: both_ways_at_once, many_streams, relay, on_one_thread);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::streams::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
