//! The command on real devices: runs in the lab's guest, with rxe1 on 10.0.0.1 (h1) and rxe2 on
//! 10.0.0.2 (h2).

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use ferrite_fabric::{ConnectOptions, Fabric};
use ferrite_verbs::Verbs;
use serde_json::Value;

fn ferrite(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(arguments);
    command
}

fn output(arguments: &[&str]) -> Output {
    ferrite(arguments).output().expect("ferrite starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A command with two ends, and how its client says where it is.
type TwoEnds = (&'static [&'static str], &'static str);

const PINGPONG: TwoEnds = (&["pingpong"], "--bind");
const BENCH: TwoEnds = (&["bench", "fabric"], "--local");
const STREAM: TwoEnds = (&["bench", "stream"], "--local");

/// A server that listens, and is ended with the test.
struct Server {
    child: Child,
    address: String,
    ends: TwoEnds,
    /// Kept, so that it may go on talking.
    _stderr: BufReader<ChildStderr>,
}

impl Server {
    fn start(more: &[&str]) -> Self {
        Self::of(PINGPONG, more)
    }

    fn of(ends: TwoEnds, more: &[&str]) -> Self {
        // Of its own for every server: the CM keeps a port for a while after a connection.
        static NEXT_PORT: AtomicU16 = AtomicU16::new(7500);
        let address = format!("10.0.0.1:{}", NEXT_PORT.fetch_add(1, Ordering::Relaxed));
        let mut child = ferrite(&[ends.0, &["--listen", &address], more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ferrite starts");
        let mut line = String::new();
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        stderr.read_line(&mut line).expect("a line");
        assert!(line.contains("listening on"), "{line}");
        Self { child, address, ends, _stderr: stderr }
    }

    fn client(&self, more: &[&str]) -> Vec<String> {
        let (command, local) = self.ends;
        let arguments = [command, &[&self.address, local, "10.0.0.2"], more].concat();
        arguments.iter().map(ToString::to_string).collect()
    }

    fn run_client(&self, more: &[&str]) -> Output {
        let arguments = self.client(more);
        output(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn start_client(&self, more: &[&str]) -> Child {
        let arguments = self.client(more);
        ferrite(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ferrite starts")
    }

    /// Its exit code and output, once it has ended by itself.
    fn finish(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().expect("it ends");
        let stdout = self.child.stdout.take().expect("piped");
        let lines: Result<Vec<_>, _> = BufReader::new(stdout).lines().collect();
        (status.code(), lines.expect("text").join("\n"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Packets that left the client's interface.
fn packets_sent() -> u64 {
    let text =
        std::fs::read_to_string("/sys/class/net/h2/statistics/tx_packets").expect("a counter");
    text.trim().parse().expect("a number")
}

#[test]
fn devices_are_listed_with_the_address_to_use() {
    let output = output(&["devices", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let inventory: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(inventory["connection_manager"]["available"], true);
    for (name, address, netdev) in [("rxe1", "10.0.0.1", "h1"), ("rxe2", "10.0.0.2", "h2")] {
        let devices = inventory["devices"].as_array().expect("a list");
        let device = devices.iter().find(|device| device["name"] == name).expect(name);
        assert_eq!((&device["driver"], &device["software"]), (&"rxe".into(), &true.into()));
        let port = &device["ports"][0];
        assert_eq!((&port["active"], &port["link_layer"]), (&true.into(), &"Ethernet".into()));
        assert_eq!(port["netdevs"], serde_json::json!([netdev]));
        let chosen = &port["chosen_gid"]["index"];
        let gids = port["gids"].as_array().expect("a list");
        let gid =
            gids.iter().find(|gid| gid["index"] == *chosen).expect("the chosen one is listed");
        assert_eq!((&gid["address"], &gid["type"]), (&address.into(), &"RoCE v2".into()));
    }
}

#[test]
fn devices_for_people() {
    let output = output(&["devices", "--verbose"]);
    let shown = text(&output.stdout);
    for part in
        ["rxe1: Soft-RoCE (software", "*   1  10.0.0.1", "would be used: RoCE v2", "max_qp_wr"]
    {
        assert!(shown.contains(part), "{part} is not in:\n{shown}");
    }
}

#[test]
fn every_operation_and_mode_crosses_the_wire() {
    const ROUNDS: u64 = 60;
    for (op, mode, size) in [
        ("send", "poll", "64"),
        ("send", "event", "64"),
        ("write", "poll", "64"),
        ("read", "poll", "64"),
        ("read", "event", "64"),
        // Too large for inline data, of several packets, and as short as can be.
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
            served.contains(&format!("{op} of {size} bytes by {mode}, {ROUNDS} rounds")),
            "{case}: {served}"
        );
    }
}

#[test]
fn a_server_may_serve_for_ever() {
    let server = Server::start(&["--forever"]);
    for _ in 0..3 {
        let client = server.run_client(&["--iters", "20", "--warmup", "1"]);
        assert!(client.status.success(), "{}", text(&client.stderr));
        assert!(text(&client.stdout).contains("every message checked"));
    }
}

/// Starts a client with far too much to do, and does `harm` to the server once it is at work.
fn client_of_a_harmed_server(more: &[&str], harm: impl FnOnce(&mut Child)) -> (Output, Duration) {
    let mut server = Server::start(&[]);
    let endless = ["--iters", "1000000000", "--timeout", "2", "--json"];
    let client = server.start_client(&[&endless, more].concat());
    // Until it is at work: the emulated kernel is slow.
    let emulated = std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml");
    std::thread::sleep(Duration::from_millis(if emulated { 3000 } else { 500 }));
    harm(&mut server.child);
    let since = Instant::now();
    let output = client.wait_with_output().expect("it ends");
    (output, since.elapsed())
}

fn error_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    object["error"].clone()
}

#[test]
fn a_killed_server_is_noticed() {
    for more in [
        &["--op", "send"][..],
        &["--op", "send", "--mode", "event"],
        &["--op", "write"],
        &["--op", "read"],
    ] {
        let (output, took) =
            client_of_a_harmed_server(more, |server| server.kill().expect("a live server"));
        let error = error_of(&output);
        // Whichever comes first: the CM's word that the peer left, or a message that nobody
        // acknowledges.
        let kind = error["kind"].as_str().expect("a kind");
        assert!(["disconnected", "completion_error"].contains(&kind), "{more:?}: {error}");
        assert!(took < Duration::from_secs(5), "{more:?}: {took:?}");
    }
}

#[test]
fn a_stopped_server_is_a_timeout() {
    for more in [&["--op", "send"][..], &["--op", "send", "--mode", "event"], &["--op", "write"]] {
        let (output, took) = client_of_a_harmed_server(more, |server| {
            let stop = Command::new("kill").args(["-STOP", &server.id().to_string()]).status();
            assert!(stop.expect("kill starts").success());
        });
        let error = error_of(&output);
        assert_eq!(error["kind"], "timeout", "{more:?}: {error}");
        assert!(took < Duration::from_secs(6), "{more:?}: {took:?}");
    }
}

#[test]
fn nobody_listens() {
    let output = output(&["pingpong", "10.0.0.1:7499", "--bind", "10.0.0.2", "--json"]);
    let error = error_of(&output);
    assert_eq!(error["kind"], "rejected");
    assert!(text(&output.stderr).contains("nobody listens there"), "{}", text(&output.stderr));
}

#[test]
fn an_address_without_a_device_is_explained() {
    // The lab's bridge carries no RDMA device.
    let added = Command::new("ip").args(["addr", "replace", "192.0.2.9/24", "dev", "br0"]).status();
    assert!(added.expect("ip starts").success());
    let mut command = Command::new("timeout");
    command.args([
        "10",
        env!("CARGO_BIN_EXE_ferrite"),
        "pingpong",
        "--listen",
        "192.0.2.9",
        "--json",
    ]);
    let output = command.output().expect("timeout starts");
    let error = error_of(&output);
    assert_eq!(error["kind"], "no_route", "{error}");
    assert!(text(&output.stderr).contains("`ferrite devices` lists the addresses"), "{error}");
}

#[test]
fn a_busy_server_refuses_a_second_client() {
    let server = Server::start(&[]);
    let mut first = server.start_client(&["--iters", "1000000000"]);
    std::thread::sleep(Duration::from_millis(500));
    let second = server.run_client(&["--json", "--timeout", "3"]);
    first.kill().expect("still at work");
    first.wait().expect("it ends");
    assert_eq!(error_of(&second)["kind"], "rejected");
}

/// What a client of `ferrite bench fabric` measured.
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
    assert!(served.contains("on rxe1: tests 3"), "{served}");
}

#[test]
fn bench_sleeps_if_told_to() {
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
fn bench_over_several_links_beside_idle_ones() {
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
    // The same server, and for people.
    let client = server.run_client(&few);
    let shown = text(&client.stdout);
    for part in [
        "over rxe2, 3 links, MTU 4096, by poll\nSoft-RoCE: ratios mean something, microseconds do not.\n",
        "40 of 40 idle links opened",
        "send     64 half round trip ",
        "read   9000 ",
        "bandwidth      MiB/s  messages/s  window  seconds",
    ] {
        assert!(shown.contains(part), "{part} is not in:\n{shown}{}", text(&client.stderr));
    }
}

/// What the server answers to these words on a link, if it answers.
fn answer(server: &Server, words: &[&str]) -> String {
    let fabric = Fabric::builder(&Verbs::system().expect("verbs")).build().expect("a fabric");
    let local = ConnectOptions::new().local("10.0.0.2:0".parse().expect("an address"));
    fabric.block_on(async {
        let link = fabric
            .connect_with(server.address.parse().expect("an address"), &local)
            .await
            .expect("a link");
        let mut answers = Vec::new();
        for word in words {
            link.post_bytes(0, word.as_bytes()).expect("room");
            let Ok(answer) = link.recv().await else { break };
            answers.push(String::from_utf8(answer.to_vec()).expect("UTF-8"));
        }
        answers.join("\n")
    })
}

#[test]
fn bench_refuses_nonsense_and_goes_on() {
    let server = Server::of(BENCH, &[]);
    let begin = r#"{"begin":{"format":1,"links":1}}"#;
    let test = |size: u32| {
        format!(
            r#"{{"test":{{"op":"write","measure":"latency","size_bytes":{size},"mode":"event"}}}}"#
        )
    };
    for (words, why) in [
        (vec!["nonsense"], "does not speak as a ferrite bench does"),
        (vec![r#"{"begin":{"format":1,"links":0}}"#], "0 links: 1 to"),
        (vec![r#"{"begin":{"format":9,"links":1}}"#], "speaks version 9"),
        (vec![r#""end""#], "no way to begin"),
        (vec![begin, "{}"], "does not speak"),
        (vec![begin, &test(0)], "messages of 0 bytes"),
        (vec![begin, &test(64)], "nothing wakes its receiver"),
    ] {
        let said = answer(&server, &words);
        assert!(said.contains("refused") && said.contains(why), "{words:?}: {said}");
    }
    // Nor does it mind one that says nothing, or leaves in the middle.
    assert_eq!(answer(&server, &[]), "");
    assert!(answer(&server, &[begin]).contains("registered_bytes"));
    let foreign_peer =
        output(&["pingpong", &server.address, "--bind", "10.0.0.2", "--json", "--timeout", "5"]);
    assert_eq!(error_of(&foreign_peer)["kind"], "rejected");
    let few = ["--size", "64", "--iters", "5", "--warmup", "1", "--json"];
    assert_eq!(report_of(&server.run_client(&few))["results"].as_array().map(Vec::len), Some(6));
}

/// Waits until a client is well beyond its handshake.
fn wait_for_traffic(before: u64) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while packets_sent() < before + 100 {
        assert!(Instant::now() < deadline, "no traffic");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn bench_notices_that_the_other_end_was_killed() {
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
            // A process that dies may lose its memory before its queue pairs: then the first word
            // is of that.
            let kind = error["kind"].as_str().expect("a kind");
            assert!(["link_down", "denied"].contains(&kind), "{op} {measure}: {error}");
            assert!(
                since.elapsed() < Duration::from_secs(5),
                "{op} {measure}: {:?}",
                since.elapsed()
            );
        }
    }
    // And the other way round: the next client is served.
    let server = Server::of(BENCH, &[]);
    let before = packets_sent();
    let mut first = server.start_client(&["--seconds", "600"]);
    wait_for_traffic(before);
    first.kill().expect("still at work");
    first.wait().expect("it ends");
    report_of(&server.run_client(&["--op", "read", "--size", "64", "--iters", "5", "--json"]));
}

#[test]
fn bench_without_a_server() {
    let output = output(&["bench", "fabric", "10.0.0.1:7499", "--local", "10.0.0.2", "--json"]);
    assert_eq!(error_of(&output)["kind"], "rejected");
    let message = text(&output.stderr);
    assert!(message.contains("`ferrite bench fabric --listen` must run there"), "{message}");
}

/// Runs the command where something is hidden from it by a mount of its own.
fn without(hide: &str, arguments: &[&str]) -> Output {
    let line = format!("{hide} && exec {} {}", env!("CARGO_BIN_EXE_ferrite"), arguments.join(" "));
    Command::new("unshare").args(["--mount", "sh", "-c", &line]).output().expect("unshare")
}

fn expect_missing(output: &Output, part: &str, remedy: &str) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{message}");
    assert!(message.contains(&format!("{part} missing: ")), "{message}");
    assert!(message.contains("What to do: ") && message.contains(remedy), "{message}");
    assert_eq!(message.trim_end().lines().count(), 1, "{message}");
}

const LISTEN: [&str; 3] = ["pingpong", "--listen", "10.0.0.1:7490"];

#[test]
fn without_the_library() {
    let hide = "mount --bind /dev/null /usr/lib/x86_64-linux-gnu/libibverbs.so.1";
    expect_missing(&without(hide, &["devices"]), "the library is", "apt-get install libibverbs1");
    expect_missing(&without(hide, &LISTEN), "the library is", "apt-get install libibverbs1");
}

/// Devices can be listed without it; connections cannot be made.
#[test]
fn without_the_connection_manager() {
    let hide = "mount --bind /dev/null /dev/infiniband/rdma_cm";
    let output = without(hide, &["devices"]);
    assert!(
        output.status.success() && text(&output.stdout).contains("modprobe rdma_ucm"),
        "{output:?}"
    );
    expect_missing(&without(hide, &LISTEN), "the connection manager is", "modprobe rdma_ucm");
    let hide = "mount --bind /dev/null /usr/lib/x86_64-linux-gnu/librdmacm.so.1";
    expect_missing(&without(hide, &LISTEN), "the library is", "librdmacm1");
}

/// Puts both devices back, and waits until they have their addresses.
struct DevicesBack;

impl Drop for DevicesBack {
    fn drop(&mut self) {
        let line = "for i in 1 2; do ip link set h$i up; rdma link show rxe$i/1 >/dev/null 2>&1 ||
                      rdma link add rxe$i type rxe netdev h$i; done";
        let _ = Command::new("sh").args(["-c", line]).status();
        let deadline = Instant::now() + Duration::from_secs(30);
        let ready = || {
            let shown = text(&output(&["devices"]).stdout);
            shown.contains("  10.0.0.1 ")
                && shown.contains("  10.0.0.2 ")
                && !shown.contains("DOWN")
        };
        while Instant::now() < deadline && !ready() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
fn without_a_device() {
    let _back = DevicesBack;
    for device in ["rxe1", "rxe2"] {
        assert!(
            Command::new("rdma").args(["link", "delete", device]).status().expect("rdma").success()
        );
    }
    expect_missing(&output(&["devices"]), "a device is", "rdma link add");
    expect_missing(&output(&LISTEN), "a device is", "rdma link add");
}

#[test]
fn a_port_that_is_down_is_shown_with_its_remedy() {
    let _back = DevicesBack;
    assert!(Command::new("ip").args(["link", "set", "h1", "down"]).status().expect("ip").success());
    let shown = text(&output(&["devices"]).stdout);
    assert!(shown.contains("port 1: DOWN") && shown.contains("ip link set h1 up"), "{shown}");
}
