//! `ferrite bench fabric` and `ferrite bench stream` between the two hosts.

use std::io::{BufRead as _, BufReader};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use ferrite_fabric::{ConnectOptions, Fabric};
use ferrite_testkit::lab::slowdown;
use ferrite_verbs::Verbs;
use serde_json::Value;

use crate::{
    BENCH, STREAM, Server, error_of, ferrite, output, packets_sent, text, wait_for_traffic,
};

/// How long `ferrite bench fabric` waits for the server's first answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the report of a client of `ferrite bench`.
fn report_of(client: &Output) -> Value {
    assert!(client.status.success(), "{}", text(&client.stderr));
    serde_json::from_slice(&client.stdout).expect("JSON")
}

#[test]
fn bench_measures_every_operation() {
    let server = Server::of(BENCH, &["--once"]);
    let before = packets_sent();
    let client =
        server.run_client(&["--size", "64,20000", "--iters", "20", "--warmup", "2", "--json"]);
    let report = report_of(&client);
    assert_eq!(
        (&report["device"], &report["mtu_bytes"]),
        (&"rxe2".into(), &4096.into()),
        "{report}"
    );
    assert_eq!((&report["software"], &report["mode"]), (&true.into(), &"poll".into()));
    let results = report["results"].as_array().expect("a list");
    assert_eq!(results.len(), 12);
    for row in results {
        if row["measure"] == "latency" {
            let of = if row["op"] == "read" { "round_trip" } else { "half_round_trip" };
            assert_eq!((&row["iterations"], &row["latency_of"]), (&20.into(), &of.into()), "{row}");
            assert!(row["latency_us"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{row}");
        } else {
            let bytes = 20 * row["size_bytes"].as_u64().expect("a size");
            assert_eq!((&row["messages"], &row["bytes"]), (&20.into(), &bytes.into()), "{row}");
            assert!(row["mib_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        }
    }
    let sent = packets_sent() - before;
    assert!(sent >= 12 * 22, "{sent} packets on the wire");
    let (code, served) = server.finish();
    assert_eq!(code, Some(0));
    assert!(served.contains("on rxe1: links 1, cases 12"), "{served}");
}

#[test]
fn bench_measures_streams() {
    let server = Server::of(STREAM, &["--once"]);
    let report = report_of(&server.run_client(&["--rounds", "20", "--mib", "2", "--json"]));
    assert_eq!(
        (&report["device"], &report["software"]),
        (&"rxe2".into(), &true.into()),
        "{report}"
    );
    let results = report["results"].as_array().expect("a list");
    let measured: Vec<_> =
        results.iter().map(|row| format!("{} {}", row["size_bytes"], row["transfers"])).collect();
    assert_eq!(measured, ["64 1", "65536 32", "1048576 2"], "{report}");
    assert!(results[0]["latency_us"]["p50"].as_f64().is_some_and(|us| us > 0.0), "{report}");
    assert!(
        results.iter().all(|row| row["mib_per_s"].as_f64().is_some_and(|rate| rate > 0.0)),
        "{report}"
    );
    let (code, served) = server.finish();
    assert_eq!(code, Some(0));
    assert!(served.contains("on rxe1, number of tests: 3"), "{served}");
}

#[test]
fn bench_sleeps_in_event_mode() {
    let server = Server::of(BENCH, &["--once", "--json"]);
    let few = ["--mode", "event", "--size", "64", "--iters", "20", "--warmup", "2", "--json"];
    let report = report_of(&server.run_client(&few));
    let results = report["results"].as_array().expect("a list");
    let measured: Vec<_> =
        results.iter().map(|row| format!("{} {}", row["measure"], row["op"])).collect();
    assert_eq!(measured.len(), 5, "{measured:?}");
    assert!(
        report["notes"][0].as_str().is_some_and(|note| note.contains("latency of write")),
        "{report}"
    );
    assert!(results[0]["client"]["sleeps"].as_u64().is_some_and(|sleeps| sleeps > 0), "{report}");
    let served: Value = serde_json::from_str(&server.finish().1).expect("JSON");
    assert_eq!((&served["cases"], &served["device"]), (&5.into(), &"rxe1".into()));
}

#[test]
fn bench_measures_several_links_next_to_idle_ones() {
    let server = Server::of(BENCH, &[]);
    let few =
        ["--links", "3", "--idle", "40", "--size", "64,9000", "--iters", "31", "--warmup", "2"];
    let report = report_of(&server.run_client(&[&few[..], &["--json"]].concat()));
    assert_eq!((&report["links"], &report["server"]["links"]), (&3.into(), &3.into()));
    let idle = &report["idle"];
    assert_eq!(
        (&idle["open"], &idle["kept"], &idle["failures"]),
        (&40.into(), &40.into(), &Value::Object(Default::default()))
    );
    assert!(idle["pinned_bytes_per_link"].as_f64().is_some_and(|bytes| bytes <= 16384.0), "{idle}");
    assert_eq!(report["results"].as_array().map(Vec::len), Some(12));
    // The same server again, with text output.
    let client = server.run_client(&few);
    let shown = text(&client.stdout);
    for part in [
        "over rxe2, 3 links, MTU 4096, poll mode\nSoftware device: compare ratios only, ",
        "40 of 40 idle links opened",
        "send     64 half round trip ",
        "read   9000 ",
        "bandwidth      MiB/s  messages/s  window  seconds",
    ] {
        assert!(shown.contains(part), "{part} is not in:\n{shown}{}", text(&client.stderr));
    }
}

/// Sends these requests over a link. Returns the server's replies, up to the end of the link.
fn replies(server: &Server, requests: &[&str]) -> String {
    let fabric = Fabric::builder(&Verbs::system().expect("verbs")).build().expect("a fabric");
    let local = ConnectOptions::new().local("10.0.0.2:0".parse().expect("an address"));
    fabric.block_on(async {
        let link = fabric
            .connect_with(server.address.parse().expect("an address"), &local)
            .await
            .expect("a link");
        let mut replies = Vec::new();
        for request in requests {
            link.post_bytes(0, request.as_bytes()).expect("queue space");
            let Ok(reply) = link.recv().await else { break };
            replies.push(String::from_utf8(reply.to_vec()).expect("UTF-8"));
        }
        replies.join("\n")
    })
}

#[test]
fn bench_server_rejects_invalid_requests_and_continues() {
    let server = Server::of(BENCH, &[]);
    let begin = r#"{"begin":{"format":1,"links":1}}"#;
    let test = |size: u32| {
        format!(
            r#"{{"test":{{"op":"write","measure":"latency","size_bytes":{size},"mode":"event"}}}}"#
        )
    };
    for (requests, why) in [
        (vec!["nonsense"], "does not use the protocol of ferrite bench"),
        (vec![r#"{"begin":{"format":1,"links":0}}"#], "0 links requested, expected 1 to"),
        (vec![r#"{"begin":{"format":9,"links":1}}"#], "protocol version 9"),
        (vec![r#""end""#], "expected Begin"),
        (vec![begin, "{}"], "does not use the protocol"),
        (vec![begin, &test(0)], "messages of 0 bytes"),
        (vec![begin, &test(64)], "nothing wakes its receiver"),
    ] {
        let reply = replies(&server, &requests);
        assert!(reply.contains("refused") && reply.contains(why), "{requests:?}: {reply}");
    }
    // Clients that send nothing, or disconnect in the middle of a session.
    assert_eq!(replies(&server, &[]), "");
    assert!(replies(&server, &[begin]).contains("registered_bytes"));
    let foreign_peer =
        output(&["pingpong", &server.address, "--bind", "10.0.0.2", "--json", "--timeout", "5"]);
    assert_eq!(error_of(&foreign_peer)["kind"], "rejected");
    let few = ["--size", "64", "--iters", "5", "--warmup", "1", "--json"];
    assert_eq!(report_of(&server.run_client(&few))["results"].as_array().map(Vec::len), Some(6));
}

#[test]
fn bench_notices_a_killed_peer() {
    for op in ["send", "write", "read"] {
        for measure in ["latency", "bandwidth"] {
            let mut server = Server::of(BENCH, &[]);
            let before = packets_sent();
            let client = server.start_client(&[
                "--op",
                op,
                "--measure",
                measure,
                "--seconds",
                "600",
                "--json",
            ]);
            wait_for_traffic(before);
            server.child.kill().expect("a live server");
            let since = Instant::now();
            let error = error_of(&client.wait_with_output().expect("it ends"));
            // The kernel may free the memory of a dying process before its queue pairs. The first
            // error is "denied" then.
            let kind = error["kind"].as_str().expect("a kind");
            assert!(["link_down", "denied"].contains(&kind), "{op} {measure}: {error}");
            assert!(
                since.elapsed() < Duration::from_secs(5),
                "{op} {measure}: {:?}",
                since.elapsed()
            );
        }
    }
    // The server serves the next client after a client was killed.
    let server = Server::of(BENCH, &[]);
    let before = packets_sent();
    let mut first = server.start_client(&["--seconds", "600"]);
    wait_for_traffic(before);
    first.kill().expect("still running");
    first.wait().expect("it ends");
    report_of(&server.run_client(&["--op", "read", "--size", "64", "--iters", "5", "--json"]));
}

#[test]
fn bench_reports_that_no_server_runs() {
    let output = output(&["bench", "fabric", "10.0.0.1:7499", "--local", "10.0.0.2", "--json"]);
    assert_eq!(error_of(&output)["kind"], "rejected");
    let message = text(&output.stderr);
    assert!(message.contains("`ferrite bench fabric --listen` must run there"), "{message}");
}

/// The user may give the port of a gateway or a module instead of that of a benchmark.
#[test]
fn bench_fabric_names_a_server_of_another_protocol() {
    let redis = ferrite_testkit::Engine::redis(&[]);
    let engine = format!("unix:{}", redis.socket().display());
    let mut gateway = ferrite(&["gateway", "--listen", "10.0.0.1:7492", "--json"])
        .args(["--engine", &engine, "--protected-mode", "no"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("ferrite starts");
    let mut line = String::new();
    let mut stdout = BufReader::new(gateway.stdout.take().expect("piped"));
    stdout.read_line(&mut line).expect("a line");
    let started = Instant::now();
    let output = output(&["bench", "fabric", "10.0.0.1:7492", "--local", "10.0.0.2"]);
    let elapsed = started.elapsed();
    let _ = gateway.kill();
    let _ = gateway.wait();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("the peer is a Redis or Valkey server"), "{message}");
    assert!(elapsed < ANSWER_TIMEOUT * slowdown(), "{elapsed:?}");
}

/// A server that accepts the connection and stays silent does not block the benchmark for ever. A
/// server that measures with another client is silent.
#[test]
fn bench_fabric_does_not_wait_for_a_silent_peer() {
    let server = Server::of(BENCH, &[]);
    let before = packets_sent();
    let mut first = server.start_client(&["--seconds", "600"]);
    wait_for_traffic(before);
    let started = Instant::now();
    let output = server.run_client(&[]);
    let elapsed = started.elapsed();
    first.kill().expect("still running");
    first.wait().expect("it ends");
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    let why = format!("{}: connected, but no answer within 10 s: ", server.address);
    assert!(message.contains(&why), "{message}");
    assert!(elapsed < 2 * ANSWER_TIMEOUT * slowdown(), "{elapsed:?}");
}
