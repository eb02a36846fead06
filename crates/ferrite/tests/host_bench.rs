//! `ferrite bench kv` leaves the data of a real `redis-server` alone, on any host.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A redis-server on a Unix socket; killed on drop.
struct Redis {
    process: Child,
    socket: PathBuf,
}

impl Redis {
    fn start() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ferrite-bench-{}-{number}.sock", std::process::id());
        let socket = std::env::temp_dir().join(name);
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(&socket)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server starts: apt-get install redis-server");
        let redis = Self { process, socket };
        until("redis-server listens", || UnixStream::connect(&redis.socket).is_ok());
        redis
    }

    /// Runs an inline command. Returns the whole reply.
    fn ask(&self, command: &str) -> String {
        let mut engine = UnixStream::connect(&self.socket).expect("it listens");
        engine.write_all(format!("{command}\r\nQUIT\r\n").as_bytes()).expect("to write");
        let mut reply = String::new();
        engine.read_to_string(&mut reply).expect("a reply");
        reply
    }

    fn bench(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["bench", "kv", "--unix"]).arg(&self.socket).args(arguments);
        command
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < TIMEOUT, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const SHORT: [&str; 4] = ["--seconds", "0.2", "--warmup", "0"];

#[test]
fn writes_keys_of_its_own_and_removes_them() {
    let redis = Redis::start();
    redis.ask("SET key:12 precious");
    for test in ["set", "get", "mixed"] {
        let output = redis.bench(&["--test", test]).args(SHORT).output().expect("ferrite starts");
        assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
        assert_eq!(redis.ask("GET key:12"), "$8\r\nprecious\r\n+OK\r\n", "{test}");
        assert_eq!(redis.ask("DBSIZE"), ":1\r\n+OK\r\n", "{test}");
    }
    let kept = redis.bench(&["--test", "get", "--keys", "50", "--keep-keys", "--json"]);
    let output = { kept }.args(SHORT).output().expect("ferrite starts");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let prefix = report["key_prefix"].as_str().expect("a prefix");
    assert!(prefix.starts_with("ferrite-bench:"), "{prefix}");
    assert!(redis.ask(&format!("EXISTS {prefix}0 {prefix}49")).starts_with(":2\r\n"));
    assert!(redis.ask("DBSIZE").starts_with(":51\r\n"));
}

#[test]
fn removes_its_keys_when_it_is_interrupted() {
    let redis = Redis::start();
    let mut command = redis.bench(&["--test", "get", "--seconds", "600"]);
    let mut bench = command.stderr(Stdio::piped()).spawn().expect("ferrite starts");
    until("the keys are written", || redis.ask("DBSIZE").starts_with(":10000\r\n"));
    let id = bench.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().expect("kill").success());
    let lines: Vec<String> = BufReader::new(bench.stderr.take().expect("piped"))
        .lines()
        .map(|line| line.expect("UTF-8"))
        .collect();
    assert_eq!(bench.wait().expect("an end").code(), Some(1), "{lines:?}");
    assert!(lines[0].contains("removing the keys"), "{lines:?}");
    assert_eq!(lines.last().map(String::as_str), Some("ferrite: interrupted"), "{lines:?}");
    assert!(redis.ask("DBSIZE").starts_with(":0\r\n"));
}

#[test]
fn names_the_keys_that_it_cannot_remove() {
    let redis = Redis::start();
    redis.ask("ACL SETUSER default -del");
    let output = redis.bench(&["--test", "set"]).args(SHORT).output().expect("ferrite starts");
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("cannot remove the keys ferrite-bench:"), "{text}");
    assert!(text.contains("the server rejects DEL: -NOPERM"), "{text}");
}

#[test]
fn a_plot_that_cannot_be_written_fails_before_the_benchmark() {
    let redis = Redis::start();
    let output = redis
        .bench(&["--plot", "/nonexistent/plot.svg", "--seconds", "600"])
        .output()
        .expect("ferrite starts");
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("cannot write /nonexistent/plot.svg: No such file"), "{text}");
    assert!(redis.ask("INFO commandstats").find("cmdstat_set").is_none(), "it wrote keys");

    let plot = redis.socket.with_extension("svg");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["bench", "kv", "--unix", "/nonexistent/socket", "--plot"]).arg(&plot);
    assert_eq!(command.output().expect("ferrite starts").status.code(), Some(1));
    assert!(!plot.exists(), "a failed benchmark leaves no empty plot");
}
