//! What a client of a cluster reads: redirects, CLUSTER SLOTS, FERRITE ENDPOINTS, and the slot of a
//! key.
//!
//! Replies come from servers, which are not trusted: a part without the expected form is skipped.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use crate::resp::Value;

/// The number of slots of a cluster.
pub const SLOTS: u16 = 16_384;
/// The longest name of a host in DNS, with a little room for the scope of an address.
const HOST_BYTES_MAX: usize = 255;

/// Returns the slot of a key: the CRC16 (XMODEM) of its hash tag, or of the whole key without one.
///
/// ```
/// use ferrite_proto::cluster::slot_of;
///
/// assert_eq!(slot_of(b"foo"), 12182);
/// assert_eq!(slot_of(b"{foo}bar"), 12182);
/// ```
#[must_use]
pub fn slot_of(key: &[u8]) -> u16 {
    const POLYNOMIAL: u16 = 0x1021;
    let crc = hash_tag(key).iter().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ POLYNOMIAL }
        })
    });
    crc % SLOTS
}

/// Returns the part of a key that decides its slot: the text between the first `{` and the next
/// `}`, or the whole key if that text is missing or empty.
fn hash_tag(key: &[u8]) -> &[u8] {
    let Some(open) = key.iter().position(|byte| *byte == b'{') else { return key };
    let behind = &key[open + 1..];
    match behind.iter().position(|byte| *byte == b'}') {
        Some(1..) => behind.split(|byte| *byte == b'}').next().unwrap_or(key),
        _ => key,
    }
}

/// A reply of a node that does not serve the slot of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// Whether only this command must be sent to the other node, after ASKING. Otherwise the slot
    /// has moved.
    pub is_ask: bool,
    /// The slot.
    pub slot: u16,
    /// The host of the other node. `None` for the host of the node that has replied.
    pub host: Option<String>,
    /// The port of the other node.
    pub port: u16,
}

impl Redirect {
    /// Reads an error reply such as `MOVED 3999 10.0.0.1:6379`. Returns `None` for any other error,
    /// and for a malformed redirect, such as one whose host has a control character.
    #[must_use]
    pub fn parse(error: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(error).ok()?.split(' ');
        let is_ask = match words.next()? {
            "MOVED" => false,
            "ASK" => true,
            _ => return None,
        };
        let slot = words.next()?.parse().ok().filter(|slot| *slot < SLOTS)?;
        let (host, port) = words.next()?.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let host = match host {
            "" | "?" => None,
            host => Some(host.to_owned()).filter(|host| is_host(host))?.into(),
        };
        Some(Self { is_ask, slot, host, port })
    }
}

/// Returns whether a text may be the name or the address of a host: a client prints it, and
/// connects to it. An IPv6 address may have a scope, such as `fe80::1%eth0`.
///
/// ```
/// use ferrite_proto::cluster::is_host;
///
/// assert!(is_host("db.example") && is_host("2001:db8::1"));
/// assert!(!is_host("") && !is_host("?") && !is_host("a/b"));
/// ```
#[must_use]
pub fn is_host(text: &str) -> bool {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte);
    (1..=HOST_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_known)
}

/// Returns the host of a node in a reply to CLUSTER SLOTS of the host `asked`. A null, an empty
/// name or a wildcard address stands for the host that was asked. Returns `None` if the host is
/// unknown (`?`) or invalid.
///
/// ```
/// use ferrite_proto::cluster::node_host;
///
/// assert_eq!(node_host(Some("10.0.0.1"), "db.example"), Some("10.0.0.1"));
/// assert_eq!(node_host(None, "db.example"), Some("db.example"));
/// assert_eq!(node_host(Some("?"), "db.example"), None);
/// ```
#[must_use]
pub fn node_host<'a>(name: Option<&'a str>, asked: &'a str) -> Option<&'a str> {
    let name = name.unwrap_or_default();
    let is_wildcard = name.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified());
    if name.is_empty() || is_wildcard {
        Some(asked)
    } else {
        Some(name).filter(|name| is_host(name))
    }
}

/// Returns the host of a row in a reply to FERRITE ENDPOINTS of the host `asked`, which may be a
/// name. A node that has never met another one (CLUSTER MEET) does not know its own address: a null
/// or an empty address stands for the host that was asked. Returns `None` if the address is
/// invalid.
///
/// ```
/// use ferrite_proto::cluster::endpoint_host;
///
/// assert_eq!(endpoint_host(Some(""), "db.example"), Some("db.example".into()));
/// assert_eq!(endpoint_host(Some("db2.example"), "db.example"), None);
/// ```
#[must_use]
pub fn endpoint_host(address: Option<&str>, asked: &str) -> Option<String> {
    match address {
        None | Some("") => Some(asked.to_owned()),
        Some(address) => address.parse::<IpAddr>().ok().map(|ip| ip.to_string()),
    }
}

/// A node in CLUSTER SLOTS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The node's id.
    pub id: String,
    /// The host of the engine.
    pub host: String,
    /// The port of the engine.
    pub port: u16,
}

/// The slots of a cluster and the nodes that serve them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotMap {
    /// The first and last slot of each range, and its nodes: the primary, then replicas.
    ranges: Vec<(u16, u16, Vec<Node>)>,
}

impl SlotMap {
    /// Reads the reply to CLUSTER SLOTS that came from the host `asked`. Returns `None` if the
    /// reply is not an array, for example an error. Malformed ranges and nodes are skipped.
    #[must_use]
    pub fn parse(reply: &Value<'_>, asked: &str) -> Option<Self> {
        let Value::Array(ranges) = reply else { return None };
        let range = |range: &Value<'_>| {
            let Value::Array(parts) = range else { return None };
            let [Value::Integer(first), Value::Integer(last), nodes @ ..] = &parts[..] else {
                return None;
            };
            let nodes: Vec<_> = nodes.iter().filter_map(|node| parse_node(node, asked)).collect();
            let [first, last] = [*first, *last].map(|slot| u16::try_from(slot).ok());
            (!nodes.is_empty()).then_some((first?, last?, nodes))
        };
        Some(Self { ranges: ranges.iter().filter_map(range).collect() })
    }

    /// Returns the primary of a slot.
    #[must_use]
    pub fn primary_of(&self, slot: u16) -> Option<&Node> {
        let range = self.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        range.and_then(|(_, _, nodes)| nodes.first())
    }

    /// Returns the node with this host and port.
    #[must_use]
    pub fn node_at(&self, host: &str, port: u16) -> Option<&Node> {
        let mut nodes = self.ranges.iter().flat_map(|(_, _, nodes)| nodes);
        nodes.find(|node| node.host == host && node.port == port)
    }

    /// Returns each primary once, in the order of CLUSTER SLOTS.
    #[must_use]
    pub fn primaries(&self) -> Vec<&Node> {
        let primaries = self.ranges.iter().filter_map(|(_, _, nodes)| nodes.first());
        let mut known = HashSet::new();
        primaries.filter(|node| known.insert(node.id.as_str())).collect()
    }

    /// Returns the place of each slot's primary in [`SlotMap::primaries`], by slot; `None` for a
    /// slot that no node serves. If ranges overlap, the first counts.
    #[must_use]
    pub fn primary_places(&self) -> Vec<Option<usize>> {
        let places: HashMap<&str, usize> =
            self.primaries().iter().enumerate().map(|(at, node)| (node.id.as_str(), at)).collect();
        let mut by_slot = vec![None; usize::from(SLOTS)];
        // Each slot is visited once: a hostile reply may repeat ranges without end.
        let mut free: BTreeSet<u16> = (0..SLOTS).collect();
        for (first, last, nodes) in &self.ranges {
            let place = nodes.first().and_then(|node| places.get(node.id.as_str()));
            let mut next = *first;
            while let Some(slot) = free.range(next..).next().filter(|slot| *slot <= last).copied() {
                free.remove(&slot);
                by_slot[usize::from(slot)] = place.copied();
                next = slot;
            }
        }
        by_slot
    }
}

fn parse_node(node: &Value<'_>, asked: &str) -> Option<Node> {
    let Value::Array(parts) = node else { return None };
    let [host, Value::Integer(port), id, ..] = &parts[..] else { return None };
    let host = node_host(text_or_null(host)?, asked)?.to_owned();
    Some(Node { id: text(id)?.to_owned(), host, port: u16::try_from(*port).ok()? })
}

/// Reads the RDMA endpoints of a node from a reply to FERRITE ENDPOINTS of the node at the host
/// `asked`: host and port of each. A node without the module replies with an error, and has none.
#[must_use]
pub fn rdma_endpoints(reply: &Value<'_>, node: &str, asked: &str) -> Vec<(String, u16)> {
    let Value::Array(rows) = reply else { return Vec::new() };
    let endpoint = |row: &Value<'_>| {
        if text(&field(row, "node")?)? != node || text(&field(row, "transport")?)? != "rdma" {
            return None;
        }
        let host = endpoint_host(text_or_null(&field(row, "address")?)?, asked)?;
        let Value::Integer(port) = field(row, "port")? else { return None };
        Some((host, u16::try_from(port).ok()?))
    };
    rows.iter().filter_map(endpoint).collect()
}

/// Returns a field of a row, which is a map, or a list of names and values in RESP2.
fn field<'a>(row: &Value<'a>, wanted: &str) -> Option<Value<'a>> {
    match row {
        Value::Map(fields) => {
            fields.iter().find(|(name, _)| text(name) == Some(wanted)).map(|(_, value)| value)
        }
        Value::Array(words) => {
            let mut pairs = words.chunks_exact(2);
            pairs.find(|pair| text(&pair[0]) == Some(wanted)).map(|pair| &pair[1])
        }
        _ => None,
    }
    .cloned()
}

/// Returns a text, or `Some(None)` for a null.
fn text_or_null<'a>(value: &Value<'a>) -> Option<Option<&'a str>> {
    match value {
        Value::Null => Some(None),
        value => text(value).map(Some),
    }
}

fn text<'a>(value: &Value<'a>) -> Option<&'a str> {
    match value {
        Value::Bulk(text) | Value::Simple(text) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Returns the bytes of a reply. Its lines are separated by spaces.
    fn resp(text: &str) -> Vec<u8> {
        text.replace(' ', "\r\n").into_bytes()
    }

    #[test]
    fn slots_are_those_of_the_engines() {
        // From CLUSTER KEYSLOT of Redis 7.0.
        for (key, slot) in [
            ("", 0),
            ("foo", 12182),
            ("123456789", 12739),
            ("{user1000}.following", 3443),
            ("foo{}{bar}", 8363),
            ("foo{{bar}}zap", 4015),
            ("foo{bar}{zap}", 5061),
            ("foo{bar", 15278),
        ] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    #[test]
    fn reads_redirects() {
        let redirect = |is_ask, slot, host: Option<&str>, port| {
            Some(Redirect { is_ask, slot, host: host.map(Into::into), port })
        };
        for (text, expected) in [
            ("MOVED 3999 10.0.0.1:6381", redirect(false, 3999, Some("10.0.0.1"), 6381)),
            ("ASK 1 db.example:7", redirect(true, 1, Some("db.example"), 7)),
            ("MOVED 1 :7", redirect(false, 1, None, 7)),
            ("MOVED 1 ?:7", redirect(false, 1, None, 7)),
            ("MOVED 1 2001:db8::1:7", redirect(false, 1, Some("2001:db8::1"), 7)),
            ("MOVED 1 [2001:db8::1]:7", redirect(false, 1, Some("2001:db8::1"), 7)),
            ("MOVED 1 fe80::1%eth0:7", redirect(false, 1, Some("fe80::1%eth0"), 7)),
            ("MOVED 3999 :6381", redirect(false, 3999, None, 6381)),
            ("MOVED 1 \x1b]0;evil\x07:6379", None),
            ("MOVED 1 a\r:7", None),
            ("MOVED 1 a\u{9b}:7", None),
            ("MOVED 1 h\u{f6}st:7", None),
            ("MOVED 1 a/b:7", None),
            ("MOVED 1 a@b:7", None),
            ("MOVED 1 a,b:7", None),
            ("MOVED 1 a:0", None),
            ("MOVED 16384 a:7", None),
            ("MOVED 1 a", None),
            ("MOVED 1 a:99999", None),
            ("MOVED", None),
            ("ERR unknown command", None),
        ] {
            assert_eq!(Redirect::parse(text.as_bytes()), expected, "{text}");
        }
        assert_eq!(Redirect::parse(b"MOVED 1 \xff:7"), None);
        let long = format!("MOVED 1 {}:7", "a".repeat(HOST_BYTES_MAX + 1));
        assert_eq!(Redirect::parse(long.as_bytes()), None);
    }

    #[test]
    fn reads_the_slots() {
        let bytes = resp(
            "*3 *4 :0 :9 *3 $1 h :1 $1 a *4 $1 h :2 $1 b *0 *3 :10 :19 *3 $-1 :3 $1 c \
             *3 :20 :16383 *3 $1 h :1 $1 a ",
        );
        let map =
            SlotMap::parse(&Value::parse(&bytes).expect("valid RESP"), "asked").expect("slots");
        let id = |slot| map.primary_of(slot).map(|node| node.id.as_str());
        assert_eq!((id(9), id(10), id(16383)), (Some("a"), Some("c"), Some("a")));
        assert_eq!(map.primaries().iter().map(|node| &node.id).collect::<Vec<_>>(), ["a", "c"]);
        let places = map.primary_places();
        assert_eq!(places.len(), 16384);
        let at = |slot: usize| places[slot];
        assert_eq!(
            [at(0), at(9), at(10), at(19), at(20), at(16383)].map(Option::unwrap),
            [0, 0, 1, 1, 0, 0]
        );
        assert_eq!(map.node_at("h", 2).map(|node| node.id.as_str()), Some("b"));
        assert_eq!(map.node_at("asked", 3).map(|node| node.id.as_str()), Some("c"));
        assert_eq!(SlotMap::parse(&Value::Error(b"ERR"), "asked"), None);
        for odd in ["*1 :1 ", "*1 *2 :0 :9 ", "*1 *3 :0 :-1 *3 $1 h :1 $1 a ", "*1 *3 :0 :9 *1 :1 "]
        {
            let bytes = resp(odd);
            let map = SlotMap::parse(&Value::parse(&bytes).expect("valid RESP"), "asked");
            assert_eq!(map, Some(SlotMap::default()), "{odd}");
        }
    }

    /// No slot is visited for each of many equal ranges, although a slot is free to the end.
    #[test]
    fn repeated_ranges_cost_little() {
        let node = |id: &str| Node { id: id.into(), host: "h".into(), port: 1 };
        let mut ranges = vec![(1, 9, vec![node("a")]), (9, 8, vec![node("c")])];
        ranges.resize(200_000, (1, u16::MAX, vec![node("b")]));
        let start = Instant::now();
        let places = SlotMap { ranges }.primary_places();
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_eq!(places.len(), 16384);
        assert_eq!(
            [0, 1, 9, 10, 16383].map(|slot: usize| places[slot]),
            [None, Some(0), Some(0), Some(2), Some(2)]
        );
    }

    #[test]
    fn reads_the_rdma_endpoints_of_a_node() {
        let row = |node: &str, address: &str, transport: &str| {
            format!(
                "*10 $4 node ${} {node} $7 address ${} {address} $4 port :6380 $9 transport ${} \
                 {transport} $3 age :1 ",
                node.len(),
                address.len(),
                transport.len()
            )
        };
        let rows = [
            row("a", "10.0.0.1", "rdma"),
            row("a", "10.0.0.2", "tcp"),
            row("b", "", "rdma"),
            row("c", "no-address", "rdma"),
            ":1 ".into(),
        ];
        let bytes = resp(&format!("*{} {}", rows.len(), rows.concat()));
        let reply = Value::parse(&bytes).expect("valid RESP");
        let of = |node| rdma_endpoints(&reply, node, "10.0.0.9");
        assert_eq!(of("a"), [("10.0.0.1".into(), 6380)]);
        assert_eq!(of("b"), [("10.0.0.9".into(), 6380)]);
        // The host that was asked may be a name.
        let named = rdma_endpoints(&reply, "b", "db.example");
        assert_eq!(named, [("db.example".into(), 6380)]);
        assert_eq!(of("c"), []);
        assert_eq!(rdma_endpoints(&Value::Error(b"ERR unknown command"), "a", "10.0.0.9"), []);
    }
}
