//! A cluster of three primaries and three replicas, through agents or without them.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use ferrite_proto::cluster::slot_of;
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Engine, Start, TIMEOUT, until};

use crate::agent::harness::{Group, PASSWORD, alias, operator};

/// A node: its host, its port, and its engine.
pub(crate) struct Node {
    pub(crate) host: usize,
    port: u16,
    pub(crate) engine: Engine,
}

/// A primary that was killed.
pub(crate) struct Failover {
    /// The slots that it had.
    pub(crate) slots: Vec<RangeInclusive<u16>>,
    pub(crate) killed: Instant,
    /// How long it took until the replica accepted writes.
    pub(crate) took: Duration,
}

/// A cluster on the hosts of a group.
pub(crate) struct Nodes {
    /// The addresses of the hosts that the nodes use.
    addresses: Vec<String>,
    pub(crate) all: Vec<Node>,
}

impl Nodes {
    /// Creates a cluster with a primary at the first port of each host, and a replica at the
    /// second. A direct cluster uses the hosts' own addresses, which the agents leave alone.
    pub(crate) fn create(
        group: &Group,
        is_direct: bool,
        ports: [u16; 2],
        options: &[&str],
    ) -> Self {
        let auth = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
        let cluster = ["--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0"];
        let options = [&auth[..], &cluster, options].concat();
        let address = |host| if is_direct { group.hosts.ip(host) } else { alias(host) };
        let mut nodes = Self { addresses: (1..=3).map(address).collect(), all: Vec::new() };
        for port in ports {
            for host in 1..=3 {
                let (address, number) = (nodes.address(host), port.to_string());
                let own = ["--port", &number, "--bind", address, "--bind-source-addr", address];
                let options = [&own[..], &options].concat();
                let start = || Engine::start(&Start::redis(&options));
                let engine = group.hosts.within(host, start);
                nodes.all.push(Node { host, port, engine });
            }
        }
        let addresses: Vec<_> = nodes.all.iter().map(|node| nodes.address_of(node)).collect();
        let mut words = vec!["--cluster", "create"];
        words.extend(addresses.iter().map(String::as_str));
        words.extend(["--cluster-replicas", "1", "--cluster-yes"]);
        let text = group.redis_cli(1, &words);
        assert!(text.contains("[OK] All 16384 slots covered"), "{text}");
        nodes.wait_until_whole();
        nodes
    }

    /// Waits until every node knows all others, none of them failed, all replicas are up, and all
    /// nodes agree about the slots.
    pub(crate) fn wait_until_whole(&self) {
        for node in &self.all {
            let is_whole = || {
                let mut client = operator(&node.engine);
                let listed = client.text(&["CLUSTER", "NODES"]);
                let info = client.text(&["INFO", "replication"]);
                client.text(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
                    && listed.matches(" connected").count() == 6
                    && listed.matches("slave").count() == 3
                    && !listed.contains("fail")
                    && (info.contains("master_link_status:up") || info.contains("slave0:"))
            };
            until_or(TIMEOUT, "a whole cluster", is_whole, || node.engine.log());
        }
        until(TIMEOUT, "nodes that agree about the slots", || {
            let mut known = self.all.iter().map(|node| slots_known_by(&node.engine));
            let first = known.next();
            known.all(|slots| Some(slots) == first)
        });
    }

    /// Kills a primary. Waits until its replica accepts writes of a client on another host. Then
    /// starts the killed node again, and waits until the cluster is whole.
    pub(crate) fn fail_over(&mut self, group: &Group, round: usize) -> Failover {
        let primaries = self.primaries();
        let killed = primaries[round % primaries.len()];
        let info = operator(&self.all[killed].engine).text(&["INFO", "replication"]);
        let is_replica = |node: &Node| {
            info.contains(&format!("ip={},port={},", self.address(node.host), node.port))
        };
        let replica = self.all.iter().position(is_replica).expect("a replica");
        let (_, slots) = self.id_and_slots(killed);
        let key = key_in(&slots);
        let (host, port) = (self.all[replica].host, self.all[replica].port);
        let mut client = self.client(group, host % 3 + 1, host, port);
        assert!(client.ask(&["SET", &key, "before"]).starts_with("-MOVED"));
        self.all[killed].engine.kill();
        let begun = Instant::now();
        until(TIMEOUT, "a primary", || client.ask(&["SET", &key, "after"]) == "+OK");
        let failover = Failover { slots, killed: begun, took: begun.elapsed() };
        let node = &mut self.all[killed];
        group.hosts.within(node.host, || node.engine.restart());
        self.wait_until_whole();
        failover
    }

    /// Moves slots from one primary to another.
    pub(crate) fn reshard(&self, group: &Group, round: usize, slots: usize) {
        let primaries = self.primaries();
        let id = |at: usize| self.id_and_slots(primaries[at % primaries.len()]).0;
        let (from, to) = (id(round), id(round + 1));
        let any = self.address_of(&self.all[primaries[0]]);
        let words = ["--cluster", "reshard", &any, "--cluster-from", &from, "--cluster-to", &to];
        let count = slots.to_string();
        let words = [&words[..], &["--cluster-slots", &count, "--cluster-yes"]].concat();
        group.redis_cli(1, &words);
    }

    fn primaries(&self) -> Vec<usize> {
        (0..self.all.len()).filter(|at| self.is_primary(*at)).collect()
    }

    fn is_primary(&self, at: usize) -> bool {
        operator(&self.all[at].engine).text(&["INFO", "replication"]).contains("role:master")
    }

    /// Returns the id of a primary, and its slots.
    fn id_and_slots(&self, primary: usize) -> (String, Vec<RangeInclusive<u16>>) {
        let listed = operator(&self.all[primary].engine).text(&["CLUSTER", "NODES"]);
        let own = listed.lines().find(|line| line.contains("myself")).expect("this node");
        let mut words = own.split_whitespace();
        let id = words.next().expect("an id").to_owned();
        let range = |word: &str| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            first.parse().expect("a slot")..=last.parse().expect("a slot")
        };
        (id, words.skip(7).filter(|word| !word.starts_with('[')).map(range).collect())
    }

    /// Returns the address of a node, as clients and other nodes use it.
    pub(crate) fn address_of(&self, node: &Node) -> String {
        format!("{}:{}", self.address(node.host), node.port)
    }

    fn client(&self, group: &Group, from: usize, to: usize, port: u16) -> Client {
        let connect = || Client::to_tcp((self.address(to), port));
        let mut client = group.hosts.within(from, connect);
        client.ok(&["AUTH", PASSWORD]);
        client
    }

    fn address(&self, host: usize) -> &str {
        &self.addresses[host - 1]
    }
}

/// Returns a key in one of these slots.
fn key_in(slots: &[RangeInclusive<u16>]) -> String {
    let is_in = |key: &String| slots.iter().any(|range| range.contains(&slot_of(key.as_bytes())));
    (0..).map(|number| format!("key:{number}")).find(is_in).expect("a key")
}

/// Returns the primaries that a node knows, with their slots.
fn slots_known_by(node: &Engine) -> BTreeSet<String> {
    let listed = operator(node).text(&["CLUSTER", "NODES"]);
    let slots = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        words[2].contains("master").then(|| format!("{} {}", words[0], words[8..].join(" ")))
    };
    listed.lines().filter_map(slots).collect()
}
