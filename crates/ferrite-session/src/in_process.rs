//! A session inside the engine: data commands are called in-process, all others are proxied to the
//! engine's own socket, in order.
//!
//! ```text
//!   client ──► input ──► calls (ProxyClient::call) ─────────────────┐
//!                 │                                                 ├─► replies ──► client
//!                 └────► proxy connection ──► replies, as they come ┘
//!                              │
//!   engine ◄── asked by the connection's client id: user, database, transaction, life
//! ```
//!
//! Commands are taken in runs: as many as may be called, or as many as must be proxied. After each
//! proxied run the engine is asked what the client is now ([`ProxyClient::refresh`]); the session
//! infers nothing from replies. It counts them for one purpose only: to keep replies in the order
//! of commands.
//!
//! What a client can make a session keep is bounded. Before authentication no input is read while
//! replies are unread. Afterwards replies are kept as the engine keeps them for its own clients, up
//! to `client-output-buffer-limit` and `maxmemory-clients`.

mod commands;
mod engine;
mod exchange;
mod input;
mod limits;
mod proxying;
mod replies;
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

use crate::engine::{EMPTY_LINE, ProxyConnection};
use crate::pump::Moved;
use crate::sessions::Open;
pub use commands::{Callable, Commands};
use commands::{Due, place_of};
pub use engine::{
    Access, Called, ClientLimits, CommandKind, InProcessEngine, ProxyClient, SessionFuture,
};
use exchange::{Awaited, Event, Met, next_event};
use input::{Found, Input, READ_MAX};
use limits::{BEFORE_AUTH, BeforeAuthQueue, OutputGuard};
use proxying::LargeCommand;
pub(crate) use replies::Client;
pub use replies::Replies;

/// How commands of in-process sessions went.
#[derive(Debug, Default)]
pub(crate) struct CommandPaths {
    pub(crate) called: AtomicU64,
    pub(crate) proxied: AtomicU64,
    /// Sessions that are on the proxy path for good.
    pub(crate) pinned: AtomicU64,
    pub(crate) before_auth: BeforeAuthQueue,
}

/// What is left when a session has no more to do here.
pub(crate) enum Left {
    /// The client has gone, or the engine has hung up.
    Nothing,
    /// Everything goes over the proxy connection from here on, these bytes first.
    Pinned { proxy: ProxyConnection, unsent: Vec<u8> },
}

/// Commands in one go: then others have their turn.
const RUN_MAX: usize = 64;
/// The same before authentication: engines hang up on a client without a password, and log it, when
/// more than 1 KiB of its replies waits. An unknown command's can be 300 bytes long.
const RUN_BEFORE_AUTH: usize = 3;
/// Replies that are kept before they leave.
const REPLIES_MAX: usize = 64 << 10;
/// Reads in a row that keep them.
const KEPT_MAX: u8 = 32;
/// The longest reply to a command of the session's own that is looked at.
const OWN_REPLY_MAX: usize = 512;
/// How deep replies may be nested: deeper than scripts can make them.
const DEPTH_MAX: u32 = 1 << 16;
/// How long the engine's last words are waited for after it has freed the client.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Where the commands of a run go.
enum Route {
    Call,
    /// The last of them means this for the session.
    Proxy(Option<SessionCommand>),
    /// It is one, and this is proxied in its place.
    Instead(&'static [u8]),
}

/// Serves a client, which has sent these bytes first, until it goes, or until all of its commands
/// must be proxied for good.
///
/// # Errors
/// The client or the engine breaks off, or the client is over a limit of the engine's.
pub(crate) async fn serve<C>(
    (client, first): (&mut C, &[u8]),
    proxy: ProxyConnection,
    (engine, record): (&dyn InProcessEngine, &dyn ProxyClient),
    (open, paths): (&Open, &CommandPaths),
) -> io::Result<Left>
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
        identity_due: false,
        input: Input::with(first),
        heard: Vec::new(),
        counter: ReplyFramer::new(unlimited),
        is_push: None,
        own_reply: Vec::new(),
        replies: Replies::default(),
        output: OutputGuard::default(),
        kept: 0,
        must_settle: false,
        wrote: false,
        shown_at: engine.seconds(),
    };
    session.run().await
}

struct InProcessSession<'a, C> {
    client: &'a mut C,
    proxy_reads: ReadHalf<ProxyConnection>,
    proxy_writes: WriteHalf<ProxyConnection>,
    engine: &'a dyn InProcessEngine,
    record: &'a dyn ProxyClient,
    open: &'a Open,
    paths: &'a CommandPaths,
    /// What the engine said last.
    access: Access,
    /// A command was proxied after which the client has to be identified again.
    identity_due: bool,
    input: Input,
    /// Of the engine's, not looked at yet.
    heard: Vec<u8>,
    counter: ReplyFramer,
    /// Whether the reply that has begun is a push message.
    is_push: Option<bool>,
    /// The last reply to a command of the session's own.
    own_reply: Vec<u8>,
    /// For the client.
    replies: Replies,
    output: OutputGuard,
    /// How often the client was read from since they left.
    kept: u8,
    must_settle: bool,
    /// Calls have written since the engine last marked it on the proxy connection.
    wrote: bool,
    /// When the engine last noted that the client is active ([`InProcessEngine::seconds`]).
    shown_at: u64,
}

impl<C: Client> InProcessSession<'_, C> {
    async fn run(mut self) -> io::Result<Left> {
        if !self.identify().await? {
            // The engine did not take the connection (too many clients, say), and says why.
            let refusal = std::mem::take(&mut self.own_reply);
            self.replies.bytes().extend_from_slice(&refusal);
            self.write_replies().await?;
            return Ok(Left::Nothing);
        }
        let mut run = Vec::new();
        loop {
            let met = match self.take_run(&mut run) {
                Some(Route::Call) => self.call(&run).await?,
                Some(Route::Proxy(Some(SessionCommand::PinsToProxy))) => {
                    let Some(met) = self.proxy_if_refused().await? else { return self.pin().await };
                    met
                }
                Some(Route::Proxy(Some(SessionCommand::AsksForWrites))) => {
                    self.ask_for_writes(&run).await?
                }
                Some(Route::Proxy(command)) => self.proxy(&run, command).await?,
                Some(Route::Instead(other)) => self.proxy_instead(&run, other).await?,
                None => match self.large_command() {
                    Some(LargeCommand::Pins) => return self.pin().await,
                    Some(command) => {
                        let may_be_refused = matches!(command, LargeCommand::MayBeRefused);
                        let Some(met) = self.stream(may_be_refused).await? else {
                            return self.pin().await;
                        };
                        met
                    }
                    None if self.wait_for_input().await? => continue,
                    None => return Ok(Left::Nothing),
                },
            };
            match met {
                Met::Answered if self.access == Access::Gone => return self.last_words().await,
                Met::Answered => {}
                Met::Over => return Ok(Left::Nothing),
                Met::Unclear { unsent } => return self.leave(unsent).await,
            }
            self.pause_if_due(run.len() == RUN_MAX).await;
        }
    }

    /// Has the proxy connection identify itself to the engine, and asks what the client is. Returns
    /// false if the engine did not take the connection.
    async fn identify(&mut self) -> io::Result<bool> {
        self.exchange(self.record.identify(), Awaited::own(), false).await?;
        self.access = self.record.refresh();
        Ok(self.record.id().is_some())
    }

    /// Takes commands that go the same way. A proxied run ends with the first command that changes
    /// the session: where the next one goes depends on it. `None`: there is no whole command.
    fn take_run(&mut self, run: &mut Vec<Due>) -> Option<Route> {
        run.clear();
        self.input.forget();
        let mut route = None;
        let most = if self.access.is_authenticated() { RUN_MAX } else { RUN_BEFORE_AUTH };
        while run.len() < most {
            let found = match self.input.peek() {
                Ok(Some(found)) => found,
                Ok(None) => break,
                // What is no command is the engine's to speak of.
                Err(_) => return route.or(Some(Route::Proxy(Some(SessionCommand::PinsToProxy)))),
            };
            let Some(kind) = self.look_up(&found, run.last()) else {
                self.input.take(&found); // nothing is answered with nothing
                continue;
            };
            let (callable, command) = match kind {
                CommandKind::Callable(callable) if self.may_call(&found) => (Some(callable), None),
                CommandKind::Callable(_) | CommandKind::Plain => (None, None),
                // Valkey 8.0 leaves a login that fails out of EXEC's reply, whose end cannot be
                // told then.
                CommandKind::Session(SessionCommand::ChangesIdentity) if self.in_transaction() => {
                    (None, Some(SessionCommand::PinsToProxy))
                }
                CommandKind::Session(command) => (None, Some(command)),
            };
            let starts_apart = match (&route, callable) {
                (None, _) => false,
                (Some(Route::Call), None) | (Some(Route::Proxy(_)), Some(_)) => true,
                // Valkey 8.0 gives no answer to a login that fails behind answers that are not
                // written yet.
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
                    self.input.take(&found);
                    run.push(Due { found, callable });
                    route = Some(Route::Instead(other));
                }
                break;
            }
            if command == Some(SessionCommand::PinsToProxy) {
                // it stays in the input, which is proxied as it is
                return Some(Route::Proxy(command));
            }
            self.input.take(&found);
            run.push(Due { found, callable });
            route = Some(if callable.is_some() { Route::Call } else { Route::Proxy(command) });
            if command.is_some() {
                break;
            }
        }
        route
    }

    /// Looks up a command. Many are like the one before. `None`: it is empty.
    fn look_up(&self, found: &Found, before: Option<&Due>) -> Option<CommandKind> {
        if let Some(name) = self.input.name(found) {
            if let Some(Due { found, callable: Some(callable) }) = before
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

    fn may_call(&self, found: &Found) -> bool {
        self.access == Access::InProcess && found.is_plain()
    }

    async fn call(&mut self, mut run: &[Due]) -> io::Result<Met> {
        self.look_for_memory();
        if self.shown_at != self.engine.seconds() {
            self.show_activity().await;
        }
        while !run.is_empty() {
            let commands = Commands { input: &self.input, run };
            let called = self.record.call(commands, &mut self.replies);
            self.paths.called.fetch_add(called.done as u64, Ordering::Relaxed);
            let (done, rest) = run.split_at(called.done.min(run.len()));
            self.count_input(done);
            self.wrote |= called.wrote;
            self.must_settle |= called.must_settle;
            if called.is_stale {
                self.access = self.record.refresh();
                if self.access == Access::Gone {
                    return Ok(Met::Answered);
                }
            }
            if called.is_full {
                self.send_replies().await?;
                self.pause_if_due(false).await;
                run = rest;
                continue;
            }
            // The engine answers what was not called, in its own words.
            let is_closed = called.is_closed || self.access != Access::InProcess;
            let (refused, later) =
                rest.split_at(if is_closed { rest.len() } else { rest.len().min(1) });
            if !refused.is_empty() {
                match self.proxy(refused, None).await? {
                    Met::Answered if self.access == Access::Gone => return Ok(Met::Answered),
                    Met::Answered => {}
                    Met::Over => return Ok(Met::Over),
                    Met::Unclear { mut unsent } => {
                        unsent.extend_from_slice(&self.input.bytes()[place_of(later)]);
                        return Ok(Met::Unclear { unsent });
                    }
                }
            }
            if self.replies.len() >= REPLIES_MAX {
                self.send_replies().await?;
            }
            run = later;
        }
        Ok(Met::Answered)
    }

    /// Has the engine note that the client is active: by calls alone it would be idle for CLIENT
    /// LIST, CLIENT KILL and a `timeout` that is set later.
    #[cold]
    async fn show_activity(&mut self) {
        self.shown_at = self.engine.seconds();
        let writes = &mut self.proxy_writes;
        // A connection that takes nothing has other things to be noted, or has ended, which is seen
        // elsewhere.
        std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut *writes).poll_write(cx, EMPTY_LINE).is_ready())
        })
        .await;
    }

    /// Lets others have their turn, at the end of this one at the latest.
    async fn pause_if_due(&self, is_due: bool) {
        if is_due || !self.engine.has_time() {
            yield_now().await;
        }
    }

    fn moved(&self) -> &Moved {
        &self.open.entry.moved
    }

    fn count_input(&self, run: &[Due]) {
        self.moved().to_engine.fetch_add(place_of(run).len() as u64, Ordering::Relaxed);
    }

    /// Returns whether the client has sent something. Replies leave meanwhile, and the engine may
    /// speak, or hang up.
    async fn wait_for_input(&mut self) -> io::Result<bool> {
        if self.read_on().await {
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
            self.heard.reserve(OWN_REPLY_MAX);
            let mut room = ReadBuf::new(self.input.room(if is_authenticated {
                READ_MAX
            } else {
                BEFORE_AUTH
            }));
            let event = next_event(
                (&mut *self.client, &mut self.replies),
                (&mut self.proxy_writes, &[]),
                Some((&mut self.proxy_reads, &mut self.heard)),
                may_read.then_some(&mut room),
                false,
            );
            let event = self.output.watch(event).await?;
            let count = room.filled().len();
            match event {
                Event::Read if count == 0 => client_ended = true, // it may still read replies
                Event::Read => {
                    self.input.read(count);
                    return Ok(true);
                }
                Event::Heard(0) => return Ok(false),
                Event::Heard(_) => self.hear(&mut Awaited::replies(0))?,
                Event::Replied(count) => self.on_replied(count).await?,
                Event::Sent(_) => {}
            }
        }
    }

    /// In a pipeline of large values, replies wait for what has come with their commands: each by
    /// itself would cost a write, and the client a wakeup. Returns whether more was read, without
    /// waiting; the end is seen when they have left.
    async fn read_on(&mut self) -> bool {
        let is_due = self.kept == KEPT_MAX || !self.access.is_authenticated();
        if self.input.ahead().is_empty() || self.replies.is_empty() || is_due {
            return false;
        }
        self.kept += 1;
        let (client, mut room) = (&mut *self.client, ReadBuf::new(self.input.room(READ_MAX)));
        std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut *client).poll_read(cx, &mut room).is_ready())
        })
        .await;
        let count = room.filled().len();
        self.input.read(count);
        count > 0
    }

    /// Proxies everything from here on.
    async fn pin(mut self) -> io::Result<Left> {
        drop(self.wait_for_turn().await?); // from here on it waits for the client
        if !self.marks_before_pin().await? {
            return Ok(Left::Nothing);
        }
        self.leave(Vec::new()).await
    }

    /// Proxies everything from here on, these bytes first. A session whose writes are not marked
    /// ends instead: nobody looks for WAIT from here on, and it would speak of older writes.
    async fn leave(mut self, mut unsent: Vec<u8>) -> io::Result<Left> {
        self.write_replies().await?;
        if self.wrote {
            self.warn_of_unmarked_writes();
            return Ok(Left::Nothing);
        }
        self.paths.pinned.fetch_add(1, Ordering::Relaxed);
        self.open.entry.held.set(0);
        unsent.extend_from_slice(self.input.ahead());
        Ok(Left::Pinned { proxy: self.proxy_reads.unsplit(self.proxy_writes), unsent })
    }

    /// The engine has freed the client: what it said before still arrives, and nothing is called
    /// any more.
    async fn last_words(mut self) -> io::Result<Left> {
        self.own_reply.clear();
        let (reads, heard) = (&mut self.proxy_reads, &mut self.heard);
        let said = async {
            while reads
                .read_buf(heard)
                .await
                .is_ok_and(|count| count > 0 && heard.len() < REPLIES_MAX)
            {}
        };
        let _ = timeout(LAST_WORDS, said).await;
        self.replies.bytes().append(&mut self.heard);
        let _ = timeout(LAST_WORDS, self.write_replies()).await;
        Ok(Left::Nothing)
    }
}

/// Lets others have their turn.
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
