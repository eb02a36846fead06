//! The `ferrite` command with Soft-RoCE devices, in the lab's virtual machine: rxe1 on 10.0.0.1
//! (h1) and rxe2 on 10.0.0.2 (h2).

mod lab_cli {
    mod bench;
    mod missing;
    mod pingpong;
}

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use ferrite_testkit::{TIMEOUT, until};
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
        // Each server gets a new port: the CM keeps a port in use for a while after a connection.
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

    /// Waits until the server ends by itself. Returns its exit code and its output.
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

/// Waits until a client has sent enough packets to be past its handshake.
fn wait_for_traffic(before: u64) {
    until(TIMEOUT, "traffic", || packets_sent() >= before + 100);
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
        ["rxe1: Soft-RoCE (in software", "*   1  10.0.0.1", "would be used: RoCE v2", "max_qp_wr"]
    {
        assert!(shown.contains(part), "{part} is not in:\n{shown}");
    }
}

fn error_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    object["error"].clone()
}

#[test]
fn explains_an_address_without_a_device() {
    // The lab's bridge has no RDMA device.
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
