//! `ferrite pingpong` between the two hosts.

use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{Server, error_of, output, packets_sent, text, wait_for_traffic};

#[test]
fn pingpong_runs_every_operation_and_mode_over_the_wire() {
    const ROUNDS: u64 = 60;
    for (op, mode, size) in [
        ("send", "poll", "64"),
        ("send", "event", "64"),
        ("write", "poll", "64"),
        ("read", "poll", "64"),
        ("read", "event", "64"),
        // First messages of several packets, too large for inline data; then the shortest message.
        ("send", "poll", "20000"),
        ("write", "poll", "20000"),
        ("read", "poll", "20000"),
        ("send", "event", "1"),
        ("write", "poll", "1"),
        ("read", "poll", "1"),
    ] {
        let case = format!("{op} {mode} {size}");
        let server = Server::start(&[]);
        let before = packets_sent();
        let client = server.run_client(&[
            "--op", op, "--mode", mode, "--size", size, "--iters", "50", "--warmup", "10", "--json",
        ]);
        assert!(client.status.success(), "{case}: {}", text(&client.stderr));
        let sent = packets_sent() - before;
        assert!(sent >= ROUNDS, "{case}: {sent} packets on the wire for {ROUNDS} rounds");
        let report: Value = serde_json::from_slice(&client.stdout).expect("JSON");
        assert_eq!((&report["op"], &report["mode"]), (&op.into(), &mode.into()), "{case}");
        assert_eq!(
            (&report["device"], &report["gid"]["address"]),
            (&"rxe2".into(), &"10.0.0.2".into())
        );
        let p50 = report["latency_us"]["p50"].as_f64().expect("a number");
        assert!(p50 > 0.0, "{case}: {report}");
        let (code, served) = server.finish();
        assert_eq!(code, Some(0), "{case}");
        assert!(
            served.contains(&format!("{op} of {size} bytes, {mode} mode, {ROUNDS} rounds")),
            "{case}: {served}"
        );
    }
}

#[test]
fn pingpong_server_serves_several_clients_with_forever() {
    let server = Server::start(&["--forever"]);
    for _ in 0..3 {
        let client = server.run_client(&["--iters", "20", "--warmup", "1"]);
        assert!(client.status.success(), "{}", text(&client.stderr));
        assert!(text(&client.stdout).contains("every message checked"));
    }
}

/// Starts a client with endless rounds, and calls `fault` on the server while they run. Returns the
/// client's output, and how long it ran after the fault.
fn client_of_failing_server(more: &[&str], fault: impl FnOnce(&mut Child)) -> (Output, Duration) {
    let mut server = Server::start(&[]);
    let endless = ["--iters", "1000000000", "--timeout", "2", "--json"];
    let before = packets_sent();
    let client = server.start_client(&[&endless, more].concat());
    wait_for_traffic(before);
    fault(&mut server.child);
    let since = Instant::now();
    let output = client.wait_with_output().expect("it ends");
    (output, since.elapsed())
}

#[test]
fn pingpong_client_notices_a_killed_server() {
    for more in [
        &["--op", "send"][..],
        &["--op", "send", "--mode", "event"],
        &["--op", "write"],
        &["--op", "read"],
    ] {
        let (output, took) =
            client_of_failing_server(more, |server| server.kill().expect("a live server"));
        let error = error_of(&output);
        // The kind depends on which comes first: the CM's event, or a message that is not
        // acknowledged.
        let kind = error["kind"].as_str().expect("a kind");
        assert!(["disconnected", "completion_error"].contains(&kind), "{more:?}: {error}");
        assert!(took < Duration::from_secs(5), "{more:?}: {took:?}");
    }
}

#[test]
fn pingpong_client_times_out_if_the_server_stops() {
    for more in [&["--op", "send"][..], &["--op", "send", "--mode", "event"], &["--op", "write"]] {
        let (output, took) = client_of_failing_server(more, |server| {
            let stop = Command::new("kill").args(["-STOP", &server.id().to_string()]).status();
            assert!(stop.expect("kill starts").success());
        });
        let error = error_of(&output);
        assert_eq!(error["kind"], "timeout", "{more:?}: {error}");
        assert!(took < Duration::from_secs(6), "{more:?}: {took:?}");
    }
}

#[test]
fn pingpong_reports_that_nobody_listens() {
    let output = output(&["pingpong", "10.0.0.1:7499", "--bind", "10.0.0.2", "--json"]);
    let error = error_of(&output);
    assert_eq!(error["kind"], "rejected");
    assert!(
        text(&output.stderr).contains("no program listens on this port"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn pingpong_server_rejects_a_second_client() {
    let server = Server::start(&[]);
    let before = packets_sent();
    let mut first = server.start_client(&["--iters", "1000000000"]);
    wait_for_traffic(before);
    let second = server.run_client(&["--json", "--timeout", "3"]);
    first.kill().expect("still running");
    first.wait().expect("it ends");
    assert_eq!(error_of(&second)["kind"], "rejected");
}
