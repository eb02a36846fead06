//! A client of a cluster that keeps what was acknowledged, so that it can tell which writes are
//! lost.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_proto::cluster::slot_of;
use ferrite_testkit::TIMEOUT;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::resp::{Connection, Response, encode, text_of};

use crate::agent::harness::PASSWORD;

/// The number of keys of a client.
const KEYS: usize = 48;
/// The number of acknowledgements of a key that are kept.
const KEPT: usize = 1000;
const PAUSE: Duration = Duration::from_millis(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Replies with which a node refuses a write that it, or another node, may accept later.
const REFUSALS: [&str; 5] = ["-TRYAGAIN", "-CLUSTERDOWN", "-LOADING", "-MASTERDOWN", "-READONLY"];

/// Writes that were acknowledged, and that the cluster does not have any more.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) slot: u16,
    pub(crate) writes: usize,
    /// When the first of them was acknowledged.
    pub(crate) since: Instant,
}

/// A key to which one client writes rising numbers.
struct Entry {
    key: String,
    /// The address of the node that had the key last.
    node: String,
    /// The last number that was sent.
    sent: u64,
    /// The acknowledged numbers, in order.
    acknowledged: VecDeque<(u64, Instant)>,
}

/// Writes one key after another, and keeps which writes were acknowledged.
pub(crate) struct Ledger {
    /// The host of the client.
    from: usize,
    connections: BTreeMap<String, Connection<TcpStream>>,
    entries: Vec<Entry>,
    pub(crate) acknowledged: u64,
    /// The longest time between two acknowledgements.
    pub(crate) longest_gap: Duration,
}

impl Ledger {
    /// Prepares a client on a host. It asks the node at this address first.
    pub(crate) fn new(from: usize, node: &str) -> Self {
        let entry = |number| Entry {
            key: format!("written by {from}:{number}"),
            node: node.into(),
            sent: 0,
            acknowledged: VecDeque::new(),
        };
        Self {
            from,
            connections: BTreeMap::new(),
            entries: (0..KEYS).map(entry).collect(),
            acknowledged: 0,
            longest_gap: Duration::ZERO,
        }
    }

    /// Writes until the flag is set.
    pub(crate) fn write_until(&mut self, hosts: &Hosts, must_stop: &AtomicBool) {
        let mut last = Instant::now();
        for at in (0..KEYS).cycle() {
            if must_stop.load(Ordering::Relaxed) {
                return;
            }
            self.write(hosts, at);
            self.longest_gap = self.longest_gap.max(last.elapsed());
            last = Instant::now();
            std::thread::sleep(PAUSE);
        }
    }

    /// Writes the next number to a key until a node acknowledges it. A write whose connection ends
    /// may have been executed or not. The next one then has a higher number.
    fn write(&mut self, hosts: &Hosts, at: usize) {
        let key = self.entries[at].key.clone();
        let number = Cell::new(0);
        let reply = self.ask(hosts, at, |entry| {
            entry.sent += 1;
            number.set(entry.sent);
            vec!["SET".into(), key.clone(), entry.sent.to_string()]
        });
        assert_eq!(reply, "+OK", "{key}");
        let acknowledged = &mut self.entries[at].acknowledged;
        acknowledged.push_back((number.get(), Instant::now()));
        if acknowledged.len() > KEPT {
            acknowledged.pop_front();
        }
        self.acknowledged += 1;
    }

    /// Reads all keys. Returns the writes that are lost, and forgets them.
    pub(crate) fn lost(&mut self, hosts: &Hosts) -> Vec<Lost> {
        let mut all = Vec::new();
        for at in 0..KEYS {
            let reply = self.ask(hosts, at, |entry| vec!["GET".into(), entry.key.clone()]);
            let number = if reply == "$-1" { 0 } else { reply.parse().expect("a number") };
            let entry = &mut self.entries[at];
            assert!(number <= entry.sent, "{} has {number} of {}", entry.key, entry.sent);
            let acknowledged = &mut entry.acknowledged;
            let first = acknowledged.partition_point(|(acknowledged, _)| *acknowledged <= number);
            let lost: Vec<_> = acknowledged.drain(first..).collect();
            if let Some((_, since)) = lost.first() {
                let slot = slot_of(entry.key.as_bytes());
                all.push(Lost { slot, writes: lost.len(), since: *since });
            }
        }
        all
    }

    /// Deletes the first key.
    pub(crate) fn delete(&mut self, hosts: &Hosts) {
        let reply = self.ask(hosts, 0, |entry| vec!["DEL".into(), entry.key.clone()]);
        assert_eq!(reply, ":1", "{}", self.entries[0].key);
    }

    /// Sends a command about a key to the node that has it, until a node executes it. Returns the
    /// reply. `command` makes the words for each attempt.
    fn ask(
        &mut self,
        hosts: &Hosts,
        at: usize,
        command: impl Fn(&mut Entry) -> Vec<String>,
    ) -> String {
        let (begun, mut asked) = (Instant::now(), None::<String>);
        let mut last = "no connection".to_owned();
        while begun.elapsed() < TIMEOUT {
            let words = command(&mut self.entries[at]);
            let node = asked.clone().unwrap_or_else(|| self.entries[at].node.clone());
            let reply = self.send(hosts, &node, asked.take().is_some(), &words);
            let text = match &reply {
                Some(reply) => String::from_utf8_lossy(reply).trim_end().to_owned(),
                None => {
                    self.entries[at].node = self.next_node(&node);
                    std::thread::sleep(PAUSE);
                    continue;
                }
            };
            let address = |text: &str| text.rsplit(' ').next().expect("an address").to_owned();
            if text.starts_with("-MOVED ") {
                self.entries[at].node = address(&text);
            } else if text.starts_with("-ASK ") {
                asked = Some(address(&text));
            } else if REFUSALS.iter().any(|refusal| text.starts_with(refusal)) {
                std::thread::sleep(PAUSE);
            } else {
                assert!(!text.starts_with('-'), "{words:?} at {node}: {text}");
                return text_of(&reply.expect("a reply"));
            }
            last = text;
        }
        panic!("no node executes {} within {TIMEOUT:?}: {last}", self.entries[at].key);
    }

    /// Returns the address of another node to ask when a node cannot be reached.
    fn next_node(&self, node: &str) -> String {
        let others = self.connections.range::<str, _>((Bound::Excluded(node), Bound::Unbounded));
        let mut all = others.chain(&self.connections).map(|(address, _)| address.clone());
        all.find(|address| address != node).unwrap_or_else(|| node.to_owned())
    }

    /// Sends a command to a node. Returns `None` if the connection ends before the reply.
    fn send(
        &mut self,
        hosts: &Hosts,
        node: &str,
        is_asking: bool,
        words: &[String],
    ) -> Option<Vec<u8>> {
        if !self.connections.contains_key(node) {
            let connection = self.connect(hosts, node)?;
            self.connections.insert(node.to_owned(), connection);
        }
        let connection = self.connections.get_mut(node).expect("just added");
        let mut bytes = Vec::new();
        if is_asking {
            encode(&["ASKING"], &mut bytes);
        }
        encode(words, &mut bytes);
        connection.send(&bytes);
        let mut reply = connection.receive(TIMEOUT);
        if is_asking && matches!(&reply, Response::Reply(_)) {
            reply = connection.receive(TIMEOUT);
        }
        match reply {
            Response::Reply(reply) => return Some(reply),
            Response::Closed => {}
            // A cut is much shorter.
            Response::Timeout => panic!("{words:?}: no reply of {node} within {TIMEOUT:?}"),
        }
        self.connections.remove(node);
        None
    }

    fn connect(&self, hosts: &Hosts, node: &str) -> Option<Connection<TcpStream>> {
        let address: SocketAddr = node.parse().expect("an address");
        let connect = || TcpStream::connect_timeout(&address, CONNECT_TIMEOUT);
        let socket = hosts.within(self.from, connect).ok()?;
        socket.set_nodelay(true).expect("TCP_NODELAY");
        let mut connection = Connection::over(socket);
        let mut login = Vec::new();
        encode(&["AUTH", PASSWORD], &mut login);
        connection.send(&login);
        let is_in = connection.receive(TIMEOUT) == Response::Reply(b"+OK\r\n".to_vec());
        is_in.then_some(connection)
    }
}
