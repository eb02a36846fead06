//! The states in which engines are compared: each is a function that brings two engines into it,
//! compares, and says how much.

use std::path::Path;
use std::time::Duration;

use super::differences::{Rule, is_generated, rule, why_not_generated};
use super::generate::{self, Amount};
use super::keys;
use super::scripts::scripts;
use super::wire::{Heard, Wire, encode};
use super::{Bench, LONG, Node, Pace, SHORT, Way, name, send, words};

/// Where most commands are refused, or all in the same way, fewer cases say as much.
const FEW: Amount = Amount { good: 3, spoiled: 3 };
const HELLO_3: &str = "HELLO 3";
/// Expired keys stay until somebody looks, at both alike.
const NO_CLEANING: &str = "DEBUG SET-ACTIVE-EXPIRE 0";

fn pair<'a>(way: &'a Way<'a>, program: &Path, state: &str, options: &[&str]) -> Bench<'a> {
    let nodes = [(); 2].map(|()| Node::begin(program, way, options));
    for node in &nodes {
        node.wait_until("it answers", "PING", "");
    }
    Bench::new(way, format!("{}, {state}", name(program)), nodes)
}

fn standalone<'a>(way: &'a Way<'a>, program: &Path, state: &str, options: &[&str]) -> Bench<'a> {
    let mut bench = pair(way, program, state, options);
    bench.order(NO_CLEANING);
    bench.remake = Some([&[], &[]]);
    bench
}

/// RESP2, one by one.
pub(crate) fn alone(way: &Way<'_>, program: &Path) {
    let mut bench = standalone(way, program, "standalone, RESP2", &[]);
    bench.pace = Pace::OneByOne;
    bench.all_commands(false);
    bench.end();
}

/// RESP3, in pipelines.
pub(crate) fn alone_in_pipelines(way: &Way<'_>, program: &Path) {
    let mut bench = standalone(way, program, "standalone, RESP3 in pipelines", &[]);
    bench.greeting = vec![words(HELLO_3)];
    bench.pace = Pace::Pipelined;
    bench.all_commands(false);
    bench.end();
}

/// By hand, in both protocols; at the end both engines are told to end.
pub(crate) fn by_hand(way: &Way<'_>, program: &Path) {
    let scripts = scripts();
    let (last, rest) = scripts.split_last().expect("scripts");
    for greeting in [None, Some(HELLO_3)] {
        let state = if greeting.is_some() { "scripts, RESP3" } else { "scripts, RESP2" };
        let mut bench = standalone(way, program, state, &[]);
        for spec in bench.specs() {
            let Some(reason) = why_not_generated(&spec) else { continue };
            let covered = scripts.iter().any(|script| script.mentions(&spec.name));
            assert!(covered || !reason.contains("in the scripts"), "{} is in no script", spec.name);
            bench.commands += 1;
        }
        bench.greeting = greeting.map(words).into_iter().collect();
        for script in rest {
            bench.script(script);
        }
        let mut wires = bench.open();
        let (_, line) = last.lines().next().expect("a line");
        let Some(super::scripts::Sent::Words(shutdown)) = line.sent else { panic!("a command") };
        send(&mut wires, &shutdown);
        let heard = wires.each_mut().map(|wire| wire.hear_the_end(LONG));
        bench.judge(&shutdown, Rule::Exact, &heard);
        for node in &mut bench.nodes {
            assert!(node.server.wait().success(), "{}", node.server.log());
        }
        bench.end();
    }
}

/// Slots of its own, slots of another node that is away, and one that is on its way there.
pub(crate) fn cluster(way: &Way<'_>, program: &Path) {
    const OWN: &str = "1111111111111111111111111111111111111111";
    const OTHER: &str = "2222222222222222222222222222222222222222";
    let directory = std::env::temp_dir().join(format!("ferrite-parity-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    // Valkey 9.1 fails an assertion in SPUBLISH if it is not told of shards; Redis 7.0 does not
    // know them.
    let shard = |id: &str| {
        if name(program).starts_with("Valkey") { format!(",,shard-id={id}") } else { String::new() }
    };
    let (own_shard, other_shard) = (shard(OWN), shard(OTHER));
    let nodes = [0, 1].map(|number| {
        let bus = crate::server::free_port();
        let file = directory.join(format!("nodes-{number}.conf"));
        // The engine puts its own address in at the start.
        let known = format!(
            "{OWN} 127.0.0.1:7@17{own_shard} myself,master - 0 0 1 connected 0-8191\n\
             {OTHER} 127.0.0.1:9@19{other_shard} master - 0 0 2 connected 8192-16383\n\
             vars currentEpoch 2 lastVoteEpoch 0\n"
        );
        std::fs::write(&file, known).expect("a file");
        let file = file.to_str().expect("UTF-8");
        let options = [
            "--cluster-enabled",
            "yes",
            "--cluster-port",
            &bus,
            "--cluster-config-file",
            file,
            "--cluster-require-full-coverage",
            "no",
            // The other node is away all the time; when that is found out, the cluster is down.
            "--cluster-node-timeout",
            "3600000",
        ];
        Node::begin(program, way, &options)
    });
    for node in &nodes {
        node.wait_until("the cluster is well", "CLUSTER INFO", "cluster_state:ok");
    }
    let mut bench = Bench::new(way, format!("{}, cluster", name(program)), nodes);
    bench.order(NO_CLEANING);
    bench.tags = keys::SLOTS;
    bench.remake = Some([
        &["CLUSTER SETSLOT 7365 STABLE"],
        &["CLUSTER SETSLOT 7365 MIGRATING 2222222222222222222222222222222222222222"],
    ]);
    bench.all_commands(true);
    bench.end();
    drop(bench);
    let _ = std::fs::remove_dir_all(&directory);
}

/// A replica that is in step: writes are refused.
pub(crate) fn replica(way: &Way<'_>, program: &Path) {
    let primaries =
        [(); 2].map(|()| Node::begin(program, way, &["--repl-diskless-sync-delay", "0"]));
    let nodes = [0, 1].map(|number| {
        let primary: &Node = &primaries[number];
        let mut wire = primary.wire();
        let mut bytes = Vec::new();
        let all: Vec<_> = [vec![words(NO_CLEANING)], keys::making(keys::PLAIN)].concat();
        all.iter().for_each(|words| encode(words, &mut bytes));
        wire.send(&bytes);
        for _ in &all {
            assert!(matches!(wire.hear(LONG), Heard::Reply(_)));
        }
        let node = Node::begin(program, way, &["--replicaof", "127.0.0.1", &primary.port]);
        node.wait_until("it is in step", "INFO replication", "master_link_status:up");
        node
    });
    let mut bench = Bench::new(way, format!("{}, replica", name(program)), nodes);
    bench.order(NO_CLEANING);
    bench.all_commands(false);
    bench.end();
}

/// A replica without its primary, which does not serve what it has.
pub(crate) fn replica_alone(way: &Way<'_>, program: &Path) {
    let options = ["--replicaof", "127.0.0.1", "1", "--replica-serve-stale-data", "no"];
    let mut bench = pair(way, program, "replica without its primary", &options);
    bench.amount = FEW;
    bench.all_commands(false);
    bench.end();
}

/// An engine that reads its file, slowly.
pub(crate) fn loading(way: &Way<'_>, program: &Path) {
    let source = Node::begin(program, way, &["--rdbcompression", "no"]);
    source.wait_until("it answers", "PING", "PONG");
    source.ask("DEBUG POPULATE 20000 key 1000");
    assert_eq!(source.ask("SAVE"), b"+OK\r\n");
    let directory = source.server.directory().to_str().expect("UTF-8");
    let options = [
        "--dir",
        directory,
        "--key-load-delay",
        "3000",
        "--loading-process-events-interval-bytes",
        "1024",
    ];
    let mut bench = pair(way, program, "loading", &options);
    bench.amount = FEW;
    bench.pace = Pace::Pipelined;
    bench.all_commands(false);
    for node in &bench.nodes {
        let info = node.ask("INFO persistence");
        assert!(
            String::from_utf8_lossy(&info).contains("loading:1"),
            "it has ended loading too early"
        );
    }
    bench.end();
}

/// A script that does not end.
pub(crate) fn busy(way: &Way<'_>, program: &Path) {
    let mut bench = pair(way, program, "busy with a script", &["--lua-time-limit", "20"]);
    let specs = bench.specs();
    let mut endless = bench.nodes.each_ref().map(Node::wire);
    send(
        &mut endless,
        &["EVAL", "while true do end", "0"].map(|word| word.as_bytes().to_vec()).to_vec(),
    );
    bench.nodes.iter().for_each(|node| node.wait_until("it is busy", "PING", "-BUSY"));
    bench.amount = FEW;
    bench.pace = Pace::Pipelined;
    for spec in specs.iter().filter(|spec| is_generated(spec, false)) {
        bench.command(spec);
    }
    bench.order("SCRIPT KILL");
    for wire in &mut endless {
        assert!(
            matches!(wire.hear(LONG), Heard::Reply(reply) if reply[0] == b'-'),
            "it was killed"
        );
    }
    bench.end();
}

/// No memory left: new data is refused, or all keys have gone.
pub(crate) fn out_of_memory(way: &Way<'_>, program: &Path) {
    for policy in ["noeviction", "allkeys-lru"] {
        let options = ["--maxmemory-policy", policy, "--maxmemory-eviction-tenacity", "100"];
        let mut bench = standalone(way, program, &format!("out of memory, {policy}"), &options);
        let full: &[&str] = if policy == "noeviction" {
            &["CONFIG SET maxmemory 1"]
        } else {
            // All that can go has gone before the first case.
            &["CONFIG SET maxmemory 1", "FLUSHALL"]
        };
        bench.remake = Some([&["CONFIG SET maxmemory 0"], full]);
        bench.all_commands(false);
        bench.end();
    }
}

/// A user who may do little, and clients of whom the password is wanted.
pub(crate) fn restricted(way: &Way<'_>, program: &Path) {
    let mut bench = standalone(way, program, "a user who may do little", &[]);
    bench.order(
        "ACL SETUSER limited on >secret ~str:* ~missing %R~list:* %W~hash:* &one* +@read +@write -@set -@dangerous +client|id \
         +config|get -hgetall +eval +select|1",
    );
    bench.greeting = vec![words("AUTH limited secret")];
    bench.all_commands(false);
    bench.end();
    drop(bench);
    let mut bench = standalone(way, program, "without a password", &[]);
    bench.pace = Pace::OneByOne; // a long argument ends the connection
    bench.order("CONFIG SET requirepass secret");
    let mut known = bench.nodes.each_ref().map(Node::wire);
    known.iter_mut().for_each(|wire| assert_eq!(super::ask(wire, "AUTH secret"), b"+OK\r\n"));
    let specs = super::spec::commands(&mut known[0]);
    bench.amount = FEW;
    for spec in specs.iter().filter(|spec| is_generated(spec, false)) {
        bench.command(spec);
    }
    bench.end();
}

/// Clients are paused: who is answered all the same, and what the others hear when it is over.
pub(crate) fn paused(way: &Way<'_>, program: &Path) {
    const AT_ONCE: usize = 128;
    for (kind, order) in [("all", "CLIENT PAUSE 4000 ALL"), ("writes", "CLIENT PAUSE 600000 WRITE")]
    {
        let mut bench = standalone(way, program, &format!("paused, {kind}"), &[]);
        let specs = bench.specs();
        let specs: Vec<_> = specs
            .iter()
            .filter(|spec| is_generated(spec, false) && spec.name != "client|unpause")
            .collect();
        for batch in specs.chunks(AT_ONCE) {
            bench.make_keys();
            let mut wires: Vec<[Wire; 2]> = batch.iter().map(|_| bench.open()).collect();
            // So that the module's sessions are clients of the engine's before the pause, as the
            // others are.
            wires
                .iter_mut()
                .flatten()
                .for_each(|wire| assert_eq!(super::ask(wire, "PING"), b"+PONG\r\n"));
            let amount = Amount { good: 1, spoiled: 0 };
            let cases: Vec<_> = batch
                .iter()
                .map(|spec| generate::cases(spec, bench.tags, amount)[1].clone())
                .collect();
            bench.order(order);
            for (wires, words) in wires.iter_mut().zip(&cases) {
                // So that those who wait stand in the same line at both. An engine that pauses all
                // cannot be asked.
                if kind == "all" {
                    send(wires, words);
                    std::thread::sleep(Duration::from_millis(5));
                } else {
                    let before = bench.waiting();
                    send(wires, words);
                    bench.until_both_wait(before);
                }
            }
            std::thread::sleep(Duration::from_millis(100));
            let heard: Vec<_> = wires
                .iter_mut()
                .map(|wires| super::hear(wires, Duration::from_millis(1)))
                .collect();
            // Nothing ends a pause of all but time: who asks is answered then.
            bench.order(if kind == "all" { "PING" } else { "CLIENT UNPAUSE" });
            for (((spec, words), wires), heard) in
                batch.iter().zip(&cases).zip(&mut wires).zip(heard)
            {
                bench.commands += 1;
                bench.judge(words, rule(spec), &heard);
                if heard == [Heard::Silence, Heard::Silence] {
                    let late = super::hear(wires, if spec.waits() { SHORT } else { LONG });
                    bench.judge(words, rule(spec), &late);
                }
            }
            bench.assert_alive(&batch[0].name);
        }
        bench.end();
    }
}
