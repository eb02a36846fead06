//! `ferrite-cli` as a client of the same servers, over RDMA or not at all. It comes from the other
//! host, as our other clients do.

use serde_json::{Value, json};

use crate::scene::{Scene, bytes, text};
use crate::{LONG, SOON};

/// Each a process; and what carries it, in its own words.
pub(crate) fn cli_commands(scene: &mut Scene) {
    assert_eq!(scene.ferrite_cli(&["PING"], b"", SOON), b"PONG\n");
    let transport_info = match scene.transport() {
        "RDMA (Valkey)" => "over RDMA, device rxe2, to a server of Valkey Over RDMA\n",
        _ => "over RDMA, device rxe2, to a Ferrite module or gateway\n",
    };
    assert_eq!(scene.ferrite_cli_said(&["--verbose", "PING"], SOON), transport_info);
    assert_eq!(scene.ferrite_cli(&["ECHO", "a b\r\n"], b"", SOON), b"a b\r\n\n");
    assert_eq!(scene.ferrite_cli(&["SET", "key", "a value"], b"", SOON), b"OK\n");
    assert_eq!(scene.engine(&["GET", "key"]), b"a value");
    assert_eq!(scene.ferrite_cli(&["--no-raw", "GET", "key"], b"", SOON), b"\"a value\"\n");
    for number in 1..=30 {
        assert_eq!(text(&scene.ferrite_cli(&["INCR", "visits"], b"", SOON)), format!("{number}\n"));
    }
    let lines = b"MULTI\nINCR visits\nEXEC\nINCR key\nGET visits\n";
    let said = text(&scene.ferrite_cli(&[], lines, SOON));
    assert_eq!(said, "OK\nQUEUED\n31\nERR value is not an integer or out of range\n\n31\n");
    // Of whatever has the module, its counters; of others, what is the case.
    let has_module = !scene.engine(&["INFO", "ferrite_rdma"]).is_empty();
    let info = text(&scene.ferrite_cli(&["INFO", "rdma"], b"", SOON));
    assert_eq!(info.contains("ferrite_rdma_connections:1\r"), has_module, "{info}");
    scene.until("clients are gone", SOON, || scene.info("connected_clients") == 1);
}

/// Set and read over RDMA, each compared with the engine's own answer.
pub(crate) fn cli_values(scene: &mut Scene) {
    const SIZES: [usize; 12] = [
        1,
        2,
        1000,
        4096,
        65_535,
        65_536,
        65_537,
        1_048_575,
        1_048_576,
        1_048_577,
        10_000_000,
        64 << 20,
    ];
    for (seed, size) in SIZES.into_iter().enumerate() {
        let value = bytes(seed, size);
        assert_eq!(
            text(&scene.ferrite_cli(&["-x", "SET", "key"], &value, LONG)),
            "OK\n",
            "{size} B"
        );
        assert!(scene.engine(&["GET", "key"]) == value, "the engine has another value of {size} B");
        let mut got = scene.ferrite_cli(&["--raw", "GET", "key"], b"", LONG);
        assert_eq!(got.pop(), Some(b'\n'), "{size} B");
        assert!(got == value, "of {size} B, {} came back, other ones", got.len());
    }
}

/// Thousands of commands without waiting, in RESP and in lines, of few bytes and of many.
pub(crate) fn cli_pipe(scene: &mut Scene) {
    const COMMANDS: usize = 5000;
    let ending = format!("errors: 0, replies: {COMMANDS}\n");
    let mut commands = Vec::new();
    for number in 0..COMMANDS {
        let (key, value) = (format!("key:{number}"), value(number));
        commands.extend(format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n", key.len()).bytes());
        commands.extend(format!("${}\r\n", value.len()).bytes().chain(value).chain(*b"\r\n"));
    }
    let said = text(&scene.ferrite_cli(&["--pipe"], &commands, LONG));
    assert!(said.ends_with(&ending), "{said}");
    assert_eq!(text(&scene.engine(&["DBSIZE"])), COMMANDS.to_string());
    for number in (0..COMMANDS).step_by(97) {
        assert!(scene.engine(&["GET", &format!("key:{number}")]) == value(number), "key:{number}");
    }
    let lines = "INCR counter\r\n".repeat(COMMANDS);
    let said = text(&scene.ferrite_cli(&["--pipe"], lines.as_bytes(), LONG));
    assert!(said.ends_with(&ending), "{said}");
    assert_eq!(text(&scene.engine(&["GET", "counter"])), COMMANDS.to_string());
}

/// Up to 4 KiB, so that they are more than either side's memory for them.
fn value(number: usize) -> Vec<u8> {
    bytes(number, number * 37 % 4096)
}

pub(crate) fn cli_resp3(scene: &mut Scene) {
    scene.ferrite_cli(&["HSET", "hash", "field", "value"], b"", SOON);
    let said = scene.ferrite_cli(&["-3", "--no-raw", "HGETALL", "hash"], b"", SOON);
    assert_eq!(text(&said), "1# \"field\" => \"value\"\n");
    scene.ferrite_cli(&["ZADD", "sorted", "1.5", "member"], b"", SOON);
    let said = scene.ferrite_cli(&["-3", "--no-raw", "ZSCORE", "sorted", "member"], b"", SOON);
    assert_eq!(text(&said), "(double) 1.5\n");
    let said = scene.ferrite_cli(&["-2", "--no-raw", "ZSCORE", "sorted", "member"], b"", SOON);
    assert_eq!(text(&said), "\"1.5\"\n");
    let script = "local list = {} for i = 1, 100000 do list[i] = i end return list";
    let list = text(&scene.ferrite_cli(&["-3", "EVAL", script, "0"], b"", LONG));
    assert!(
        list.lines().eq((1..=100_000).map(|number| number.to_string())),
        "{} bytes",
        list.len()
    );
}

/// Far more than fits anywhere, said at once to several who listen, in either protocol: each shows
/// all of it, in order.
pub(crate) fn cli_subscriptions(scene: &mut Scene) {
    const MESSAGES: usize = 20_000;
    let listening =
        [&["SUBSCRIBE", "news"][..], &["-3", "SUBSCRIBE", "news"], &["SUBSCRIBE", "news"]];
    let mut subscribers = listening.map(|arguments| scene.start_ferrite_cli(arguments));
    for subscriber in &mut subscribers {
        assert_eq!(subscriber.lines(3, SOON), ["subscribe", "news", "1"]);
    }
    assert_eq!(scene.ferrite_cli(&["PUBLISH", "news", "first"], b"", SOON), b"3\n");
    let flood = "for i = 1, tonumber(ARGV[1]) do redis.call('PUBLISH', 'news', 'message ' .. i) end return 'OK'";
    assert_eq!(scene.ferrite_cli(&["EVAL", flood, "0", &MESSAGES.to_string()], b"", LONG), b"OK\n");
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

pub(crate) fn cli_json(scene: &mut Scene) {
    let json = |arguments: &[&str]| -> Value {
        let said = scene.ferrite_cli(&[&["--json"], arguments].concat(), b"", LONG);
        serde_json::from_slice(&said).expect("JSON")
    };
    assert_eq!(json(&["SET", "key", "a \"quoted\" line\nand \u{20ac}"]), json!("OK"));
    assert_eq!(json(&["GET", "key"]), json!("a \"quoted\" line\nand \u{20ac}"));
    assert_eq!(json(&["GET", "missing"]), json!(null));
    assert_eq!(json(&["HSET", "hash", "a", "1", "b", "2"]), json!(2));
    assert_eq!(json(&["HGETALL", "hash"]), json!({"a": "1", "b": "2"}));
    let script = "local list = {} for i = 1, 100000 do list[i] = i end return list";
    assert_eq!(json(&["EVAL", script, "0"]), json!((1..=100_000).collect::<Vec<_>>()));
}
