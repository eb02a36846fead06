//! Clients of an engine that receive replies byte for byte.
//!
//! A [`Connection`] works over any [`Transport`] and returns every result, even a timeout or a
//! closed connection. A [`Client`] is for tests that expect replies: most of its functions panic if
//! there is no reply.

mod client;

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ferrite_proto::resp::{Limits, Progress, ReplyFramer, encode_command};

pub use client::{Client, text_of};

/// A byte stream to an engine.
pub trait Transport {
    /// Sends all bytes.
    ///
    /// # Errors
    /// The engine has closed the connection, or does not read.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Receives bytes. Returns 0 if the connection is closed.
    ///
    /// # Errors
    /// `TimedOut` or `WouldBlock` if no byte arrives in time.
    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize>;
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        (**self).send(bytes)
    }

    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize> {
        (**self).receive(into, limit)
    }
}

impl Transport for TcpStream {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize> {
        self.set_read_timeout(Some(limit.max(SHORTEST)))?;
        self.read(into)
    }
}

impl Transport for UnixStream {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize> {
        self.set_read_timeout(Some(limit.max(SHORTEST)))?;
        self.read(into)
    }
}

/// The shortest wait: bytes that have already arrived are read even after the limit has passed.
const SHORTEST: Duration = Duration::from_millis(1);

/// The result of receiving.
#[derive(Clone, PartialEq, Eq)]
pub enum Response {
    /// A whole reply.
    Reply(Vec<u8>),
    /// No whole reply arrived in time.
    Timeout,
    /// The engine has closed the connection.
    Closed,
}

impl std::fmt::Debug for Response {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reply(bytes) => {
                let (shown, rest) = bytes.split_at(bytes.len().min(300));
                write!(f, "\"{}\"", shown.escape_ascii())?;
                if rest.is_empty() { Ok(()) } else { write!(f, " and {} more bytes", rest.len()) }
            }
            Self::Timeout => f.write_str("no reply"),
            Self::Closed => f.write_str("connection closed"),
        }
    }
}

/// A connection to an engine: sends bytes, receives whole replies.
#[derive(Debug)]
pub struct Connection<T = Box<dyn Transport>> {
    transport: T,
    /// Bytes that were received but not returned yet.
    received: Vec<u8>,
}

impl Connection {
    /// Wraps a transport of any kind.
    #[must_use]
    pub fn new(transport: Box<dyn Transport>) -> Self {
        Self::over(transport)
    }
}

impl<T: Transport> Connection<T> {
    /// Wraps a transport of this kind.
    pub fn over(transport: T) -> Self {
        Self { transport, received: Vec::new() }
    }

    /// Sends bytes. Ignores errors, because the next receive shows them.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.transport.send(bytes);
    }

    /// Receives the next reply.
    ///
    /// # Panics
    /// If the bytes are not a reply.
    pub fn receive(&mut self, limit: Duration) -> Response {
        self.try_receive(limit).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Receives the next reply.
    ///
    /// # Errors
    /// The bytes are not a reply. For example, SYNC sends newlines while it works.
    pub fn try_receive(&mut self, limit: Duration) -> Result<Response, String> {
        let started = Instant::now();
        let mut framer = ReplyFramer::new(Limits { inline_bytes: 1 << 20, ..Limits::default() });
        let mut fed = 0;
        loop {
            match framer.feed(&self.received[fed..]) {
                Ok(Progress { consumed, complete: true }) => {
                    let rest = self.received.split_off(fed + consumed);
                    return Ok(Response::Reply(std::mem::replace(&mut self.received, rest)));
                }
                Ok(Progress { consumed, .. }) => fed += consumed,
                Err(error) => return Err(format!("{error} in {}", self.received.escape_ascii())),
            }
            match self.more(limit.saturating_sub(started.elapsed())) {
                Ok(true) => {}
                Ok(false) => return Ok(Response::Closed),
                Err(()) => return Ok(Response::Timeout),
            }
        }
    }

    /// Receives all bytes until the engine closes the connection, and returns them as
    /// [`Response::Reply`]. Returns [`Response::Timeout`] if the engine does not close the
    /// connection in time.
    pub fn receive_until_close(&mut self, limit: Duration) -> Response {
        let started = Instant::now();
        loop {
            match self.more(limit.saturating_sub(started.elapsed())) {
                Ok(true) => {}
                Ok(false) => return Response::Reply(std::mem::take(&mut self.received)),
                Err(()) => return Response::Timeout,
            }
        }
    }

    /// Receives more bytes. Returns false if the connection is closed, and an error if no byte
    /// arrives in time.
    fn more(&mut self, limit: Duration) -> Result<bool, ()> {
        let mut buffer = [0; 64 << 10];
        match self.transport.receive(&mut buffer, limit.max(SHORTEST)) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.received.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                Err(())
            }
            // A reset counts as an orderly close, because clients cannot rely on the difference.
            Err(_) => Ok(false),
        }
    }
}

/// Encodes a command as clients send it.
pub fn encode<W: AsRef<[u8]>>(words: &[W], into: &mut Vec<u8>) {
    encode_command(words.iter().map(AsRef::as_ref), into);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::TIMEOUT;

    fn pair() -> (Connection<UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        (Connection::over(ours), theirs)
    }

    #[test]
    fn returns_replies_one_by_one_and_the_end() {
        let (mut connection, mut engine) = pair();
        engine.write_all(b"+OK\r\n$3\r\na").expect("a write");
        assert_eq!(connection.receive(TIMEOUT), Response::Reply(b"+OK\r\n".into()));
        assert_eq!(connection.receive(Duration::ZERO), Response::Timeout);
        engine.write_all(b"bc\r\n:1").expect("a write");
        assert_eq!(connection.receive(TIMEOUT), Response::Reply(b"$3\r\nabc\r\n".into()));
        drop(engine);
        assert_eq!(connection.receive(TIMEOUT), Response::Closed);
    }

    #[test]
    fn reads_the_rest_before_the_end() {
        let (mut connection, mut engine) = pair();
        engine.write_all(b"any bytes").expect("a write");
        drop(engine);
        let all = connection.receive_until_close(TIMEOUT);
        assert_eq!(all, Response::Reply(b"any bytes".into()));
    }

    #[test]
    fn reports_bytes_that_are_no_reply() {
        let (mut connection, mut engine) = pair();
        engine.write_all(b"\n\n").expect("a write");
        assert!(connection.try_receive(TIMEOUT).is_err());
    }
}
