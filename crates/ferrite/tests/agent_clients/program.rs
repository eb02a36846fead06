//! A program that uses a client of others in cluster mode, and what it reports.
//!
//! The arguments are the host and port of a node, the password, and a prefix for keys. Several
//! workers write numbered values, read them, and increment counters. Each line of the output is one
//! of these:
//!
//! | line | meaning |
//! |---|---|
//! | `round WORKER` | a worker has written and read a value; all replies were correct |
//! | `error TEXT` | the client has reported an error |
//! | `wrong TEXT` | a reply was wrong |
//! | `end` | standard input was closed, and the workers have read their last values again |

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ferrite_testkit::process::KillOnDrop;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{TIMEOUT, until};

/// What a program has reported.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) rounds: u64,
    /// The longest time without the end of a round.
    pub(crate) longest_gap: Duration,
    last_round: Instant,
    pub(crate) errors: Vec<String>,
    pub(crate) wrong: Vec<String>,
    has_ended: bool,
}

impl Report {
    fn add(&mut self, line: &str) {
        let (word, text) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "round" => {
                let now = Instant::now();
                if self.rounds > 0 {
                    self.longest_gap = self.longest_gap.max(now - self.last_round);
                }
                (self.last_round, self.rounds) = (now, self.rounds + 1);
            }
            "error" => self.errors.push(text.to_owned()),
            "wrong" => self.wrong.push(text.to_owned()),
            "end" => self.has_ended = true,
            _ => self.wrong.push(format!("an unknown line: {line}")),
        }
    }

    /// Returns the errors without numbers and addresses, each once.
    pub(crate) fn kinds(&self) -> BTreeSet<String> {
        let without_numbers = |error: &String| {
            let words =
                error.split(' ').filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
            words.collect::<Vec<_>>().join(" ")
        };
        self.errors.iter().map(without_numbers).collect()
    }
}

/// A running program. Drop kills it.
pub(crate) struct Program {
    pub(crate) name: String,
    process: KillOnDrop,
    /// Closing it makes the program end.
    stdin: Option<ChildStdin>,
    report: Arc<Mutex<Report>>,
}

impl Program {
    /// Starts a program with the address of a node.
    pub(crate) fn start(path: &Path, node: (&str, u16), password: &str, prefix: &str) -> Self {
        let mut command = Command::new(path);
        command.args([node.0, &node.1.to_string(), password, prefix]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let (stdin, out) = (child.stdin.take(), child.stdout.take().expect("piped"));
        let report = Arc::new(Mutex::new(Report {
            rounds: 0,
            longest_gap: Duration::ZERO,
            last_round: Instant::now(),
            errors: Vec::new(),
            wrong: Vec::new(),
            has_ended: false,
        }));
        let reader = report.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                reader.lock().expect("no panic").add(&line);
            }
        });
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        Self { name, process: KillOnDrop(child), stdin, report }
    }

    pub(crate) fn report(&self) -> MutexGuard<'_, Report> {
        self.report.lock().expect("no panic")
    }

    /// Waits for the first round. The runtimes of some clients read hundreds of files first.
    #[track_caller]
    pub(crate) fn wait_for_start(&self) {
        let what = format!("the first round of {}", self.name);
        let details = || format!("{:?}", self.report());
        until_or(3 * TIMEOUT, &what, || self.report().rounds > 0, details);
    }

    /// Waits until the program has done so many more rounds.
    #[track_caller]
    pub(crate) fn wait_for(&self, rounds: u64, what: &str) {
        let wanted = self.report().rounds + rounds;
        let what = format!("{rounds} rounds of {}, {what}", self.name);
        let details = || format!("{:?}", self.report());
        until_or(TIMEOUT, &what, || self.report().rounds >= wanted, details);
    }

    /// Makes the workers read their last values again and the program end.
    pub(crate) fn finish(&mut self) {
        drop(self.stdin.take());
        until(TIMEOUT, "the end of the program", || {
            self.process.0.try_wait().expect("a child process").is_some()
        });
        until_or(TIMEOUT, "the line end", || self.report().has_ended, || self.name.clone());
    }
}
