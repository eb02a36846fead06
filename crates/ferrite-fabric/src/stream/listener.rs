//! Accepts streams.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use super::Stream;
use crate::fabric::Fabric;
use crate::handles::Listener;
use crate::source::UNKNOWN_PEER;

/// Accepts streams of peers, like `tokio::net::TcpListener`. Dropping the listener stops listening.
/// Accepted streams stay open.
///
/// ```
/// use ferrite_fabric::{Fabric, Stream, StreamListener};
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// # use ferrite_verbs::fake::{DeviceSpec, World};
/// # let world = World::new();
/// # world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse()?));
/// # let verbs = world.verbs();
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// let fabric = Fabric::builder(&verbs).build()?;
/// tokio::spawn(fabric.drive());
/// let listener = StreamListener::bind(&fabric, "127.0.0.1:0".parse()?)?;
/// let addr = listener.local_addr();
/// tokio::spawn(async move {
///     while let Ok((mut stream, _peer)) = listener.accept().await {
///         tokio::spawn(async move { stream.write_all(b"welcome").await });
///     }
/// });
/// let mut stream = Stream::connect(&fabric, addr).await?;
/// let mut received = String::new();
/// stream.read_to_string(&mut received).await?;
/// assert_eq!(received, "welcome");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StreamListener(Listener);

impl StreamListener {
    /// Listens on an address of this host. Port 0 picks a free port.
    ///
    /// # Errors
    /// Returns the errors of [`Fabric::listen`]. An address in use is [`io::ErrorKind::AddrInUse`]
    /// if it is in use for RDMA, and [`io::ErrorKind::InvalidInput`] if it is in use for TCP.
    pub fn bind(fabric: &Fabric, local: SocketAddr) -> io::Result<Self> {
        Ok(Self(fabric.listen(local)?))
    }

    /// Accepts the links of `listener` as streams. The peers must use these links as streams, too.
    #[must_use]
    pub fn new(listener: Listener) -> Self {
        Self(listener)
    }

    /// Returns the address that the listener is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Waits for the next stream and returns it with the peer's address. Safe to cancel: a stream
    /// that was not returned stays in the queue.
    ///
    /// # Errors
    /// Fails if the listener accepts only RDMA and its device has disappeared.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// Like [`StreamListener::accept`], for manual polling. A new stream wakes every waker that was
    /// registered since the previous stream.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Stream, SocketAddr)>> {
        match self.0.next(Some(cx.waker())) {
            Ok(Some(link)) => {
                let peer = link.peer_addr().unwrap_or(UNKNOWN_PEER);
                Poll::Ready(Ok((Stream::new(link), peer)))
            }
            Ok(None) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }
}
