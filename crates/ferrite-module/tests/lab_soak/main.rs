//! Mixed load on an engine with the module and on its replica, with one fault after another, in the
//! lab's guest. The test takes half a minute by default. For an hour: `cargo xtask lab-test
//! lab_soak --timeout 4000 --runner "env FERRITE_SOAK=3600" -- --no-capture`. FERRITE_SEED repeats
//! the order of an earlier run.
//!
//! ```text
//!   10.0.0.1 (rxe1)     engine 0 ◄── replication, either way ──► engine 1, each with the module
//!   10.0.0.2 (rxe2)     clients: Ferrite peers, Valkey Over RDMA, TCP; each has its own keys and
//!                       a model of them
//!   10.0.0.64 and up    peers that violate the protocol (rxe2); they are rejected after a while,
//!                       and nobody else is
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `model.rs` | commands and their expected replies |
//! | `client.rs` `connection.rs` | clients, which compare replies with the model |
//! | `faults.rs` `fuzz.rs` | the faults |
//! | `watch.rs` | the engines' resources over time |
//! | `world.rs` | the state that all of these share |
#![expect(clippy::print_stderr, reason = "prints the figures")]

mod client;
mod connection;
mod faults;
mod fuzz;
mod model;
mod watch;
mod world;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client::{Client, Way};
use faults::{Faults, Wires};
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_session::{Connector, client_config};
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::{Engine, Start, TIMEOUT};
use tokio::task::JoinSet;
use watch::Watch;
use world::World;

const HOST: &str = "10.0.0.1";
const RDMA_PORTS: [&str; 2] = ["6390", "6391"];
const TCP_PORTS: [&str; 2] = ["6490", "6491"];
const CLIENTS: &[Way] = &[
    Way::Ferrite,
    Way::Ferrite,
    Way::Ferrite,
    Way::FerriteOrTcp,
    Way::Valkey,
    Way::Valkey,
    Way::Valkey,
    Way::Tcp,
    Way::Tcp,
];
/// The interval between two samples of the engines' resources.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

fn start(at: usize) -> Engine {
    let arguments = ["rdma-bind", HOST, "rdma-port", RDMA_PORTS[at], "rdma-device", "rxe1"];
    let options = [
        &["--port", TCP_PORTS[at], "--protected-mode", "no", "--repl-diskless-sync-delay", "0"][..],
        &[
            "--repl-backlog-size",
            "32mb",
            "--auto-aof-rewrite-min-size",
            "16mb",
            "--replica-announce-ip",
            "127.0.0.1",
        ],
        &["--stop-writes-on-bgsave-error", "no"],
    ];
    Engine::start(&Start {
        program: Path::new(REDIS),
        module: Some(&arguments),
        options: &options.concat(),
    })
}

fn address(port: &str) -> SocketAddr {
    format!("{HOST}:{port}").parse().expect("an address")
}

/// Starts two engines, the second as a replica of the first.
fn engines() -> [Engine; 2] {
    let servers = [start(0), start(1)];
    let () = servers[1].ask(&["REPLICAOF", "127.0.0.1", TCP_PORTS[0]]);
    servers[0].wait_until("an online replica", || {
        servers[0].ask::<String>(&["INFO", "replication"]).contains("state=online")
    });
    servers
}

fn world(servers: &[Engine; 2], fabric: &Fabric) -> World {
    let local = "10.0.0.2:0".parse().expect("an address");
    World {
        flow: tokio::sync::RwLock::new(()),
        flushes: AtomicU64::new(0),
        primary: AtomicUsize::new(0),
        sockets: [0, 1].map(|at: usize| servers[at].directory().join("engine.sock")),
        rdma: RDMA_PORTS.map(address),
        tcp: TCP_PORTS.map(address),
        local,
        fabric: fabric.clone(),
        connector: Connector::new(fabric).rdma(Rdma::Require).local(local),
        falling_back: Connector::new(fabric).rdma(Rdma::Prefer).local(local),
        interrupts: CLIENTS.iter().map(|_| AtomicBool::new(false)).collect(),
        over: AtomicBool::new(false),
        cut: std::sync::Mutex::default(),
        fault: std::sync::Mutex::default(),
        commands: AtomicU64::new(0),
        checked: AtomicU64::new(0),
        settled: AtomicU64::new(0),
        refusals: AtomicU64::new(0),
        connected: AtomicU64::new(0),
        unconnected: AtomicU64::new(0),
        failures: std::sync::Mutex::default(),
        hostile_rounds: AtomicU64::new(0),
        rejected: AtomicU64::new(0),
        longest_ms: AtomicU64::new(0),
    }
}

#[test]
fn engines_survive_all_faults() {
    let seconds = number("FERRITE_SOAK").unwrap_or(25);
    let seed = number("FERRITE_SEED").unwrap_or_else(|| u64::from(std::process::id()) | 1 << 20);
    eprintln!("FERRITE_SEED={seed} FERRITE_SOAK={seconds}");
    let (_wires, _addresses) = (Wires::new(), fuzz::Addresses::new());
    let mut servers = engines();
    let before = [watch::resources(&servers[0]), watch::resources(&servers[1])];
    eprintln!("before: {before:?}");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let mut watch = Watch::default();
    runtime.expect("a runtime").block_on(async {
        // Uses short times, so that clients soon notice that a cut has separated them from an
        // engine.
        let (keepalive, peer_timeout) = (Duration::from_secs(1), Duration::from_secs(2));
        let config = Config { busy_poll_us: 0, keepalive, peer_timeout, ..client_config() };
        let fabric = Fabric::system()
            .rdma(Rdma::Prefer)
            .device("rxe2")
            .config(config)
            .build()
            .expect("a fabric");
        let driver = tokio::spawn(fabric.drive());
        let world = Arc::new(world(&servers, &fabric));
        drop(fabric);
        let faults = tokio::spawn(Faults::new(Arc::clone(&world), seed).run());
        let mut clients = JoinSet::new();
        for (number, way) in CLIENTS.iter().enumerate() {
            clients.spawn(Client::new(number, *way, seed).run(Arc::clone(&world)));
        }
        monitor(&world, &mut servers, &mut watch, &mut clients, &faults, seconds).await;
        world.over.store(true, Ordering::Relaxed);
        let faults = faults.await.expect("no panic");
        while let Some(ended) = clients.join_next().await {
            ended.expect("no panic");
        }
        eprintln!("faults: {:?}", faults.done);
        let [rounds, rejected] =
            [&world.hostile_rounds, &world.rejected].map(|counter| counter.load(Ordering::Relaxed));
        eprintln!("peers that violate the protocol: {rejected} rejected in {rounds} rounds");
        // In most rounds, some of the six peers access memory that is not theirs. It can happen
        // that none does in a few rounds.
        assert!(rounds < 10 || rejected > 0, "no peer was rejected for repeated violations");
        drop(faults);
        drop(world);
        let ended = tokio::time::timeout(TIMEOUT, driver).await;
        ended.expect("the fabric stops in time").expect("no panic").expect("no fabric error");
    });
    for server in &mut servers {
        server.assert_healthy();
        let () = server.ask(&["CONFIG", "SET", "appendonly", "no"]);
        let called = server.count("commands_called");
        eprintln!("commands: {called} in-process, {} proxied", server.count("commands_proxied"));
        let [errors, refused] = ["remote_access_errors", "refused_after_access_errors"]
            .map(|field| server.count(&format!("rdma_{field}")));
        eprintln!("remote access errors: {errors}, peers refused because of them: {refused}");
        assert!(called > 0);
    }
    watch::wait_until_as_before(&servers, &before, Duration::from_secs(60));
    watch.assert_flat();
    for server in &mut servers {
        server.assert_healthy();
        assert!(server.shut_down("NOSAVE").success());
    }
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// Runs clients in a separate process until it is killed.
#[test]
#[ignore = "the soak test starts it"]
fn clients_to_be_killed() {
    let Ok(address) = std::env::var(faults::PROCESS) else { return };
    let address = address.parse().expect("an address");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").build().expect("a fabric");
        tokio::spawn(fabric.drive());
        let mut clients = JoinSet::new();
        for _ in 0..4 {
            clients.spawn(fuzz::send_until_killed(fabric.clone(), address));
        }
        let _ = tokio::time::timeout(Duration::from_secs(20), clients.join_all()).await;
    });
}

/// Monitors the test for this many seconds, or until the task that causes faults ends. Panics if a
/// client fails.
async fn monitor(
    world: &World,
    servers: &mut [Engine; 2],
    watch: &mut Watch,
    clients: &mut JoinSet<()>,
    faults: &tokio::task::JoinHandle<Faults>,
    seconds: u64,
) {
    let started = Instant::now();
    let report_interval = Duration::from_secs(if seconds > 300 { 60 } else { 5 });
    let mut reported = Instant::now();
    while started.elapsed() < Duration::from_secs(seconds) && !faults.is_finished() {
        tokio::time::sleep(SAMPLE_INTERVAL).await;
        if let Some(ended) = clients.try_join_next() {
            ended.unwrap_or_else(|failed| {
                let logs = [servers[0].log(), servers[1].log()].map(|log| tail(&log));
                panic!("{failed}; {logs:?}")
            });
        }
        let now = tokio::task::block_in_place(|| {
            servers.iter_mut().for_each(Engine::assert_healthy);
            watch.sample(servers)
        });
        if reported.elapsed() > report_interval {
            reported = Instant::now();
            report(world, started.elapsed(), &now);
        }
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

fn report(world: &World, elapsed: Duration, held: &[watch::Resources; 2]) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let each =
        |field: fn(&watch::Resources) -> u64| format!("{}+{}", field(&held[0]), field(&held[1]));
    eprintln!(
        "{:5.0?} s: {} commands, {} correct replies, {} lost connections resolved, {} connections \
         (+{} failed attempts), {} refused, {} flushes; sessions {}, fds {}, QPs {}, pinned {} \
         KiB, windows {} KiB, RSS {} MiB; connections given up within {} ms; {}",
        elapsed.as_secs(),
        count(&world.commands),
        count(&world.checked),
        count(&world.settled),
        count(&world.connected),
        count(&world.unconnected),
        count(&world.refusals),
        count(&world.flushes),
        each(|held| held.sessions),
        each(|held| held.descriptors),
        each(|held| held.queue_pairs),
        each(|held| held.pinned_bytes >> 10),
        each(|held| held.windows_bytes >> 10),
        each(|held| held.rss_bytes >> 20),
        count(&world.longest_ms),
        world.state(),
    );
}
