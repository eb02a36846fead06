//! Futures that the engine's event loop runs on the engine's main thread. A waker on another thread
//! signals an eventfd that the event loop watches.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use ferrite_fabric::{Error, EventFd, SleepFlags};
use ferrite_session::SessionFuture;

/// The part that all threads share: new and woken futures, and the eventfd.
pub(crate) struct TaskQueue {
    queue: Mutex<Queue>,
    /// Whether something was queued, and whether the event loop needs a signal to check the queue.
    /// The loom model of this is in `ferrite-fabric/src/wake/sleep_flags.rs`.
    flags: SleepFlags,
    event_fd: EventFd,
    /// The number of iterations of the event loop since the engine first reported one.
    iterations: AtomicU64,
    /// How often the event loop has run the queue.
    passes: AtomicU64,
    /// Whether the event loop must drop all futures: see [`TaskQueue::end`].
    must_end: AtomicBool,
}

#[derive(Default)]
struct Queue {
    new: Vec<SessionFuture>,
    ready: VecDeque<usize>,
    /// Tasks that wait for the next iteration of the event loop.
    settle_waiters: Vec<Waker>,
    is_closed: bool,
}

impl TaskQueue {
    pub(crate) fn new() -> Result<Arc<Self>, Error> {
        let event_fd = EventFd::new()?;
        Ok(Arc::new(Self {
            queue: Mutex::default(),
            flags: SleepFlags::asleep(),
            event_fd,
            iterations: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            must_end: AtomicBool::new(false),
        }))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a future, which runs until it completes, panics, or [`Tasks`] is dropped. Drops the
    /// future if [`Tasks`] is already gone.
    pub(crate) fn spawn(&self, future: SessionFuture) {
        let mut queue = self.queue();
        if !queue.is_closed {
            queue.new.push(future);
            drop(queue);
            self.notify();
        }
    }

    /// Wakes the event loop after something was queued.
    fn notify(&self) {
        if self.flags.wake() {
            self.signal();
        }
    }

    /// Makes the eventfd readable, so that the event loop runs the queue before it sleeps.
    pub(crate) fn signal(&self) {
        self.event_fd.signal();
    }

    /// Makes the eventfd unreadable again.
    pub(crate) fn clear_signal(&self) {
        self.event_fd.clear();
    }

    /// Makes the event loop drop all futures, because the runtime that they use ends.
    pub(crate) fn end(&self) {
        self.must_end.store(true, Ordering::SeqCst);
        self.signal();
    }

    /// Returns whether the event loop must drop all futures.
    pub(crate) fn must_end(&self) -> bool {
        self.must_end.load(Ordering::SeqCst)
    }

    /// Returns how often the event loop has run the queue.
    pub(crate) fn pass_count(&self) -> u64 {
        self.passes.load(Ordering::Relaxed)
    }

    /// Wakes the tasks that wait for an iteration of the event loop. Writes made before that
    /// iteration are in the AOF now, if the engine has one.
    pub(crate) fn on_loop_iteration(&self) {
        self.iterations.fetch_add(1, Ordering::SeqCst);
        let settle_waiters = std::mem::take(&mut self.queue().settle_waiters);
        settle_waiters.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next iteration of the event loop.
    pub(crate) fn settled(self: Arc<Self>) -> SessionFuture {
        let since = self.iterations.load(Ordering::SeqCst);
        Box::pin(std::future::poll_fn(move |cx| {
            let mut queue = self.queue();
            if self.iterations.load(Ordering::SeqCst) > since {
                return Poll::Ready(());
            }
            queue.settle_waiters.push(cx.waker().clone());
            drop(queue);
            self.signal();
            Poll::Pending
        }))
    }
}

impl AsFd for TaskQueue {
    /// Returns the eventfd, which is readable when [`Tasks::run`] must be called.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}

/// The futures and their slots; owned by the thread that runs them.
pub(crate) struct Tasks {
    queue: Arc<TaskQueue>,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
}

struct Slot {
    future: SessionFuture,
    wake: Arc<TaskWaker>,
}

/// Wakes the future in a slot. A late call may wake the slot's next future instead, which is then
/// polled once for nothing.
struct TaskWaker {
    slot: usize,
    is_queued: AtomicBool,
    queue: Arc<TaskQueue>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::SeqCst) {
            self.queue.queue().ready.push_back(self.slot);
            self.queue.notify();
        }
    }
}

impl Tasks {
    pub(crate) fn new(queue: Arc<TaskQueue>) -> Self {
        Self { queue, slots: Vec::new(), free: Vec::new() }
    }

    /// Begins a pass. Until [`Tasks::finish_pass`] wakers need not signal the eventfd.
    pub(crate) fn begin_pass(&self) {
        self.queue.passes.fetch_add(1, Ordering::Relaxed);
        self.queue.flags.get_up();
    }

    /// Polls the futures that were new or woken when this was called, while there is time. Returns
    /// whether it polled any.
    pub(crate) fn run(&mut self, has_time: impl Fn() -> bool) -> bool {
        let mut ran = false;
        self.queue.flags.take_woken(); // before the queue is read
        let mut round = {
            let mut queue = self.queue.queue();
            let new = std::mem::take(&mut queue.new);
            let ready = queue.ready.len();
            drop(queue);
            let added: Vec<_> = new.into_iter().map(|future| self.add(future)).collect();
            self.queue.queue().ready.extend(added.iter());
            ready + added.len()
        };
        while round > 0 && has_time() {
            let Some(slot) = self.queue.queue().ready.pop_front() else { break };
            round -= 1;
            ran = true;
            self.poll(slot);
        }
        ran
    }

    fn add(&mut self, future: SessionFuture) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let wake = Arc::new(TaskWaker {
            slot,
            is_queued: AtomicBool::new(true),
            queue: Arc::clone(&self.queue),
        });
        self.slots[slot] = Some(Slot { future, wake });
        slot
    }

    fn poll(&mut self, slot: usize) {
        let Some(Some(Slot { future, wake })) = self.slots.get_mut(slot) else { return };
        wake.is_queued.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(wake));
        let polled = catch_unwind(AssertUnwindSafe(|| {
            future.as_mut().poll(&mut Context::from_waker(&waker))
        }));
        if polled.is_err() {
            tracing::error!("a bug: a session panicked and was ended; other sessions continue");
        }
        if !matches!(polled, Ok(Poll::Pending)) {
            let ended = self.slots[slot].take();
            self.free.push(slot);
            let _ = catch_unwind(AssertUnwindSafe(|| drop(ended)));
        }
    }

    /// Ends a pass. Signals the eventfd if there is more to run, so that the event loop does not
    /// sleep.
    pub(crate) fn finish_pass(&self) {
        let queue = self.queue.queue();
        let is_idle = queue.ready.is_empty() && queue.new.is_empty();
        drop(queue);
        if !self.queue.flags.fall_asleep() || !is_idle {
            self.queue.notify();
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        let mut queue = self.queue.queue();
        queue.is_closed = true;
        let left = std::mem::take(&mut *queue);
        queue.is_closed = true;
        drop(queue);
        drop(left); // without the lock, since sessions may wake others when they are dropped
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn is_readable(queue: &TaskQueue) -> bool {
        let mut fds = [rustix::event::PollFd::new(queue, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).expect("poll succeeds") > 0
    }

    #[test]
    fn waking_from_another_thread_signals_the_eventfd() {
        let queue = TaskQueue::new().expect("eventfd");
        let mut tasks = Tasks::new(Arc::clone(&queue));
        let polls = Arc::new(AtomicUsize::new(0));
        let waker = Arc::new(Mutex::new(None::<Waker>));
        queue.spawn({
            let (polls, waker) = (Arc::clone(&polls), Arc::clone(&waker));
            Box::pin(std::future::poll_fn(move |cx| {
                *waker.lock().expect("not poisoned") = Some(cx.waker().clone());
                if polls.fetch_add(1, Ordering::SeqCst) < 2 {
                    Poll::Pending
                } else {
                    Poll::Ready(())
                }
            }))
        });
        assert!(is_readable(&queue));
        for poll in 1..=3 {
            queue.clear_signal();
            tasks.begin_pass();
            assert!(tasks.run(|| true));
            assert!(!tasks.run(|| true), "nothing was woken");
            tasks.finish_pass();
            assert_eq!(polls.load(Ordering::SeqCst), poll);
            assert!(!is_readable(&queue));
            let woken = waker.lock().expect("not poisoned").clone().expect("the future was polled");
            std::thread::spawn(move || woken.wake()).join().expect("waking does not panic");
            assert!(is_readable(&queue));
        }
        assert_eq!(tasks.free.len(), 1, "the future did not complete");
    }

    #[test]
    fn a_panic_ends_one_task_and_the_end_of_a_slice_stops_all() {
        let queue = TaskQueue::new().expect("eventfd");
        let mut tasks = Tasks::new(Arc::clone(&queue));
        queue.spawn(Box::pin(async { panic!("on purpose") }));
        for _ in 0..4 {
            queue.spawn(Box::pin(std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                Poll::Pending // never completes
            })));
        }
        let left = Cell::new(7_usize);
        tasks.begin_pass();
        while tasks.run(|| left.replace(left.get().saturating_sub(1)) > 0) {}
        assert_eq!(left.get(), 0);
        queue.clear_signal();
        tasks.finish_pass();
        assert!(is_readable(&queue), "there are woken tasks");
    }

    #[test]
    fn settles_after_an_iteration_of_the_event_loop() {
        let queue = TaskQueue::new().expect("eventfd");
        let mut tasks = Tasks::new(Arc::clone(&queue));
        let done = Arc::new(AtomicBool::new(false));
        queue.spawn({
            let (queue, done) = (Arc::clone(&queue), Arc::clone(&done));
            Box::pin(async move {
                queue.settled().await;
                done.store(true, Ordering::SeqCst);
            })
        });
        tasks.begin_pass();
        while tasks.run(|| true) {}
        tasks.finish_pass();
        assert!(is_readable(&queue), "the event loop must not sleep");
        assert!(!done.load(Ordering::SeqCst));
        queue.on_loop_iteration();
        tasks.begin_pass();
        while tasks.run(|| true) {}
        assert!(done.load(Ordering::SeqCst));
    }
}
