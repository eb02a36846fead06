//! The admin port of the gateway, the relay and the agent, with a real `redis-server`, on any host.

mod metrics {
    pub(crate) mod harness;
}

use std::collections::HashSet;
use std::process::Command;
use std::sync::mpsc::Receiver;

use ferrite_testkit::{Engine, TIMEOUT, TempDir, until};
use metrics::harness::Running;
use serde_json::Value;

const TCP: &[&str] = &["--rdma", "forbid"];

fn gateway(redis: &Engine) -> Running {
    let engine = format!("unix:{}", redis.socket().display());
    Running::start(&[&["gateway", "--listen", "127.0.0.1:0", "--engine", &engine], TCP].concat())
}

fn relay(gateway: &Running) -> Running {
    let to = &gateway.address;
    Running::start(&[&["relay", "--to", to, "--listen", "127.0.0.1:0"], TCP].concat())
}

#[test]
fn counters_of_the_gateway_move_with_traffic() {
    let redis = Engine::redis(&[]);
    let gateway = gateway(&redis);
    let before = gateway.scrape();
    assert_eq!(before["ferrite_sessions{transport=\"tcp\"}"], 0.0);
    let session = gateway.ping();
    let after = gateway.scrape();
    assert_eq!(after["ferrite_sessions{transport=\"tcp\"}"], 1.0);
    assert_eq!(after["ferrite_sessions_opened_total{client=\"tcp\"}"], 1.0);
    assert_eq!(after["ferrite_session_bytes_total{direction=\"to_engine\"}"], 6.0);
    assert_eq!(after["ferrite_session_bytes_total{direction=\"to_client\"}"], 7.0);
    assert!(before.keys().eq(after.keys()), "the same series at each scrape");
    drop(session);
    until(TIMEOUT, "the session ends", || {
        gateway.scrape()["ferrite_sessions{transport=\"tcp\"}"] == 0.0
    });
}

#[test]
fn gateway_is_ready_only_while_the_engine_answers() {
    let mut redis = Engine::redis(&[]);
    let gateway = gateway(&redis);
    assert_eq!(gateway.get("/ready"), (200, "ready\n".into()));
    let mut client = redis.client();
    client.ok(&["CLIENT", "PAUSE", "600000", "ALL"]);
    assert_eq!(gateway.get("/ready"), (503, "the readiness check took longer than 1 s\n".into()));
    redis.kill();
    let (status, why) = gateway.get("/ready");
    assert!(status == 503 && why.contains("does not answer"), "{status} {why}");
    assert_eq!(gateway.get("/live"), (200, "live\n".into()));
    assert_eq!(gateway.get("/other").0, 404);
    assert_eq!(gateway.request("POST /metrics").0, 405);
}

/// Waits for a line of the log with this text.
fn until_line(log: &Receiver<String>, text: &str) {
    while !log.recv_timeout(TIMEOUT).expect(text).contains(text) {}
}

#[test]
fn gateway_warns_of_an_engine_that_does_not_answer_and_keeps_trying() {
    let directory = TempDir::new("engine");
    let path = directory.join("engine.sock");
    let engine = format!("unix:{}", path.display());
    let arguments = ["gateway", "--listen", "127.0.0.1:0", "--engine", &engine];
    let (gateway, log) = Running::start_logged(&[&arguments, TCP].concat());
    let reason = format!("the engine at {engine} does not answer: No such file or directory");
    until_line(&log, &format!("WARN {reason}"));
    let (status, why) = gateway.get("/ready");
    assert!(status == 503 && why.starts_with(&reason), "{status} {why}");
    let redis = Engine::redis(&[]);
    std::os::unix::fs::symlink(redis.socket(), &path).expect("the engine's socket");
    until_line(&log, &format!("INFO the engine at {engine} answers now"));
    assert_eq!(gateway.get("/ready"), (200, "ready\n".into()));
}

#[test]
fn relay_warns_of_a_server_that_does_not_answer_and_keeps_trying() {
    let port = ferrite_testkit::free_port();
    let to = format!("127.0.0.1:{port}");
    let arguments = ["relay", "--to", &to, "--listen", "127.0.0.1:0"];
    let (relay, log) = Running::start_logged(&[&arguments, TCP].concat());
    until_line(&log, &format!("WARN the server at {to} does not answer: "));
    assert_eq!(relay.get("/ready").0, 503);
    let _redis = Engine::redis(&["--port", &port.to_string()]);
    until_line(&log, &format!("INFO the server at {to} answers now"));
    assert_eq!(relay.get("/ready"), (200, "ready\n".into()));
}

/// Without keepalive, the session of a client whose host has died would stay open forever.
#[test]
fn relay_probes_silent_clients() {
    let redis = Engine::redis(&[]);
    let (gateway, hex) = (gateway(&redis), |address: &str| {
        let port: u16 = address.rsplit_once(':').expect("a port").1.parse().expect("a number");
        format!("0100007F:{port:04X}")
    });
    let relay = relay(&gateway);
    let session = relay.ping();
    let client = session.local_addr().expect("an address").to_string();
    let sockets = std::fs::read_to_string("/proc/net/tcp").expect("the sockets");
    let ends = format!(" {} {} ", hex(&relay.address), hex(&client));
    let socket = sockets.lines().find(|line| line.contains(&ends)).expect("the relay's socket");
    // In a line of /proc/net/tcp, the timer follows the state and the queues. Type 2 is the
    // keepalive timer.
    let timer = socket.split_whitespace().nth(5).expect("a timer");
    assert!(timer.starts_with("02:"), "{socket}");
}

#[test]
fn counters_of_the_relay_move_with_traffic() {
    let mut redis = Engine::redis(&[]);
    let gateway = gateway(&redis);
    let relay = relay(&gateway);
    let _session = relay.ping();
    let samples = relay.scrape();
    assert_eq!(samples["ferrite_relay_sessions_opened_total{transport=\"tcp\"}"], 1.0);
    assert_eq!(samples["ferrite_relay_bytes_total{direction=\"to_server\"}"], 6.0);
    assert_eq!(relay.get("/ready"), (200, "ready\n".into()));
    redis.kill();
    let why = "refuses clients: -ERR Ferrite gateway: cannot connect to the engine\n";
    let (status, answer) = relay.get("/ready");
    assert!(status == 503 && answer.ends_with(why), "{status} {answer}");
    drop(gateway);
    assert_eq!(relay.get("/ready").0, 503);
}

/// `host_top` checks more figures, with a text that has all of them.
#[test]
fn top_shows_what_the_admin_ports_say() {
    let redis = Engine::redis(&[]);
    let gateway = gateway(&redis);
    let relay = relay(&gateway);
    let _session = relay.ping();
    for (program, of) in [("gateway", &gateway), ("relay", &relay)] {
        let url = format!("http://{}", of.0);
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .args(["top", "--interval", "0.1", "--json", "--admin", &url])
            .output()
            .expect("ferrite starts");
        let state: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let shown = state["program"].as_str().expect("text");
        assert!(shown.starts_with(&format!("ferrite {program} 0.")), "{state}");
        // The relay also opens a session at the gateway, to check whether the gateway answers.
        let opened = state["totals"]["opened_tcp"].as_u64().expect("a number");
        assert!(opened == 1 || program == "gateway" && opened == 2, "{state}");
        assert!(state["memory"]["registered"].is_number(), "{state}");
    }
}

#[test]
fn admin_port_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = taken.local_addr().expect("an address").to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .args(["gateway", "--listen", "127.0.0.1:0", "--admin-listen", &address])
        .output()
        .expect("ferrite starts");
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains(&format!("cannot open the admin port at {address}")), "{message}");
    assert!(
        message.contains("; choose another port, or stop the program that has it"),
        "{message}"
    );
}

/// Returns the words that begin with `ferrite_`.
fn metrics_in(text: &str) -> HashSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("ferrite_")).map(Into::into).collect()
}

#[test]
fn rules_and_dashboard_name_only_metrics_that_exist() {
    let redis = Engine::redis(&[]);
    let gateway = gateway(&redis);
    let relay = relay(&gateway);
    let words = ["agent", "--alias", "127.1.0.1", "--listen", "127.0.0.1:0"];
    let agent = Running::start(&[&words, TCP].concat());
    assert_eq!(agent.get("/ready"), (200, "ready\n".into()), "there are no peers");
    let exported: HashSet<_> =
        [&gateway, &relay, &agent].into_iter().flat_map(|program| program.names()).collect();
    let dashboard = include_str!("../../../etc/grafana/ferrite.json");
    let rules = include_str!("../../../etc/prometheus/alerts.yml");
    let book = include_str!("../../../docs/book/src/operations/metrics.md");
    for (name, text) in [("dashboard", dashboard), ("rules", rules), ("book", book)] {
        let used = metrics_in(text);
        assert!(used.len() > 5, "{name}: {used:?}");
        let unknown: Vec<_> = used.difference(&exported).collect();
        assert!(unknown.is_empty(), "{name} has metrics that no program exports: {unknown:?}");
    }
    let described = metrics_in(book);
    let missing: Vec<_> = exported
        .iter()
        .filter(|name| !name.starts_with("ferrite_memory_") && !described.contains(*name))
        .filter(|name| !name.ends_with("_bucket") && !name.ends_with("_sum"))
        .filter(|name| !name.ends_with("_seconds_count"))
        .collect();
    assert!(missing.is_empty(), "the book does not describe {missing:?}");
    let _: Value = serde_json::from_str(dashboard).expect("JSON");
}

/// Each alert links to its section in the book.
#[test]
fn every_alert_has_its_section_in_the_book() {
    let rules = include_str!("../../../etc/prometheus/alerts.yml");
    let book = include_str!("../../../docs/book/src/operations/metrics.md");
    let of = |field: &str| -> Vec<&str> {
        rules.lines().filter_map(|line| line.trim().strip_prefix(field)).map(str::trim).collect()
    };
    let (alerts, links) = (of("- alert:"), of("runbook_url:"));
    assert!(alerts.len() >= 8 && alerts.len() == links.len(), "{alerts:?} {links:?}");
    for (alert, link) in alerts.iter().zip(links) {
        assert_eq!(link, format!("operations/metrics.html#{}", alert.to_lowercase()));
        assert!(book.contains(&format!("\n### {alert}\n")), "{alert} is not in the book");
    }
}

const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../etc/prometheus/alerts.yml");

/// Runs `promtool`, which must succeed. It is in Debian's package `prometheus`, which `.ci/run`
/// installs.
fn promtool(arguments: &[&str]) {
    let output = Command::new("promtool").args(arguments).output();
    let output = output.expect("promtool runs; it is in Debian's package prometheus");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
}

#[test]
fn promtool_accepts_the_rules() {
    promtool(&["check", "rules", RULES]);
}

/// Many cards have a second port that nobody has connected.
#[test]
fn alert_for_a_port_fires_only_if_it_was_active() {
    let directory = TempDir::new("rules");
    let test = directory.join("test.yml");
    let text = format!(
        r#"
rule_files: [{RULES:?}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'ferrite_port_active{{device="mlx5_0",port="1"}}', values: "1x10 0x20"}}
      - {{series: 'ferrite_port_active{{device="mlx5_0",port="2"}}', values: "0x30"}}
    alert_rule_test:
      - eval_time: 5m
        alertname: FerritePortDown
      - eval_time: 15m
        alertname: FerritePortDown
        exp_alerts:
          - exp_labels: {{severity: warning, device: mlx5_0, port: "1"}}
            exp_annotations:
              summary: Port 1 of mlx5_0 is not active
              runbook_url: operations/metrics.html#ferriteportdown
"#
    );
    std::fs::write(&test, text).expect("a file");
    promtool(&["test", "rules", test.to_str().expect("a path")]);
}
