//! A link as a byte stream, for software written for TCP.
//!
//! | file | what it is |
//! |---|---|
//! | `writer.rs` | turns bytes into messages |
//! | `reader.rs` | turns messages into bytes |
//! | `split.rs` | the two directions as separate halves |
//! | `listener.rs` | accepts streams |
//!
//! Bytes are sent as messages on channel 0. Message boundaries have no meaning. An empty message
//! says that the sender writes no more, while the other direction continues. If a peer closes the
//! link in an orderly way, both directions end.
//!
//! A reader sees the end of the stream only if the peer announced it. So it never mistakes a
//! failure for the end.

mod listener;
mod reader;
mod split;
mod writer;

use std::fmt;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::fabric::Fabric;
use crate::handles::ConnectOptions;
use crate::handles::Link;
use crate::mem::Buf;
pub use listener::StreamListener;
use reader::Reader;
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReuniteError};
use writer::Writer;

/// The channel that streams use.
const CHANNEL: u16 = 0;

/// A connection as a byte stream: a replacement for `tokio::net::TcpStream`.
///
/// A write copies the bytes and returns, so that many writes are in progress at a time. If the peer
/// does not read, writes wait as soon as the link's queue is full. Flushing is not needed. Dropping
/// the stream delivers the written bytes, as long as the fabric is driven. Then the peer reads the
/// end.
///
/// Reads and writes may be cancelled. Bytes that were not returned are still unread, and a write
/// that was not ready has sent nothing.
///
/// ```
/// use ferrite_fabric::{Fabric, Stream, StreamListener};
/// use futures_util::try_join;
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let verbs = world.verbs();
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let fabric = Fabric::builder(&verbs).build()?;
/// tokio::spawn(fabric.drive());
/// let listener = StreamListener::bind(&fabric, "127.0.0.1:0".parse()?)?;
/// let connecting = Stream::connect(&fabric, listener.local_addr());
/// let (mut client, (mut server, _)) = try_join!(connecting, listener.accept())?;
///
/// client.write_all(b"PING\r\n").await?;
/// client.shutdown().await?; // no more writes; reading continues
/// assert_eq!(server.read_bytes().await?, "PING\r\n"); // in place, without a copy
/// assert!(server.read_bytes().await?.is_empty()); // the end
/// server.write_all(b"+PONG\r\n").await?;
/// let mut answer = [0; 7];
/// client.read_exact(&mut answer).await?;
/// assert_eq!(&answer, b"+PONG\r\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Stream {
    reader: Reader,
    writer: Writer,
}

impl Stream {
    /// Connects to a [`StreamListener`].
    ///
    /// # Errors
    /// Returns the errors of [`Fabric::connect`], with the error kinds that TCP sockets use.
    pub async fn connect(fabric: &Fabric, peer: SocketAddr) -> io::Result<Self> {
        Self::connect_with(fabric, peer, &ConnectOptions::new()).await
    }

    /// Like [`Stream::connect`], with options.
    ///
    /// # Errors
    /// Like [`Stream::connect`].
    pub async fn connect_with(
        fabric: &Fabric,
        peer: SocketAddr,
        options: &ConnectOptions,
    ) -> io::Result<Self> {
        Ok(Self::new(fabric.connect_with(peer, options).await?))
    }

    /// Creates a stream over a link. Both sides must use the link as a stream. Other messages on
    /// channel 0 would be taken for bytes, and messages on other channels are dropped.
    #[must_use]
    pub fn new(link: Link) -> Self {
        Self { writer: Writer::new(link.clone()), reader: Reader::new(link) }
    }

    /// Returns the underlying link, for its statistics and addresses, and for [`Link::abort`]. The
    /// peer sees an abort as a failure.
    #[must_use]
    pub fn link(&self) -> &Link {
        &self.reader.link
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the address is unknown.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.link().peer_addr().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// Like [`Stream::peer_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.link().local_addr().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Splits the stream into halves for different tasks. [`OwnedReadHalf::reunite`] joins them
    /// again.
    #[must_use]
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        split::split(self.reader, self.writer)
    }

    /// Returns the next bytes without a copy, in the buffer that the device wrote or, on TCP, that
    /// the fabric read into. Returns no bytes at the end of the stream.
    ///
    /// The bytes occupy memory of the receive reserve. Over RDMA, each frame occupies a block of
    /// `recv_buffer_size`. Pass the bytes on, but do not keep them.
    ///
    /// # Errors
    /// Returns the failure of the link.
    pub async fn read_bytes(&mut self) -> io::Result<Bytes> {
        poll_fn(|cx| self.reader.poll_bytes(cx)).await
    }

    /// Like [`AsyncWrite::poll_write`], but sends memory of the link's fabric without a copy.
    ///
    /// # Errors
    /// Returns the failure of the link.
    pub fn poll_write_buf(&mut self, cx: &mut Context<'_>, buf: &Buf) -> Poll<io::Result<usize>> {
        self.writer.poll_write_buf(cx, buf)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.reader.poll_read(cx, out)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.writer.poll_write(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.writer.poll_write(cx, slices)
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
        Poll::Ready(self.writer.shutdown())
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("link", self.link()).finish_non_exhaustive()
    }
}
