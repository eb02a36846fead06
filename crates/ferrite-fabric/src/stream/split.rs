//! The two directions of a stream, for separate tasks.

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Stream;
use super::reader::Reader;
use super::writer::Writer;
use crate::handles::Link;

/// The reading half of a [`Stream`]: see [`Stream::into_split`].
///
/// ```
/// # use ferrite_fabric::OwnedReadHalf;
/// async fn count(mut half: OwnedReadHalf) -> std::io::Result<usize> {
///     let mut total = 0;
///     loop {
///         match half.read_bytes().await? {
///             bytes if bytes.is_empty() => return Ok(total),
///             bytes => total += bytes.len(),
///         }
///     }
/// }
/// ```
pub struct OwnedReadHalf(Reader);

/// The writing half of a [`Stream`]: see [`Stream::into_split`]. After it is dropped, the peer
/// reads all written bytes and then the end of the stream, as after
/// [`poll_shutdown`](tokio::io::AsyncWrite::poll_shutdown).
///
/// ```
/// # use ferrite_fabric::OwnedWriteHalf;
/// use tokio::io::AsyncWriteExt;
///
/// async fn greet(mut half: OwnedWriteHalf) -> std::io::Result<()> {
///     half.write_all(b"hello").await // dropping `half` ends the stream
/// }
/// ```
pub struct OwnedWriteHalf(Writer);

/// The error of [`OwnedReadHalf::reunite`] if the halves belong to different streams. It contains
/// both halves.
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

pub(super) fn split(reader: Reader, writer: Writer) -> (OwnedReadHalf, OwnedWriteHalf) {
    (OwnedReadHalf(reader), OwnedWriteHalf(writer))
}

impl OwnedReadHalf {
    /// Like [`Stream::read_bytes`].
    ///
    /// # Errors
    /// Returns the failure of the link.
    pub async fn read_bytes(&mut self) -> io::Result<Bytes> {
        poll_fn(|cx| self.0.poll_bytes(cx)).await
    }

    /// Returns the underlying link.
    #[must_use]
    pub fn link(&self) -> &Link {
        &self.0.link
    }

    /// Joins the halves of a stream again.
    ///
    /// # Errors
    /// Fails if the halves belong to different streams.
    pub fn reunite(self, mut other: OwnedWriteHalf) -> Result<Stream, ReuniteError> {
        if !self.0.link.is_same(&other.0.link) {
            return Err(ReuniteError(self, other));
        }
        // Dropping `other` must not end the stream.
        let over = std::mem::replace(&mut other.0.over, true);
        let mut writer = Writer::new(self.0.link.clone());
        writer.over = over;
        Ok(Stream { reader: self.0, writer })
    }
}

impl OwnedWriteHalf {
    /// Returns the underlying link.
    #[must_use]
    pub fn link(&self) -> &Link {
        &self.0.link
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        let _ = self.0.shutdown(); // fails only if the link is down
    }
}

impl AsyncRead for OwnedReadHalf {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read(cx, out)
    }
}

impl AsyncWrite for OwnedWriteHalf {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Returns at once, because the written bytes are already being sent.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Tells the peer that nothing more will be written.
    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.shutdown())
    }
}

impl fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the halves belong to different streams")
    }
}

impl std::error::Error for ReuniteError {}

impl fmt::Debug for OwnedReadHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedReadHalf").field("link", &self.0.link).finish_non_exhaustive()
    }
}

impl fmt::Debug for OwnedWriteHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWriteHalf").field("link", &self.0.link).finish_non_exhaustive()
    }
}
