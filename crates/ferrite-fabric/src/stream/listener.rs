//! Where streams come in.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use super::Stream;
use crate::connect::UNKNOWN_PEER;
use crate::fabric::Fabric;
use crate::listener::Listener;

/// Takes streams of peers, as `tokio::net::TcpListener` does. Dropping it stops listening; streams
/// that were accepted stay.
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
/// let mut said = String::new();
/// stream.read_to_string(&mut said).await?;
/// assert_eq!(said, "welcome");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StreamListener(Listener);

impl StreamListener {
    /// Listens on an address of the fabric's devices; port 0 picks one.
    ///
    /// # Errors
    /// Those of [`Fabric::listen`]. [`io::ErrorKind::AddrInUse`] says what it means.
    pub fn bind(fabric: &Fabric, local: SocketAddr) -> io::Result<Self> {
        Ok(Self(fabric.listen(local)?))
    }

    /// Takes what a listener of links would take. The peers must mean streams.
    #[must_use]
    pub fn new(listener: Listener) -> Self {
        Self(listener)
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// The next stream, and the peer's address. Safe to drop: a stream that nobody took stays in
    /// line.
    ///
    /// # Errors
    /// When the listener's device has gone.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// The same for those who poll. Every waker is called that was given since the last stream.
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
