//! What a cluster connection knows about the nodes: their ids, the endpoints of their modules, and
//! what it has sent to each over which transport.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrite_fabric::Fallback;
use ferrite_proto::cluster::{endpoint_host, node_host};
use ferrite_session::{Host, SessionTransport, TransportObserver};
use redis::Value;

use crate::client::TransportInfo;
use crate::progress::Traffic;

/// The bytes that a cluster connection has exchanged with a node, over the connections of one
/// transport.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeTransport {
    /// The address of the engine, as the cluster announces it.
    pub address: String,
    /// The node's id. `None` for a server that was given to the client and that the cluster
    /// announces under another address.
    pub node: Option<String>,
    /// The transport that the connections use now, the device, and the reason of the last fallback.
    /// A connection over RDMA that has lost its path counts as one over TCP until it returns.
    pub transport_info: TransportInfo,
    /// The number of connections that were opened.
    pub connections: u64,
    /// Bytes that were sent to the node.
    pub sent_bytes: u64,
    /// Bytes that were received from the node.
    pub received_bytes: u64,
}

impl NodeTransport {
    /// Returns whether both are about the same node and transport.
    fn is_like(&self, other: &Self) -> bool {
        self.address == other.address
            && self.transport_info.transport == other.transport_info.transport
    }

    fn add(&mut self, other: &Self) {
        let fallback = &mut self.transport_info.fallback;
        *fallback = fallback.take().or_else(|| other.transport_info.fallback.clone());
        self.connections += other.connections;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
    }
}

/// How a node can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Way {
    /// The cluster has not announced this address. It may be that of a module.
    Unknown,
    /// The node has no RDMA endpoint that is known.
    Engine { id: String },
    /// The node's module accepts RDMA at these addresses.
    Rdma { id: String, endpoints: Vec<Host> },
}

/// An address of the engine, as the cluster announces it: host and port.
type Address = (String, u16);

#[derive(Debug, Default)]
pub(super) struct Directory {
    ids: BTreeMap<Address, String>,
    /// The RDMA endpoints of each node, by its id.
    endpoints: BTreeMap<String, Vec<Host>>,
    used: BTreeMap<(Address, String), Used>,
}

#[derive(Debug)]
struct Used {
    /// The observer of the last connection.
    observer: TransportObserver,
    /// Why the last connection was opened over TCP, if its session does not know that.
    fallback: Option<Fallback>,
    connections: u64,
    traffic: Arc<Traffic>,
}

impl Directory {
    /// Returns how a node can be reached.
    pub(super) fn way_to(&self, host: &Host) -> Way {
        let Some(id) = self.ids.get(&key(host)).cloned() else { return Way::Unknown };
        match self.endpoints.get(&id) {
            Some(endpoints) if !endpoints.is_empty() => {
                Way::Rdma { id, endpoints: endpoints.clone() }
            }
            _ => Way::Engine { id },
        }
    }

    /// Returns the RDMA endpoints of all nodes.
    pub(super) fn all_endpoints(&self) -> Vec<Host> {
        self.endpoints.values().flatten().cloned().collect()
    }

    /// Records a reply to CLUSTER SLOTS. Nodes that are no longer in it are forgotten.
    pub(super) fn note_slots(&mut self, slots: &Value, from: &Host) {
        let Value::Array(ranges) = slots else { return };
        let nodes = ranges.iter().filter_map(|range| match range {
            Value::Array(range) => range.get(2..),
            _ => None,
        });
        let named = nodes.flatten().filter_map(|node| match node {
            Value::Array(node) => named_node(node, from),
            _ => None,
        });
        let ids: BTreeMap<_, _> = named.collect();
        if !ids.is_empty() {
            self.ids = ids;
            self.endpoints.retain(|id, _| self.ids.values().any(|known| known == id));
        }
    }

    /// Records a reply to FERRITE ENDPOINTS. A node without the module replies with an error, which
    /// changes nothing. The reply of a module lists all nodes whose modules it has heard of.
    pub(super) fn note_endpoints(&mut self, reply: &Value, from: &Host) {
        let Some(rows) = parse_endpoints(reply, from) else { return };
        self.endpoints.clear();
        for Row { id, endpoint } in rows {
            self.endpoints.entry(id).or_default().extend(endpoint);
        }
    }

    /// Records a connection to a node, and returns the counters for its bytes.
    pub(super) fn note_connecting(
        &mut self,
        host: &Host,
        observer: TransportObserver,
        fallback: Option<Fallback>,
    ) -> Arc<Traffic> {
        let by_transport = (key(host), observer.transport().to_string());
        let new = || Used {
            observer: observer.clone(),
            fallback: None,
            connections: 0,
            traffic: Arc::default(),
        };
        let used = self.used.entry(by_transport).or_insert_with(new);
        (used.observer, used.fallback) = (observer, fallback);
        used.connections += 1;
        Arc::clone(&used.traffic)
    }

    /// Records why a connection stays on TCP.
    pub(super) fn note_fallback(
        &mut self,
        host: &Host,
        transport: SessionTransport,
        fallback: Fallback,
    ) {
        if let Some(used) = self.used.get_mut(&(key(host), transport.to_string())) {
            used.fallback = Some(fallback);
        }
    }

    /// Returns what was exchanged with each node over each transport.
    pub(super) fn transports(&self) -> Vec<NodeTransport> {
        let mut listed: Vec<NodeTransport> = Vec::new();
        for ((address, _), used) in &self.used {
            let mut transport_info = TransportInfo::now(&used.observer);
            transport_info.fallback = transport_info.fallback.or_else(|| used.fallback.clone());
            let entry = NodeTransport {
                address: Host { name: address.0.clone(), port: Some(address.1) }.to_string(),
                node: self.ids.get(address).cloned(),
                transport_info,
                connections: used.connections,
                sent_bytes: used.traffic.sent_bytes.load(Ordering::Relaxed),
                received_bytes: used.traffic.received_bytes.load(Ordering::Relaxed),
            };
            // Connections that were opened over different transports may use the same one by now.
            match listed.iter_mut().find(|earlier| earlier.is_like(&entry)) {
                Some(earlier) => earlier.add(&entry),
                None => listed.push(entry),
            }
        }
        listed
    }
}

/// Returns the RDMA endpoints of the node with the id in `my_id`, a reply to CLUSTER MYID, from its
/// own reply to FERRITE ENDPOINTS.
pub(super) fn own_endpoints(my_id: &Value, reply: &Value, from: &Host) -> Vec<Host> {
    let mut rows = parse_endpoints(reply, from).unwrap_or_default();
    rows.retain(|row| Some(row.id.as_str()) == text(my_id));
    rows.into_iter().filter_map(|row| row.endpoint).collect()
}

fn key(host: &Host) -> Address {
    (host.name.clone(), host.port_or_default())
}

/// Puts the host that was asked in place of an empty, null or wildcard host in a reply to CLUSTER
/// SLOTS: redis-rs may take the reply for that of another node. Leaves out nodes whose host is
/// invalid, to which redis-rs would connect.
pub(super) fn complete_slots(slots: &mut Value, from: &Host) {
    let Value::Array(ranges) = slots else { return };
    for range in ranges {
        let Value::Array(range) = range else { continue };
        let mut place = 0;
        range.retain_mut(|part| {
            place += 1;
            // The first two parts are slots.
            place <= 2 || complete_node(part, from)
        });
    }
}

/// Completes the host of a node, and returns whether it is valid.
fn complete_node(node: &mut Value, from: &Host) -> bool {
    let Value::Array(node) = node else { return false };
    let Some(name) = node.first_mut() else { return false };
    let Some(host) = host_of(name, from) else { return false };
    *name = Value::BulkString(host.into());
    true
}

/// Returns the host of a node in a reply to CLUSTER SLOTS: see [`node_host`].
fn host_of(name: &Value, from: &Host) -> Option<String> {
    node_host(text_or_null(name)?, &from.name).map(ToOwned::to_owned)
}

/// Returns address and id of a node in a reply to CLUSTER SLOTS.
fn named_node(node: &[Value], from: &Host) -> Option<(Address, String)> {
    let [name, Value::Int(port), id, ..] = node else { return None };
    let address = (host_of(name, from)?, u16::try_from(*port).ok()?);
    Some((address, text(id)?.to_owned()))
}

/// A row of FERRITE ENDPOINTS. Only RDMA endpoints are of interest.
struct Row {
    id: String,
    endpoint: Option<Host>,
}

/// Reads a reply to FERRITE ENDPOINTS; `None` if it is an error.
fn parse_endpoints(reply: &Value, from: &Host) -> Option<Vec<Row>> {
    let Value::Array(rows) = reply else { return None };
    Some(rows.iter().filter_map(|row| parse_row(row, from)).collect())
}

fn parse_row(row: &Value, from: &Host) -> Option<Row> {
    let field = |wanted: &str| match row {
        Value::Map(fields) => {
            fields.iter().find(|(name, _)| text(name) == Some(wanted)).map(|(_, value)| value)
        }
        // RESP2 has no maps.
        Value::Array(words) => {
            let mut pairs = words.chunks_exact(2);
            pairs.find(|pair| text(&pair[0]) == Some(wanted)).map(|pair| &pair[1])
        }
        _ => None,
    };
    let id = text(field("node")?)?.to_owned();
    let name = endpoint_host(text_or_null(field("address")?)?, &from.name);
    let Value::Int(port) = field("port")? else { return None };
    let port = Some(u16::try_from(*port).ok()?);
    let has_rdma = text(field("transport")?)? == "rdma";
    let endpoint = name.filter(|_| has_rdma).map(|name| Host { name, port });
    Some(Row { id, endpoint })
}

/// Returns a text, or `Some(None)` for a null.
fn text_or_null(value: &Value) -> Option<Option<&str>> {
    match value {
        Value::Nil => Some(None),
        value => text(value).map(Some),
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

/// Returns whether a transport is RDMA.
pub(super) fn is_rdma(transport: SessionTransport) -> bool {
    matches!(transport, SessionTransport::FerriteRdma | SessionTransport::ValkeyRdma)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, port: u16) -> Host {
        Host { name: name.into(), port: Some(port) }
    }

    fn parsed(resp: &str) -> Value {
        redis::parse_redis_value(resp.replace(' ', "\r\n").as_bytes()).expect("RESP")
    }

    /// Two nodes: `a` at 10.0.0.1:1, `b` at the host that was asked.
    fn slots() -> Value {
        parsed("*2 *3 :0 :9 *3 $8 10.0.0.1 :1 $1 a *3 :10 :16383 *4 $0  :2 $1 b *0 ")
    }

    fn row(id: &str, address: &str, port: u16, transport: &str) -> Value {
        let bulk = |text: &str| Value::BulkString(text.into());
        Value::Array(vec![
            bulk("node"),
            bulk(id),
            bulk("address"),
            bulk(address),
            bulk("port"),
            Value::Int(port.into()),
            bulk("transport"),
            bulk(transport),
            bulk("age"),
            Value::Int(3),
        ])
    }

    fn as_map(row: Value) -> Value {
        let Value::Array(words) = row else { panic!("expected a row in the form of RESP2") };
        let pairs = words.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
        Value::Map(pairs.collect())
    }

    #[test]
    fn finds_endpoints_by_node_id() {
        let asked = host("10.0.0.2", 2);
        let mut directory = Directory::default();
        assert_eq!(directory.way_to(&asked), Way::Unknown);
        directory.note_slots(&slots(), &asked);
        assert_eq!(directory.way_to(&asked), Way::Engine { id: "b".into() });
        let rows = vec![
            as_map(row("b", "", 6380, "rdma")),
            row("a", "10.9.0.1", 6380, "rdma"),
            row("a", "10.0.0.1", 6380, "tcp"),
            row("gone", "10.9.0.9", 6380, "rdma"),
            Value::Nil,
        ];
        let reply = Value::Array(rows);
        directory.note_endpoints(&reply, &asked);
        let endpoints = vec![host("10.9.0.1", 6380)];
        assert_eq!(directory.way_to(&host("10.0.0.1", 1)), Way::Rdma { id: "a".into(), endpoints });
        let endpoints = vec![host("10.0.0.2", 6380)];
        let my_id = |id: &str| Value::BulkString(id.into());
        assert_eq!(own_endpoints(&my_id("b"), &reply, &asked), endpoints);
        assert!(own_endpoints(&my_id("c"), &reply, &asked).is_empty(), "node c is not listed");
        // The host that was asked may have a name.
        let named = own_endpoints(&my_id("b"), &reply, &host("db.example", 2));
        assert_eq!(named, [host("db.example", 6380)]);
        assert_eq!(directory.way_to(&asked), Way::Rdma { id: "b".into(), endpoints });
        // A node without the module changes nothing.
        let error = parsed("-ERR unknown command ");
        directory.note_endpoints(&error, &asked);
        assert!(matches!(directory.way_to(&asked), Way::Rdma { .. }));
        assert!(own_endpoints(&my_id("b"), &error, &asked).is_empty());
        assert!(own_endpoints(&error, &reply, &asked).is_empty());
        directory.note_slots(&slots(), &asked);
        assert_eq!(directory.endpoints.len(), 2, "the node that left is forgotten");
    }

    #[test]
    fn completes_the_hosts_of_slots() {
        let mut slots = parsed(
            "*2 *3 :0 :9 *3 $8 10.0.0.1 :1 $1 a *5 :10 :19 *3 $0  :2 $1 b *3 $-1 :3 $1 c \
             *3 $7 0.0.0.0 :4 $1 d ",
        );
        complete_slots(&mut slots, &host("10.0.0.2", 2));
        let expected = parsed(
            "*2 *3 :0 :9 *3 $8 10.0.0.1 :1 $1 a *5 :10 :19 *3 $8 10.0.0.2 :2 $1 b \
             *3 $8 10.0.0.2 :3 $1 c *3 $8 10.0.0.2 :4 $1 d ",
        );
        assert_eq!(slots, expected);
        let mut odd = parsed("*2 *1 :0 $-1 ");
        complete_slots(&mut odd, &host("10.0.0.2", 2));
        assert_eq!(odd, parsed("*2 *1 :0 $-1 "));
    }

    #[test]
    fn leaves_out_nodes_with_invalid_hosts() {
        let asked = host("10.0.0.2", 2);
        let mut slots = parsed(
            "*2 *5 :0 :9 *3 $1 ? :1 $1 a *3 $8 10.0.0.1 :2 $1 b *3 $3 a\x1bb :3 $1 c \
             *4 :10 :19 *3 $3 a/b :4 $1 d *3 $3 h\u{e9} :5 $1 e ",
        );
        let mut directory = Directory::default();
        directory.note_slots(&slots, &asked);
        let known: Vec<_> = directory.ids.values().collect();
        assert_eq!(known, ["b"]);
        complete_slots(&mut slots, &asked);
        assert_eq!(slots, parsed("*2 *3 :0 :9 *3 $8 10.0.0.1 :2 $1 b *2 :10 :19 "));
    }

    #[test]
    fn ignores_replies_that_make_no_sense() {
        let mut directory = Directory::default();
        let asked = host("10.0.0.2", 2);
        for reply in ["$-1 ", "*0 ", "*1 *3 :0 :9 *2 $1 a :1 ", "*1 *3 :0 :9 *3 $1 a :99999 $1 x "]
        {
            directory.note_slots(&parsed(reply), &asked);
        }
        assert!(directory.ids.is_empty());
        let rows =
            vec![row("a", "10.9.0.1:1", 6380, "rdma"), Value::Int(1), row("a", "host", 1, "rdma")];
        directory.note_endpoints(&Value::Array(rows), &asked);
        assert_eq!(directory.endpoints["a"], []);
    }
}
