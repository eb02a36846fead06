//! A connection to one node of a cluster, and the connections to all.
//!
//! A [`Node`] is there before its connection is open, which a task of its own does. Commands run in
//! the task of their caller. `redis_rs.rs` has what redis-rs does with a node.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ferrite_session::Host;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::cluster_routing::Route;
use redis::{AsyncConnectionConfig, Cmd, Pipeline, RedisError, RedisResult, RetryMethod, Value};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout_at;

use super::dial::{Dialer, Opened};
use super::lookup::Lookup;
use super::shared::{Shared, lock};
use crate::client::is_connection_error;
use crate::progress::Progress;

/// The code of an error that redis-rs does not retry. The cluster connection replaces it.
pub(super) const NO_PROGRESS: &str = "FERRITENOPROGRESS";
/// How long no new connection to a node is opened after one has failed.
const FAILED_FOR: Duration = Duration::from_millis(100);
/// The same for a node that must be reached over RDMA, and has no RDMA endpoint.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// The time between two requests for the slots that callers make.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// The connections to nodes, and what is known about them.
#[derive(Default)]
struct Known {
    nodes: BTreeMap<u64, Weak<Inner>>,
    /// The node that has last served a slot.
    by_route: HashMap<Route, Weak<Inner>>,
    /// The requests for the slots that redis-rs has not begun yet.
    refreshes: BTreeSet<u64>,
    last_refresh: Option<Instant>,
}

/// The nodes of all cluster connections of this process, by the numbers of these connections.
static ALL: Mutex<BTreeMap<u64, Weak<Nodes>>> = Mutex::new(BTreeMap::new());

const USER: &str = "ferrite-cluster-connection-";

/// The connections to all nodes of a cluster.
pub(super) struct Nodes {
    number: u64,
    pub(super) shared: Arc<Shared>,
    known: Mutex<Known>,
}

impl Nodes {
    pub(super) fn new(shared: Shared) -> Arc<Self> {
        let (number, shared) = (next_number(), Arc::new(shared));
        let nodes = Arc::new(Self { number, shared, known: Mutex::default() });
        lock(&ALL).insert(number, Arc::downgrade(&nodes));
        nodes
    }

    /// Returns the user name by which redis-rs finds these nodes.
    pub(super) fn user(&self) -> String {
        format!("{USER}{}", self.number)
    }

    pub(super) fn of_user(user: Option<&str>) -> RedisResult<Arc<Self>> {
        let number = user.and_then(|user| user.strip_prefix(USER)?.parse::<u64>().ok());
        let nodes = number.and_then(|number| lock(&ALL).get(&number)?.upgrade());
        nodes.ok_or_else(|| {
            // The nodes live as long as the cluster connection.
            let ended =
                io::Error::new(io::ErrorKind::Unsupported, "the cluster connection has ended");
            RedisError::from(ended)
        })
    }

    fn add(&self, number: u64, node: &Arc<Inner>) {
        lock(&self.known).nodes.insert(number, Arc::downgrade(node));
    }

    fn remove(&self, number: u64) {
        lock(&self.known).nodes.remove(&number);
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

    /// Makes redis-rs ask for the slots at a lookup. Returns `None` if it was asked a short time
    /// ago.
    pub(super) fn refresh(&self) -> Option<Refresh<'_>> {
        let mut known = lock(&self.known);
        if known.last_refresh.is_some_and(|last| last.elapsed() < REFRESH_PAUSE) {
            return None;
        }
        let number = next_number();
        known.last_refresh = Some(Instant::now());
        known.refreshes.insert(number);
        Some(Refresh { nodes: self, number })
    }

    /// Returns whether redis-rs must ask for the slots, once for each number of a
    /// [`Refresh`].
    pub(super) fn begins_refresh(&self, number: u64) -> bool {
        lock(&self.known).refreshes.remove(&number)
    }

    /// Returns the nodes whose connections are open, and then those that are being opened.
    pub(super) fn all(&self) -> Vec<Node> {
        let nodes: Vec<_> = lock(&self.known).nodes.values().filter_map(Weak::upgrade).collect();
        let mut nodes: Vec<_> = nodes.into_iter().map(Node::from).collect();
        nodes.retain(Node::is_usable);
        nodes.sort_by_key(|node| !node.is_open());
        nodes
    }
}

/// A request for the slots. It is over when its caller drops it, whether or not redis-rs has asked.
pub(super) struct Refresh<'a> {
    nodes: &'a Nodes,
    number: u64,
}

impl Refresh<'_> {
    /// Returns the lookup at which redis-rs asks for the slots.
    pub(super) fn lookup(&self) -> Lookup {
        Lookup::Refresh(self.number)
    }
}

impl Drop for Refresh<'_> {
    fn drop(&mut self) {
        lock(&self.nodes.known).refreshes.remove(&self.number);
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        lock(&ALL).remove(&self.number);
    }
}

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A connection to a node, or the attempt to open one. Clones share it.
pub(super) struct Node {
    pub(super) inner: Arc<Inner>,
    /// Whether redis-rs has sent ASKING on this clone. It is sent together with the next command:
    /// otherwise a command of another clone could come between them.
    pub(super) is_asking: bool,
}

pub(super) struct Inner {
    pub(super) number: u64,
    pub(super) host: Host,
    pub(super) nodes: Arc<Nodes>,
    link: watch::Receiver<Option<Link>>,
    /// Whether the connection has ended, or was given up because no byte has moved for too long.
    is_lost: Arc<AtomicBool>,
    /// The task that opens the connection.
    task: AbortHandle,
}

/// The result of an attempt to connect.
type Link = Result<Open, Failed>;

#[derive(Clone)]
pub(super) struct Open {
    connection: MultiplexedConnection,
    progress: Arc<Progress>,
}

#[derive(Clone)]
struct Failed {
    error: RedisError,
    since: Instant,
}

/// Why commands have no replies.
pub(super) struct NoReply {
    pub(super) error: RedisError,
    /// Whether the server may have run the commands.
    pub(super) was_sent: bool,
}

/// Where ASKING is necessary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asking {
    Nowhere,
    /// Before the first command, which begins a transaction.
    Once,
    BeforeEach,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
        self.nodes.remove(self.number);
    }
}

impl From<Arc<Inner>> for Node {
    fn from(inner: Arc<Inner>) -> Self {
        Self { inner, is_asking: false }
    }
}

impl Clone for Node {
    fn clone(&self) -> Self {
        Self::from(Arc::clone(&self.inner))
    }
}

impl Node {
    /// Begins to open a connection.
    pub(super) fn new(nodes: Arc<Nodes>, host: Host, config: AsyncConnectionConfig) -> Self {
        let (publish, link) = watch::channel(None);
        let is_lost = Arc::new(AtomicBool::new(false));
        let open = {
            let shared = Arc::clone(&nodes.shared);
            let (host, is_lost) = (host.clone(), Arc::clone(&is_lost));
            async move {
                let opened = Dialer { shared: &shared, host: &host, config: &config }.open().await;
                drop(shared);
                match opened {
                    Ok(Opened { connection, progress, driver, .. }) => {
                        let _ = publish.send(Some(Ok(Open { connection, progress })));
                        let _ = driver.await;
                        is_lost.store(true, Ordering::Relaxed);
                    }
                    Err(error) => {
                        let _ = publish.send(Some(Err(Failed { error, since: Instant::now() })));
                    }
                }
            }
        };
        let (number, task) = (next_number(), tokio::spawn(open).abort_handle());
        let inner = Arc::new(Inner { number, host, nodes, link, is_lost, task });
        inner.nodes.add(number, &inner);
        Self::from(inner)
    }

    pub(super) fn number(&self) -> u64 {
        self.inner.number
    }

    pub(super) fn host(&self) -> &Host {
        &self.inner.host
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(&*self.inner.link.borrow(), Some(Ok(_)))
    }

    /// Returns whether redis-rs may keep this connection. A failed one is kept for a short time, so
    /// that the next command has the cause at once.
    pub(super) fn is_usable(&self) -> bool {
        if self.inner.is_lost.load(Ordering::Relaxed) {
            return false;
        }
        match &*self.inner.link.borrow() {
            Some(Err(Failed { error, since })) => {
                let is_refused = matches!(error.retry_method(), RetryMethod::NoRetry);
                since.elapsed() < if is_refused { REFUSED_FOR } else { FAILED_FOR }
            }
            Some(Ok(open)) => !open.progress.is_ended(),
            None => true,
        }
    }

    /// Returns an error after which redis-rs opens a new connection, unless this one is usable.
    pub(super) fn check(&self) -> RedisResult<()> {
        match self.is_usable() {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
        }
    }

    /// Waits until the connection is open.
    pub(super) async fn open(&self) -> RedisResult<Open> {
        let mut link = self.inner.link.clone();
        let ended = || io::Error::new(io::ErrorKind::ConnectionReset, "the connection was closed");
        let opened = link.wait_for(Option::is_some).await.map_err(|_| ended())?.clone();
        let open = opened.ok_or_else(ended)?.map_err(|failed| failed.error)?;
        if self.inner.is_lost.load(Ordering::Relaxed) {
            return Err(ended().into());
        }
        Ok(open)
    }

    /// Runs commands, and returns a reply for each. The connection must be open before `deadline`.
    pub(super) async fn serve(
        &self,
        commands: &[&Cmd],
        asking: Asking,
        deadline: tokio::time::Instant,
    ) -> Result<Vec<Value>, NoReply> {
        let open = match timeout_at(deadline, self.open()).await {
            Ok(open) => open,
            Err(_) => {
                let text = format!("the connection to {} is not open in time", self.inner.host);
                Err(io::Error::new(io::ErrorKind::TimedOut, text).into())
            }
        };
        let open = open.map_err(|error| NoReply { error, was_sent: false })?;
        if let (&[command], Asking::Nowhere) = (commands, asking) {
            let reply = self.run(open, async |mut it| it.req_packed_command(command).await).await;
            return Ok(vec![reply?]);
        }
        let mut pipeline = Pipeline::with_capacity(commands.len() * 2);
        for (place, command) in commands.iter().enumerate() {
            if asking == Asking::BeforeEach || (asking == Asking::Once && place == 0) {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command((*command).clone());
        }
        let count = pipeline.len();
        let send =
            async |mut it: MultiplexedConnection| it.req_packed_commands(&pipeline, 0, count).await;
        let mut replies = self.run(open, send).await?;
        match asking {
            Asking::Nowhere => {}
            Asking::Once => drop(replies.remove(0)),
            Asking::BeforeEach => {
                let mut place = 0;
                replies.retain(|_| {
                    place += 1;
                    place % 2 == 0
                });
            }
        }
        Ok(replies)
    }

    /// Runs commands on the connection. Gives it up if it makes no progress.
    pub(super) async fn run<T>(
        &self,
        open: Open,
        send: impl AsyncFnOnce(MultiplexedConnection) -> RedisResult<T>,
    ) -> Result<T, NoReply> {
        let limit = self.inner.nodes.shared.client().response_timeout();
        let Some(reply) = open.progress.wait(limit, send(open.connection)).await else {
            self.inner.is_lost.store(true, Ordering::Relaxed);
            // The command must not be sent again: the server may still be running it.
            let error = redis::make_extension_error(NO_PROGRESS.into(), None);
            return Err(NoReply { error, was_sent: true });
        };
        reply.map_err(|error| {
            if is_connection_error(&error) && !error.is_timeout() {
                self.inner.is_lost.store(true, Ordering::Relaxed);
            }
            NoReply { error, was_sent: true }
        })
    }
}

impl From<NoReply> for RedisError {
    fn from(no_reply: NoReply) -> Self {
        no_reply.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ClientBuilder;

    #[tokio::test]
    async fn requests_for_the_slots_end_with_their_callers() {
        let client = ClientBuilder::open("redis://127.0.0.1:1").expect("a valid URL").build();
        let nodes = Nodes::new(Shared::new(client, Duration::ZERO, false));
        let waiting = async {
            let refresh = nodes.refresh().expect("the first request");
            assert!(nodes.refresh().is_none(), "a second request is too early");
            assert_eq!(refresh.lookup(), Lookup::Refresh(refresh.number));
            std::future::pending::<()>().await;
            drop(refresh);
        };
        // The caller gives up before redis-rs has seen the lookup.
        assert!(tokio::time::timeout(Duration::ZERO, waiting).await.is_err());
        assert!(lock(&nodes.known).refreshes.is_empty());

        lock(&nodes.known).last_refresh = None;
        let refresh = nodes.refresh().expect("a request after the pause");
        assert!(nodes.begins_refresh(refresh.number));
        assert!(!nodes.begins_refresh(refresh.number), "redis-rs asks once");
    }
}
