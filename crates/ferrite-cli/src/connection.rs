//! A connection to a server: sends commands and receives complete replies.

use std::io;

use ferrite_proto::resp::{Limits, Progress, ReplyError, ReplyFramer, Value, encode_command};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf,
};

/// A byte stream in both directions.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Duplex for S {}

/// The smallest free space in the buffer before a read, in bytes.
const READ_BYTES: usize = 64 << 10;

/// A connection to a server.
pub(crate) struct Connection {
    replies: Replies,
    writer: WriteHalf<Box<dyn Duplex>>,
}

/// The receiving half of a connection.
pub(crate) struct Replies {
    reader: ReadHalf<Box<dyn Duplex>>,
    framer: ReplyFramer,
    /// Bytes that were read but not returned yet. The framer has seen the first `framed` bytes.
    bytes: Vec<u8>,
    framed: usize,
}

/// A complete reply or push message.
pub(crate) struct Frame(Vec<u8>);

impl Frame {
    /// Parses the frame.
    pub(crate) fn value(&self) -> io::Result<Value<'_>> {
        Value::parse(&self.0).map_err(invalid_reply)
    }

    /// Returns whether the frame is a push message, that is, not a reply to a command.
    pub(crate) fn is_push(&self) -> bool {
        self.0.first() == Some(&b'>')
    }
}

impl Connection {
    /// Creates a connection over a stream. `reply_bytes` is the largest reply, 0 for no limit.
    pub(crate) fn new(stream: Box<dyn Duplex>, reply_bytes: u64) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let framer = ReplyFramer::new(limits(reply_bytes));
        Self { replies: Replies { reader, framer, bytes: Vec::new(), framed: 0 }, writer }
    }

    /// Sends a command.
    pub(crate) async fn send<A: AsRef<[u8]>>(&mut self, words: &[A]) -> io::Result<()> {
        let mut bytes = Vec::new();
        encode_command(words, &mut bytes);
        self.send_bytes(&bytes).await
    }

    /// Sends encoded commands.
    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes).await.map_err(describe)?;
        self.writer.flush().await.map_err(describe)
    }

    /// Receives the next reply or push message. Cancelling this loses no data.
    pub(crate) async fn frame(&mut self) -> io::Result<Frame> {
        self.replies.frame().await
    }

    /// Splits the connection into its two directions.
    pub(crate) fn split(self) -> (Replies, WriteHalf<Box<dyn Duplex>>) {
        (self.replies, self.writer)
    }
}

impl Replies {
    /// Receives the next reply or push message. Cancelling this loses no data.
    pub(crate) async fn frame(&mut self) -> io::Result<Frame> {
        loop {
            let fresh = self.bytes.get(self.framed..).unwrap_or_default();
            let Progress { consumed, complete } = self.framer.feed(fresh).map_err(invalid_reply)?;
            self.framed += consumed;
            if complete {
                let rest = self.bytes.split_off(self.framed);
                self.framed = 0;
                return Ok(Frame(std::mem::replace(&mut self.bytes, rest)));
            }
            self.bytes.reserve(READ_BYTES);
            if self.reader.read_buf(&mut self.bytes).await.map_err(describe)? == 0 {
                return Err(closed());
            }
        }
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "Server closed the connection")
}

/// Gives a disconnect the same message, no matter whether a read or a write notices it.
fn describe(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset if error.get_ref().is_none() => {
            closed()
        }
        // In TLS 1.3, a server reports a missing client certificate only after the handshake.
        _ if error.to_string().contains("CertificateRequired") => io::Error::new(
            error.kind(),
            "the server requires a client certificate; use --cert and --key",
        ),
        _ => error,
    }
}

/// About how many bytes of memory a value takes in addition to its own bytes.
const VALUE_BYTES: u64 = 64;

fn limits(reply_bytes: u64) -> Limits {
    match reply_bytes {
        0 => Limits::default(),
        most => Limits {
            reply_bytes: most,
            reply_values: (most / VALUE_BYTES).max(1),
            ..Limits::default()
        },
    }
}

fn invalid_reply(error: ReplyError) -> io::Error {
    if matches!(error, ReplyError::TooLarge { .. } | ReplyError::TooMany { .. }) {
        let message = format!("{error}; change the limit with --max-reply-bytes");
        return io::Error::new(io::ErrorKind::InvalidData, message);
    }
    io::Error::new(io::ErrorKind::InvalidData, format!("the server does not speak RESP: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explains_how_a_connection_ended() {
        for (error, text) in [
            (io::ErrorKind::BrokenPipe.into(), "Server closed the connection"),
            (io::ErrorKind::ConnectionReset.into(), "Server closed the connection"),
            (
                io::Error::other("received fatal alert: CertificateRequired"),
                "the server requires a client certificate; use --cert and --key",
            ),
            (io::Error::other("another"), "another"),
        ] {
            assert_eq!(describe(error).to_string(), text);
        }
    }
}
