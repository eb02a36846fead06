//! The local connection of a stream, and received bytes that the connection has not taken.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use ferrite_proto::mux::{Cause, Filled};
use tokio::io::ReadBuf;

use super::socket::MuxSocket;

/// How the direction from the peer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerEnd {
    /// The peer may send more.
    No,
    /// The peer has ended it. The connection is shut down when it has taken all bytes.
    Fin,
    /// The connection was shut down.
    Delivered,
}

pub(super) struct Local<S> {
    /// `None` while the destination is being connected.
    socket: Option<S>,
    /// Received bytes that the connection has not taken, on the heap. At most a window, because the
    /// peer gets credit only for bytes that were taken.
    backlog: VecDeque<u8>,
    peer_end: PeerEnd,
    /// Wakes this stream.
    waker: Waker,
}

impl<S: MuxSocket> Local<S> {
    pub(super) fn new(socket: Option<S>, waker: Waker) -> Self {
        Self { socket, backlog: VecDeque::new(), peer_end: PeerEnd::No, waker }
    }

    /// Sets the connection of a stream of the peer.
    pub(super) fn connect(&mut self, socket: S) {
        self.socket = Some(socket);
    }

    /// Reads the next bytes of the connection into `room`, which is registered memory.
    pub(super) fn fill(&mut self, room: &mut [u8]) -> Filled {
        let nothing = Filled::Bytes { len: 0, is_more: false };
        let Some(socket) = &mut self.socket else { return nothing };
        let mut room = ReadBuf::new(room);
        match Pin::new(socket).poll_read(&mut Context::from_waker(&self.waker), &mut room) {
            Poll::Pending => nothing,
            Poll::Ready(Err(_)) => Filled::Failed(Cause::CONNECTION_LOST),
            Poll::Ready(Ok(())) => match room.filled().len() {
                0 => Filled::End,
                // There may be more. Only a read that returns `Pending` shows that there is none,
                // and makes the connection keep the waker.
                len => Filled::Bytes { len, is_more: true },
            },
        }
    }

    /// Passes received bytes to the connection. Keeps a copy of those that it does not take.
    /// Returns how many it took.
    pub(super) fn deliver(&mut self, bytes: &[u8]) -> io::Result<u32> {
        let mut rest = bytes;
        while self.backlog.is_empty() && !rest.is_empty() {
            match self.write(rest)? {
                0 => break,
                written => rest = &rest[written..],
            }
        }
        self.backlog.extend(rest);
        Ok((bytes.len() - rest.len()) as u32) // at most the length of a message
    }

    /// Passes bytes of the backlog to the connection, and then the end, if the peer has sent that.
    /// Returns how many bytes the connection took.
    pub(super) fn flush(&mut self) -> io::Result<u32> {
        let mut flushed = 0;
        while !self.backlog.is_empty() {
            let backlog = std::mem::take(&mut self.backlog);
            let written = self.write(backlog.as_slices().0);
            self.backlog = backlog;
            match written? {
                0 => return Ok(flushed),
                written => {
                    self.backlog.drain(..written);
                    flushed += written as u32; // at most a window
                }
            }
        }
        if flushed > 0 {
            self.backlog = VecDeque::new(); // frees the memory
        }
        self.shut_down()?;
        Ok(flushed)
    }

    /// Notes that the peer sends nothing more.
    pub(super) fn end(&mut self) -> io::Result<()> {
        self.peer_end = PeerEnd::Fin;
        self.shut_down()
    }

    fn shut_down(&mut self) -> io::Result<()> {
        if self.peer_end == PeerEnd::Fin
            && self.backlog.is_empty()
            && let Some(socket) = &mut self.socket
            && let Poll::Ready(result) =
                Pin::new(socket).poll_shutdown(&mut Context::from_waker(&self.waker))
        {
            self.peer_end = PeerEnd::Delivered;
            result?;
        }
        Ok(())
    }

    /// Closes the connection so that the program sees a failure.
    pub(super) fn reset(self) {
        if let Some(socket) = self.socket {
            socket.reset();
        }
    }

    /// Writes bytes to the connection. Returns how many it took, which is 0 if it must wait.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(socket) = &mut self.socket else { return Ok(0) };
        match Pin::new(socket).poll_write(&mut Context::from_waker(&self.waker), bytes) {
            Poll::Pending => Ok(0),
            Poll::Ready(Ok(0)) => Err(io::ErrorKind::WriteZero.into()),
            Poll::Ready(written) => written,
        }
    }
}
