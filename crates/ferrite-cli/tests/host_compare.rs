//! ferrite-cli against redis-cli: the same commands, to the same `redis-server`, in every style.
//! What differs is listed in `compare/commands.txt`, with the reason; what is listed and does not
//! differ is a failure too.
#![expect(clippy::print_stdout, reason = "the counts are what is asked for")]

#[path = "compare/harness.rs"]
mod harness;
#[path = "compare/redis.rs"]
mod redis;
#[path = "../src/split.rs"]
mod split;
#[path = "compare/table.rs"]
mod table;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::process::Stdio;

use harness::{HUMAN, HUMAN3, JSON, Program, RAW, Style, escaped, judge, lines};
use redis::Redis;
use table::{Case, cases};

const CSV: Style = ("csv", &["--csv"]);
const RAW3: Style = ("raw3", &["-3", "--raw"]);
const CSV3: Style = ("csv3", &["-3", "--csv"]);
const QUOTED_JSON: Style = ("quoted-json", &["--quoted-json"]);

/// Commands line by line on stdin, on one connection.
#[test]
fn as_lines() {
    let redis = Redis::start("lines");
    let cases = cases();
    let mut wrong = String::new();
    for style in [RAW, HUMAN, CSV, JSON, RAW3, HUMAN3, CSV3, QUOTED_JSON] {
        let cases: Vec<_> = cases.iter().filter(|case| !case.is_left_out(style.0)).collect();
        redis.empty();
        let theirs = Program::theirs(&redis).outputs(style, &cases);
        redis.empty();
        let ours = Program::ours(&redis).outputs(style, &cases);
        wrong += &judge(style.0, "lines", &cases, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Each command a process.
#[test]
fn as_arguments() {
    let redis = Redis::start("shots");
    let cases = cases();
    let mut wrong = String::new();
    for style in [RAW, HUMAN, JSON, HUMAN3] {
        let shots =
            cases.iter().filter(|case| arguments(case).is_some() && !case.is_left_out(style.0));
        let shots: Vec<_> = shots.collect();
        let all = |program: Program| {
            redis.empty();
            shots.iter().map(|case| shot(&program, style, case)).collect::<Vec<_>>()
        };
        let (theirs, ours) = (all(Program::theirs(&redis)), all(Program::ours(&redis)));
        wrong += &judge(style.0, "arguments", &shots, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Whatever is replied, each line is JSON; so is what redis-cli does not survive.
#[test]
fn json_is_json() {
    let redis = Redis::start("json");
    let cases = cases();
    for (_, words) in [JSON, QUOTED_JSON, ("json2", &["-2", "--json"])] {
        redis.empty();
        let output = Program::ours(&redis).fed(words, lines(&cases.iter().collect::<Vec<_>>(), ""));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut count = 0;
        for line in output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let parsed: Result<serde_json::Value, _> = serde_json::from_slice(line);
            assert!(parsed.is_ok(), "{words:?}: {}", line.escape_ascii());
            count += 1;
        }
        // Those that are repeated, and those that are several.
        assert!(count > cases.len(), "{count}");
    }
}

/// The arguments of a case that is one command which a process can be given.
fn arguments(case: &Case) -> Option<Vec<Vec<u8>>> {
    let [command] = case.commands.as_slice() else { return None };
    let words = split::split(command.as_bytes()).ok()?;
    let is_for_the_prompt = words.first()?.iter().all(|byte| b"-0123456789".contains(byte));
    let has_zero = words.iter().flatten().any(|byte| *byte == 0);
    (!is_for_the_prompt && !has_zero).then_some(words)
}

/// What a process prints that is given such a case, and how it ends.
fn shot(program: &Program, style: Style, case: &Case) -> String {
    let arguments = arguments(case).expect("one command");
    let arguments = arguments.iter().map(|word| OsStr::from_bytes(word));
    let output =
        program.start(style.1).args(arguments).stdin(Stdio::null()).output().expect("it starts");
    format!("{}{}{:?}", escaped(&output.stdout), escaped(&output.stderr), output.status.code())
}
