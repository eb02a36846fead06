//! The command on real devices: runs in the lab's guest, with rxe1 on 10.0.0.1 (h1) and rxe2 on 10.0.0.2 (h2).

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

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

/// A server that listens, and is ended with the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(more: &[&str]) -> Self {
        // Of its own for every server: the CM keeps a port for a while after a connection.
        static NEXT_PORT: AtomicU16 = AtomicU16::new(7500);
        let address = format!("10.0.0.1:{}", NEXT_PORT.fetch_add(1, Ordering::Relaxed));
        let mut child = ferrite(&[&["pingpong", "--listen", &address], more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ferrite starts");
        let mut line = String::new();
        BufReader::new(child.stderr.take().expect("piped")).read_line(&mut line).expect("a line");
        assert!(line.contains("listening on"), "{line}");
        Self { child, address }
    }

    fn client(&self, more: &[&str]) -> Vec<String> {
        let arguments = [&["pingpong", &self.address, "--bind", "10.0.0.2"], more].concat();
        arguments.iter().map(ToString::to_string).collect()
    }

    fn run_client(&self, more: &[&str]) -> Output {
        let arguments = self.client(more);
        output(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
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
    let text = std::fs::read_to_string("/sys/class/net/h2/statistics/tx_packets").expect("a counter");
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
        let gid = gids.iter().find(|gid| gid["index"] == *chosen).expect("the chosen one is listed");
        assert_eq!((&gid["address"], &gid["type"]), (&address.into(), &"RoCE v2".into()));
    }
}

#[test]
fn devices_for_people() {
    let output = output(&["devices", "--verbose"]);
    let shown = text(&output.stdout);
    for part in ["rxe1: Soft-RoCE (software", "*   1  10.0.0.1", "would be used: RoCE v2", "max_qp_wr"] {
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
        assert_eq!((&report["device"], &report["gid"]["address"]), (&"rxe2".into(), &"10.0.0.2".into()));
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
    let arguments = server.client(&[&endless, more].concat());
    let client = ferrite(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ferrite starts");
    std::thread::sleep(Duration::from_millis(500));
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
    for more in
        [&["--op", "send"][..], &["--op", "send", "--mode", "event"], &["--op", "write"], &["--op", "read"]]
    {
        let (output, took) = client_of_a_harmed_server(more, |server| server.kill().expect("a live server"));
        let error = error_of(&output);
        // Whichever comes first: the CM's word that the peer left, or a message that nobody acknowledges.
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
    command.args(["10", env!("CARGO_BIN_EXE_ferrite"), "pingpong", "--listen", "192.0.2.9", "--json"]);
    let output = command.output().expect("timeout starts");
    let error = error_of(&output);
    assert_eq!(error["kind"], "no_route", "{error}");
    assert!(text(&output.stderr).contains("`ferrite devices` lists the addresses"), "{error}");
}

#[test]
fn a_busy_server_refuses_a_second_client() {
    let server = Server::start(&[]);
    let arguments = server.client(&["--iters", "1000000000"]);
    let mut first = ferrite(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
        .stdout(Stdio::null())
        .spawn()
        .expect("ferrite starts");
    std::thread::sleep(Duration::from_millis(500));
    let second = server.run_client(&["--json", "--timeout", "3"]);
    first.kill().expect("still at work");
    first.wait().expect("it ends");
    assert_eq!(error_of(&second)["kind"], "rejected");
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
    assert!(output.status.success() && text(&output.stdout).contains("modprobe rdma_ucm"), "{output:?}");
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
            shown.contains("  10.0.0.1 ") && shown.contains("  10.0.0.2 ") && !shown.contains("DOWN")
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
        assert!(Command::new("rdma").args(["link", "delete", device]).status().expect("rdma").success());
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
