//! The reading side of a stream: turns messages into bytes.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use tokio::io::ReadBuf;
use tokio::task::coop;

use super::CHANNEL;
use crate::error::{Error, ErrorKind};
use crate::handles::Link;
use crate::link::message::Parts;
use crate::mem::Buf;

/// The minimum size of a caller's buffer that is filled directly from the kernel. A smaller buffer
/// is filled from the bytes that the fabric has already read, because direct reads would take too
/// many system calls.
const DIRECT_READ_MIN: usize = 16 << 10;

pub(super) struct Reader {
    pub(super) link: Link,
    /// The piece that is being read, from `at` on.
    piece: Option<Buf>,
    at: usize,
    /// The pieces that follow the current piece in the same message.
    rest: std::vec::IntoIter<Buf>,
    /// Whether the peer writes no more.
    over: bool,
}

impl Reader {
    pub(super) fn new(link: Link) -> Self {
        Self { link, piece: None, at: 0, rest: Vec::new().into_iter(), over: false }
    }

    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if out.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let budget = ready!(coop::poll_proceed(cx));
        if self.read_through(out)? {
            budget.made_progress();
            return Poll::Ready(Ok(()));
        }
        ready!(self.poll_piece(cx))?;
        while let Some(piece) = &self.piece {
            let bytes = &piece[self.at..];
            let len = bytes.len().min(out.remaining());
            out.put_slice(&bytes[..len]);
            self.at += len;
            if self.at == piece.len() {
                self.piece = None;
            }
            if out.remaining() == 0 {
                break;
            }
            self.next_piece();
        }
        if out.remaining() > 0 {
            let _ = self.read_through(out); // the next call reports a failure
        }
        budget.made_progress();
        Poll::Ready(Ok(()))
    }

    /// Reads large frames directly from the kernel, if TCP carries the link and no earlier bytes
    /// are pending.
    fn read_through(&mut self, out: &mut ReadBuf<'_>) -> io::Result<bool> {
        let is_pending = self.piece.is_some() || self.rest.len() > 0 || self.over;
        Ok(!is_pending
            && out.remaining() >= DIRECT_READ_MIN
            && self.link.shared().read_through(CHANNEL, out)?)
    }

    /// Returns the rest of the current piece, or the next piece. Returns no bytes at the end of the
    /// stream.
    pub(super) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        let budget = ready!(coop::poll_proceed(cx));
        ready!(self.poll_piece(cx))?;
        budget.made_progress();
        let bytes = self.piece.take().map(|piece| Bytes::from(piece).slice(self.at..));
        Poll::Ready(Ok(bytes.unwrap_or_default()))
    }

    /// Waits until there is a piece, or until the stream has ended.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.piece.is_none() && !self.over {
            if let Some(piece) = self.rest.next() {
                self.begin(piece);
                break;
            }
            match self.link.shared().receive(Some(cx.waker())) {
                // Drop notices of one-sided writes, and messages on other channels.
                Ok(Some(message)) if message.notice().is_some() || message.channel() != CHANNEL => {
                }
                Ok(Some(message)) => self.take(message.into_parts()),
                Ok(None) => return Poll::Pending,
                Err(error) => self.ended(error)?,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Continues with the next piece that has already arrived. A failure is reported after all
    /// pieces were read.
    fn next_piece(&mut self) {
        if self.piece.is_some() || self.over {
            return;
        }
        if let Some(piece) = self.rest.next() {
            self.begin(piece);
        } else if let Ok(Some(message)) = self.link.shared().receive(None)
            && message.notice().is_none()
            && message.channel() == CHANNEL
        {
            self.take(message.into_parts());
            if let Some(piece) = self.rest.next() {
                self.begin(piece);
            }
        }
    }

    fn take(&mut self, message: Parts<Buf>) {
        match message {
            Parts::Empty => self.over = true,
            Parts::One(piece) => self.begin(piece),
            Parts::Many(pieces) => self.rest = pieces.into_iter(),
        }
    }

    fn begin(&mut self, piece: Buf) {
        self.piece = Some(piece);
        self.at = 0;
    }

    /// Ends the stream if the peer closed the link in an orderly way. Any other end is a failure.
    fn ended(&mut self, error: Error) -> io::Result<()> {
        if error.kind() != ErrorKind::Closed {
            return Err(error.into());
        }
        if self.link.shared().peer_has_closed() {
            self.over = true;
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::ConnectionAborted, error))
    }
}
