//! Tests `ferrite-cli` as a client of the same servers, with RDMA required. It runs on the second
//! host, like Ferrite's other clients.

use serde_json::{Value, json};

use crate::server::{TestServer, bytes, text};
use crate::{LONG, SIZES, SOON};

/// Runs commands, each in a process of its own or as lines of one process, and checks the reported
/// transport.
pub(crate) fn cli_commands(server: &mut TestServer) {
    assert_eq!(server.ferrite_cli(&["PING"], b"", SOON), b"PONG\n");
    let transport_info = format!("over RDMA, device rxe2, to {}\n", server.description());
    assert_eq!(server.ferrite_cli_stderr(&["--verbose", "PING"], SOON), transport_info);
    assert_eq!(server.ferrite_cli(&["ECHO", "a b\r\n"], b"", SOON), b"a b\r\n\n");
    assert_eq!(server.ferrite_cli(&["SET", "key", "a value"], b"", SOON), b"OK\n");
    assert_eq!(server.engine(&["GET", "key"]), b"a value");
    assert_eq!(server.ferrite_cli(&["--no-raw", "GET", "key"], b"", SOON), b"\"a value\"\n");
    for number in 1..=30 {
        assert_eq!(
            text(&server.ferrite_cli(&["INCR", "visits"], b"", SOON)),
            format!("{number}\n")
        );
    }
    let lines = b"MULTI\nINCR visits\nEXEC\nINCR key\nGET visits\n";
    let output = text(&server.ferrite_cli(&[], lines, SOON));
    assert_eq!(output, "OK\nQUEUED\n31\nERR value is not an integer or out of range\n\n31\n");
    // With the module, INFO has its counters.
    let has_module = !server.engine(&["INFO", "ferrite_rdma"]).is_empty();
    let info = text(&server.ferrite_cli(&["INFO", "rdma"], b"", SOON));
    assert_eq!(info.contains("ferrite_rdma_connections:1\r"), has_module, "{info}");
    server.until("clients are gone", SOON, || server.info("connected_clients") == 1);
}

/// Writes and reads values over RDMA, and compares each with the engine's.
pub(crate) fn cli_values(server: &mut TestServer) {
    for (seed, size) in SIZES.into_iter().enumerate() {
        let value = bytes(seed, size);
        assert_eq!(
            text(&server.ferrite_cli(&["-x", "SET", "key"], &value, LONG)),
            "OK\n",
            "{size} B"
        );
        assert!(
            server.engine(&["GET", "key"]) == value,
            "the engine has another value of {size} B"
        );
        let mut got = server.ferrite_cli(&["--raw", "GET", "key"], b"", LONG);
        assert_eq!(got.pop(), Some(b'\n'), "{size} B");
        assert!(got == value, "wrong value of {size} B: received {} B", got.len());
    }
}

/// Sends thousands of commands without waiting, in RESP and as lines, small and large.
pub(crate) fn cli_pipe(server: &mut TestServer) {
    const COMMANDS: usize = 5000;
    let ending = format!("errors: 0, replies: {COMMANDS}\n");
    let mut commands = Vec::new();
    for number in 0..COMMANDS {
        let (key, value) = (format!("key:{number}"), value(number));
        commands.extend(format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n", key.len()).bytes());
        commands.extend(format!("${}\r\n", value.len()).bytes().chain(value).chain(*b"\r\n"));
    }
    let output = text(&server.ferrite_cli(&["--pipe"], &commands, LONG));
    assert!(output.ends_with(&ending), "{output}");
    assert_eq!(text(&server.engine(&["DBSIZE"])), COMMANDS.to_string());
    for number in (0..COMMANDS).step_by(97) {
        assert!(server.engine(&["GET", &format!("key:{number}")]) == value(number), "key:{number}");
    }
    let lines = "INCR counter\r\n".repeat(COMMANDS);
    let output = text(&server.ferrite_cli(&["--pipe"], lines.as_bytes(), LONG));
    assert!(output.ends_with(&ending), "{output}");
    assert_eq!(text(&server.engine(&["GET", "counter"])), COMMANDS.to_string());
}

/// Returns a value of up to 4 KiB. All values together are larger than the window of either side.
fn value(number: usize) -> Vec<u8> {
    bytes(number, number * 37 % 4096)
}

pub(crate) fn cli_resp3(server: &mut TestServer) {
    server.ferrite_cli(&["HSET", "hash", "field", "value"], b"", SOON);
    let output = server.ferrite_cli(&["-3", "--no-raw", "HGETALL", "hash"], b"", SOON);
    assert_eq!(text(&output), "1# \"field\" => \"value\"\n");
    server.ferrite_cli(&["ZADD", "sorted", "1.5", "member"], b"", SOON);
    let output = server.ferrite_cli(&["-3", "--no-raw", "ZSCORE", "sorted", "member"], b"", SOON);
    assert_eq!(text(&output), "(double) 1.5\n");
    let output = server.ferrite_cli(&["-2", "--no-raw", "ZSCORE", "sorted", "member"], b"", SOON);
    assert_eq!(text(&output), "\"1.5\"\n");
    let script = "local list = {} for i = 1, 100000 do list[i] = i end return list";
    let list = text(&server.ferrite_cli(&["-3", "EVAL", script, "0"], b"", LONG));
    assert!(
        list.lines().eq((1..=100_000).map(|number| number.to_string())),
        "{} bytes",
        list.len()
    );
}

/// Publishes far more than fits into any buffer at once. Each subscriber, with RESP2 or RESP3,
/// prints all messages in order.
pub(crate) fn cli_subscriptions(server: &mut TestServer) {
    const MESSAGES: usize = 20_000;
    let listening =
        [&["SUBSCRIBE", "news"][..], &["-3", "SUBSCRIBE", "news"], &["SUBSCRIBE", "news"]];
    let mut subscribers = listening.map(|arguments| server.start_ferrite_cli(arguments));
    for subscriber in &mut subscribers {
        assert_eq!(subscriber.lines(3, SOON), ["subscribe", "news", "1"]);
    }
    assert_eq!(server.ferrite_cli(&["PUBLISH", "news", "first"], b"", SOON), b"3\n");
    let flood = "for i = 1, tonumber(ARGV[1]) do \
                 redis.call('PUBLISH', 'news', 'message ' .. i) end return 'OK'";
    assert_eq!(
        server.ferrite_cli(&["EVAL", flood, "0", &MESSAGES.to_string()], b"", LONG),
        b"OK\n"
    );
    for subscriber in &mut subscribers {
        assert_eq!(subscriber.lines(3, SOON), ["message", "news", "first"]);
        for number in 1..=MESSAGES {
            assert_eq!(
                subscriber.lines(3, SOON),
                ["message", "news", &format!("message {number}")]
            );
        }
    }
}

pub(crate) fn cli_json(server: &mut TestServer) {
    let json = |arguments: &[&str]| -> Value {
        let output = server.ferrite_cli(&[&["--json"], arguments].concat(), b"", LONG);
        serde_json::from_slice(&output).expect("JSON")
    };
    assert_eq!(json(&["SET", "key", "a \"quoted\" line\nand \u{20ac}"]), json!("OK"));
    assert_eq!(json(&["GET", "key"]), json!("a \"quoted\" line\nand \u{20ac}"));
    assert_eq!(json(&["GET", "missing"]), json!(null));
    assert_eq!(json(&["HSET", "hash", "a", "1", "b", "2"]), json!(2));
    assert_eq!(json(&["HGETALL", "hash"]), json!({"a": "1", "b": "2"}));
    let script = "local list = {} for i = 1, 100000 do list[i] = i end return list";
    assert_eq!(json(&["EVAL", script, "0"]), json!((1..=100_000).collect::<Vec<_>>()));
}
