//! The fabric's descriptor under tokio. A file of its own because tokio 1.54 made the registration
//! `unsafe`.
#![expect(unsafe_code, reason = "AsyncFd::register asks for a promise that OwnedFd keeps")]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Makes tokio tell when `fd` is readable.
pub(super) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, stays open and stays the same until it is dropped, which the
    // `AsyncFd` does.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}
