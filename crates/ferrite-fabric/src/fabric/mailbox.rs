//! How other threads call the fabric's attention and wake it if it sleeps, and how those who drive
//! it leave it to each other.
//!
//! Any number may drive a fabric at a time: one of them makes a pass, the others sleep on the
//! descriptor or do something else. What makes sure that nobody sleeps over something:
//!
//! - Before sleeping, a driver says that it is `asleep` and then looks whether something is
//!   `pending`. Who calls does it the other way round. So one of two that meet sees the other. (The
//!   flags are never merely stored to: a swap sees what the one before it did, which is also what
//!   loom understands best.)
//! - Who takes events from the descriptor may take those that were to wake another. So it either
//!   prepares the descriptor for waiting again, as all do before they sleep, or rings the eventfd
//!   when it leaves ([`Mailbox::hand_over`]).
//! - A future is woken through a eventfd of its own thread (`wakeup.rs`): this one rings for any
//!   driver.
//!
//! `protocol.rs` has the model that loom goes through.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use super::event_fd::EventFd;
use crate::error::Error;
use crate::sync::{AtomicBool, Mutex, lock};

pub(crate) struct Mailbox {
    /// Links that need something of the fabric.
    links: Mutex<Vec<u32>>,
    pending: AtomicBool,
    /// Whether whoever drives the fabric is waiting on its descriptor, or about to.
    asleep: AtomicBool,
    /// Events were taken from the descriptor, and it was not prepared for waiting since.
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

    /// The fabric is to look at a link.
    pub(crate) fn attend(&self, link: u32) {
        lock(&self.links).push(link);
        self.ring();
    }

    /// The fabric is to look around.
    pub(crate) fn ring(&self) {
        self.pending.swap(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn wake(&self) {
        self.event_fd.ring();
    }

    pub(crate) fn silence(&self) {
        self.event_fd.silence();
    }

    /// What was called in since the last time.
    pub(crate) fn take(&self) -> Vec<u32> {
        if !self.pending.load(Ordering::Relaxed) || !self.pending.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.links))
    }

    /// The caller takes what the descriptor has: `look`.
    pub(crate) fn awake<R>(&self, look: impl FnOnce() -> R) -> R {
        self.asleep.swap(false, Ordering::SeqCst);
        let seen = look();
        // Afterwards: a eventfd that somebody rang for us in between may be among what was taken.
        self.disarmed.swap(true, Ordering::SeqCst);
        seen
    }

    /// The descriptor is prepared for waiting; `false` if there is something to do all the same.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.swap(true, Ordering::SeqCst);
        if self.pending.load(Ordering::SeqCst) {
            return false;
        }
        self.disarmed.swap(false, Ordering::SeqCst);
        true
    }

    /// The caller stops driving, and others may be asleep.
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
