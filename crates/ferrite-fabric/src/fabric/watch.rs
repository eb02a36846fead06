//! Registers the fabric's descriptor with tokio. This code has its own file because tokio 1.54 made
//! the registration `unsafe`.
#![expect(unsafe_code, reason = "AsyncFd::register requires a descriptor that stays open")]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets tokio report when `fd` is readable.
pub(super) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, stays open and stays the same until it is dropped, and the
    // `AsyncFd` drops it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}
