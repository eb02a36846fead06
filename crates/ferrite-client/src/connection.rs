//! A connection that reconnects when the underlying connection is lost.
//!
//! A command fails if the connection breaks before its reply. The server may have executed the
//! command, and only the caller knows whether it may be sent twice. The next command opens a new
//! connection, or waits until another task has opened it.
//!
//! A connection with subscriptions is opened again without waiting for the next command, because
//! its user may only be waiting for messages. The subscriptions are restored before any other
//! command runs on the new connection. Messages that were published in the meantime are lost. If
//! the server refuses to restore a subscription, that subscription ends, and the receiver of push
//! messages gets a message.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};
use std::{fmt, io};

use ferrite_session::TransportObserver;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{
    Cmd, ErrorKind, Pipeline, PushInfo, PushKind, RedisError, RedisFuture, RedisResult, Value,
};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::client::{Client, Dialed, TransportInfo, current_runtime, is_connection_error};
use crate::progress::Progress;
use crate::subscriptions::{Effect, Kind, Subscriptions, effect};

/// A connection to a server: a `redis::aio::ConnectionLike` that any number of tasks can use at the
/// same time. Clones share the connection.
#[derive(Clone)]
pub struct Connection(Arc<Shared>);

struct Shared {
    client: Client,
    current: RwLock<Current>,
    /// Locked by the task that opens the next connection. Contains the error of the last failed
    /// attempt.
    opening: Mutex<Option<RedisError>>,
    /// The number of failed attempts.
    failures: AtomicU64,
}

struct Current {
    usable: Usable,
    observer: TransportObserver,
    is_lost: bool,
    subscriptions: Subscriptions,
    /// How long to wait before the subscriptions of a lost connection are restored. The pause grows
    /// while connections end soon after they were opened.
    pause: Duration,
}

/// The parts of a connection that a command needs.
#[derive(Clone)]
struct Usable {
    connection: MultiplexedConnection,
    progress: Arc<Progress>,
    /// The number of connections that were lost before this one.
    number: u64,
}

/// A subscription that the server has refused to restore, and the reason.
type Refused = (Kind, Vec<u8>, String);

impl Client {
    /// Opens a connection. Its clones share the connection, and can use it at the same time.
    ///
    /// # Errors
    /// Returns an error if the server cannot be reached, or rejects the login.
    pub async fn connect(&self) -> RedisResult<Connection> {
        Ok(Connection::new(self.clone(), self.dial().await?))
    }

    /// Works like [`Client::connect`], but retries as often as for a lost connection.
    pub(crate) async fn connect_with_retries(&self) -> RedisResult<Connection> {
        Ok(Connection::new(self.clone(), self.dial_with_retries().await?))
    }
}

impl Connection {
    fn new(client: Client, dialed: Dialed) -> Self {
        let Dialed { connection, observer, progress, driver } = dialed;
        let current = Current {
            usable: Usable { connection, progress, number: 0 },
            observer,
            is_lost: false,
            subscriptions: Subscriptions::default(),
            pause: Duration::ZERO,
        };
        let current = RwLock::new(current);
        let (opening, failures) = (Mutex::default(), AtomicU64::new(0));
        let connection = Self(Arc::new(Shared { client, current, opening, failures }));
        connection.restore_after(driver, 0);
        connection
    }

    /// Returns the transport that the connection uses now.
    #[must_use]
    pub fn transport_info(&self) -> TransportInfo {
        self.current(|current| TransportInfo::now(&current.observer))
    }

    /// Returns how many times the connection was opened again.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.current(|current| current.usable.number)
    }

    fn current<R>(&self, read: impl FnOnce(&Current) -> R) -> R {
        read(&self.0.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<R>(&self, change: impl FnOnce(&mut Current) -> R) -> R {
        change(&mut self.0.current.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a connection that is not known to be lost. Opens a new one if necessary.
    async fn usable(&self) -> RedisResult<Usable> {
        current_runtime()?; // redis-rs would panic
        let usable = || self.current(|now| (!now.is_lost).then(|| now.usable.clone()));
        if let Some(usable) = usable() {
            return Ok(usable);
        }
        let failures_before = self.0.failures.load(Ordering::Relaxed);
        let mut last_failure = self.0.opening.lock().await;
        if let Some(usable) = usable() {
            return Ok(usable); // another task has opened this in the meantime
        }
        // A task that waited for another task's attempt shares the failure of that attempt. If all
        // waiting tasks tried one after the other, the last task would wait for all the attempts.
        if let Some(failure) = last_failure.as_ref()
            && self.0.failures.load(Ordering::Relaxed) != failures_before
        {
            return Err(failure.clone());
        }
        let opened = self.open_next().await;
        if let Err(failure) = &opened {
            *last_failure = Some(failure.clone());
            self.0.failures.fetch_add(1, Ordering::Relaxed);
        }
        opened
    }

    /// Opens the next connection and restores the subscriptions.
    async fn open_next(&self) -> RedisResult<Usable> {
        let client = &self.0.client;
        let Dialed { connection, observer, progress, driver } = client.dial_with_retries().await?;
        let number = self.reconnects() + 1;
        let mut opened = Usable { connection, progress, number };
        let (mut subscribed, mut refused) = (Subscriptions::default(), Vec::new());
        loop {
            let wanted = self.current(|now| now.subscriptions.clone());
            if wanted != subscribed {
                refused = self.subscribe(&mut opened, &wanted).await?;
                subscribed = wanted;
            }
            // A reply on the old connection may have changed the subscriptions in the meantime.
            let is_replaced = self.change(|now| {
                let is_complete = now.subscriptions == subscribed;
                if is_complete {
                    for (kind, name, _) in &refused {
                        now.subscriptions.remove(*kind, name);
                    }
                    now.is_lost = false;
                    now.usable = opened.clone();
                    now.observer = observer.clone();
                }
                is_complete
            });
            if is_replaced {
                break;
            }
        }
        self.restore_after(driver, number);
        for (kind, name, reason) in refused {
            if let Some(sender) = client.push_sender() {
                let kind = match kind {
                    Kind::Channel => PushKind::Unsubscribe,
                    Kind::Pattern => PushKind::PUnsubscribe,
                    Kind::ShardChannel => PushKind::SUnsubscribe,
                };
                let data = [name, reason.into_bytes()].map(Value::BulkString).to_vec();
                let _ = sender.send(PushInfo { kind, data }); // fails if nobody receives any more
            }
        }
        Ok(opened)
    }

    /// Subscribes a new connection. Returns the subscriptions that the server has refused.
    async fn subscribe(
        &self,
        opened: &mut Usable,
        wanted: &Subscriptions,
    ) -> RedisResult<Vec<Refused>> {
        let mut commands = redis::pipe();
        for (kind, name) in wanted.iter() {
            commands.add_command(kind.subscribe(name));
        }
        let (count, connection) = (commands.len(), &mut opened.connection);
        let limit = self.0.client.response_timeout();
        let replies = connection.req_packed_commands(&commands, 0, count);
        let replies = opened.progress.wait(limit, replies).await;
        let replies = replies.unwrap_or_else(|| Err(no_progress(limit)))?;
        let refused = wanted.iter().zip(replies).filter_map(|((kind, name), reply)| match reply {
            Value::ServerError(reason) => {
                Some((kind, name.clone(), RedisError::from(reason).to_string()))
            }
            _ => None,
        });
        Ok(refused.collect())
    }

    /// Starts a task that waits for the end of the connection with this number and then restores
    /// its subscriptions.
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

    /// Records that the connection with this number has ended. If it was open only for a short
    /// time, the next pause is longer: a server may close each connection as soon as the client
    /// has subscribed.
    fn note_end(&self, number: u64, lived: Duration) {
        let (first, longest) = (self.0.client.first_wait(), self.0.client.longest_wait());
        self.change(|now| {
            now.is_lost |= now.usable.number == number;
            now.pause = match lived >= longest {
                true => Duration::ZERO,
                false => (now.pause * 2).max(first).min(longest),
            };
        });
    }

    /// Records the subscriptions of commands that ran on the connection with this number. Returns
    /// whether the commands must run again, because a new connection without these subscriptions
    /// has replaced it.
    fn note<'a>(&self, commands: impl Iterator<Item = &'a Cmd>, number: u64) -> bool {
        let mut commands = commands.filter(|command| effect(command).is_some()).peekable();
        if commands.peek().is_none() {
            return false;
        }
        let (is_replaced, is_lost) = self.change(|now| {
            for command in commands {
                now.subscriptions.note(command);
            }
            (now.usable.number != number, now.is_lost)
        });
        if is_lost && !is_replaced {
            // The connection ended before its subscriptions were known.
            tokio::spawn(restore(Arc::downgrade(&self.0), number));
        }
        is_replaced
    }

    /// Waits for a reply on a connection. Marks the connection as lost if it has failed or makes no
    /// progress.
    async fn reply<T>(
        &self,
        (number, progress): (u64, &Progress),
        reply: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        let limit = self.0.client.response_timeout();
        let result = progress.wait(limit, reply).await;
        let is_lost = match &result {
            None => true,
            // A timeout does not mean a lost connection: redis-rs's own limit may be short
            // (`ClientBuilder::config`).
            Some(Err(error)) => is_connection_error(error) && !error.is_timeout(),
            Some(Ok(_)) => false,
        };
        if is_lost {
            self.change(|now| now.is_lost |= now.usable.number == number);
        }
        result.unwrap_or_else(|| Err(no_progress(limit)))
    }

    /// Rejects a subscription in RESP2, because redis-rs would take its messages for replies.
    fn check_protocol<'a>(&self, mut commands: impl Iterator<Item = &'a Cmd>) -> RedisResult<()> {
        let subscribes = |command| matches!(effect(command), Some(Effect::Subscribe(_)));
        if self.0.client.is_resp3() || !commands.any(subscribes) {
            return Ok(());
        }
        let message = "subscriptions need RESP3: use ClientBuilder::push_sender, or ?protocol=3";
        Err(RedisError::from((ErrorKind::InvalidClientConfig, message)))
    }
}

fn is_error(value: &Value) -> bool {
    matches!(value, Value::ServerError(_))
}

fn no_progress(limit: Option<Duration>) -> RedisError {
    let message = format!("the server has sent nothing for {:?}", limit.unwrap_or_default());
    io::Error::new(io::ErrorKind::TimedOut, message).into()
}

/// Replaces the connection with this number if there are subscriptions to restore. Tries until that
/// succeeds, or until the last [`Connection`] is dropped.
async fn restore(shared: Weak<Shared>, number: u64) {
    let pause = shared.upgrade().map(|it| Connection(it).current(|now| now.pause));
    sleep(pause.unwrap_or_default()).await;
    while let Some(connection) = shared.upgrade().map(Connection) {
        let is_restored =
            connection.current(|now| now.usable.number != number || now.subscriptions.is_empty());
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
            self.check_protocol(std::iter::once(cmd))?;
            if let Some(split) = self.current(|now| now.subscriptions.split(cmd)) {
                let mut replies = self.req_packed_commands(&split, 0, split.len()).await?;
                let error = replies.iter().position(is_error);
                let last = replies.len() - 1;
                return Ok(replies.swap_remove(error.unwrap_or(last)));
            }
            loop {
                let Usable { mut connection, progress, number } = self.usable().await?;
                let reply = connection.req_packed_command(cmd);
                let result = self.reply((number, &progress), reply).await;
                let is_done = matches!(&result, Ok(value) if !is_error(value));
                if !is_done || !self.note(std::iter::once(cmd), number) {
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
            self.check_protocol(pipeline.cmd_iter())?;
            let Usable { mut connection, progress, number } = self.usable().await?;
            let replies = connection.req_packed_commands(pipeline, offset, count);
            let result = self.reply((number, &progress), replies).await;
            let Ok(values) = &result else { return result };
            // In a transaction, the replies do not correspond to the commands one by one.
            let refused = |at: usize| offset == 0 && values.get(at).is_some_and(is_error);
            let commands = pipeline.cmd_iter().enumerate().filter(|(at, _)| !refused(*at));
            // The pipeline may have other commands, which must not run twice. Therefore it is not
            // sent again: a new connection restores the subscriptions.
            if self.note(commands.map(|(_, command)| command), number) {
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
