//! The admin port of the gateway and the relay, with a real `redis-server`, on any host.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use ferrite_testkit::process::KillOnDrop;
use ferrite_testkit::{Engine, TIMEOUT, until};
use serde_json::Value;

/// A gateway or relay with an admin port.
struct Running {
    _process: KillOnDrop,
    address: String,
    admin: String,
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .args(arguments)
            .args(["--rdma", "forbid", "--admin-listen", "127.0.0.1:0", "--json"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("ferrite starts");
        let stdout = process.stdout.take().expect("piped");
        let process = KillOnDrop(process);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let listening: Value = serde_json::from_str(&line).expect("JSON");
        let of = |name: &str| listening[name].as_str().expect(name).to_owned();
        Self { _process: process, address: of("address"), admin: of("admin") }
    }

    /// Returns the status and the body of an answer.
    fn get(&self, path: &str) -> (u16, String) {
        self.request(&format!("GET {path}"))
    }

    fn request(&self, method_and_path: &str) -> (u16, String) {
        let mut socket = TcpStream::connect(&self.admin).expect("the admin port");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        write!(socket, "{method_and_path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
        if status == 200 && method_and_path.ends_with("/metrics") {
            assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
        }
        (status, body.to_owned())
    }

    /// Returns the names of all metrics, as queries spell them.
    fn names(&self) -> HashSet<String> {
        let (_, text) = self.get("/metrics");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let names = types.flat_map(|(name, kind)| match kind {
            "counter" => vec![format!("{name}_total")],
            "histogram" => ["bucket", "count", "sum"].map(|end| format!("{name}_{end}")).into(),
            _ => vec![name.to_owned()],
        });
        names.collect()
    }

    /// Returns all samples. Checks that each follows its type and that the text ends as it must.
    fn scrape(&self) -> BTreeMap<String, f64> {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200);
        assert!(text.ends_with("# EOF\n"), "{text}");
        let (mut samples, mut family) = (BTreeMap::new(), String::new());
        for line in text.lines().filter(|line| *line != "# EOF") {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().expect("a name").to_owned();
            }
            if line.starts_with('#') {
                continue;
            }
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            assert!(name.starts_with(&family) && name.starts_with("ferrite_"), "{line}");
            let previous = samples.insert(name.to_owned(), value.parse().expect("a number"));
            assert_eq!(previous, None, "twice: {line}");
        }
        samples
    }

    /// Sends a command and waits for its reply. The session stays open as long as the socket.
    fn ping(&self) -> TcpStream {
        let mut socket = TcpStream::connect(&self.address).expect("a session");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        socket.write_all(b"PING\r\n").expect("sent");
        let mut reply = [0; 7];
        socket.read_exact(&mut reply).expect("a reply");
        assert_eq!(&reply, b"+PONG\r\n");
        socket
    }
}

fn gateway(redis: &Engine) -> Running {
    let engine = format!("unix:{}", redis.socket().display());
    Running::start(&["gateway", "--listen", "127.0.0.1:0", "--engine", &engine])
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
    assert_eq!(gateway.get("/ready"), (503, "no answer within 1 s\n".into()));
    redis.kill();
    let (status, why) = gateway.get("/ready");
    assert!(status == 503 && why.contains("does not answer"), "{status} {why}");
    assert_eq!(gateway.get("/live"), (200, "live\n".into()));
    assert_eq!(gateway.get("/other").0, 404);
    assert_eq!(gateway.request("POST /metrics").0, 405);
}

#[test]
fn counters_of_the_relay_move_with_traffic() {
    let mut redis = Engine::redis(&[]);
    let gateway = gateway(&redis);
    let relay = Running::start(&["relay", "--to", &gateway.address, "--listen", "127.0.0.1:0"]);
    let _session = relay.ping();
    let samples = relay.scrape();
    assert_eq!(samples["ferrite_relay_sessions_opened_total{transport=\"tcp\"}"], 1.0);
    assert_eq!(samples["ferrite_relay_bytes_total{direction=\"to_server\"}"], 6.0);
    assert_eq!(relay.get("/ready"), (200, "ready\n".into()));
    redis.kill();
    drop(gateway);
    assert_eq!(relay.get("/ready").0, 503);
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
    let relay = Running::start(&["relay", "--to", &gateway.address, "--listen", "127.0.0.1:0"]);
    let exported: HashSet<_> = gateway.names().union(&relay.names()).cloned().collect();
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

/// Each alert has its section in the book, to which it links.
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

/// Runs where Debian's `prometheus` is installed.
#[test]
fn promtool_accepts_the_rules() {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../etc/prometheus/alerts.yml");
    match Command::new("promtool").args(["check", "rules", rules]).output() {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => panic!("promtool: {error}"),
    }
}
