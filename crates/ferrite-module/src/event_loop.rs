//! Sessions on the engine's main thread: its event loop drives the fabric by one descriptor, runs
//! sessions, and makes their calls.
//!
//! ```text
//!   the loop: fabric or bell is readable ──► turn ──► completions ──► sessions ──► calls, replies ─┐
//!                                              ▲                                                   │ while there is more,
//!                                              └───────────────────────────────────────────────────┘ up to a limit
//!   after the loop has slept ──► turned: replies to what was written may leave
//! ```

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::Fabric;
use ferrite_proto::SessionCommand;
use ferrite_proto::resp::Args;
use ferrite_session::{
    Access, Called, ClientLimits, CommandKind, Commands, InProcessEngine, ProxyClient, Replies,
    SessionFuture,
};
use quanta::Instant;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::api::{self, Context};
use crate::calls::{Calls, NoBatch};
use crate::capacity;
use crate::clients::ClientRecord;
use crate::tasks::{TaskQueue, Tasks};

thread_local! {
    // Only the engine's main thread ever has one. Two, since calls are made while the first is in
    // use.
    static EVENT_LOOP: RefCell<Option<EventLoop>> = const { RefCell::new(None) };
    static CALLS: RefCell<Option<Calls>> = const { RefCell::new(None) };
    /// After this the engine's other clients have their turn (`slice-us`). What sessions do takes
    /// very different time: a command, a MiB of values, and on Soft-RoCE all that a card would do.
    static TURN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// When this turn began, from the module's begin.
    static SECONDS: Cell<u64> = const { Cell::new(0) };
    /// When this turn is over.
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Something went over a client's own connection in this turn, or was written that others may
    /// wait for.
    static HAS_BRIDGED: Cell<bool> = const { Cell::new(false) };
    /// A turn was broken off: the next is that of [`EventLoop::main_descriptor`], which lets so
    /// many pass.
    static HELD: Cell<Option<u8>> = const { Cell::new(None) };
}

/// What runs on the main thread.
struct EventLoop {
    tasks: Tasks,
    /// `None`: our own thread drives it (`poller-thread yes`).
    fabric: Option<Fabric>,
    queue: Arc<TaskQueue>,
    /// Whose sockets and timers sessions use.
    runtime: Handle,
    begun: Instant,
}

impl EventLoop {
    fn descriptors(&self) -> Vec<RawFd> {
        let fabric = self.fabric.as_ref().map(|fabric| fabric.as_fd().as_raw_fd());
        [self.queue.as_fd().as_raw_fd()].into_iter().chain(fabric).collect()
    }

    /// The one that is readable after a turn was broken off.
    fn main_descriptor(&self) -> RawFd {
        self.fabric.as_ref().map_or(self.queue.as_fd(), AsFd::as_fd).as_raw_fd()
    }
}

/// From now on, on this thread; these descriptors are to be listened to.
pub(crate) fn begin(queue: Arc<TaskQueue>, fabric: Option<Fabric>, runtime: Handle) -> Vec<RawFd> {
    let tasks = Tasks::new(Arc::clone(&queue));
    let event_loop = EventLoop { tasks, fabric, queue, runtime, begun: Instant::now() };
    let descriptors = event_loop.descriptors();
    HELD.set(None);
    // The loop runs the first turn: this may be inside an event of the engine's, where no call is
    // made.
    event_loop.queue.ring();
    EVENT_LOOP.set(Some(event_loop));
    descriptors
}

/// Nothing runs any more. What sessions had open is closed.
pub(crate) fn end() {
    if let Some(event_loop) = EVENT_LOOP.take() {
        event_loop.descriptors().into_iter().for_each(api::ignore);
        let _entered = event_loop.runtime.enter(); // sessions that are dropped may have timers
        drop(event_loop.tasks);
    }
}

/// A descriptor is readable. Nothing happens in a turn within another: a call may have brought the
/// engine to look at its descriptors.
pub(crate) fn turn(descriptor: RawFd) {
    EVENT_LOOP.with(|event_loop| {
        let Ok(mut event_loop) = event_loop.try_borrow_mut() else { return };
        let Some(event_loop) = &mut *event_loop else { return };
        // Descriptors that are passed over stay readable, and are told of again.
        match HELD.get() {
            Some(_) if descriptor != event_loop.main_descriptor() => return,
            Some(passes @ 1..) => return HELD.set(Some(passes - 1)),
            _ => HELD.set(None),
        }
        let EventLoop { tasks, fabric, queue, runtime, .. } = event_loop;
        let _entered = runtime.enter();
        tasks.begin();
        if descriptor == queue.as_fd().as_raw_fd() {
            queue.silence();
        }
        let now = Instant::now();
        END.set(Some(now + TURN.get()));
        SECONDS.set(now.saturating_duration_since(event_loop.begun).as_secs());
        HAS_BRIDGED.set(false);
        let mut run = || match has_time() {
            true => ControlFlow::Continue(tasks.run(has_time)),
            false => ControlFlow::Break(()),
        };
        let is_broken_off = match fabric {
            Some(fabric) => fabric.progress_with(run).is_break(),
            None => loop {
                match run() {
                    ControlFlow::Continue(true) => {}
                    ran => break ran.is_break(),
                }
            },
        };
        if !is_broken_off {
            return tasks.rest();
        }
        // The loop tells of both descriptors one after the other: that would be two turns before
        // others have theirs. And it may tell of ours before the sockets that were written to.
        HELD.set(Some(HAS_BRIDGED.get().into()));
        if fabric.is_none() {
            queue.ring(); // otherwise the fabric's is readable
        }
    });
}

/// How long a turn lasts from now on.
pub(crate) fn set_turn(turn: Duration) {
    TURN.set(turn);
}

/// Whether this turn goes on.
fn has_time() -> bool {
    !HAS_BRIDGED.get() && END.get().is_some_and(|end| Instant::now() < end)
}

/// The loop has been around.
pub(crate) fn turned() {
    EVENT_LOOP.with(|event_loop| {
        if let Ok(event_loop) = event_loop.try_borrow()
            && let Some(event_loop) = &*event_loop
        {
            event_loop.queue.turned();
        }
    });
}

/// Calls can be made from now on, or not.
pub(crate) fn allow_calls(calls: Option<Calls>) {
    CALLS.set(calls);
}

/// How many commands may be called, if any may.
pub(crate) fn callable_commands() -> Option<usize> {
    CALLS.with(|calls| Some(calls.try_borrow().ok()?.as_ref()?.callable_commands()))
}

/// The engine's settings have changed.
pub(crate) fn follow_engine(context: Context<'_>) {
    CALLS.with(|calls| {
        if let Ok(mut calls) = calls.try_borrow_mut()
            && let Some(calls) = &mut *calls
        {
            calls.follow_engine(context);
        }
    });
}

/// Asks the engine what a client is now.
pub(crate) fn refresh(client: &ClientRecord) -> Access {
    // Without calls nothing is known, and everything is proxied.
    let unknown = Access::Proxy { in_transaction: false, is_authenticated: false };
    with_calls(|calls| calls.refresh(client)).unwrap_or(unknown)
}

/// Returns whether FERRITE ATTEST can tell more of a client than FERRITE BIND.
pub(crate) fn needs_attestation(client: &ClientRecord) -> bool {
    with_calls(|calls| calls.needs_attestation(client)).unwrap_or(false)
}

/// Calls these commands in order as a client, and adds their replies, until one cannot be called.
pub(crate) fn call(client: &ClientRecord, commands: Commands<'_>, replies: &mut Replies) -> Called {
    let none = |is_stale| Called { is_closed: true, is_stale, ..Called::default() };
    let called = with_calls(|calls| {
        let mut batch = match calls.begin(client) {
            Ok(batch) => batch,
            Err(why) => return none(why == NoBatch::Stale),
        };
        let (mut called, mut has_unblocked) = (Called::default(), false);
        for (callable, words) in commands.iter() {
            called.is_full = has_unblocked || called.done > 0 && replies.is_full();
            if called.is_full || !batch.call(callable, words, replies) {
                break;
            }
            called.done += 1;
            has_unblocked = callable.unblocks;
        }
        if has_unblocked {
            // The engine serves clients that wait for the key before its loop sleeps. Until then no
            // other command may run, or it could take what they are due.
            HAS_BRIDGED.set(true);
        }
        called.wrote = batch.wrote();
        drop(batch);
        called.must_settle = calls.replies_wait(called.wrote);
        called
    });
    called.unwrap_or_else(|| none(false))
}

/// Returns the name of a client's user, by the client's id.
pub(crate) fn user_of(id: u64) -> Option<String> {
    with_calls(|calls| calls.user_of(id))?
}

/// Returns how many clients the engine has, if it tells.
pub(crate) fn connected_clients() -> Option<u64> {
    with_calls(|calls| calls.connected_clients())?
}

fn with_calls<R>(act: impl FnOnce(&mut Calls) -> R) -> Option<R> {
    CALLS.with(|calls| calls.try_borrow_mut().ok()?.as_mut().map(act))
}

/// The engine, as sessions see it.
pub(crate) struct EngineHandle(pub(crate) Arc<TaskQueue>);

impl InProcessEngine for EngineHandle {
    fn spawn(&self, session: SessionFuture) {
        self.0.spawn(session);
    }

    fn is_open_to_all(&self) -> Option<bool> {
        with_calls(|calls| calls.default_user_is_open())?
    }

    fn was_full(&self, accepted: std::time::Instant, heard: std::time::Instant) -> bool {
        capacity::was_full(accepted, heard)
    }

    fn new_client(&self, peer: Option<SocketAddr>, gone: Arc<Notify>) -> Arc<dyn ProxyClient> {
        ClientRecord::new(peer, gone)
    }

    fn look_up(&self, name: &[u8], first: Option<&[u8]>) -> CommandKind {
        // Without calls all commands are proxied, and none is known.
        let unknown = CommandKind::Session(SessionCommand::PinsToProxy);
        with_calls(|calls| calls.look_up(name, first)).unwrap_or(unknown)
    }

    /// `INFO rdma` is about the session's own side here: the engine knows the section by a longer
    /// name.
    fn instead(&self, mut words: Args<'_>) -> Option<&'static [u8]> {
        let is = |word: Option<&[u8]>, name: &[u8]| {
            word.is_some_and(|word| word.eq_ignore_ascii_case(name))
        };
        let is_info_rdma =
            words.len() == 2 && is(words.next(), b"info") && is(words.next(), b"rdma");
        is_info_rdma.then_some(b"*2\r\n$4\r\nINFO\r\n$12\r\nferrite_rdma\r\n")
    }

    fn has_time(&self) -> bool {
        has_time()
    }

    fn seconds(&self) -> u64 {
        SECONDS.get()
    }

    fn on_proxied(&self) {
        HAS_BRIDGED.set(true);
    }

    fn settled(&self) -> SessionFuture {
        Arc::clone(&self.0).settled()
    }

    fn client_limits(&self) -> ClientLimits {
        with_calls(|calls| calls.client_limits()).unwrap_or_default()
    }
}
