//! A connection of a local program, which ends in the same way as its stream: in order or by a
//! reset.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use ferrite_proto::mux::Class;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::descriptors::Taken;
use super::stats::Meter;
use crate::mux::MuxSocket;
use crate::tcp_keepalive::enable_tcp_keepalive;

/// A connection to a local program: to one that has connected, or to an engine.
///
/// The connection ends in order only if both directions have ended. Until then the socket has a
/// linger time of zero. If the socket is closed earlier for any reason, even because the agent is
/// killed, the kernel resets the connection. So a program never mistakes a failure for the end.
#[derive(Debug)]
pub(super) struct LocalSocket {
    socket: TcpStream,
    /// Whether the program has ended its direction.
    has_ended: bool,
    /// Whether the direction to the program was ended.
    is_shut_down: bool,
    meter: Option<Meter>,
    /// Declared after the socket, so that it is given back when the descriptor is closed.
    taken: Option<Taken>,
}

impl LocalSocket {
    pub(super) fn new(socket: TcpStream) -> Self {
        let _ = socket.set_nodelay(true); // a failure only makes the connection slower
        let _ = socket.set_zero_linger(); // fails only if the connection has failed
        enable_tcp_keepalive(&socket);
        Self { socket, has_ended: false, is_shut_down: false, meter: None, taken: None }
    }

    /// Keeps what the connection has taken of the agent's descriptors until the socket is dropped.
    pub(super) fn holding(mut self, taken: Taken) -> Self {
        self.taken = Some(taken);
        self
    }

    /// Returns what the connection has taken of the agent's descriptors.
    pub(super) fn taken(&self) -> Option<&Taken> {
        self.taken.as_ref()
    }

    /// Returns the class of the connection: that of the bus only if it has a place of the bus.
    pub(super) fn class(&self) -> Class {
        match &self.taken {
            Some(taken) if taken.is_of_bus() => Class::Bus,
            _ => Class::Interactive,
        }
    }

    /// Counts the stream and its bytes from now on, until the socket is dropped.
    pub(super) fn metered(mut self, meter: Meter) -> Self {
        self.meter = Some(meter);
        self
    }

    /// Ends the counting, because the stream was not opened.
    pub(super) fn unmetered(mut self) -> Self {
        self.meter = None;
        self
    }
}

impl LocalSocket {
    /// Lets the connection end in order once both directions have ended. The kernel then delivers
    /// the bytes that the program has not read. With a linger time of zero it would drop them.
    fn check_end(&self) {
        if self.has_ended && self.is_shut_down {
            let _ = sockopt::set_socket_linger(&self.socket, None);
        }
    }
}

impl MuxSocket for LocalSocket {
    fn reset(self) {
        // `check_end` has changed the linger time if both directions have ended.
        let _ = self.socket.set_zero_linger();
    }

    fn failure(&self) -> Option<io::Error> {
        self.socket.failure()
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
            if bytes == 0 && out.remaining() > 0 {
                this.has_ended = true;
                this.check_end();
            }
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
        if let Poll::Ready(Ok(())) = shut_down {
            this.is_shut_down = true;
            this.check_end();
        }
        shut_down
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _};
    use std::net::{Shutdown, TcpListener};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Returns an agent's end and the program's end of a connection.
    fn connect() -> (LocalSocket, std::net::TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address");
        let program = std::net::TcpStream::connect(address).expect("a connection");
        let (socket, _) = listener.accept().expect("accept");
        socket.set_nonblocking(true).expect("an option");
        (LocalSocket::new(TcpStream::from_std(socket).expect("a socket")), program)
    }

    /// Sends as much as the kernel takes. Returns how much that was.
    async fn fill(socket: &mut LocalSocket) -> usize {
        let mut sent = 0;
        socket.socket.writable().await.expect("room");
        while let Ok(bytes) = socket.socket.try_write(&[7; 65_536]) {
            sent += bytes;
        }
        assert!(sent > 100_000, "{sent} bytes");
        sent
    }

    #[tokio::test]
    async fn program_gets_all_bytes_after_both_directions_have_ended() {
        for is_program_first in [true, false] {
            let (mut socket, mut program) = connect();
            let sent = fill(&mut socket).await;
            if !is_program_first {
                socket.shutdown().await.expect("the end");
            }
            program.shutdown(Shutdown::Write).expect("the end");
            assert_eq!(socket.read(&mut [0]).await.expect("the end"), 0);
            if is_program_first {
                socket.shutdown().await.expect("the end");
            }
            drop(socket);
            let mut received = Vec::new();
            program.read_to_end(&mut received).expect("the end, and no reset");
            assert_eq!(received.len(), sent);
        }
    }

    /// Closes the descriptor as the kernel does for a killed process.
    #[tokio::test]
    async fn closed_descriptor_resets_the_program_unless_both_directions_have_ended() {
        for has_half_ended in [false, true] {
            let (mut socket, mut program) = connect();
            if has_half_ended {
                program.shutdown(Shutdown::Write).expect("the end");
                assert_eq!(socket.read(&mut [0]).await.expect("the end"), 0);
            }
            drop(socket.socket.into_std().expect("a socket"));
            let error = program.read(&mut [0]).expect_err("a reset");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
    }

    #[tokio::test]
    async fn reset_also_resets_a_connection_whose_directions_have_ended() {
        let (mut socket, mut program) = connect();
        let _ = fill(&mut socket).await;
        program.shutdown(Shutdown::Write).expect("the end");
        assert_eq!(socket.read(&mut [0]).await.expect("the end"), 0);
        socket.shutdown().await.expect("the end");
        socket.reset();
        let error = program.read_to_end(&mut Vec::new()).expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}
