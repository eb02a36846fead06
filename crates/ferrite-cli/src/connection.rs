//! One connection: commands out, whole replies in.

use std::io;

use ferrite_proto::resp::{Limits, Progress, ReplyError, ReplyFramer, Value, encode_command};
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf,
};

/// Anything that carries bytes both ways.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Duplex for S {}

/// Room for what is read at a time.
const READ_BYTES: usize = 64 << 10;

/// A connection to a server.
pub(crate) struct Connection {
    replies: Replies,
    writer: WriteHalf<Box<dyn Duplex>>,
}

/// The half that replies come from.
pub(crate) struct Replies {
    reader: ReadHalf<Box<dyn Duplex>>,
    framer: ReplyFramer,
    /// What was read and belongs to no reply that was given out. `framed` bytes of it have been
    /// looked at.
    bytes: Vec<u8>,
    framed: usize,
}

/// A whole reply, or something that the server said unasked.
pub(crate) struct Frame(Vec<u8>);

impl Frame {
    /// A look into it.
    pub(crate) fn value(&self) -> io::Result<Value<'_>> {
        Value::parse(&self.0).map_err(not_resp)
    }

    /// Whether nobody asked for it.
    pub(crate) fn is_push(&self) -> bool {
        self.0.first() == Some(&b'>')
    }
}

impl Connection {
    /// `reply_bytes` is the most of one reply, 0 for no limit.
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

    /// Sends what is a number of commands already.
    pub(crate) async fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes).await.map_err(in_words)?;
        self.writer.flush().await.map_err(in_words)
    }

    /// The next reply or push. Nothing is lost if this is given up while it waits.
    pub(crate) async fn frame(&mut self) -> io::Result<Frame> {
        self.replies.frame().await
    }

    /// The two directions apart.
    pub(crate) fn split(self) -> (Replies, WriteHalf<Box<dyn Duplex>>) {
        (self.replies, self.writer)
    }
}

impl Replies {
    /// The next reply or push. Nothing is lost if this is given up while it waits.
    pub(crate) async fn frame(&mut self) -> io::Result<Frame> {
        loop {
            let fresh = self.bytes.get(self.framed..).unwrap_or_default();
            let Progress { consumed, complete } = self.framer.feed(fresh).map_err(not_resp)?;
            self.framed += consumed;
            if complete {
                let rest = self.bytes.split_off(self.framed);
                self.framed = 0;
                return Ok(Frame(std::mem::replace(&mut self.bytes, rest)));
            }
            self.bytes.reserve(READ_BYTES);
            if self.reader.read_buf(&mut self.bytes).await.map_err(in_words)? == 0 {
                return Err(closed());
            }
        }
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "Server closed the connection")
}

/// The same words whether reading or writing finds out that the server hung up.
fn in_words(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset if error.get_ref().is_none() => {
            closed()
        }
        _ => error,
    }
}

/// A value takes about as much memory as this before a byte of it is counted.
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

fn not_resp(error: ReplyError) -> io::Error {
    if matches!(error, ReplyError::TooLarge { .. } | ReplyError::TooMany { .. }) {
        let what = format!("{error}; --max-reply-bytes changes the limit");
        return io::Error::new(io::ErrorKind::InvalidData, what);
    }
    io::Error::new(io::ErrorKind::InvalidData, format!("the server speaks no RESP: {error}"))
}
