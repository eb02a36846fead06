//! Compares ferrite-cli with redis-cli: both run the same commands on the same `redis-server`, in
//! every style. Intended differences are listed in `compare/commands.txt`, with the reason. A
//! listed difference that does not occur is a failure as well.
#![expect(clippy::print_stdout, reason = "prints the numbers of equal and different cases")]

mod compare {
    pub(crate) mod engine;
    pub(crate) mod harness;
    pub(crate) mod table;
    pub(crate) mod words;
}

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Stdio;

use compare::engine;
use compare::harness::{HUMAN, HUMAN3, JSON, Program, RAW, Style, escaped, judge, lines};
use compare::table::{Case, cases};
use compare::words::words;

const CSV: Style = ("csv", &["--csv"]);
const RAW3: Style = ("raw3", &["-3", "--raw"]);
const CSV3: Style = ("csv3", &["-3", "--csv"]);
const QUOTED_JSON: Style = ("quoted-json", &["--quoted-json"]);

/// All commands run on one connection, as lines on stdin.
#[test]
fn prints_what_redis_cli_prints_for_lines() {
    let redis = engine::start(&[]);
    let cases = cases();
    let mut wrong = String::new();
    for style in [RAW, HUMAN, CSV, JSON, RAW3, HUMAN3, CSV3, QUOTED_JSON] {
        let cases: Vec<_> = cases.iter().filter(|case| !case.is_left_out(style.0)).collect();
        engine::empty(&redis);
        let theirs = Program::theirs(&redis).outputs(style, &cases);
        engine::empty(&redis);
        let ours = Program::ours(&redis).outputs(style, &cases);
        wrong += &judge(style.0, "lines", &cases, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Each command runs in a process of its own.
#[test]
fn prints_what_redis_cli_prints_for_arguments() {
    let redis = engine::start(&[]);
    let cases = cases();
    let mut wrong = String::new();
    for style in [RAW, HUMAN, JSON, HUMAN3] {
        let cases =
            cases.iter().filter(|case| arguments(case).is_some() && !case.is_left_out(style.0));
        let cases: Vec<_> = cases.collect();
        let run_all = |program: Program| {
            engine::empty(&redis);
            cases.iter().map(|case| run_process(&program, style, case)).collect::<Vec<_>>()
        };
        let (theirs, ours) = (run_all(Program::theirs(&redis)), run_all(Program::ours(&redis)));
        wrong += &judge(style.0, "arguments", &cases, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Every line is valid JSON for every reply, even where redis-cli exits.
#[test]
fn prints_valid_json() {
    let redis = engine::start(&[]);
    let cases = cases();
    for (_, words) in [JSON, QUOTED_JSON, ("json2", &["-2", "--json"])] {
        engine::empty(&redis);
        let output = Program::ours(&redis)
            .run_with_stdin(words, lines(&cases.iter().collect::<Vec<_>>(), ""));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut count = 0;
        for line in output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let parsed: Result<serde_json::Value, _> = serde_json::from_slice(line);
            assert!(parsed.is_ok(), "{words:?}: {}", line.escape_ascii());
            count += 1;
        }
        // There are more lines than cases, because some cases have several commands or repeat one.
        assert!(count > cases.len(), "{count}");
    }
}

/// Returns the arguments of a case, if it consists of one command that can be given to a process.
fn arguments(case: &Case) -> Option<Vec<Vec<u8>>> {
    let [command] = case.commands.as_slice() else { return None };
    let words = words(command.as_bytes())?;
    let is_for_the_prompt = words.first()?.iter().all(|byte| b"-0123456789".contains(byte));
    let has_zero = words.iter().flatten().any(|byte| *byte == 0);
    (!is_for_the_prompt && !has_zero).then_some(words)
}

/// Runs a case with one command as a process. Returns its output and its exit code.
fn run_process(program: &Program, style: Style, case: &Case) -> String {
    let arguments = arguments(case).expect("one command");
    let arguments = arguments.iter().map(|word| OsStr::from_bytes(word));
    let output = program.start(style.1).args(arguments).stdin(Stdio::null()).output();
    let output = output.expect("start the program");
    format!("{}{}{:?}", escaped(&output.stdout), escaped(&output.stderr), output.status.code())
}
