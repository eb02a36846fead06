//! Processes of a test: signals, and tests that run themselves again in another role.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::wait::{TIMEOUT, comes_true, until};

const ROLE: &str = "FERRITE_LAB_ROLE";
/// The variable with the command through which cargo and nextest start tests, if there is one.
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";

/// Sends the signal with this name, which is given without "SIG".
///
/// # Panics
/// If there is no such process.
pub fn signal(name: &str, id: u32) {
    let sent = Command::new("kill").args(["-s", name, &id.to_string()]).status().expect("kill");
    assert!(sent.success(), "cannot send SIG{name} to {id}");
}

/// Runs code on a thread of the user `nobody`, who has no rights. Processes that it starts, and
/// files that it creates, belong to that user. Needs root.
///
/// # Panics
/// If this process is not root, or the code panics.
pub fn as_nobody<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    const NOBODY: u32 = 65534;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let (user, group) = (Some(Uid::from_raw(NOBODY)), Some(Gid::from_raw(NOBODY)));
            // Of this thread, not of the process.
            set_thread_groups(&[]).expect("root");
            set_thread_res_gid(group, group, group).expect("root");
            set_thread_res_uid(user, user, user).expect("root");
            run()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Returns whether a process runs. A zombie does not count.
#[must_use]
pub fn is_alive(id: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Returns the resident memory of a process.
///
/// # Panics
/// If there is no such process.
#[must_use]
pub fn rss_bytes(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("a running process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}

/// Returns the number of descriptors that a process has open.
///
/// # Panics
/// If there is no such process.
#[must_use]
pub fn descriptors(id: u32) -> u64 {
    std::fs::read_dir(format!("/proc/{id}/fd")).expect("a running process").count() as u64
}

/// Waits until a process exits. Returns its status, or `None` if it still runs after `limit`.
pub fn exit_within(process: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let mut status = None;
    let _ = comes_true(limit, || {
        status = process.try_wait().expect("a child process");
        status.is_some()
    });
    status
}

/// A process that is killed on drop.
#[derive(Debug)]
pub struct KillOnDrop(pub Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the role with which [`rerun_as`] started this process.
#[must_use]
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Returns a command that runs `test` of this executable again as `role`, in a process of its own.
/// The words of `wrapper` come before the command.
#[must_use]
pub fn rerun_as(test: &str, role: &str, wrapper: &[&str]) -> Command {
    let mut words: Vec<String> = wrapper.iter().map(|word| (*word).to_owned()).collect();
    words.extend(
        std::env::var(RUNNER).iter().flat_map(|runner| runner.split(' ')).map(str::to_owned),
    );
    words.extend(std::env::args().take(1));
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(["--exact", test, "--nocapture"]).env(ROLE, role);
    command
}

/// A test that runs in another role, in a process of its own. It reports lines with [`report`], and
/// ends when its standard input is closed. Drop kills it.
#[derive(Debug)]
pub struct PeerProcess {
    child: Child,
    /// Closing it makes the child end.
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl PeerProcess {
    /// Runs `test` again as `role`.
    ///
    /// # Panics
    /// If the process cannot be started.
    #[must_use]
    #[expect(clippy::print_stdout, reason = "passes on the child's output")]
    pub fn start(test: &str, role: &str) -> Self {
        let mut command = rerun_as(test, role, &[]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a child");
        let (sender, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().expect("its output"));
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                // The test harness writes to the same output without ending its lines.
                match line.split_once('@') {
                    Some((_, report)) => drop(sender.send(report.to_owned())),
                    None => println!("  (child) {line}"),
                }
            }
        });
        Self { stdin: child.stdin.take(), child, lines }
    }

    /// Waits for the next line that the child reports, which must begin with `word`. Returns the
    /// rest of the line.
    ///
    /// # Panics
    /// If no line arrives in time, or if the line does not begin with `word`.
    #[track_caller]
    pub fn expect_line(&self, word: &str) -> String {
        let line = self
            .lines
            .recv_timeout(TIMEOUT)
            .unwrap_or_else(|error| panic!("no line {word}: {error}"));
        let rest = line.strip_prefix(word).unwrap_or_else(|| panic!("expected {word}, got {line}"));
        rest.trim().to_owned()
    }

    /// Sends the signal with this name, which is given without "SIG".
    pub fn signal(&self, name: &str) {
        signal(name, self.child.id());
    }

    /// Stops the process and waits until all its threads have stopped: they may run for a moment
    /// after the signal.
    ///
    /// # Panics
    /// If a thread still runs after [`TIMEOUT`].
    pub fn stop(&self) {
        self.signal("STOP");
        until(TIMEOUT, "the process is stopped", || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id()))
                .expect("process exists");
            threads.flatten().all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
            })
        });
    }

    /// Makes the child end. Returns the remaining lines that it has reported.
    ///
    /// # Panics
    /// If the child does not end in time and with success.
    #[track_caller]
    pub fn finish(mut self) -> Vec<String> {
        drop(self.stdin.take());
        let status = exit_within(&mut self.child, TIMEOUT).expect("the child ends in time");
        let lines = self.lines.iter().collect();
        assert!(status.success(), "{status:?} {lines:?}");
        lines
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reports a line to the parent. Call it in the child.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub fn report(word: &str, rest: impl std::fmt::Display) {
    println!("\n@{word} {rest}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_reports_and_ends_with_its_input() {
        if role().is_some() {
            report("ready", 5);
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            report("ended", 6);
            return;
        }
        let peer =
            PeerProcess::start("process::tests::peer_reports_and_ends_with_its_input", "any");
        assert_eq!(peer.expect_line("ready"), "5");
        peer.stop();
        peer.signal("CONT");
        assert_eq!(peer.finish(), ["ended 6"]);
    }

    #[test]
    fn program_of_nobody_has_no_rights() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let words = "id -u; id -G; grep CapEff /proc/self/status";
        let output = as_nobody(|| Command::new("sh").args(["-c", words]).output());
        let output = output.expect("sh");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(text, "65534\n65534\nCapEff:\t0000000000000000\n");
        assert!(rustix::process::geteuid().is_root(), "only the thread has changed");
    }

    #[test]
    fn killed_process_is_not_alive() {
        let process = KillOnDrop(Command::new("sleep").arg("600").spawn().expect("sleep"));
        let id = process.0.id();
        assert!(is_alive(id));
        drop(process);
        assert!(!is_alive(id));
    }
}
