//! The receiving half of a stream, with the bytes that were received but not yet taken.
//!
//! A bulk reply is read directly into the caller's buffer. Only its header, and the bytes that
//! arrived together with the header, pass through the memory of this type.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use ferrite_session::Session;
use tokio::io::{AsyncRead as _, ReadBuf, ReadHalf};

/// How many bytes to read at a time while no header has shown where they belong.
const READ_AHEAD: usize = 16 << 10;
/// Every header of a bulk reply is shorter than this.
const HEADER_MAX: usize = 32;
/// The size of a value is below this, so that adding the line end to it does not overflow.
const VALUE_MAX: usize = isize::MAX as usize - 2;

pub(crate) struct Input {
    half: ReadHalf<Session>,
    ahead: Vec<u8>,
    /// `from..to` is the part of `ahead` that was received but not yet taken.
    from: usize,
    to: usize,
    is_at_end: bool,
}

/// The reply to a command whose value is read into a buffer.
#[derive(Clone, Copy)]
pub(crate) enum Bulk {
    /// A value of this size. The value is in the buffer if the buffer is large enough.
    Value(usize),
    Null,
    /// Any other reply, such as an error or a push message. It stays in the input.
    Other,
}

/// How much of a bulk reply has been read.
pub(crate) enum BulkProgress {
    Header,
    Body { size: usize, read: usize },
}

impl Input {
    pub(crate) fn new(half: ReadHalf<Session>) -> Self {
        Self { half, ahead: vec![0; READ_AHEAD], from: 0, to: 0, is_at_end: false }
    }

    fn waiting(&self) -> &[u8] {
        &self.ahead[self.from..self.to]
    }

    fn take(&mut self, out: &mut [u8]) -> usize {
        let taken = self.waiting().len().min(out.len());
        out[..taken].copy_from_slice(&self.waiting()[..taken]);
        self.from += taken;
        taken
    }

    /// Puts bytes back, so that they are read next.
    pub(crate) fn unread(&mut self, bytes: &[u8]) {
        let mut all = [bytes, self.waiting()].concat();
        (self.from, self.to) = (0, all.len());
        all.resize(all.len().max(READ_AHEAD), 0);
        self.ahead = all;
    }

    /// Reads into `out`. Returns the number of bytes, or 0 at the end.
    pub(crate) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        if self.from < self.to || out.is_empty() {
            return Poll::Ready(Ok(self.take(out)));
        }
        let mut out = ReadBuf::new(out);
        ready!(Pin::new(&mut self.half).poll_read(cx, &mut out))?;
        self.is_at_end |= out.filled().is_empty();
        Poll::Ready(Ok(out.filled().len()))
    }

    /// Reads more bytes into `ahead`. Returns false at the end.
    fn poll_ahead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if self.from > 0 {
            self.ahead.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let mut more = ReadBuf::new(&mut self.ahead[self.to..]);
        ready!(Pin::new(&mut self.half).poll_read(cx, &mut more))?;
        let read = more.filled().len();
        self.to += read;
        self.is_at_end |= read == 0;
        Poll::Ready(Ok(read > 0))
    }

    /// Waits until a read would return at once, because there are bytes or the end was reached.
    pub(crate) fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.from == self.to && !self.is_at_end {
            ready!(self.poll_ahead(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Returns whether the peer has closed and all bytes were taken.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end && self.from == self.to
    }

    /// Reads a bulk reply with its value into `out`. A value that is larger than `out` is read and
    /// dropped, so that the next reply can be read. `moved` is called whenever bytes arrive.
    pub(crate) fn poll_bulk(
        &mut self,
        cx: &mut Context<'_>,
        progress: &mut BulkProgress,
        out: &mut [u8],
        mut moved: impl FnMut(),
    ) -> Poll<io::Result<Bulk>> {
        if let BulkProgress::Header = progress {
            match ready!(self.poll_header(cx))? {
                Bulk::Value(size) => *progress = BulkProgress::Body { size, read: 0 },
                other => return Poll::Ready(Ok(other)),
            }
            moved();
        }
        let BulkProgress::Body { size, read } = progress else { return Poll::Pending };
        let fits = *size <= out.len();
        while *read < *size + 2 {
            // The line end is read and dropped. So is a value that does not fit.
            let mut dropped = [0; 4096];
            let room = match fits && *read < *size {
                true => &mut out[*read..*size],
                false => {
                    let left = (*size + 2 - *read).min(dropped.len());
                    &mut dropped[..left]
                }
            };
            match ready!(self.poll_read(cx, room))? {
                0 => return Poll::Ready(Err(closed_within_a_reply())),
                taken => *read += taken,
            }
            moved();
        }
        Poll::Ready(Ok(Bulk::Value(*size)))
    }

    fn poll_header(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bulk>> {
        loop {
            let waiting = self.waiting();
            if waiting.first().is_some_and(|first| !b"$_".contains(first)) {
                return Poll::Ready(Ok(Bulk::Other));
            }
            if let Some(end) = waiting.windows(2).position(|pair| pair == b"\r\n") {
                let (kind, number) = (waiting[0], waiting.get(1..end).unwrap_or_default());
                // A size that does not fit an `isize` is invalid, because no memory is that large.
                let number_of = |text: &str| text.parse::<isize>().ok();
                let size = std::str::from_utf8(number).ok().and_then(number_of);
                let size = size.and_then(|size| usize::try_from(size).ok());
                let is_null = kind == b'_' || number == b"-1";
                self.from += end + 2;
                return Poll::Ready(match (is_null, size) {
                    (true, _) => Ok(Bulk::Null),
                    (false, Some(size)) if size < VALUE_MAX => Ok(Bulk::Value(size)),
                    (false, _) => Err(invalid("a bulk reply with an invalid size")),
                });
            }
            if waiting.len() > HEADER_MAX {
                return Poll::Ready(Err(invalid("a bulk reply whose first line is too long")));
            }
            if !ready!(self.poll_ahead(cx))? {
                return Poll::Ready(Err(closed_within_a_reply()));
            }
        }
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server sent {what}"))
}

fn closed_within_a_reply() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the server closed the connection")
}
