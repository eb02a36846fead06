//! Requests from other threads to the fabric's driver, and the hand-over between several drivers. A
//! request wakes a sleeping driver.
//!
//! Any number of threads may drive a fabric at the same time. One of them makes a pass, and the
//! others sleep on the descriptor or do something else. These rules ensure that no driver sleeps
//! while there is work:
//!
//! - A driver that falls asleep and a thread with a request do not miss each other: see
//!   [`SleepFlags`].
//! - A driver that takes events from the descriptor may take an event that should wake another
//!   driver. So it either prepares the descriptor for waiting again, as all drivers do before they
//!   sleep, or signals the eventfd when it stops driving ([`Mailbox::hand_over`]).
//! - A future is woken through an eventfd of its own thread (`wakeup.rs`), because the mailbox's
//!   eventfd wakes any driver.
//!
//! `protocol.rs` contains the loom model of these rules.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use super::event_fd::EventFd;
use super::sleep_flags::SleepFlags;
use crate::error::Error;
use crate::sync::{AtomicBool, Mutex, lock};

pub(crate) struct Mailbox {
    /// The numbers of links that need attention from the driver.
    links: Mutex<Vec<u32>>,
    /// Whether there are requests, and whether a driver waits on the descriptor or is about to
    /// wait.
    flags: SleepFlags,
    /// Whether events were taken from the descriptor, and it was not prepared for waiting since
    /// then.
    disarmed: AtomicBool,
    event_fd: EventFd,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            links: Mutex::new(Vec::new()),
            flags: SleepFlags::asleep(),
            disarmed: AtomicBool::new(false),
            event_fd: EventFd::new()?,
        })
    }

    /// Asks the driver to service a link.
    pub(crate) fn request_service(&self, link: u32) {
        lock(&self.links).push(link);
        self.notify();
    }

    /// Asks the driver to make a pass.
    pub(crate) fn notify(&self) {
        if self.flags.wake() {
            self.wake();
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn wake(&self) {
        self.event_fd.signal();
    }

    pub(crate) fn clear(&self) {
        self.event_fd.clear();
    }

    /// Takes the links that asked for attention since the last call.
    pub(crate) fn take(&self) -> Vec<u32> {
        if !self.flags.take_woken() {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.links))
    }

    /// Runs `take_events`, which takes events from the descriptor.
    pub(crate) fn awake<R>(&self, take_events: impl FnOnce() -> R) -> R {
        self.flags.get_up();
        let seen = take_events();
        // Set the flag only now. A driver that hands over in the meantime resets the flag and
        // signals, and the taken events may include that signal.
        self.disarmed.swap(true, Ordering::SeqCst);
        seen
    }

    /// Records that the driver is about to wait for the descriptor. Returns `false` if work has
    /// arrived in the meantime; then the driver must not wait.
    pub(crate) fn fall_asleep(&self) -> bool {
        if !self.flags.fall_asleep() {
            return false;
        }
        self.disarmed.swap(false, Ordering::SeqCst);
        true
    }

    /// Wakes another driver if necessary, because the caller stops driving.
    pub(crate) fn hand_over(&self) {
        if self.disarmed.load(Ordering::Relaxed) && self.disarmed.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}
