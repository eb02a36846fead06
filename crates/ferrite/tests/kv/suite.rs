//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` with a real `redis-server`: over TCP
//! on any host (`host_kv`), over RDMA in the lab (`lab_kv`).

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Where the gateway listens, where clients come from, and the policy.
pub(crate) struct Place {
    pub(crate) listen: &'static str,
    pub(crate) client: &'static [&'static str],
    pub(crate) rdma: &'static str,
    pub(crate) transport: &'static str,
}

struct Process(Child);

impl Process {
    /// Whether it leaves calls that may wait for a device to other threads than the one that
    /// serves. Without a device it has none.
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

struct Scene {
    _redis: Process,
    gateway: Process,
    stdout: BufReader<ChildStdout>,
    socket: PathBuf,
    address: String,
}

fn ferrite(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(arguments);
    command
}

impl Scene {
    fn start(place: &Place, more: &[&str]) -> Self {
        let socket = std::env::temp_dir().join(format!("ferrite-kv-{}.sock", std::process::id()));
        let redis = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server starts: apt-get install redis-server");
        let redis = Process(redis);
        let begun = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            assert!(begun.elapsed() < PATIENCE, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        let engine = format!("unix:{}", socket.display());
        let words = [
            "gateway",
            "--listen",
            place.listen,
            "--engine",
            &engine,
            "--rdma",
            place.rdma,
            "--json",
        ];
        let mut gateway = ferrite(&[&words[..], more].concat())
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
        Self { _redis: redis, gateway, stdout, socket, address }
    }

    fn bench(&self, place: &Place, more: &[&str]) -> Output {
        let words = [
            "bench",
            "kv",
            &self.address,
            "--rdma",
            place.rdma,
            "--json",
            "--seconds",
            "0.5",
            "--warmup",
            "0.1",
        ];
        ferrite(&[&words[..], place.client, more].concat()).output().expect("ferrite starts")
    }

    /// Ends the gateway as an init system would; what it says at its end.
    fn end(mut self) -> Value {
        let pid = self.gateway.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line");
        let code = self.gateway.0.wait().expect("an end").code();
        assert_eq!(code, Some(0), "{line}");
        let _ = std::fs::remove_file(&self.socket);
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }
}

fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Every kind of load goes through, nothing is an error, and the gateway counts what it moved.
pub(crate) fn load_through_the_gateway(place: &Place) {
    let scene = Scene::start(place, &["--protected-mode", "no"]);
    let cases: [&[&str]; 4] = [
        &[],
        &["--pipeline", "16", "--connections", "3", "--size", "16K", "--keys", "100"],
        &["--test", "mixed", "--zipf", "0.99", "--threads", "2"],
        &["--test", "get", "--rate", "200"],
    ];
    for case in cases {
        let report = report(&scene.bench(place, case));
        assert_eq!(report["transport"], place.transport, "{report}");
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
    let picture = std::env::temp_dir().join(format!("ferrite-kv-{}.svg", std::process::id()));
    report(
        &scene.bench(place, &["--test", "set", "--plot", picture.to_str().expect("a plain path")]),
    );
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    let _ = std::fs::remove_file(&picture);
    assert!(
        drawn.starts_with("<svg ") && drawn.contains(place.transport) && drawn.contains(">set<"),
        "{drawn}"
    );
    let ended = scene.end();
    assert_eq!(ended["event"], "ended", "{ended}");
    let sessions: u64 = ["valkey", "ferrite", "tcp"]
        .iter()
        .map(|kind| ended["sessions"][kind].as_u64().expect("a count"))
        .sum();
    // Each case that reads has one more connection, which writes first.
    assert_eq!(sessions, 10 + 10 + 1 + 3 + 3 + 1 + 10 + 1 + 10 + 1 + 10, "{ended}");
    assert!(ended["to_client_bytes"].as_u64().is_some_and(|bytes| bytes > 10_000), "{ended}");
}

/// A server that says no: told in one line, with a code.
pub(crate) fn refusals_are_explained(place: &Place) {
    let scene = Scene::start(place, &["--max-clients", "0"]);
    let refused = scene.bench(place, &["--test", "set"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        said.contains("the server hung up") || said.contains("max number of clients"),
        "{said}"
    );
    scene.end();
}

/// A relay to the gateway, for clients that know only TCP.
struct Relay {
    process: Process,
    stdout: BufReader<ChildStdout>,
    address: String,
}

impl Relay {
    fn start(place: &Place, to: &str) -> Self {
        let words =
            ["relay", "--listen", "127.0.0.1:0", "--to", to, "--rdma", place.rdma, "--json"];
        let mut relay = ferrite(&[&words[..], place.client].concat())
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

/// What comes over TCP leaves as the place says, and is counted; a server that is not there is
/// named.
pub(crate) fn load_through_the_relay(place: &Place) {
    let scene = Scene::start(place, &["--protected-mode", "no"]);
    let relay = Relay::start(place, &scene.address);
    let words = [
        "bench",
        "kv",
        &relay.address,
        "--rdma",
        "forbid",
        "--json",
        "--seconds",
        "0.5",
        "--size",
        "16K",
    ];
    let report = report(&ferrite(&words).output().expect("ferrite starts"));
    for row in report["results"].as_array().expect("rows") {
        assert!(row["requests"].as_u64().is_some_and(|count| count > 10), "{row}");
        assert_eq!(row["errors"], 0, "{row}");
    }
    for process in [&scene.gateway, &relay.process] {
        assert_eq!(process.has_command_threads(), place.rdma == "require");
    }
    let carried = if place.rdma == "require" { "rdma" } else { "tcp" };
    let sessions = relay.end()["sessions"].clone();
    assert!(sessions[carried].as_u64().is_some_and(|count| count >= 10), "{sessions}");
    assert_eq!(
        sessions["rdma"].as_u64().zip(sessions["tcp"].as_u64()).map(|(a, b)| a.min(b)),
        Some(0)
    );
    let to = scene.address.clone();
    scene.end();
    let relay = Relay::start(place, &to);
    let refused =
        ferrite(&["bench", "kv", &relay.address, "--rdma", "forbid", "--test", "set"]).output();
    let said = String::from_utf8_lossy(&refused.expect("ferrite starts").stderr).into_owned();
    assert!(
        said.contains("Ferrite relay: cannot connect to the server") || said.contains("hung up"),
        "{said}"
    );
    assert!(relay.end()["failed"].as_u64().is_some_and(|count| count > 0));
}

/// A client that waits in the engine holds the gateway's end for the drain time, but not a second
/// signal.
pub(crate) fn second_signal_ends_at_once(place: &Place) {
    let mut scene = Scene::start(place, &["--protected-mode", "no", "--drain", "600"]);
    let relay = Relay::start(place, &scene.address);
    let mut client = TcpStream::connect(&relay.address).expect("a connection");
    client.write_all(b"BLPOP nothing 0\r\n").expect("to write");
    let begun = Instant::now();
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        while !is_so() {
            assert!(begun.elapsed() < PATIENCE, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let signal = |scene: &Scene| {
        let pid = scene.gateway.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
    };
    until("the client waits in the engine", &|| {
        let mut engine = UnixStream::connect(&scene.socket).expect("it listens");
        engine.write_all(b"INFO clients\r\nQUIT\r\n").expect("to write");
        let mut said = String::new();
        engine.read_to_string(&mut said).expect("an answer");
        said.contains("blocked_clients:1")
    });
    signal(&scene);
    // It has heard the first when it takes nobody any more.
    until("it takes no more clients", &|| {
        let probe = Relay::start(place, &scene.address);
        let mut client = TcpStream::connect(&probe.address).expect("a connection");
        let _ = client.write_all(b"PING\r\n");
        let mut said = String::new();
        let _ = BufReader::new(client).read_line(&mut said);
        !said.starts_with("+PONG")
    });
    assert!(scene.gateway.0.try_wait().expect("a child").is_none(), "it drains");
    signal(&scene);
    let mut line = String::new();
    scene.stdout.read_line(&mut line).expect("a line");
    assert!(line.contains("\"ended\""), "{line}");
    assert_eq!(scene.gateway.0.wait().expect("an end").code(), Some(1));
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    let _ = std::fs::remove_file(&scene.socket);
}
