//! Links to peers that speak another protocol than ours: requests as they are.

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

/// A reliable connection to a peer that is no Ferrite peer: nothing but messages, writes with
/// immediate data, and what comes. It shares queues, receives and memory with the fabric's links.
/// Dropping it delivers what was asked for, and hangs up.
///
/// Made by [`ForeignPeers::accept`](crate::ForeignPeers::accept) and [`Fabric::connect_raw`].
/// Nothing here waits: what is asked for is queued, and whoever asks for more than the peer can
/// take has to look at [`RawConnection::done`].
///
/// ```no_run
/// # async fn show(fabric: ferrite_fabric::Fabric) -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_fabric::{Arrival, ConnectOptions};
///
/// let bare = fabric.connect_raw("10.0.0.2:6379".parse()?, &ConnectOptions::new()).await?;
/// bare.send_message(&[0; 32])?;
/// match bare.arrival().await? {
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

    /// Sends a few bytes to a receive of the peer's.
    ///
    /// # Errors
    /// The link is down, or there is no memory.
    pub fn send_message(&self, message: &[u8]) -> Result<(), Error> {
        let mut buf = self.pool().take_uncharged(message.len(), Purpose::Send)?;
        buf.copy_from_slice(message);
        self.shared.with(|state, env, wakes| {
            state.push_raw_message(buf.freeze())?;
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Writes `buf` to the peer's memory at `addr` and tells it by `imm`. The buffer comes back to
    /// the pool when the peer's device has it.
    ///
    /// # Errors
    /// The link is down.
    pub fn write(&self, buf: impl Into<Buf>, addr: u64, rkey: u32, imm: u32) -> Result<(), Error> {
        self.push_write(buf.into(), addr, rkey, imm, false)
    }

    /// The same, but it counts as done only together with the next message or write that is not
    /// quiet: one interrupt less.
    ///
    /// # Errors
    /// The link is down.
    pub fn write_quietly(
        &self,
        buf: impl Into<Buf>,
        addr: u64,
        rkey: u32,
        imm: u32,
    ) -> Result<(), Error> {
        self.push_write(buf.into(), addr, rkey, imm, true)
    }

    /// Has the peer's device answer, which the peer itself does not notice. If it does not, the
    /// link goes down: who hears nothing may ask so whether anybody is there.
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

    /// What of all that was asked for is done, in the order in which it was; `waker` is called when
    /// there is more.
    #[must_use]
    pub fn done(&self, waker: Option<&Waker>) -> Done {
        self.shared.peek(|state| state.raw_done(waker))
    }

    /// The next thing that came, each once and in order; what came before the end is told before
    /// it.
    ///
    /// # Errors
    /// Why the link is down.
    pub async fn arrival(&self) -> Result<Arrival, Error> {
        std::future::poll_fn(|cx| self.poll_arrival(cx.waker())).await
    }

    /// The same, for who polls by hand.
    ///
    /// # Errors
    /// Why the link is down.
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

    /// Lets the peer write to `buf`: send it where that is ([`Exposed::remote`]), by a message that
    /// is sent after this. Where the device can, the key is good on this connection alone; else it
    /// is good for every peer on the device.
    ///
    /// # Errors
    /// The buffer comes back, with what the device or the locked-memory limit said.
    pub fn expose(&self, buf: BufMut) -> Result<Exposed, (BufMut, PoolError)> {
        let Some(device) = self.shared.device() else {
            return Err((buf, PoolError::NoDomain { index: usize::MAX }));
        };
        if !device.has_windows() {
            self.fabric.shared().counters.shared_windows.fetch_add(1, Ordering::Relaxed);
        }
        expose(self.pool(), &self.shared, &device, buf)
    }

    /// Makes new memory of `len` bytes ready for the peer to write to, all zeros, as
    /// [`RawConnection::expose`] would. Registering may take long: where the fabric has threads for
    /// that ([`Builder::command_threads`](crate::Builder::command_threads)) it is done there, in
    /// the turn of the peer's address, and else at once. A peer cannot cause more of it than it has
    /// connections.
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
                buf.fill(0); // what the last user left is not for the peer
                expose(&pool, &link, &device, buf).map_err(|(_, error)| error)
            });
            let _ = reply.send(prepared.map_err(Error::from));
        });
        Preparing(receiver)
    }

    /// Delivers what was asked for, then hangs up. It goes on if this is not awaited.
    ///
    /// # Errors
    /// How the link ended if not in good order.
    pub fn close(&self) -> Ending {
        self.shared.close();
        Ending(Arc::clone(&self.shared))
    }

    /// Ends it now: because of what the peer did, which everybody is told who asks.
    pub fn abort(&self, reason: &str) {
        self.shared.fail(Error::new(ErrorKind::Protocol, reason));
    }

    /// Why it is down, if it is.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.shared.with(|state, _, _| state.failure().cloned())
    }

    /// The fabric that it belongs to.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Where buffers for it come from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.shared.route().peer
    }

    /// Our address.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.route().local
    }

    /// The device that carries it.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        self.shared.device().map(|device| device.name.clone())
    }

    /// Its queue pair: what logs and the device's tools call it.
    #[must_use]
    pub fn qp_num(&self) -> u32 {
        self.shared.route().qp_num
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> LinkStats {
        self.shared.with(|state, _, _| state.core.stats)
    }
}

/// Memory that is being made ready: see [`RawConnection::prepare`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Preparing(oneshot::Receiver<Result<Exposed, Error>>);

impl Preparing {
    /// The memory, or why there is none, if that is known.
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

/// Registers `buf` with the link's device and opens it to the link's peer, if possible to nobody
/// else.
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
