//! Calls on a non-blocking TCP socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

/// Writes as much of the slices as the kernel accepts. Returns the number of bytes; `None` if the
/// kernel accepts nothing now.
pub(crate) fn send(socket: &OwnedFd, slices: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match rustix::net::sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags) {
            Ok(sent) => return Ok(Some(sent)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads into the slices. Returns the number of bytes, which is 0 at the end of the stream; `None`
/// if nothing has arrived.
pub(crate) fn receive(
    socket: &OwnedFd,
    slices: &mut [IoSliceMut<'_>],
) -> io::Result<Option<usize>> {
    loop {
        let received = match &mut *slices {
            [one] => rustix::net::recv(socket.as_fd(), &mut **one, RecvFlags::DONTWAIT)
                .map(|(len, _)| len),
            several => rustix::io::readv(socket.as_fd(), several),
        };
        match received {
            Ok(len) => return Ok(Some(len)),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    }
}
