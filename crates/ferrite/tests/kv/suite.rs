//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` with a real `redis-server`: over TCP
//! on any host (`host_kv`), over RDMA in the lab (`lab_kv`).

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Instant;

use ferrite_testkit::{Engine, TIMEOUT, TempDir, process, until};
use serde_json::Value;

/// The gateway's address, the clients' options, the RDMA policy and the expected transport of a
/// test.
pub(crate) struct Network {
    pub(crate) listen: &'static str,
    pub(crate) client: &'static [&'static str],
    pub(crate) rdma: &'static str,
    pub(crate) transport: &'static str,
}

struct Process(Child);

impl Process {
    /// Returns whether the gateway or the relay runs slow device calls on threads of their own.
    /// Without a device it has none of these threads.
    fn has_command_threads(&self) -> bool {
        let threads =
            std::fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("its threads");
        let names = threads
            .flatten()
            .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
        names.into_iter().any(|name| name.starts_with("ferrite-cmd"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A redis-server and a gateway in front of it.
struct GatewaySetup {
    redis: Engine,
    gateway: Process,
    stdout: BufReader<ChildStdout>,
    address: String,
}

fn ferrite(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(arguments);
    command
}

impl GatewaySetup {
    fn start(network: &Network, more: &[&str]) -> Self {
        let redis = Engine::redis(&[]);
        let engine = format!("unix:{}", redis.socket().display());
        let arguments = [
            "gateway",
            "--listen",
            network.listen,
            "--engine",
            &engine,
            "--rdma",
            network.rdma,
            "--json",
        ];
        let mut gateway = ferrite(&[&arguments[..], more].concat())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ferrite starts");
        let mut stdout = BufReader::new(gateway.stdout.take().expect("piped"));
        let gateway = Process(gateway);
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        let listening: Value =
            serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert_eq!(listening["event"], "listening");
        let address = listening["address"].as_str().expect("an address").to_owned();
        Self { redis, gateway, stdout, address }
    }

    fn bench(&self, network: &Network, more: &[&str]) -> Output {
        let arguments = [
            "bench",
            "kv",
            &self.address,
            "--rdma",
            network.rdma,
            "--json",
            "--seconds",
            "0.5",
            "--warmup",
            "0.1",
        ];
        ferrite(&[&arguments[..], network.client, more].concat()).output().expect("ferrite starts")
    }

    /// Stops the gateway with SIGTERM. Returns its last event.
    fn end(mut self) -> Value {
        process::signal("TERM", self.gateway.0.id());
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line");
        let code = self.gateway.0.wait().expect("an end").code();
        assert_eq!(code, Some(0), "{line}");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }
}

fn report(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

/// `ferrite bench fabric` fails if the server speaks Redis' protocol, and its error says so.
#[allow(dead_code, reason = "only the lab has devices")]
pub(crate) fn bench_fabric_names_a_redis_server(network: &Network) {
    let setup = GatewaySetup::start(network, &["--protected-mode", "no"]);
    let output = ferrite(&[&["bench", "fabric", &setup.address], network.client].concat())
        .output()
        .expect("ferrite starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("is a Redis or Valkey server"), "{stderr}");
    assert!(stderr.contains("`ferrite bench kv`"), "{stderr}");
    setup.end();
}

/// A comparison has a row for each test and transport, ratios, and one plot.
#[allow(dead_code, reason = "only the lab has RDMA")]
pub(crate) fn bench_compares_transports_in_turns(network: &Network) {
    let setup =
        GatewaySetup::start(&Network { rdma: "prefer", ..*network }, &["--protected-mode", "no"]);
    let directory = TempDir::new("kv");
    let picture = directory.join("picture.svg");
    let arguments = ["bench", "kv", &setup.address, "--compare", "tcp,rdma", "--turns", "2"];
    let more = ["--seconds", "0.6", "--warmup", "0.1", "--json", "--plot"];
    let output = ferrite(&[&arguments[..], network.client, &more].concat())
        .arg(&picture)
        .output()
        .expect("ferrite starts");
    let report = report(&output);
    let rows = report["results"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().map(|row| (&row["test"], &row["transport"])).collect();
    let names = serde_json::to_value(names).expect("JSON");
    let (tcp, rdma) = ("TCP", network.transport);
    assert_eq!(
        names,
        serde_json::json!([["set", tcp], ["set", rdma], ["get", tcp], ["get", rdma]])
    );
    assert!(rows.iter().all(|row| row["errors"] == 0 && row["complete"] == true), "{report}");
    let ratios = report["ratios"].as_array().expect("ratios");
    assert_eq!(ratios.len(), 2, "{report}");
    for ratio in ratios {
        assert_eq!((&ratio["transport"], &ratio["to"]), (&rdma.into(), &tcp.into()));
        assert!(ratio["p50"].as_f64().is_some_and(|times| times > 0.0), "{ratio}");
    }
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    for label in ["set, TCP", "get, TCP", "set, RDMA (Ferrite)", "get, RDMA (Ferrite)"] {
        assert!(drawn.contains(&format!(">{label}<")), "no {label} in {drawn}");
    }
    setup.end();
}

/// The gateway carries every kind of load without errors, and counts sessions and bytes.
pub(crate) fn gateway_carries_every_kind_of_load(network: &Network) {
    let setup = GatewaySetup::start(network, &["--protected-mode", "no"]);
    let cases: [&[&str]; 4] = [
        &[],
        &["--pipeline", "16", "--connections", "3", "--size", "16kb", "--keys", "100"],
        &["--test", "mixed", "--zipf", "0.99", "--threads", "2"],
        &["--test", "get", "--rate", "200"],
    ];
    for case in cases {
        let report = report(&setup.bench(network, case));
        assert_eq!(report["transport"], network.transport, "{report}");
        for row in report["results"].as_array().expect("rows") {
            assert!(row["requests"].as_u64().is_some_and(|count| count > 10), "{case:?}: {row}");
            assert_eq!(row["errors"], 0, "{case:?}: {row}");
            let p50 = row["latency_us"]["p50"].as_f64().expect("a figure");
            assert!(
                p50 > 0.0 && p50 <= row["latency_us"]["max"].as_f64().expect("a figure"),
                "{row}"
            );
        }
    }
    let directory = TempDir::new("kv");
    let picture = directory.join("picture.svg");
    report(
        &setup
            .bench(network, &["--test", "set", "--plot", picture.to_str().expect("a plain path")]),
    );
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    assert!(
        drawn.starts_with("<svg ") && drawn.contains(network.transport) && drawn.contains(">set<"),
        "{drawn}"
    );
    let ended = setup.end();
    assert_eq!(ended["event"], "ended", "{ended}");
    let sessions: u64 = ["valkey", "ferrite", "tcp"]
        .iter()
        .map(|kind| ended["sessions"][kind].as_u64().expect("a count"))
        .sum();
    // Each case that reads has an additional connection, which writes the keys first. Each case,
    // and the run with the plot, has another connection, which removes the keys.
    let removals = cases.len() as u64 + 1;
    assert_eq!(sessions, 10 + 10 + 1 + 3 + 3 + 1 + 10 + 1 + 10 + 1 + 10 + removals, "{ended}");
    assert!(ended["to_client_bytes"].as_u64().is_some_and(|bytes| bytes > 10_000), "{ended}");
}

/// A rejected client prints the reason and exits with code 1. Over TCP it may lose the reason, as
/// at the engine's own port: a connection that is closed while requests arrive is reset.
pub(crate) fn bench_reports_why_a_client_is_rejected(network: &Network) {
    let setup = GatewaySetup::start(network, &["--protected-mode", "no", "--max-clients", "1"]);
    let refused = setup.bench(network, &["--test", "set"]);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    let may_lose_reason = network.rdma != "require";
    assert!(
        stderr.contains("max number of clients reached")
            || (may_lose_reason && stderr.contains("the connection")),
        "{stderr}"
    );
    setup.end();
}

/// A relay to the gateway.
struct Relay {
    process: Process,
    stdout: BufReader<ChildStdout>,
    address: String,
}

impl Relay {
    fn start(network: &Network, to: &str) -> Self {
        let arguments =
            ["relay", "--listen", "127.0.0.1:0", "--to", to, "--rdma", network.rdma, "--json"];
        let mut relay = ferrite(&[&arguments[..], network.client].concat())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ferrite starts");
        let mut stdout = BufReader::new(relay.stdout.take().expect("piped"));
        let process = Process(relay);
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        let listening: Value =
            serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let address = listening["address"].as_str().expect("an address").to_owned();
        Self { process, stdout, address }
    }

    fn end(mut self) -> Value {
        let pid = self.process.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line");
        assert_eq!(self.process.0.wait().expect("an end").code(), Some(0), "{line}");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }
}

/// The relay carries TCP clients over the transport of the test, and counts them. A client of an
/// unreachable server gets an error.
pub(crate) fn relay_carries_load_and_reports_failures(network: &Network) {
    let setup = GatewaySetup::start(network, &["--protected-mode", "no"]);
    let relay = Relay::start(network, &setup.address);
    let arguments = [
        "bench",
        "kv",
        &relay.address,
        "--rdma",
        "forbid",
        "--json",
        "--seconds",
        "0.5",
        "--size",
        "16kb",
    ];
    let report = report(&ferrite(&arguments).output().expect("ferrite starts"));
    for row in report["results"].as_array().expect("rows") {
        assert!(row["requests"].as_u64().is_some_and(|count| count > 10), "{row}");
        assert_eq!(row["errors"], 0, "{row}");
    }
    for process in [&setup.gateway, &relay.process] {
        assert_eq!(process.has_command_threads(), network.rdma == "require");
    }
    let transport = if network.rdma == "require" { "rdma" } else { "tcp" };
    let sessions = relay.end()["sessions"].clone();
    assert!(sessions[transport].as_u64().is_some_and(|count| count >= 10), "{sessions}");
    assert_eq!(
        sessions["rdma"].as_u64().zip(sessions["tcp"].as_u64()).map(|(a, b)| a.min(b)),
        Some(0)
    );
    let to = setup.address.clone();
    setup.end();
    let relay = Relay::start(network, &to);
    let refused =
        ferrite(&["bench", "kv", &relay.address, "--rdma", "forbid", "--test", "set"]).output();
    let stderr = String::from_utf8_lossy(&refused.expect("ferrite starts").stderr).into_owned();
    assert!(stderr.contains("Ferrite relay: cannot connect to the server"), "{stderr}");
    assert!(relay.end()["failed"].as_u64().is_some_and(|count| count > 0));
}

/// A client that is blocked in the engine delays the end of the gateway by the drain time. A second
/// signal ends the gateway without this delay.
pub(crate) fn second_signal_stops_the_gateway_at_once(network: &Network) {
    let mut setup = GatewaySetup::start(network, &["--protected-mode", "no", "--drain", "600"]);
    let relay = Relay::start(network, &setup.address);
    let mut client = TcpStream::connect(&relay.address).expect("a connection");
    client.write_all(b"BLPOP nothing 0\r\n").expect("to write");
    let started = Instant::now();
    until(TIMEOUT, "the client waits in the engine", || {
        setup.redis.client().text(&["INFO", "clients"]).contains("blocked_clients:1")
    });
    process::signal("TERM", setup.gateway.0.id());
    // Once the gateway accepts no more clients, it has received the first signal.
    until(TIMEOUT, "it accepts no more clients", || {
        let probe = Relay::start(network, &setup.address);
        let mut client = TcpStream::connect(&probe.address).expect("a connection");
        let _ = client.write_all(b"PING\r\n");
        let mut reply = String::new();
        let _ = BufReader::new(client).read_line(&mut reply);
        !reply.starts_with("+PONG")
    });
    let ended = setup.gateway.0.try_wait().expect("a child");
    assert!(ended.is_none(), "the gateway waits for the blocked client");
    process::signal("TERM", setup.gateway.0.id());
    let mut line = String::new();
    setup.stdout.read_line(&mut line).expect("a line");
    assert!(line.contains("\"ended\""), "{line}");
    assert_eq!(setup.gateway.0.wait().expect("an end").code(), Some(1));
    assert!(started.elapsed() < TIMEOUT, "{:?}", started.elapsed());
}
