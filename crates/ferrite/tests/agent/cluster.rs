//! A cluster of three primaries and three replicas on three hosts, through agents.
#![allow(dead_code, reason = "no test binary uses all of it")]

use std::collections::BTreeMap;

use ferrite_proto::cluster::slot_of;
use ferrite_testkit::resp::{Client, text_of};
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Engine, TIMEOUT, until};

use super::harness::{Group, PASSWORD, sum};

/// The number of keys.
const KEYS: usize = 3000;
/// The number of slots to move, unless `FERRITE_AGENT_SLOTS` is set.
const SLOTS: usize = 50;

/// How long a node may be silent before other nodes regard it as failed. On a busy machine, a live
/// node may wait for a CPU for seconds.
const NODE_TIMEOUT_MS: &str = "8000";

/// The engines, by host and port. There are no engines of killed nodes.
type Nodes = BTreeMap<(usize, u16), Engine>;

/// Creates a cluster, moves slots (with Valkey also by `CLUSTER MIGRATESLOTS`), and loses
/// primaries, with and without an operator. After each step, all keys are compared, and all
/// connections between hosts are links.
pub(crate) fn works(group: &Group, over_tcp: bool) {
    let options = ["--cluster-enabled", "yes", "--cluster-node-timeout", NODE_TIMEOUT_MS];
    let auth = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
    let options = [&options[..], &auth, &["--repl-diskless-sync-delay", "0"]].concat();
    let mut nodes = Nodes::new();
    for port in [7001, 7002] {
        for host in 1..=3 {
            nodes.insert((host, port), group.start_engine(host, port, &options));
        }
    }
    create(group, &nodes);
    group.assert_only_links(over_tcp);
    write_keys(group, &nodes);
    compare_keys(group, &nodes, 2);
    reshard(group, &nodes);
    group.assert_only_links(over_tcp);
    compare_keys(group, &nodes, 3);
    migrate_slots(&nodes);
    group.assert_only_links(over_tcp);
    compare_keys(group, &nodes, 2);
    check(group, 3);
    fail_over_by_hand(group, &nodes);
    compare_keys(group, &nodes, 1);
    fail_over_after_kill(group, &mut nodes);
    compare_keys(group, &nodes, 3);
    group.assert_only_links(over_tcp);
    for host in 1..=3 {
        let samples = group.scrape(host);
        assert!(sum(&samples, "agent_streams{", "class=\"bus\"") > 0.0, "{samples:?}");
        let clients = sum(&samples, "agent_streams_opened_total{", "class=\"interactive\"");
        assert!(clients > 0.0, "{samples:?}");
        assert!(sum(&samples, "agent_bytes_total{", "") > 0.0);
        assert!(sum(&samples, "agent_links_lost_total{", "") == 0.0, "{samples:?}");
        assert!(sum(&samples, "agent_direct_connections_total", "") == 0.0);
        // Only connections to the killed engine are refused.
        let refused = sum(&samples, "agent_opens_refused_total{", "");
        let by_engine = sum(&samples, "agent_opens_refused_total{cause=\"engine_refused\"", "");
        assert!((refused - by_engine).abs() < f64::EPSILON, "{samples:?}");
    }
}

fn create(group: &Group, nodes: &Nodes) {
    let addresses: Vec<_> = [7001, 7002]
        .into_iter()
        .flat_map(|port| (1..=3).map(move |host| format!("{}:{port}", group.address(host))))
        .collect();
    let mut words = vec!["--cluster", "create"];
    words.extend(addresses.iter().map(String::as_str));
    words.extend(["--cluster-replicas", "1", "--cluster-yes"]);
    let text = group.redis_cli(1, &words);
    assert!(text.contains("[OK] All 16384 slots covered"), "{text}");
    wait_until_it_works(nodes);
    for engine in nodes.values() {
        engine.wait_until("a node that lists the three replicas", || {
            operator(engine).text(&["CLUSTER", "NODES"]).matches("slave").count() == 3
        });
    }
    check(group, 2);
}

fn check(group: &Group, host: usize) {
    let text =
        group.redis_cli(host, &["--cluster", "check", &format!("{}:7001", group.address(1))]);
    assert!(text.contains("[OK] All nodes agree about slots configuration"), "{text}");
    assert!(text.contains("[OK] All 16384 slots covered"), "{text}");
}

/// Returns a client of an engine's own socket.
fn operator(engine: &Engine) -> Client {
    let mut client = engine.client();
    client.ok(&["AUTH", PASSWORD]);
    client
}

fn info(engine: &Engine, section: &str) -> String {
    operator(engine).text(&["INFO", section])
}

/// Waits until all nodes agree, and every replica is connected.
fn wait_until_it_works(nodes: &Nodes) {
    for ((host, port), engine) in nodes {
        engine.wait_until(&format!("a cluster that works, at host {host}:{port}"), || {
            let state = operator(engine).text(&["CLUSTER", "INFO"]);
            state.contains("cluster_state:ok")
        });
        engine.wait_until("a replica that is connected", || {
            let replication = info(engine, "replication");
            replication.contains("role:master") || replication.contains("master_link_status:up")
        });
    }
}

/// A primary, as a node of the cluster lists it.
struct Primary {
    id: String,
    at: (usize, u16),
    slots: Vec<(u16, u16)>,
}

impl Primary {
    /// Returns the number of its slots.
    fn count(&self) -> usize {
        self.slots.iter().map(|(first, last)| usize::from(last - first) + 1).sum()
    }
}

fn primaries(nodes: &Nodes) -> Vec<Primary> {
    let engine = nodes.values().next().expect("a node");
    let listed = operator(engine).text(&["CLUSTER", "NODES"]);
    let primary = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        if !words[2].contains("master") || words[2].contains("fail") {
            return None;
        }
        let (address, _) = words[1].split_once('@').expect("an address");
        let (ip, port) = address.split_once(':').expect("a port");
        let host = ip.rsplit('.').next().expect("a host").parse().expect("a number");
        let slots = words[8..].iter().filter(|word| !word.starts_with('[')).map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            (first.parse().expect("a slot"), last.parse().expect("a slot"))
        });
        let (id, slots) = (words[0].to_owned(), slots.collect::<Vec<_>>());
        if slots.is_empty() {
            return None; // without slots: a replica that this node still lists as a primary
        }
        Some(Primary { id, at: (host, port.parse().expect("a port")), slots })
    };
    listed.lines().filter_map(primary).collect()
}

fn key(number: usize) -> String {
    format!("key:{number}")
}

fn value(number: usize, version: usize) -> String {
    format!("{number}.{version}:{}", "x".repeat(number % 700))
}

/// Writes all keys. `version` distinguishes their values from those of another call.
pub(crate) fn write(client: &mut Client, version: usize) {
    write_numbers(client, &(0..KEYS).collect::<Vec<_>>(), version);
}

/// Reads all keys, and compares their values with those that [`write`] has written.
pub(crate) fn compare(client: &mut Client, version: usize) {
    compare_numbers(client, &(0..KEYS).collect::<Vec<_>>(), version);
}

fn write_numbers(client: &mut Client, numbers: &[usize], version: usize) {
    let command = |number: &usize| vec!["SET".into(), key(*number), value(*number, version)];
    client.send(&numbers.iter().map(command).collect::<Vec<Vec<String>>>());
    let replies = client.replies(numbers.len());
    assert!(replies.iter().all(|reply| reply == b"+OK\r\n"));
}

fn compare_numbers(client: &mut Client, numbers: &[usize], version: usize) {
    let command = |number: &usize| vec!["GET".into(), key(*number)];
    client.send(&numbers.iter().map(command).collect::<Vec<Vec<String>>>());
    let replies = client.replies(numbers.len());
    for (number, reply) in numbers.iter().zip(replies) {
        assert_eq!(text_of(&reply), value(*number, version), "{}", key(*number));
    }
}

/// Returns for each primary a client on this host, and the numbers of the primary's keys.
fn keys_by_primary(group: &Group, nodes: &Nodes, from: usize) -> Vec<(Client, Vec<usize>)> {
    let all = primaries(nodes).into_iter().map(|primary| {
        let is_own = |number: &usize| {
            let slot = slot_of(key(*number).as_bytes());
            primary.slots.iter().any(|(first, last)| (first..=last).contains(&&slot))
        };
        let client = group.client(from, primary.at.0, primary.at.1);
        (client, (0..KEYS).filter(is_own).collect())
    });
    all.collect()
}

fn write_keys(group: &Group, nodes: &Nodes) {
    for (mut client, numbers) in keys_by_primary(group, nodes, 1) {
        write_numbers(&mut client, &numbers, 0);
    }
}

/// Reads all keys on this host, and compares their values.
fn compare_keys(group: &Group, nodes: &Nodes, from: usize) {
    let mut compared = 0;
    for (mut client, numbers) in keys_by_primary(group, nodes, from) {
        compare_numbers(&mut client, &numbers, 0);
        compared += numbers.len();
    }
    assert_eq!(compared, KEYS, "every slot has a primary");
}

fn reshard(group: &Group, nodes: &Nodes) {
    let before = primaries(nodes);
    let (from, to) = (&before[0], &before[1]);
    let any = format!("{}:7001", group.address(2));
    let words = ["--cluster", "reshard", &any, "--cluster-from", &from.id, "--cluster-to", &to.id];
    let count = slots();
    let more = ["--cluster-slots", &count.to_string(), "--cluster-yes"];
    group.redis_cli(3, &[&words[..], &more].concat());
    wait_until_moved(nodes, to, count);
}

fn slots() -> usize {
    let set = std::env::var("FERRITE_AGENT_SLOTS").ok();
    set.map_or(SLOTS, |slots| slots.parse().expect("FERRITE_AGENT_SLOTS is a number"))
}

/// Waits until all nodes know that a primary has got this number of slots.
fn wait_until_moved(nodes: &Nodes, to: &Primary, count: usize) {
    let expected = to.count() + count;
    until(TIMEOUT, "all nodes to know the moved slots", || {
        let is_moving = |engine| {
            let listed = operator(engine).text(&["CLUSTER", "NODES"]);
            listed.contains("->-") || listed.contains("-<-")
        };
        !nodes.values().any(is_moving)
            && primaries(nodes).iter().any(|it| it.id == to.id && it.count() == expected)
    });
}

/// Moves slots with `CLUSTER MIGRATESLOTS`, if the engine has it (Valkey 9.0 and later). The nodes
/// transfer all keys themselves.
fn migrate_slots(nodes: &Nodes) {
    let any = nodes.values().next().expect("a node");
    if !operator(any).text(&["COMMAND", "INFO", "CLUSTER|MIGRATESLOTS"]).contains("migrateslots") {
        return;
    }
    let (count, before) = (slots(), primaries(nodes));
    let is_long = |(first, last): &&(u16, u16)| usize::from(last - first) >= count;
    let range = |primary: &Primary| primary.slots.iter().find(is_long).copied();
    let mut owners = before.iter().filter_map(|primary| Some((primary, range(primary)?)));
    let (from, (first, _)) = owners.next().expect("a primary with enough slots in a row");
    let to = before.iter().find(|primary| primary.id != from.id).expect("another primary");
    let last = usize::from(first) + count - 1;
    let range = ["SLOTSRANGE", &first.to_string(), &last.to_string(), "NODE", &to.id];
    operator(&nodes[&from.at]).ok(&[&["CLUSTER", "MIGRATESLOTS"], &range[..]].concat());
    wait_until_moved(nodes, to, count);
}

/// Returns a node that is a replica, and the address of its primary.
fn replica(nodes: &Nodes) -> ((usize, u16), (usize, u16)) {
    let found = nodes.iter().find_map(|(at, engine)| {
        let replication = info(engine, "replication");
        let field = |name: &str| {
            let line = replication.lines().find_map(|line| line.strip_prefix(name));
            line.map(|text| text.trim().to_owned())
        };
        let (ip, port) = (field("master_host:")?, field("master_port:")?);
        let host = ip.rsplit('.').next()?.parse().ok()?;
        Some((*at, (host, port.parse().ok()?)))
    });
    found.expect("a replica")
}

fn logs(nodes: &Nodes) -> String {
    let one = |((host, port), engine): (&(usize, u16), &Engine)| {
        let listed = operator(engine).text(&["CLUSTER", "NODES"]);
        format!("\nhost {host}:{port}\n{listed}\n{}", engine.log())
    };
    nodes.iter().map(one).collect()
}

fn wait_until_primary(nodes: &Nodes, at: (usize, u16)) {
    until_or(
        TIMEOUT,
        "a replica becomes a primary",
        || info(&nodes[&at], "replication").contains("role:master"),
        || logs(nodes),
    );
    until(TIMEOUT, "all nodes to know the new primary", || {
        primaries(nodes).iter().any(|primary| primary.at == at && !primary.slots.is_empty())
    });
}

fn fail_over_by_hand(group: &Group, nodes: &Nodes) {
    let (at, _) = replica(nodes);
    let other = at.0 % 3 + 1;
    group.client(other, at.0, at.1).ok(&["CLUSTER", "FAILOVER"]);
    wait_until_primary(nodes, at);
    wait_until_it_works(nodes);
}

fn fail_over_after_kill(group: &Group, nodes: &mut Nodes) {
    let (replica, primary) = replica(nodes);
    // Waits until the replica has all writes, because the primary is killed next.
    let mut client = group.client(primary.0 % 3 + 1, primary.0, primary.1);
    assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1");
    let mut killed = nodes.remove(&primary).expect("the primary");
    killed.kill();
    assert_eq!(client.next_reply(), None, "the connection ends");
    wait_until_primary(nodes, replica);
    wait_until_it_works(nodes);
}
