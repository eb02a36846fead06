//! Requests from other threads to the fabric's driver, which wake it if it sleeps, and the
//! hand-over between several drivers.
//!
//! Any number of threads may drive a fabric at the same time. One of them makes a pass; the others
//! sleep on the descriptor or do something else. These rules ensure that no driver sleeps while
//! there is work:
//!
//! - Before sleeping, a driver sets `asleep` and then checks `pending`. A thread with a request
//!   does it in the reverse order: it sets `pending` and then checks `asleep`. So at least one of
//!   the two sees the other. (The flags are always swapped, never just stored to: a swap sees the
//!   effects of the previous one, and loom models swaps best.)
//! - A driver that takes events from the descriptor may take those that were to wake another
//!   driver. So it either prepares the descriptor for waiting again, as all drivers do before they
//!   sleep, or signals the eventfd when it leaves ([`Mailbox::hand_over`]).
//! - A future is woken through an eventfd of its own thread (`wakeup.rs`), because the mailbox's
//!   eventfd wakes any driver.
//!
//! `protocol.rs` contains the loom model of these rules.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use super::event_fd::EventFd;
use crate::error::Error;
use crate::sync::{AtomicBool, Mutex, lock};

pub(crate) struct Mailbox {
    /// Links that need attention from the driver.
    links: Mutex<Vec<u32>>,
    pending: AtomicBool,
    /// Whether a driver waits on the descriptor, or is about to.
    asleep: AtomicBool,
    /// Whether events were taken from the descriptor and it was not prepared for waiting since.
    disarmed: AtomicBool,
    event_fd: EventFd,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            links: Mutex::new(Vec::new()),
            pending: AtomicBool::new(false),
            asleep: AtomicBool::new(true),
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
        self.pending.swap(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
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
        if !self.pending.load(Ordering::Relaxed) || !self.pending.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.links))
    }

    /// Lets the caller take events from the descriptor, with `take_events`.
    pub(crate) fn awake<R>(&self, take_events: impl FnOnce() -> R) -> R {
        self.asleep.swap(false, Ordering::SeqCst);
        let seen = take_events();
        // Only now, because the events that were taken may include a signal that another driver
        // sent us in between.
        self.disarmed.swap(true, Ordering::SeqCst);
        seen
    }

    /// Records that the descriptor is prepared for waiting. Returns `false` if there is work after
    /// all.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.swap(true, Ordering::SeqCst);
        if self.pending.load(Ordering::SeqCst) {
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
