//! Which numbers the descriptors of connections have.
//!
//! For a library that is a guest in another program: the kernel gives the lowest number that is
//! free, and the program may need the low ones (an event loop with a table by number, `select`).
//! Numbers are the process's, and so is this setting.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

static FIRST: AtomicI32 = AtomicI32::new(0);

/// Connections that come from now on have descriptors from this number on. If there is none, they
/// are refused.
pub fn set_first(number: RawFd) {
    FIRST.store(number, Ordering::Relaxed);
}

/// Gives a descriptor of a connection such a number.
///
/// # Errors
/// There is none: the limit of the process (`RLIMIT_NOFILE`) is reached.
pub fn lift(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    let first = FIRST.load(Ordering::Relaxed);
    if descriptor.as_raw_fd() >= first {
        return Ok(descriptor);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&descriptor, first)?)
}
