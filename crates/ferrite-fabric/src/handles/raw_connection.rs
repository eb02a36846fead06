//! Connections to peers of other protocols. They carry plain requests, without Ferrite's framing.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

use ferrite_verbs::{Access, RemoteSlice};
use futures_channel::oneshot;

use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::link::shared::LinkShared;
pub use crate::link::state::{Arrival, Done};
use crate::link::{Ending, LinkStats};
use crate::mem::{Buf, BufMut, Exposed, Pool, PoolError, Purpose};

/// A reliable connection to a peer of another protocol: messages, writes with immediate data, and
/// arrivals. It shares queues, receives and memory with the fabric's links. Dropping it completes
/// all requests and disconnects.
///
/// [`ForeignPeers::accept`](crate::ForeignPeers::accept) and [`Fabric::connect_raw`] create it.
/// Requests are queued without waiting. A caller that may send more than the peer accepts must
/// watch [`RawConnection::done`].
///
/// ```no_run
/// # async fn show(fabric: ferrite_fabric::Fabric) -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_fabric::{Arrival, ConnectOptions};
///
/// let connection = fabric.connect_raw("10.0.0.2:6379".parse()?, &ConnectOptions::new()).await?;
/// connection.send_message(&[0; 32])?;
/// match connection.arrival().await? {
///     Arrival::Message(bytes) => println!("{} bytes", bytes.len()),
///     Arrival::Written { sum, .. } => println!("{sum} bytes were written"),
/// }
/// # Ok(()) }
/// ```
pub struct RawConnection {
    shared: Arc<LinkShared>,
    fabric: Fabric,
}

impl RawConnection {
    pub(crate) fn new(shared: Arc<LinkShared>, fabric: Fabric) -> Self {
        Self { shared, fabric }
    }

    /// Sends a few bytes into a receive of the peer.
    ///
    /// # Errors
    /// Returns an error if the link is down, or if there is no memory.
    pub fn send_message(&self, message: &[u8]) -> Result<(), Error> {
        let mut buf = self.pool().take_uncharged(message.len(), Purpose::Send)?;
        buf.copy_from_slice(message);
        self.shared.with(|state, env, wakes| {
            state.push_raw_message(buf.freeze())?;
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Writes `buf` to the peer's memory at `addr`, and notifies the peer with `imm`. The buffer
    /// returns to the pool when the peer's device has the bytes.
    ///
    /// # Errors
    /// Returns an error if the link is down.
    pub fn write(&self, buf: impl Into<Buf>, addr: u64, rkey: u32, imm: u32) -> Result<(), Error> {
        self.push_write(buf.into(), addr, rkey, imm, false)
    }

    /// Writes like [`RawConnection::write`], but the write mostly has no completion of its own. It
    /// is then reported as done together with a later request, at the latest with the next message
    /// or write that is not quiet. That saves an interrupt.
    ///
    /// # Errors
    /// Returns an error if the link is down.
    pub fn write_quietly(
        &self,
        buf: impl Into<Buf>,
        addr: u64,
        rkey: u32,
        imm: u32,
    ) -> Result<(), Error> {
        self.push_write(buf.into(), addr, rkey, imm, true)
    }

    /// Asks the peer's device for an acknowledgement. The peer's software does not notice this.
    /// Without an acknowledgement the link goes down. Use this to check whether a silent peer is
    /// still alive.
    pub fn probe(&self) {
        self.shared.with(|state, env, wakes| {
            state.push_raw_probe();
            state.pump(env, wakes);
        });
    }

    fn push_write(
        &self,
        buf: Buf,
        addr: u64,
        rkey: u32,
        imm: u32,
        quiet: bool,
    ) -> Result<(), Error> {
        let remote = RemoteSlice { addr, len: buf.len() as u64, rkey };
        self.shared.with(|state, env, wakes| {
            state.push_raw_write(buf, remote, imm, quiet)?;
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Returns how many requests are done. They complete in the order in which they were made.
    /// `waker` is called when more requests are done.
    #[must_use]
    pub fn done(&self, waker: Option<&Waker>) -> Done {
        self.shared.peek(|state| state.raw_done(waker))
    }

    /// Waits for the next arrival: a message, or a write with immediate data. Each arrival is
    /// returned once, in order. After the link has ended, the remaining arrivals come before the
    /// error.
    ///
    /// # Errors
    /// Returns the reason why the link is down.
    pub async fn arrival(&self) -> Result<Arrival, Error> {
        std::future::poll_fn(|cx| self.poll_arrival(cx.waker())).await
    }

    /// Polls for the next arrival, as [`RawConnection::arrival`] does.
    ///
    /// # Errors
    /// Returns the reason why the link is down.
    pub fn poll_arrival(&self, waker: &Waker) -> Poll<Result<Arrival, Error>> {
        self.shared.peek(|state| match state.pop_arrival() {
            Ok(Some(arrival)) => Poll::Ready(Ok(arrival)),
            Ok(None) => {
                state.core.wake_on_message(waker);
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        })
    }

    /// Lets the peer write to `buf`. Send the address and the key ([`Exposed::remote`]) to the peer
    /// in a message after this call. If the device supports it, the key is valid on this connection
    /// only. Otherwise it is valid for every peer on the device.
    ///
    /// # Errors
    /// Returns the buffer, and the error of the device or of the locked-memory limit.
    pub fn expose(&self, buf: BufMut) -> Result<Exposed, (BufMut, PoolError)> {
        let Some(device) = self.shared.device() else {
            return Err((buf, PoolError::NoDomain { index: usize::MAX }));
        };
        if !device.has_windows() {
            self.fabric.shared().counters.shared_windows.fetch_add(1, Ordering::Relaxed);
        }
        expose(self.pool(), &self.shared, &device, buf)
    }

    /// Creates zeroed memory of `len` bytes that the peer may write to, as with
    /// [`RawConnection::expose`]. Registering may take long. With command threads
    /// ([`Builder::command_threads`](crate::Builder::command_threads)) it runs on such a thread,
    /// after earlier commands for the same peer address. Otherwise it runs at once. The number of
    /// calls is not limited. Start one at a time for each connection, so that a peer cannot cause
    /// more registrations at a time than it has connections.
    pub fn prepare(&self, len: usize) -> Preparing {
        let (reply, receiver) = oneshot::channel();
        let commands = &self.fabric.shared().commands;
        let source = self.shared.source();
        let Some(device) = self.shared.device() else {
            let _ = reply.send(Err(PoolError::NoDomain { index: usize::MAX }.into()));
            return Preparing(receiver);
        };
        if !device.has_windows() {
            self.fabric.shared().counters.shared_windows.fetch_add(1, Ordering::Relaxed);
        }
        let (pool, link) = (self.pool().clone(), Arc::clone(&self.shared));
        commands.run(source, move || {
            if reply.is_canceled() {
                return;
            }
            let prepared = pool.take_uncharged(len, Purpose::Receive).and_then(|mut buf| {
                buf.fill(0); // it still contains data of its last user
                expose(&pool, &link, &device, buf).map_err(|(_, error)| error)
            });
            let _ = reply.send(prepared.map_err(Error::from));
        });
        Preparing(receiver)
    }

    /// Completes all requests, then disconnects. The connection closes even if the future is not
    /// awaited.
    ///
    /// # Errors
    /// Returns the failure if the connection did not close in an orderly way.
    pub fn close(&self) -> Ending {
        self.shared.close();
        Ending(Arc::clone(&self.shared))
    }

    /// Ends the connection now, because of a violation by the peer. Later calls return this reason.
    pub fn abort(&self, reason: &str) {
        self.shared.fail(Error::new(ErrorKind::Protocol, reason));
    }

    /// Returns why the connection is down, if it is.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.shared.with(|state, _, _| state.failure().cloned())
    }

    /// Returns the fabric of the connection.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Returns the pool for the connection's buffers.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// Returns the peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.shared.route().peer
    }

    /// Returns the local address.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.route().local
    }

    /// Returns the device that the connection uses.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        self.shared.device().map(|device| device.name.clone())
    }

    /// Returns the number of the queue pair, as logs and the device's tools show it.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.shared.route().qp_num
    }

    /// Returns the counters of the connection.
    #[must_use]
    pub fn stats(&self) -> LinkStats {
        self.shared.with(|state, _, _| state.core.stats)
    }
}

/// Memory that is being prepared: see [`RawConnection::prepare`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Preparing(oneshot::Receiver<Result<Exposed, Error>>);

impl Preparing {
    /// Returns the memory, or the reason why there is none. Returns `None` while neither is known.
    pub fn try_take(&mut self) -> Option<Result<Exposed, Error>> {
        match self.0.try_recv() {
            Ok(prepared) => prepared,
            Err(oneshot::Canceled) => Some(Err(gone())),
        }
    }
}

impl Future for Preparing {
    type Output = Result<Exposed, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|prepared| prepared.unwrap_or_else(|_| Err(gone())))
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Closed, "the fabric is gone")
}

/// Registers `buf` with the link's device and gives access to the link's peer. If the device has
/// memory windows, nobody else gets access.
fn expose(
    pool: &Pool,
    link: &LinkShared,
    device: &SharedDevice,
    buf: BufMut,
) -> Result<Exposed, (BufMut, PoolError)> {
    if !device.has_windows() {
        return pool.expose(buf, device.index, Access::REMOTE_WRITE);
    }
    let (exposed, window) = pool.expose_by_window(buf, device.index, Access::REMOTE_WRITE)?;
    link.with(|state, env, wakes| state.bind(device, &window, env, wakes));
    Ok(exposed)
}

impl Drop for RawConnection {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for RawConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RawConnection").field(&self.shared).finish()
    }
}
