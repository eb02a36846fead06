//! A cluster whose nodes have the module.

use std::path::Path;

use ferrite_testkit::cluster::{cluster_options, node_id};
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TempDir};

use crate::client::{Pair, start};

pub(crate) struct Node {
    pub(crate) server: Engine,
    pub(crate) id: String,
    pub(crate) port: String,
    /// The addresses of the engine's own port and of the module's port.
    addresses: [String; 2],
}

/// A port of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Port {
    Own,
    Module,
}

impl Node {
    fn start(program: &Path, number: usize, options: &[String]) -> Self {
        let port = options.last().expect("the port comes last").clone();
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        // Failovers happen only on request. A busy machine must not cause one, which loses writes.
        let common = ["--repl-diskless-sync-delay", "0", "--cluster-replica-no-failover", "yes"];
        let server = start(program, &[&options[..], &common].concat());
        let addresses = [format!("127.0.0.1:{port}"), server.info("address")];
        Self { server, id: node_id(number), port, addresses }
    }

    pub(crate) fn connect(&self, port: Port) -> Client {
        Client::to_tcp(&self.addresses[usize::from(port == Port::Module)])
    }

    /// Connects to both ports.
    pub(crate) fn pair(&self) -> Pair {
        Pair { module: self.connect(Port::Module), native: self.connect(Port::Own) }
    }

    /// Runs a command at the engine's own socket.
    pub(crate) fn ask(&self, line: &str) -> String {
        self.server.client().ask(&crate::client::words(line))
    }

    /// Runs a command whose reply must be OK.
    #[track_caller]
    pub(crate) fn ok(&self, line: &str) {
        assert_eq!(self.ask(line), "+OK", "{line}; {}", self.server.log());
    }

    pub(crate) fn is_primary(&self) -> bool {
        self.ask("INFO replication").contains("role:master")
    }

    /// Returns an epoch from CLUSTER INFO.
    pub(crate) fn epoch(&self, name: &str) -> u64 {
        let info = self.ask("CLUSTER INFO");
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.trim().parse().ok()).expect("an epoch")
    }

    /// Waits until the node is a replica that is connected to its primary.
    pub(crate) fn wait_for_link(&self) {
        self.server.wait_until("a connection to the primary", || {
            self.ask("INFO replication").contains("master_link_status:up")
        });
    }
}

pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
    _directory: TempDir,
}

impl Cluster {
    /// Starts three primaries and then their replicas, and waits until the cluster works. Node
    /// `3 + n` is the replica of node `n`.
    pub(crate) fn start(program: &Path) -> Self {
        let directory = TempDir::new("cluster");
        let options = cluster_options(program, &directory, 3, 3);
        let nodes: Vec<_> = (0..)
            .zip(&options)
            .map(|(number, options)| Node::start(program, number, options))
            .collect();
        for node in &nodes {
            node.server.wait_until("links to all nodes", || {
                let is_ok = node.ask("CLUSTER INFO").contains("cluster_state:ok");
                is_ok && !node.ask("CLUSTER NODES").contains("disconnected")
            });
        }
        nodes[3..].iter().for_each(Node::wait_for_link);
        Self { nodes, _directory: directory }
    }

    /// Returns hash tags whose slots the node has, each with its slot.
    pub(crate) fn tags(&self, node: usize, count: usize) -> Vec<(String, u16)> {
        let own = node * 16384 / 3..(node + 1) * 16384 / 3;
        let mut client = self.nodes[0].server.client();
        let tags = (0..).map(|number| {
            let tag = format!("tag{number}");
            let slot = client.ask(&["CLUSTER", "KEYSLOT", &tag]);
            (tag, slot.trim_start_matches(':').parse().expect("a slot"))
        });
        tags.filter(|(_, slot)| own.contains(&usize::from(*slot))).take(count).collect()
    }

    /// Returns the number of the node with this port.
    pub(crate) fn by_port(&self, port: &str) -> usize {
        self.nodes.iter().position(|node| node.port == port).expect("a node's port")
    }

    /// Returns how many commands the module has called in-process on these nodes.
    pub(crate) fn calls(&self, nodes: std::ops::Range<usize>) -> u64 {
        self.nodes[nodes].iter().map(|node| node.server.count("commands_called")).sum()
    }

    pub(crate) fn assert_healthy(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.server.assert_healthy());
    }
}
