//! What a link delivers: a message, or the notice that came with a one-sided write.

use std::fmt;

use bytes::{Bytes, BytesMut};

use crate::mem::Buf;

/// A message from the peer, or the notice of a one-sided write.
///
/// A message has one piece per non-empty frame. Over RDMA, large pieces stay where the device put
/// them. Small pieces may be copied, so that they do not hold a whole receive buffer. A message of
/// one frame becomes [`Bytes`] without a copy.
///
/// ```
/// # fn show(message: ferrite_fabric::Message) {
/// let total: usize = message.pieces().map(<[u8]>::len).sum();
/// assert_eq!(total, message.len());
/// let bytes: bytes::Bytes = message.into_bytes();
/// # let _ = bytes; }
/// ```
pub struct Message {
    channel: u16,
    notice: Option<u32>,
    len: usize,
    parts: Parts<Buf>,
}

impl Message {
    pub(crate) fn new(channel: u16, parts: Parts<Buf>, len: usize) -> Self {
        Self { channel, notice: None, len, parts }
    }

    pub(crate) fn notice_of(imm: u32) -> Self {
        Self { channel: 0, notice: Some(imm), len: 0, parts: Parts::Empty }
    }

    /// Returns the channel on which the message was sent; 0 for a notice.
    #[must_use]
    pub fn channel(&self) -> u16 {
        self.channel
    }

    /// Returns the 32 bits of the peer's [`Link::rdma_write_imm`](crate::Link::rdma_write_imm);
    /// `None` for an ordinary message. A message with a notice has no bytes, because the write put
    /// its bytes into the memory that was granted to the peer.
    #[must_use]
    pub fn notice(&self) -> Option<u32> {
        self.notice
    }

    /// Returns the total number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the message has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes, piece by piece.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.as_slice().iter().map(|piece| &piece[..])
    }

    /// Returns the pieces themselves.
    #[must_use]
    pub fn into_pieces(self) -> Vec<Buf> {
        match self.parts {
            Parts::Empty => Vec::new(),
            Parts::One(buf) => vec![buf],
            Parts::Many(bufs) => bufs,
        }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn into_parts(self) -> Parts<Buf> {
        self.parts
    }

    /// Returns the bytes in one piece. Copies them only if there are several pieces.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        match self.parts {
            Parts::Empty => Bytes::new(),
            Parts::One(buf) => buf.into(),
            Parts::Many(bufs) => {
                let mut out = BytesMut::with_capacity(self.len);
                bufs.iter().for_each(|buf| out.extend_from_slice(buf));
                out.freeze()
            }
        }
    }

    /// Returns a copy of all bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.len);
        self.pieces().for_each(|piece| out.extend_from_slice(piece));
        out
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("channel", &self.channel)
            .field("len", &self.len)
            .field("notice", &self.notice)
            .finish_non_exhaustive()
    }
}

/// The pieces of a message. A single piece, which is the common case, needs no list.
#[derive(Debug, Default)]
pub(crate) enum Parts<B> {
    #[default]
    Empty,
    One(B),
    Many(Vec<B>),
}

/// The initial capacity of the list of pieces. Most messages of several pieces need no more.
const SEVERAL: usize = 8;

impl<B> Parts<B> {
    pub(crate) fn push(&mut self, piece: B) {
        match self {
            Self::Many(pieces) => pieces.push(piece),
            Self::Empty => *self = Self::One(piece),
            Self::One(_) => {
                let mut pieces = Vec::with_capacity(SEVERAL);
                if let Self::One(first) = std::mem::take(self) {
                    pieces.push(first);
                }
                pieces.push(piece);
                *self = Self::Many(pieces);
            }
        }
    }

    pub(crate) fn as_slice(&self) -> &[B] {
        match self {
            Self::Empty => &[],
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}
