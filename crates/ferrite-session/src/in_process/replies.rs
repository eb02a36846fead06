//! Replies on their way to the client.
//!
//! Small ones are gathered as bytes, which are copied once more into the device's memory when they
//! leave. A long value is put there at once, and leaves from where it lies.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use ferrite_fabric::mem::{Buf, Pool, Purpose};
use ferrite_fabric::{Stream, Transport};
use ferrite_proto::resp::Head;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

use super::{InProcessSession, REPLIES_MAX};
use crate::stream::ValkeyStream;

/// From this length on a value has blocks of its own. Shorter ones leave together with others.
const LONG: usize = 32 << 10;
/// A block of the pool, and a write.
const BLOCK: usize = 64 << 10;
/// So much lies in blocks at most, as much as is ever under way to one client: memory of the device
/// is for all of them.
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
        Some(self.raw().pool())
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

    /// Returns whether they are so many that they should leave before more are made.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= REPLIES_MAX
    }

    /// Returns the memory that they take.
    pub(super) fn held_bytes(&self) -> usize {
        self.bytes.capacity() + self.block_bytes
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
            self.compact();
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

    /// Frees what a slow reader has taken, before the buffer is empty: it may never be.
    fn compact(&mut self) {
        if self.sent < REPLIES_MAX || self.sent < self.bytes.len() / 2 {
            return;
        }
        self.bytes.drain(..self.sent);
        self.blocks.iter_mut().for_each(|(at, _)| *at -= self.sent);
        self.sent = 0;
        if self.bytes.capacity() > 4 * self.bytes.len().max(REPLIES_MAX) {
            self.bytes.shrink_to(2 * self.bytes.len());
        }
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

/// Half of the memory for sends is for what is copied when it leaves, whoever reads long values and
/// takes his time.
fn has_plenty(pool: &Pool) -> bool {
    pool.in_use_bytes(Purpose::Send) <= pool.max_bytes(Purpose::Send) / 2
}

impl<C: Client> InProcessSession<'_, C> {
    /// Waits until what replies speak of is as safe as the engine makes it.
    pub(super) async fn settle(&mut self) {
        self.kept = 0;
        if std::mem::take(&mut self.must_settle) {
            self.engine.settled().await;
        }
    }

    /// Lets replies leave as far as the client takes them now, and holds the rest to the engine's
    /// limits.
    pub(super) async fn send_replies(&mut self) -> io::Result<()> {
        self.settle().await;
        while !self.replies.is_empty() {
            let (client, replies) = (&mut *self.client, &mut self.replies);
            let polled =
                std::future::poll_fn(|cx| Poll::Ready(replies.poll_write(client, cx))).await;
            match polled {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(written) => self.on_replied(written?).await?,
                Poll::Pending => break,
            }
        }
        self.note_held()?;
        self.check_output()
    }

    /// Lets all replies leave, however long the client takes.
    pub(super) async fn write_replies(&mut self) -> io::Result<()> {
        self.write_replies_below(1).await
    }

    /// The same until fewer than so many bytes are left.
    pub(super) async fn write_replies_below(&mut self, bytes: usize) -> io::Result<()> {
        self.settle().await;
        while self.replies.len() >= bytes {
            let (client, replies) = (&mut *self.client, &mut self.replies);
            let written = std::future::poll_fn(|cx| replies.poll_write(client, cx));
            match self.output.watch(written).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                count => self.on_replied(count).await?,
            }
        }
        Ok(())
    }

    /// So many bytes have left.
    pub(super) async fn on_replied(&mut self, count: usize) -> io::Result<()> {
        self.moved().to_client.fetch_add(count as u64, Ordering::Relaxed);
        if !self.replies.is_empty() {
            self.pause_if_due(false).await;
            return Ok(());
        }
        self.replies.clear();
        self.check_output()?;
        self.client.flush().await
    }

    /// Where long replies may lie: the client's link may have moved to another device, or to TCP.
    pub(super) fn look_for_memory(&mut self) {
        self.replies.memory = self.client.memory().cloned();
    }
}
