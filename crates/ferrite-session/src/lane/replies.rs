//! Replies on their way to the client.

use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

use super::{AHEAD, Lane, REPLIES_MAX};

/// A client that does not read its replies may send so much: as the engine has it, which hangs up then, too
/// (`client-query-buffer-limit`).
const UNREAD_MAX: usize = 1 << 30;

/// What a client has taken, or sent.
enum Either {
    Written(usize),
    Read(usize),
}

impl<C: AsyncRead + AsyncWrite + Unpin + Send> Lane<'_, C> {
    /// Replies leave, if what they speak of is safe.
    pub(super) async fn flush(&mut self) -> io::Result<()> {
        self.kept = 0;
        if self.replies.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut self.must_settle) {
            self.inside.settled().await;
        }
        self.moved.to_client.fetch_add(self.replies.len() as u64, Ordering::Relaxed);
        self.write_replies().await?;
        if self.replies.capacity() > 2 * REPLIES_MAX {
            self.replies = Vec::new(); // a large reply's room is not kept
        }
        self.replies.clear();
        self.client.flush().await
    }

    /// All of them. Many clients send everything they have to say before they read the first answer: what comes meanwhile is kept.
    async fn write_replies(&mut self) -> io::Result<()> {
        let (mut sent, mut has_ended, mut piece) = (0, false, [0; AHEAD]);
        while sent < self.replies.len() {
            let rest = &self.replies[sent..];
            let client = &mut *self.client;
            let moved = std::future::poll_fn(|cx| {
                if let Poll::Ready(written) = Pin::new(&mut *client).poll_write(cx, rest) {
                    return Poll::Ready(written.map(Either::Written));
                }
                if has_ended {
                    return Poll::Pending;
                }
                let mut room = ReadBuf::new(&mut piece);
                let read = std::task::ready!(Pin::new(&mut *client).poll_read(cx, &mut room));
                Poll::Ready(read.map(|()| Either::Read(room.filled().len())))
            });
            match moved.await? {
                Either::Written(0) => return Err(io::ErrorKind::WriteZero.into()),
                Either::Written(count) => sent += count,
                Either::Read(0) => has_ended = true,
                Either::Read(count) => self.input.append(&piece[..count]),
            }
            if self.input.ahead().len() > UNREAD_MAX {
                return Err(io::Error::other("a client sends and does not read"));
            }
        }
        Ok(())
    }
}
