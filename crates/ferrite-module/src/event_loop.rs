//! Sessions on the engine's main thread. The engine's event loop drives the fabric through one
//! descriptor, runs the sessions, and makes their calls.
//!
//! ```text
//!   fabric or eventfd readable ──► run_slice ──► completions ──► sessions ──► calls, replies ─┐
//!                                                     ▲                                       │
//!                                                     └── until idle, or `slice-us` is over ──┘
//!   the loop has slept ──► on_loop_iteration: replies to writes may be sent
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
    // Only the engine's main thread ever sets these. There are two because calls are made while
    // `EVENT_LOOP` is borrowed.
    static EVENT_LOOP: RefCell<Option<EventLoop>> = const { RefCell::new(None) };
    static CALLS: RefCell<Option<Calls>> = const { RefCell::new(None) };
    /// How long a slice may last before the engine serves its other clients (`slice-us`). It is a
    /// time because the cost of a session's work varies widely: from one command to a MiB of
    /// values, and on Soft-RoCE all the work that hardware would do.
    static SLICE: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// Seconds between the start of the event loop and the start of this slice.
    static SECONDS: Cell<u64> = const { Cell::new(0) };
    /// When this slice is over.
    static SLICE_END: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Ends this slice: a command was proxied in it, or a call wrote data that blocked clients may
    /// wait for.
    static MUST_YIELD: Cell<bool> = const { Cell::new(false) };
    /// Set after a slice that was cut short. Then only [`EventLoop::main_descriptor`] starts the
    /// next slice, after this many of its events were skipped.
    static SKIPS_LEFT: Cell<Option<u8>> = const { Cell::new(None) };
}

/// The sessions on the main thread, and what they need to run.
struct EventLoop {
    tasks: Tasks,
    /// `None` if the thread `ferrite` drives it (`poller-thread yes`).
    fabric: Option<Fabric>,
    queue: Arc<TaskQueue>,
    /// The runtime whose sockets and timers the sessions use.
    runtime: Handle,
    started: Instant,
}

impl EventLoop {
    fn descriptors(&self) -> Vec<RawFd> {
        let fabric = self.fabric.as_ref().map(|fabric| fabric.as_fd().as_raw_fd());
        [self.queue.as_fd().as_raw_fd()].into_iter().chain(fabric).collect()
    }

    /// Returns the descriptor that is readable after a slice was cut short.
    fn main_descriptor(&self) -> RawFd {
        self.fabric.as_ref().map_or(self.queue.as_fd(), AsFd::as_fd).as_raw_fd()
    }
}

/// Starts to run sessions on this thread. Returns the descriptors that the engine's event loop must
/// watch.
pub(crate) fn start(queue: Arc<TaskQueue>, fabric: Option<Fabric>, runtime: Handle) -> Vec<RawFd> {
    let tasks = Tasks::new(Arc::clone(&queue));
    let event_loop = EventLoop { tasks, fabric, queue, runtime, started: Instant::now() };
    let descriptors = event_loop.descriptors();
    SKIPS_LEFT.set(None);
    // The event loop runs the first slice: this function may run inside one of the engine's event
    // callbacks, where no call can be made.
    event_loop.queue.signal();
    EVENT_LOOP.set(Some(event_loop));
    descriptors
}

/// Drops all sessions, which closes their connections.
pub(crate) fn stop() {
    if let Some(event_loop) = EVENT_LOOP.take() {
        event_loop.descriptors().into_iter().for_each(api::unwatch);
        let _entered = event_loop.runtime.enter(); // sessions that are dropped may have timers
        drop(event_loop.tasks);
    }
}

/// Runs a slice after `descriptor` became readable. Does nothing inside another slice: a call may
/// make the engine process its descriptors.
pub(crate) fn run_slice(descriptor: RawFd) {
    EVENT_LOOP.with(|event_loop| {
        let Ok(mut event_loop) = event_loop.try_borrow_mut() else { return };
        let Some(event_loop) = &mut *event_loop else { return };
        // A descriptor that is skipped stays readable, and the event loop reports it again.
        match SKIPS_LEFT.get() {
            Some(_) if descriptor != event_loop.main_descriptor() => return,
            Some(skips @ 1..) => return SKIPS_LEFT.set(Some(skips - 1)),
            _ => SKIPS_LEFT.set(None),
        }
        let EventLoop { tasks, fabric, queue, runtime, .. } = event_loop;
        let _entered = runtime.enter();
        tasks.begin_pass();
        if descriptor == queue.as_fd().as_raw_fd() {
            queue.clear_signal();
        }
        let now = Instant::now();
        SLICE_END.set(Some(now + SLICE.get()));
        SECONDS.set(now.saturating_duration_since(event_loop.started).as_secs());
        MUST_YIELD.set(false);
        let mut run = || match has_time() {
            true => ControlFlow::Continue(tasks.run(has_time)),
            false => ControlFlow::Break(()),
        };
        let is_cut_short = match fabric {
            Some(fabric) => fabric.progress_with(run).is_break(),
            None => loop {
                match run() {
                    ControlFlow::Continue(true) => {}
                    ran => break ran.is_break(),
                }
            },
        };
        if !is_cut_short {
            return tasks.finish_pass();
        }
        // The event loop reports our two descriptors one after the other, which would be two slices
        // before other clients are served. It may also report ours before the sockets that proxied
        // commands were written to.
        SKIPS_LEFT.set(Some(MUST_YIELD.get().into()));
        if fabric.is_none() {
            queue.signal(); // with a fabric, the fabric's descriptor is readable
        }
    });
}

/// Sets how long a slice may last.
pub(crate) fn set_slice(slice: Duration) {
    SLICE.set(slice);
}

/// Returns whether this slice may continue.
fn has_time() -> bool {
    !MUST_YIELD.get() && SLICE_END.get().is_some_and(|end| Instant::now() < end)
}

/// Tells sessions that the event loop has completed an iteration.
pub(crate) fn on_loop_iteration() {
    EVENT_LOOP.with(|event_loop| {
        if let Ok(event_loop) = event_loop.try_borrow()
            && let Some(event_loop) = &*event_loop
        {
            event_loop.queue.on_loop_iteration();
        }
    });
}

/// Enables the call path, or disables it (`None`).
pub(crate) fn set_calls(calls: Option<Calls>) {
    CALLS.set(calls);
}

/// Returns how many commands may be called; `None` if the call path is disabled.
pub(crate) fn callable_commands() -> Option<usize> {
    CALLS.with(|calls| Some(calls.try_borrow().ok()?.as_ref()?.callable_commands()))
}

/// Reads the engine's settings again after they have changed.
pub(crate) fn follow_engine(context: Context<'_>) {
    CALLS.with(|calls| {
        if let Ok(mut calls) = calls.try_borrow_mut()
            && let Some(calls) = &mut *calls
        {
            calls.follow_engine(context);
        }
    });
}

/// Asks the engine for the current state of a client.
pub(crate) fn refresh(client: &ClientRecord) -> Access {
    // Without the call path the state is unknown, and everything is proxied.
    let unknown = Access::Proxy { in_transaction: false, is_authenticated: false };
    with_calls(|calls| calls.refresh(client)).unwrap_or(unknown)
}

/// Returns whether FERRITE ATTEST is needed to find out if a client has authenticated.
pub(crate) fn needs_attestation(client: &ClientRecord) -> bool {
    with_calls(|calls| calls.needs_attestation(client)).unwrap_or(false)
}

/// Calls commands in order on behalf of a client and appends their replies. Stops at the first one
/// that cannot be called.
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
            // The engine serves clients that are blocked on the key before its event loop sleeps.
            // No other command may run until then, since it could take the element that they wait
            // for.
            MUST_YIELD.set(true);
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

/// Returns how many clients the engine has; `None` if that is unknown.
pub(crate) fn connected_clients() -> Option<u64> {
    with_calls(|calls| calls.connected_clients())?
}

fn with_calls<R>(act: impl FnOnce(&mut Calls) -> R) -> Option<R> {
    CALLS.with(|calls| calls.try_borrow_mut().ok()?.as_mut().map(act))
}

/// The engine that this process is, as sessions use it.
pub(crate) struct EngineHandle(pub(crate) Arc<TaskQueue>);

impl InProcessEngine for EngineHandle {
    fn spawn(&self, session: SessionFuture) {
        self.0.spawn(session);
    }

    fn is_open_to_all(&self) -> Option<bool> {
        with_calls(|calls| calls.default_user_is_open())?
    }

    fn was_full(&self, accepted: std::time::Instant, first_bytes: std::time::Instant) -> bool {
        capacity::was_full(accepted, first_bytes)
    }

    fn new_client(&self, peer: Option<SocketAddr>, gone: Arc<Notify>) -> Arc<dyn ProxyClient> {
        ClientRecord::new(peer, gone)
    }

    fn look_up(&self, name: &[u8], first: Option<&[u8]>) -> CommandKind {
        // Without the call path nothing is known about commands, so the session is pinned to proxy.
        let unknown = CommandKind::Session(SessionCommand::PinsToProxy);
        with_calls(|calls| calls.look_up(name, first)).unwrap_or(unknown)
    }

    /// Replaces `INFO rdma` by `INFO ferrite_rdma`, which is the engine's name for that section.
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
        MUST_YIELD.set(true);
    }

    fn settled(&self) -> SessionFuture {
        Arc::clone(&self.0).settled()
    }

    fn client_limits(&self) -> ClientLimits {
        with_calls(|calls| calls.client_limits()).unwrap_or_default()
    }
}
