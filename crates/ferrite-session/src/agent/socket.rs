//! A connection of a local program, which ends as its stream ends.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::stats::Meter;
use crate::mux::MuxSocket;
use crate::tcp_keepalive::enable_tcp_keepalive;

/// A connection to a local program: to one that has connected, or to an engine.
///
/// The program gets the end of the stream only if both directions have ended. In every other case,
/// dropping this resets the connection, so that a program never takes a failure for the end.
#[derive(Debug)]
pub(super) struct LocalSocket {
    socket: TcpStream,
    /// Whether the program has ended its direction.
    has_ended: bool,
    /// Whether the direction to the program was ended.
    is_shut_down: bool,
    meter: Option<Meter>,
}

impl LocalSocket {
    pub(super) fn new(socket: TcpStream) -> Self {
        let _ = socket.set_nodelay(true); // only costs time
        enable_tcp_keepalive(&socket);
        Self { socket, has_ended: false, is_shut_down: false, meter: None }
    }

    /// Counts the stream and its bytes from now on, until the socket is dropped.
    pub(super) fn metered(mut self, meter: Meter) -> Self {
        self.meter = Some(meter);
        self
    }

    /// Counts nothing any more: the stream was not opened.
    pub(super) fn unmetered(mut self) -> Self {
        self.meter = None;
        self
    }
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        if !(self.has_ended && self.is_shut_down) {
            let _ = self.socket.set_zero_linger(); // fails only if the connection has
        }
    }
}

impl MuxSocket for LocalSocket {
    fn reset(mut self) {
        self.is_shut_down = false; // then dropping it resets it
    }
}

impl AsyncRead for LocalSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let read = Pin::new(&mut this.socket).poll_read(cx, out);
        if let Poll::Ready(Ok(())) = read {
            let bytes = out.filled().len() - before;
            this.has_ended |= bytes == 0 && out.remaining() > 0;
            if let Some(meter) = &this.meter {
                meter.add_to_peer(bytes);
            }
        }
        read
    }
}

impl AsyncWrite for LocalSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.socket).poll_write(cx, bytes);
        if let (Poll::Ready(Ok(bytes)), Some(meter)) = (&written, &this.meter) {
            meter.add_from_peer(*bytes);
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut_down = Pin::new(&mut this.socket).poll_shutdown(cx);
        this.is_shut_down |= matches!(shut_down, Poll::Ready(Ok(())));
        shut_down
    }
}
