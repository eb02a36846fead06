//! Runs the examples of streams as a reader would, between the two hosts of the lab.
#![expect(clippy::print_stdout, reason = "shows the examples' output with `-- --no-capture`")]

use std::path::PathBuf;
use std::process::{Command, Output};

/// Runs an example and returns its output. Cargo puts examples into a directory next to that of the
/// tests.
fn run(name: &str) -> String {
    let test = std::env::current_exe().expect("path of the test");
    let target = test.parent().and_then(|deps| deps.parent()).expect("target directory");
    let built: PathBuf = target.join("examples").join(name);
    let Output { status, stdout, .. } = Command::new("timeout")
        .args(["120", &built.to_string_lossy(), "10.0.0.1", "10.0.0.2"])
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("start the example");
    let output = String::from_utf8_lossy(&stdout).into_owned();
    println!("{output}");
    assert!(status.success(), "{name}: {status}: {output}");
    output
}

/// Returns how many bytes the client's links have sent.
fn sent_bytes(output: &str) -> u64 {
    let line = output.lines().find_map(|line| line.strip_prefix("RDMA, client: "));
    let line = line.expect("a line with the client's bytes");
    line.split_whitespace().next().and_then(|count| count.parse().ok()).expect("a number")
}

#[test]
fn http() {
    let output = run("http");
    assert!(
        output.contains("HTTP, One: 11 requests") && output.contains("HTTP, Two: 11 requests"),
        "{output}"
    );
    assert!(sent_bytes(&output) > 8 << 20, "{output}");
}

#[test]
fn grpc() {
    let output = run("grpc");
    assert!(output.contains("streaming: 1000 messages"), "{output}");
    assert!(sent_bytes(&output) > 1 << 20, "{output}");
}

#[test]
fn redis() {
    let output = run("redis");
    assert!(output.contains("a pipeline of 1,001"), "{output}");
    assert!(sent_bytes(&output) > 1 << 20, "{output}");
}
