//! A session whose commands the engine around us answers without a socket, as far as it can; the others go over a connection of the
//! client's own, in order.
//!
//! ```text
//!   client ──► input ──► calls (Inside) ─────────────────────────┐
//!                 │                                              ├─► replies ──► client
//!                 └────► the client's own connection ──► counted ┘
//! ```
//!
//! Commands are taken in runs: as many as may be called, or as many as must be passed on. Replies of a run leave together. What a
//! slow reader costs is the replies of one run and its window.

mod commands;
mod exchange;
mod input;
mod replies;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use ferrite_proto::resp::{Args, Limits, ReplyFramer};
use ferrite_proto::{Effect, Standing};
use tokio::io::{AsyncReadExt as _, ReadBuf, ReadHalf, WriteHalf};

use crate::engine::Bridge;
use crate::pump::Moved;
pub use commands::{Callable, Commands};
use commands::{Due, place_of};
use exchange::{Awaited, Met};
use input::{Found, Input};
pub(crate) use replies::Client;
pub use replies::Replies;

/// A session, to be run somewhere.
pub type SessionFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An engine that the gateway is inside of.
pub trait Inside: Send + Sync {
    /// Runs a session where calls can be made.
    fn spawn(&self, session: SessionFuture);

    /// Whether somebody who comes now needs no password. `None`: nothing can be called, and the engine's socket is to be asked.
    fn is_open_to_all(&self) -> Option<bool>;

    /// What there is to know of the command of this name, and first argument, if it may be called. None that
    /// [`Standing::minds`] may be.
    fn find(&self, name: &[u8], first: Option<&[u8]>) -> Option<Callable>;

    /// The command that is asked over the connection in the place of one with these words, if there is such.
    fn instead(&self, words: Args<'_>) -> Option<&'static [u8]>;

    /// Calls these commands in order for a client of this standing and adds their replies, until one cannot be called.
    fn call(&self, standing: &Standing, commands: Commands<'_>, replies: &mut Replies) -> Called;

    /// Whether sessions may go on for now; if not, others wait for their turn.
    fn has_time(&self) -> bool {
        true
    }

    /// Something was sent over a client's own connection. What others ask for after that is not to be called before it was read.
    fn on_bridged(&self) {}

    /// Ready when what was written before is as safe as the engine makes it before it answers.
    fn settled(&self) -> SessionFuture;

    /// The command after which WAIT on a connection of one's own speaks of what was called, too. Its reply is nobody's.
    fn mark(&self) -> &'static [u8];
}

/// What has become of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Called {
    /// How many have their reply. The next one, if there is one, was not executed.
    pub done: usize,
    /// It is not about that command: none can be called at the moment.
    pub is_closed: bool,
    /// Something may have been written.
    pub wrote: bool,
    /// Replies must wait until that has settled ([`Inside::settled`]).
    pub must_settle: bool,
}

/// How commands of sessions went.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    pub(crate) called: AtomicU64,
    pub(crate) bridged: AtomicU64,
    /// Sessions that went over to a connection of their own for good.
    pub(crate) stayed: AtomicU64,
}

/// What is left when a session has no more to do here.
pub(crate) enum Left {
    /// The client has gone, or the engine has hung up.
    Nothing,
    /// Everything goes over the connection from here on, these bytes first.
    Stay { engine: Bridge, unsent: Vec<u8> },
}

/// Commands in one go: then others have their turn.
const RUN_MAX: usize = 64;
/// Replies that are kept before they leave.
const REPLIES_MAX: usize = 64 << 10;
/// Reads in a row that keep them.
const KEPT_MAX: u8 = 32;
/// What is read of the client at once while something else goes on.
const AHEAD: usize = 1 << 10;
/// As much of a reply as tells what it says.
const HEAD: usize = 64;

/// Where the commands of a run go.
enum Way {
    Call,
    /// The last of them has this effect.
    Connection(Effect),
    /// It is one, and this is asked in its place.
    Instead(&'static [u8]),
}

/// Serves a client until it goes, or until it must have its own connection for good.
///
/// # Errors
/// The client or the engine breaks off.
pub(crate) async fn serve<C>(
    client: &mut C,
    engine: Bridge,
    standing: Standing,
    inside: &dyn Inside,
    (moved, lanes): (&Moved, &Lanes),
) -> io::Result<Left>
where
    C: Client,
{
    let (engine_reads, engine_writes) = tokio::io::split(engine);
    let unlimited = Limits { bulk_bytes: u64::MAX >> 1, inline_bytes: u32::MAX, ..Limits::default() };
    let lane = Lane {
        client,
        engine_reads,
        engine_writes,
        inside,
        moved,
        lanes,
        standing,
        input: Input::default(),
        heard: Vec::new(),
        counter: ReplyFramer::new(unlimited),
        head: Vec::new(),
        replies: Replies::default(),
        kept: 0,
        must_settle: false,
        wrote: false,
    };
    lane.run().await
}

struct Lane<'a, C> {
    client: &'a mut C,
    engine_reads: ReadHalf<Bridge>,
    engine_writes: WriteHalf<Bridge>,
    inside: &'a dyn Inside,
    moved: &'a Moved,
    lanes: &'a Lanes,
    standing: Standing,
    input: Input,
    /// Of the engine's, not looked at yet.
    heard: Vec<u8>,
    counter: ReplyFramer,
    /// How the reply that has begun begins.
    head: Vec<u8>,
    /// For the client.
    replies: Replies,
    /// How often it was read from since they left.
    kept: u8,
    must_settle: bool,
    /// Calls have written since the connection was last told.
    wrote: bool,
}

impl<C: Client> Lane<'_, C> {
    async fn run(mut self) -> io::Result<Left> {
        let mut run = Vec::new();
        loop {
            let met = match self.take_run(&mut run) {
                Some(Way::Call) => self.call(&run).await?,
                Some(Way::Connection(Effect::Stay)) => return self.stay().await,
                Some(Way::Connection(Effect::End)) => return self.leave(Vec::new()).await,
                Some(Way::Connection(effect)) => self.pass_on(&run, effect).await?,
                Some(Way::Instead(other)) => self.ask(&run, other.to_vec(), Effect::Nothing).await?,
                None if self.input.is_large() => {
                    // Commands that change a session are short.
                    let mut standing = self.standing.clone();
                    if self.input.begun().is_none_or(|args| standing.take(args).is_some()) {
                        return self.stay().await;
                    }
                    self.stream().await?
                }
                None if self.wait_for_input().await? => continue,
                None => return Ok(Left::Nothing),
            };
            match met {
                Met::Answered => {}
                Met::Over => return Ok(Left::Nothing),
                Met::Unclear { unsent } => return self.leave(unsent).await,
            }
            self.pause_if_due(run.len() == RUN_MAX).await;
        }
    }

    /// Takes commands that go the same way. A run over the connection ends with the first that changes something: where the next
    /// one goes depends on how that is answered. `None`: there is no whole command.
    fn take_run(&mut self, run: &mut Vec<Due>) -> Option<Way> {
        run.clear();
        self.input.forget();
        let mut way = None;
        while run.len() < RUN_MAX {
            let found = match self.input.peek() {
                Ok(Some(found)) => found,
                Ok(None) => break,
                // What is no command is the engine's to speak of.
                Err(_) => return way.or(Some(Way::Connection(Effect::Stay))),
            };
            let callable = if self.standing.is_held() { None } else { self.find(&found, run.last()) };
            let mut effect = None;
            if callable.is_none() {
                let command = self.input.command(&found)?;
                let is_inline = command.inline().is_some_and(|line| !line.trim_ascii().is_empty());
                if command.args().len() == 0 && !is_inline {
                    self.input.take(&found); // nothing is answered with nothing
                    continue;
                }
                // A line typed by hand is read by the engine's rules. Asking twice, if another way follows, changes nothing.
                effect = if is_inline { Some(Effect::Stay) } else { self.standing.take(command.args()) };
                if let Some(Effect::Stay | Effect::End) = effect {
                    return way.or(effect.map(Way::Connection));
                }
                if let Some(other) = self.inside.instead(command.args()) {
                    if way.is_none() {
                        self.input.take(&found);
                        run.push(Due { found, callable });
                    }
                    return way.or(Some(Way::Instead(other)));
                }
            }
            match (&way, callable) {
                (Some(Way::Call), None) | (Some(Way::Connection(_)), Some(_)) => break,
                _ => {}
            }
            self.input.take(&found);
            run.push(Due { found, callable });
            way = Some(match effect {
                None if callable.is_some() => Way::Call,
                None | Some(Effect::Nothing) => Way::Connection(Effect::Nothing),
                Some(effect) => return Some(Way::Connection(effect)),
            });
        }
        way
    }

    /// How a command may be called, if it may. Many are like the one before.
    fn find(&self, found: &Found, before: Option<&Due>) -> Option<Callable> {
        let name = self.input.name(found)?;
        if let Some(Due { found, callable: Some(callable) }) = before
            && !callable.is_subcommand
            && self.input.name(found) == Some(name)
        {
            return Some(*callable);
        }
        self.inside.find(name, self.input.words(found).get(1))
    }

    async fn call(&mut self, mut run: &[Due]) -> io::Result<Met> {
        self.look_for_memory();
        while !run.is_empty() {
            let commands = Commands { input: &self.input, run };
            let called = self.inside.call(&self.standing, commands, &mut self.replies);
            self.lanes.called.fetch_add(called.done as u64, Ordering::Relaxed);
            let (done, rest) = run.split_at(called.done.min(run.len()));
            self.count_input(done);
            self.wrote |= called.wrote;
            self.must_settle |= called.must_settle;
            // The engine answers what was not called, in its own words.
            let (refused, later) =
                rest.split_at(if called.is_closed { rest.len() } else { rest.len().min(1) });
            if !refused.is_empty() {
                match self.pass_on(refused, Effect::Nothing).await? {
                    Met::Answered => {}
                    Met::Over => return Ok(Met::Over),
                    Met::Unclear { mut unsent } => {
                        unsent.extend_from_slice(&self.input.bytes()[place_of(later)]);
                        return Ok(Met::Unclear { unsent });
                    }
                }
            }
            if self.replies.len() >= REPLIES_MAX {
                self.flush().await?;
            }
            run = later;
        }
        Ok(Met::Answered)
    }

    /// Lets others have their turn, at the end of this one at the latest.
    async fn pause_if_due(&self, is_due: bool) {
        if is_due || !self.inside.has_time() {
            yield_now().await;
        }
    }

    fn count_input(&self, run: &[Due]) {
        self.moved.to_engine.fetch_add(place_of(run).len() as u64, Ordering::Relaxed);
    }

    /// Commands that lie one behind the other go over the connection, and their replies to the client.
    async fn pass_on(&mut self, run: &[Due], effect: Effect) -> io::Result<Met> {
        let bytes = self.input.bytes()[place_of(run)].to_vec();
        self.ask(run, bytes, effect).await
    }

    /// These bytes go over the connection for these commands, and the replies to the client.
    async fn ask(&mut self, run: &[Due], bytes: Vec<u8>, effect: Effect) -> io::Result<Met> {
        self.flush().await?; // an answer that is there must not wait for one that may never come
        self.lanes.bridged.fetch_add(run.len() as u64, Ordering::Relaxed);
        self.count_input(run);
        let is_mark_due = effect == Effect::Wait && std::mem::take(&mut self.wrote);
        let unsent = if is_mark_due { [self.inside.mark(), &bytes].concat() } else { bytes };
        let awaited = Awaited { swallowed: is_mark_due.into(), replies: run.len(), effect };
        self.exchange(unsent, awaited, false).await
    }

    /// The command that has begun goes over the connection as it comes.
    async fn stream(&mut self) -> io::Result<Met> {
        self.flush().await?;
        self.lanes.bridged.fetch_add(1, Ordering::Relaxed);
        let awaited = Awaited { swallowed: 0, replies: 1, effect: Effect::Nothing };
        self.exchange(Vec::new(), awaited, true).await
    }

    /// Whether the client has sent something. The engine may speak meanwhile, or hang up.
    async fn wait_for_input(&mut self) -> io::Result<bool> {
        if self.read_on().await {
            return Ok(true);
        }
        loop {
            let before = self.input.ahead().len();
            self.flush().await?;
            if self.input.ahead().len() > before {
                return Ok(true); // while it took its replies
            }
            self.heard.reserve(HEAD);
            tokio::select! {
                biased;
                read = self.client.read(self.input.room()) => {
                    let count = read?;
                    self.input.read(count);
                    return Ok(count > 0);
                },
                heard = self.engine_reads.read_buf(&mut self.heard) => {
                    if heard? == 0 {
                        return Ok(false);
                    }
                    self.hear(&mut Awaited { swallowed: 0, replies: 0, effect: Effect::Nothing })?;
                },
            }
        }
    }

    /// In a pipeline of large values, replies wait for what has come with their commands: each by itself would cost a write, and
    /// the client a wakeup. Whether more was read, without waiting; the end is seen when they have left.
    async fn read_on(&mut self) -> bool {
        if self.input.ahead().is_empty() || self.replies.is_empty() || self.kept == KEPT_MAX {
            return false;
        }
        self.kept += 1;
        let (client, mut room) = (&mut *self.client, ReadBuf::new(self.input.room()));
        std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *client).poll_read(cx, &mut room).is_ready()))
            .await;
        let count = room.filled().len();
        self.input.read(count);
        count > 0
    }

    async fn stay(mut self) -> io::Result<Left> {
        self.flush().await?;
        // In a transaction it would be one of its commands, with a reply in EXEC's.
        if self.wrote && !self.standing.is_in_transaction() {
            // Whatever it asks there later.
            let awaited = Awaited { swallowed: 1, replies: 0, effect: Effect::Nothing };
            if self.exchange(self.inside.mark().to_vec(), awaited, false).await? != Met::Answered {
                return Ok(Left::Nothing);
            }
        }
        self.leave(Vec::new()).await
    }

    /// Everything goes over the connection from here on, this first.
    async fn leave(mut self, mut unsent: Vec<u8>) -> io::Result<Left> {
        self.flush().await?;
        self.lanes.stayed.fetch_add(1, Ordering::Relaxed);
        unsent.extend_from_slice(self.input.ahead());
        Ok(Left::Stay { engine: self.engine_reads.unsplit(self.engine_writes), unsent })
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
