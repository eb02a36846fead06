//! Futures on the engine's main thread. Its event loop runs them: whoever wakes one from elsewhere
//! rings a event_fd that the loop listens to.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use ferrite_session::SessionFuture;
use rustix::event::{EventfdFlags, eventfd};

/// What other threads have of it.
pub(crate) struct TaskQueue {
    queue: Mutex<Queue>,
    /// Whether the loop will look at the queue by itself before it sleeps.
    is_awake: AtomicBool,
    event_fd: OwnedFd,
    /// How often the loop has been around, as [`TaskQueue::turned`] was told.
    turns: AtomicU64,
    /// How often it has looked at the queue.
    looks: AtomicU64,
}

#[derive(Default)]
struct Queue {
    new: Vec<SessionFuture>,
    ready: VecDeque<usize>,
    /// Who waits for the loop to come around.
    settling: Vec<Waker>,
    is_closed: bool,
}

impl TaskQueue {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let event_fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (queue, turns, looks) = (Mutex::default(), AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { queue, is_awake: AtomicBool::new(false), event_fd, turns, looks }))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A future to be run to its end. If nobody runs any more, it is dropped.
    pub(crate) fn spawn(&self, future: SessionFuture) {
        let mut queue = self.queue();
        if !queue.is_closed {
            queue.new.push(future);
            drop(queue);
            self.call();
        }
    }

    /// There is something in the queue.
    fn call(&self) {
        if !self.is_awake.swap(true, Ordering::SeqCst) {
            self.ring();
        }
    }

    /// The loop does not sleep before it has looked here.
    pub(crate) fn ring(&self) {
        // full: it is readable already
        let _ = rustix::io::write(&self.event_fd, &1_u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.event_fd, &mut [0; 8]);
    }

    /// A number that changes when the loop looks here.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// The loop has been around: what was done before is written, as far as the engine writes at
    /// all.
    pub(crate) fn turned(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        let settling = std::mem::take(&mut self.queue().settling);
        settling.into_iter().for_each(Waker::wake);
    }

    /// Ready when the loop has been around.
    pub(crate) fn settled(self: Arc<Self>) -> SessionFuture {
        let since = self.turns.load(Ordering::SeqCst);
        Box::pin(std::future::poll_fn(move |cx| {
            let mut queue = self.queue();
            if self.turns.load(Ordering::SeqCst) > since {
                return Poll::Ready(());
            }
            queue.settling.push(cx.waker().clone());
            drop(queue);
            self.ring();
            Poll::Pending
        }))
    }
}

impl AsFd for TaskQueue {
    /// Readable when [`Tasks::run`] is to be called.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}

/// The futures, for the thread that runs them.
pub(crate) struct Tasks {
    queue: Arc<TaskQueue>,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
}

struct Slot {
    future: SessionFuture,
    wake: Arc<TaskWaker>,
}

/// Wakes the future of a slot, or the one that has the slot by then: that finds nothing new.
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
            self.queue.call();
        }
    }
}

impl Tasks {
    pub(crate) fn new(queue: Arc<TaskQueue>) -> Self {
        Self { queue, slots: Vec::new(), free: Vec::new() }
    }

    /// From here on the queue is looked at without a event_fd, until [`Tasks::rest`].
    pub(crate) fn begin(&self) {
        self.queue.looks.fetch_add(1, Ordering::Relaxed);
        self.queue.is_awake.store(true, Ordering::SeqCst);
    }

    /// Polls those that were woken before, while there is time; whether there were any.
    pub(crate) fn run(&mut self, has_time: impl Fn() -> bool) -> bool {
        let mut ran = false;
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
            tracing::error!("a bug: a session has panicked, and ends; the others go on");
        }
        if !matches!(polled, Ok(Poll::Pending)) {
            let ended = self.slots[slot].take();
            self.free.push(slot);
            let _ = catch_unwind(AssertUnwindSafe(|| drop(ended)));
        }
    }

    /// The loop may sleep, or is told not to.
    pub(crate) fn rest(&self) {
        self.queue.is_awake.store(false, Ordering::SeqCst);
        let queue = self.queue.queue();
        let is_idle = queue.ready.is_empty() && queue.new.is_empty();
        drop(queue);
        if !is_idle {
            self.queue.call();
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
        drop(left); // sessions end, and may wake others meanwhile
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
        rustix::event::poll(&mut fds, Some(&now)).expect("poll") > 0
    }

    #[test]
    fn woken_from_elsewhere_the_bell_rings_once() {
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
            queue.silence();
            tasks.begin();
            assert!(tasks.run(|| true));
            assert!(!tasks.run(|| true), "nothing more");
            tasks.rest();
            assert_eq!(polls.load(Ordering::SeqCst), poll);
            assert!(!is_readable(&queue));
            let woken = waker.lock().expect("not poisoned").clone().expect("polled");
            std::thread::spawn(move || woken.wake()).join().expect("woken");
            assert!(is_readable(&queue));
        }
        assert_eq!(tasks.free.len(), 1, "it has ended");
    }

    #[test]
    fn a_panic_ends_one_and_the_end_of_a_turn_stops_all() {
        let queue = TaskQueue::new().expect("eventfd");
        let mut tasks = Tasks::new(Arc::clone(&queue));
        queue.spawn(Box::pin(async { panic!("on purpose") }));
        for _ in 0..4 {
            queue.spawn(Box::pin(std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                Poll::Pending // for ever
            })));
        }
        let left = Cell::new(7_usize);
        tasks.begin();
        while tasks.run(|| left.replace(left.get().saturating_sub(1)) > 0) {}
        assert_eq!(left.get(), 0);
        queue.silence();
        tasks.rest();
        assert!(is_readable(&queue), "there is more to do");
    }

    #[test]
    fn settled_when_the_loop_has_been_around() {
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
        tasks.begin();
        while tasks.run(|| true) {}
        tasks.rest();
        assert!(is_readable(&queue), "the loop must not sleep");
        assert!(!done.load(Ordering::SeqCst));
        queue.turned();
        tasks.begin();
        while tasks.run(|| true) {}
        assert!(done.load(Ordering::SeqCst));
    }
}
