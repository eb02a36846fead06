//! The ways to drive a fabric. `Fabric::poll` makes a single pass. `Fabric::progress` leaves it to
//! its caller to sleep. The others make passes while there is work, then poll for a short time,
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

use super::spin::Spin;
use super::{Fabric, Shared};
use crate::mem::lock;
use crate::wake::event_fd::EventFd;
use crate::wake::wakeup::Wakeup;

/// How to continue when there was no work.
#[derive(PartialEq, Eq)]
enum Armed {
    /// Wait for the descriptor.
    Sleep,
    /// There is work now, so make another pass.
    Retry,
    /// Another thread holds the poller at this moment, usually to make a pass.
    Busy,
}

/// How long to wait while another thread drives the fabric.
const BUSY_WAIT: Duration = Duration::from_millis(1);

/// The result of a pass.
struct Pass {
    /// How much work was done. 0 if another thread holds the poller.
    done: usize,
    /// When the pass was made, as the clock's raw value.
    at: u64,
}

impl Shared {
    /// Makes one pass.
    fn pass(&self) -> Pass {
        let Ok(mut poller) = self.poller.try_lock() else {
            return Pass { done: 0, at: self.clock.raw() };
        };
        let at = self.clock.raw();
        let done = poller.pass(self, at);
        let wakes = std::mem::take(&mut poller.wakes);
        drop(poller);
        wakes.into_iter().for_each(Waker::wake);
        if done > 0 {
            self.busy_poll.found_work(at);
        }
        Pass { done, at }
    }

    /// Prepares the descriptor for waiting.
    fn arm(&self) -> Armed {
        let Ok(mut poller) = self.poller.try_lock() else { return Armed::Busy };
        let armed = poller.arm(self);
        let wakes = std::mem::take(&mut poller.wakes);
        drop(poller);
        let woken = !wakes.is_empty();
        wakes.into_iter().for_each(Waker::wake);
        if armed && !woken { Armed::Sleep } else { Armed::Retry }
    }

    /// Runs `act` with the poller, then wakes the futures that `act` completed.
    pub(crate) fn with_poller<R>(&self, act: impl FnOnce(&mut super::Poller, &Self) -> R) -> R {
        let mut poller = lock(&self.poller);
        let result = act(&mut poller, self);
        let wakes = std::mem::take(&mut poller.wakes);
        drop(poller);
        // `act` may have added a deadline that is sooner than the one the sleeping driver knows.
        self.mailbox.notify();
        wakes.into_iter().for_each(Waker::wake);
        result
    }

    /// Returns whether a TCP connection carries a link. Returns false if another thread holds the
    /// poller.
    #[cfg(feature = "tokio")]
    fn uses_sockets(&self) -> bool {
        self.poller.try_lock().is_ok_and(|poller| poller.sockets.are_in_use())
    }

    /// Waits until the descriptor or the eventfd is readable, at most for `timeout`. Returns
    /// whether one is readable.
    fn sleep(&self, event_fd: Option<&EventFd>, timeout: Option<Duration>) -> bool {
        if cfg!(miri) {
            std::thread::yield_now(); // Miri has no `poll`
            return true;
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let fd = self.waits.as_fd();
        let second = event_fd.map_or(fd, AsFd::as_fd);
        let mut fds = [fd, second].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        poll(&mut fds, timeout.as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// Drives the fabric until its last handle is dropped and its links are gone.
    fn run(&self) {
        let mut spin = Spin::new(self.has_software_device);
        loop {
            let pass = self.pass();
            if pass.done > 0 {
                continue;
            }
            if self.is_over() {
                return;
            }
            if let Some(idle) = self.busy_poll.poll_on(pass.at) {
                spin.pause(idle);
            } else {
                match self.arm() {
                    // Another driver may have consumed the wake-up that announced the end.
                    Armed::Sleep if self.is_over() => return,
                    Armed::Sleep => {
                        self.sleep(None, None);
                    }
                    Armed::Retry => {}
                    Armed::Busy => {
                        self.sleep(None, Some(BUSY_WAIT));
                    }
                }
            }
        }
    }

    /// Returns whether the last handle of the fabric was dropped and nothing is left to deliver.
    fn is_over(&self) -> bool {
        self.abandoned.load(Ordering::Acquire)
            && self.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len() == 0
    }
}

impl Fabric {
    /// Makes one pass: takes completions, delivers messages, wakes futures. Returns how much work
    /// was done. Does not wait for work.
    ///
    /// Use this in a loop that spins. A caller that wants to sleep calls [`Fabric::progress`].
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn poll(&self) -> usize {
        let shared = self.shared();
        let done = shared.pass().done;
        if shared.drivers.load(Ordering::SeqCst) > 0 {
            shared.mailbox.hand_over(); // this may be the caller's last pass
        }
        done
    }

    /// Does the work there is. If there is none, first polls for some, for up to `busy_poll_us`.
    /// Then prepares the descriptor for waiting. Returns how much work was done.
    ///
    /// If there is very much work, returns before all of it is done, and leaves the descriptor
    /// readable.
    ///
    /// When this returns, wait until the descriptor is readable, then call this function again.
    /// Also call it after submitting work to the fabric, before waiting. The descriptor stays
    /// readable while there is work, so a loop that uses edge-triggered events (`EPOLLET`) must
    /// check it before waiting.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn progress(&self) -> usize {
        match self.progress_with(|| ControlFlow::Continue(false)) {
            ControlFlow::Continue(done) | ControlFlow::Break(done) => done,
        }
    }

    /// Like [`Fabric::progress`], for a loop that also runs futures.
    ///
    /// `work` is called after each pass, to run the futures that the pass has woken. It returns
    /// whether it did anything, or breaks because the loop has other things to do. A break has no
    /// effect before this call has done any work. When neither the fabric nor `work` finds more to
    /// do, the descriptor is prepared for waiting.
    ///
    /// Returns how much work was done. The result is `Break` if `work` has interrupted the call, or
    /// if the call has done much work. There may be more work then, and the descriptor is readable.
    pub fn progress_with(
        &self,
        mut work: impl FnMut() -> ControlFlow<(), bool>,
    ) -> ControlFlow<usize, usize> {
        /// A call that has done this much work returns, so that a busy link does not keep the
        /// caller's loop from its other descriptors.
        const ENOUGH: usize = 1024;
        let shared = self.shared();
        let (mut total, mut first) = (0, true);
        let mut spin = Spin::new(shared.has_software_device);
        if !shared.has_foreign_loop.swap(true, Ordering::SeqCst) {
            shared.drivers.fetch_add(1, Ordering::SeqCst);
        }
        loop {
            let pass = shared.pass();
            let mut done = pass.done;
            let worked = work();
            done += usize::from(worked == ControlFlow::Continue(true));
            total += done;
            // Before any work was done, this loop only busy-polls (`busy_poll_us`), and ignores a
            // break.
            if total >= ENOUGH || worked.is_break() && total > 0 {
                shared.mailbox.wake();
                return ControlFlow::Break(total);
            }
            if done > 0 {
                continue;
            }
            if first {
                shared.busy_poll.expect_answer(); // the loop may have submitted work
            }
            first = false;
            if total == 0
                && let Some(idle) = shared.busy_poll.poll_on(pass.at)
            {
                spin.pause(idle);
                continue;
            }
            match shared.arm() {
                Armed::Sleep => return ControlFlow::Continue(total),
                Armed::Retry => total += 1,
                Armed::Busy => {
                    // The descriptor is not prepared, so the caller must not wait.
                    shared.mailbox.wake();
                    return ControlFlow::Continue(total);
                }
            }
        }
    }

    /// Changes how long to poll for completions before sleeping. The initial value is
    /// [`Config::busy_poll_us`](crate::Config). For programs that sleep until a peer connects and
    /// then want low latency.
    pub fn set_busy_poll_us(&self, busy_poll_us: u32) {
        self.shared().busy_poll.set_limit_us(busy_poll_us);
    }

    /// Limits the incoming TCP connections whose handshake has not finished, including those that
    /// have sent nothing. Each of them has a descriptor. By default, only
    /// [`Config::max_half_open`](crate::Config) limits them. One half of the limit is for
    /// connections that have sent nothing, the other half for handshakes in progress. The rules for
    /// connections beyond the limit are those of `max_half_open`.
    pub fn limit_unfinished_tcp(&self, connections: usize) {
        self.shared().unfinished_tcp_max.store(connections, Ordering::Relaxed);
    }

    /// Runs a future to completion on this thread, driving the fabric meanwhile.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let shared = self.shared();
        let _driving = Driving::new(&**shared);
        let wakeup = Arc::new(Wakeup::new());
        let waker = Waker::from(Arc::clone(&wakeup));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(future);
        let mut spin = Spin::new(shared.has_software_device);
        loop {
            if wakeup.take() {
                if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
                    return output;
                }
                shared.busy_poll.expect_answer();
            }
            let pass = shared.pass();
            if pass.done > 0 {
                continue;
            }
            if wakeup.is_woken() {
                continue; // another thread has woken the future
            }
            if let Some(idle) = shared.busy_poll.poll_on(pass.at) {
                spin.pause(idle);
            } else {
                match shared.arm() {
                    Armed::Sleep => wakeup.sleep(|event_fd| {
                        shared.sleep(event_fd, event_fd.is_none().then_some(BUSY_WAIT));
                    }),
                    Armed::Retry => {}
                    Armed::Busy => {
                        shared.sleep(None, Some(BUSY_WAIT));
                    }
                }
            }
        }
    }

    /// Drives the fabric as a tokio task until all its handles are dropped and its links are gone:
    /// `tokio::spawn(fabric.drive())`.
    ///
    /// # Errors
    /// Fails if the process has no descriptor left, or if tokio cannot watch the descriptor, for
    /// example because the runtime is shutting down.
    ///
    /// # Panics
    /// The task panics if the runtime's I/O driver or timer is not enabled: see
    /// `tokio::runtime::Builder::enable_all`.
    #[cfg(feature = "tokio")]
    pub fn drive(&self) -> impl Future<Output = std::io::Result<()>> + Send + 'static {
        let driving = Driving::new(Arc::clone(self.shared()));
        async move {
            let shared = &driving.0;
            let fd = rustix::io::fcntl_dupfd_cloexec(shared.waits.as_fd(), 0)?;
            let fd = super::watch::watch(fd)?;
            loop {
                let pass = shared.pass();
                if pass.done > 0 {
                    if shared.uses_sockets() {
                        // Let more data arrive at our sockets, so that reads are fewer and longer.
                        tokio::task::yield_now().await;
                    } else {
                        yield_to_woken_tasks().await;
                    }
                } else if shared.is_over() {
                    return Ok(());
                } else if shared.busy_poll.poll_on(pass.at).is_some() {
                    tokio::task::yield_now().await;
                } else {
                    match shared.arm() {
                        Armed::Sleep if shared.is_over() => return Ok(()), // as in `Shared::run`
                        // tokio is edge-triggered, so it does not report the cleared readiness
                        // again. The next pass handles the work behind it, and `arm` does not allow
                        // sleep while a pass has left work.
                        Armed::Sleep => fd.readable().await?.clear_ready(),
                        Armed::Retry => {}
                        Armed::Busy => tokio::time::sleep(BUSY_WAIT).await,
                    }
                }
            }
        }
    }

    /// Drives the fabric on a thread of its own until all its handles are dropped and its links are
    /// gone.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn spawn_thread(&self) -> std::io::Result<std::thread::JoinHandle<()>> {
        let driving = Driving::new(Arc::clone(self.shared()));
        std::thread::Builder::new().name("ferrite-fabric".into()).spawn(move || driving.0.run())
    }
}

/// Yields to the tasks that were woken. Unlike `tokio::task::yield_now`, it does not poll all
/// descriptors. That would cost a system call and four clock readings in the middle of a round
/// trip.
#[cfg(feature = "tokio")]
fn yield_to_woken_tasks() -> impl Future<Output = ()> {
    let mut yielded = false;
    std::future::poll_fn(move |cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
}

/// Registers a driver of the fabric. When it is dropped, another driver takes over, if there is
/// one.
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
