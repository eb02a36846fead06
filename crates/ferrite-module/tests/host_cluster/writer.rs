//! A client of a cluster that follows redirects and knows the right reply to each command, because
//! only this client writes its keys.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use ferrite_testkit::resp::Client;
use ferrite_testkit::{Random, TIMEOUT};

use super::changes::Slot;
use super::nodes::{Cluster, Port};

/// A command of a writer on one of its own keys.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Increment,
    Set(String),
    Get,
}

/// The state of a writer's keys in one slot.
#[derive(Default)]
struct Expected {
    count: u64,
    value: String,
    /// The node that had the slot last.
    node: usize,
}

pub(crate) struct Writer<'a> {
    cluster: &'a Cluster,
    slots: &'a [Slot],
    name: String,
    port: Port,
    connections: Vec<Option<Client>>,
    expected: Vec<Expected>,
    random: Random,
    /// The number of commands on slots that move which a node has run without ASKING.
    pub(crate) served: u64,
    /// The number of commands which a node has run after ASKING.
    pub(crate) asked: u64,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(cluster: &'a Cluster, slots: &'a [Slot], number: u64, port: Port) -> Self {
        let expected =
            slots.iter().map(|slot| Expected { node: slot.nodes[0], ..Expected::default() });
        let mut writer = Self {
            cluster,
            slots,
            name: format!("{number}"),
            port,
            connections: cluster.nodes.iter().map(|_| None).collect(),
            expected: expected.collect(),
            random: Random::new(number),
            served: 0,
            asked: 0,
        };
        for at in 0..slots.len() {
            writer.follow(at, &Operation::Set("first".into()));
            writer.follow(at, &Operation::Increment);
        }
        writer
    }

    /// Runs a pipeline of commands on each slot, and checks the replies.
    pub(crate) fn round(&mut self) {
        for at in 0..self.slots.len() {
            let operations: Vec<_> = (0..=self.random.below(8)).map(|_| self.pick()).collect();
            let commands: Vec<_> = operations.iter().map(|it| self.words(at, it)).collect();
            let client = self.client(self.expected[at].node);
            client.send(&commands);
            let replies = client.replies(commands.len());
            let mut redirected = Vec::new();
            for (operation, reply) in operations.into_iter().zip(replies) {
                if is_redirect(&reply) {
                    redirected.push(operation);
                } else {
                    self.served += u64::from(self.slots[at].moves);
                    self.check(at, &operation, &reply);
                }
            }
            // A command that was redirected has changed nothing. It runs after those of the
            // pipeline that have run.
            redirected.into_iter().for_each(|operation| self.follow(at, &operation));
        }
    }

    /// Reads every value and increments every counter once more, at the nodes that have them, and
    /// checks the replies.
    pub(crate) fn check_all(&mut self) {
        for at in 0..self.slots.len() {
            self.follow(at, &Operation::Get);
            self.follow(at, &Operation::Increment);
        }
    }

    fn pick(&mut self) -> Operation {
        match self.random.below(3) {
            0 => Operation::Increment,
            1 => {
                // Short and long values: outside clusters, the module reads these differently.
                let value = self.random.below(1 << 30).to_string();
                Operation::Set(value.repeat(if self.random.below(2) == 0 { 1 } else { 60 }))
            }
            _ => Operation::Get,
        }
    }

    fn words(&self, at: usize, operation: &Operation) -> Vec<String> {
        let (tag, name) = (&self.slots[at].tag, &self.name);
        let [counter, key] = ["counter", "key"].map(|kind| format!("{{{tag}}}{kind}{name}"));
        match operation {
            Operation::Increment => vec!["INCR".into(), counter],
            Operation::Set(value) => vec!["SET".into(), key, value.clone()],
            Operation::Get => vec!["GET".into(), key],
        }
    }

    fn check(&mut self, at: usize, operation: &Operation, reply: &[u8]) {
        let expected = &mut self.expected[at];
        let right = match operation {
            Operation::Increment => {
                expected.count += 1;
                format!(":{}\r\n", expected.count)
            }
            Operation::Set(value) => {
                expected.value.clone_from(value);
                "+OK\r\n".into()
            }
            Operation::Get => {
                format!("${}\r\n{}\r\n", expected.value.len(), expected.value)
            }
        };
        let reply = String::from_utf8_lossy(reply);
        let (slot, port) = (&self.slots[at].number, self.port);
        assert_eq!(reply, right, "{operation:?} of {} in slot {slot}, {port:?} port", self.name);
    }

    fn client(&mut self, node: usize) -> &mut Client {
        let (cluster, port) = (self.cluster, self.port);
        self.connections[node].get_or_insert_with(|| cluster.nodes[node].connect(port))
    }

    /// Runs a command at the node that serves it, and checks the reply.
    fn follow(&mut self, at: usize, operation: &Operation) {
        let words = self.words(at, operation);
        let slot = &self.slots[at];
        let changes = || slot.changes.read().unwrap_or_else(PoisonError::into_inner);
        let started = Instant::now();
        while started.elapsed() < TIMEOUT {
            let before = *changes();
            let node = self.expected[at].node;
            let mut reply = self.client(node).raw(&words);
            let mut is_asked = false;
            if let Some(other) = self.redirect(&reply, "-ASK ") {
                let now = changes();
                if *now != before {
                    continue;
                }
                let client = self.client(other);
                client.send(&[vec!["ASKING".to_owned()], words.clone()]);
                assert_eq!(client.next_reply().as_deref(), Some(&b"+OK\r\n"[..]));
                reply = client.next_reply().expect("a reply");
                is_asked = true;
            }
            if !is_redirect(&reply) {
                if is_asked {
                    self.asked += 1;
                } else {
                    self.served += u64::from(slot.moves);
                }
                return self.check(at, operation, &reply);
            }
            match self.redirect(&reply, "-MOVED ") {
                Some(other) => self.expected[at].node = other,
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        panic!("no node serves {operation:?} in slot {}", slot.number);
    }

    /// Returns the node in a redirect that begins with `kind`.
    fn redirect(&self, reply: &[u8], kind: &str) -> Option<usize> {
        let reply = std::str::from_utf8(reply).ok()?.strip_prefix(kind)?;
        Some(self.cluster.by_port(reply.trim_end().rsplit(':').next()?))
    }
}

/// Returns whether the node has not run the command, and another node or a later attempt may.
fn is_redirect(reply: &[u8]) -> bool {
    [&b"-MOVED "[..], b"-ASK ", b"-TRYAGAIN", b"-CLUSTERDOWN"]
        .iter()
        .any(|kind| reply.starts_with(kind))
}
