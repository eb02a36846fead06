//! A connection that reconnects when the underlying one is lost.
//!
//! A command fails if the connection breaks before its reply. It may have been executed, and only
//! the caller knows whether it may be sent twice. The next command opens a new connection, or waits
//! until another task has opened it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisFuture, RedisResult, Value};
use tokio::sync::Mutex;

use crate::client::{Client, TransportInfo, is_connection_error};

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
}

impl Client {
    /// Opens a connection. Its clones share it, and can use it at the same time.
    ///
    /// # Errors
    /// Returns an error if the server cannot be reached, or rejects the login.
    pub async fn connect(&self) -> RedisResult<Connection> {
        let (connection, transport_info) = self.dial().await?;
        Ok(Connection::new(self.clone(), connection, transport_info))
    }

    /// Like [`Client::connect`], but retries as often as for a lost connection.
    pub(crate) async fn connect_with_retries(&self) -> RedisResult<Connection> {
        let (connection, transport_info) = self.dial_with_retries().await?;
        Ok(Connection::new(self.clone(), connection, transport_info))
    }
}

impl Connection {
    fn new(
        client: Client,
        connection: MultiplexedConnection,
        transport_info: TransportInfo,
    ) -> Self {
        let current =
            RwLock::new(Current { connection, transport_info, number: 0, is_lost: false });
        Self(Arc::new(Shared { client, current, opening: Mutex::default() }))
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

    fn change(&self, change: impl FnOnce(&mut Current)) {
        change(&mut self.0.current.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns a connection that is not known to be lost, and its number. Opens a new one if
    /// necessary.
    async fn usable(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        let usable =
            || self.current(|now| (!now.is_lost).then(|| (now.connection.clone(), now.number)));
        if let Some(usable) = usable() {
            return Ok(usable);
        }
        let _opening = self.0.opening.lock().await;
        if let Some(usable) = usable() {
            return Ok(usable); // another task has opened it in the meantime
        }
        let (connection, transport_info) = self.0.client.dial_with_retries().await?;
        self.change(|now| {
            let number = now.number + 1;
            *now =
                Current { connection: connection.clone(), transport_info, number, is_lost: false };
        });
        Ok((connection, self.reconnects()))
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

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (mut connection, number) = self.usable().await?;
            let result = connection.req_packed_command(cmd).await;
            self.check_lost(number, &result);
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
            let (mut connection, number) = self.usable().await?;
            let result = connection.req_packed_commands(pipeline, offset, count).await;
            self.check_lost(number, &result);
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
