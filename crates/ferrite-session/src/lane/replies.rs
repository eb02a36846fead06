//! Replies on their way to the client.
//!
//! Small ones are gathered as bytes, which are copied once more into the device's memory when they leave. A long value is put there
//! at once, and leaves from where it lies.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use ferrite_fabric::mem::{Buf, Pool, Purpose};
use ferrite_fabric::{Stream, Transport};
use ferrite_proto::resp::Head;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

use super::{AHEAD, Lane, REPLIES_MAX};
use crate::stream::ValkeyStream;

/// A client that does not read its replies may send so much: as the engine has it, which hangs up then, too
/// (`client-query-buffer-limit`).
const UNREAD_MAX: usize = 1 << 30;

/// From this length on a value has blocks of its own. Shorter ones leave together with others.
const LONG: usize = 32 << 10;
/// A block of the pool, and a write.
const BLOCK: usize = 64 << 10;
/// So much lies in blocks at most, as much as is ever under way to one client: memory of the device is for all of them.
const BLOCKS_MAX: usize = 1 << 20;
/// What is left of a value behind its last block goes with the next reply instead.
const CRUMB: usize = 1 << 10;

/// A client's stream.
pub(crate) trait Client: AsyncRead + AsyncWrite + Unpin + Send {
    /// Memory from which [`Client::poll_write_buf`] needs no copy, if there is such.
    fn memory(&self) -> Option<&Pool> {
        None
    }

    /// Writes some of it; how much.
    fn poll_write_buf(&mut self, cx: &mut Context<'_>, buf: &Buf) -> Poll<io::Result<usize>> {
        Pin::new(self).poll_write(cx, buf)
    }
}

impl Client for ValkeyStream {
    fn memory(&self) -> Option<&Pool> {
        Some(self.bare().pool())
    }

    fn poll_write_buf(&mut self, cx: &mut Context<'_>, buf: &Buf) -> Poll<io::Result<usize>> {
        self.poll_write_buf(cx, buf)
    }
}

impl Client for Stream {
    fn memory(&self) -> Option<&Pool> {
        (self.link().transport() == Transport::Rdma).then(|| self.link().pool())
    }

    fn poll_write_buf(&mut self, cx: &mut Context<'_>, buf: &Buf) -> Poll<io::Result<usize>> {
        self.poll_write_buf(cx, buf)
    }
}

/// Somebody over TCP who does not know of us.
impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send> Client for tokio::io::Join<R, W> {}

/// Replies, in order.
#[derive(Default)]
pub struct Replies {
    bytes: Vec<u8>,
    /// So many of them have left.
    sent: usize,
    /// Long values, each behind so many of the bytes.
    blocks: VecDeque<(usize, Buf)>,
    block_bytes: usize,
    memory: Option<Pool>,
}

impl Replies {
    /// Long values have their place in this memory, if there is such.
    #[must_use]
    pub fn with_memory(memory: Option<Pool>) -> Self {
        Self { memory, ..Self::default() }
    }

    /// To append to.
    pub fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Appends a string.
    pub fn push_string(&mut self, value: &[u8]) {
        let head = Head::new(b'$', value.len());
        let mut parts = [&head[..], value, b"\r\n"];
        if value.len() >= LONG {
            self.push_blocks(&mut parts);
        }
        self.bytes.reserve(parts.iter().map(|part| part.len()).sum());
        parts.into_iter().for_each(|part| self.bytes.extend_from_slice(part));
    }

    /// Takes from the parts what has its place in blocks.
    fn push_blocks(&mut self, parts: &mut [&[u8]]) {
        let Some(pool) = self.memory.as_ref().filter(|pool| has_plenty(pool)) else { return };
        loop {
            let len = parts.iter().map(|part| part.len()).sum::<usize>().min(BLOCK);
            if len < CRUMB || self.block_bytes + len > BLOCKS_MAX {
                return;
            }
            let Ok(mut block) = pool.take_uncharged(len, Purpose::Send) else { return };
            let mut room = &mut block[..];
            for part in &mut *parts {
                let (now, later) = part.split_at(part.len().min(room.len()));
                let (filled, free) = room.split_at_mut(now.len());
                filled.copy_from_slice(now);
                (*part, room) = (later, free);
            }
            self.blocks.push_back((self.bytes.len(), block.freeze()));
            self.block_bytes += len;
        }
    }

    /// Bytes of them that have not left.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent + self.block_bytes
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn poll_write<C: Client>(
        &mut self,
        client: &mut C,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let before_block = self.blocks.front().map_or(self.bytes.len(), |(at, _)| *at);
        if self.sent < before_block {
            let bytes = &self.bytes[self.sent..before_block];
            let count = ready!(Pin::new(client).poll_write(cx, bytes))?;
            self.sent += count;
            return Poll::Ready(Ok(count));
        }
        let Some((_, block)) = self.blocks.front_mut() else { return Poll::Ready(Ok(0)) };
        let count = ready!(client.poll_write_buf(cx, block))?;
        self.block_bytes -= count;
        *block = block.slice(count..);
        if block.is_empty() {
            self.blocks.pop_front();
        }
        Poll::Ready(Ok(count))
    }

    /// All have left. A large reply's room is not kept.
    fn clear(&mut self) {
        if self.bytes.capacity() > 2 * REPLIES_MAX {
            self.bytes = Vec::new();
        }
        self.bytes.clear();
        self.sent = 0;
    }
}

/// Half of the memory for sends is for what is copied when it leaves, whoever reads long values and takes his time.
fn has_plenty(pool: &Pool) -> bool {
    let send = pool.stats().send;
    send.in_use_bytes <= send.max_bytes / 2
}

/// What a client has taken, or sent.
enum Either {
    Written(usize),
    Read(usize),
}

impl<C: Client> Lane<'_, C> {
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
        self.replies.clear();
        self.client.flush().await
    }

    /// All of them. Many clients send everything they have to say before they read the first answer: what comes meanwhile is kept.
    async fn write_replies(&mut self) -> io::Result<()> {
        let (mut has_ended, mut piece) = (false, [0; AHEAD]);
        while !self.replies.is_empty() {
            let (client, replies) = (&mut *self.client, &mut self.replies);
            let moved = std::future::poll_fn(|cx| {
                if let Poll::Ready(written) = replies.poll_write(client, cx) {
                    return Poll::Ready(written.map(Either::Written));
                }
                if has_ended {
                    return Poll::Pending;
                }
                let mut room = ReadBuf::new(&mut piece);
                let read = ready!(Pin::new(&mut *client).poll_read(cx, &mut room));
                Poll::Ready(read.map(|()| Either::Read(room.filled().len())))
            });
            match moved.await? {
                Either::Written(0) => return Err(io::ErrorKind::WriteZero.into()),
                Either::Written(_) if self.replies.is_empty() => return Ok(()),
                Either::Written(_) => self.pause_if_due(false).await,
                Either::Read(0) => has_ended = true,
                Either::Read(count) => self.input.append(&piece[..count]),
            }
            if self.input.ahead().len() > UNREAD_MAX {
                return Err(io::Error::other("a client sends and does not read"));
            }
        }
        Ok(())
    }

    /// Where long replies may lie: the client's link may have moved to another device, or to TCP.
    pub(super) fn look_for_memory(&mut self) {
        self.replies.memory = self.client.memory().cloned();
    }
}
