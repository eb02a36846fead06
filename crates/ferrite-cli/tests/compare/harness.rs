//! Runs redis-cli and ferrite-cli with the same commands, and compares their output case by case.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use ferrite_testkit::Engine;

use super::table::Case;

/// The name of a style, and its options.
pub(crate) type Style = (&'static str, &'static [&'static str]);

pub(crate) const RAW: Style = ("raw", &["--raw"]);
pub(crate) const HUMAN: Style = ("human", &["--no-raw"]);
pub(crate) const JSON: Style = ("json", &["--json"]);
pub(crate) const HUMAN3: Style = ("human3", &["-3", "--no-raw"]);

/// Printed between the outputs of two cases.
const MARK: &str = "=-=mark=-=";

/// A program, and the options with which it connects to the server.
pub(crate) struct Program {
    pub(crate) path: &'static str,
    pub(crate) connect_options: Vec<String>,
}

impl Program {
    /// Returns redis-cli, connected to the server's Unix socket.
    pub(crate) fn theirs(redis: &Engine) -> Self {
        let connect_options = vec!["-s".into(), redis.socket().display().to_string()];
        Self { path: "redis-cli", connect_options }
    }

    /// Returns ferrite-cli, connected to the server's Unix socket.
    pub(crate) fn ours(redis: &Engine) -> Self {
        Self { path: env!("CARGO_BIN_EXE_ferrite-cli"), ..Self::theirs(redis) }
    }

    pub(crate) fn start(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.path);
        command.args(&self.connect_options).args(words).env_remove("REDISCLI_AUTH");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the program with `input` on stdin.
    pub(crate) fn run_with_stdin(&self, words: &[&str], input: Vec<u8>) -> Output {
        let child = self.start(words).stdin(Stdio::piped()).spawn();
        let mut child = child.expect("start the program");
        let mut stdin = child.stdin.take().expect("piped stdin");
        let writing = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().expect("wait for the program");
        // Writing fails if the program exits before it has read everything.
        let _ = writing.join().expect("writer does not panic");
        output
    }

    /// Runs all cases as lines on one connection, and returns the output of each case.
    pub(crate) fn outputs(&self, style: Style, cases: &[&Case]) -> Vec<String> {
        let output = self.run_with_stdin(style.1, lines(cases, &format!("ECHO {MARK}\n")));
        assert!(
            output.status.success(),
            "{}: {}",
            self.path,
            String::from_utf8_lossy(&output.stderr)
        );
        let printed = escaped(&output.stdout);
        let mut parts: Vec<_> = printed.split(MARK).map(str::to_owned).collect();
        parts.pop(); // the text after the last mark belongs to no case
        assert_eq!(parts.len(), cases.len(), "{}: a mark is missing", self.path);
        parts
    }
}

/// Returns the commands of cases as lines, with `separator` after each case.
pub(crate) fn lines(cases: &[&Case], separator: &str) -> Vec<u8> {
    let mut input = String::new();
    for case in cases {
        case.commands.iter().for_each(|command| input += &format!("{command}\n"));
        input += separator;
    }
    input.into_bytes()
}

/// Escapes bytes that are not printable ASCII, so that they can be compared. Keeps marks. Leaves
/// out the lines with the duration of a command. The programs print such a line after half a second
/// or more, which any command can take on a busy machine.
pub(crate) fn escaped(bytes: &[u8]) -> String {
    let escape = |byte: &u8| match byte {
        b'\n' => "\n".to_owned(),
        byte => byte.escape_ascii().to_string(),
    };
    let printed: String = bytes.iter().map(escape).collect();
    printed.split_inclusive('\n').filter(|line| !is_time(line.trim_end())).collect()
}

/// Returns whether a line is a duration, such as `(0.51s)`.
fn is_time(line: &str) -> bool {
    let seconds = line.strip_prefix('(').and_then(|rest| rest.strip_suffix("s)"));
    seconds.is_some_and(|seconds| seconds.contains('.') && seconds.parse::<f64>().is_ok())
}

/// Compares the outputs and prints how many are the same. Returns a description of the differences.
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
                wrong +=
                    &format!("{:?}: does not differ, although listed: {reason}\n", case.commands);
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
    assert!(cases.len() >= 300, "only {} cases", cases.len());
    if !wrong.is_empty() {
        wrong.insert_str(0, &format!("=== {style}, as {way}\n"));
    }
    wrong
}
