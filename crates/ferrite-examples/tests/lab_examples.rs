//! The examples as a reader would run them, between the two hosts of the lab.
#![expect(clippy::print_stdout, reason = "what they said is worth a look: `-- --no-capture`")]

use std::path::PathBuf;
use std::process::{Command, Output};

/// What an example says. Cargo puts examples beside the tests.
fn run(name: &str) -> String {
    let test = std::env::current_exe().expect("the test's own path");
    let built: PathBuf =
        test.parent().and_then(|deps| deps.parent()).expect("target").join("examples").join(name);
    let Output { status, stdout, .. } = Command::new("timeout")
        .args(["120", &built.to_string_lossy(), "10.0.0.1", "10.0.0.2"])
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&stdout).into_owned();
    println!("{said}");
    assert!(status.success(), "{name}: {status}: {said}");
    said
}

/// Bytes that the client's links sent.
fn carried(said: &str) -> u64 {
    let line = said.lines().find_map(|line| line.strip_prefix("RDMA, client: ")).expect("a count");
    line.split_whitespace().next().and_then(|count| count.parse().ok()).expect("a number")
}

#[test]
fn http() {
    let said = run("http");
    assert!(
        said.contains("HTTP, One: 11 requests") && said.contains("HTTP, Two: 11 requests"),
        "{said}"
    );
    assert!(carried(&said) > 8 << 20, "{said}");
}

#[test]
fn grpc() {
    let said = run("grpc");
    assert!(said.contains("streaming: 1000 messages"), "{said}");
    assert!(carried(&said) > 1 << 20, "{said}");
}

#[test]
fn redis() {
    let said = run("redis");
    assert!(said.contains("a pipeline of 1,001"), "{said}");
    assert!(carried(&said) > 1 << 20, "{said}");
}
