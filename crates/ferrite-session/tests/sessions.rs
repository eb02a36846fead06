//! A test suite for sessions that runs on every provider. It covers Valkey Over RDMA between two
//! ends of our own, and clients of a real engine.
//!
//! A test is an async function of a [`Harness`], which tokio runs on two threads. Tests that
//! advance the clock use a runtime with one thread. There are two hosts, and each has its own
//! fabrics.

pub(crate) mod gateway;
pub(crate) mod hostile;
pub(crate) mod idle;
pub(crate) mod isolation;
pub(crate) mod rejections;
pub(crate) mod streams;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Fabric, ListenOptions, Listener, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream};
use ferrite_verbs::Verbs;
use tokio::runtime::{Builder, Runtime};

/// Longer than any test takes, even on the slowest kernel.
const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const HOSTS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// Two hosts that can reach each other. The first one listens.
#[derive(Clone)]
pub(crate) struct Harness {
    pub(crate) verbs: Verbs,
    /// The factor by which tests reduce their work on slow systems.
    pub(crate) slowdown: usize,
}

/// Runs a test, which must end within [`TIMEOUT`].
pub(crate) fn run(verbs: Verbs, slowdown: usize, test: impl AsyncFnOnce(Harness)) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    run_on(&runtime.expect("build the runtime"), Harness { verbs, slowdown }, async |harness| {
        tokio::time::timeout(TIMEOUT, test(harness)).await.expect("the test ends in time");
    });
}

/// Runs a test on the given runtime. On a runtime with one thread, the test can pause the clock.
pub(crate) fn run_on(runtime: &Runtime, harness: Harness, test: impl AsyncFnOnce(Harness)) {
    runtime.block_on(test(harness));
    // A fabric's driver ends by itself when the fabric has no users and no links.
    let begun = Instant::now();
    while runtime.metrics().num_alive_tasks() > 0 {
        assert!(begun.elapsed() < TIMEOUT, "fabric drivers did not end within {TIMEOUT:?}");
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(2)).await });
    }
}

impl Harness {
    /// Builds the fabric of a host, driven by the runtime. Clients that violate the protocol may
    /// reconnect at once.
    pub(crate) fn fabric(&self, host: usize) -> Fabric {
        self.fabric_with(host, Config { access_back_off: Duration::ZERO, ..Config::default() })
    }

    pub(crate) fn fabric_with(&self, host: usize, config: Config) -> Fabric {
        let config = Config { busy_poll_us: 0, ..config };
        let builder = Fabric::builder(&self.verbs).rdma(Rdma::Require).config(config);
        let fabric = builder.device(["rxe1", "rxe2"][host]).build().expect("build the fabric");
        tokio::spawn(fabric.drive());
        fabric
    }

    pub(crate) fn listen(&self, fabric: &Fabric) -> Listener {
        fabric
            .listen_with(any_port(0), &ListenOptions::new().accept_foreign_peers())
            .expect("listen")
    }

    /// Connects a client of Valkey Over RDMA.
    pub(crate) async fn connect(
        &self,
        fabric: &Fabric,
        to: SocketAddr,
        config: &ValkeyConfig,
    ) -> ValkeyStream {
        let options = ConnectOptions::new().local(any_port(1));
        let raw = fabric.connect_raw(to, &options).await.expect("connect");
        ValkeyStream::new(raw, Role::Client, config).expect("register a window")
    }
}

pub(crate) fn any_port(host: usize) -> SocketAddr {
    let ip: IpAddr = HOSTS[host].parse().expect("valid address");
    SocketAddr::new(ip, 0)
}

/// Returns bytes that differ from their neighbours, in a pattern that does not repeat every 256 or
/// 65,536 bytes.
pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (seed..seed + len).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
}

/// Makes every test of the suite a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(@ $run, streams:
            carries_bytes_in_both_directions,
            carries_data_through_tiny_windows,
            resizes_windows_to_the_clients_writes,
            shrinks_windows_when_memory_is_short,
            keeps_idle_connections,
            limits_a_slow_reader_to_its_window,
            delivers_data_before_the_end);
        run_suite!(@ $run, idle: survives_an_idle_hour, serves_a_client_blocked_for_an_hour);
        run_suite!(@ $run, gateway:
            runs_commands,
            carries_large_values,
            serves_many_clients,
            serves_ferrite_peers,
            serves_tcp_clients,
            detects_the_servers_protocol,
            survives_an_engine_restart,
            finishes_pending_commands_before_it_ends,
            does_not_wait_for_half_a_command);
        run_suite!(@ $run, rejections:
            tells_rejected_clients_why,
            late_writers_read_why_they_were_rejected,
            writers_of_too_large_values_read_why_they_were_rejected,
            reports_a_missing_engine,
            passes_the_engines_rejection_on);
        run_suite!(@ $run, isolation:
            protects_windows_from_other_clients,
            rejects_clients_that_guess_keys);
        run_suite!(@ $run, hostile:
            disconnects_clients_that_violate_the_protocol,
            accepts_tiny_writes,
            disconnects_clients_without_a_window);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::sessions::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
