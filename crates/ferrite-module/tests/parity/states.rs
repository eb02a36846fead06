//! The states in which engines are compared. Each is a function that brings two engines into the
//! state, compares them, and prints how much it has compared.

use std::path::Path;
use std::time::Duration;

use super::differences::{Rule, is_generated, rule, why_not_generated};
use super::generate::{self, Amount};
use super::keys;
use super::scripts::scripts;
use super::{Comparison, LONG, Node, Pace, SHORT, Way, name, send, words};
use ferrite_testkit::TempDir;
use ferrite_testkit::cluster::node_options;
use ferrite_testkit::resp::{Connection, Response, encode};

/// Few cases, for states in which the engine refuses most commands or treats all in the same way.
const FEW: Amount = Amount { good: 3, spoiled: 3 };
const HELLO_3: &str = "HELLO 3";
/// Makes both engines delete expired keys only on access, so that they have the same keys.
const NO_ACTIVE_EXPIRE: &str = "DEBUG SET-ACTIVE-EXPIRE 0";

fn pair<'a>(way: &'a Way<'a>, program: &Path, state: &str, options: &[&str]) -> Comparison<'a> {
    let nodes = [(); 2].map(|()| Node::spawn(program, way, options));
    for node in &nodes {
        node.wait_until("a reply to PING", "PING", "");
    }
    Comparison::new(way, format!("{}, {state}", name(program)), nodes)
}

fn standalone<'a>(
    way: &'a Way<'a>,
    program: &Path,
    state: &str,
    options: &[&str],
) -> Comparison<'a> {
    let mut comparison = pair(way, program, state, options);
    comparison.order(NO_ACTIVE_EXPIRE);
    comparison.remake = Some([&[], &[]]);
    comparison
}

/// A standalone engine, RESP2, one command at a time.
pub(crate) fn standalone_resp2(way: &Way<'_>, program: &Path) {
    let mut comparison = standalone(way, program, "standalone, RESP2", &[]);
    comparison.pace = Pace::OneByOne;
    comparison.all_commands(false);
    comparison.finish();
}

/// A standalone engine, RESP3, in pipelines.
pub(crate) fn pipelined_resp3(way: &Way<'_>, program: &Path) {
    let mut comparison = standalone(way, program, "standalone, RESP3 in pipelines", &[]);
    comparison.greeting = vec![words(HELLO_3)];
    comparison.pace = Pace::Pipelined;
    comparison.all_commands(false);
    comparison.finish();
}

/// The scripts, in both protocols. The last one shuts both engines down.
pub(crate) fn hand_written_scripts(way: &Way<'_>, program: &Path) {
    let scripts = scripts();
    let (last, rest) = scripts.split_last().expect("scripts");
    for greeting in [None, Some(HELLO_3)] {
        let state = if greeting.is_some() { "scripts, RESP3" } else { "scripts, RESP2" };
        let mut comparison = standalone(way, program, state, &[]);
        for spec in comparison.specs() {
            let Some(reason) = why_not_generated(&spec) else { continue };
            let covered = scripts.iter().any(|script| script.mentions(&spec.name));
            assert!(covered || !reason.contains("in the scripts"), "{} is in no script", spec.name);
            comparison.commands += 1;
        }
        comparison.greeting = greeting.map(words).into_iter().collect();
        for script in rest {
            comparison.script(script);
        }
        let mut connections = comparison.open();
        let (_, line) = last.lines().next().expect("a line");
        let Some(super::scripts::Sent::Words(shutdown)) = line.sent else {
            panic!("the last script is not a command")
        };
        send(&mut connections, &shutdown);
        let responses =
            connections.each_mut().map(|connection| connection.receive_until_close(LONG));
        comparison.check(&shutdown, Rule::Exact, &responses);
        for node in &mut comparison.nodes {
            assert!(node.server.wait().success(), "{}", node.server.log());
        }
        comparison.finish();
    }
}

/// A cluster node with its own slots, slots of another node that is unreachable, and a slot that is
/// migrating to that node.
pub(crate) fn cluster(way: &Way<'_>, program: &Path) {
    let directory = TempDir::new("parity");
    let nodes = [(); 2].map(|()| {
        let options = node_options(program, &directory);
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        Node::spawn(program, way, &options)
    });
    for node in &nodes {
        node.wait_until("the cluster state ok", "CLUSTER INFO", "cluster_state:ok");
    }
    let mut comparison = Comparison::new(way, format!("{}, cluster", name(program)), nodes);
    comparison.order(NO_ACTIVE_EXPIRE);
    comparison.tags = keys::SLOTS;
    comparison.remake = Some([
        &["CLUSTER SETSLOT 7365 STABLE"],
        &["CLUSTER SETSLOT 7365 MIGRATING 2222222222222222222222222222222222222222"],
    ]);
    comparison.all_commands(true);
    comparison.finish();
    drop(comparison);
}

/// A synchronised replica, which refuses writes.
pub(crate) fn replica(way: &Way<'_>, program: &Path) {
    let primaries =
        [(); 2].map(|()| Node::spawn(program, way, &["--repl-diskless-sync-delay", "0"]));
    let nodes = [0, 1].map(|number| {
        let primary: &Node = &primaries[number];
        let mut connection = primary.connection();
        let mut bytes = Vec::new();
        let all: Vec<_> = [vec![words(NO_ACTIVE_EXPIRE)], keys::commands(keys::PLAIN)].concat();
        all.iter().for_each(|words| encode(words, &mut bytes));
        connection.send(&bytes);
        for _ in &all {
            assert!(matches!(connection.receive(LONG), Response::Reply(_)));
        }
        let node = Node::spawn(program, way, &["--replicaof", "127.0.0.1", &primary.port]);
        node.wait_until("a synchronised replica", "INFO replication", "master_link_status:up");
        node
    });
    let mut comparison = Comparison::new(way, format!("{}, replica", name(program)), nodes);
    comparison.order(NO_ACTIVE_EXPIRE);
    comparison.all_commands(false);
    comparison.finish();
}

/// A replica without its primary, which does not serve its stale data.
pub(crate) fn replica_without_primary(way: &Way<'_>, program: &Path) {
    let options = ["--replicaof", "127.0.0.1", "1", "--replica-serve-stale-data", "no"];
    let mut comparison = pair(way, program, "replica without its primary", &options);
    comparison.amount = FEW;
    comparison.all_commands(false);
    comparison.finish();
}

/// An engine that is slowly loading its data.
pub(crate) fn loading(way: &Way<'_>, program: &Path) {
    let source = Node::spawn(program, way, &["--rdbcompression", "no"]);
    source.wait_until("a reply to PING", "PING", "PONG");
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
    let mut comparison = pair(way, program, "loading", &options);
    comparison.amount = FEW;
    comparison.pace = Pace::Pipelined;
    comparison.all_commands(false);
    for node in &comparison.nodes {
        let info = node.ask("INFO persistence");
        assert!(String::from_utf8_lossy(&info).contains("loading:1"), "the load ended too early");
    }
    comparison.finish();
}

/// An engine that runs an endless script.
pub(crate) fn busy(way: &Way<'_>, program: &Path) {
    let mut comparison = pair(way, program, "busy with a script", &["--lua-time-limit", "20"]);
    let specs = comparison.specs();
    let mut scripts = comparison.nodes.each_ref().map(Node::connection);
    send(
        &mut scripts,
        &["EVAL", "while true do end", "0"].map(|word| word.as_bytes().to_vec()).to_vec(),
    );
    comparison.nodes.iter().for_each(|node| node.wait_until("a busy engine", "PING", "-BUSY"));
    comparison.amount = FEW;
    comparison.pace = Pace::Pipelined;
    for spec in specs.iter().filter(|spec| is_generated(spec, false)) {
        comparison.command(spec);
    }
    comparison.order("SCRIPT KILL");
    for connection in &mut scripts {
        assert!(
            matches!(connection.receive(LONG), Response::Reply(reply) if reply[0] == b'-'),
            "the script was not killed"
        );
    }
    comparison.finish();
}

/// An engine without free memory: it refuses new data, or may evict keys but has none left.
pub(crate) fn out_of_memory(way: &Way<'_>, program: &Path) {
    for policy in ["noeviction", "allkeys-lru"] {
        let options = ["--maxmemory-policy", policy, "--maxmemory-eviction-tenacity", "100"];
        let mut comparison =
            standalone(way, program, &format!("out of memory, {policy}"), &options);
        let full: &[&str] = if policy == "noeviction" {
            &["CONFIG SET maxmemory 1"]
        } else {
            // All keys are gone before the first case.
            &["CONFIG SET maxmemory 1", "FLUSHALL"]
        };
        comparison.remake = Some([&["CONFIG SET maxmemory 0"], full]);
        comparison.all_commands(false);
        comparison.finish();
    }
}

/// A user with few rights, and clients that have not given the password.
pub(crate) fn restricted(way: &Way<'_>, program: &Path) {
    let mut comparison = standalone(way, program, "a user with few rights", &[]);
    comparison.order(
        "ACL SETUSER limited on >secret ~str:* ~missing %R~list:* %W~hash:* &one* +@read +@write -@set -@dangerous +client|id \
         +config|get -hgetall +eval +select|1",
    );
    comparison.greeting = vec![words("AUTH limited secret")];
    comparison.all_commands(false);
    comparison.finish();
    drop(comparison);
    let mut comparison = standalone(way, program, "clients without a login", &[]);
    comparison.pace = Pace::OneByOne; // a long argument closes the connection
    comparison.order("CONFIG SET requirepass secret");
    let mut logged_in = comparison.nodes.each_ref().map(Node::connection);
    logged_in
        .iter_mut()
        .for_each(|connection| assert_eq!(super::ask(connection, "AUTH secret"), b"+OK\r\n"));
    let specs = super::spec::commands(&mut logged_in[0]);
    comparison.amount = FEW;
    for spec in specs.iter().filter(|spec| is_generated(spec, false)) {
        comparison.command(spec);
    }
    comparison.finish();
}

/// Compares which commands get replies while clients are paused, and the other replies after the
/// pause.
pub(crate) fn paused(way: &Way<'_>, program: &Path) {
    const AT_ONCE: usize = 128;
    for (kind, order) in [("all", "CLIENT PAUSE 4000 ALL"), ("writes", "CLIENT PAUSE 600000 WRITE")]
    {
        let mut comparison = standalone(way, program, &format!("paused, {kind}"), &[]);
        let specs = comparison.specs();
        let specs: Vec<_> = specs
            .iter()
            .filter(|spec| is_generated(spec, false) && spec.name != "client|unpause")
            .collect();
        for batch in specs.chunks(AT_ONCE) {
            comparison.make_keys();
            let mut connections: Vec<[Connection; 2]> =
                batch.iter().map(|_| comparison.open()).collect();
            // A PING makes all sessions open their proxy connections before the pause begins.
            connections
                .iter_mut()
                .flatten()
                .for_each(|connection| assert_eq!(super::ask(connection, "PING"), b"+PONG\r\n"));
            let amount = Amount { good: 1, spoiled: 0 };
            let cases: Vec<_> = batch
                .iter()
                .map(|spec| generate::cases(spec, comparison.tags, amount)[1].clone())
                .collect();
            comparison.order(order);
            for (connections, words) in connections.iter_mut().zip(&cases) {
                // Waits after each command, so that commands queue in the same order at both
                // engines. An engine that pauses all clients cannot be asked how many are blocked.
                if kind == "all" {
                    send(connections, words);
                    std::thread::sleep(Duration::from_millis(5));
                } else {
                    let before = comparison.blocked_clients();
                    send(connections, words);
                    comparison.wait_until_both_block(before);
                }
            }
            std::thread::sleep(Duration::from_millis(100));
            let responses: Vec<_> = connections
                .iter_mut()
                .map(|connections| super::receive(connections, Duration::from_millis(1)))
                .collect();
            // A pause of all clients ends only by time, and PING gets its reply then.
            comparison.order(if kind == "all" { "PING" } else { "CLIENT UNPAUSE" });
            for (((spec, words), connections), responses) in
                batch.iter().zip(&cases).zip(&mut connections).zip(responses)
            {
                comparison.commands += 1;
                comparison.check(words, rule(spec), &responses);
                if responses == [Response::Timeout, Response::Timeout] {
                    let late = super::receive(connections, if spec.waits() { SHORT } else { LONG });
                    comparison.check(words, rule(spec), &late);
                }
            }
            comparison.assert_alive(&batch[0].name);
        }
        comparison.finish();
    }
}
