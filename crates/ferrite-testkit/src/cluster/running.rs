//! A cluster of several engines on loopback addresses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use redis::FromRedisValue;

use crate::engine::{Engine, Start};
use crate::port::free_port;
use crate::wait::{TIMEOUT, until_or};

/// The number of slots of a cluster.
pub const SLOTS: u16 = 16_384;
/// How long a node may be silent before other nodes regard it as failed.
const NODE_TIMEOUT_MS: &str = "2000";

/// A node of a [`Cluster`].
#[derive(Debug)]
pub struct Node {
    /// The node's engine.
    pub engine: Engine,
    /// The address of the engine's own port.
    pub address: SocketAddr,
    bus: u16,
    /// The port for the node's module, if it has one.
    pub module_port: u16,
    /// The node's id.
    pub id: String,
}

/// A cluster. Primaries come first and share the slots evenly, in order. Drop kills all nodes.
#[derive(Debug)]
pub struct Cluster {
    /// All nodes, in the order of their start.
    pub nodes: Vec<Node>,
    primaries: usize,
}

/// How a cluster is started.
#[derive(Debug, Clone, Copy)]
pub struct Shape<'a> {
    /// The engine's program.
    pub program: &'a Path,
    /// The number of primaries.
    pub primaries: usize,
    /// The number of replicas in all. The first belongs to the first primary, and so on.
    pub replicas: usize,
    /// The numbers of the nodes without the module.
    pub without_module: &'a [usize],
    /// The address of all nodes.
    pub ip: IpAddr,
    /// More options of every engine.
    pub options: &'a [&'a str],
}

impl<'a> Shape<'a> {
    /// Returns a shape without replicas, on 127.0.0.1, in which all nodes have the module.
    #[must_use]
    pub fn primaries(program: &'a Path, primaries: usize) -> Self {
        let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self { program, primaries, replicas: 0, without_module: &[], ip, options: &[] }
    }
}

impl Cluster {
    /// Starts a cluster and waits until every node says that the cluster works.
    #[must_use]
    pub fn start(shape: &Shape<'_>) -> Self {
        let count = shape.primaries + shape.replicas;
        let nodes: Vec<_> = (0..count).map(|number| Node::start(shape, number)).collect();
        let cluster = Self { nodes, primaries: shape.primaries };
        for number in 0..shape.primaries {
            let slots = cluster.slots_of(number).map(|slot| slot.to_string());
            let () = cluster.ask(number, &["CLUSTER", "ADDSLOTSRANGE", &slots[0], &slots[1]]);
            let epoch = (number + 1).to_string();
            let () = cluster.ask(number, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
        }
        for other in &cluster.nodes[1..] {
            cluster.introduce(0, other);
        }
        cluster.wait_until("every node to know all others", |cluster, number| {
            cluster.nodes_known(number) == count
        });
        for replica in shape.primaries..count {
            let primary = &cluster.nodes[replica - shape.primaries].id;
            let () = cluster.ask(replica, &["CLUSTER", "REPLICATE", primary]);
        }
        cluster.wait_until("every node to know the replicas", |cluster, number| {
            let nodes: String = cluster.ask(number, &["CLUSTER", "NODES"]);
            nodes.lines().filter(|line| line.contains("slave ")).count() == shape.replicas
        });
        cluster.wait_until_it_works();
        cluster
    }

    /// Adds a node without slots, and waits until every node knows it. Returns its number.
    pub fn join(&mut self, shape: &Shape<'_>) -> usize {
        let number = self.nodes.len();
        self.nodes.push(Node::start(shape, number));
        self.introduce(0, &self.nodes[number]);
        let count = self.nodes.len();
        self.wait_until("every node to know all others", |cluster, number| {
            cluster.nodes_known(number) == count
        });
        number
    }

    fn introduce(&self, number: usize, other: &Node) {
        let [ip, port, bus] = [
            other.address.ip().to_string(),
            other.address.port().to_string(),
            other.bus.to_string(),
        ];
        let () = self.ask(number, &["CLUSTER", "MEET", &ip, &port, &bus]);
    }

    /// Waits until all nodes say that the cluster works and that each replica is connected.
    pub fn wait_until_it_works(&self) {
        self.wait_until("a cluster that works", |cluster, number| {
            let info: String = cluster.ask(number, &["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok")
        });
        self.wait_until("connected replicas", |cluster, number| {
            let info: String = cluster.ask(number, &["INFO", "replication"]);
            info.contains("role:master") || info.contains("master_link_status:up")
        });
    }

    /// Returns the first and the last slot of a primary after the start.
    #[must_use]
    pub fn slots_of(&self, primary: usize) -> [u16; 2] {
        let share = usize::from(SLOTS) / self.primaries;
        let end =
            if primary + 1 == self.primaries { usize::from(SLOTS) } else { (primary + 1) * share };
        [(primary * share) as u16, (end - 1) as u16] // slot numbers fit into u16
    }

    /// Runs a command on a node's own socket.
    #[track_caller]
    pub fn ask<T: FromRedisValue>(&self, number: usize, words: &[&str]) -> T {
        self.nodes[number].engine.ask(words)
    }

    /// Returns how many nodes this node lists as connected, including itself.
    fn nodes_known(&self, number: usize) -> usize {
        let nodes: String = self.ask(number, &["CLUSTER", "NODES"]);
        let is_connected = |line: &&str| line.contains(" connected") && !line.contains("handshake");
        nodes.lines().filter(is_connected).count()
    }

    /// Waits until a condition holds for all nodes that run.
    #[track_caller]
    pub fn wait_until(&self, what: &str, holds: impl Fn(&Self, usize) -> bool) {
        for (number, node) in self.nodes.iter().enumerate() {
            if node.is_running() {
                until_or(
                    TIMEOUT,
                    what,
                    || holds(self, number),
                    || {
                        let nodes: String = self.ask(number, &["CLUSTER", "NODES"]);
                        format!("node {number}: {nodes}{}", node.engine.log())
                    },
                );
            }
        }
    }

    /// Returns the number of the primary that serves a slot, as the first node that runs says.
    #[must_use]
    pub fn primary_of(&self, slot: u16) -> usize {
        let asked = self.nodes.iter().position(Node::is_running).expect("a node that runs");
        let ranges: Vec<Vec<redis::Value>> = self.ask(asked, &["CLUSTER", "SLOTS"]);
        let port = ranges.into_iter().find_map(|range| {
            let [first, last, primary] = <[redis::Value; 3]>::try_from(range[..3].to_vec()).ok()?;
            let number = |value| redis::from_redis_value::<u16>(value).expect("a number");
            let is_in = (number(first)..=number(last)).contains(&slot);
            let redis::Value::Array(mut primary) = primary else { return None };
            is_in.then(|| number(primary.swap_remove(1)))
        });
        let is_it = |node: &Node| Some(node.address.port()) == port;
        self.nodes.iter().position(is_it).expect("a primary")
    }

    /// Moves a slot with its keys from one primary to another, as `redis-cli --cluster reshard`
    /// does: keys move while clients use them.
    pub fn move_slot(&self, slot: u16, from: usize, to: usize) {
        self.begin_move(slot, from, to);
        while self.move_keys(slot, from, to, 100) > 0 {}
        let (slot, target) = (slot.to_string(), &self.nodes[to].id);
        for number in [to, from] {
            let () = self.ask(number, &["CLUSTER", "SETSLOT", &slot, "NODE", target]);
        }
        for number in (0..self.primaries).filter(|number| ![from, to].contains(number)) {
            let set = ["CLUSTER", "SETSLOT", &slot, "NODE", target];
            // A node that was killed or has become a replica does not accept the command. It learns
            // the slot's new owner from the cluster's gossip.
            let _ = self.nodes[number].engine.try_ask::<()>(&set);
        }
    }

    /// Begins to move a slot. From then on, new keys of the slot are written at the primary `to`.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let (slot, [source, target]) = (slot.to_string(), [from, to].map(|at| &self.nodes[at].id));
        let () = self.ask(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", source]);
        let () = self.ask(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", target]);
    }

    /// Moves up to `count` keys of a slot that is being moved. Returns how many it has moved.
    pub fn move_keys(&self, slot: u16, from: usize, to: usize, count: u32) -> usize {
        let address = self.nodes[to].address;
        let [ip, port] = [address.ip().to_string(), address.port().to_string()];
        let (slot, count) = (slot.to_string(), count.to_string());
        let keys: Vec<String> = self.ask(from, &["CLUSTER", "GETKEYSINSLOT", &slot, &count]);
        if !keys.is_empty() {
            let mut words = vec!["MIGRATE", &ip, &port, "", "0", "5000", "KEYS"];
            words.extend(keys.iter().map(String::as_str));
            let _: String = self.ask(from, &words);
        }
        keys.len()
    }

    /// Asserts that all nodes that run are healthy.
    #[track_caller]
    pub fn assert_healthy(&mut self) {
        for node in self.nodes.iter_mut().filter(|node| node.is_running()) {
            node.engine.assert_healthy();
        }
    }
}

impl Node {
    fn start(shape: &Shape<'_>, number: usize) -> Self {
        let [port, bus, module_port] = [(); 3].map(|()| free_port());
        let ip = shape.ip.to_string();
        let [port_text, bus_text, module_text] = [port, bus, module_port].map(|it| it.to_string());
        let mut options = [
            ["--bind", &ip],
            ["--port", &port_text],
            ["--protected-mode", "no"],
            ["--cluster-enabled", "yes"],
            ["--cluster-port", &bus_text],
            ["--cluster-node-timeout", NODE_TIMEOUT_MS],
            ["--repl-diskless-sync-delay", "0"],
        ]
        .concat();
        options.extend(shape.options);
        let arguments = ["rdma-port", &module_text];
        let has_module = !shape.without_module.contains(&number);
        let engine = Engine::start(&Start {
            program: shape.program,
            options: &options,
            module: has_module.then_some(&arguments),
        });
        let id = engine.ask(&["CLUSTER", "MYID"]);
        Self { engine, address: (shape.ip, port).into(), bus, module_port, id }
    }

    /// Returns the address of the node's module.
    #[must_use]
    pub fn module_address(&self) -> SocketAddr {
        (self.address.ip(), self.module_port).into()
    }

    /// Returns the address of the node's cluster bus.
    #[must_use]
    pub fn bus_address(&self) -> SocketAddr {
        (self.address.ip(), self.bus).into()
    }

    fn is_running(&self) -> bool {
        self.engine.socket().exists() && self.engine.connection().is_ok()
    }
}
