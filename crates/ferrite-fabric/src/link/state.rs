//! A link with its I/O: the protocol (`core.rs`), and the queue pair and the connection that carry
//! it. Everything here happens under the link's lock.
//!
//! The core decides what is sent and what a frame means. This module does the core's I/O.
//!
//! | file | what it drives |
//! |---|---|
//! | `rdma.rs` | the queue pair: posts and completions |
//! | `tcp.rs` | the connection: frames out, frames in |
//! | `next_path.rs` | the queue pair that the link is upgraded to |
//! | `access.rs` | the peer's access to our memory |
//! | `ending.rs` | how the queue pair and the connection end |
//! | `raw_connection.rs` | a peer that speaks another protocol |

mod access;
mod ending;
mod next_path;
mod raw_connection;
mod rdma;
mod tcp;

pub(crate) use ending::Destroying;
pub(crate) use next_path::NextPath;
pub use raw_connection::{Arrival, Done};
pub(crate) use rdma::RdmaPath;
pub(crate) use tcp::{Reading, Request};

use std::sync::Arc;
use std::time::Instant;

use super::core::{ActiveTransport, LinkCore, Look, OwnLimits, RequestContext, Silence, Wakes};
use super::tcp::TcpPath;
use crate::device::shared_device::SharedDevice;
#[cfg(feature = "tokio")]
use crate::device::slots::Held;
use crate::device::slots::SendQueue;
use crate::error::{Error, ErrorKind};
use crate::mem::Pool;

/// Data outside of the lock that the methods of [`LinkState`] need.
pub(crate) struct LinkEnv<'a> {
    pub(crate) index: u32,
    pub(crate) pool: &'a Pool,
}

pub(crate) struct LinkState {
    pub(crate) core: LinkCore,
    pub(crate) rdma: RdmaPath,
    /// The queue pair that the link is upgraded to.
    pub(crate) next: Option<NextPath>,
    /// The TCP connection. It carries the link, or is kept for a downgrade.
    pub(crate) tcp: Option<TcpPath>,
    /// State for a peer of another protocol; `None` for Ferrite peers.
    raw: Option<Box<raw_connection::RawConnection>>,
    /// Whether the fabric was told that the link is down.
    pub(crate) is_announced: bool,
    /// Whether the device has refused a request of the peer.
    pub(crate) peer_was_refused: bool,
    /// Whether something waits for memory although perhaps no completion of this link will free
    /// any. The fabric then retries after a while.
    pub(crate) is_starved: bool,
}

impl LinkState {
    /// Creates a link over a queue pair.
    pub(crate) fn new(
        queue: SendQueue<RequestContext>,
        device: Arc<SharedDevice>,
        inline: usize,
        limits: OwnLimits,
    ) -> Self {
        let core = LinkCore::new(limits, ActiveTransport::Rdma, Instant::now());
        Self::with(core, RdmaPath::new(queue, device, inline), None)
    }

    /// Creates a link over a TCP connection.
    pub(crate) fn over_tcp(tcp: TcpPath, limits: OwnLimits) -> Self {
        let core = LinkCore::new(limits, ActiveTransport::Tcp, Instant::now());
        Self::with(core, RdmaPath::none(), Some(tcp))
    }

    fn with(core: LinkCore, rdma: RdmaPath, tcp: Option<TcpPath>) -> Self {
        Self {
            core,
            rdma,
            next: None,
            tcp,
            raw: None,
            is_announced: false,
            peer_was_refused: false,
            is_starved: false,
        }
    }

    pub(crate) fn failure(&self) -> Option<&Error> {
        self.core.failure()
    }

    /// Sends everything that may be sent, including frames that become due once the rest was sent.
    pub(crate) fn pump(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) {
        if !self.core.is_up() {
            return;
        }
        if self.core.is_closing() && self.raw.is_some() {
            self.push_raw_closing_probe();
        }
        if let Err(error) = self.send_all(env, wakes) {
            self.core.fail(error, wakes);
            return;
        }
        if self.raw.is_some() {
            if self.core.is_closing() && self.raw_is_idle() {
                self.core.fail(Error::new(ErrorKind::Closed, "the link is closed"), wakes);
            }
            return;
        }
        if self.core.after_sending(wakes)
            && let Err(error) = self.send_all(env, wakes)
        {
            self.core.fail(error, wakes);
        }
    }

    fn send_all(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) -> Result<(), Error> {
        match self.core.transport() {
            ActiveTransport::Rdma => self.post_all(env, wakes),
            ActiveTransport::Tcp => self.write_all(wakes),
            ActiveTransport::Migrating => Ok(()),
        }
    }

    /// Sends a small message at once, from the caller's bytes. Returns false if it must be queued.
    pub(crate) fn send_now(&mut self, channel: u16, bytes: &[u8]) -> Result<bool, Error> {
        if self.core.transport() == ActiveTransport::Rdma {
            self.post_now(channel, bytes)
        } else {
            self.write_now(channel, bytes)
        }
    }

    /// Returns whether messages or one-sided operations wait, or a request in flight holds a
    /// buffer. If so, the link will wake the tasks that wait for room.
    #[cfg(feature = "tokio")]
    pub(crate) fn holds_memory(&self) -> bool {
        let has_buffer = |held: &Held| matches!(held, Held::Shared(_) | Held::Unique(_));
        self.core.has_queued()
            || self.rdma.queue.iter().any(|in_flight| has_buffer(&in_flight.held))
    }

    /// Checks the timers. Returns when to check again, and whether the peer was heard from
    /// recently; `None` if the link is not up, or the peer speaks another protocol.
    ///
    /// # Errors
    /// The peer has not answered a keepalive in time.
    pub(crate) fn on_timer(&mut self, now: Instant) -> Result<Option<(Instant, bool)>, Silence> {
        if self.raw.is_some() {
            return Ok(None);
        }
        let Self { core, tcp, .. } = self;
        let tcp = tcp.as_ref().filter(|_| core.transport() == ActiveTransport::Tcp);
        let kernel_heard = || now.checked_sub(tcp?.since_acknowledged()?);
        Ok(core.on_timer(now, kernel_heard)?.map(|look| match look {
            Look::Well(at) => (at, true),
            Look::Ask(at) | Look::Asked(at) => (at, false),
        }))
    }

    /// Handles a disconnect by the peer's connection manager.
    pub(crate) fn on_disconnected(&mut self, wakes: &mut Wakes, what: impl FnOnce() -> Error) {
        if self.raw.is_some() {
            self.core.fail(Error::new(ErrorKind::Closed, "the peer has closed the link"), wakes);
        } else {
            self.core.on_disconnected(wakes, what);
        }
    }

    /// Confirms revocations of the peer's grants that nothing uses any more.
    fn answer_revocations(&mut self) {
        let Self { core, rdma, tcp, .. } = self;
        core.answer_revocations(|grant| {
            rdma.queue.iter().any(|in_flight| in_flight.request.uses(grant))
                || tcp.iter().flat_map(TcpPath::asked).any(|asked| asked.request.uses(grant))
        });
    }

    /// Switches the link to RDMA, with the queue pair of the upgrade.
    fn adopt_next_path(&mut self) {
        if let Some(next) = self.next.take() {
            self.rdma.adopt(next);
        }
    }

    /// Reports over TCP how many frames have arrived, once the lost path can deliver no more. If
    /// the peer has already reported its own number, the link continues on TCP.
    pub(crate) fn resume(&mut self, wakes: &mut Wakes) {
        self.core.resume(wakes);
        self.answer_revocations();
    }

    /// Continues over another connection. Returns false if the link already has a path or a
    /// connection, or has not destroyed its queue pair yet.
    pub(crate) fn resume_over(
        &mut self,
        tcp: TcpPath,
        peer_received: u64,
        wakes: &mut Wakes,
    ) -> bool {
        let resumes = self.core.resume_over(peer_received, wakes);
        if resumes {
            self.tcp = Some(tcp);
            self.answer_revocations();
        }
        resumes
    }
}
