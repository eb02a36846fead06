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

mod exchange;
mod limits;
mod proxy_connection;
mod proxying;
mod sending;
#[cfg(test)]
mod tests;

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use ferrite_proto::SessionCommand;
use ferrite_proto::resp::{Limits, ReplyFramer};
use tokio::io::{AsyncReadExt as _, AsyncWrite as _, ReadBuf, ReadHalf, WriteHalf};
use tokio::time::timeout;

use crate::in_process_engine::{
    Access, BEFORE_AUTH, Client, CommandKind, Commands, FoundCommand, InProcessEngine, Input,
    ProxyClient, READ_MAX, REPLIES_MAX, Replies, RunCommand, range_of,
};
use crate::pump::Moved;
use crate::sessions::OpenSession;
use exchange::{Event, ExchangeOutcome, ExpectedReplies, next_event};
use limits::{BeforeAuthQueue, OutputGuard};
use proxy_connection::EMPTY_LINE;
pub(crate) use proxy_connection::ProxyConnection;
use proxying::LargeCommand;

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

/// The largest number of commands in a run. After that many, other sessions run first.
const RUN_MAX: usize = 64;
/// The largest number of commands in a run before authentication. Engines disconnect a client that
/// has not logged in, and log that, when more than 1 KiB of its replies are unread. The reply to an
/// unknown command can have 300 bytes, so three replies fit.
const RUN_MAX_BEFORE_AUTH: usize = 3;
/// The number of consecutive reads after which gathered replies are sent in any case.
const READS_PER_SEND: u8 = 32;
/// How many bytes of a reply to the session's own command are kept.
const OWN_REPLY_MAX: usize = 512;
/// How deep replies may be nested. Scripts cannot nest them deeper than this.
const DEPTH_MAX: u32 = 1 << 16;
/// How long to wait for the engine's last replies after it has freed the client, and then for the
/// client to accept them.
const LAST_REPLIES_TIMEOUT: Duration = Duration::from_secs(1);

/// The path of the commands of a run.
enum Route {
    Call,
    /// The run is proxied. Its last command may have this effect on the session.
    Proxy(Option<SessionCommand>),
    /// The run is a single command, and these bytes are proxied in its place.
    Instead(&'static [u8]),
}

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

    /// Takes consecutive commands that go on the same path. A proxied run ends with the first
    /// command that changes the session, because the path of the next one depends on it. Returns
    /// `None` if there is no complete command.
    fn take_run(&mut self, run: &mut Vec<RunCommand>) -> Option<Route> {
        run.clear();
        self.input.forget_found();
        let mut route = None;
        let most = if self.access.is_authenticated() { RUN_MAX } else { RUN_MAX_BEFORE_AUTH };
        while run.len() < most {
            let found = match self.input.peek() {
                Ok(Some(found)) => found,
                Ok(None) => break,
                // Not a valid command: the engine replies with its own error.
                Err(_) => return route.or(Some(Route::Proxy(Some(SessionCommand::PinsToProxy)))),
            };
            let Some(kind) = self.look_up(&found, run.last()) else {
                if self.is_next_affected {
                    // The engine counts an empty command as the next one, so it must get it.
                    return Some(Route::Proxy(Some(SessionCommand::PinsToProxy)));
                }
                self.input.take(&found); // an empty command has no reply
                continue;
            };
            let (callable, command) = match kind {
                CommandKind::Callable(callable) if self.may_call(&found) => (Some(callable), None),
                CommandKind::Callable(_) | CommandKind::Plain => (None, None),
                // If a login in a transaction fails, Valkey 8.0 leaves it out of EXEC's reply, so
                // the end of that reply cannot be found.
                CommandKind::Session(SessionCommand::ChangesIdentity) if self.in_transaction() => {
                    (None, Some(SessionCommand::PinsToProxy))
                }
                CommandKind::Session(command) => (None, Some(command)),
            };
            let starts_apart = match (&route, callable) {
                (None, _) => false,
                (Some(Route::Call), None) | (Some(Route::Proxy(_)), Some(_)) => true,
                // These commands begin a run of their own. Logins are among them because Valkey 8.0
                // sends no reply to a failed login while earlier replies are still unsent.
                _ => matches!(
                    command,
                    Some(
                        SessionCommand::PinsToProxy
                            | SessionCommand::AsksForWrites
                            | SessionCommand::ChangesIdentity
                            | SessionCommand::Resets
                    )
                ),
            };
            if starts_apart {
                break;
            }
            if callable.is_none()
                && let Some(other) =
                    self.input.command(&found).and_then(|it| self.engine.instead(it.args()))
            {
                if route.is_none() {
                    self.is_next_affected = false;
                    self.input.take(&found);
                    run.push(RunCommand { found, callable });
                    route = Some(Route::Instead(other));
                }
                break;
            }
            if command == Some(SessionCommand::PinsToProxy) {
                // The command stays in the input, which is proxied unchanged.
                return Some(Route::Proxy(command));
            }
            self.is_next_affected = command == Some(SessionCommand::AffectsNext);
            self.input.take(&found);
            run.push(RunCommand { found, callable });
            route = Some(if callable.is_some() { Route::Call } else { Route::Proxy(command) });
            if command.is_some() {
                break;
            }
        }
        route
    }

    /// Looks up a command. If the command `before` is called and has the same name, its properties
    /// are reused, unless it is a subcommand. Returns `None` if the command is empty.
    fn look_up(&self, found: &FoundCommand, before: Option<&RunCommand>) -> Option<CommandKind> {
        if let Some(name) = self.input.name(found) {
            if let Some(RunCommand { found, callable: Some(callable) }) = before
                && !callable.is_subcommand
                && self.input.name(found) == Some(name)
            {
                return Some(CommandKind::Callable(*callable));
            }
            return Some(self.engine.look_up(name, self.input.words(found).get(1)));
        }
        let command = self.input.command(found)?;
        if let Some(line) = command.inline() {
            return Self::look_up_line(line);
        }
        let mut args = command.args();
        Some(self.engine.look_up(args.next()?, args.next()))
    }

    fn may_call(&self, found: &FoundCommand) -> bool {
        self.access == Access::InProcess && found.is_plain() && !self.is_next_affected
    }

    async fn call(&mut self, mut run: &[RunCommand]) -> io::Result<ExchangeOutcome> {
        self.refresh_memory();
        if self.active_at != self.engine.seconds() {
            self.show_activity().await;
        }
        while !run.is_empty() {
            let commands = Commands { input: &self.input, run };
            let called = self.record.call(commands, &mut self.replies);
            self.paths.called.fetch_add(called.done as u64, Ordering::Relaxed);
            let (done, rest) = run.split_at(called.done.min(run.len()));
            self.count_input(done);
            self.has_unmarked_writes |= called.wrote;
            self.must_settle |= called.must_settle;
            if called.is_stale {
                self.access = self.record.refresh();
                if self.access == Access::Gone {
                    return Ok(ExchangeOutcome::Answered);
                }
            }
            if called.is_full {
                self.send_replies().await?;
                self.pause_if_due(false).await;
                run = rest;
                continue;
            }
            // Commands that were not called are proxied, so that the engine itself replies.
            let is_closed = called.is_closed || self.access != Access::InProcess;
            let refused = if is_closed { rest.len() } else { called.refused.max(1) };
            let (refused, later) = rest.split_at(refused.min(rest.len()));
            if !refused.is_empty() {
                match self.proxy(refused, None).await? {
                    ExchangeOutcome::Answered if self.access == Access::Gone => {
                        return Ok(ExchangeOutcome::Answered);
                    }
                    ExchangeOutcome::Answered => {}
                    ExchangeOutcome::Disconnected => return Ok(ExchangeOutcome::Disconnected),
                    ExchangeOutcome::OutOfSync { mut unsent } => {
                        unsent.extend_from_slice(&self.input.bytes()[range_of(later)]);
                        return Ok(ExchangeOutcome::OutOfSync { unsent });
                    }
                }
            }
            if self.replies.len() >= REPLIES_MAX {
                self.send_replies().await?;
            }
            run = later;
        }
        Ok(ExchangeOutcome::Answered)
    }

    /// Sends an empty line over the proxy connection, so that the engine notes that the client is
    /// active. With calls alone, the client would seem idle to CLIENT LIST, CLIENT KILL and a
    /// `timeout` that is set later.
    #[cold]
    async fn show_activity(&mut self) {
        self.active_at = self.engine.seconds();
        let writes = &mut self.proxy_writes;
        // A failure does not matter here. The connection accepts no byte in two cases. Either the
        // engine has not read earlier bytes yet, which show activity as well, or the connection has
        // ended, which is detected elsewhere.
        std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut *writes).poll_write(cx, EMPTY_LINE).is_ready())
        })
        .await;
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

    /// Waits for input from the client. Returns false if the client or the engine has disconnected.
    /// In the meantime replies are sent, and messages from the engine are forwarded.
    async fn wait_for_input(&mut self) -> io::Result<bool> {
        if self.try_read_more().await {
            return Ok(true);
        }
        self.settle().await;
        let mut client_ended = false;
        loop {
            if client_ended && self.replies.is_empty() {
                return Ok(false);
            }
            self.note_held()?;
            let is_authenticated = self.access.is_authenticated();
            let may_read = !client_ended && (is_authenticated || self.replies.len() < BEFORE_AUTH);
            self.engine_bytes.reserve(OWN_REPLY_MAX);
            let mut room = ReadBuf::new(self.input.room(if is_authenticated {
                READ_MAX
            } else {
                BEFORE_AUTH
            }));
            let event = next_event(
                (&mut *self.client, &mut self.replies),
                (&mut self.proxy_writes, &[]),
                Some((&mut self.proxy_reads, &mut self.engine_bytes)),
                may_read.then_some(&mut room),
                false,
            );
            let event = self.output.watch(self.record.id(), event).await?;
            let count = room.filled().len();
            match event {
                // A client that has closed its side may still read replies.
                Event::ReadFromClient if count == 0 => client_ended = true,
                Event::ReadFromClient => {
                    self.input.advance(count);
                    return Ok(true);
                }
                Event::ReadFromEngine(0) => return Ok(false),
                Event::ReadFromEngine(_) => {
                    self.process_replies(&mut ExpectedReplies::of_client(0))?;
                }
                Event::SentToClient(count) => self.on_sent_to_client(count).await?,
                Event::SentToEngine(_) => {}
            }
        }
    }

    /// Reads more input if some has arrived, without waiting, and returns whether it has read any.
    ///
    /// In a pipeline of large values, replies wait until the commands that have already arrived are
    /// read. Sending each reply alone would cost a write here and a wakeup of the client. The end
    /// of the input is noticed later, when the replies have been sent.
    async fn try_read_more(&mut self) -> bool {
        let is_due = self.reads_since_send == READS_PER_SEND || !self.access.is_authenticated();
        if self.input.pending().is_empty() || self.replies.is_empty() || is_due {
            return false;
        }
        self.reads_since_send += 1;
        let (client, mut room) = (&mut *self.client, ReadBuf::new(self.input.room(READ_MAX)));
        std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut *client).poll_read(cx, &mut room).is_ready())
        })
        .await;
        let count = room.filled().len();
        self.input.advance(count);
        count > 0
    }

    /// Pins the session to the proxy path. Closes it instead if the writes of called commands
    /// cannot be marked for a later WAIT.
    async fn pin(mut self) -> io::Result<ServeOutcome> {
        // The session waits in the queue, but does not keep the permit, because from here on it
        // waits for its client.
        drop(self.acquire_permit().await?);
        if !self.mark_before_pin().await? {
            return Ok(ServeOutcome::Closed);
        }
        self.hand_over(Vec::new()).await
    }

    /// Hands the proxy connection over to the pump, with the bytes to send first. A session with
    /// unmarked writes is closed instead: the pump does not notice a WAIT, and the engine's reply
    /// to it would not cover these writes. A replica refuses WAIT, so the session stays open there.
    async fn hand_over(mut self, mut unsent: Vec<u8>) -> io::Result<ServeOutcome> {
        self.write_replies().await?;
        if self.has_unmarked_writes && !self.record.refuses_wait() {
            self.warn_of_unmarked_writes();
            return Ok(ServeOutcome::Closed);
        }
        self.paths.pinned.fetch_add(1, Ordering::Relaxed);
        self.open.entry.held.set(0);
        unsent.extend_from_slice(self.input.pending());
        Ok(ServeOutcome::Pinned { proxy: self.proxy_reads.unsplit(self.proxy_writes), unsent })
    }

    /// Delivers the replies that the engine has sent before it freed the client. No command is
    /// called any more.
    async fn deliver_last_replies(mut self) -> io::Result<ServeOutcome> {
        self.own_reply.clear();
        let (reads, received) = (&mut self.proxy_reads, &mut self.engine_bytes);
        let reading = async {
            while reads
                .read_buf(received)
                .await
                .is_ok_and(|count| count > 0 && received.len() < REPLIES_MAX)
            {}
        };
        let _ = timeout(LAST_REPLIES_TIMEOUT, reading).await;
        self.replies.bytes().append(&mut self.engine_bytes);
        let _ = timeout(LAST_REPLIES_TIMEOUT, self.write_replies()).await;
        Ok(ServeOutcome::Closed)
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
