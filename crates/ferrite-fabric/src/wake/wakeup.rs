//! The waker of [`Fabric::block_on`](crate::Fabric::block_on). It wakes the thread that runs the
//! future, not just any driver of the fabric. The fabric's own eventfd is not enough, because
//! another driver may take its signal.

use std::sync::{Arc, OnceLock};
use std::task::Wake;

use super::event_fd::EventFd;
use super::sleep_flags::SleepFlags;

pub(crate) struct Wakeup {
    flags: SleepFlags,
    /// Created when the waker's thread first sleeps. `None` if the process has no descriptor left.
    event_fd: OnceLock<Option<EventFd>>,
}

impl Wakeup {
    /// Creates the waker in the woken state, so that the future is polled a first time.
    pub(crate) fn new() -> Self {
        Self { flags: SleepFlags::woken(), event_fd: OnceLock::new() }
    }

    /// Returns whether the future must be polled again, and resets that flag.
    pub(crate) fn take(&self) -> bool {
        self.flags.take_woken()
    }

    pub(crate) fn is_woken(&self) -> bool {
        self.flags.is_woken()
    }

    /// Calls `wait`, unless the future was woken meanwhile. `wait` must also wait for the eventfd.
    /// Without an eventfd, `wait` must return soon.
    pub(crate) fn sleep(&self, wait: impl FnOnce(Option<&EventFd>)) {
        let event_fd = self.event_fd.get_or_init(|| EventFd::new().ok()).as_ref();
        if self.flags.fall_asleep() {
            wait(event_fd);
        }
        self.flags.get_up();
        if let Some(event_fd) = event_fd {
            event_fd.clear();
        }
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.flags.wake()
            && let Some(Some(event_fd)) = self.event_fd.get()
        {
            event_fd.signal();
        }
    }
}
