//! The waker of [`Engine::block_on`](super::Engine::block_on): wakes the thread that waits, not just anyone who drives the
//! engine. The engine's own bell would not do: another driver may take it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::Wake;

use super::bell::Bell;
use crate::sync::AtomicBool;

pub(super) struct Wakeup {
    woken: AtomicBool,
    sleeping: AtomicBool,
    /// Made when its thread first sleeps; `None` if the process has no descriptor left.
    bell: OnceLock<Option<Bell>>,
}

impl Wakeup {
    /// Woken, so that the future is asked a first time.
    pub(super) fn new() -> Self {
        Self { woken: AtomicBool::new(true), sleeping: AtomicBool::new(false), bell: OnceLock::new() }
    }

    /// Whether the future is to be asked again.
    pub(super) fn take(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }

    pub(super) fn is_woken(&self) -> bool {
        self.woken.load(Ordering::SeqCst)
    }

    /// Lets `wait` wait, also for the bell, unless the future was woken meanwhile. Without a bell it must not wait long.
    pub(super) fn sleep(&self, wait: impl FnOnce(Option<&Bell>)) {
        let bell = self.bell.get_or_init(|| Bell::new().ok()).as_ref();
        self.sleeping.swap(true, Ordering::SeqCst); // no mere store: see the mailbox
        if !self.is_woken() {
            wait(bell);
        }
        self.sleeping.swap(false, Ordering::SeqCst);
        if let Some(bell) = bell {
            bell.silence();
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
            && let Some(Some(bell)) = self.bell.get()
        {
            bell.ring();
        }
    }
}
