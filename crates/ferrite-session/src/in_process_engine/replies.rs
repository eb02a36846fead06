//! Replies that are to be sent to the client.
//!
//! Small replies are gathered in a buffer. When they are sent over RDMA, the buffer is copied into
//! memory that is registered with the device. For a client over RDMA, [`Replies::push_string`]
//! copies a long value into registered memory at once, as far as there is room, and the value is
//! sent from there.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ferrite_fabric::mem::{Buf, Pool, Purpose};
use ferrite_fabric::{Stream, Transport};
use ferrite_proto::resp::Head;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::stream::ValkeyStream;

/// How many bytes of replies are gathered before they are sent.
pub(crate) const REPLIES_MAX: usize = 64 << 10;
/// From this length on, a value is put into blocks of its own. Shorter values share a buffer.
const LONG_VALUE: usize = 32 << 10;
/// The largest size of a block.
const BLOCK: usize = 64 << 10;
/// The most bytes that one client's replies hold in blocks. With frames of the default size, no
/// client has more bytes in flight. So more blocks would only take memory of the device, which all
/// clients share.
const BLOCKS_MAX: usize = 1 << 20;
/// The smallest block. A shorter end of a value is sent together with the next reply.
const BLOCK_MIN: usize = 1 << 10;

/// A client's stream.
pub(crate) trait Client: AsyncRead + AsyncWrite + Unpin + Send {
    /// Returns the memory from which [`Client::poll_write_buf`] sends without a copy, if any.
    fn memory(&self) -> Option<&Pool> {
        None
    }

    /// Writes a part of `buf`, and returns the number of bytes.
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

/// A client over TCP that speaks plain RESP.
impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send> Client for tokio::io::Join<R, W> {}

/// The unsent replies of a session, in order.
#[derive(Default)]
pub struct Replies {
    bytes: Vec<u8>,
    /// How many of the bytes were sent.
    sent: usize,
    /// Blocks of long values, each with a position in `bytes`: the block is sent before the byte at
    /// that position.
    blocks: VecDeque<(usize, Buf)>,
    block_bytes: usize,
    memory: Option<Pool>,
}

impl Replies {
    /// Creates an empty queue, which puts long values into this memory.
    #[must_use]
    pub fn with_memory(memory: Option<Pool>) -> Self {
        Self { memory, ..Self::default() }
    }

    /// Changes the memory for long values.
    pub(crate) fn set_memory(&mut self, memory: Option<Pool>) {
        self.memory = memory;
    }

    /// Returns the buffer, to append replies to it.
    pub fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Appends a bulk string.
    pub fn push_string(&mut self, value: &[u8]) {
        let head = Head::new(b'$', value.len());
        let mut parts = [&head[..], value, b"\r\n"];
        if value.len() >= LONG_VALUE {
            self.push_blocks(&mut parts);
        }
        self.bytes.reserve(parts.iter().map(|part| part.len()).sum());
        parts.into_iter().for_each(|part| self.bytes.extend_from_slice(part));
    }

    /// Copies as much of the parts as possible into blocks, and removes it from the parts.
    fn push_blocks(&mut self, parts: &mut [&[u8]]) {
        let Some(pool) = self.memory.as_ref().filter(|pool| has_room_for_blocks(pool)) else {
            return;
        };
        loop {
            let len = parts.iter().map(|part| part.len()).sum::<usize>().min(BLOCK);
            if len < BLOCK_MIN || self.block_bytes + len > BLOCKS_MAX {
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

    /// Returns the number of unsent bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent + self.block_bytes
    }

    /// Returns whether there are so many bytes that they should be sent before more are added.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() >= REPLIES_MAX
    }

    /// Returns the memory that the replies hold.
    pub(crate) fn held_bytes(&self) -> usize {
        self.bytes.capacity() + self.block_bytes
    }

    /// Returns whether everything was sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn poll_write<C: Client>(
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

    /// Frees the memory of sent bytes. With a slow reader, the buffer may never become empty.
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

    /// Clears the buffer after everything was sent. Frees it if it is large.
    pub(crate) fn clear(&mut self) {
        if self.bytes.capacity() > 2 * REPLIES_MAX {
            self.bytes = Vec::new();
        }
        self.bytes.clear();
        self.sent = 0;
    }
}

/// Returns whether at most half of the send memory is in use. The other half is reserved for small
/// replies, so that slow readers of long values cannot use up everything.
fn has_room_for_blocks(pool: &Pool) -> bool {
    pool.in_use_bytes(Purpose::Send) <= pool.max_bytes(Purpose::Send) / 2
}
