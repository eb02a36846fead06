//! A connection that outlives the one below it.
//!
//! A command that was under way when the connection broke fails: it may have been carried out, and
//! only the caller knows whether it may be said twice. The next one finds a new connection, or
//! waits for it.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use ferrite_fabric::Fallback;
use ferrite_session::SessionTransport;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisFuture, RedisResult, Value};
use tokio::sync::Mutex;

use crate::client::{Client, is_of_the_connection};

/// What carries a connection.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TransportInfo {
    /// RDMA to a Ferrite peer or a Valkey server, or TCP, with TLS or without.
    pub transport: SessionTransport,
    /// The device, on RDMA.
    pub device: Option<String>,
    /// Why it is on TCP, if RDMA was preferred.
    pub fallback: Option<Fallback>,
}

/// A connection to a server, for any number of tasks at a time: a `redis::aio::ConnectionLike`.
/// Clones share it.
#[derive(Clone)]
pub struct Connection(Arc<Shared>);

struct Shared {
    client: Client,
    current: RwLock<Current>,
    /// Held by who opens the next.
    opening: Mutex<()>,
}

struct Current {
    connection: MultiplexedConnection,
    transport_info: TransportInfo,
    /// Of how many.
    number: u64,
    is_lost: bool,
}

impl Connection {
    pub(crate) fn new(
        client: Client,
        connection: MultiplexedConnection,
        transport_info: TransportInfo,
    ) -> Self {
        let current =
            RwLock::new(Current { connection, transport_info, number: 0, is_lost: false });
        Self(Arc::new(Shared { client, current, opening: Mutex::default() }))
    }

    /// What carries it now.
    #[must_use]
    pub fn transport_info(&self) -> TransportInfo {
        self.current(|current| current.transport_info.clone())
    }

    /// How often it was opened again.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.current(|current| current.number)
    }

    fn current<R>(&self, look: impl FnOnce(&Current) -> R) -> R {
        look(&self.0.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change(&self, change: impl FnOnce(&mut Current)) {
        change(&mut self.0.current.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// A connection that is not known to be lost, and its number.
    async fn usable(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        let usable =
            || self.current(|now| (!now.is_lost).then(|| (now.connection.clone(), now.number)));
        if let Some(usable) = usable() {
            return Ok(usable);
        }
        let _opening = self.0.opening.lock().await;
        if let Some(usable) = usable() {
            return Ok(usable); // somebody else has opened it meanwhile
        }
        let (connection, transport_info) = self.0.client.dial_patiently().await?;
        self.change(|now| {
            let number = now.number + 1;
            *now =
                Current { connection: connection.clone(), transport_info, number, is_lost: false };
        });
        Ok((connection, self.reconnects()))
    }

    /// Notes that a connection is lost, if that is what an answer says.
    fn judge<T>(&self, number: u64, answer: &RedisResult<T>) {
        if let Err(error) = answer
            && is_of_the_connection(error)
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
            let answer = connection.req_packed_command(cmd).await;
            self.judge(number, &answer);
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
            let (mut connection, number) = self.usable().await?;
            let answer = connection.req_packed_commands(pipeline, offset, count).await;
            self.judge(number, &answer);
            answer
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
