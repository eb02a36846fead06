//! Moves descriptors to numbers at or above a minimum. The fabric does so for the TCP connections
//! that it accepts. Other crates do so for their sockets with [`lift`].
//!
//! This is for a library inside another program. The kernel assigns the lowest free number, but the
//! program may need the low numbers, for example for an event loop with a table by number, or for
//! `select`. Descriptor numbers belong to the whole process, and so does this setting.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

static FIRST: AtomicI32 = AtomicI32::new(0);

/// Sets the lowest number for the descriptors that [`lift`] moves. If no number from there on is
/// free, the fabric refuses TCP connections.
pub fn set_first(number: RawFd) {
    FIRST.store(number, Ordering::Relaxed);
}

/// Moves a connection's descriptor to a free number at or above the minimum ([`set_first`]), unless
/// it already has such a number.
///
/// # Errors
/// Fails if no such number is free: the process has reached its limit (`RLIMIT_NOFILE`).
pub fn lift(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    let first = FIRST.load(Ordering::Relaxed);
    if descriptor.as_raw_fd() >= first {
        return Ok(descriptor);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&descriptor, first)?)
}
