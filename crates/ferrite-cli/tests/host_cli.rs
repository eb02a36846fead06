//! Tests of ferrite-cli with a real `redis-server` on this host, with or without RDMA: connecting,
//! modes, exit codes and the prompt.

mod compare {
    pub(crate) mod engine;
}

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use compare::engine::{empty, start};
use ferrite_testkit::{Engine, TIMEOUT, TempDir, Terminal, free_port, until};

fn cli(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(words).env_remove("REDISCLI_AUTH").stdin(Stdio::null());
    command
}

fn socket(redis: &Engine) -> String {
    redis.socket().display().to_string()
}

fn run(redis: &Engine, words: &[&str]) -> Output {
    cli(&[&["-s", &socket(redis)], words].concat()).output().expect("start ferrite-cli")
}

fn run_with_stdin(redis: &Engine, words: &[&str], input: &[u8]) -> Output {
    let mut command = cli(&[&["-s", &socket(redis)], words].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("start ferrite-cli");
    child.stdin.take().expect("piped stdin").write_all(input).expect("write stdin");
    child.wait_with_output().expect("wait for ferrite-cli")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// Starts a server with a TCP port. Returns the server and the port.
fn start_with_port() -> (Engine, String) {
    let port = free_port().to_string();
    (start(&["--bind", "127.0.0.1", "--port", &port]), port)
}

#[test]
fn reports_why_it_uses_tcp() {
    let (_redis, port) = start_with_port();
    // Without --rdma, ferrite-cli reports no transport for a server on this host, with or without
    // RDMA.
    let quiet = cli(&["-h", "localhost", "-p", &port, "PING"]).output().expect("start ferrite-cli");
    assert_eq!((stdout(&quiet).as_str(), stderr(&quiet).as_str()), ("PONG\n", ""));
    let forbidden = cli(&["-p", &port, "--rdma", "forbid", "--verbose", "PING"])
        .output()
        .expect("start ferrite-cli");
    assert_eq!(
        (stdout(&forbidden).as_str(), stderr(&forbidden).as_str()),
        ("PONG\n", "over TCP\n")
    );
    let preferred =
        cli(&["-p", &port, "--rdma", "prefer", "PING"]).output().expect("start ferrite-cli");
    assert_eq!(stdout(&preferred), "PONG\n");
    assert!(
        stderr(&preferred).starts_with("over TCP, because RDMA is unavailable: "),
        "{}",
        stderr(&preferred)
    );
    let uri = format!("redis://127.0.0.1:{port}/5");
    let by_uri = cli(&["-u", &uri, "--rdma", "forbid", "CLIENT", "INFO"])
        .output()
        .expect("start ferrite-cli");
    assert!(stdout(&by_uri).contains(" db=5 "), "{}", stdout(&by_uri));
}

/// INFO rdma is empty if the module is not loaded. ferrite-cli explains this: the output must not
/// look like that of an engine without RDMA clients.
#[test]
fn explains_an_empty_info_rdma() {
    let (_redis, port) = start_with_port();
    for protocol in ["-2", "-3"] {
        let output = cli(&["-p", &port, "--rdma", "forbid", protocol, "INFO", "rdma"]).output();
        let output = output.expect("start ferrite-cli");
        assert_eq!(stdout(&output).trim(), "");
        let explanation = stderr(&output);
        assert!(explanation.contains("loadmodule ferrite.so"), "{explanation}");
        assert!(explanation.ends_with("this connection runs over TCP\n"), "{explanation}");
    }
    let other = cli(&["-p", &port, "INFO", "nothing"]).output().expect("start ferrite-cli");
    assert_eq!((stdout(&other).trim(), stderr(&other).as_str()), ("", ""));
}

#[test]
fn fails_if_rdma_is_required_and_unavailable() {
    let has_device =
        Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut found| found.next().is_some());
    let (_redis, port) = start_with_port();
    let required = cli(&["-p", &port, "--rdma", "require", "-t", "1", "PING"])
        .output()
        .expect("start ferrite-cli");
    assert_eq!(
        required.status.code(),
        Some(if has_device { 1 } else { 69 }),
        "{}",
        stderr(&required)
    );
    assert_eq!(stdout(&required), "");
    assert_eq!(stderr(&required).lines().count(), 1, "{}", stderr(&required));
}

#[test]
fn reports_connection_errors_and_wrong_usage() {
    let refused =
        cli(&["-p", "1", "--rdma", "forbid", "PING"]).output().expect("start ferrite-cli");
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(stderr(&refused), "Could not connect to Redis at 127.0.0.1:1: Connection refused\n");
    let missing = cli(&["-s", "/nonexistent/socket", "PING"]).output().expect("start ferrite-cli");
    let expected = "Could not connect to Redis at /nonexistent/socket: No such file or directory\n";
    assert_eq!(stderr(&missing), expected);
    for wrong in
        [&["--no-such-option"][..], &["-2", "-3"], &["--scan", "--stat"], &["-u", "http://host"]]
    {
        assert_eq!(
            cli(wrong).output().expect("start ferrite-cli").status.code(),
            Some(2),
            "{wrong:?}"
        );
    }
    assert!(
        stdout(&cli(&["-v"]).output().expect("start ferrite-cli")).starts_with("ferrite-cli 0.")
    );
}

#[test]
fn help_lists_the_exit_codes_once() {
    for word in ["-h", "--help"] {
        let help = stdout(&cli(&[word]).output().expect("start ferrite-cli"));
        assert!(help.contains(&ferrite_config::exit_code::help_of_cli()), "{help}");
        assert_eq!(help.matches("Exit codes").count(), 1, "{help}");
    }
}

#[test]
fn shows_the_build_and_rdma_core_after_the_version() {
    let version = stdout(&cli(&["--version"]).output().expect("start ferrite-cli"));
    let first_words: Vec<_> =
        version.lines().map(|line| line.split(' ').next().unwrap_or_default()).collect();
    assert_eq!(first_words, ["ferrite-cli", "commit:", "build:", "rdma-core:"], "{version}");
}

#[test]
fn the_last_of_repeated_options_wins() {
    let redis = start(&[]);
    let output = run(&redis, &["-n", "1", "-n", "2", "--no-raw", "--no-raw", "CLIENT", "INFO"]);
    assert!(stdout(&output).contains(" db=2 "), "{}{}", stdout(&output), stderr(&output));
}

#[test]
fn names_options_of_redis_cli_that_it_does_not_have() {
    for (words, instead) in [
        (&["--cluster", "info"][..], "redis-cli --cluster"),
        (&["--rdb", "file"], "replication is not carried over RDMA"),
        (&["--hotkeys"], "OBJECT FREQ"),
        (&["--askpass"], "REDISCLI_AUTH"),
        (&["--tls-ciphers", "x"], "TLS 1.3"),
    ] {
        let output = cli(words).output().expect("start ferrite-cli");
        let expected = format!("{} is not supported by ferrite-cli: ", words[0]);
        let error = stderr(&output);
        assert!(error.starts_with(&expected) && error.contains(instead), "{error}");
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{error}");
    }
    let output = cli(&["--no-such-option"]).output().expect("start ferrite-cli");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("unexpected argument"), "{}", stderr(&output));
}

#[test]
fn connects_from_the_local_address_over_tcp() {
    let (redis, port) = start_with_port();
    // In protected mode, the engine treats 127.0.0.2 as another host.
    run(&redis, &["CONFIG", "SET", "protected-mode", "no"]);
    let run_from = |local: &str| {
        let words = ["-p", &port, "--rdma", "forbid", "--local", local, "CLIENT", "INFO"];
        cli(&words).output().expect("start ferrite-cli")
    };
    let output = run_from("127.0.0.2");
    assert!(stdout(&output).contains(" addr=127.0.0.2:"), "{}{}", stdout(&output), stderr(&output));
    let output = run_from("192.0.2.1");
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).contains("cannot connect from 192.0.2.1: "), "{}", stderr(&output));
}

#[test]
fn logs_in_with_a_password() {
    let redis = start(&["--requirepass", "secret"]);
    assert!(stdout(&run(&redis, &["PING"])).starts_with("NOAUTH"));
    let typed = run(&redis, &["-a", "secret", "PING"]);
    assert_eq!(stdout(&typed), "PONG\n");
    assert!(stderr(&typed).starts_with("Warning: Using a password"), "{}", stderr(&typed));
    let quiet =
        run(&redis, &["--user", "default", "--pass", "secret", "--no-auth-warning", "PING"]);
    assert_eq!((stdout(&quiet).as_str(), stderr(&quiet).as_str()), ("PONG\n", ""));
    let wrong = run(&redis, &["-a", "wrong", "--no-auth-warning", "PING"]);
    assert!(stderr(&wrong).starts_with("AUTH failed: WRONGPASS"), "{}", stderr(&wrong));
    let from_environment = cli(&["-s", &socket(&redis), "PING"])
        .env("REDISCLI_AUTH", "secret")
        .output()
        .expect("start ferrite-cli");
    assert_eq!(stdout(&from_environment), "PONG\n");
}

#[test]
fn reads_arguments_from_stdin_and_files() {
    let redis = start(&[]);
    assert_eq!(stdout(&run_with_stdin(&redis, &["-x", "SET", "k"], b"bin\0ary\n")), "OK\n");
    assert_eq!(run(&redis, &["GET", "k"]).stdout, b"bin\0ary\n\n");
    assert_eq!(
        stdout(&run_with_stdin(&redis, &["-X", "TAG", "SET", "TAG", "v"], b"from stdin")),
        "OK\n"
    );
    assert_eq!(stdout(&run(&redis, &["GET", "from stdin"])), "v\n");
    assert_eq!(run_with_stdin(&redis, &["-X", "TAG", "GET", "k"], b"").status.code(), Some(1));
    assert_eq!(stdout(&run(&redis, &["--quoted-input", "STRLEN", r#""\x6b""#])), "8\n");
    assert_eq!(stdout(&run(&redis, &["-r", "3", "-i", "0.01", "INCR", "n"])), "1\n2\n3\n");
    let failed = run(&redis, &["-e", "INCR", "k"]);
    assert_eq!((failed.status.code(), stdout(&failed).as_str()), (Some(1), ""));
    assert_eq!(stderr(&failed), "ERR value is not an integer or out of range\n");
    assert_eq!(stdout(&run(&redis, &["-d", ";", "-D", "|", "MGET", "n", "missing"])), "3;|");
    let directory = TempDir::new("cli");
    let script = directory.file("script.lua", "return {KEYS[1], ARGV[1], #KEYS}");
    let evaluated = run(&redis, &["--eval", script.to_str().expect("UTF-8 path"), "k1", ",", "a1"]);
    assert_eq!(stdout(&evaluated), "k1\na1\n1\n");
}

#[test]
fn pipes_commands_and_counts_replies() {
    let redis = start(&[]);
    let mut input = Vec::new();
    for key in 0..50_000 {
        input.extend(
            format!(
                "*3\r\n$3\r\nSET\r\n${}\r\nkey:{key}\r\n$5\r\nvalue\r\n",
                4 + key.to_string().len()
            )
            .bytes(),
        );
    }
    let all = run_with_stdin(&redis, &["--pipe"], &input);
    let progress =
        "All data transferred. Waiting for the last reply...\nLast reply received from server.\n";
    assert_eq!(stdout(&all), format!("{progress}errors: 0, replies: 50000\n"));
    assert_eq!(stdout(&run(&redis, &["DBSIZE"])), "50000\n");
    let some = run_with_stdin(&redis, &["--pipe"], b"INCR key:1\r\nSET a 1\r\nINCR a\r\nGET a");
    assert!(stdout(&some).ends_with("errors: 1, replies: 4\n"), "{}", stdout(&some));
    assert_eq!((some.status.code(), stderr(&some).lines().count()), (Some(1), 1));
    assert_eq!(
        stdout(&run_with_stdin(&redis, &["--pipe", "--json"], b"PING\n")),
        "{\"errors\":0,\"replies\":1}\n"
    );
}

#[test]
fn scans_keys_and_finds_the_largest() {
    let redis = start(&[]);
    let commands =
        b"MSET a 1 b 22 \"c d\" 333\nRPUSH list 1 2 3 4\nHSET hash f v\nXADD stream 1-1 f v\n";
    assert!(run_with_stdin(&redis, &[], commands).status.success());
    let scanned = stdout(&run(&redis, &["--scan", "--count", "2"]));
    let mut keys: Vec<_> = scanned.lines().collect();
    keys.sort_unstable();
    assert_eq!(keys, ["a", "b", "c d", "hash", "list", "stream"]);
    assert_eq!(stdout(&run(&redis, &["--scan", "--no-raw", "--pattern", "c*"])), "\"c d\"\n");
    let summary = stdout(&run(&redis, &["--bigkeys"]));
    for line in [
        "Sampled 6 keys in the keyspace!",
        "Biggest string found '\"c d\"' has 3 bytes",
        "Biggest   list found '\"list\"' has 4 items",
        "3 strings with 6 bytes (50.00% of keys, avg size 2.00)",
        "0 sets with 0 members (00.00% of keys, avg size 0.00)",
    ] {
        assert!(summary.lines().any(|found| found == line), "{line}: {summary}");
    }
    let object: serde_json::Value =
        serde_json::from_slice(&run(&redis, &["--memkeys", "--json"]).stdout).expect("JSON");
    assert_eq!(
        (&object["keys"], &object["types"]["list"]["biggest"]["key"]),
        (&6.into(), &"list".into())
    );
}

#[test]
fn measures_latency_and_prints_statistics() {
    let redis = start(&[]);
    let object: serde_json::Value =
        serde_json::from_slice(&run(&redis, &["--latency", "--json", "-i", "0.1"]).stdout)
            .expect("JSON");
    assert!(object["count"].as_u64().is_some_and(|count| count > 1), "{object}");
    assert!(object["max_us"].as_u64() >= object["min_us"].as_u64(), "{object}");
    let mut stat = Streaming::start(&redis, &["--stat", "-i", "0.05"]);
    assert!(stat.line().starts_with("------- data ------"));
    assert!(stat.line().starts_with("keys       mem      clients"));
    assert!(stat.line().contains(" (+0) "));
    assert!(stat.line().contains(" (+1) "));
}

#[test]
fn prints_messages_in_both_protocols() {
    let redis = start(&[]);
    for words in [&["-2", "--csv", "SUBSCRIBE", "ch"][..], &["-3", "--csv", "SUBSCRIBE", "ch"]] {
        let mut subscriber = Streaming::start(&redis, words);
        assert_eq!(subscriber.line(), "Reading messages... (press Ctrl-C to quit)\n");
        assert_eq!(subscriber.line(), "\"subscribe\",\"ch\",1\n");
        assert_eq!(stdout(&run(&redis, &["PUBLISH", "ch", "hello"])), "1\n");
        assert_eq!(subscriber.line(), "\"message\",\"ch\",\"hello\"\n");
    }
    let mut monitor = Streaming::start(&redis, &["MONITOR"]);
    assert_eq!(monitor.line(), "OK\n");
    run(&redis, &["GET", "watched"]);
    assert!(monitor.line().ends_with("\"GET\" \"watched\"\n"));
}

#[test]
fn prints_invalidations_if_asked_to() {
    let redis = start(&[]);
    let commands = b"CLIENT TRACKING ON\nGET a\nSET a 1\nGET a\n";
    let shown =
        stdout(&run_with_stdin(&redis, &["-3", "--no-raw", "--show-pushes", "yes"], commands));
    assert_eq!(shown, "OK\n(nil)\nOK\n-> invalidate: 'a'\n\"1\"\n");
    empty(&redis);
    assert_eq!(
        stdout(&run_with_stdin(&redis, &["-3", "--no-raw"], commands)),
        "OK\n(nil)\nOK\n\"1\"\n"
    );
}

#[test]
fn reconnects_after_a_lost_connection() {
    let redis = start(&[]);
    let output = run_with_stdin(
        &redis,
        &["-n", "2"],
        b"SET k v\nCLIENT KILL TYPE normal SKIPME no\nGET k\nGET k\n",
    );
    // The reply to CLIENT KILL may or may not arrive.
    assert!(stdout(&output).ends_with("v\n"), "{}", stdout(&output));
    assert_eq!(stderr(&output), "Error: Server closed the connection\n");
}

/// ferrite-cli does not wait for replies that the server does not send (redis-cli waits forever).
/// Before it exits, it waits until the server has run the commands.
#[test]
fn follows_client_reply() {
    let redis = start(&[]);
    let lines = b"SET a 1\nCLIENT REPLY OFF\nSET a 2\nGET a\nNOSUCH\nCLIENT REPLY ON\nGET a\n\
        client reply skip\nSET a 3\nGET a\n";
    for (style, shown) in [
        (&["--raw"][..], "OK\nOK\n2\n3\n"),
        (&["--no-raw"], "OK\nOK\n\"2\"\n\"3\"\n"),
        (&["-3", "--no-raw"], "OK\nOK\n\"2\"\n\"3\"\n"),
        (&["--json"], "\"OK\"\n\"OK\"\n\"2\"\n\"3\"\n"),
    ] {
        let output = run_with_stdin(&redis, style, lines);
        assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), (shown, ""), "{style:?}");
        assert_eq!(output.status.code(), Some(0));
    }
    let large = format!("CLIENT REPLY OFF\nSET a {}\n", "x".repeat(3_000_000));
    assert_eq!(stdout(&run_with_stdin(&redis, &[], large.as_bytes())), "");
    assert_eq!(stdout(&run(&redis, &["STRLEN", "a"])), "3000000\n");
    assert_eq!(stdout(&run_with_stdin(&redis, &[], b"CLIENT REPLY SKIP\nSET a 4\n")), "");
    assert_eq!(stdout(&run(&redis, &["GET", "a"])), "4\n");
    for mode in ["OFF", "SKIP"] {
        let output = run(&redis, &["-r", "2", "CLIENT", "REPLY", mode]);
        assert_eq!((stdout(&output).as_str(), output.status.code()), ("", Some(0)), "{mode}");
    }
    let help = run_with_stdin(&redis, &[], b"CLIENT REPLY OFF\nhelp get\nCLIENT REPLY ON\n");
    assert_eq!(stdout(&help), "the server has returned no help about its commands\nOK\n");
    let queued = run_with_stdin(&redis, &[], b"MULTI\nCLIENT REPLY OFF\nDISCARD\nGET a\n");
    assert_eq!(stdout(&queued), "OK\nQUEUED\nOK\n4\n");
    let left_open = run_with_stdin(&redis, &["-t", "0.2"], b"CLIENT REPLY OFF\nMULTI\nSET a 5\n");
    assert_eq!(left_open.status.code(), Some(1));
    assert!(
        stderr(&left_open).contains("the server did not confirm the last commands"),
        "{left_open:?}"
    );

    run(&redis, &["ACL", "SETUSER", "mute", "on", ">secret", "~*", "+@all", "-client"]);
    let refused = run_with_stdin(
        &redis,
        &["--user", "mute", "--pass", "secret"],
        b"CLIENT REPLY OFF\nGET a\n",
    );
    let replies = stdout(&refused);
    assert!(replies.starts_with("NOPERM ") && replies.ends_with("\n4\n"), "{replies}");
}

#[test]
fn runs_an_interactive_prompt() {
    let redis = start(&[]);
    let directory = TempDir::new("cli");
    let history = directory.join("history");
    let mut command = cli(&["-s", &socket(&redis)]);
    command.env("FERRITECLI_HISTFILE", &history);
    let mut terminal = Terminal::start(&command, 120, 40);
    let screen = &mut terminal.screen;
    screen.expect_next("over a Unix socket");
    for (typed, shown) in [
        ("SET k v\r", "\nOK"),
        ("SELECT 3\r", "[3]> "),
        ("MULTI\r", "(TX)> "),
        ("DISCARD\r", "[3]> "),
        ("AUTH a b\r", "WRONGPASS"),
        ("conf\t get hz\r", "\"10\""),
        ("hset k", " field value [field value ...]"),
        (" f v\r", "(integer) 1"),
        (":transport\r", "over a Unix socket"),
        ("help pfadd\r", "HyperLogLog"),
        ("SUBSCRIBE ch\r", "3) (integer) 1"),
        ("\x03", "[3]> "),
        ("BLPOP none 0\r", "BLPOP none 0"),
        ("", BLOCKED),
        ("\x03", "[3]> "),
        ("2 INCR n\r", "(integer) 2"),
        ("exit\r", ""),
    ] {
        screen.type_keys(typed);
        if shown == BLOCKED {
            wait_for_blocked(&redis);
        } else {
            screen.expect_next(shown);
        }
    }
    assert!(terminal.finish().0.success());
    let kept = std::fs::read_to_string(&history).expect("read the history file");
    assert!(kept.contains("SET k v\n") && kept.contains("CONFIG get hz\n"), "{kept}");
    assert!(!kept.contains("AUTH"), "{kept}");
}

/// Stands in place of a text to wait for on the screen: the test waits until the server reports a
/// blocked client.
const BLOCKED: &str = "BLOCKED";

fn wait_for_blocked(redis: &Engine) {
    until(TIMEOUT, "a blocked client", || {
        stdout(&run(redis, &["INFO", "clients"])).contains("blocked_clients:1")
    });
}

/// A program that runs until it is killed.
struct Streaming(Child, BufReader<std::process::ChildStdout>);

impl Streaming {
    fn start(redis: &Engine, words: &[&str]) -> Self {
        let mut child = cli(&[&["-s", &socket(redis)], words].concat())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start ferrite-cli");
        let stdout = BufReader::new(child.stdout.take().expect("piped stdout"));
        Self(child, stdout)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).expect("read a line");
        line
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
