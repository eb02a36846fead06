//! A connection to one node of a cluster, over RDMA to the node's module or over TCP to its engine.
//!
//! redis-rs opens such connections by the function in [`Connect`], which has no `self` that could
//! hold our state. But redis-rs passes the user name in its settings on to that function. So this
//! user name contains the number of the [`Shared`] state, and the real user name is in the client's
//! own settings.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrite_fabric::{Fallback, Rdma};
use ferrite_session::{ConnectError, Connector, Host, Session, SessionTransport};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::Connect;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, IntoConnectionInfo, Pipeline, PushKind, RedisError,
    RedisFuture, RedisResult, ServerErrorKind, Value,
};

use super::directory::{Directory, Way, is_rdma, own_endpoints};
use super::route::begins_with;
use crate::client::{Client, Dialed, resolve, summarize};
use crate::progress::Progress;

/// What the connections to all nodes share.
pub(super) struct Shared {
    number: u64,
    client: Client,
    /// For how long a command that fails is sent again.
    pub(super) retry_for: Duration,
    directory: Mutex<Directory>,
}

/// The states of all cluster connections of this process, by their numbers.
static ALL: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());

const USER: &str = "ferrite-cluster-connection-";
/// The code of an error that redis-rs does not retry. The cluster connection replaces it.
pub(super) const NO_PROGRESS: &str = "FERRITENOPROGRESS";

impl Shared {
    pub(super) fn new(client: Client, retry_for: Duration) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Self { number, client, retry_for, directory: Mutex::default() });
        lock(&ALL).insert(number, Arc::downgrade(&shared));
        shared
    }

    /// Returns the user name by which [`Connect`] finds this state.
    pub(super) fn user(&self) -> String {
        format!("{USER}{}", self.number)
    }

    fn of_user(user: Option<&str>) -> RedisResult<Arc<Self>> {
        let number = user.and_then(|user| user.strip_prefix(USER)?.parse::<u64>().ok());
        let shared = number.and_then(|number| lock(&ALL).get(&number)?.upgrade());
        shared.ok_or_else(|| {
            // The state lives as long as the cluster connection.
            let ended =
                io::Error::new(io::ErrorKind::Unsupported, "the cluster connection has ended");
            RedisError::from(ended)
        })
    }

    pub(super) fn directory(&self) -> MutexGuard<'_, Directory> {
        lock(&self.directory)
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    fn policy(&self) -> Rdma {
        self.client.settings().connector.policy()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        lock(&ALL).remove(&self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection to a node. Clones share it.
#[derive(Clone)]
pub(super) struct Node {
    link: Link,
    host: Host,
    shared: Arc<Shared>,
}

#[derive(Clone)]
enum Link {
    Open(Open),
    Refused(Arc<Refused>),
}

#[derive(Clone)]
struct Open {
    connection: MultiplexedConnection,
    progress: Arc<Progress>,
    /// Whether the connection was given up, because no byte has moved for too long.
    is_lost: Arc<AtomicBool>,
    /// The transport with which the connection was opened.
    transport: SessionTransport,
}

/// A node that must be reached over RDMA, and has no RDMA endpoint. redis-rs would try for seconds
/// to connect, and then return an error without a cause. So it gets a connection on which every
/// command fails with the cause.
struct Refused {
    why: RedisError,
    since: Instant,
    /// Whether redis-rs has sent the command with which it checks a new connection.
    is_checked: AtomicBool,
}

/// How long a node is refused before the other nodes are asked for its endpoints again.
const REFUSED_FOR: Duration = Duration::from_secs(1);

impl Connect for Node {
    fn connect_with_config<'a, T>(info: T, config: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        Box::pin(async move {
            let info = info.into_connection_info()?;
            let shared = Shared::of_user(info.redis_settings().username())?;
            let ConnectionAddr::Tcp(name, port) = info.addr() else {
                let other = io::Error::new(io::ErrorKind::Unsupported, "a node without an address");
                return Err(other.into());
            };
            let host = Host { name: name.clone(), port: Some(*port) };
            Dialer { shared: &shared, host: &host, config: &config }.open().await
        })
    }
}

/// Opens a connection to one node.
struct Dialer<'a> {
    shared: &'a Arc<Shared>,
    host: &'a Host,
    config: &'a AsyncConnectionConfig,
}

impl Dialer<'_> {
    async fn open(&self) -> RedisResult<Node> {
        let policy = self.shared.policy();
        let way = self.shared.directory().way_to(self.host);
        match (way, policy) {
            (_, Rdma::Forbid) => self.dial_engine(Rdma::Forbid, None).await,
            // A server that was given to the client may be a module.
            (Way::Unknown, _) => {
                let node = self.dial_engine(policy, None).await?;
                Ok(self.upgrade(node).await)
            }
            (Way::Engine { id }, Rdma::Require) => {
                self.ask_for_endpoints().await;
                let way = self.shared.directory().way_to(self.host);
                if let Way::Rdma { id, endpoints } = way {
                    return self.require_rdma(&id, &endpoints).await;
                }
                let why = "its module is not loaded, has no RDMA, or has not announced itself yet; \
                           load ferrite.so there, or prefer RDMA instead of requiring it";
                let why = self.without_rdma(&id, why);
                let (since, is_checked) = (Instant::now(), AtomicBool::new(false));
                let link = Link::Refused(Arc::new(Refused { why, since, is_checked }));
                Ok(Node { link, host: self.host.clone(), shared: Arc::clone(self.shared) })
            }
            // The list of endpoints may have come from a node that had not heard of this one.
            (Way::Engine { .. }, _) => {
                let node = self.dial_engine(Rdma::Forbid, None).await?;
                Ok(self.upgrade(node).await)
            }
            (Way::Rdma { id, endpoints }, Rdma::Require) => {
                self.require_rdma(&id, &endpoints).await
            }
            (Way::Rdma { endpoints, .. }, _) => match self.dial_rdma(&endpoints).await {
                Ok(node) => Ok(node),
                Err(NoRdma::Refused(error)) => Err(error),
                Err(NoRdma::Failed(endpoint, error)) => {
                    let fallback = self.connector()?.fell_back_to_tcp(endpoint, error);
                    self.dial_engine(Rdma::Forbid, Some(fallback)).await
                }
            },
        }
    }

    async fn require_rdma(&self, id: &str, endpoints: &[SocketAddr]) -> RedisResult<Node> {
        self.dial_rdma(endpoints).await.map_err(|error| match error {
            NoRdma::Refused(error) => error,
            // The node may be down, so redis-rs may try again.
            NoRdma::Failed(_, error) => {
                let text = self.without_rdma(id, &error.to_string()).to_string();
                io::Error::new(io::ErrorKind::NotConnected, text).into()
            }
        })
    }

    /// Asks a node whose module is known for the endpoints of all nodes.
    async fn ask_for_endpoints(&self) {
        let known = self.shared.directory().all_endpoints();
        let ask = redis::cmd("FERRITE").arg("ENDPOINTS").clone();
        for endpoint in known {
            let Ok(mut node) = self.dial_rdma(&[endpoint]).await else { continue };
            if let Ok(reply) = node.req_packed_command(&ask).await {
                let asked = Host { name: endpoint.ip().to_string(), port: Some(endpoint.port()) };
                return self.shared.directory().note_endpoints(&reply, &asked);
            }
        }
    }

    fn connector(&self) -> RedisResult<Connector> {
        self.shared.client.connector_for(self.host)
    }

    /// Connects to the address that redis-rs has asked for.
    async fn dial_engine(&self, policy: Rdma, fallback: Option<Fallback>) -> RedisResult<Node> {
        let connector = self.connector()?.rdma(policy);
        let mut failures = Vec::new();
        for address in resolve(self.host).await? {
            match connector.connect(address).await {
                Ok(session) => return self.log_in(address, session, fallback).await,
                Err(error) => failures.push((address.to_string(), error.into())),
            }
        }
        Err(summarize(failures))
    }

    /// Connects to the first of a module's addresses that accepts RDMA.
    async fn dial_rdma(&self, endpoints: &[SocketAddr]) -> Result<Node, NoRdma> {
        let connector = self.connector().map_err(NoRdma::Refused)?;
        let mut failure = None;
        for endpoint in endpoints {
            match connector.open_over_rdma(*endpoint).await {
                Ok(session) => {
                    let node = self.log_in(*endpoint, session, None).await;
                    return node.map_err(NoRdma::Refused);
                }
                Err(ConnectError { rdma: Some(error), .. }) => failure = Some((*endpoint, error)),
                // TLS is configured, so RDMA is not allowed.
                Err(error) => return Err(NoRdma::Refused(error.into_io(*endpoint).into())),
            }
        }
        let (endpoint, error) = failure.ok_or_else(|| NoRdma::Refused(summarize(Vec::new())))?;
        Err(NoRdma::Failed(endpoint, error))
    }

    /// Asks a node for its own RDMA endpoints, if the connection is over TCP, and connects to them.
    /// Keeps the connection if that fails.
    async fn upgrade(&self, mut node: Node) -> Node {
        let transport = match &node.link {
            Link::Open(open) if !is_rdma(open.transport) => open.transport,
            _ => return node,
        };
        let mut ask = Pipeline::with_capacity(2);
        ask.cmd("CLUSTER").arg("MYID").cmd("FERRITE").arg("ENDPOINTS");
        let Ok(replies) = node.req_packed_commands(&ask, 0, 2).await else { return node };
        let [my_id, reply] = &replies[..] else { return node };
        let endpoints = own_endpoints(my_id, reply, self.host);
        if endpoints.is_empty() {
            return node;
        }
        match self.dial_rdma(&endpoints).await {
            Ok(over_rdma) => over_rdma,
            Err(NoRdma::Failed(endpoint, error)) => {
                if let Ok(connector) = self.connector() {
                    let fallback = connector.fell_back_to_tcp(endpoint, error);
                    self.shared.directory().note_fallback(self.host, transport, fallback);
                }
                node
            }
            Err(NoRdma::Refused(_)) => node,
        }
    }

    async fn log_in(
        &self,
        address: SocketAddr,
        session: Session,
        fallback: Option<Fallback>,
    ) -> RedisResult<Node> {
        let transport = session.transport();
        let traffic =
            self.shared.directory().note_connecting(self.host, session.observer(), fallback);
        // The limit for replies counts the time without progress, so redis-rs needs none.
        let config = self.config.clone().set_response_timeout(None);
        let client = &self.shared.client;
        let Dialed { connection, progress, .. } =
            client.log_in(address, session, config, traffic).await?;
        let (host, shared) = (self.host.clone(), Arc::clone(self.shared));
        let is_lost = Arc::default();
        let link = Link::Open(Open { connection, progress, is_lost, transport });
        Ok(Node { link, host, shared })
    }

    /// Returns the error for a node that must be reached over RDMA, and cannot.
    fn without_rdma(&self, id: &str, why: &str) -> RedisError {
        let text = format!("cannot reach node {id} at {} over RDMA: {why}", self.host);
        // redis-rs does not retry errors of this kind.
        io::Error::new(io::ErrorKind::Unsupported, text).into()
    }
}

/// Why a module was not reached over RDMA.
enum NoRdma {
    /// RDMA to this address failed.
    Failed(SocketAddr, ferrite_fabric::Error),
    /// The server refused the login, or the settings allow no RDMA.
    Refused(RedisError),
}

impl Node {
    /// Runs commands on the connection. Gives it up if it makes no progress.
    async fn run<T>(
        &self,
        send: impl AsyncFnOnce(MultiplexedConnection) -> RedisResult<T>,
    ) -> RedisResult<T> {
        // Nothing is sent in these cases, so redis-rs may send it over a new connection.
        let closed = |why: &str| {
            let closed = io::Error::new(io::ErrorKind::ConnectionReset, why.to_owned());
            Err(RedisError::from(closed))
        };
        let open = match &self.link {
            Link::Open(open) => open,
            Link::Refused(refused) if refused.since.elapsed() > REFUSED_FOR => {
                return closed("the node may have an RDMA endpoint by now");
            }
            Link::Refused(refused) => return Err(refused.why.clone()),
        };
        if open.is_lost.load(Ordering::Relaxed) {
            return closed("the connection has made no progress and was given up");
        }
        let limit = self.shared.client.response_timeout();
        let replies = open.progress.wait(limit, send(open.connection.clone())).await;
        replies.unwrap_or_else(|| {
            open.is_lost.store(true, Ordering::Relaxed);
            // redis-rs must not send the command again: the server may still be running it.
            Err(redis::make_extension_error(NO_PROGRESS.into(), None))
        })
    }

    /// Asks for the slots, and for the endpoints at the same time.
    async fn slots(&mut self, ask: &Cmd) -> RedisResult<Value> {
        let mut both = Pipeline::with_capacity(2);
        both.add_command(ask.clone()).cmd("FERRITE").arg("ENDPOINTS");
        let send = async |mut connection: MultiplexedConnection| {
            connection.req_packed_commands(&both, 0, 2).await
        };
        let mut replies = self.run(send).await?;
        let (Some(endpoints), Some(slots)) = (replies.pop(), replies.pop()) else {
            return Err(redis::make_extension_error("ERR".into(), Some("no reply".into())));
        };
        let mut directory = self.shared.directory();
        directory.note_slots(&slots, &self.host);
        directory.note_endpoints(&endpoints, &self.host);
        Ok(slots)
    }
}

impl ConnectionLike for Node {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            if begins_with(cmd, &["CLUSTER", "SLOTS"]) {
                return self.slots(cmd).await;
            }
            if let Link::Refused(refused) = &self.link
                && !refused.is_checked.swap(true, Ordering::Relaxed)
            {
                return Ok(Value::Okay);
            }
            let send = async |mut connection: MultiplexedConnection| {
                connection.req_packed_command(cmd).await
            };
            self.run(send).await
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let send = async |mut connection: MultiplexedConnection| {
                connection.req_packed_commands(pipeline, offset, count).await
            };
            let mut replies = self.run(send).await?;
            if !pipeline.is_transaction() {
                replies.iter_mut().for_each(mark_unserved);
            }
            Ok(replies)
        })
    }

    fn get_db(&self) -> i64 {
        self.shared.client.db()
    }
}

const MOVED: &str = "ferrite-moved";
const NOT_NOW: &str = "ferrite-not-now";

/// Why a node has not served a command of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unserved {
    /// Another node has the key.
    Moved,
    /// The node cannot serve the command at present.
    NotNow,
}

/// Replaces an error after which redis-rs would send the whole pipeline again, so that the commands
/// that were served would run twice. The cluster connection sends only the others again.
fn mark_unserved(reply: &mut Value) {
    let Value::ServerError(error) = &*reply else { return };
    let mark = match error.kind() {
        Some(ServerErrorKind::Moved | ServerErrorKind::Ask) => MOVED,
        Some(
            ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::BusyLoading
            | ServerErrorKind::ReadOnly,
        ) => NOT_NOW,
        _ => return,
    };
    // A server's reply is never a push message, so the mark cannot be mistaken for a reply.
    let kind = PushKind::Other(mark.into());
    let data = vec![std::mem::replace(reply, Value::Nil)];
    *reply = Value::Push { kind, data };
}

/// Returns whether a reply was replaced because the command was not served.
pub(super) fn unserved(reply: &Value) -> Option<Unserved> {
    match reply {
        Value::Push { kind: PushKind::Other(kind), .. } if kind == MOVED => Some(Unserved::Moved),
        Value::Push { kind: PushKind::Other(kind), .. } if kind == NOT_NOW => {
            Some(Unserved::NotNow)
        }
        _ => None,
    }
}

/// Returns the node's own error, which was replaced.
pub(super) fn original(reply: Value) -> Value {
    match reply {
        Value::Push { data, .. } => data.into_iter().next().unwrap_or(Value::Nil),
        reply => reply,
    }
}
