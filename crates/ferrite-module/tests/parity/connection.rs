//! A connection to an engine over any transport: sends bytes, receives whole replies.

use std::io;
use std::time::{Duration, Instant};

use ferrite_proto::resp::{Limits, Progress, ReplyFramer};

/// A byte stream to an engine.
pub(crate) trait Transport {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Receives bytes. Returns 0 if the connection is closed, and the error `TimedOut` or
    /// `WouldBlock` if nothing arrives in time.
    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize>;
}

impl Transport for std::net::TcpStream {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        io::Write::write_all(self, bytes)
    }

    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize> {
        self.set_read_timeout(Some(limit.max(Duration::from_millis(1))))?;
        io::Read::read(self, into)
    }
}

/// What a client receives.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Response {
    Reply(Vec<u8>),
    /// Nothing arrived in time.
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

pub(crate) struct Connection {
    transport: Box<dyn Transport>,
    /// Bytes that were received and not returned yet.
    received: Vec<u8>,
}

impl Connection {
    pub(crate) fn new(transport: Box<dyn Transport>) -> Self {
        Self { transport, received: Vec::new() }
    }

    /// Sends bytes. Errors are ignored; the next receive shows them.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let _ = self.transport.send(bytes);
    }

    /// Receives the next reply.
    pub(crate) fn receive(&mut self, limit: Duration) -> Response {
        let started = Instant::now();
        let mut framer = ReplyFramer::new(Limits { inline_bytes: 1 << 20, ..Limits::default() });
        let mut fed = 0;
        loop {
            match framer.feed(&self.received[fed..]) {
                Ok(Progress { consumed, complete: true }) => {
                    let rest = self.received.split_off(fed + consumed);
                    return Response::Reply(std::mem::replace(&mut self.received, rest));
                }
                Ok(Progress { consumed, .. }) => fed += consumed,
                Err(error) => panic!("{error} in {}", self.received.escape_ascii()),
            }
            // At least 1 ms, so that bytes that have already arrived are read even after the limit.
            match self.more(limit.saturating_sub(started.elapsed()).max(Duration::from_millis(1))) {
                Ok(true) => {}
                Ok(false) => return Response::Closed,
                Err(()) => return Response::Timeout,
            }
        }
    }

    /// Receives everything until the engine closes the connection, or a timeout if it does not.
    pub(crate) fn receive_until_close(&mut self, limit: Duration) -> Response {
        let started = Instant::now();
        loop {
            match self.more(limit.saturating_sub(started.elapsed()).max(Duration::from_millis(1))) {
                Ok(true) => {}
                Ok(false) => return Response::Reply(std::mem::take(&mut self.received)),
                Err(()) => return Response::Timeout,
            }
        }
    }

    /// Receives more bytes. Returns false if the connection is closed, and an error if nothing
    /// arrives in time.
    fn more(&mut self, limit: Duration) -> Result<bool, ()> {
        let mut buffer = [0; 64 << 10];
        match self.transport.receive(&mut buffer, limit) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.received.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(error)
                if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) =>
            {
                Err(())
            }
            // A reset counts like an orderly close: clients cannot rely on either.
            Err(_) => Ok(false),
        }
    }
}

/// Encodes a command as clients send it.
pub(crate) fn encode(words: &[Vec<u8>], into: &mut Vec<u8>) {
    into.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        into.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        into.extend_from_slice(word);
        into.extend_from_slice(b"\r\n");
    }
}
