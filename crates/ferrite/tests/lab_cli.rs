//! The `ferrite` command with Soft-RoCE devices, in the lab's guest: rxe1 on 10.0.0.1 (h1) and rxe2
//! on 10.0.0.2 (h2).

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use ferrite_fabric::{ConnectOptions, Fabric};
use ferrite_testkit::wait::comes_true;
use ferrite_testkit::{TIMEOUT, until};
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

/// A command with a client and a server, and the client's option for its local address.
type TwoSided = (&'static [&'static str], &'static str);

const PINGPONG: TwoSided = (&["pingpong"], "--bind");
const BENCH: TwoSided = (&["bench", "fabric"], "--local");
const STREAM: TwoSided = (&["bench", "stream"], "--local");

/// A listening server; drop kills it.
struct Server {
    child: Child,
    address: String,
    sides: TwoSided,
    /// Kept open, so that the server can write to it.
    _stderr: BufReader<ChildStderr>,
}

impl Server {
    fn start(more: &[&str]) -> Self {
        Self::of(PINGPONG, more)
    }

    fn of(sides: TwoSided, more: &[&str]) -> Self {
        // A new port for every server: the CM keeps a port for a while after a connection.
        static NEXT_PORT: AtomicU16 = AtomicU16::new(7500);
        let address = format!("10.0.0.1:{}", NEXT_PORT.fetch_add(1, Ordering::Relaxed));
        let mut child = ferrite(&[sides.0, &["--listen", &address], more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ferrite starts");
        let mut line = String::new();
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        stderr.read_line(&mut line).expect("a line");
        assert!(line.contains("listening on"), "{line}");
        Self { child, address, sides, _stderr: stderr }
    }

    fn client(&self, more: &[&str]) -> Vec<String> {
        let (command, local) = self.sides;
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

    /// Waits until it ends by itself. Returns its exit code and its output.
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

/// Returns the number of packets that left the client's interface.
fn packets_sent() -> u64 {
    let text =
        std::fs::read_to_string("/sys/class/net/h2/statistics/tx_packets").expect("a counter");
    text.trim().parse().expect("a number")
}

#[test]
fn lists_devices_with_the_chosen_address() {
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
            gids.iter().find(|gid| gid["index"] == *chosen).expect("the chosen GID is listed");
        assert_eq!((&gid["address"], &gid["type"]), (&address.into(), &"RoCE v2".into()));
    }
}

#[test]
fn lists_devices_as_text() {
    let output = output(&["devices", "--verbose"]);
    let shown = text(&output.stdout);
    for part in
        ["rxe1: Soft-RoCE (software", "*   1  10.0.0.1", "would be used: RoCE v2", "max_qp_wr"]
    {
        assert!(shown.contains(part), "{part} is not in:\n{shown}");
    }
}

#[test]
fn pingpong_runs_every_operation_and_mode_over_the_wire() {
    const ROUNDS: u64 = 60;
    for (op, mode, size) in [
        ("send", "poll", "64"),
        ("send", "event", "64"),
        ("write", "poll", "64"),
        ("read", "poll", "64"),
        ("read", "event", "64"),
        // Several packets, too large for inline data; then the shortest message.
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

fn error_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    object["error"].clone()
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
        // Depends on which comes first: the CM's event, or a message that is not acknowledged.
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
fn explains_an_address_without_a_device() {
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
    assert!(served.contains("on rxe1: tests 3"), "{served}");
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

/// Waits until a client is past its handshake.
fn wait_for_traffic(before: u64) {
    until(TIMEOUT, "traffic", || packets_sent() >= before + 100);
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
            // A dying process may lose its memory before its queue pairs. Then the first error is
            // "denied".
            let kind = error["kind"].as_str().expect("a kind");
            assert!(["link_down", "denied"].contains(&kind), "{op} {measure}: {error}");
            assert!(
                since.elapsed() < Duration::from_secs(5),
                "{op} {measure}: {:?}",
                since.elapsed()
            );
        }
    }
    // After a killed client, the server serves the next one.
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

/// Runs the command in a mount namespace of its own, in which `hide` has hidden something.
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
fn explains_a_missing_library() {
    let hide = "mount --bind /dev/null /usr/lib/x86_64-linux-gnu/libibverbs.so.1";
    expect_missing(&without(hide, &["devices"]), "the library is", "apt-get install libibverbs1");
    expect_missing(&without(hide, &LISTEN), "the library is", "apt-get install libibverbs1");
}

/// Without the connection manager devices can be listed, but no connections be made.
#[test]
fn explains_a_missing_connection_manager() {
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

/// On drop, restores both devices and waits until they have their addresses.
struct RestoreDevices;

impl Drop for RestoreDevices {
    fn drop(&mut self) {
        let line = "for i in 1 2; do ip link set h$i up; rdma link show rxe$i/1 >/dev/null 2>&1 ||
                      rdma link add rxe$i type rxe netdev h$i; done";
        let _ = Command::new("sh").args(["-c", line]).status();
        let ready = || {
            let shown = text(&output(&["devices"]).stdout);
            shown.contains("  10.0.0.1 ")
                && shown.contains("  10.0.0.2 ")
                && !shown.contains("DOWN")
        };
        let _ = comes_true(TIMEOUT, ready);
    }
}

#[test]
fn explains_a_missing_device() {
    let _restore = RestoreDevices;
    for device in ["rxe1", "rxe2"] {
        assert!(
            Command::new("rdma").args(["link", "delete", device]).status().expect("rdma").success()
        );
    }
    expect_missing(&output(&["devices"]), "a device is", "rdma link add");
    expect_missing(&output(&LISTEN), "a device is", "rdma link add");
}

#[test]
fn shows_a_port_that_is_down_with_its_remedy() {
    let _restore = RestoreDevices;
    assert!(Command::new("ip").args(["link", "set", "h1", "down"]).status().expect("ip").success());
    let shown = text(&output(&["devices"]).stdout);
    assert!(shown.contains("port 1: DOWN") && shown.contains("ip link set h1 up"), "{shown}");
}

/// Runs the command as a user who has no rights, after `prepare` in a mount namespace of its own.
fn as_nobody(prepare: &str, arguments: &[&str]) -> Output {
    let nobody = "exec setpriv --reuid=65534 --regid=65534 --clear-groups";
    let program = env!("CARGO_BIN_EXE_ferrite");
    let line = format!("{prepare} && {nobody} {program} {}", arguments.join(" "));
    Command::new("unshare").args(["--mount", "sh", "-c", &line]).output().expect("unshare")
}

#[test]
fn explains_a_missing_permission() {
    // Copies of the device files that only root may use.
    let close = "cp -a /dev/infiniband /tmp/closed-$$ && chmod 600 /tmp/closed-$$/* &&
                 mount --bind /tmp/closed-$$ /dev/infiniband";
    for (arguments, file) in [
        (&["pingpong", "--listen", "10.0.0.1:7490"][..], "/dev/infiniband/"),
        (&["gateway", "--rdma", "require", "--listen", "10.0.0.1"], "/dev/infiniband/uverbs0"),
        (&["devices"], "/dev/infiniband/uverbs0"),
    ] {
        let output = as_nobody(close, arguments);
        let message = text(&output.stderr) + &text(&output.stdout);
        assert_eq!(output.status.code(), Some(69), "{arguments:?}: {message}");
        assert!(message.contains(&format!("permission denied on {file}")), "{message}");
        assert!(message.contains("group"), "{message}");
    }
}

/// The message says how much memory is needed in all. With that much it works.
#[test]
fn names_the_whole_memory_that_is_needed() {
    let open = "chmod 666 /dev/infiniband/*";
    let limited = |mib: u64, arguments: &[&str]| {
        let limit = format!("{open} && ulimit -l {}", mib << 10);
        as_nobody(&limit, arguments)
    };
    let gateway = ["gateway", "--rdma", "require", "--listen", "10.0.0.1:7491"];
    let output = limited(8, &gateway);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{message}");
    assert!(
        message.contains("the locked-memory limit is 8 MiB") && message.contains("for 2 devices"),
        "{message}"
    );
    let needed = message.split("about ").nth(1).and_then(|rest| rest.split(' ').next());
    let needed: u64 = needed.and_then(|number| number.parse().ok()).expect("a number of MiB");
    assert!(needed > 8, "{message}");
    // It ends by the time limit, not by an error.
    let short = [&["timeout", "-s", "TERM", "5", env!("CARGO_BIN_EXE_ferrite")][..], &gateway];
    let line = format!(
        "{open} && ulimit -l {} && exec setpriv --reuid=65534 --regid=65534 --clear-groups {}",
        needed << 10,
        short.concat().join(" ")
    );
    let enough = Command::new("sh").args(["-c", &line]).output().expect("sh");
    let message = text(&enough.stderr);
    assert!(message.contains("RDMA on rxe1, rxe2"), "{message}");
}

/// The port of a gateway or a module is not that of a benchmark.
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
    let output = output(&["bench", "fabric", "10.0.0.1:7492", "--local", "10.0.0.2"]);
    let _ = gateway.kill();
    let _ = gateway.wait();
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("the peer is a Redis or Valkey server"), "{message}");
}

/// A peer that connects and stays silent does not keep the benchmark waiting for ever.
#[test]
fn bench_fabric_does_not_wait_for_a_silent_peer() {
    let server = Server::of(STREAM, &[]); // sends nothing before its client has
    let started = Instant::now();
    let output = output(&["bench", "fabric", &server.address, "--local", "10.0.0.2"]);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(started.elapsed() < TIMEOUT, "{message}");
}
