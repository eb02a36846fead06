//! Changes of a running cluster: slots that move, and failovers.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use ferrite_testkit::wait::comes_true;

use super::nodes::{Cluster, Node};

/// A slot with the keys of a hash tag.
pub(crate) struct Slot {
    pub(crate) tag: String,
    pub(crate) number: u16,
    /// The nodes among which the slot moves, or a primary and its replica that change their roles.
    /// The slot starts at the first.
    pub(crate) nodes: [usize; 2],
    /// Whether the slot moves between primaries. Otherwise the nodes are a primary and its replica.
    pub(crate) moves: bool,
    /// How often the slot has changed its node. During a change, the lock is held for writing.
    ///
    /// A client that was redirected by ASK holds the lock for reading while it follows the
    /// redirect. Otherwise the slot could move on meanwhile, and the client would create keys at
    /// the wrong node. This is so at the engine's own port, too.
    pub(crate) changes: RwLock<usize>,
}

impl Slot {
    fn change(&self, change: impl FnOnce()) {
        let mut changes = self.changes.write().unwrap_or_else(PoisonError::into_inner);
        change();
        *changes += 1;
    }
}

/// Moves the slots back and forth until `must_stop`, and counts the moves.
pub(crate) fn move_slots(
    cluster: &Cluster,
    slots: &[Slot],
    moves: &AtomicUsize,
    must_stop: &AtomicBool,
) {
    let is_atomic_known = cluster.nodes[0].ask("COMMAND INFO CLUSTER|MIGRATESLOTS").len() > 8;
    for round in 0.. {
        for slot in slots.iter().filter(|slot| slot.moves) {
            if must_stop.load(Ordering::Relaxed) {
                return;
            }
            let [from, to] = [round, round + 1].map(|at| &cluster.nodes[slot.nodes[at % 2]]);
            // If the engine supports it, some moves transfer the slot as a whole, without ASK. Such
            // a move pauses the clients of the node, and nothing is called meanwhile.
            if is_atomic_known && round % 8 >= 6 {
                move_at_once(slot, from, to);
            } else {
                move_key_by_key(slot, from, to);
            }
            wait_for_owner(cluster, slot, to);
            moves.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Waits until all nodes know the new owner of a slot. If the old owner took another slot before
/// that, a node that had missed this move could tell the new owner that the slot is not its own.
/// Then no node has the slot. That is so in a cluster without the module, too.
fn wait_for_owner(cluster: &Cluster, slot: &Slot, owner: &Node) {
    let (read, redirect) = (format!("EXISTS {{{}}}", slot.tag), format!(":{}", owner.port));
    for node in cluster.nodes.iter().filter(|node| node.port != owner.port) {
        node.server.wait_until("the new owner", || {
            let reply = node.ask(&read);
            reply.starts_with("-MOVED") && reply.ends_with(&redirect)
        });
    }
}

/// Moves a slot as `redis-cli --cluster reshard` does.
fn move_key_by_key(slot: &Slot, from: &Node, to: &Node) {
    let number = slot.number;
    // The new owner takes an epoch above all that it knows. If it does not know the old owner's
    // epoch yet, a delayed message of the old owner takes the slot away again.
    let epoch = from.epoch("cluster_my_epoch");
    to.server.wait_until("the old owner's epoch", || to.epoch("cluster_current_epoch") >= epoch);
    to.ok(&format!("CLUSTER SETSLOT {number} IMPORTING {}", from.id));
    from.ok(&format!("CLUSTER SETSLOT {number} MIGRATING {}", to.id));
    let mut source = from.server.client();
    loop {
        let keys = source.ask(&["CLUSTER", "GETKEYSINSLOT", &number.to_string(), "2"]);
        let keys: Vec<_> = keys.lines().filter(|line| line.starts_with('{')).collect();
        if keys.is_empty() {
            break;
        }
        let migrate = ["MIGRATE", "127.0.0.1", &to.port, "", "0", "5000", "KEYS"];
        source.ok(&[&migrate[..], &keys].concat());
    }
    slot.change(|| {
        for node in [to, from] {
            node.ok(&format!("CLUSTER SETSLOT {number} NODE {}", to.id));
        }
    });
}

/// Moves a slot with CLUSTER MIGRATESLOTS, by which Valkey 9.0 and later transfer all keys
/// themselves.
fn move_at_once(slot: &Slot, from: &Node, to: &Node) {
    let number = slot.number;
    from.ok(&format!("CLUSTER MIGRATESLOTS SLOTSRANGE {number} {number} NODE {}", to.id));
    let read = format!("EXISTS {{{}}}", slot.tag);
    to.server.wait_until("the slot at its new owner", || to.ask(&read).starts_with(':'));
    from.server.wait_until("a redirect to the new owner", || from.ask(&read).starts_with("-MOVED"));
    slot.change(|| {});
}

/// Makes the replica of a shard its primary, again and again until `must_stop`, and counts the
/// failovers.
pub(crate) fn fail_over(
    cluster: &Cluster,
    shard: [usize; 2],
    failovers: &AtomicUsize,
    must_stop: &AtomicBool,
) {
    while !must_stop.load(Ordering::Relaxed) {
        let done = failovers.load(Ordering::Relaxed);
        let [old, new] = [0, 1].map(|at| &cluster.nodes[shard[(done + at) % 2]]);
        make_primary(old, new);
        failovers.fetch_add(1, Ordering::Relaxed);
    }
}

/// Makes a replica the primary in place of `old`.
pub(crate) fn make_primary(old: &Node, new: &Node) {
    new.wait_for_link();
    // A primary ignores the request of a node that it does not know as its replica yet.
    old.server.wait_until("the replica to be known", || {
        let replicas = old.ask(&format!("CLUSTER REPLICAS {}", old.id));
        replicas.contains(&format!("{} 127.0.0.1:{}@", new.id, new.port))
    });
    // After a failover, the other primaries may refuse to vote in the next one for twice the node
    // timeout. The attempt then ends after 5 seconds.
    new.server.wait_until("the failover", || {
        new.ok("CLUSTER FAILOVER");
        comes_true(Duration::from_secs(6), || new.is_primary() && !old.is_primary())
    });
    old.wait_for_link();
}
