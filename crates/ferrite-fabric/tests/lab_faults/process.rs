//! Peers in processes of their own: the test runs itself again and plays another role there.
//!
//! The child prints lines that begin with `@` and a word. It ends when its standard input is
//! closed.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;

use ferrite_fabric::Config;
use futures_channel::oneshot;

use crate::harness::{Host, PEER, TEST_TIMEOUT, any_port, until, within};
use crate::net::sh;
use crate::pair::{Event, serve_all};

const ROLE: &str = "FERRITE_LAB_ROLE";
/// The variable that tells cargo and nextest how to start tests, if not directly.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

/// Returns the role with which [`Process::start`] started this process.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Returns a command that runs `test` again in a process of its own, as `role`, prefixed by the
/// words of `wrapper`.
pub(crate) fn rerun_as(test: &str, role: &str, wrapper: &[&str]) -> Command {
    let mut words: Vec<String> = wrapper.iter().map(|word| (*word).to_owned()).collect();
    words.extend(
        std::env::var(RUNNER).iter().flat_map(|runner| runner.split(' ')).map(str::to_owned),
    );
    words.extend(std::env::args().take(1));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(["--exact", test, "--nocapture"]).env(ROLE, role);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// A peer's process. Dropping it kills the process.
pub(crate) struct Process {
    child: Child,
    /// Closed to make the child end.
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl Process {
    pub(crate) fn start(test: &str, role: &str) -> Self {
        let mut child = rerun_as(test, role, &[]).spawn().expect("a child");
        let (sender, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().expect("its output"));
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                // The test harness writes to the same output and does not end its lines.
                match line.split_once('@') {
                    Some((_, report)) => drop(sender.send(report.to_owned())),
                    None => println!("  (child) {line}"),
                }
            }
        });
        Self { stdin: child.stdin.take(), child, lines }
    }

    /// Waits for the next line of the child, which must begin with `word`. Returns the rest of the
    /// line.
    #[track_caller]
    pub(crate) fn expect_line(&self, word: &str) -> String {
        let line =
            self.lines.recv_timeout(TEST_TIMEOUT).unwrap_or_else(|error| panic!("{word}: {error}"));
        let rest = line.strip_prefix(word).unwrap_or_else(|| panic!("{word} expected, not {line}"));
        rest.trim().to_owned()
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, name: &str) {
        sh(&format!("kill -{name} {}", self.child.id()));
    }

    /// Stops the process and waits until none of its threads runs any more: after the signal, they
    /// may still run for a moment.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
        until(TEST_TIMEOUT, "the process is stopped", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id()))
                .expect("process exists");
            threads.flatten().all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
            })
        });
    }

    /// Makes the child end, which must happen in time and with success. Returns its remaining
    /// lines.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Vec<String> {
        drop(self.stdin.take());
        let mut status = None;
        until(TEST_TIMEOUT, "the child ends", || {
            status = self.child.try_wait().expect("exit status");
            status.is_some()
        });
        let lines = self.lines.iter().collect();
        assert!(status.is_some_and(|status| status.success()), "{status:?} {lines:?}");
        lines
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reports something to the parent, when called in a child.
pub(crate) fn report(word: &str, rest: impl std::fmt::Display) {
    println!("\n@{word} {rest}");
}

/// Returns a future that is ready when the parent wants the child to end, when called in a child.
pub(crate) fn end_of_input() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    receiver
}

/// Plays a peer that serves links until its input is closed, then reports how each link ended.
pub(crate) fn serve_as_peer(config: Config) {
    serve_as_peer_after(config, || ());
}

/// The same; calls `prepare` once the peer listens.
pub(crate) fn serve_as_peer_after(config: Config, prepare: impl FnMut()) {
    serve_at(any_port(PEER), config, prepare);
}

/// The same, listening on another address than the peer's.
pub(crate) fn serve_at(at: SocketAddr, config: Config, mut prepare: impl FnMut()) {
    let host = Host::new(&[PEER.0], config);
    let serving = serve_all(host.fabric.clone(), at, end_of_input(), |event| match event {
        Event::Listening(addr) => {
            prepare();
            report("listening", addr);
        }
        Event::ListenerLost(error) => report("listener", format!("{error:?}")),
    });
    for end in within(TEST_TIMEOUT * 4, "serving", serving) {
        match end {
            Ok(echoed) => report("closed", echoed),
            Err(error) => report("failed", format!("{error:?}")),
        }
    }
    host.finish();
}

/// Starts a peer in a process. Returns the process and the address on which it listens.
pub(crate) fn peer(test: &str) -> (Process, SocketAddr) {
    let process = Process::start(test, "serve");
    let addr = process.expect_line("listening").parse().expect("an address");
    (process, addr)
}
