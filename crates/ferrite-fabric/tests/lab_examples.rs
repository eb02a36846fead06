//! The examples, as a reader would run them: two processes on two hosts of the lab.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Cargo puts examples beside the tests.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().expect("the test's own path");
    let built: PathBuf =
        test.parent().and_then(|deps| deps.parent()).expect("target").join("examples").join(name);
    assert!(built.exists(), "{} is built with the tests", built.display());
    // As cargo would start it.
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
    /// Starts one and waits until it listens.
    fn start(name: &str, arguments: &[&str]) -> Self {
        let mut child = example(name).args(arguments).spawn().expect("it starts");
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        out.read_line(&mut line).expect("its first line");
        let addr = line.trim().strip_prefix("listening on ").expect("where it listens").to_owned();
        Self { child, out, addr }
    }

    /// WaitSet for its end; what it said.
    fn finish(mut self) -> String {
        let begun = Instant::now();
        while self.child.try_wait().expect("its state").is_none() {
            assert!(begun.elapsed() < TEST_TIMEOUT, "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(self.child.wait().expect("its end").success());
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).expect("the rest");
        rest
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn run(name: &str, arguments: &[&str]) -> String {
    let Output { status, stdout, .. } = example(name).args(arguments).output().expect("it runs");
    let said = String::from_utf8_lossy(&stdout).into_owned();
    assert!(status.success(), "{name} {arguments:?}: {said}");
    said
}

#[test]
fn ping_pong() {
    let server = Server::start("ping_pong", &["10.0.0.1:0"]);
    let said = run("ping_pong", &["10.0.0.2:0", &server.addr, "200"]);
    assert!(said.contains("connected through rxe2") && said.contains("200 rounds"), "{said}");
    server.finish();
}

#[test]
fn file_copy() {
    let directory = std::env::temp_dir().join(format!("ferrite-file-copy-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let source = directory.join("weights.bin");
    let bytes: Vec<u8> =
        (0..5_000_011_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&source, &bytes).expect("the file");
    let target = directory.join("there");
    std::fs::create_dir(&target).expect("a directory");
    let server =
        Server::start("file_copy", &["receive", "10.0.0.1:0", target.to_str().expect("UTF-8")]);
    run("file_copy", &["send", "10.0.0.2:0", &server.addr, source.to_str().expect("UTF-8")]);
    let said = server.finish();
    assert!(said.contains("5000011 bytes in weights.bin"), "{said}");
    assert!(
        std::fs::read(target.join("weights.bin")).expect("the copy") == bytes,
        "the same bytes"
    );
    let _ = std::fs::remove_dir_all(&directory);
}

#[test]
fn remote_table() {
    let server = Server::start("remote_table", &["serve", "10.0.0.1:0"]);
    let said = run("remote_table", &["ask", "10.0.0.2:0", &server.addr, "apple", "plum", "quince"]);
    assert!(said.contains("apple = red") && said.contains("quince = (none)"), "{said}");
    assert!(said.contains("plum = blue") || said.contains("plum = yellow"), "{said}");
    assert!(server.finish().contains("versions written"));
}

#[test]
fn epoll_loop() {
    let mut server = Server::start("epoll_loop", &["10.0.0.1:0"]);
    run("ping_pong", &["10.0.0.2:0", &server.addr, "100"]);
    server.child.stdin.take().expect("a pipe").write_all(b"\n").expect("a line");
    let said = server.finish();
    assert!(said.contains("100 messages echoed"), "{said}");
}
