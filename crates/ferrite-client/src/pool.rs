//! A pool of connections to one server.
//!
//! A single connection can have any number of commands in flight, so it is enough for most
//! programs. Several connections help with large values: replies come in the order of their
//! commands, so a small reply waits for a large reply before it. They also help with commands that
//! block in the server (BLPOP), which delay all later commands on the same connection.
//!
//! ```text
//!   Pool ── commands ──► the shared connection with the fewest in flight ──┐
//!     └── dedicated() ─► an exclusive connection, returned when dropped ───┴─► the server
//! ```

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use redis::aio::ConnectionLike;
use redis::{Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use crate::client::{Client, TransportInfo};
use crate::connection::Connection;

/// A pool of connections: a `redis::aio::ConnectionLike` that any number of tasks can use at the
/// same time. Clones share the pool.
///
/// - A command goes to the connection with the fewest commands in flight. If all have commands
///   in flight, the pool opens a further connection.
/// - Commands that are in flight at the same time may run in any order.
/// - A pipeline goes to one connection as a whole.
/// - Use [`Pool::dedicated`] for commands that change the connection itself (SELECT, WATCH,
///   SUBSCRIBE) or block in the server (BLPOP). On a shared connection they would affect the
///   commands of other tasks.
///
/// ```no_run
/// # async fn show() -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_client::Client;
/// use ferrite_client::redis::AsyncCommands as _;
///
/// let mut pool = Client::open("redis://10.0.0.1:6380")?.pool(4);
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
    /// The same client, but without a response timeout.
    blocking_client: Client,
    /// Dedicated connections that are not in use.
    idle: Mutex<Vec<Connection>>,
    /// One permit for each dedicated connection that may be in use.
    permits: Arc<Semaphore>,
}

#[derive(Default)]
struct Slot {
    connection: OnceCell<Connection>,
    in_flight: AtomicUsize,
}

/// Counts a command in flight. This is a guard, because a command can be cancelled at any time.
struct InFlight<'a>(&'a Slot);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Client {
    /// Creates a pool of up to `size` shared connections (at least one), and as many dedicated
    /// ones. Each connection is opened when it is first needed.
    #[must_use]
    pub fn pool(&self, size: usize) -> Pool {
        Pool::new(self, size)
    }
}

impl Pool {
    fn new(client: &Client, size: usize) -> Self {
        let size = size.max(1);
        Self(Arc::new(Shared {
            client: client.clone(),
            slots: (0..size).map(|_| Slot::default()).collect(),
            blocking_client: client.without_response_timeout(),
            idle: Mutex::default(),
            permits: Arc::new(Semaphore::new(size)),
        }))
    }

    /// Returns a connection for exclusive use until it is dropped. Use it for commands that block
    /// in the server (BLPOP, XREAD BLOCK, WAIT), and for those that change the connection. It never
    /// has a response timeout, even if the client's settings have one.
    ///
    /// Dedicated connections exist in addition to the shared ones, and are limited to the same
    /// number. If all are in use, this waits until one is dropped.
    ///
    /// # Errors
    /// Returns an error if the server cannot be reached, or rejects the login.
    pub async fn dedicated(&self) -> RedisResult<Dedicated> {
        let permit = Arc::clone(&self.0.permits).acquire_owned().await.map_err(to_redis_error)?;
        let idle = self.idle(Vec::pop);
        let connection = match idle {
            Some(connection) => connection,
            None => self.0.blocking_client.connect_with_retries().await?,
        };
        Ok(Dedicated { connection, is_busy: false, pool: self.clone(), _permit: permit })
    }

    /// Returns the transports of the shared connections that have been opened so far.
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

    /// Returns the connection with the fewest commands in flight, and counts a further command
    /// there.
    async fn next(&self) -> RedisResult<(Connection, InFlight<'_>)> {
        // Two tasks may choose the same connection at once, which only affects the balance.
        let in_flight = |slot: &&Slot| slot.in_flight.load(Ordering::Relaxed);
        let slot = self.0.slots.iter().min_by_key(in_flight).expect("a pool has at least one slot");
        slot.in_flight.fetch_add(1, Ordering::Relaxed);
        let guard = InFlight(slot);
        let connection =
            slot.connection.get_or_try_init(|| self.0.client.connect_with_retries()).await?;
        Ok((connection.clone(), guard))
    }
}

fn to_redis_error(error: impl std::error::Error + Send + Sync + 'static) -> RedisError {
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

/// A connection of a [`Pool`] for exclusive use: a `redis::aio::ConnectionLike`.
///
/// When it is dropped, it returns to the pool in its current state. Undo WATCH and SELECT before
/// that, or call [`Dedicated::discard`]. If its last command was cancelled or has timed out, the
/// connection is closed instead, because the server may still be running the command.
pub struct Dedicated {
    connection: Connection,
    /// Whether the connection must not return to the pool: a command is in flight, was cancelled or
    /// has timed out.
    is_busy: bool,
    pool: Pool,
    // Released after the connection has returned to the pool: fields are dropped after `drop` has
    // run.
    _permit: OwnedSemaphorePermit,
}

impl Dedicated {
    /// Returns the transport that the connection uses now.
    #[must_use]
    pub fn transport_info(&self) -> TransportInfo {
        self.connection.transport_info()
    }

    /// Closes the connection. The pool opens another one when necessary.
    pub fn discard(mut self) {
        self.is_busy = true;
    }

    /// Records that the command is done. After a timeout, the command is not done: its reply may
    /// still come.
    fn settle<T>(&mut self, result: &RedisResult<T>) {
        self.is_busy = matches!(result, Err(error) if error.is_timeout());
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
            let result = self.connection.req_packed_command(cmd).await;
            self.settle(&result);
            result
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
            let result = self.connection.req_packed_commands(pipeline, offset, count).await;
            self.settle(&result);
            result
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
