//! Sessions on the engine's main thread. The engine's event loop drives the fabric through one
//! descriptor, and runs the sessions, which make their calls ([`crate::call_path`]).
//!
//! ```text
//!   fabric or eventfd readable ──► run_slice ──► completions ──► sessions ──► calls, replies ─┐
//!                                                     ▲                                       │
//!                                                     └── until idle, or `slice-us` is over ──┘
//!   the loop has slept ──► on_loop_iteration: replies to writes may be sent
//! ```

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use ferrite_fabric::Fabric;
use quanta::Instant;
use tokio::runtime::Handle;

use crate::api;
use crate::slice;
use crate::tasks::{TaskQueue, Tasks};

thread_local! {
    // Only the engine's main thread ever sets these.
    static EVENT_LOOP: RefCell<Option<EventLoop>> = const { RefCell::new(None) };
    /// The number of events of [`EventLoop::main_descriptor`] to skip before the next slice. It is
    /// set after a slice that was cut short. Until the next slice, events of any other descriptor
    /// are ignored.
    static SKIPS_LEFT: Cell<Option<u8>> = const { Cell::new(None) };
}

/// The sessions on the main thread, and what they need to run.
struct EventLoop {
    tasks: Tasks,
    /// `None` if the thread `ferrite` drives the fabric (`poller-thread yes`).
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

    /// Drops all sessions, which closes their connections.
    fn end(self) {
        self.descriptors().into_iter().for_each(api::unwatch);
        let _entered = self.runtime.enter(); // sessions that are dropped may have timers
        drop(self.tasks);
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
        event_loop.end();
    }
}

/// Runs a slice after `descriptor` became readable, unless events are to be skipped
/// ([`SKIPS_LEFT`]). If the sessions' runtime ends, drops all sessions instead. Does nothing inside
/// another slice, because a call may make the engine process its descriptors.
pub(crate) fn run_slice(descriptor: RawFd) {
    EVENT_LOOP.with(|event_loop| {
        let Ok(mut event_loop) = event_loop.try_borrow_mut() else { return };
        if event_loop.as_ref().is_some_and(|running| running.queue.must_end()) {
            let ended = event_loop.take();
            drop(event_loop);
            return ended.into_iter().for_each(EventLoop::end);
        }
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
        slice::begin(now, now.saturating_duration_since(event_loop.started).as_secs());
        let mut run = || match slice::has_time() {
            true => ControlFlow::Continue(tasks.run(slice::has_time)),
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
        // The event loop reports our two descriptors one after the other. If both started a slice,
        // there would be two slices before other clients are served. After a slice that was ended
        // early, the next event of the main descriptor is skipped as well. The event loop may
        // report this event before it reports the sockets that proxied commands were written to.
        SKIPS_LEFT.set(Some(slice::must_yield().into()));
        if fabric.is_none() {
            queue.signal(); // with a fabric, the fabric's descriptor is readable
        }
    });
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A session that notes when it is dropped.
    struct Session(Arc<AtomicBool>);

    impl Drop for Session {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// If the runtime of the thread `ferrite` has ended, a session that continued would panic.
    #[test]
    fn drops_the_sessions_when_their_runtime_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let queue = TaskQueue::new().expect("an eventfd");
        let descriptor = start(Arc::clone(&queue), None, runtime.handle().clone())[0];
        slice::set_length(std::time::Duration::from_secs(60));
        let is_dropped = Arc::new(AtomicBool::new(false));
        let session = Session(Arc::clone(&is_dropped));
        queue.spawn(Box::pin(async move {
            let _session = session;
            std::future::pending::<()>().await;
        }));
        run_slice(descriptor);
        assert!(!is_dropped.load(Ordering::SeqCst), "the session waits");
        queue.end();
        drop(runtime);
        run_slice(descriptor);
        assert!(is_dropped.load(Ordering::SeqCst));
        run_slice(descriptor); // nothing is left to run
    }
}
