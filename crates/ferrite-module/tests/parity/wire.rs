//! A connection to an engine, whatever carries it: bytes out, whole replies in.

use std::io;
use std::time::{Duration, Instant};

use ferrite_proto::resp::{Limits, Progress, ReplyFramer};

/// What carries bytes to an engine.
pub(crate) trait Transport {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// What has come: 0 bytes are the end, `TimedOut` or `WouldBlock` is silence.
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

/// What a client hears.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Heard {
    Reply(Vec<u8>),
    /// Nothing in time.
    Silence,
    /// The engine has hung up.
    End,
}

impl std::fmt::Debug for Heard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reply(bytes) => {
                let (shown, rest) = bytes.split_at(bytes.len().min(300));
                write!(f, "\"{}\"", shown.escape_ascii())?;
                if rest.is_empty() { Ok(()) } else { write!(f, " and {} bytes", rest.len()) }
            }
            Self::Silence => f.write_str("silence"),
            Self::End => f.write_str("the end"),
        }
    }
}

pub(crate) struct Wire {
    transport: Box<dyn Transport>,
    /// What has come and was not given out.
    heard: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(transport: Box<dyn Transport>) -> Self {
        Self { transport, heard: Vec::new() }
    }

    /// A failure shows when the answer is waited for.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let _ = self.transport.send(bytes);
    }

    /// The next reply.
    pub(crate) fn hear(&mut self, limit: Duration) -> Heard {
        let begun = Instant::now();
        let mut framer = ReplyFramer::new(Limits { inline_bytes: 1 << 20, ..Limits::default() });
        let mut fed = 0;
        loop {
            match framer.feed(&self.heard[fed..]) {
                Ok(Progress { consumed, complete: true }) => {
                    let rest = self.heard.split_off(fed + consumed);
                    return Heard::Reply(std::mem::replace(&mut self.heard, rest));
                }
                Ok(Progress { consumed, .. }) => fed += consumed,
                Err(error) => panic!("{error} in {}", self.heard.escape_ascii()),
            }
            // What is there is taken, however late it is looked at.
            match self.more(limit.saturating_sub(begun.elapsed()).max(Duration::from_millis(1))) {
                Ok(true) => {}
                Ok(false) => return Heard::End,
                Err(()) => return Heard::Silence,
            }
        }
    }

    /// Everything up to the end, or silence if none comes.
    pub(crate) fn hear_the_end(&mut self, limit: Duration) -> Heard {
        let begun = Instant::now();
        loop {
            match self.more(limit.saturating_sub(begun.elapsed()).max(Duration::from_millis(1))) {
                Ok(true) => {}
                Ok(false) => return Heard::Reply(std::mem::take(&mut self.heard)),
                Err(()) => return Heard::Silence,
            }
        }
    }

    /// Whether there is more, or `Err` if nothing came in time.
    fn more(&mut self, limit: Duration) -> Result<bool, ()> {
        let mut buffer = [0; 64 << 10];
        match self.transport.receive(&mut buffer, limit) {
            Ok(0) => Ok(false),
            Ok(count) => {
                self.heard.extend_from_slice(&buffer[..count]);
                Ok(true)
            }
            Err(error)
                if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) =>
            {
                Err(())
            }
            // Hung up without a word, or with one: clients cannot rely on either.
            Err(_) => Ok(false),
        }
    }
}

/// The words of a command as clients send them.
pub(crate) fn encode(words: &[Vec<u8>], into: &mut Vec<u8>) {
    into.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        into.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        into.extend_from_slice(word);
        into.extend_from_slice(b"\r\n");
    }
}
