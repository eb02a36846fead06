//! Commands and their replies over whatever carries bytes.

use std::io;
use std::path::Path;
use std::time::Duration;

use ferrite_proto::resp::{Limits, ReplyFramer, encode_command};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::model::Words;
use crate::random::Random;

pub(crate) trait Both: AsyncRead + AsyncWrite + Unpin + Send + Sync {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send + Sync> Both for T {}

/// A connection, and what has come of the reply that is under way.
pub(crate) struct Connection {
    stream: Box<dyn Both>,
    heard: Vec<u8>,
    framer: ReplyFramer,
    framed: usize,
}

impl Connection {
    pub(crate) fn new(stream: Box<dyn Both>) -> Self {
        Self { stream, heard: Vec::new(), framer: ReplyFramer::new(Limits::default()), framed: 0 }
    }

    pub(crate) async fn to_socket(path: &Path) -> io::Result<Self> {
        Ok(Self::new(Box::new(UnixStream::connect(path).await?)))
    }

    /// Says all of it, and hears a reply for each; those that came stay in `replies` if it fails.
    pub(crate) async fn talk(
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
            heard: &mut self.heard,
            framer: &mut self.framer,
            framed: &mut self.framed,
        };
        let saying = async {
            writer.write_all(&bytes).await?;
            writer.flush().await
        };
        let hearing = async {
            while replies.len() < commands.len() {
                replies.push(reader.next().await?);
            }
            Ok(())
        };
        tokio::try_join!(saying, hearing).map(|_| ())
    }

    pub(crate) async fn ask(&mut self, words: &[&str]) -> io::Result<Vec<u8>> {
        let words = words.iter().map(|word| word.as_bytes().to_vec()).collect();
        let mut replies = Vec::new();
        self.talk(&[words], &mut replies).await?;
        Ok(replies.remove(0))
    }

    /// A part of what could be said, and then nothing more.
    pub(crate) async fn break_off(mut self, commands: &[Words], random: &mut Random) {
        let mut bytes = Vec::new();
        commands
            .iter()
            .for_each(|words| encode_command(words.iter().map(Vec::as_slice), &mut bytes));
        bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
        let said = async {
            self.stream.write_all(&bytes).await?;
            self.stream.flush().await
        };
        let _ = timeout(Duration::from_millis(random.below(20)), said).await;
    }
}

struct Replies<'a, R> {
    reader: R,
    heard: &'a mut Vec<u8>,
    framer: &'a mut ReplyFramer,
    framed: &'a mut usize,
}

impl<R: AsyncRead + Unpin> Replies<'_, R> {
    async fn next(&mut self) -> io::Result<Vec<u8>> {
        loop {
            let progress =
                self.framer.feed(&self.heard[*self.framed..]).map_err(io::Error::other)?;
            *self.framed += progress.consumed;
            if progress.complete {
                let rest = self.heard.split_off(*self.framed);
                *self.framed = 0;
                return Ok(std::mem::replace(self.heard, rest));
            }
            if self.reader.read_buf(self.heard).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}
