//! The loom model of the kernel. An eventfd is a flag. The device is one completion queue, which
//! reports a completion if it was armed.

use std::os::fd::{AsFd, BorrowedFd};

use loom::sync::{Condvar, Mutex};

use crate::error::Error;
use crate::sync::lock;

loom::lazy_static! {
    /// Each execution of the model has its own kernel.
    pub(crate) static ref KERNEL: Kernel =
        Kernel { state: Mutex::new(KernelState::default()), changed: Condvar::new() };
}

pub(crate) struct Kernel {
    pub(crate) state: Mutex<KernelState>,
    pub(crate) changed: Condvar,
}

#[derive(Default)]
pub(crate) struct KernelState {
    pub(crate) event_fds: Vec<bool>,
    /// The numbers of the futures whose completions were not taken yet.
    pub(crate) completions: Vec<usize>,
    /// Whether the next completion makes the descriptor readable.
    pub(crate) armed: bool,
    pub(crate) event: bool,
    /// Whether the descriptor became readable since the edge-triggered sleeper last woke up.
    pub(crate) changed: bool,
}

/// A model of an eventfd.
#[derive(Debug)]
pub struct EventFd(usize);

impl EventFd {
    pub(crate) fn new() -> Result<Self, Error> {
        let mut kernel = lock(&KERNEL.state);
        kernel.event_fds.push(false);
        Ok(Self(kernel.event_fds.len() - 1))
    }

    pub(crate) fn signal(&self) {
        let mut kernel = lock(&KERNEL.state);
        kernel.event_fds[self.0] = true;
        kernel.changed |= self.0 == MAILBOX;
        drop(kernel);
        KERNEL.changed.notify_all();
    }

    pub(crate) fn clear(&self) {
        lock(&KERNEL.state).event_fds[self.0] = false;
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        unreachable!("the model has no descriptors")
    }
}

/// Lets the device complete an operation that a future waits for.
pub(crate) fn complete(future: usize) {
    let mut kernel = lock(&KERNEL.state);
    kernel.completions.push(future);
    if std::mem::take(&mut kernel.armed) {
        kernel.event = true;
        kernel.changed = true;
        drop(kernel);
        KERNEL.changed.notify_all();
    }
}

/// The index of the mailbox's eventfd, which is the first to be created.
const MAILBOX: usize = 0;

/// Waits until the descriptor or the eventfd is readable.
pub(crate) fn sleep(event_fd: Option<&EventFd>) {
    let mut kernel = lock(&KERNEL.state);
    while !(kernel.event
        || kernel.event_fds[MAILBOX]
        || event_fd.is_some_and(|event_fd| kernel.event_fds[event_fd.0]))
    {
        kernel = KERNEL.changed.wait(kernel).expect("no thread panicked");
    }
}

/// Waits for a change of the descriptor, edge-triggered as in tokio. Each change is reported once,
/// even if its event is not taken.
pub(crate) fn sleep_edge_triggered() {
    let mut kernel = lock(&KERNEL.state);
    while !std::mem::take(&mut kernel.changed) {
        kernel = KERNEL.changed.wait(kernel).expect("no thread panicked");
    }
}
