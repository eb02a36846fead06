//! `ferrite top` in a terminal, against a real engine with the module, and against an admin port.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};

use ferrite_testkit::engine::REDIS;
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Engine, Start, TIMEOUT, Terminal, free_port, until};
use serde_json::Value;

/// The answer of a gateway's admin port, written by hand, with a value for each figure that is
/// shown. `host_metrics` uses a real admin port.
const METRICS: &str = include_str!("top/metrics.txt");

fn top() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ferrite"))
}

/// Starts an engine with the module, which listens over TCP at the returned port.
fn engine(options: &[&str]) -> (Engine, u16) {
    let port = free_port();
    let port_text = port.to_string();
    let arguments = ["rdma", "prefer", "rdma-bind", "127.0.0.1", "rdma-port", &port_text];
    let engine =
        Engine::start(&Start { program: Path::new(REDIS), options, module: Some(&arguments) });
    (engine, port)
}

/// Returns the text that the terminal shows now.
fn shown(terminal: &Terminal) -> String {
    let mut screen = vt100::Parser::new(32, 132, 0);
    screen.process(&terminal.screen.bytes());
    screen.screen().contents()
}

#[track_caller]
fn until_shown(terminal: &Terminal, text: &str) {
    until_or(TIMEOUT, text, || shown(terminal).contains(text), || shown(terminal));
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn lists_filters_and_kills_sessions_in_a_terminal() {
    let (engine, port) = engine(&[]);
    let mut first = Client::to_tcp(("127.0.0.1", port));
    let mut second = Client::to_tcp(("127.0.0.1", port));
    for client in [&mut first, &mut second] {
        assert_eq!(client.text(&["SET", "key", "value"]), "+OK");
    }
    let listed = engine.client().text(&["FERRITE", "CLIENTS"]);
    let addresses: Vec<_> = listed
        .split_whitespace()
        .filter_map(|field| field.strip_prefix("addr="))
        .map(str::to_owned)
        .collect();
    assert_eq!(addresses.len(), 2, "{listed}");

    let mut command = top();
    command.args(["top", "--interval", "0.1", "--unix"]).arg(engine.socket());
    let mut terminal = Terminal::start(&command, 132, 32);
    until_shown(&terminal, "2 sessions");
    for text in [&addresses[0], &addresses[1], "Redis 7.0", "ferrite top", "k kill"] {
        until_shown(&terminal, text);
    }
    terminal.screen.type_keys(&format!("/{}\r", addresses[1]));
    until_shown(&terminal, "1 of 2 sessions match");
    terminal.screen.type_keys("\r");
    until_shown(&terminal, "engine's client id");
    terminal.screen.type_keys("k");
    until_shown(&terminal, &format!("of {}?", addresses[1]));
    terminal.screen.type_keys("n");
    until_shown(&terminal, "not killed");
    terminal.screen.type_keys("k");
    until_shown(&terminal, &format!("of {}?", addresses[1]));
    terminal.screen.type_keys("y");
    until_shown(&terminal, "was killed");
    until_shown(&terminal, "0 of 1 sessions match");
    assert!(!engine.client().text(&["FERRITE", "CLIENTS"]).contains(&addresses[1]));
    assert_eq!(first.text(&["GET", "key"]), "value", "the other session stays open");
    terminal.screen.type_keys("q");
    let (status, output) = terminal.finish();
    assert!(status.success(), "{output}");
    assert!(output.contains("\x1b[?1049l"), "the screen is restored");
}

#[test]
fn reports_a_lost_engine_and_connects_again() {
    let (mut engine, port) = engine(&[]);
    let mut command = top();
    command.args(["top", "--interval", "0.1", "--unix"]).arg(engine.socket());
    let mut terminal = Terminal::start(&command, 132, 32);
    until_shown(&terminal, "0 sessions");
    engine.kill();
    until_shown(&terminal, "cannot connect to ");
    engine.restart();
    let _client = Client::to_tcp(("127.0.0.1", port));
    until_shown(&terminal, "1 session ");
    until(TIMEOUT, "the error is gone", || !shown(&terminal).contains("cannot connect to "));
    terminal.screen.type_keys("q");
    assert!(terminal.finish().0.success());
}

#[test]
fn prints_once_for_scripts() {
    let (engine, port) = engine(&["--latency-tracking-info-percentiles", "75 100"]);
    let mut client = Client::to_tcp(("127.0.0.1", port));
    assert_eq!(client.text(&["SET", "key", "value"]), "+OK");
    let run = |arguments: &[&str]| {
        let mut command = top();
        command.args(["top", "--interval", "0.1", "--unix"]).arg(engine.socket());
        // As in redis-cli, an empty password counts as unset.
        command.args(arguments).env("REDISCLI_AUTH", "").output().expect("ferrite starts")
    };
    let output = run(&["--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let state: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(state["sessions"].as_array().map(Vec::len), Some(1), "{state}");
    assert_eq!(state["sessions"][0]["transport"], "tcp", "{state}");
    assert!(state["totals"]["called"].as_u64().is_some_and(|count| count > 0), "{state}");
    assert!(state["totals_per_s"]["called"].is_u64(), "{state}");
    assert!(state["memory"]["registered"].is_u64(), "{state}");
    assert!(state["latency"][0]["p75_us"].is_number(), "{state}");
    assert!(state["latency"][0]["p50_us"].is_null(), "{state}");
    // stdout is not a terminal, so there is no screen.
    let output = run(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains('\x1b'), "{text}");
    assert!(text.contains("127.0.0.1:") && text.contains("transport"), "{text}");
    assert!(text.contains("latency, set: p75 "), "{text}");
}

#[test]
fn explains_why_there_is_nothing_to_see() {
    let run = |arguments: &[&str]| {
        top().arg("top").args(arguments).env_remove("REDISCLI_AUTH").output().expect("it starts")
    };
    let plain = Engine::redis(&[]);
    let socket = plain.socket().to_str().expect("UTF-8").to_owned();
    let output = run(&["--unix", &socket]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("the engine has no Ferrite module"), "{}", stderr(&output));
    let (secret, _) = engine(&["--requirepass", "hush"]);
    let socket = secret.socket().to_str().expect("UTF-8").to_owned();
    assert!(stderr(&run(&["--unix", &socket])).contains("set REDISCLI_AUTH"));
    let wrong = run(&["--unix", &socket, "--user", "default", "--auth", "wrong"]);
    assert!(stderr(&wrong).contains("AUTH: WRONGPASS"), "{}", stderr(&wrong));
    let without = run(&["--unix", &socket, "--user", "default"]);
    assert!(stderr(&without).contains("AUTH: WRONGPASS"), "{}", stderr(&without));
    let right = run(&["--unix", &socket, "--interval", "0.1", "--auth", "hush"]);
    assert!(right.status.success(), "{}", stderr(&right));
    let refused = run(&["127.0.0.1:1", "--json"]);
    assert!(stderr(&refused).contains("cannot connect to 127.0.0.1:1"), "{}", stderr(&refused));
    assert!(String::from_utf8_lossy(&refused.stdout).starts_with("{\"error\":"));
}

#[test]
fn says_that_it_has_no_tls() {
    let run = |arguments: &[&str]| {
        let output = top().arg("top").args(arguments).output().expect("it starts");
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        stderr(&output)
    };
    for arguments in [&["rediss://127.0.0.1"][..], &["127.0.0.1", "--tls"]] {
        let text = run(arguments);
        assert!(text.contains("this command has no TLS; use the engine's Unix socket"), "{text}");
    }
    // A TLS port answers a command without TLS with an alert.
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        client.read_exact(&mut [0; 1]).expect("a command");
        client.write_all(b"\x15\x03\x03\x00\x02\x02\x46").expect("an alert");
        let _ = client.read_to_end(&mut Vec::new());
    });
    let text = run(&[&address]);
    assert!(text.contains("the engine's port expects TLS; this command has no TLS"), "{text}");
}

/// Serves [`METRICS`], and an error for other paths. Returns the address.
fn serve_metrics() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            answer(connection);
        }
    });
    address
}

fn answer(mut connection: TcpStream) {
    let mut request = Vec::new();
    let mut byte = [0];
    while !request.ends_with(b"\r\n\r\n") && matches!(connection.read(&mut byte), Ok(1)) {
        request.push(byte[0]);
    }
    let (status, body) = match request.starts_with(b"GET /metrics ") {
        true => ("200 OK", METRICS),
        false => ("404 Not Found", ""),
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = connection.write_all(answer.as_bytes());
}

#[test]
fn watches_an_admin_port() {
    let url = format!("http://{}", serve_metrics());
    let run = |arguments: &[&str]| {
        let arguments = [&["top", "--interval", "0.1", "--admin", &url][..], arguments].concat();
        top().args(arguments).output().expect("ferrite starts")
    };
    let output = run(&["--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let state: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(state["program"], "ferrite gateway 0.1.0", "{state}");
    assert!(state["sessions"].is_null(), "{state}");
    assert_eq!(state["transports"]["rdma ferrite"], 3, "{state}");
    assert_eq!(
        (&state["totals"]["send_ops"], &state["totals"]["out_bytes"]),
        (&1200.into(), &50_000.into())
    );
    assert_eq!(state["fallbacks"]["no device"], 2, "{state}");
    assert_eq!(state["memory"]["registered"], 8_388_608, "{state}");
    assert_eq!(state["devices"]["rxe1 1 rcvd_pkts"], 77, "{state}");
    assert_eq!(state["latency"][0]["name"], "send", "{state}");
    assert!(state["latency"][0]["p50_us"].as_f64().is_some_and(|us| us > 0.5 && us < 1.1));

    let mut command = top();
    command.args(["top", "--interval", "0.1", "--admin", &url]);
    let mut terminal = Terminal::start(&command, 132, 32);
    for text in ["ferrite gateway 0.1.0", "rdma ferrite", "no device", "rxe1 1 rcvd_pkts"] {
        until_shown(&terminal, text);
    }
    terminal.screen.type_keys("q");
    assert!(terminal.finish().0.success());
}
