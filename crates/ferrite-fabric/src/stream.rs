//! A link as a stream of bytes: what software that knows TCP can use.
//!
//! | file | what it is |
//! |---|---|
//! | `writer.rs` | bytes into messages |
//! | `reader.rs` | messages into bytes |
//! | `split.rs` | the two directions apart |
//! | `listener.rs` | where streams come in |
//!
//! Bytes travel as messages on channel 0, cut as the writer likes: where one ends means nothing. An
//! empty message says that the sender writes no more; the other direction goes on. A peer that
//! closes the link in good order ends both.
//!
//! The end of a stream and a failure are never mixed up: a reader sees the end only if the peer
//! said so.

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

use crate::connect::ConnectOptions;
use crate::fabric::Fabric;
use crate::link::Link;
use crate::mem::Buf;
pub use listener::StreamListener;
use reader::Reader;
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReuniteError};
use writer::Writer;

/// The channel that streams use.
const CHANNEL: u16 = 0;

/// A connection as a stream of bytes: stands in for `tokio::net::TcpStream`.
///
/// A write copies and returns: many are under way at a time, and a peer that does not read stops
/// the writer when the link's queue is full. Nothing has to be flushed. Dropping the stream
/// delivers what was written, as far as the fabric is driven on; then the peer reads the end.
///
/// Reads and writes may be cancelled: bytes that were not returned were not taken, and a write that
/// was not ready has sent nothing.
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
/// client.shutdown().await?; // we write no more; reading goes on
/// assert_eq!(server.read_bytes().await?, "PING\r\n"); // where the device put it, not copied
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
    /// Those of [`Fabric::connect`], with the kinds that TCP has for them.
    pub async fn connect(fabric: &Fabric, peer: SocketAddr) -> io::Result<Self> {
        Self::connect_with(fabric, peer, &ConnectOptions::new()).await
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`Stream::connect`].
    pub async fn connect_with(
        fabric: &Fabric,
        peer: SocketAddr,
        options: &ConnectOptions,
    ) -> io::Result<Self> {
        Ok(Self::new(fabric.connect_with(peer, options).await?))
    }

    /// A stream over a link, which both sides must take for one. What else is sent on channel 0
    /// would be taken for bytes; what comes on other channels is dropped.
    #[must_use]
    pub fn new(link: Link) -> Self {
        Self { writer: Writer::new(link.clone()), reader: Reader::new(link) }
    }

    /// The link below: its counts, its addresses, and [`Link::abort`] for an end that the peer
    /// takes for a failure.
    #[must_use]
    pub fn link(&self) -> &Link {
        &self.reader.link
    }

    /// The peer's address.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotConnected`] if the device does not know it.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.link().peer_addr().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Our address.
    ///
    /// # Errors
    /// As [`Stream::peer_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.link().local_addr().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Halves that can go to different tasks. [`OwnedReadHalf::reunite`] puts them together again.
    #[must_use]
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        split::split(self.reader, self.writer)
    }

    /// The next bytes where the device put them, without a copy; empty at the end.
    ///
    /// They keep memory of the receive reserve, a block of `recv_buffer_size` for a frame: for
    /// passing on, not for keeping.
    ///
    /// # Errors
    /// How the link failed.
    pub async fn read_bytes(&mut self) -> io::Result<Bytes> {
        poll_fn(|cx| self.reader.poll_bytes(cx)).await
    }

    /// As [`AsyncWrite::poll_write`], but what is in the memory of the link's fabric leaves from
    /// where it lies, without a copy.
    ///
    /// # Errors
    /// How the link failed.
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

    /// What was written is on its way already.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Says that nothing more will be written.
    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.writer.shutdown())
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("link", self.link()).finish_non_exhaustive()
    }
}
