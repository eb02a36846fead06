//! The log of `ferrite gateway` and `ferrite relay`: its format, its limits, and what it says about
//! settings that change.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use ferrite_testkit::process::{KillOnDrop, signal};
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Engine, TIMEOUT, TempDir, free_port};
use jiff::Timestamp;
use serde_json::Value;

use crate::{first_event, text};

/// A gateway or relay that logs JSON into a file.
struct Logged {
    process: KillOnDrop,
    listening: Value,
    log: PathBuf,
}

impl Logged {
    fn start(directory: &TempDir, arguments: &[&str]) -> Self {
        Self::start_with(directory, "forbid", arguments)
    }

    fn start_with(directory: &TempDir, rdma: &str, arguments: &[&str]) -> Self {
        let log = directory.path().join("log");
        let process = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .args(arguments)
            .args(["--listen", "127.0.0.1:0", "--rdma", rdma, "--json", "--log", "json"])
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&log).expect("a log"))
            .spawn();
        let mut process = KillOnDrop(process.expect("ferrite starts"));
        let listening = first_event(&mut process.0);
        Self { process, listening, log }
    }

    /// Returns the address that the first event has under this name.
    fn address(&self, name: &str) -> &str {
        self.listening[name].as_str().expect("an address")
    }

    fn lines(&self) -> Vec<Value> {
        let log = std::fs::read_to_string(&self.log).expect("the log");
        log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Returns the level and the message of the lines whose message contains `text`.
    fn logged(&self, text: &str) -> Vec<(String, String)> {
        let of = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
        let lines = self.lines();
        let lines = lines.iter().map(|line| (of(line, "level"), of(line, "message")));
        lines.filter(|(_, message)| message.contains(text)).collect()
    }

    /// Sends SIGHUP and waits for a line whose message contains `text`.
    fn reload(&self, text: &str) {
        signal("HUP", self.process.0.id());
        let log = || std::fs::read_to_string(&self.log).expect("the log");
        until_or(TIMEOUT, text, || log().contains(text), log);
    }

    fn stop(mut self) {
        signal("TERM", self.process.0.id());
        assert!(self.process.0.wait().expect("it ends").success());
    }
}

/// Returns everything that a server sends to a client with this request.
fn answer(address: &str, request: &str) -> String {
    let mut client = TcpStream::connect(address).expect("it listens");
    client.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    let _ = client.write_all(request.as_bytes()); // the server may have closed already
    let mut answer = Vec::new();
    let _ = client.read_to_end(&mut answer);
    text(&answer)
}

/// SIGHUP applies the settings that can change. The log has a time, a level and the changes.
#[test]
fn gateway_reads_its_settings_again_on_sighup() {
    let directory = TempDir::new("reload");
    let file = directory.file("ferrite.toml", "");
    let gateway = Logged::start(
        &directory,
        &[
            &["gateway", "--protected-mode", "no", "--engine", "unix:/nonexistent"][..],
            &["--admin-listen", "127.0.0.1:0", "--config", file.to_str().expect("UTF-8")],
        ]
        .concat(),
    );
    let new = "[network]\nrdma_device = \"a\"\n[network.rdma]\nmax_connections = 1\n";
    directory.file("ferrite.toml", new);
    gateway.reload("restart to apply these changed settings: rdma-device");
    let changed = "SIGHUP received: max-clients is now 1 (was 10000)";
    assert_eq!(gateway.logged("max-clients"), [("INFO".into(), changed.into())]);
    let metrics = answer(gateway.address("admin"), "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(metrics.contains("\nferrite_sessions_max 1\n"), "{metrics}");
    gateway.stop();
}

/// Reads three files in turn: one with a lower log level, one with an error, and one without the
/// error.
#[test]
fn relay_reads_its_settings_again_on_sighup() {
    let directory = TempDir::new("relay-reload");
    let set = |level: &str, poll: &str| {
        let logs = format!("[observability]\nlog_level = \"{level}\"\n");
        let text = format!("{logs}[network.rdma]\nbusy_poll_us = {poll}\n");
        directory.file("ferrite.toml", &text)
    };
    let file = set("error", "0");
    let config = ["--config", file.to_str().expect("UTF-8")];
    let relay =
        Logged::start(&directory, &[&["relay", "--to", "127.0.0.1:1"], &config[..]].concat());
    assert!(relay.lines().is_empty(), "only errors are logged: {:?}", relay.lines());

    set("info", "0");
    // The old level would have suppressed this line, so the new level applies.
    relay.reload("SIGHUP received: log-level is now info (was error)");

    set("nonsense", "7");
    relay.reload("no setting was changed: ");
    let [(level, message)] = &relay.logged("no setting was changed")[..] else {
        panic!("expected one line with `no setting was changed`: {:?}", relay.lines())
    };
    assert_eq!(level, "ERROR");
    assert!(message.contains("/ferrite.toml:2: observability.log_level: "), "{message}");

    set("info", "7");
    // The file with the error changed no setting: `busy-poll-us` was still 0, and the log level is
    // not among the changes.
    relay.reload("SIGHUP received: busy-poll-us is now 7us (was 0us)");
    relay.stop();
}

/// Clients that fail again and again for the same reason do not fill the relay's log.
#[test]
fn relay_logs_a_failing_server_once_a_minute() {
    let directory = TempDir::new("relay-log");
    let relay = Logged::start(&directory, &["relay", "--to", "127.0.0.1:1"]);
    let begun = Instant::now();
    for _ in 0..20 {
        let answer = answer(relay.address("address"), "PING\r\n");
        assert_eq!(answer, "-ERR Ferrite relay: cannot connect to the server\r\n");
    }
    let minutes = begun.elapsed().as_secs() / 60;
    let lines = relay.logged("cannot connect to the server");
    assert!((1..=1 + minutes).contains(&(lines.len() as u64)), "{lines:?}");
    relay.stop();
}

/// Clients of a relay that falls back to TCP do not fill its log. Loopback has no RDMA.
#[test]
fn relay_logs_a_fallback_once_a_minute() {
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--bind", "127.0.0.1", "--port", &port]);
    let to = format!("127.0.0.1:{port}");
    let directory = TempDir::new("relay-fallback");
    let relay = Logged::start_with(&directory, "prefer", &["relay", "--to", &to]);
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(answer(relay.address("address"), "PING\r\nQUIT\r\n"), "+PONG\r\n+OK\r\n");
    }
    let minutes = begun.elapsed().as_secs() / 60;
    let lines = relay.logged("uses TCP instead of RDMA");
    assert!((1..=1 + minutes).contains(&(lines.len() as u64)), "{lines:?}");
    assert!(lines.iter().all(|(level, _)| level == "WARN"), "{lines:?}");
    assert!(lines[0].1.starts_with(&format!("link to {to} uses TCP")), "{lines:?}");
    relay.stop();
}

/// Each line of a text log begins with a time in UTC and a level.
#[test]
fn text_log_has_times_and_levels() {
    let directory = TempDir::new("text-log");
    let log = directory.path().join("log");
    let begun = Timestamp::now();
    let relay = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .args(["relay", "--to", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--rdma", "forbid"])
        .stderr(std::fs::File::create(&log).expect("a log"))
        .spawn();
    let mut relay = KillOnDrop(relay.expect("ferrite starts"));
    let text = || std::fs::read_to_string(&log).expect("the log");
    // At start, the relay asks the server for an answer.
    for part in ["relay listening on ", "the server at 127.0.0.1:1"] {
        until_or(TIMEOUT, part, || text().contains(part), text);
    }
    signal("TERM", relay.0.id());
    assert!(relay.0.wait().expect("it ends").success());
    let mut levels = Vec::new();
    for line in text().lines() {
        let mut words = line.split_whitespace();
        let time = words.next().expect("a time");
        assert!(time.ends_with('Z'), "{line}");
        let time: Timestamp = time.parse().unwrap_or_else(|error| panic!("{error}: {line}"));
        // Compares microseconds, because the log has no smaller unit.
        assert!(begun.as_microsecond() <= time.as_microsecond(), "{begun}: {line}");
        assert!(time <= Timestamp::now(), "{line}");
        levels.push(words.next().expect("a level").to_owned());
    }
    assert!(levels.iter().all(|level| ["INFO", "WARN"].contains(&level.as_str())), "{}", text());
    assert!(levels.contains(&"INFO".into()) && levels.contains(&"WARN".into()), "{}", text());
}
