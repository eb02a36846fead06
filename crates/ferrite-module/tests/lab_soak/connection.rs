//! Commands and their replies over any byte stream.

use std::io;
use std::path::Path;
use std::time::Duration;

use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::model::Words;
use ferrite_testkit::Random;

/// A stream that can be read and written.
pub(crate) trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send + Sync {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send + Sync> ByteStream for T {}

/// A connection, with the part of the current reply that has arrived.
pub(crate) struct Connection {
    stream: Box<dyn ByteStream>,
    received: Vec<u8>,
    framer: ReplyFramer,
    framed: usize,
}

impl Connection {
    pub(crate) fn new(stream: Box<dyn ByteStream>) -> Self {
        let framer = ReplyFramer::new(Limits::default());
        Self { stream, received: Vec::new(), framer, framed: 0 }
    }

    pub(crate) async fn to_socket(path: &Path) -> io::Result<Self> {
        Ok(Self::new(Box::new(UnixStream::connect(path).await?)))
    }

    /// Sends commands and reads their replies. If that fails, `replies` has the replies that
    /// arrived.
    pub(crate) async fn exchange(
        &mut self,
        commands: &[Words],
        replies: &mut Vec<Vec<u8>>,
    ) -> io::Result<()> {
        let mut bytes = Vec::new();
        commands
            .iter()
            .for_each(|words| encode_command(words.iter().map(Vec::as_slice), &mut bytes));
        let (reader, mut writer) = tokio::io::split(&mut self.stream);
        let mut reader = Replies {
            reader,
            received: &mut self.received,
            framer: &mut self.framer,
            framed: &mut self.framed,
        };
        let sending = async {
            writer.write_all(&bytes).await?;
            writer.flush().await
        };
        let receiving = async {
            while replies.len() < commands.len() {
                replies.push(reader.next().await?);
            }
            Ok(())
        };
        tokio::try_join!(sending, receiving).map(|_| ())
    }

    pub(crate) async fn ask(&mut self, words: &[&str]) -> io::Result<Vec<u8>> {
        let words = words.iter().map(|word| word.as_bytes().to_vec()).collect();
        let mut replies = Vec::new();
        self.exchange(&[words], &mut replies).await?;
        Ok(replies.remove(0))
    }

    /// Sends a random part of the commands, and closes the connection.
    pub(crate) async fn break_off(mut self, commands: &[Words], random: &mut Random) {
        let mut bytes = Vec::new();
        commands
            .iter()
            .for_each(|words| encode_command(words.iter().map(Vec::as_slice), &mut bytes));
        bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
        let sending = async {
            self.stream.write_all(&bytes).await?;
            self.stream.flush().await
        };
        let _ = timeout(Duration::from_millis(random.below(20)), sending).await;
    }
}

struct Replies<'a, R> {
    reader: R,
    received: &'a mut Vec<u8>,
    framer: &'a mut ReplyFramer,
    framed: &'a mut usize,
}

impl<R: AsyncRead + Unpin> Replies<'_, R> {
    async fn next(&mut self) -> io::Result<Vec<u8>> {
        loop {
            let progress =
                self.framer.feed(&self.received[*self.framed..]).map_err(io::Error::other)?;
            *self.framed += progress.consumed;
            if progress.complete {
                let rest = self.received.split_off(*self.framed);
                *self.framed = 0;
                return Ok(std::mem::replace(self.received, rest));
            }
            if self.reader.read_buf(self.received).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
