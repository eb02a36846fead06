//! Several connections to one server.
//!
//! One connection has any number of commands under way, so one is enough for most programs. More of
//! them help where values are large, because answers come in the order of their commands: a small
//! one waits for a large one before it. And a command that waits inside the server (BLPOP) makes
//! wait whatever was said after it on the same connection.
//!
//! ```text
//!   Pool ── commands ──► the shared connection with the fewest under way ──┐
//!     └── dedicated() ─► one that nobody else has; comes back when dropped ┴─► the server
//! ```

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use redis::aio::ConnectionLike;
use redis::{Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use crate::client::Client;
use crate::connection::{Connection, TransportInfo};

/// Connections that share the work: a `redis::aio::ConnectionLike`, for any number of tasks at a
/// time. Clones are the same pool.
///
/// A command goes to the connection with the fewest commands under way; a further one is opened
/// when all have some. Commands that are under way together have no order among them. Those that
/// change the connection itself (SELECT, WATCH, SUBSCRIBE) or wait in the server (BLPOP) have no
/// place here: the next on that connection would feel it. [`Pool::dedicated`] is for them. A
/// pipeline goes to one connection as a whole.
///
/// ```no_run
/// # async fn show() -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_client::Client;
/// use ferrite_client::redis::AsyncCommands as _;
///
/// let mut pool = Client::open("10.0.0.1:6380".parse()?)?.pool(4);
/// let views: u64 = pool.incr("views", 1).await?;
/// let (_, job): (String, String) = pool.dedicated().await?.blpop("jobs", 0.0).await?;
/// println!("{views} views; next is {job}");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Pool(Arc<Shared>);

struct Shared {
    client: Client,
    slots: Box<[Slot]>,
    /// As `client`, without a limit for how long an answer may take.
    waiting_client: Client,
    /// Dedicated connections that nobody has now.
    idle: Mutex<Vec<Connection>>,
    /// One for each dedicated connection that somebody may have.
    permits: Arc<Semaphore>,
}

#[derive(Default)]
struct Slot {
    connection: OnceCell<Connection>,
    under_way: AtomicUsize,
}

/// A command under way. It may be given up at any time, hence a guard.
struct UnderWay<'a>(&'a Slot);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    pub(crate) fn new(client: &Client, size: usize) -> Self {
        let size = size.max(1);
        Self(Arc::new(Shared {
            client: client.clone(),
            slots: (0..size).map(|_| Slot::default()).collect(),
            waiting_client: client.without_response_timeout(),
            idle: Mutex::default(),
            permits: Arc::new(Semaphore::new(size)),
        }))
    }

    /// A connection that nobody else has, until it is dropped: for commands that wait inside the
    /// server (BLPOP, XREAD BLOCK, WAIT), and for those that change the connection. An answer may
    /// take as long as it likes, whatever the client's settings say.
    ///
    /// These are apart from the shared ones, and there are at most as many: who wants one more
    /// waits until one is dropped.
    ///
    /// # Errors
    /// The server is not to be had, or does not let us in.
    pub async fn dedicated(&self) -> RedisResult<Dedicated> {
        let permit = Arc::clone(&self.0.permits).acquire_owned().await.map_err(closed)?;
        let idle = self.idle(Vec::pop);
        let connection = match idle {
            Some(connection) => connection,
            None => self.0.waiting_client.connect_patiently().await?,
        };
        Ok(Dedicated { connection, is_busy: false, pool: self.clone(), _permit: permit })
    }

    /// What carries the shared connections that have been opened so far.
    #[must_use]
    pub fn transports(&self) -> Vec<TransportInfo> {
        self.0
            .slots
            .iter()
            .filter_map(|slot| slot.connection.get())
            .map(Connection::transport_info)
            .collect()
    }

    fn idle<R>(&self, change: impl FnOnce(&mut Vec<Connection>) -> R) -> R {
        change(&mut self.0.idle.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The connection with the fewest commands under way, with one more.
    async fn next(&self) -> RedisResult<(Connection, UnderWay<'_>)> {
        // Two tasks at once may choose the same: a matter of balance, not of correctness.
        let under_way = |slot: &&Slot| slot.under_way.load(Ordering::Relaxed);
        let slot = self.0.slots.iter().min_by_key(under_way).expect("a pool has a slot");
        slot.under_way.fetch_add(1, Ordering::Relaxed);
        let guard = UnderWay(slot);
        let connection =
            slot.connection.get_or_try_init(|| self.0.client.connect_patiently()).await?;
        Ok((connection.clone(), guard))
    }
}

fn closed(error: impl std::error::Error + Send + Sync + 'static) -> RedisError {
    std::io::Error::other(error).into()
}

impl ConnectionLike for Pool {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (mut connection, _guard) = self.next().await?;
            connection.req_packed_command(cmd).await
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let (mut connection, _guard) = self.next().await?;
            connection.req_packed_commands(pipeline, offset, count).await
        })
    }

    fn get_db(&self) -> i64 {
        self.0.client.db()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.transports().len();
        f.debug_struct("Pool")
            .field("client", &self.0.client)
            .field("open", &open)
            .finish_non_exhaustive()
    }
}

/// A connection of a [`Pool`] that nobody else has: a `redis::aio::ConnectionLike`.
///
/// Dropped, it goes back to the pool as it is: who has said WATCH or SELECT takes it back, or says
/// [`Dedicated::discard`]. One whose last command was given up is closed instead, because the
/// server may still be at it.
pub struct Dedicated {
    connection: Connection,
    /// A command is under way, or was given up.
    is_busy: bool,
    pool: Pool,
    // given back after the connection: fields are dropped after `drop`
    _permit: OwnedSemaphorePermit,
}

impl Dedicated {
    /// What carries it now.
    #[must_use]
    pub fn transport_info(&self) -> TransportInfo {
        self.connection.transport_info()
    }

    /// Closes it: the pool opens another when it needs one.
    pub fn discard(mut self) {
        self.is_busy = true;
    }

    /// Notes whether an answer was the last that is to come.
    fn settle<T>(&mut self, answer: &RedisResult<T>) {
        self.is_busy = matches!(answer, Err(error) if error.is_timeout());
    }
}

impl Drop for Dedicated {
    fn drop(&mut self) {
        if !self.is_busy {
            let connection = self.connection.clone();
            self.pool.idle(|idle| idle.push(connection));
        }
    }
}

impl ConnectionLike for Dedicated {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            self.is_busy = true;
            let answer = self.connection.req_packed_command(cmd).await;
            self.settle(&answer);
            answer
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            self.is_busy = true;
            let answer = self.connection.req_packed_commands(pipeline, offset, count).await;
            self.settle(&answer);
            answer
        })
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

impl fmt::Debug for Dedicated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dedicated").field("connection", &self.connection).finish_non_exhaustive()
    }
}
