//! A connection that reconnects when the underlying one is lost.
//!
//! A command fails if the connection breaks before its reply. It may have been executed, and only
//! the caller knows whether it may be sent twice. The next command opens a new connection, or waits
//! until another task has opened it.
//!
//! A connection with subscriptions is opened again at once, because its user may only be waiting
//! for messages. The subscriptions are restored before any other command runs on the new
//! connection. Messages that were published in the meantime are lost.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisFuture, RedisResult, Value};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::client::{Client, Dialed, TransportInfo, current_runtime, is_connection_error};
use crate::subscriptions::{Subscriptions, changes_subscriptions};

/// A connection to a server: a `redis::aio::ConnectionLike` that any number of tasks can use at the
/// same time. Clones share it.
#[derive(Clone)]
pub struct Connection(Arc<Shared>);

struct Shared {
    client: Client,
    current: RwLock<Current>,
    /// Held by the task that opens the next connection.
    opening: Mutex<()>,
}

struct Current {
    connection: MultiplexedConnection,
    transport_info: TransportInfo,
    /// The number of connections that were lost before this one.
    number: u64,
    is_lost: bool,
    subscriptions: Subscriptions,
    /// How long to wait before the subscriptions are restored, if this connection lives no longer.
    pause: Duration,
}

impl Client {
    /// Opens a connection. Its clones share it, and can use it at the same time.
    ///
    /// # Errors
    /// Returns an error if the server cannot be reached, or rejects the login.
    pub async fn connect(&self) -> RedisResult<Connection> {
        Ok(Connection::new(self.clone(), self.dial().await?))
    }

    /// Like [`Client::connect`], but retries as often as for a lost connection.
    pub(crate) async fn connect_with_retries(&self) -> RedisResult<Connection> {
        Ok(Connection::new(self.clone(), self.dial_with_retries().await?))
    }
}

impl Connection {
    fn new(client: Client, dialed: Dialed) -> Self {
        let Dialed { connection, transport_info, driver } = dialed;
        let current = Current {
            connection,
            transport_info,
            number: 0,
            is_lost: false,
            subscriptions: Subscriptions::default(),
            pause: Duration::ZERO,
        };
        let shared = Shared { client, current: RwLock::new(current), opening: Mutex::default() };
        let connection = Self(Arc::new(shared));
        connection.restore_after(driver, 0);
        connection
    }

    /// Returns the transport that the connection uses now.
    #[must_use]
    pub fn transport_info(&self) -> TransportInfo {
        self.current(|current| current.transport_info.clone())
    }

    /// Returns how often the connection was opened again.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.current(|current| current.number)
    }

    fn current<R>(&self, read: impl FnOnce(&Current) -> R) -> R {
        read(&self.0.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<R>(&self, change: impl FnOnce(&mut Current) -> R) -> R {
        change(&mut self.0.current.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a connection that is not known to be lost, and its number. Opens a new one if
    /// necessary.
    async fn usable(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        current_runtime()?; // redis-rs would panic
        let usable =
            || self.current(|now| (!now.is_lost).then(|| (now.connection.clone(), now.number)));
        if let Some(usable) = usable() {
            return Ok(usable);
        }
        let _opening = self.0.opening.lock().await;
        if let Some(usable) = usable() {
            return Ok(usable); // another task has opened it in the meantime
        }
        let Dialed { mut connection, transport_info, driver } =
            self.0.client.dial_with_retries().await?;
        let mut subscribed = Subscriptions::default();
        let number = loop {
            let wanted = self.current(|now| now.subscriptions.clone());
            if wanted != subscribed {
                for command in wanted.commands() {
                    connection.req_packed_command(&command).await?;
                }
                subscribed = wanted;
            }
            // A reply on the old connection may have been noted in the meantime.
            let replaced = self.change(|now| {
                (now.subscriptions == subscribed).then(|| {
                    now.number += 1;
                    now.is_lost = false;
                    now.connection = connection.clone();
                    now.transport_info = transport_info.clone();
                    now.number
                })
            });
            if let Some(number) = replaced {
                break number;
            }
        };
        self.restore_after(driver, number);
        Ok((connection, number))
    }

    /// Waits for the end of the connection with this number, and restores its subscriptions.
    fn restore_after(&self, driver: JoinHandle<()>, number: u64) {
        let (shared, opened) = (Arc::downgrade(&self.0), Instant::now());
        tokio::spawn(async move {
            let _ = driver.await;
            if let Some(connection) = shared.upgrade().map(Self) {
                connection.note_end(number, opened.elapsed());
            }
            restore(shared, number).await;
        });
    }

    /// Notes that the connection with this number has ended. A server may close each one as soon
    /// as it has subscribed: then the pauses grow.
    fn note_end(&self, number: u64, lived: Duration) {
        let (first, longest) = (self.0.client.first_wait(), self.0.client.longest_wait());
        self.change(|now| {
            now.is_lost |= now.number == number;
            now.pause = match lived >= longest {
                true => Duration::ZERO,
                false => (now.pause * 2).max(first).min(longest),
            };
        });
    }

    /// Notes the subscriptions of commands that were carried out on the connection with this
    /// number. Returns whether they must be carried out again, because a new connection has
    /// replaced that one and does not have them.
    fn note<'a>(&self, commands: impl Iterator<Item = &'a Cmd>, number: u64) -> bool {
        let mut commands = commands.filter(|command| changes_subscriptions(command)).peekable();
        if commands.peek().is_none() {
            return false;
        }
        let (is_replaced, is_lost) = self.change(|now| {
            for command in commands {
                now.subscriptions.note(command);
            }
            (now.number != number, now.is_lost)
        });
        if is_lost && !is_replaced {
            // The connection has ended before its subscriptions were known.
            tokio::spawn(restore(Arc::downgrade(&self.0), number));
        }
        is_replaced
    }

    /// Marks the connection as lost if the result is a connection error. A timeout is not one.
    fn check_lost<T>(&self, number: u64, result: &RedisResult<T>) {
        if let Err(error) = result
            && is_connection_error(error)
            && !error.is_timeout()
        {
            self.change(|now| now.is_lost |= now.number == number);
        }
    }
}

/// Opens the connection after the one with this number if there are subscriptions, for as long as
/// anybody holds it.
async fn restore(shared: Weak<Shared>, number: u64) {
    let pause = shared.upgrade().map(|it| Connection(it).current(|now| now.pause));
    sleep(pause.unwrap_or_default()).await;
    while let Some(connection) = shared.upgrade().map(Connection) {
        let is_restored =
            connection.current(|now| now.number != number || now.subscriptions.is_empty());
        if is_restored || connection.usable().await.is_ok() {
            return;
        }
        let wait = connection.0.client.longest_wait();
        drop(connection);
        sleep(wait).await;
    }
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            loop {
                let (mut connection, number) = self.usable().await?;
                let result = connection.req_packed_command(cmd).await;
                self.check_lost(number, &result);
                if result.is_err() || !self.note(std::iter::once(cmd), number) {
                    return result;
                }
            }
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let (mut connection, number) = self.usable().await?;
            let result = connection.req_packed_commands(pipeline, offset, count).await;
            self.check_lost(number, &result);
            // A pipeline may have other commands, which must not run twice.
            if result.is_ok() && self.note(pipeline.cmd_iter(), number) {
                self.change(|now| now.is_lost = true);
            }
            result
        })
    }

    fn get_db(&self) -> i64 {
        self.0.client.db()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("transport_info", &self.transport_info())
            .finish_non_exhaustive()
    }
}
