//! Ways to drive a fabric. All do the same: passes while there is something to do, a short spin,
//! then sleep.

use std::future::Future;
use std::ops::{ControlFlow, Deref};
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::event_fd::EventFd;
use super::wakeup::Wakeup;
use super::{Fabric, Shared};
use crate::mem::lock;

/// What to do when there was nothing to do.
#[derive(PartialEq, Eq)]
enum Armed {
    /// Wait for the descriptor.
    Sleep,
    /// Something came in between.
    Again,
    /// Another thread drives the fabric at this moment.
    Elsewhere,
}

/// How long to leave the fabric to another thread that drives it.
const ELSEWHERE: Duration = Duration::from_millis(1);

/// Looks that found nothing.
#[derive(Default)]
struct Looks(u32);

impl Looks {
    /// WaitSet a moment before the next. What takes longer than a short message and its answer may
    /// be waiting for our CPU, as does a kernel that plays the card where there are few: from then
    /// on it is given away every few looks. Not before, since that is a system call in the midst of
    /// a round trip.
    fn pause(&mut self, idle: Duration) {
        const ROUND_TRIP: Duration = Duration::from_micros(100);
        const UNTIL_YIELD: u32 = 8;
        self.0 = self.0.wrapping_add(1);
        if idle > ROUND_TRIP && self.0.is_multiple_of(UNTIL_YIELD) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

impl Shared {
    /// One pass; how much there was to do. 0 at once if another thread is at it.
    fn pass(&self) -> usize {
        let Ok(mut poller) = self.poller.try_lock() else { return 0 };
        let done = poller.pass(self);
        let wakes = std::mem::take(&mut poller.wakes);
        drop(poller);
        wakes.into_iter().for_each(Waker::wake);
        done
    }

    /// Prepares the descriptor for waiting.
    fn arm(&self) -> Armed {
        let Ok(mut poller) = self.poller.try_lock() else { return Armed::Elsewhere };
        let armed = poller.arm(self);
        let wakes = std::mem::take(&mut poller.wakes);
        drop(poller);
        let woken = !wakes.is_empty();
        wakes.into_iter().for_each(Waker::wake);
        if armed && !woken { Armed::Sleep } else { Armed::Again }
    }

    /// Runs `act` with the poller, then wakes whom that concerns.
    pub(crate) fn with_poller<R>(&self, act: impl FnOnce(&mut super::Poller, &Self) -> R) -> R {
        let mut poller = lock(&self.poller);
        let result = act(&mut poller, self);
        let wakes = std::mem::take(&mut poller.wakes);
        drop(poller);
        // A deadline may have been added that is sooner than what the sleeper knows.
        self.mailbox.ring();
        wakes.into_iter().for_each(Waker::wake);
        result
    }

    /// Whether links over TCP are carried.
    #[cfg(feature = "tokio")]
    fn looks_at_sockets(&self) -> bool {
        self.poller.try_lock().is_ok_and(|poller| poller.sockets.are_in_use())
    }

    fn busy_poll(&self) -> Duration {
        Duration::from_micros(self.busy_poll_us.load(Ordering::Relaxed).into())
    }

    /// WaitSet until the descriptor is readable, or the eventfd, or `patience` is over. Whether one
    /// is.
    fn sleep(&self, event_fd: Option<&EventFd>, patience: Option<Duration>) -> bool {
        if cfg!(miri) {
            std::thread::yield_now(); // it has no such call
            return true;
        }
        let patience = patience.map(|patience| Timespec {
            tv_sec: patience.as_secs().cast_signed(),
            tv_nsec: patience.subsec_nanos().into(),
        });
        let fd = self.waits.as_fd();
        let second = event_fd.map_or(fd, AsFd::as_fd);
        let mut fds = [fd, second].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        poll(&mut fds, patience.as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// Passes and sleeps until nobody has the fabric any more and its links are gone.
    fn run(&self) {
        let mut active = self.clock.now();
        let mut looks = Looks::default();
        loop {
            if self.pass() > 0 {
                active = self.clock.now();
                continue;
            }
            if self.is_over() {
                return;
            }
            let idle = self.clock.now().saturating_duration_since(active);
            if idle < self.busy_poll() {
                looks.pause(idle);
            } else {
                match self.arm() {
                    // another driver may have taken the call that said so
                    Armed::Sleep if self.is_over() => return,
                    Armed::Sleep => {
                        self.sleep(None, None);
                    }
                    Armed::Again => {}
                    Armed::Elsewhere => {
                        self.sleep(None, Some(ELSEWHERE));
                    }
                }
                active = self.clock.now();
            }
        }
    }

    /// Whether nobody has the fabric any more, and nothing is left to deliver.
    fn is_over(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
            && self.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len() == 0
    }
}

impl Fabric {
    /// One pass: takes completions, delivers messages, wakes futures. Returns how much there was to
    /// do; never waits.
    ///
    /// For those who spin. Who wants to sleep calls [`Fabric::progress`].
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn poll(&self) -> usize {
        let shared = self.shared();
        let done = shared.pass();
        if shared.drivers.load(Ordering::SeqCst) > 0 {
            shared.mailbox.hand_over(); // this may be the last call
        }
        done
    }

    /// Does all there is to do, looks a little longer (`busy_poll_us`), and prepares the descriptor
    /// for waiting: when this returns, wait until it is readable, then call this again. Returns how
    /// much there was to do.
    ///
    /// Call it also after giving the fabric something to do, before waiting. The descriptor stays
    /// readable while there is something to do: a loop that tells of changes only (`EPOLLET`) must
    /// look at it before it waits.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn progress(&self) -> usize {
        match self.progress_with(|| ControlFlow::Continue(false)) {
            ControlFlow::Continue(done) | ControlFlow::Break(done) => done,
        }
    }

    /// As [`Fabric::progress`], for a loop that runs futures, too: `work` is called after each
    /// pass, with whatever that has woken, and says whether it did anything, or breaks off because
    /// others have to have their turn. The descriptor is prepared when neither finds more to do.
    /// Returns how much there was to do; as a break if it was broken off with more to come: the
    /// descriptor is readable then.
    pub fn progress_with(
        &self,
        mut work: impl FnMut() -> ControlFlow<(), bool>,
    ) -> ControlFlow<usize, usize> {
        /// A busy link must not keep the foreign loop from its other descriptors.
        const ENOUGH: usize = 1024;
        let shared = self.shared();
        let mut total = 0;
        let begun = shared.clock.now();
        if !shared.has_foreign_loop.swap(true, Ordering::SeqCst) {
            shared.drivers.fetch_add(1, Ordering::SeqCst);
        }
        loop {
            let mut done = shared.pass();
            let worked = work();
            done += usize::from(worked == ControlFlow::Continue(true));
            total += done;
            // Nobody is kept waiting by one who has only looked (`busy_poll_us`).
            if total >= ENOUGH || worked.is_break() && total > 0 {
                shared.mailbox.wake();
                return ControlFlow::Break(total);
            }
            if done > 0 {
                continue;
            }
            let spin = total == 0
                && shared.clock.now().saturating_duration_since(begun) < shared.busy_poll();
            if spin {
                std::hint::spin_loop();
                continue;
            }
            match shared.arm() {
                Armed::Sleep => return ControlFlow::Continue(total),
                Armed::Again => total += 1,
                Armed::Elsewhere => {
                    shared.mailbox.wake(); // not prepared: the caller must not wait
                    return ControlFlow::Continue(total);
                }
            }
        }
    }

    /// Looks for completions this long before sleeping, from now on:
    /// [`Config::busy_poll_us`](crate::Config) was where it began. For programs that wait for peers
    /// asleep and then work with them awake.
    pub fn set_busy_poll_us(&self, busy_poll_us: u32) {
        self.shared().busy_poll_us.store(busy_poll_us, Ordering::Relaxed);
    }

    /// Runs a future to its end on this thread, driving the fabric meanwhile.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let shared = self.shared();
        let _driving = Driving::new(&**shared);
        let wakeup = Arc::new(Wakeup::new());
        let waker = Waker::from(Arc::clone(&wakeup));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        let mut active = shared.clock.now();
        let mut looks = Looks::default();
        loop {
            if wakeup.take()
                && let Poll::Ready(output) = future.as_mut().poll(&mut context)
            {
                return output;
            }
            if shared.pass() > 0 {
                active = shared.clock.now();
                continue;
            }
            if wakeup.is_woken() {
                continue; // by another thread
            }
            let idle = shared.clock.now().saturating_duration_since(active);
            if idle < shared.busy_poll() {
                looks.pause(idle);
            } else {
                match shared.arm() {
                    Armed::Sleep => wakeup.sleep(|event_fd| {
                        shared.sleep(event_fd, event_fd.is_none().then_some(ELSEWHERE));
                    }),
                    Armed::Again => {}
                    Armed::Elsewhere => {
                        shared.sleep(None, Some(ELSEWHERE));
                    }
                }
                active = shared.clock.now();
            }
        }
    }

    /// Drives the fabric under tokio until nobody else has it: `tokio::spawn(fabric.drive())`.
    ///
    /// # Errors
    /// When tokio cannot watch the descriptor (its I/O driver is not enabled).
    #[cfg(feature = "tokio")]
    pub fn drive(&self) -> impl Future<Output = std::io::Result<()>> + Send + 'static {
        let driving = Driving::new(Arc::clone(self.shared()));
        async move {
            let shared = &driving.0;
            let fd = rustix::io::fcntl_dupfd_cloexec(shared.waits.as_fd(), 0)?;
            let fd = super::watch::watch(fd)?;
            let mut active = shared.clock.now();
            loop {
                if shared.pass() > 0 {
                    active = shared.clock.now();
                    if shared.looks_at_sockets() {
                        // own sockets go on when more has come: fewer, longer reads
                        tokio::task::yield_now().await;
                    } else {
                        to_those_woken().await;
                    }
                } else if shared.is_over() {
                    return Ok(());
                } else if shared.clock.now().saturating_duration_since(active) < shared.busy_poll()
                {
                    tokio::task::yield_now().await;
                } else {
                    match shared.arm() {
                        Armed::Sleep if shared.is_over() => return Ok(()), // as in `run`
                        // tokio tells of changes only. What is cleared here is taken by the look
                        // that follows, and a look that leaves something does not let us sleep.
                        Armed::Sleep => fd.readable().await?.clear_ready(),
                        Armed::Again => {}
                        Armed::Elsewhere => tokio::time::sleep(ELSEWHERE).await,
                    }
                    active = shared.clock.now();
                }
            }
        }
    }

    /// Drives the fabric on a thread of its own until nobody else has it.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn spawn_thread(&self) -> std::io::Result<std::thread::JoinHandle<()>> {
        let driving = Driving::new(Arc::clone(self.shared()));
        std::thread::Builder::new().name("ferrite-fabric".into()).spawn(move || driving.0.run())
    }
}

/// Lets the tasks go first that were woken. Unlike tokio's own it does not look at all descriptors,
/// which is a system call and four looks at the clock in the midst of a round trip.
#[cfg(feature = "tokio")]
fn to_those_woken() -> impl Future<Output = ()> {
    let mut yielded = false;
    std::future::poll_fn(move |cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}

/// Someone who drives the fabric; when it stops, another takes over.
struct Driving<S: Deref<Target = Shared>>(S);

impl<S: Deref<Target = Shared>> Driving<S> {
    fn new(shared: S) -> Self {
        shared.drivers.fetch_add(1, Ordering::SeqCst);
        Self(shared)
    }
}

impl<S: Deref<Target = Shared>> Drop for Driving<S> {
    fn drop(&mut self) {
        if self.0.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            self.0.mailbox.hand_over();
        }
    }
}
