//! What the connections of a cluster connection share: its settings, and what it knows about the
//! nodes.
//!
//! redis-rs opens connections by the function in [`Connect`](redis::cluster_async::Connect), which
//! has no `self` that could hold this state. But redis-rs passes the user name in its settings on to
//! that function. So this user name contains the number of the state, and the real user name is in
//! the client's own settings.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrite_fabric::Rdma;
use redis::cluster_routing::Route;
use redis::{RedisError, RedisResult};

use super::directory::Directory;
use super::lookup::Lookup;
use super::node::{Inner, Node};
use crate::client::Client;

/// The time between two requests for the slots that callers make.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);
/// The shortest time for which a command is tried: redirects need some of it.
const RETRY_FOR_MIN: Duration = Duration::from_secs(1);

/// What the connections to all nodes share.
pub(super) struct Shared {
    number: u64,
    client: Client,
    /// For how long a command that fails is sent again.
    pub(super) retry_for: Duration,
    /// Whether replicas may serve commands that only read.
    pub(super) reads_replicas: bool,
    directory: Mutex<Directory>,
    known: Mutex<Known>,
}

/// The connections to nodes.
#[derive(Default)]
struct Known {
    nodes: BTreeMap<u64, Weak<Inner>>,
    /// The node that has last served a slot.
    by_route: HashMap<Route, Weak<Inner>>,
    /// The requests for the slots that redis-rs has not begun yet.
    refreshes: BTreeSet<u64>,
    last_refresh: Option<Instant>,
}

/// The states of all cluster connections of this process, by their numbers.
static ALL: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());

const USER: &str = "ferrite-cluster-connection-";

impl Shared {
    pub(super) fn new(client: Client, retry_for: Duration, reads_replicas: bool) -> Arc<Self> {
        let (number, directory) = (next_number(), Mutex::default());
        let (known, retry_for) = (Mutex::default(), retry_for.max(RETRY_FOR_MIN));
        let shared = Arc::new(Self { number, client, retry_for, reads_replicas, directory, known });
        lock(&ALL).insert(number, Arc::downgrade(&shared));
        shared
    }

    /// Returns the user name by which [`Connect`] finds this state.
    pub(super) fn user(&self) -> String {
        format!("{USER}{}", self.number)
    }

    pub(super) fn of_user(user: Option<&str>) -> RedisResult<Arc<Self>> {
        let number = user.and_then(|user| user.strip_prefix(USER)?.parse::<u64>().ok());
        let shared = number.and_then(|number| lock(&ALL).get(&number)?.upgrade());
        shared.ok_or_else(|| {
            // The state lives as long as the cluster connection.
            let ended =
                io::Error::new(io::ErrorKind::Unsupported, "the cluster connection has ended");
            RedisError::from(ended)
        })
    }

    pub(super) fn add_node(&self, number: u64, node: &Arc<Inner>) {
        lock(&self.known).nodes.insert(number, Arc::downgrade(node));
    }

    pub(super) fn remove_node(&self, number: u64) {
        lock(&self.known).nodes.remove(&number);
    }

    pub(super) fn directory(&self) -> MutexGuard<'_, Directory> {
        lock(&self.directory)
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn policy(&self) -> Rdma {
        self.client.settings().connector.policy()
    }

    /// Returns the node with the number that a [`Lookup`] has returned; `None` if redis-rs has
    /// given it up in the meantime.
    pub(super) fn node(&self, number: u64) -> Option<Node> {
        lock(&self.known).nodes.get(&number)?.upgrade().map(Node::from)
    }

    /// Returns the node that has last served a slot, if its connection still works.
    pub(super) fn node_of(&self, route: Route) -> Option<Node> {
        let node = Node::from(lock(&self.known).by_route.get(&route)?.upgrade()?);
        node.is_usable().then_some(node)
    }

    /// Records which node serves a slot.
    pub(super) fn note_node(&self, route: Route, node: &Node) {
        lock(&self.known).by_route.insert(route, Arc::downgrade(&node.inner));
    }

    /// Records that it is not known which node serves a slot.
    pub(super) fn forget_node(&self, route: Route) {
        lock(&self.known).by_route.remove(&route);
    }

    /// Returns the lookup after which redis-rs asks for the slots, or one without that if redis-rs
    /// was asked a short time ago.
    pub(super) fn refresh(&self) -> Lookup {
        let mut known = lock(&self.known);
        if known.last_refresh.is_some_and(|last| last.elapsed() < REFRESH_PAUSE) {
            return Lookup::Known;
        }
        let number = next_number();
        known.last_refresh = Some(Instant::now());
        known.refreshes.insert(number);
        Lookup::Refresh(number)
    }

    /// Returns whether redis-rs must ask for the slots, once for each lookup of
    /// [`Shared::refresh`].
    pub(super) fn begins_refresh(&self, number: u64) -> bool {
        lock(&self.known).refreshes.remove(&number)
    }

    /// Forgets a lookup of [`Shared::refresh`] that is over, whether or not redis-rs has asked.
    pub(super) fn end_lookup(&self, lookup: &Lookup) {
        if let Lookup::Refresh(number) = lookup {
            lock(&self.known).refreshes.remove(number);
        }
    }

    /// Returns the nodes whose connections are open, and then those that are being opened.
    pub(super) fn nodes(&self) -> Vec<Node> {
        let nodes: Vec<_> = lock(&self.known).nodes.values().filter_map(Weak::upgrade).collect();
        let mut nodes: Vec<_> = nodes.into_iter().map(Node::from).collect();
        nodes.retain(Node::is_usable);
        nodes.sort_by_key(|node| !node.is_open());
        nodes
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        lock(&ALL).remove(&self.number);
    }
}

pub(super) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
