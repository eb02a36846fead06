//! A connection to one node of a cluster.
//!
//! redis-rs does nothing else while it asks for the slots or connects to a node: one task routes
//! the commands to all nodes, and it holds a lock meanwhile. Therefore nothing here makes that task
//! wait for a single node:
//! - a connection is opened in a task of its own, and redis-rs gets it at once,
//! - redis-rs's checks (PING, READONLY) are answered here,
//! - CLUSTER SLOTS goes to further nodes if a node does not answer soon,
//! - commands with a key do not run in redis-rs's task: redis-rs finds the node ([`Lookup`]), and
//!   the caller runs the command there.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_session::Host;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::Connect;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, IntoConnectionInfo, Pipeline, RedisError,
    RedisFuture, RedisResult, RetryMethod, Value,
};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout_at};

use super::dial::{Dialer, Opened};
use super::directory::complete_slots;
use super::lookup::Lookup;
use super::reply::{checked, error_reply, text_of};
use super::route::{begins_with, is_word};
use super::shared::{Shared, next_number};
use crate::client::is_connection_error;
use crate::progress::Progress;

/// The code of an error that redis-rs does not retry. The cluster connection replaces it.
pub(super) const NO_PROGRESS: &str = "FERRITENOPROGRESS";
/// How long a node may take to answer CLUSTER SLOTS before another node is asked, too.
const SLOTS_PATIENCE: Duration = Duration::from_millis(100);
/// How long no new connection to a node is opened after one has failed.
const FAILED_FOR: Duration = Duration::from_millis(100);
/// The same for a node that must be reached over RDMA, and has no RDMA endpoint.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// A connection to a node, or the attempt to open one. Clones share it.
pub(super) struct Node {
    pub(super) inner: Arc<Inner>,
    /// Whether redis-rs has sent ASKING on this clone. It is sent together with the next command:
    /// otherwise a command of another clone could come between them.
    is_asking: bool,
}

pub(super) struct Inner {
    number: u64,
    host: Host,
    shared: Arc<Shared>,
    link: watch::Receiver<Option<Link>>,
    /// Whether the connection has ended, or was given up because no byte has moved for too long.
    is_lost: Arc<AtomicBool>,
    /// The task that opens the connection.
    task: AbortHandle,
}

/// The result of an attempt to connect.
type Link = Result<Open, Failed>;

#[derive(Clone)]
struct Open {
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
        self.shared.remove_node(self.number);
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
            Ok(Node::new(shared, Host { name: name.clone(), port: Some(*port) }, config))
        })
    }
}

impl Node {
    /// Begins to open a connection.
    fn new(shared: Arc<Shared>, host: Host, config: AsyncConnectionConfig) -> Self {
        let (publish, link) = watch::channel(None);
        let is_lost = Arc::new(AtomicBool::new(false));
        let open = {
            let (shared, host, is_lost) = (Arc::clone(&shared), host.clone(), Arc::clone(&is_lost));
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
        let inner = Arc::new(Inner { number, host, shared, link, is_lost, task });
        inner.shared.add_node(number, &inner);
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
    fn check(&self) -> RedisResult<()> {
        match self.is_usable() {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
        }
    }

    /// Waits until the connection is open.
    async fn open(&self) -> RedisResult<Open> {
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
    async fn run<T>(
        &self,
        open: Open,
        send: impl AsyncFnOnce(MultiplexedConnection) -> RedisResult<T>,
    ) -> Result<T, NoReply> {
        let limit = self.inner.shared.client().response_timeout();
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

    /// Answers a lookup: with the number of this node, or with an error after which redis-rs asks
    /// for the slots or another node.
    fn answer(&self, lookup: &Lookup) -> RedisResult<Value> {
        self.check()?;
        let is_begun = |number| self.inner.shared.begins_refresh(number);
        Ok(match lookup {
            // redis-rs asks for the slots after this error, and then repeats the lookup.
            Lookup::Refresh(number) if is_begun(*number) => error_reply("READONLY refresh"),
            Lookup::Redirected(to)
                if to.host.as_ref() != Some(&self.inner.host.name)
                    || Some(to.port) != self.inner.host.port =>
            {
                error_reply(&text_of(to))
            }
            _ => Value::Int(i64::try_from(self.inner.number).unwrap_or(i64::MAX)),
        })
    }

    /// Asks for the slots, and for the endpoints at the same time: this node, and others if it does
    /// not answer soon.
    async fn slots(&self, ask: &Cmd) -> RedisResult<Value> {
        let mut others = self.inner.shared.nodes();
        others.retain(|node| !Arc::ptr_eq(&node.inner, &self.inner));
        let first = match others.first() {
            Some(other) if other.is_open() && !self.is_open() => {
                others.push(self.clone());
                others.remove(0)
            }
            _ => self.clone(),
        };
        let mut others = others.into_iter();
        let mut asked = FuturesUnordered::from_iter([first.own_slots(ask.clone())]);
        loop {
            let patience = async {
                match others.len() {
                    0 => std::future::pending().await,
                    _ => sleep(SLOTS_PATIENCE).await,
                }
            };
            let answer = tokio::select! {
                answer = asked.next() => answer,
                () = patience => None,
            };
            match answer {
                Some(Ok(slots)) => return Ok(slots),
                Some(Err(error)) if asked.is_empty() && others.len() == 0 => return Err(error),
                _ => asked.extend(others.next().map(|other| other.own_slots(ask.clone()))),
            }
        }
    }

    /// Asks this node for the slots and the endpoints.
    async fn own_slots(self, ask: Cmd) -> RedisResult<Value> {
        let mut both = Pipeline::with_capacity(2);
        both.add_command(ask).cmd("FERRITE").arg("ENDPOINTS");
        let send = async |mut it: MultiplexedConnection| it.req_packed_commands(&both, 0, 2).await;
        let replies = self.run(self.open().await?, send).await?;
        let Ok([mut slots, endpoints]) = <[Value; 2]>::try_from(replies) else {
            return Err(redis::make_extension_error("ERR".into(), Some("no reply".into())));
        };
        if let Value::ServerError(error) = slots {
            return Err(error.into());
        }
        complete_slots(&mut slots, &self.inner.host);
        let mut directory = self.inner.shared.directory();
        directory.note_slots(&slots, &self.inner.host);
        directory.note_endpoints(&endpoints, &self.inner.host);
        Ok(slots)
    }
}

impl From<NoReply> for RedisError {
    fn from(no_reply: NoReply) -> Self {
        no_reply.error
    }
}

/// What redis-rs uses: lookups, checks, CLUSTER SLOTS, and commands that have no key of their own.
impl ConnectionLike for Node {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            if begins_with(cmd, &["CLUSTER", "SLOTS"]) {
                return self.slots(cmd).await;
            }
            // The cluster connection sends a PING of the user in lower case.
            if is_word(cmd, "PING") || is_word(cmd, "READONLY") {
                return self.check().map(|()| Value::Okay);
            }
            if is_word(cmd, "ASKING") {
                self.is_asking = true;
                return self.check().map(|()| Value::Okay);
            }
            let open = self.open().await?;
            let reply = if std::mem::take(&mut self.is_asking) {
                let mut both = Pipeline::with_capacity(2);
                both.cmd("ASKING").add_command(cmd.clone());
                let send =
                    async |mut it: MultiplexedConnection| it.req_packed_commands(&both, 1, 1).await;
                self.run(open, send).await?.pop().unwrap_or(Value::Nil)
            } else {
                self.run(open, async |mut it| it.req_packed_command(cmd).await).await?
            };
            Ok(checked(reply, &self.inner.host))
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            if let Some(lookup) = pipeline.cmd_iter().next().and_then(Lookup::read) {
                return Ok(vec![self.answer(&lookup)?]);
            }
            let open = self.open().await?;
            let send = async |mut it: MultiplexedConnection| {
                it.req_packed_commands(pipeline, offset, count).await
            };
            let replies = self.run(open, send).await?;
            Ok(replies.into_iter().map(|reply| checked(reply, &self.inner.host)).collect())
        })
    }

    fn get_db(&self) -> i64 {
        self.inner.shared.client().db()
    }
}
