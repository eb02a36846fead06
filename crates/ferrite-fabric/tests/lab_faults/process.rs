//! Peers in processes of their own: the test runs itself again and plays another role there.
//!
//! The child writes lines that begin with `@` and a word; it ends when its standard input does.

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
/// How cargo and nextest are told to start tests, if not directly.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

/// The role this process was started with by [`Process::start`].
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// `test` again, in a process of its own, behind the words of `wrapper`, as `role`.
pub(crate) fn again(test: &str, role: &str, wrapper: &[&str]) -> Command {
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

/// A peer's process; killed when the test ends.
pub(crate) struct Process {
    child: Child,
    /// Dropped, it tells the child to end.
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl Process {
    pub(crate) fn start(test: &str, role: &str) -> Self {
        let mut child = again(test, role, &[]).spawn().expect("a child");
        let (sender, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().expect("its output"));
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                // The test harness writes to the same place, and does not end its lines.
                match line.split_once('@') {
                    Some((_, said)) => drop(sender.send(said.to_owned())),
                    None => println!("  (child) {line}"),
                }
            }
        });
        Self { stdin: child.stdin.take(), child, lines }
    }

    /// What the child says next, which must begin with `word`.
    #[track_caller]
    pub(crate) fn says(&self, word: &str) -> String {
        let line =
            self.lines.recv_timeout(TEST_TIMEOUT).unwrap_or_else(|error| panic!("{word}: {error}"));
        let rest = line.strip_prefix(word).unwrap_or_else(|| panic!("{word} expected, not {line}"));
        rest.trim().to_owned()
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, name: &str) {
        sh(&format!("kill -{name} {}", self.child.id()));
    }

    /// Stops it, and waits until none of its threads runs any more: the signal alone says only that
    /// they will not for long.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
        until(TEST_TIMEOUT, "it is stopped", || {
            let threads =
                std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it is there");
            threads.flatten().all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
            })
        });
    }

    /// Tells it to end, which it must do in good order and in time.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Vec<String> {
        drop(self.stdin.take());
        let mut status = None;
        until(TEST_TIMEOUT, "the child ends", || {
            status = self.child.try_wait().expect("its status");
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

/// In a child: tells the parent something.
pub(crate) fn say(word: &str, rest: impl std::fmt::Display) {
    println!("\n@{word} {rest}");
}

/// In a child: ready when the parent wants it to end.
pub(crate) fn end_of_input() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    receiver
}

/// The role of a peer that serves links until its input ends, then says how each ended.
pub(crate) fn serve_as_peer(config: Config) {
    serve_as_peer_after(config, || ());
}

/// The same, with something to do when it listens.
pub(crate) fn serve_as_peer_after(config: Config, prepare: impl FnMut()) {
    serve_at(any_port(PEER), config, prepare);
}

/// The same elsewhere than at the peer's address.
pub(crate) fn serve_at(at: SocketAddr, config: Config, mut prepare: impl FnMut()) {
    let host = Host::new(&[PEER.0], config);
    let serving = serve_all(host.fabric.clone(), at, end_of_input(), |event| match event {
        Event::Listening(addr) => {
            prepare();
            say("listening", addr);
        }
        Event::ListenerLost(error) => say("listener", format!("{error:?}")),
    });
    for end in within(TEST_TIMEOUT * 4, "serving", serving) {
        match end {
            Ok(echoed) => say("closed", echoed),
            Err(error) => say("failed", format!("{error:?}")),
        }
    }
    host.finish();
}

/// A peer in a process, and where it listens.
pub(crate) fn peer(test: &str) -> (Process, SocketAddr) {
    let process = Process::start(test, "serve");
    let addr = process.says("listening").parse().expect("an address");
    (process, addr)
}
