//! [`Link`]: a connection to a Ferrite peer, the handle that applications use.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use ferrite_verbs::Mtu;
use rustls::pki_types::CertificateDer;

use crate::device::slots::Held;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::link::kind::Kind;
use crate::link::shared::{LinkShared, unique};
use crate::link::{Ending, LinkStats, Message, ReadError, Reading, Receiving, Sending, Writing};
use crate::mem::{Buf, BufMut, Pool, Purpose};
use crate::policy::Fallback;
use crate::wire::{GrantToken, Hello, Rights};

/// The transport of a link.
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

/// A connection to a Ferrite peer. Clones share it. When the last clone is dropped, the link
/// delivers the messages that were sent, and closes.
///
/// Messages on one channel arrive once and in order, or the link goes down. A large message does
/// not delay messages on other channels.
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

    /// Returns whether both handles refer to the same connection.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns a future that sends a message on a channel. The future waits for room in the queue,
    /// queues the message, and waits until the peer's device has it or, on TCP, until the kernel
    /// has it.
    pub fn send(&self, channel: u16, buf: impl Into<Buf>) -> Sending {
        self.send_parts(channel, vec![buf.into()])
    }

    /// Like [`Link::send`], but for a message that consists of several buffers. A message larger
    /// than 2 MiB needs several buffers.
    pub fn send_parts(&self, channel: u16, parts: Vec<Buf>) -> Sending {
        Sending::new(Arc::clone(self.shared()), channel, parts)
    }

    /// Waits until the queue has room. Useful before [`Link::post`] and the one-sided operations,
    /// which do not wait.
    ///
    /// # Errors
    /// Returns an error if the link is down or closing.
    pub async fn room(&self) -> Result<(), Error> {
        std::future::poll_fn(|cx| self.shared().poll_room(0, cx.waker())).await
    }

    /// Copies `bytes` into buffers of the pool and sends them.
    ///
    /// # Errors
    /// Returns the errors of [`Pool::take`] and of [`Sending`].
    pub async fn send_bytes(&self, channel: u16, bytes: &[u8]) -> Result<(), Error> {
        let parts = self.copy(bytes)?;
        self.send_parts(channel, parts).await
    }

    /// Queues a message and does not report its delivery. The message is delivered after earlier
    /// messages of the channel, or the link goes down. Keeps no state for a future, so it costs
    /// less than [`Link::send`].
    ///
    /// # Errors
    /// Returns the buffer. The kind is [`ErrorKind::Full`] if the queue is full (back-pressure).
    pub fn post(&self, channel: u16, buf: impl Into<Buf>) -> Result<(), (Buf, Error)> {
        self.shared().post(channel, buf.into())
    }

    /// Sends a message from any memory, as [`Link::post`] does. If nothing is queued before it, a
    /// small message goes to the device or to the TCP socket at once, without a buffer.
    ///
    /// # Errors
    /// The kind is [`ErrorKind::Full`] if the queue or the pool is full (back-pressure).
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

    /// Waits for the next message. Messages that arrived before the link ended are still delivered.
    /// The result after them is an error. Its kind is [`ErrorKind::Closed`] after an orderly close.
    pub fn recv(&self) -> Receiving<'_> {
        Receiving(self.shared())
    }

    /// Returns the next message, if there is one.
    ///
    /// # Errors
    /// As [`Link::recv`].
    pub fn try_recv(&self) -> Result<Option<Message>, Error> {
        self.shared().receive(None)
    }

    /// Reads `buf.len()` bytes at `offset` of the memory that the peer has granted.
    ///
    /// # Errors
    /// Returns the buffer at once if the link is down, with [`ErrorKind::Denied`] if the grant was
    /// revoked or does not cover the operation, or with [`ErrorKind::Full`] if the queue is full.
    /// [`Reading`] reports later failures.
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

    /// Writes `buf` at `offset` of the memory that the peer has granted. The peer is not notified.
    ///
    /// # Errors
    /// As for [`Link::rdma_read`], but without the buffer.
    pub fn rdma_write(
        &self,
        grant: &GrantToken,
        offset: u64,
        buf: impl Into<Buf>,
    ) -> Result<Writing, Error> {
        self.write(grant, offset, buf.into(), (Kind::Write, 0))
    }

    /// Writes like [`Link::rdma_write`]. When the bytes have arrived, the peer gets a [`Message`]
    /// with these 32 bits.
    ///
    /// # Errors
    /// As for [`Link::rdma_write`].
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

    /// Closes the link. The link accepts nothing new and delivers the messages that were sent. Then
    /// both sides disconnect. Messages of the peer that arrived before the close can still be
    /// received. The link closes even if the future is not awaited.
    ///
    /// # Errors
    /// Returns the failure if the link did not close in an orderly way, and [`ErrorKind::Timeout`]
    /// if the peer did not receive everything in time.
    pub fn close(&self) -> Ending {
        self.shared().close();
        Ending(Arc::clone(self.shared()))
    }

    /// Waits until the link is down: either side has ended it, or it failed.
    pub fn ended(&self) -> Ending {
        Ending(Arc::clone(self.shared()))
    }

    /// Ends the link now. All operations in progress fail.
    pub fn abort(&self) {
        self.shared().fail(Error::new(ErrorKind::Closed, "the link was aborted on this side"));
    }

    /// Migrates the link from RDMA to TCP now, as if the path were lost. Use it before maintenance
    /// of a network card, or in tests. No message is lost. The link returns to RDMA by itself,
    /// after `upgrade_after` at the earliest. Returns `false` if the link cannot migrate or does
    /// not use RDMA.
    #[expect(clippy::must_use_candidate, reason = "called for its effect")]
    pub fn leave_rdma(&self) -> bool {
        self.shared().with(|state, _, _| state.core.leave_rdma())
    }

    /// Returns why the link is down, if it is.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.shared().with(|state, _, _| state.failure().cloned())
    }

    /// Returns the fabric of the link.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.0.fabric
    }

    /// Returns the pool for the link's buffers.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.shared().pool
    }

    /// Returns the peer's address.
    #[must_use]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.shared().route().peer
    }

    /// Returns the local address.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared().route().local
    }

    /// Returns the transport that the link uses now.
    #[must_use]
    pub fn transport(&self) -> Transport {
        transport(self.shared())
    }

    /// Returns an observer of the link's transport.
    #[must_use]
    pub fn observer(&self) -> LinkObserver {
        LinkObserver(Arc::downgrade(self.shared()))
    }

    /// Returns why the link uses TCP although RDMA was preferred.
    #[must_use]
    pub fn fallback(&self) -> Option<Fallback> {
        self.shared().fallback()
    }

    /// Returns the device that the link uses, or `None` on TCP.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        self.shared().device().map(|device| device.name.clone())
    }

    /// Returns the path MTU of the link's queue pair, or `None` on TCP.
    #[must_use]
    pub fn mtu(&self) -> Option<Mtu> {
        // An upgrade in progress, or one that failed, has set the MTU, but not yet the device.
        let route = self.shared().route();
        route.device.and(route.mtu)
    }

    /// Returns the number of the queue pair, as logs and the device's tools show it. Returns `None`
    /// on TCP.
    #[must_use]
    pub fn qp_num(&self) -> Option<u32> {
        let route = self.shared().route();
        route.device.map(|_| route.qp_num)
    }

    /// Returns the peer's hello.
    #[must_use]
    pub fn peer_hello(&self) -> Hello {
        self.shared().with(|state, _, _| *state.core.peer())
    }

    /// Returns the certificate that the peer has presented with TLS, which was verified when the
    /// link began, and those of its chain that the peer has sent. Empty if it has presented none,
    /// or if the link has begun without TLS.
    #[must_use]
    pub fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        self.shared().peer_certificates.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the counters of the link.
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

/// Reports the transport of a link. It does not keep the link open.
#[derive(Debug, Clone)]
pub struct LinkObserver(Weak<LinkShared>);

impl LinkObserver {
    /// Returns the transport that the link uses now, or `None` if the link is gone.
    #[must_use]
    pub fn transport(&self) -> Option<Transport> {
        self.0.upgrade().map(|link| transport(&link))
    }

    /// Returns the device that the link uses, or `None` on TCP or if the link is gone.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        self.0.upgrade()?.device().map(|device| device.name.clone())
    }

    /// Returns why the link uses TCP although RDMA was preferred.
    #[must_use]
    pub fn fallback(&self) -> Option<Fallback> {
        self.0.upgrade()?.fallback()
    }

    /// Returns how often the link has lost its RDMA path ([`LinkStats::moves`]), or `None` if the
    /// link is gone.
    #[must_use]
    pub fn moves(&self) -> Option<u64> {
        Some(self.0.upgrade()?.with(|state, _, _| state.core.stats.moves))
    }
}

fn transport(link: &LinkShared) -> Transport {
    let route = link.route();
    match route.device {
        Some(_) => Transport::Rdma,
        None if route.encrypted => Transport::TcpTls,
        None => Transport::Tcp,
    }
}
