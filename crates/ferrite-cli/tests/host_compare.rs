//! ferrite-cli against redis-cli: the same commands, to the same `redis-server`, in every style. What differs is listed in
//! `compare/commands.txt`, with the reason; what is listed and does not differ is a failure too.

#![expect(clippy::print_stdout, reason = "the counts are what is asked for")]

#[path = "compare/redis.rs"]
mod redis;
#[path = "../src/split.rs"]
mod split;
#[path = "compare/table.rs"]
mod table;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use redis::Redis;
use table::{Case, cases};

/// A style, and how it is asked for.
const STYLES: [(&str, &[&str]); 8] = [
    ("raw", &["--raw"]),
    ("human", &["--no-raw"]),
    ("csv", &["--csv"]),
    ("json", &["--json"]),
    ("raw3", &["-3", "--raw"]),
    ("human3", &["-3", "--no-raw"]),
    ("csv3", &["-3", "--csv"]),
    ("quoted-json", &["--quoted-json"]),
];

/// Between the outputs of two cases.
const MARK: &str = "=-=mark=-=";

const OURS: &str = env!("CARGO_BIN_EXE_ferrite-cli");
const THEIRS: &str = "redis-cli";

/// Commands line by line on stdin, on one connection.
#[test]
fn as_lines() {
    let redis = Redis::start("lines");
    let cases = cases();
    let mut wrong = String::new();
    for (style, words) in STYLES {
        let cases: Vec<_> = cases.iter().filter(|case| !case.is_left_out(style)).collect();
        let theirs = outputs(THEIRS, words, &redis, &cases);
        let ours = outputs(OURS, words, &redis, &cases);
        wrong += &judge(style, "lines", &cases, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Each command a process.
#[test]
fn as_arguments() {
    let redis = Redis::start("shots");
    let cases = cases();
    let shots: Vec<_> = cases.iter().filter(|case| arguments(case).is_some()).collect();
    let mut wrong = String::new();
    for (style, words) in [STYLES[0], STYLES[1], STYLES[3], STYLES[5]] {
        let shots: Vec<_> = shots.iter().copied().filter(|case| !case.is_left_out(style)).collect();
        let all = |program| {
            redis.empty();
            shots.iter().map(|case| shot(program, words, &redis, case)).collect::<Vec<_>>()
        };
        let (theirs, ours) = (all(THEIRS), all(OURS));
        wrong += &judge(style, "arguments", &shots, &theirs, &ours);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

fn start(program: &str, words: &[&str], socket: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .arg("-s")
        .arg(socket)
        .args(words)
        .env_remove("REDISCLI_AUTH")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What each case printed.
fn outputs(program: &str, words: &[&str], redis: &Redis, cases: &[&Case]) -> Vec<String> {
    redis.empty();
    let mut input = String::new();
    for case in cases {
        case.commands.iter().for_each(|command| input += &format!("{command}\n"));
        input += &format!("ECHO {MARK}\n");
    }
    let mut child = start(program, words, &redis.socket).stdin(Stdio::piped()).spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("piped");
    let writing = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    writing.join().expect("no panic").expect("it reads all");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    let printed = escaped(&output.stdout);
    let mut parts: Vec<_> = printed.split(MARK).map(str::to_owned).collect();
    parts.pop(); // behind the last mark
    assert_eq!(parts.len(), cases.len(), "{program}: a mark is lost");
    parts
}

/// The arguments of a case that is one command which a process can be given.
fn arguments(case: &Case) -> Option<Vec<Vec<u8>>> {
    let [command] = case.commands.as_slice() else { return None };
    let words = split::split(command.as_bytes()).ok()?;
    let is_for_the_prompt = words.first()?.iter().all(|byte| b"-0123456789".contains(byte));
    let has_zero = words.iter().flatten().any(|byte| *byte == 0);
    (!is_for_the_prompt && !has_zero).then_some(words)
}

fn shot(program: &str, words: &[&str], redis: &Redis, case: &Case) -> String {
    use std::os::unix::ffi::OsStrExt as _;
    let arguments = arguments(case).expect("one command");
    let arguments = arguments.iter().map(|word| std::ffi::OsStr::from_bytes(word));
    let output = start(program, words, &redis.socket)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    format!("{}{}{:?}", escaped(&output.stdout), escaped(&output.stderr), output.status.code())
}

/// Bytes that are no printable ASCII are told apart, and marks stay marks.
fn escaped(bytes: &[u8]) -> String {
    let escape = |byte: &u8| match byte {
        b'\n' => "\n".to_owned(),
        byte => byte.escape_ascii().to_string(),
    };
    bytes.iter().map(escape).collect()
}

/// What is wrong.
fn judge(style: &str, way: &str, cases: &[&Case], theirs: &[String], ours: &[String]) -> String {
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
                wrong += &format!("{:?}:\n--- redis-cli\n{theirs}\n--- ferrite-cli\n{ours}\n", case.commands);
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
