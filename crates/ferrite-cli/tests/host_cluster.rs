//! `ferrite-cli -c` in a cluster on this host: the same output as `redis-cli -c`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Output, Stdio};

use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::engines;

/// Runs a program with these arguments and this input at the port of the cluster's first node.
fn run(program: &str, cluster: &Cluster, words: &[&str], input: &str) -> Output {
    let port = cluster.nodes[0].address.port().to_string();
    let mut command = Command::new(program);
    command.args(["-h", "127.0.0.1", "-p", &port]).args(words).env_remove("REDISCLI_AUTH");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().expect("start the program");
    process.stdin.take().expect("piped").write_all(input.as_bytes()).expect("written");
    process.wait_with_output().expect("the end of the program")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

const OURS: &str = env!("CARGO_BIN_EXE_ferrite-cli");

#[test]
fn follows_redirects_as_redis_cli_does() {
    for program in engines() {
        let shape = Shape { without_module: &[2], ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        let lines = |range: std::ops::Range<u32>| -> String {
            let pair = |number| format!("SET key{number} {number}\nGET key{number}\n");
            range.map(pair).collect()
        };
        // Commands from stdin run one after the other, and each may need another node.
        let input = lines(0..50) + "MULTI\nSET {a}x 1\nEXEC\nNOSUCH\nMGET a b\n";
        for more in [&[][..], &["--no-raw"], &["--csv"]] {
            let words = [&["-c"], more].concat();
            let [ours, theirs] = [OURS, "redis-cli"].map(|it| run(it, &cluster, &words, &input));
            let ours = text(&ours.stdout);
            assert!(ours.contains("-> Redirected to slot ["), "{ours}");
            assert_eq!(ours, text(&theirs.stdout), "{more:?}");
        }
        // For a command in the arguments, no line about the redirect is printed.
        for number in 0..20 {
            let key = format!("key{number}");
            let found = run(OURS, &cluster, &["-c", "GET", &key], "");
            assert_eq!(text(&found.stdout), format!("{number}\n"), "{}", text(&found.stderr));
        }
        let repeated = run(OURS, &cluster, &["-c", "-r", "3", "INCR", "{key}counter"], "");
        assert_eq!(text(&repeated.stdout), "1\n2\n3\n");
        // Without -c, a redirect is an error like any other.
        let moved = (0..20).any(|number| {
            let found = run(OURS, &cluster, &["GET", &format!("key{number}")], "");
            text(&found.stdout).starts_with("MOVED ")
        });
        assert!(moved);
        // With JSON, only replies are on stdout.
        let json = run(OURS, &cluster, &["-c", "--json"], &lines(0..20));
        for line in text(&json.stdout).lines() {
            assert!(line == "\"OK\"" || line.trim_matches('"').parse::<u32>().is_ok(), "{line}");
        }
        assert!(text(&json.stderr).contains("-> Redirected"), "{}", text(&json.stderr));
        cluster.assert_healthy();
    }
}

#[test]
fn follows_ask_while_a_slot_moves() {
    for program in engines() {
        let mut cluster = Cluster::start(&Shape::primaries(&program, 3));
        let slot: u16 = cluster.ask(0, &["CLUSTER", "KEYSLOT", "{slot}1"]);
        let from = cluster.primary_of(slot);
        let to = (from + 1) % 3;
        let set = run(OURS, &cluster, &["-c", "SET", "{slot}old", "old"], "");
        assert_eq!(text(&set.stdout), "OK\n");
        cluster.begin_move(slot, from, to);
        // A new key is written at the other node, after ASKING.
        let input = "SET {slot}new new\nGET {slot}new\nGET {slot}old\n";
        let done = run(OURS, &cluster, &["-c"], input);
        let lines: Vec<_> = {
            let all = text(&done.stdout);
            all.lines().filter(|line| !line.starts_with("->")).map(str::to_owned).collect()
        };
        assert_eq!(lines, ["OK", "new", "old"]);
        assert_eq!(cluster.ask::<Vec<String>>(to, &["KEYS", "*"]), ["{slot}new"]);
        cluster.move_slot(slot, from, to);
        let found = run(OURS, &cluster, &["-c", "MGET", "{slot}old", "{slot}new"], "");
        assert_eq!(text(&found.stdout), "old\nnew\n");
        cluster.assert_healthy();
    }
}

#[test]
fn reports_nodes_that_are_down() {
    let program = engines().remove(0);
    let mut cluster = Cluster::start(&Shape::primaries(&program, 3));
    cluster.nodes[1].engine.kill();
    let [first, last] = cluster.slots_of(1);
    let is_there = |key: &String| {
        (first..=last).contains(&cluster.ask::<u16>(0, &["CLUSTER", "KEYSLOT", key]))
    };
    let key = (0..).map(|number| format!("key{number}")).find(is_there).expect("a key");
    let found = run(OURS, &cluster, &["-c", "GET", &key], "");
    assert_eq!(found.status.code(), Some(1));
    let address = cluster.nodes[1].address.to_string();
    assert!(text(&found.stderr).contains(&address), "{}", text(&found.stderr));
}

/// The server is the second of two hosts, and its redirects have no host: they mean the host that
/// has sent them.
#[test]
fn redirects_without_a_host_lead_to_the_host_that_answered() {
    let program = engines().remove(0);
    let shape = Shape {
        ip: "127.0.0.2".parse().expect("an address"),
        options: &[
            "--cluster-preferred-endpoint-type",
            "unknown-endpoint",
            // Nodes take the source of a connection for the address of its node.
            "--bind-source-addr",
            "127.0.0.2",
        ],
        without_module: &[0, 1, 2],
        ..Shape::primaries(&program, 3)
    };
    let mut cluster = Cluster::start(&shape);
    let url = format!("redis://127.0.0.1:1,{}", cluster.nodes[0].address);
    for number in 0..20 {
        let key = format!("key{number}");
        let mut command = Command::new(OURS);
        command.args(["-u", &url, "-c", "SET", &key, "1"]).env_remove("REDISCLI_AUTH");
        let done = command.stdin(Stdio::null()).output().expect("start ferrite-cli");
        assert_eq!(text(&done.stdout), "OK\n", "{key}: {}", text(&done.stderr));
    }
    cluster.assert_healthy();
}

/// SSUBSCRIBE follows redirects and then shows messages.
#[test]
fn subscribes_at_the_node_of_a_sharded_channel() {
    let program = engines().remove(0);
    let shape = Shape { without_module: &[0, 1, 2], ..Shape::primaries(&program, 3) };
    let mut cluster = Cluster::start(&shape);
    let [first, last] = cluster.slots_of(2);
    let is_there = |name: &String| {
        (first..=last).contains(&cluster.ask::<u16>(0, &["CLUSTER", "KEYSLOT", name]))
    };
    let channel = (0..).map(|number| format!("news{number}")).find(is_there).expect("a channel");
    let port = cluster.nodes[0].address.port().to_string();
    let mut command = Command::new(OURS);
    command.args(["-p", &port, "-c", "--no-raw", "SSUBSCRIBE", &channel]);
    command.env_remove("REDISCLI_AUTH").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("start ferrite-cli");
    cluster.wait_until("a subscriber", |cluster, number| {
        let count: (String, u32) = cluster.ask(number, &["PUBSUB", "SHARDNUMSUB", &channel]);
        number != 2 || count.1 == 1
    });
    assert_eq!(cluster.ask::<u32>(2, &["SPUBLISH", &channel, "text"]), 1);
    let mut output = BufReader::new(process.stdout.take().expect("piped"));
    let mut shown = String::new();
    while !shown.ends_with("\"text\"\n") {
        assert!(output.read_line(&mut shown).expect("UTF-8") > 0, "{shown}");
    }
    // The end of the server ends the program.
    cluster.nodes[2].engine.kill();
    output.read_to_string(&mut shown).expect("UTF-8");
    process.wait().expect("the end of ferrite-cli");
    let lines: Vec<_> = shown.lines().collect();
    let expected = [
        "Reading messages... (press Ctrl-C to quit)",
        "1) \"ssubscribe\"",
        &format!("2) \"{channel}\""),
        "3) (integer) 1",
        "1) \"smessage\"",
        &format!("2) \"{channel}\""),
        "3) \"text\"",
    ];
    assert_eq!(lines, expected, "{shown}");
    // Without -c, the redirect is shown as an error.
    let plain = run(OURS, &cluster, &["SSUBSCRIBE", &channel], "");
    assert!(text(&plain.stdout).contains("MOVED "), "{}", text(&plain.stdout));
    cluster.nodes.truncate(2);
    cluster.assert_healthy();
}
