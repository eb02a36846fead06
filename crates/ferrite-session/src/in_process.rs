//! A session inside the engine: data commands are called in-process where the engine allows it, all
//! others are proxied to the engine's own socket, in order.
//!
//! ```text
//!   client ──► input ──► calls (ProxyClient::call) ─────────────────┐
//!                 │                                                 ├─► replies ──► client
//!                 └────► proxy connection ──► replies, as they come ┘
//!                              │
//!   engine ◄── asked by client id: user, database, transaction, whether the client still exists
//! ```
//!
//! Commands are taken in runs: consecutive commands that are all called, or all proxied. After each
//! proxied run, the session asks the engine for the client's state ([`ProxyClient::refresh`]). It
//! does not ask after a command that was replaced ([`InProcessEngine::instead`]). The session
//! infers nothing from replies to the client's commands; it counts them only to keep replies in the
//! order of their commands.
//!
//! The memory that a client can make a session hold is bounded. Before authentication, no input is
//! read while too many replies are unread. Afterwards, replies are kept up to the engine's own
//! limits, `client-output-buffer-limit` and `maxmemory-clients`.
//!
//! | file | |
//! |---|---|
//! | `reading.rs` | reads the client's input |
//! | `runs.rs` | divides the client's commands into runs |
//! | `calling.rs` | calls the commands of a run |
//! | `proxying.rs` | sends commands over the proxy connection |
//! | `exchange.rs` | moves bytes between client and engine until the expected replies have come |
//! | `sending.rs` | sends replies to the client |
//! | `limits.rs` | bounds the memory of replies, and the sessions before authentication |
//! | `ending.rs` | pins the session to the proxy path, or delivers the last replies |
//! | `proxy_connection.rs` | the connection to the engine's socket |

mod calling;
mod ending;
mod exchange;
mod limits;
mod proxy_connection;
mod proxying;
mod reading;
mod runs;
mod sending;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::{Limits, ReplyFramer};
use tokio::io::{ReadHalf, WriteHalf};

use crate::in_process_engine::{
    Access, Client, InProcessEngine, Input, ProxyClient, Replies, RunCommand, range_of,
};
use crate::pump::Moved;
use crate::sessions::OpenSession;
use exchange::{ExchangeOutcome, ExpectedReplies};
use limits::{BeforeAuthQueue, OutputGuard};
pub(crate) use proxy_connection::ProxyConnection;
use proxying::LargeCommand;
use runs::{RUN_MAX, Route};

/// Counts on which path the commands of in-process sessions went. Also holds the queue of sessions
/// before authentication.
#[derive(Debug, Default)]
pub(crate) struct CommandPaths {
    pub(crate) called: AtomicU64,
    pub(crate) proxied: AtomicU64,
    /// The number of sessions that were pinned to the proxy path.
    pub(crate) pinned: AtomicU64,
    pub(crate) before_auth: BeforeAuthQueue,
}

/// How the in-process part of a session has ended.
pub(crate) enum ServeOutcome {
    /// The client or the engine has disconnected, or the session must disconnect the client. The
    /// caller closes the client's connection.
    Closed,
    /// The session is pinned to the proxy path. The bytes in `unsent` must be sent to the engine
    /// first.
    Pinned { proxy: ProxyConnection, unsent: Vec<u8> },
}

/// How many bytes of a reply to the session's own command are kept.
const OWN_REPLY_MAX: usize = 512;
/// How deep replies may be nested. Scripts cannot nest them deeper than this.
const DEPTH_MAX: u32 = 1 << 16;

/// Serves a client until the client or the engine disconnects, or until the session is pinned to
/// the proxy path. `first` are the bytes that the client has already sent.
///
/// # Errors
/// Returns an error if a connection fails, or if the client exceeds a limit of the engine.
pub(crate) async fn serve<C>(
    (client, first): (&mut C, &[u8]),
    proxy: ProxyConnection,
    (engine, record): (&dyn InProcessEngine, &dyn ProxyClient),
    (open, paths): (&OpenSession, &CommandPaths),
) -> io::Result<ServeOutcome>
where
    C: Client,
{
    let (proxy_reads, proxy_writes) = tokio::io::split(proxy);
    let unlimited = Limits {
        bulk_bytes: u64::MAX >> 1,
        inline_bytes: u32::MAX,
        depth: DEPTH_MAX,
        ..Limits::default()
    };
    let session = InProcessSession {
        client,
        proxy_reads,
        proxy_writes,
        engine,
        record,
        open,
        paths,
        access: Access::Proxy { in_transaction: false, is_authenticated: false },
        must_identify: false,
        is_next_affected: false,
        input: Input::from_bytes(first),
        engine_bytes: Vec::new(),
        counter: ReplyFramer::new(unlimited),
        is_push: None,
        own_reply: Vec::new(),
        replies: Replies::default(),
        output: OutputGuard::default(),
        reads_since_send: 0,
        must_settle: false,
        has_unmarked_writes: false,
        active_at: engine.seconds(),
    };
    session.run().await
}

struct InProcessSession<'a, C> {
    client: &'a mut C,
    proxy_reads: ReadHalf<ProxyConnection>,
    proxy_writes: WriteHalf<ProxyConnection>,
    engine: &'a dyn InProcessEngine,
    record: &'a dyn ProxyClient,
    open: &'a OpenSession,
    paths: &'a CommandPaths,
    /// The access that the engine has reported last.
    access: Access,
    /// Whether the client must be identified again, because a proxied command may have changed its
    /// identity.
    must_identify: bool,
    /// Whether the next command must be proxied, because the command before it affects it
    /// ([`SessionCommand::AffectsNext`]).
    is_next_affected: bool,
    input: Input,
    /// Bytes from the engine that are not processed yet.
    engine_bytes: Vec<u8>,
    counter: ReplyFramer,
    /// Whether the reply that has begun is a push message. `None` if no reply has begun.
    is_push: Option<bool>,
    /// The last reply to a command of the session itself, at most [`OWN_REPLY_MAX`] bytes of it.
    own_reply: Vec<u8>,
    /// Replies to the client.
    replies: Replies,
    output: OutputGuard,
    /// How often the client's input was read since replies were last sent.
    reads_since_send: u8,
    must_settle: bool,
    /// Whether calls have written data since the last mark for WAIT on the proxy connection
    /// ([`ProxyClient::mark_writes`]).
    has_unmarked_writes: bool,
    /// The value of [`InProcessEngine::seconds`] when the session last showed the engine that the
    /// client is active.
    active_at: u64,
}

impl<C: Client> InProcessSession<'_, C> {
    async fn run(mut self) -> io::Result<ServeOutcome> {
        if !self.identify().await? {
            // The engine did not accept the connection (too many clients, for example). Its reply
            // says why.
            let refusal = std::mem::take(&mut self.own_reply);
            self.replies.bytes().extend_from_slice(&refusal);
            self.write_replies().await?;
            return Ok(ServeOutcome::Closed);
        }
        let mut run = Vec::new();
        loop {
            let outcome = match self.take_run(&mut run) {
                Some(Route::Call) => self.call(&run).await?,
                Some(Route::Proxy(Some(SessionCommand::PinsToProxy))) => {
                    let Some(outcome) = self.proxy_if_refused().await? else {
                        return self.pin().await;
                    };
                    outcome
                }
                Some(Route::Proxy(Some(SessionCommand::AsksForWrites))) => {
                    self.proxy_wait(&run).await?
                }
                Some(Route::Proxy(command)) => self.proxy(&run, command).await?,
                Some(Route::Instead(other)) => self.proxy_instead(&run, other).await?,
                None => match self.large_command() {
                    Some(LargeCommand::Pins) => return self.pin().await,
                    Some(command) => {
                        let may_be_refused = matches!(command, LargeCommand::MayBeRefused);
                        let Some(outcome) = self.stream(may_be_refused).await? else {
                            return self.pin().await;
                        };
                        outcome
                    }
                    None if self.wait_for_input().await? => continue,
                    None => return Ok(ServeOutcome::Closed),
                },
            };
            match outcome {
                ExchangeOutcome::Answered if self.access == Access::Gone => {
                    return self.deliver_last_replies().await;
                }
                ExchangeOutcome::Answered => {}
                ExchangeOutcome::Disconnected => return Ok(ServeOutcome::Closed),
                ExchangeOutcome::OutOfSync { unsent } => return self.hand_over(unsent).await,
            }
            self.pause_if_due(run.len() == RUN_MAX).await;
        }
    }

    /// Identifies the proxy connection to the engine, and asks for the client's state. Returns
    /// false if the engine did not accept the connection.
    async fn identify(&mut self) -> io::Result<bool> {
        self.exchange(self.record.identify(), ExpectedReplies::own(), false).await?;
        self.access = self.record.refresh();
        Ok(self.record.id().is_some())
    }

    /// Yields to other sessions if `is_due`, or if the event-loop slice is used up.
    async fn pause_if_due(&self, is_due: bool) {
        if is_due || !self.engine.has_time() {
            yield_now().await;
        }
    }

    fn moved(&self) -> &Moved {
        &self.open.entry.moved
    }

    fn count_input(&self, run: &[RunCommand]) {
        self.moved().to_engine.fetch_add(range_of(run).len() as u64, Ordering::Relaxed);
    }
}

/// Yields to other sessions once.
async fn yield_now() {
    let mut has_yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
