//! The metrics of module, gateway and relay over RDMA, in the lab's virtual machine.

mod metrics {
    pub(crate) mod harness;
}

use std::collections::BTreeSet;
use std::path::Path;

use ferrite_testkit::engine::REDIS;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, Start, TIMEOUT, free_port, until};
use metrics::harness::{Admin, Running};

const MODULE: &str = "10.0.0.1:6385";
const GATEWAY: &str = "10.0.0.1:6386";
const PLAIN_GATEWAY: &str = "10.0.0.1:6387";

/// Metrics that may stay 0 in this test, because another test increments them. Each entry has the
/// start of the metric's name without `ferrite_`, the file of the other test, and a text in it.
const MOVED_ELSEWHERE: [(&str, &str, &str); 17] = [
    ("port_counters_overdue", "ferrite-metrics/src/ports.rs", "overdue(\"mlx5_1\", 1)"),
    ("memory_", "ferrite-fabric/tests/pool.rs", "fn every_counter_is_incremented"),
    (
        "sessions_evicted_total",
        "ferrite-module/tests/host_attacks/memory.rs",
        "(\"sessions_evicted\"), 4",
    ),
    ("rdma_peers_refused_total", "ferrite-fabric/tests/fake_links.rs", "refused_without_windows"),
    ("rdma_tcp_bytes_total", "ferrite-fabric/tests/streams/bytes.rs", "tcp_bytes, over_tcp"),
    (
        "rdma_remote_access_errors_total",
        "ferrite-fabric/tests/links/isolation.rs",
        "stats().remote_access_errors == 1",
    ),
    (
        "rdma_cm_requests_refused_total",
        "ferrite-fabric/tests/fake_mutual_tls.rs",
        "stats().cm_requests_refused, 1",
    ),
    (
        "rdma_tls_failures_total",
        "ferrite-fabric/tests/fake_mutual_tls.rs",
        "stats().tls_failures == failures",
    ),
    ("rdma_upgrades_total", "ferrite-fabric/tests/fake_migration.rs", "stats.upgrades >= 3"),
    ("rdma_migrations_total", "ferrite-fabric/tests/fake_migration.rs", "totals.moves >= 3"),
    (
        "rdma_connect_retries_total",
        "ferrite-fabric/tests/fake_migration.rs",
        "stats().connect_retries, 3",
    ),
    ("rdma_accept_failures_total", "ferrite-fabric/tests/door.rs", "stats().accept_failures > 0"),
    (
        "rdma_devices_lost_total",
        "ferrite-fabric/tests/fake_hardware.rs",
        "stats().devices_lost == round",
    ),
    (
        "rdma_devices_back_total",
        "ferrite-fabric/tests/fake_hardware.rs",
        "stats().devices_back == round",
    ),
    (
        "rdma_devices_without_windows",
        "ferrite-fabric/tests/fake_links.rs",
        "stats.devices_without_windows), (1, 1)",
    ),
    ("rdma_requests_in_flight", "ferrite-fabric/tests/in_flight.rs", "stats().in_flight > 0"),
    (
        "rdma_receives_overdue",
        "ferrite-fabric/tests/links_on_fake/providers.rs",
        "stats.receives_overdue), (0, 24)",
    ),
];

/// The metrics that programs export, and those that were not 0 at some time.
#[derive(Default)]
struct Seen {
    exported: BTreeSet<String>,
    moved: BTreeSet<String>,
}

impl Seen {
    fn look(&mut self, admin: &Admin) {
        for (series, value) in admin.scrape() {
            let name = series.split('{').next().expect("a name").to_owned();
            if value != 0.0 {
                self.moved.insert(name.clone());
            }
            self.exported.insert(name);
        }
    }

    /// Waits until a metric is greater than 0.
    fn until_moved(&mut self, admin: &Admin, name: &str) {
        until(TIMEOUT, name, || {
            self.look(admin);
            self.moved.contains(name)
        });
    }
}

/// Starts an engine with the module, and returns the module's admin port, too.
fn start_module() -> (Engine, Admin) {
    let admin = format!("127.0.0.1:{}", free_port());
    let (ip, port) = MODULE.split_once(':').expect("an address");
    let module = ["rdma", "require", "rdma-bind", ip, "rdma-port", port, "admin-listen", &admin];
    let options = &["--protected-mode", "no"];
    let start = Start { program: Path::new(REDIS), module: Some(&module), options };
    (Engine::start(&start), Admin(admin))
}

fn start_gateway(listen: &str, engine: &Engine, more: &[&str]) -> Running {
    let engine = format!("unix:{}", engine.socket().display());
    let arguments = ["gateway", "--listen", listen, "--engine", &engine, "--protected-mode", "no"];
    Running::start(&[&arguments, more].concat())
}

fn start_relay(to: &str, rdma: &str) -> Running {
    let listen = ["--listen", "127.0.0.1:0", "--local", "10.0.0.2"];
    Running::start(&[&["relay", "--to", to, "--rdma", rdma][..], &listen].concat())
}

/// Sends commands of each kind through the relay and the module, over RDMA. Then kills one session.
/// Returns two clients that are still connected to the relay.
fn use_module(seen: &mut Seen, engine: &Engine, module: &Admin, relay: &Running) -> [Client; 2] {
    let value = vec![b'x'; 100_000];
    let mut client = Client::to_tcp(&relay.address);
    for _ in 0..20 {
        client.send(&[vec![&b"SET"[..], b"key", &value], vec![b"GET", b"key"]]);
        assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]));
        assert!(client.next_reply().is_some_and(|reply| reply.len() > value.len()));
    }
    let mut subscriber = Client::to_tcp(&relay.address);
    subscriber.send(&[vec!["SUBSCRIBE", "channel"]]);
    assert!(subscriber.next_reply().is_some());
    let mut slow = Client::to_tcp(&relay.address);
    slow.write(b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$100000\r\nthe beginning");
    seen.until_moved(module, "ferrite_session_held_bytes");
    seen.until_moved(module, "ferrite_rdma_latency_seconds_count");
    seen.until_moved(relay, "ferrite_rdma_latency_seconds_count");
    drop(slow);
    let mut operator = engine.client();
    let sessions = operator.text(&["FERRITE", "CLIENTS"]);
    let id = sessions.split("id=").nth(1).and_then(|rest| rest.split(' ').next());
    operator.ok(&["FERRITE", "KILL", id.expect("a session")]);
    seen.until_moved(module, "ferrite_sessions_killed_total");
    [client, subscriber]
}

/// Connects more clients than are allowed, lets a relay fall back to TCP, and stops the engine.
fn use_gateway(seen: &mut Seen) {
    let mut redis = Engine::redis(&[]);
    let gateway = start_gateway(GATEWAY, &redis, &["--max-clients", "1"]);
    let mut session = Client::to_tcp(GATEWAY);
    assert_eq!(session.ask(&["PING"]), "+PONG");
    let mut refused = Client::to_tcp(GATEWAY);
    assert!(refused.next_reply().is_some_and(|reply| reply.starts_with(b"-ERR")));
    seen.until_moved(&gateway, "ferrite_sessions_refused_total");
    drop(session);
    let plain = start_gateway(PLAIN_GATEWAY, &redis, &["--rdma", "forbid"]);
    let falling = start_relay(PLAIN_GATEWAY, "prefer");
    drop(falling.ping());
    seen.until_moved(&falling, "ferrite_rdma_fallbacks_total");
    redis.kill();
    let mut lost = Client::to_tcp(PLAIN_GATEWAY);
    assert!(lost.next_reply().is_some_and(|reply| reply.starts_with(b"-ERR")));
    seen.until_moved(&plain, "ferrite_engine_connect_failures_total");
}

#[test]
fn every_metric_moves() {
    let mut seen = Seen::default();
    let (mut engine, module) = start_module();
    let relay = start_relay(MODULE, "require");
    let sessions = use_module(&mut seen, &engine, &module, &relay);
    use_gateway(&mut seen);
    engine.kill();
    seen.until_moved(&relay, "ferrite_rdma_links_failed_total");
    seen.until_moved(&relay, "ferrite_rdma_completion_errors_total");
    drop(sessions);
    let mut late = Client::to_tcp(&relay.address);
    assert!(late.next_reply().is_some_and(|reply| reply.starts_with(b"-ERR")));
    seen.until_moved(&relay, "ferrite_relay_connect_failures_total");
    let elsewhere = MOVED_ELSEWHERE.map(|(name, ..)| format!("ferrite_{name}"));
    let is_moved_elsewhere = |name: &str| elsewhere.iter().any(|begin| name.starts_with(begin));
    let never: Vec<_> =
        seen.exported.difference(&seen.moved).filter(|name| !is_moved_elsewhere(name)).collect();
    assert!(never.is_empty(), "no step of this test changes {never:?}");
    for name in &elsewhere {
        let is_exported = seen.exported.iter().any(|exported| exported.starts_with(name));
        assert!(is_exported, "no program exports a metric that begins with {name}");
    }
}

#[test]
fn exceptions_name_tests_that_exist() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the directory crates");
    for (metric, file, text) in MOVED_ELSEWHERE {
        let source = std::fs::read_to_string(crates.join(file)).expect(file);
        assert!(source.contains(text), "{metric}: {file} has no {text}");
    }
}
