//! The waker of [`Fabric::block_on`](super::Fabric::block_on): wakes the thread that waits, not
//! just anyone who drives the fabric. The fabric's own eventfd would not do: another driver may
//! take it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::Wake;

use super::event_fd::EventFd;
use crate::sync::AtomicBool;

pub(super) struct Wakeup {
    woken: AtomicBool,
    sleeping: AtomicBool,
    /// Made when its thread first sleeps; `None` if the process has no descriptor left.
    event_fd: OnceLock<Option<EventFd>>,
}

impl Wakeup {
    /// Woken, so that the future is asked a first time.
    pub(super) fn new() -> Self {
        Self {
            woken: AtomicBool::new(true),
            sleeping: AtomicBool::new(false),
            event_fd: OnceLock::new(),
        }
    }

    /// Whether the future is to be asked again.
    pub(super) fn take(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }

    pub(super) fn is_woken(&self) -> bool {
        self.woken.load(Ordering::SeqCst)
    }

    /// Lets `wait` wait, also for the eventfd, unless the future was woken meanwhile. Without a
    /// eventfd it must not wait long.
    pub(super) fn sleep(&self, wait: impl FnOnce(Option<&EventFd>)) {
        let event_fd = self.event_fd.get_or_init(|| EventFd::new().ok()).as_ref();
        self.sleeping.swap(true, Ordering::SeqCst); // no mere store: see the mailbox
        if !self.is_woken() {
            wait(event_fd);
        }
        self.sleeping.swap(false, Ordering::SeqCst);
        if let Some(event_fd) = event_fd {
            event_fd.silence();
        }
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.swap(true, Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst)
            && let Some(Some(event_fd)) = self.event_fd.get()
        {
            event_fd.ring();
        }
    }
}
