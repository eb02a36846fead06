//! How other threads call the engine's attention, and wake it if it sleeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{Error, ErrorKind};
use crate::mem::lock;

pub(crate) struct Mailbox {
    /// Links that need something of the engine.
    links: Mutex<Vec<u32>>,
    pending: AtomicBool,
    /// Whether whoever drives the engine is waiting on its descriptor, or about to.
    asleep: AtomicBool,
    bell: OwnedFd,
}

impl Mailbox {
    pub(crate) fn new() -> Result<Self, Error> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|errno| Error::new(ErrorKind::System, format!("eventfd: {errno}")))?;
        Ok(Self {
            links: Mutex::new(Vec::new()),
            pending: AtomicBool::new(false),
            asleep: AtomicBool::new(true),
            bell,
        })
    }

    /// The engine is to look at a link.
    pub(crate) fn attend(&self, link: u32) {
        lock(&self.links).push(link);
        self.ring();
    }

    /// The engine is to look around.
    pub(crate) fn ring(&self) {
        self.pending.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Makes the descriptor readable.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes()); // full: it is readable already
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// What was called in since the last time.
    pub(crate) fn take(&self) -> Vec<u32> {
        if !self.pending.load(Ordering::Relaxed) || !self.pending.swap(false, Ordering::SeqCst) {
            return Vec::new();
        }
        std::mem::take(&mut lock(&self.links))
    }

    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::SeqCst);
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
