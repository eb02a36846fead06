//! Sessions on the engine's main thread: its event loop drives the fabric by one descriptor, runs sessions, and makes their calls.
//!
//! ```text
//!   the loop: fabric or bell is readable ──► turn ──► completions ──► sessions ──► calls, replies ─┐
//!                                              ▲                                                   │ while there is more,
//!                                              └───────────────────────────────────────────────────┘ up to a limit
//!   after the loop has slept ──► turned: replies to what was written may leave
//! ```

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use ferrite_fabric::Engine;
use ferrite_proto::Standing;
use ferrite_proto::resp::Args;
use ferrite_session::{Callable, Called, Commands, Inside, Replies, SessionFuture};
use tokio::runtime::Handle;

use crate::api::{self, Context};
use crate::calls::Calls;
use crate::tasks::{Porch, Tasks};

/// What sessions may do before the engine's other clients have their turn: each poll takes [`POLL`](crate::tasks::POLL) of it, each command
/// one, and each KiB that comes or goes one. 256 sessions with nothing much to say, 50 with 16 commands each, or a MiB of values.
const BUDGET: usize = 1024;

thread_local! {
    // Only the engine's main thread ever has one. Two, since calls are made while the first is in use.
    static RESIDENT: RefCell<Option<Resident>> = const { RefCell::new(None) };
    static CALLS: RefCell<Option<Calls>> = const { RefCell::new(None) };
    /// What is left of [`BUDGET`] in this turn.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

/// What runs on the main thread.
struct Resident {
    tasks: Tasks,
    /// `None`: our own thread drives it (`poller-thread yes`).
    fabric: Option<Engine>,
    porch: Arc<Porch>,
    /// Whose sockets and timers sessions use.
    runtime: Handle,
}

impl Resident {
    fn descriptors(&self) -> Vec<RawFd> {
        let fabric = self.fabric.as_ref().map(|fabric| fabric.as_fd().as_raw_fd());
        [self.porch.as_fd().as_raw_fd()].into_iter().chain(fabric).collect()
    }
}

/// From now on, on this thread; these descriptors are to be listened to.
pub(crate) fn begin(porch: Arc<Porch>, fabric: Option<Engine>, runtime: Handle) -> Vec<RawFd> {
    let tasks = Tasks::new(Arc::clone(&porch));
    let resident = Resident { tasks, fabric, porch, runtime };
    let descriptors = resident.descriptors();
    RESIDENT.set(Some(resident));
    turn(descriptors[0]);
    descriptors
}

/// Nothing runs any more. What sessions had open is closed.
pub(crate) fn end() {
    if let Some(resident) = RESIDENT.take() {
        resident.descriptors().into_iter().for_each(api::ignore);
        let _entered = resident.runtime.enter(); // sessions that are dropped may have timers
        drop(resident.tasks);
    }
}

/// A descriptor is readable. Nothing happens in a turn within another: a call may have brought the engine to look at its
/// descriptors.
pub(crate) fn turn(descriptor: RawFd) {
    RESIDENT.with(|resident| {
        let Ok(mut resident) = resident.try_borrow_mut() else { return };
        let Some(Resident { tasks, fabric, porch, runtime }) = &mut *resident else { return };
        let _entered = runtime.enter();
        tasks.begin();
        if descriptor == porch.as_fd().as_raw_fd() {
            porch.silence();
        }
        LEFT.set(BUDGET);
        LEFT.with(|left| match fabric {
            Some(fabric) => drop(fabric.progress_with(|| tasks.run(left))),
            None => while tasks.run(left) {},
        });
        tasks.rest();
    });
}

/// The loop has been around.
pub(crate) fn turned() {
    RESIDENT.with(|resident| {
        if let Ok(resident) = resident.try_borrow()
            && let Some(resident) = &*resident
        {
            resident.porch.turned();
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

/// The engine, as sessions see it.
pub(crate) struct Around(pub(crate) Arc<Porch>);

impl Inside for Around {
    fn spawn(&self, session: SessionFuture) {
        self.0.spawn(session);
    }

    fn is_open_to_all(&self) -> Option<bool> {
        CALLS.with(|calls| Some(calls.try_borrow().ok()?.as_ref()?.default_user_is_open()))
    }

    fn find(&self, name: &[u8], first: Option<&[u8]>) -> Option<Callable> {
        CALLS.with(|calls| calls.try_borrow().ok()?.as_ref()?.find(name, first))
    }

    /// `INFO rdma` is about the session's own side here: the engine knows the section by a longer name.
    fn instead(&self, mut words: Args<'_>) -> Option<&'static [u8]> {
        let is = |word: Option<&[u8]>, name: &[u8]| word.is_some_and(|word| word.eq_ignore_ascii_case(name));
        let is_info_rdma = words.len() == 2 && is(words.next(), b"info") && is(words.next(), b"rdma");
        is_info_rdma.then_some(b"*2\r\n$4\r\nINFO\r\n$12\r\nferrite_rdma\r\n")
    }

    fn call(&self, standing: &Standing, commands: Commands<'_>, replies: &mut Replies) -> Called {
        let closed = Called { is_closed: true, ..Called::default() };
        CALLS.with(|calls| {
            let Ok(mut calls) = calls.try_borrow_mut() else { return closed };
            let Some(calls) = &mut *calls else { return closed };
            let Some(mut batch) = calls.begin(standing) else { return closed };
            let mut called = Called::default();
            let before = replies.len();
            for (callable, words) in commands.iter() {
                if !batch.call(callable, words, replies) {
                    break;
                }
                called.done += 1;
            }
            let bytes = commands.bytes() + replies.len().saturating_sub(before);
            LEFT.set(LEFT.get().saturating_sub(called.done + (bytes >> 10)));
            called.wrote = batch.wrote();
            drop(batch);
            called.must_settle = calls.replies_wait(called.wrote);
            called
        })
    }

    fn settled(&self) -> SessionFuture {
        Arc::clone(&self.0).settled()
    }

    fn mark(&self) -> &'static [u8] {
        b"*2\r\n$7\r\nFERRITE\r\n$4\r\nMARK\r\n"
    }
}
