//! A client for tests that expect replies.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ferrite_proto::resp::Value;

use super::{Connection, Response, Transport, encode};
use crate::wait::TIMEOUT;

/// A TCP or Unix socket.
#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    fn limit_writes(&self, limit: Duration) {
        let limited = match self {
            Self::Tcp(socket) => socket.set_write_timeout(Some(limit)),
            Self::Unix(socket) => socket.set_write_timeout(Some(limit)),
        };
        limited.expect("a time limit");
    }
}

impl Transport for Socket {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.send(bytes),
            Self::Unix(socket) => socket.send(bytes),
        }
    }

    fn receive(&mut self, into: &mut [u8], limit: Duration) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.receive(into, limit),
            Self::Unix(socket) => socket.receive(into, limit),
        }
    }
}

/// A client of an engine, over TCP or a Unix socket.
#[derive(Debug)]
pub struct Client(Connection<Socket>);

impl Client {
    /// Connects over TCP.
    ///
    /// # Panics
    /// If no server listens at the address.
    #[track_caller]
    #[must_use]
    pub fn to_tcp(address: impl ToSocketAddrs) -> Self {
        let socket = TcpStream::connect(address).expect("a connection over TCP");
        socket.set_nodelay(true).expect("TCP_NODELAY");
        Self::new(Socket::Tcp(socket))
    }

    /// Connects to a Unix socket.
    ///
    /// # Panics
    /// If no server listens at the socket.
    #[track_caller]
    #[must_use]
    pub fn to_socket(path: &Path) -> Self {
        Self::new(Socket::Unix(UnixStream::connect(path).expect("a connection to a socket")))
    }

    fn new(socket: Socket) -> Self {
        socket.limit_writes(TIMEOUT);
        Self(Connection::over(socket))
    }

    /// Sends commands in one piece, without waiting for replies.
    ///
    /// # Panics
    /// If the server has closed the connection, or does not read in time.
    #[track_caller]
    pub fn send<W: AsRef<[u8]>>(&mut self, commands: &[Vec<W>]) {
        assert!(self.try_send(commands), "the server closed the connection, or does not read");
    }

    /// Sends commands in one piece. Returns false if the server has closed the connection, or does
    /// not read in time.
    #[must_use]
    pub fn try_send<W: AsRef<[u8]>>(&mut self, commands: &[Vec<W>]) -> bool {
        let mut bytes = Vec::new();
        for words in commands {
            encode(words, &mut bytes);
        }
        self.0.transport.send(&bytes).is_ok()
    }

    /// Sends bytes.
    ///
    /// # Panics
    /// If the server does not read them.
    #[track_caller]
    pub fn write(&mut self, bytes: &[u8]) {
        self.0.transport.send(bytes).expect("the server reads");
    }

    /// Sends bytes. Returns false if the server has closed the connection, or if the socket accepts
    /// no byte for this time. This time also limits all later writes.
    #[must_use]
    pub fn write_within(&mut self, bytes: &[u8], time: Duration) -> bool {
        self.0.transport.limit_writes(time);
        self.0.transport.send(bytes).is_ok()
    }

    /// Reads the next reply; `None` if the server has closed the connection.
    ///
    /// # Panics
    /// If no reply arrives in time, or if the bytes are not a reply.
    #[track_caller]
    pub fn next_reply(&mut self) -> Option<Vec<u8>> {
        self.next_within(TIMEOUT).expect("a reply in time")
    }

    /// Reads the next reply, like [`Client::next_reply`], but waits only for `time`.
    ///
    /// # Errors
    /// No reply arrives in time, or the bytes are not a reply. For example, SYNC sends newlines
    /// while it works.
    pub fn next_within(&mut self, time: Duration) -> Result<Option<Vec<u8>>, String> {
        match self.0.try_receive(time)? {
            Response::Reply(reply) => Ok(Some(reply)),
            Response::Closed => Ok(None),
            Response::Timeout => Err("timeout".into()),
        }
    }

    /// Reads until the received bytes end with `end`, and returns all of them.
    ///
    /// # Panics
    /// If the bytes do not arrive in time, or if the server closes the connection.
    #[track_caller]
    pub fn read_until(&mut self, end: &[u8]) -> Vec<u8> {
        while !self.0.received.ends_with(end) {
            let more = self.0.more(TIMEOUT).expect("more bytes in time");
            assert!(more, "the server closed the connection");
        }
        std::mem::take(&mut self.0.received)
    }

    /// Reads the next replies.
    ///
    /// # Panics
    /// If fewer replies arrive.
    #[track_caller]
    pub fn replies(&mut self, count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|_| self.next_reply().expect("a reply")).collect()
    }

    /// Runs a command and returns its reply.
    ///
    /// # Panics
    /// If there is no reply.
    #[track_caller]
    pub fn raw<W: AsRef<[u8]>>(&mut self, words: &[W]) -> Vec<u8> {
        let words: Vec<_> = words.iter().map(AsRef::as_ref).collect();
        self.send(&[words]);
        self.next_reply().expect("a reply")
    }

    /// Runs a command and returns its reply as text, with its type character and header.
    ///
    /// # Panics
    /// If there is no reply.
    #[track_caller]
    pub fn ask<W: AsRef<[u8]>>(&mut self, words: &[W]) -> String {
        String::from_utf8_lossy(&self.raw(words)).trim_end().into()
    }

    /// Runs a command and returns the contents of a bulk string, or the text of another reply with
    /// its type character.
    ///
    /// # Panics
    /// If there is no reply.
    #[track_caller]
    pub fn text<W: AsRef<[u8]>>(&mut self, words: &[W]) -> String {
        text_of(&self.raw(words))
    }

    /// Returns the value of the field of INFO ferrite with this name, which is given without the
    /// prefix "ferrite_".
    ///
    /// # Panics
    /// If there is no such field.
    #[track_caller]
    #[must_use]
    pub fn info(&mut self, field: &str) -> String {
        let info = self.ask(&["INFO", "ferrite"]);
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("ferrite_")?.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {field} in {info}")).trim_end().into()
    }

    /// Returns the id of the first session in FERRITE CLIENTS.
    ///
    /// # Panics
    /// If there is no session.
    #[track_caller]
    #[must_use]
    pub fn first_session(&mut self) -> String {
        let sessions = self.text(&["FERRITE", "CLIENTS"]);
        let id = sessions.split(' ').next().and_then(|field| field.strip_prefix("id="));
        id.unwrap_or_else(|| panic!("no session: {sessions:?}")).to_owned()
    }

    /// Runs a command whose reply must be OK.
    ///
    /// # Panics
    /// If the reply is not OK.
    #[track_caller]
    pub fn ok<W: AsRef<[u8]> + std::fmt::Debug>(&mut self, words: &[W]) {
        assert_eq!(self.ask(words), "+OK", "{words:?}");
    }
}

/// Returns the contents of a bulk string, or the text of another reply with its type character.
#[must_use]
pub fn text_of(reply: &[u8]) -> String {
    match Value::parse(reply) {
        Ok(Value::Bulk(text)) => String::from_utf8_lossy(text).into(),
        _ => String::from_utf8_lossy(reply).trim_end().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_no_header() {
        let texts = ["$3\r\nab\n\r\n", "+OK\r\n", "$-1\r\n"].map(|reply| text_of(reply.as_bytes()));
        assert_eq!(texts, ["ab\n", "+OK", "$-1"]);
    }
}
