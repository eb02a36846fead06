//! [`Link`]: a connection to a Ferrite peer, as users have it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_verbs::Mtu;

use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::link::kind::Kind;
use crate::link::shared::{LinkShared, unique};
use crate::link::{Ending, LinkStats, Message, ReadError, Reading, Receiving, Sending, Writing};
use crate::mem::{Buf, BufMut, Pool, Purpose};
use crate::policy::Fallback;
use crate::wire::{GrantToken, Hello, Rights};

/// What carries a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// A queue pair of a device.
    Rdma,
    /// A TCP connection.
    Tcp,
    /// A TCP connection with TLS.
    TcpTls,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
            Self::TcpTls => "TCP with TLS",
        })
    }
}

/// A connection to a peer. Clones share it; when the last is dropped, what was sent is delivered
/// and the link closes.
///
/// Messages on one channel arrive in order, each once, or the link is down. A large message does
/// not hold up those on other channels.
///
/// ```no_run
/// # async fn show(fabric: ferrite_fabric::Fabric) -> Result<(), Box<dyn std::error::Error>> {
/// let link = fabric.connect("10.0.0.2:7471".parse()?).await?;
/// link.send_bytes(0, b"hello").await?;
/// let answer = link.recv().await?;
/// println!("{} bytes from {:?}", answer.len(), link.peer_addr());
/// link.close().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Link(Arc<Handle>);

struct Handle {
    shared: Arc<LinkShared>,
    fabric: Fabric,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Link {
    pub(crate) fn new(shared: Arc<LinkShared>, fabric: Fabric) -> Self {
        Self(Arc::new(Handle { shared, fabric }))
    }

    pub(crate) fn shared(&self) -> &Arc<LinkShared> {
        &self.0.shared
    }

    /// Whether both are handles on one connection.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sends a message on a channel: waits for room in the queue, then until the peer's device has
    /// it.
    pub fn send(&self, channel: u16, buf: impl Into<Buf>) -> Sending {
        self.send_parts(channel, vec![buf.into()])
    }

    /// The same for a message of several buffers: how one larger than 2 MiB is sent.
    pub fn send_parts(&self, channel: u16, parts: Vec<Buf>) -> Sending {
        Sending::new(Arc::clone(self.shared()), channel, parts)
    }

    /// WaitSet until the queue takes something: for [`Link::post`] and the one-sided operations,
    /// which do not wait.
    ///
    /// # Errors
    /// The link is down or closing.
    pub async fn room(&self) -> Result<(), Error> {
        std::future::poll_fn(|cx| self.shared().poll_room(0, cx.waker())).await
    }

    /// Copies `bytes` into buffers of the pool and sends them.
    ///
    /// # Errors
    /// Those of [`Pool::take`], and of [`Sending`].
    pub async fn send_bytes(&self, channel: u16, bytes: &[u8]) -> Result<(), Error> {
        let parts = self.copy(bytes)?;
        self.send_parts(channel, parts).await
    }

    /// Sends a message and forgets it: delivered in its turn, or the link goes down. Allocates
    /// nothing.
    ///
    /// # Errors
    /// The buffer comes back, with kind [`ErrorKind::Full`] when the queue is: back-pressure.
    pub fn post(&self, channel: u16, buf: impl Into<Buf>) -> Result<(), (Buf, Error)> {
        self.shared().post(channel, buf.into())
    }

    /// The same from any memory. A small message goes to the device at once, without a buffer.
    ///
    /// # Errors
    /// Kind [`ErrorKind::Full`] when the queue or the pool is: back-pressure.
    pub fn post_bytes(&self, channel: u16, bytes: &[u8]) -> Result<(), Error> {
        if self.shared().send_now(channel, bytes)? {
            return Ok(());
        }
        let parts = self.copy(bytes)?;
        self.shared().queue(channel, parts, None, false).map(drop).map_err(|(_, error)| error)
    }

    fn copy(&self, bytes: &[u8]) -> Result<Vec<Buf>, Error> {
        const PART: usize = 2 << 20;
        let copied = bytes.chunks(PART).map(|chunk| {
            let taken = self.pool().take_uncharged(chunk.len(), Purpose::Send);
            let mut buf = taken.map_err(Error::no_memory)?;
            buf.copy_from_slice(chunk);
            Ok(buf.freeze())
        });
        copied.collect()
    }

    /// The next message. Messages that came before the link ended are still delivered; then it
    /// fails, with kind [`ErrorKind::Closed`] after a close in good order.
    pub fn recv(&self) -> Receiving<'_> {
        Receiving(self.shared())
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// As [`Link::recv`].
    pub fn try_recv(&self) -> Result<Option<Message>, Error> {
        self.shared().receive(None)
    }

    /// Reads `buf.len()` bytes at `offset` of what the peer has granted.
    ///
    /// # Errors
    /// At once, with the buffer: [`ErrorKind::Denied`] if the grant does not cover it,
    /// [`ErrorKind::Full`] if the queue is. Later through [`Reading`].
    pub fn rdma_read(
        &self,
        grant: &GrantToken,
        offset: u64,
        buf: BufMut,
    ) -> Result<Reading, ReadError> {
        self.shared()
            .one_sided(grant, Rights::READ, offset, Held::Unique(buf), (Kind::Read, 0))
            .map(|ticket| Reading::new(Arc::clone(self.shared()), ticket))
            .map_err(|(held, error)| ReadError { error, buf: unique(held) })
    }

    /// Writes `buf` at `offset` of what the peer has granted; the peer does not notice.
    ///
    /// # Errors
    /// As for [`Link::rdma_read`].
    pub fn rdma_write(
        &self,
        grant: &GrantToken,
        offset: u64,
        buf: impl Into<Buf>,
    ) -> Result<Writing, Error> {
        self.write(grant, offset, buf.into(), (Kind::Write, 0))
    }

    /// The same, and the peer gets a [`Message`] with these 32 bits when the bytes are there.
    ///
    /// # Errors
    /// As for [`Link::rdma_read`].
    pub fn rdma_write_imm(
        &self,
        grant: &GrantToken,
        offset: u64,
        buf: impl Into<Buf>,
        imm: u32,
    ) -> Result<Writing, Error> {
        self.write(grant, offset, buf.into(), (Kind::Notice, imm))
    }

    fn write(
        &self,
        grant: &GrantToken,
        offset: u64,
        buf: Buf,
        kind: (Kind, u32),
    ) -> Result<Writing, Error> {
        self.shared()
            .one_sided(grant, Rights::WRITE, offset, Held::Shared(buf), kind)
            .map(|ticket| Writing::new(Arc::clone(self.shared()), ticket))
            .map_err(|(_, error)| error)
    }

    /// Closes: nothing new is taken, what was sent is delivered, then both sides hang up. The
    /// peer's messages that came before can still be received. It goes on if this is not awaited.
    ///
    /// # Errors
    /// How the link ended if not in good order, [`ErrorKind::Timeout`] if the peer did not take
    /// what was sent in time.
    pub fn close(&self) -> Ending {
        self.shared().close();
        Ending(Arc::clone(self.shared()))
    }

    /// WaitSet until the link ends, whoever ends it.
    pub fn ended(&self) -> Ending {
        Ending(Arc::clone(self.shared()))
    }

    /// Ends it now: what is under way fails.
    pub fn abort(&self) {
        self.shared().fail(Error::new(ErrorKind::Closed, "the link was aborted on this side"));
    }

    /// Leaves RDMA for TCP now, as if the path were lost: before work on a network card, or to see
    /// what happens. Nothing is lost. It goes back by itself, after `upgrade_after` at the
    /// earliest. `false` if it cannot move or is not on RDMA.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn leave_rdma(&self) -> bool {
        self.shared().with(|state, _, _| state.core.leave_rdma())
    }

    /// Why it is down, if it is.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.shared().with(|state, _, _| state.failure().cloned())
    }

    /// The fabric that it belongs to.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.0.fabric
    }

    /// Where buffers for it come from.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared().pool
    }

    /// The peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.shared().route().peer
    }

    /// Our address.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared().route().local
    }

    /// What carries it at the moment.
    #[must_use]
    pub fn transport(&self) -> Transport {
        let route = self.shared().route();
        match route.device {
            Some(_) => Transport::Rdma,
            None if route.encrypted => Transport::TcpTls,
            None => Transport::Tcp,
        }
    }

    /// Why it is on TCP, if RDMA was preferred.
    #[must_use]
    pub fn fallback(&self) -> Option<Fallback> {
        self.shared().fallback()
    }

    /// The device that carries it; `None` on TCP.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        self.shared().device().map(|device| device.name.clone())
    }

    /// Bytes in a packet, on RDMA.
    #[must_use]
    pub fn mtu(&self) -> Option<Mtu> {
        self.shared().route().mtu
    }

    /// Its queue pair: what logs and the device's tools call it. `None` on TCP.
    #[must_use]
    pub fn qp_num(&self) -> Option<u32> {
        let route = self.shared().route();
        route.device.map(|_| route.qp_num)
    }

    /// What the peer said of itself.
    #[must_use]
    pub fn peer_hello(&self) -> Hello {
        self.shared().with(|state, _, _| *state.core.peer())
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> LinkStats {
        self.shared().with(|state, _, _| state.core.stats)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared().fmt(f)
    }
}
