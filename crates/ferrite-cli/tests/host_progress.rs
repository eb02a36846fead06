//! The progress of `--pipe` and `--bigkeys` on a terminal, with a real `redis-server`.

use std::fs::File;
use std::process::{Command, Output, Stdio};

use ferrite_testkit::{Engine, Screen, TempDir};

/// Runs ferrite-cli with stderr on a terminal. Returns its output and the terminal's screen.
fn run(redis: &Engine, arguments: &[&str], stdin: Stdio) -> (Output, Screen) {
    let (screen, terminal) = Screen::open(100, 30);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.arg("-s").arg(redis.socket()).args(arguments);
    command.stdin(stdin).stdout(Stdio::piped()).stderr(terminal).env("TERM", "xterm");
    (command.spawn().expect("ferrite-cli starts").wait_with_output().expect("an end"), screen)
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn pipe_shows_the_bytes_of_a_file() {
    let redis = Engine::redis(&[]);
    let directory = TempDir::new("pipe");
    let commands = "SET key value\r\n".repeat(3000) + "NONSENSE\r\n";
    let file = directory.file("commands", &commands);
    let (output, screen) = run(&redis, &["--pipe"], File::open(file).expect("the commands").into());
    screen.expect(" of 43.96 KiB sent");
    screen.expect("ERR unknown command 'NONSENSE'");
    let result = stdout(&output);
    assert_eq!(
        result,
        "All data transferred. Waiting for the last reply...\nLast reply received from server.\n\
         errors: 1, replies: 3001\n"
    );
}

#[test]
fn big_keys_shows_the_share_of_the_keys() {
    let redis = Engine::redis(&[]);
    for key in 0..50 {
        assert_eq!(redis.client().text(&["SET", &format!("key{key}"), "value"]), "+OK");
    }
    let (output, screen) = run(&redis, &["--bigkeys"], Stdio::null());
    screen.expect(" of 50 keys");
    screen.expect("Biggest string found so far '\"key");
    let summary = stdout(&output);
    assert!(summary.contains("Sampled 50 keys in the keyspace!"), "{summary}");
    assert!(!summary.contains(" of 50 keys"), "{summary}");
}

#[test]
fn nothing_is_shown_without_a_terminal() {
    let redis = Engine::redis(&[]);
    assert_eq!(redis.client().text(&["SET", "key", "value"]), "+OK");
    for arguments in ["--pipe", "--bigkeys"] {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"))
            .arg("-s")
            .arg(redis.socket())
            .arg(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("ferrite-cli starts");
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
