//! Both programs, given the same commands: what each printed, case by case, and what is wrong with
//! it.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use super::redis::Redis;
use super::table::Case;

/// A style, and how it is asked for.
pub(crate) type Style = (&'static str, &'static [&'static str]);

pub(crate) const RAW: Style = ("raw", &["--raw"]);
pub(crate) const HUMAN: Style = ("human", &["--no-raw"]);
pub(crate) const JSON: Style = ("json", &["--json"]);
pub(crate) const HUMAN3: Style = ("human3", &["-3", "--no-raw"]);

/// Between the outputs of two cases.
const MARK: &str = "=-=mark=-=";

/// A program, and the options by which it reaches the server.
pub(crate) struct Program {
    pub(crate) path: &'static str,
    pub(crate) reach: Vec<String>,
}

impl Program {
    /// redis-cli, at the server's own socket.
    pub(crate) fn theirs(redis: &Redis) -> Self {
        Self { path: "redis-cli", reach: vec!["-s".into(), redis.socket.display().to_string()] }
    }

    /// ferrite-cli, at the server's own socket.
    pub(crate) fn ours(redis: &Redis) -> Self {
        Self { path: env!("CARGO_BIN_EXE_ferrite-cli"), ..Self::theirs(redis) }
    }

    pub(crate) fn start(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.path);
        command.args(&self.reach).args(words).env_remove("REDISCLI_AUTH");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What it does with `input` on stdin.
    pub(crate) fn fed(&self, words: &[&str], input: Vec<u8>) -> Output {
        let mut child = self.start(words).stdin(Stdio::piped()).spawn().expect("it starts");
        let mut stdin = child.stdin.take().expect("piped");
        let writing = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().expect("it ends");
        let _ = writing.join().expect("no panic"); // who ends early does not read all
        output
    }

    /// What each case printed, all of them line by line on one connection.
    pub(crate) fn outputs(&self, style: Style, cases: &[&Case]) -> Vec<String> {
        let output = self.fed(style.1, lines(cases, &format!("ECHO {MARK}\n")));
        assert!(
            output.status.success(),
            "{}: {}",
            self.path,
            String::from_utf8_lossy(&output.stderr)
        );
        let printed = escaped(&output.stdout);
        let mut parts: Vec<_> = printed.split(MARK).map(str::to_owned).collect();
        parts.pop(); // behind the last mark
        assert_eq!(parts.len(), cases.len(), "{}: a mark is lost", self.path);
        parts
    }
}

/// The commands of cases, with something behind each case.
pub(crate) fn lines(cases: &[&Case], behind: &str) -> Vec<u8> {
    let mut input = String::new();
    for case in cases {
        case.commands.iter().for_each(|command| input += &format!("{command}\n"));
        input += behind;
    }
    input.into_bytes()
}

/// Bytes that are no printable ASCII are told apart, and marks stay marks. How long a command took
/// is printed from half a second on, which on a busy machine can be any, and is left out.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    let escape = |byte: &u8| match byte {
        b'\n' => "\n".to_owned(),
        byte => byte.escape_ascii().to_string(),
    };
    let printed: String = bytes.iter().map(escape).collect();
    printed.split_inclusive('\n').filter(|line| !is_time(line.trim_end())).collect()
}

/// `(0.51s)`
fn is_time(line: &str) -> bool {
    let seconds = line.strip_prefix('(').and_then(|rest| rest.strip_suffix("s)"));
    seconds.is_some_and(|seconds| seconds.contains('.') && seconds.parse::<f64>().is_ok())
}

/// What is wrong; how many were right is printed.
pub(crate) fn judge(
    style: &str,
    way: &str,
    cases: &[&Case],
    theirs: &[String],
    ours: &[String],
) -> String {
    let mut wrong = String::new();
    let (mut same, mut different) = (0, 0);
    for ((case, theirs), ours) in cases.iter().zip(theirs).zip(ours) {
        match (theirs == ours, case.difference(style)) {
            (true, None) => same += 1,
            (false, Some(_)) => different += 1,
            (true, Some(reason)) => {
                wrong += &format!("{:?}: does not differ, though {reason}\n", case.commands);
            }
            (false, None) => {
                wrong += &format!(
                    "{:?}:\n--- redis-cli\n{theirs}\n--- ferrite-cli\n{ours}\n",
                    case.commands
                );
            }
        }
    }
    println!("{way:>9} {style:>11}: {same} cases the same, {different} differ as listed");
    assert!(cases.len() >= 300, "too few");
    if !wrong.is_empty() {
        wrong.insert_str(0, &format!("=== {style}, as {way}\n"));
    }
    wrong
}
