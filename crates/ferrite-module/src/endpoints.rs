//! The endpoints of a cluster's nodes: the addresses at which the modules of the nodes accept
//! clients. Each module announces its own to the others by the engine's cluster messages
//! (`endpoints/message.rs`), and FERRITE ENDPOINTS lists those of all nodes.
//!
//! ```text
//!   once a second:  nodes of the engine ──► tick ──► announcements to send
//!   a message:      sender, bytes ──► receive        (nothing is sent from here)
//!   FERRITE ENDPOINTS ──► list
//! ```
//!
//! The engine queues no message for a node that it cannot reach, and a node that joins later gets
//! none of the earlier ones. Therefore announcements are repeated, and a node that has not yet
//! heard of another asks it for an announcement.
//!
//! Nothing here calls the engine, and time is an argument. Memory is bounded by the number of nodes
//! in the cluster, and by [`message::ENDPOINTS_MAX`] for each.

mod message;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::api::cluster::{Node, NodeId};
use crate::api::{Reply, Value};
pub(crate) use message::TYPE as MESSAGE_TYPE;
use message::{Announcement, ENDPOINTS_MAX, Endpoint, Unusable, is_announced};

/// The time between two calls of [`Endpoints::tick`].
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// How often a node gets the announcement.
const REPEAT: Duration = Duration::from_secs(10);
/// How long the endpoints of a silent node are listed. That is five announcements and a second.
const SILENCE_MAX: Duration = Duration::from_secs(51);
/// The most messages of a tick. Sending one costs the engine's main thread a few microseconds. In
/// a cluster with more than 1,280 nodes, each node gets the announcement less often.
const MESSAGES_MAX: usize = 128;
/// How many of these are for nodes that could not be reached before, if other nodes need the rest.
/// Otherwise many nodes that are gone would keep the announcement from the nodes that run.
const UNREACHABLE_MAX: usize = 16;

/// The endpoints of all nodes of the cluster, or only this node's own without a cluster.
#[derive(Debug, Default)]
pub(crate) struct Endpoints {
    own: Vec<Endpoint>,
    myself: Option<Node>,
    peers: BTreeMap<NodeId, Peer>,
    rejected: u64,
}

/// Another node of the cluster.
#[derive(Debug)]
struct Peer {
    node: Node,
    /// When its last announcement arrived.
    heard: Option<Instant>,
    endpoints: Vec<Endpoint>,
    /// When this node's announcement was last sent to it.
    told: Option<Instant>,
    /// When the engine last had to send it the announcement, with or without success.
    tried: Option<Instant>,
    /// Whether the engine could not reach it at the last attempt.
    is_unreachable: bool,
    /// Whether it has asked for an announcement.
    has_asked: bool,
}

impl Peer {
    fn new(node: Node) -> Self {
        Self {
            node,
            heard: None,
            endpoints: Vec::new(),
            told: None,
            tried: None,
            is_unreachable: false,
            has_asked: false,
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.has_asked || self.told.is_none_or(|told| now.saturating_duration_since(told) >= REPEAT)
    }
}

impl Endpoints {
    /// Sets this node's own endpoints: the addresses that the module listens on. If they have
    /// changed, the next ticks announce them to all nodes.
    pub(crate) fn set_own<'a>(&mut self, listening: impl Iterator<Item = &'a (SocketAddr, bool)>) {
        let mut own: Vec<Endpoint> = Vec::new();
        for (at, has_rdma) in listening {
            let ip = at.ip();
            let address = if ip.is_unspecified() { None } else { Some(ip) };
            let has_address =
                |known: &&mut Endpoint| (known.address, known.port) == (address, at.port());
            match own.iter_mut().find(has_address) {
                // 0.0.0.0 and :: are the same endpoint.
                Some(known) => known.has_rdma |= has_rdma,
                None if address.is_none_or(|ip| is_announced(&ip)) => {
                    own.push(Endpoint { address, port: at.port(), has_rdma: *has_rdma });
                }
                None => {}
            }
        }
        own.sort_by_key(|endpoint| !endpoint.has_rdma); // stable; RDMA comes first
        own.truncate(ENDPOINTS_MAX);
        if self.own != own {
            self.own = own;
            self.peers.values_mut().for_each(|peer| peer.told = None);
        }
    }

    /// Updates the nodes, forgets the endpoints of nodes that have left or are silent, and returns
    /// the messages to send. [`Endpoints::note_sent`] must be called for each of them.
    pub(crate) fn tick(&mut self, nodes: &[Node], now: Instant) -> Vec<(NodeId, Vec<u8>)> {
        self.myself = nodes.iter().find(|node| node.is_myself).copied();
        let mut peers = std::mem::take(&mut self.peers);
        for node in nodes.iter().filter(|node| !node.is_myself) {
            let mut peer = peers.remove(&node.id).unwrap_or_else(|| Peer::new(*node));
            peer.node = *node;
            let silence = peer.heard.map(|heard| now.saturating_duration_since(heard));
            if silence.is_some_and(|silence| silence > SILENCE_MAX) {
                (peer.heard, peer.endpoints) = (None, Vec::new());
            }
            self.peers.insert(node.id, peer);
        }
        let due = self.peers.values().filter(|peer| peer.is_due(now));
        let (mut unreachable, mut reachable): (Vec<_>, Vec<_>) =
            due.partition(|peer| peer.is_unreachable);
        // Whoever has waited longest comes first.
        reachable.sort_by_key(|peer| peer.tried);
        unreachable.sort_by_key(|peer| peer.tried);
        unreachable.truncate(MESSAGES_MAX.saturating_sub(reachable.len()).max(UNREACHABLE_MAX));
        reachable.truncate(MESSAGES_MAX - unreachable.len());
        let message = |peer: &&Peer| {
            let wants_answer = peer.heard.is_none();
            let announcement = Announcement { wants_answer, endpoints: self.own.clone() };
            (peer.node.id, announcement.encode())
        };
        reachable.iter().chain(&unreachable).map(message).collect()
    }

    /// Records whether a message of [`Endpoints::tick`] was sent. The engine sends none to a node
    /// that it cannot reach.
    pub(crate) fn note_sent(&mut self, to: NodeId, was_sent: bool, now: Instant) {
        let Some(peer) = self.peers.get_mut(&to) else { return };
        (peer.tried, peer.is_unreachable) = (Some(now), !was_sent);
        if was_sent {
            (peer.told, peer.has_asked) = (Some(now), false);
        }
    }

    /// Records a message. A message that is not a valid announcement is ignored, and counted if it
    /// is malformed. A message of a node that the last tick did not list is ignored, too. The next
    /// tick that lists the node asks it for another announcement.
    pub(crate) fn receive(&mut self, from: NodeId, message: &[u8], now: Instant) {
        let Announcement { wants_answer, endpoints } = match Announcement::decode(message) {
            Ok(announcement) => announcement,
            Err(Unusable::Foreign) => return,
            Err(Unusable::Malformed) => {
                self.rejected += 1;
                if self.rejected == 1 {
                    tracing::warn!(
                        "node {from} sent a malformed announcement of its endpoints; further ones \
                         are only counted (cluster_rejected_messages)"
                    );
                }
                return;
            }
        };
        if let Some(peer) = self.peers.get_mut(&from) {
            (peer.heard, peer.endpoints) = (Some(now), endpoints);
            peer.has_asked |= wants_answer;
            peer.is_unreachable = false;
        }
    }

    /// Returns the number of listed endpoints of other nodes.
    pub(crate) fn peer_count(&self) -> usize {
        self.listed_peers().map(|(peer, _)| peer.endpoints.len()).sum()
    }

    /// Returns the number of malformed messages.
    pub(crate) fn rejected(&self) -> u64 {
        self.rejected
    }

    /// Returns all endpoints, this node's first, as the reply to FERRITE ENDPOINTS.
    pub(crate) fn list(&self, now: Instant) -> Reply {
        let id = self.myself.map_or(String::new(), |node| node.id.to_string());
        let address = self.myself.and_then(|node| node.address);
        let own = self.own.iter().map(|endpoint| row(&id, address, endpoint, Duration::ZERO));
        let others = self.listed_peers().flat_map(|(peer, heard)| {
            let age = now.saturating_duration_since(heard);
            let node = peer.node;
            let row = move |endpoint| row(&node.id.to_string(), node.address, endpoint, age);
            peer.endpoints.iter().map(row)
        });
        Reply::Maps(own.chain(others).collect())
    }

    /// Returns the nodes whose endpoints are listed, and when each was last heard.
    fn listed_peers(&self) -> impl Iterator<Item = (&Peer, Instant)> {
        let works = self.peers.values().filter(|peer| !peer.node.has_failed);
        works.filter_map(|peer| Some((peer, peer.heard?)))
    }
}

/// Returns a row of FERRITE ENDPOINTS. Its address is that of the endpoint or, if the endpoint has
/// none, that of the node. It is empty if neither is known.
fn row(
    id: &str,
    address_of_node: Option<IpAddr>,
    endpoint: &Endpoint,
    age: Duration,
) -> Vec<(String, Value)> {
    let address = endpoint.address.or(address_of_node);
    let address = address.map_or(String::new(), |address| address.to_string());
    let transport = if endpoint.has_rdma { "rdma" } else { "tcp" };
    [
        ("node", Value::Text(id.into())),
        ("address", Value::Text(address)),
        ("port", Value::Number(endpoint.port.into())),
        ("transport", Value::Text(transport.into())),
        ("age", Value::Number(age.as_secs())),
    ]
    .map(|(name, value)| (name.into(), value))
    .into()
}

#[cfg(test)]
mod tests;
