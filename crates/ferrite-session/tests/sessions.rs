//! One suite for sessions on every provider: Valkey's protocol between two of our own ends, and
//! clients before a real engine.
//!
//! A test is an async function of a [`Scene`], run by tokio on two threads, with a fabric on each
//! of two hosts.

pub(crate) mod gateway;
pub(crate) mod hostile;
pub(crate) mod idle;
pub(crate) mod isolation;
#[path = "redis_server.rs"]
pub(crate) mod redis_server;
pub(crate) mod streams;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Fabric, ListenOptions, Listener, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream};
use ferrite_verbs::Verbs;
pub(crate) use redis_server::Redis;
use tokio::runtime::{Builder, Runtime};

/// Longer than anything here takes, on the slowest kernel.
const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const HOSTS: [&str; 2] = ["10.0.0.1", "10.0.0.2"];

/// Two hosts that can reach each other: the first listens.
#[derive(Clone)]
pub(crate) struct Scene {
    pub(crate) verbs: Verbs,
    /// How much less is to be done where everything takes longer.
    pub(crate) slower: usize,
}

/// Runs a test, which must end in time.
pub(crate) fn run(verbs: Verbs, slower: usize, test: impl AsyncFnOnce(Scene)) {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    run_on(&runtime.expect("a runtime"), Scene { verbs, slower }, async |scene| {
        tokio::time::timeout(PATIENCE, test(scene)).await.expect("in time");
    });
}

/// The same on another kind of runtime, whose clock may be moved.
pub(crate) fn run_on(runtime: &Runtime, scene: Scene, test: impl AsyncFnOnce(Scene)) {
    runtime.block_on(test(scene));
    // Drivers end by themselves when their fabric has no user and no link.
    let begun = Instant::now();
    while runtime.metrics().num_alive_tasks() > 0 {
        assert!(begun.elapsed() < PATIENCE, "fabrics that do not end");
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(2)).await });
    }
}

impl Scene {
    /// The fabric of a host, driven by the runtime. Who breaks the rules may come back.
    pub(crate) fn fabric(&self, host: usize) -> Fabric {
        self.fabric_with(host, Config { access_back_off: Duration::ZERO, ..Config::default() })
    }

    pub(crate) fn fabric_with(&self, host: usize, config: Config) -> Fabric {
        let config = Config { busy_poll_us: 0, ..config };
        let builder = Fabric::builder(&self.verbs).rdma(Rdma::Require).config(config);
        let fabric = builder.device(["rxe1", "rxe2"][host]).build().expect("a fabric");
        tokio::spawn(fabric.drive());
        fabric
    }

    pub(crate) fn listen(&self, fabric: &Fabric) -> Listener {
        fabric
            .listen_with(any_port(0), &ListenOptions::new().accept_foreign_peers())
            .expect("listen")
    }

    /// A client of Valkey's protocol.
    pub(crate) async fn call(
        &self,
        fabric: &Fabric,
        to: SocketAddr,
        config: &ValkeyConfig,
    ) -> ValkeyStream {
        let options = ConnectOptions::new().local(any_port(1));
        let raw = fabric.connect_raw(to, &options).await.expect("connected");
        ValkeyStream::new(raw, Role::Client, config).expect("a window")
    }
}

pub(crate) fn any_port(host: usize) -> SocketAddr {
    let ip: IpAddr = HOSTS[host].parse().expect("an address");
    SocketAddr::new(ip, 0)
}

/// Bytes that differ from their neighbours, and at every place.
pub(crate) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (seed..seed + len).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
}

/// Makes every test of the suite a test of the calling target.
macro_rules! run_suite {
    ($run:path) => {
        run_suite!(@ $run, streams: both_ways, windows_smaller_than_messages, windows_follow_what_comes, windows_share_the_memory, idle_ones_stay, slow_reader, the_end);
        run_suite!(@ $run, idle: an_hour, an_hour_before_the_gateway);
        run_suite!(@ $run, gateway: commands, large_values, many_clients, ferrite_peers, tcp_clients, sessions_find_their_way, refusals, engine_restarts, drains, half_a_command_does_not_hold_the_end);
        run_suite!(@ $run, isolation: anothers_window_is_out_of_reach, who_guesses_is_turned_away);
        run_suite!(@ $run, hostile: rules_are_broken, tiny_writes, half_open);
    };
    (@ $run:path, $module:ident: $($test:ident),*) => {
        mod $module {
            $(#[test] fn $test() { $run(crate::sessions::$module::$test); })*
        }
    };
}
pub(crate) use run_suite;
