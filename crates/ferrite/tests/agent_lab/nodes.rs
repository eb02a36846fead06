//! A cluster of three primaries and three replicas, through agents or without them.

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

/// A cluster on the hosts of a group.
pub(crate) struct Nodes<'a> {
    group: &'a Group,
    /// Whether the nodes use the hosts' own addresses, which the agents leave alone.
    is_direct: bool,
    pub(crate) all: Vec<Node>,
}

impl<'a> Nodes<'a> {
    /// Creates a cluster with a primary at the first port of each host, and a replica at the
    /// second.
    pub(crate) fn create(
        group: &'a Group,
        is_direct: bool,
        ports: [u16; 2],
        options: &[&str],
    ) -> Self {
        let auth = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
        let cluster = ["--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0"];
        let options = [&auth[..], &cluster, options].concat();
        let mut nodes = Self { group, is_direct, all: Vec::new() };
        for port in ports {
            for host in 1..=3 {
                let (address, number) = (nodes.address(host), port.to_string());
                let own = ["--port", &number, "--bind", &address, "--bind-source-addr", &address];
                let options = [&own[..], &options].concat();
                let start = || Engine::start(&Start::redis(&options));
                let engine = group.hosts.within(host, start);
                nodes.all.push(Node { host, port, engine });
            }
        }
        let address = |node: &Node| format!("{}:{}", nodes.address(node.host), node.port);
        let addresses: Vec<_> = nodes.all.iter().map(address).collect();
        let mut words = vec!["--cluster", "create"];
        words.extend(addresses.iter().map(String::as_str));
        words.extend(["--cluster-replicas", "1", "--cluster-yes"]);
        let text = group.redis_cli(1, &words);
        assert!(text.contains("[OK] All 16384 slots covered"), "{text}");
        nodes.wait_until_whole();
        nodes
    }

    /// Waits until every node knows all others, none of them failed, and all replicas are up.
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
    }

    /// Kills a primary. Returns how long it takes until its replica accepts writes of a client on
    /// another host. Then starts the killed node again, and waits until the cluster is whole.
    pub(crate) fn fail_over(&mut self, round: usize) -> Duration {
        let primaries: Vec<_> = (0..self.all.len()).filter(|at| self.is_primary(*at)).collect();
        let killed = primaries[round % primaries.len()];
        let info = operator(&self.all[killed].engine).text(&["INFO", "replication"]);
        let is_replica = |node: &Node| {
            info.contains(&format!("ip={},port={},", self.address(node.host), node.port))
        };
        let replica = self.all.iter().position(is_replica).expect("a replica");
        let key = self.key_of(killed);
        let (host, port) = (self.all[replica].host, self.all[replica].port);
        let mut client = self.client(host % 3 + 1, host, port);
        assert!(client.ask(&["SET", &key, "before"]).starts_with("-MOVED"));
        self.all[killed].engine.kill();
        let begun = Instant::now();
        until(TIMEOUT, "a primary", || client.ask(&["SET", &key, "after"]) == "+OK");
        let took = begun.elapsed();
        let node = &mut self.all[killed];
        self.group.hosts.within(node.host, || node.engine.restart());
        self.wait_until_whole();
        took
    }

    fn is_primary(&self, at: usize) -> bool {
        operator(&self.all[at].engine).text(&["INFO", "replication"]).contains("role:master")
    }

    /// Returns a key in a slot of this primary.
    fn key_of(&self, primary: usize) -> String {
        let listed = operator(&self.all[primary].engine).text(&["CLUSTER", "NODES"]);
        let own = listed.lines().find(|line| line.contains("myself")).expect("this node");
        let slots = own.split_whitespace().nth(8).expect("slots");
        let (first, last) = slots.split_once('-').expect("a range");
        let range = first.parse::<u16>().expect("a slot")..=last.parse().expect("a slot");
        let mut keys = (0..).map(|number| format!("key:{number}"));
        keys.find(|key| range.contains(&slot_of(key.as_bytes()))).expect("a key")
    }

    fn client(&self, from: usize, to: usize, port: u16) -> Client {
        let address = self.address(to);
        let connect = || Client::to_tcp((address.as_str(), port));
        let mut client = self.group.hosts.within(from, connect);
        client.ok(&["AUTH", PASSWORD]);
        client
    }

    fn address(&self, host: usize) -> String {
        if self.is_direct { self.group.hosts.ip(host) } else { alias(host) }
    }
}
