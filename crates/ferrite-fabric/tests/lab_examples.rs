//! Runs the examples as a reader would: two processes on two hosts of the lab.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::process::exit_within;
use ferrite_testkit::{TIMEOUT, TempDir};

/// Returns a command for an example. Cargo puts examples next to the tests.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().expect("the test's own path");
    let built: PathBuf = test
        .parent()
        .and_then(|deps| deps.parent())
        .expect("the target directory")
        .join("examples")
        .join(name);
    assert!(built.exists(), "{} must be built with the tests", built.display());
    // Starts the example as cargo would, with the configured runner.
    let runner = std::env::var("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace().map(Into::into).chain([built]);
    let mut command = Command::new(words.next().expect("a program"));
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

struct Server {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    addr: String,
}

impl Server {
    /// Starts an example and waits until it listens.
    fn start(name: &str, arguments: &[&str]) -> Self {
        let mut child = example(name).args(arguments).spawn().expect("start the example");
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        out.read_line(&mut line).expect("first line of output");
        let addr = line.trim().strip_prefix("listening on ").expect("listening address").to_owned();
        Self { child, out, addr }
    }

    /// Waits for the server to end and returns its output.
    fn finish(mut self) -> String {
        let status = exit_within(&mut self.child, TIMEOUT).expect("the server ends");
        assert!(status.success());
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).expect("rest of the output");
        rest
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn run(name: &str, arguments: &[&str]) -> String {
    let Output { status, stdout, .. } =
        example(name).args(arguments).output().expect("run the example");
    let output = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{name} {arguments:?}: {output}");
    output
}

#[test]
fn ping_pong() {
    let server = Server::start("ping_pong", &["10.0.0.1:0"]);
    let output = run("ping_pong", &["10.0.0.2:0", &server.addr, "200"]);
    assert!(output.contains("connected through rxe2") && output.contains("200 rounds"), "{output}");
    server.finish();
}

#[test]
fn file_copy() {
    let directory = TempDir::new("file-copy");
    let bytes: Vec<u8> =
        (0..5_000_011_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let source = directory.file("weights.bin", &bytes);
    let target = directory.join("there");
    std::fs::create_dir(&target).expect("a directory");
    let server =
        Server::start("file_copy", &["receive", "10.0.0.1:0", target.to_str().expect("UTF-8")]);
    run("file_copy", &["send", "10.0.0.2:0", &server.addr, source.to_str().expect("UTF-8")]);
    let output = server.finish();
    assert!(output.contains("5000011 bytes in weights.bin"), "{output}");
    assert!(
        std::fs::read(target.join("weights.bin")).expect("the copy") == bytes,
        "the copy differs"
    );
}

#[test]
fn remote_table() {
    let server = Server::start("remote_table", &["serve", "10.0.0.1:0"]);
    let output =
        run("remote_table", &["ask", "10.0.0.2:0", &server.addr, "apple", "plum", "quince"]);
    assert!(output.contains("apple = red") && output.contains("quince = (none)"), "{output}");
    assert!(output.contains("plum = blue") || output.contains("plum = yellow"), "{output}");
    assert!(server.finish().contains("versions written"));
}

#[test]
fn epoll_loop() {
    let mut server = Server::start("epoll_loop", &["10.0.0.1:0"]);
    run("ping_pong", &["10.0.0.2:0", &server.addr, "100"]);
    server.child.stdin.take().expect("a pipe").write_all(b"\n").expect("a line");
    let output = server.finish();
    assert!(output.contains("100 messages echoed"), "{output}");
}
