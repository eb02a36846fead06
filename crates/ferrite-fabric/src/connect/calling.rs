//! How a link is asked for, and the futures that wait for it.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_channel::oneshot;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use super::outgoing::{Outgoing, Speaks};
use super::sockets::{Dial, Wants};
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::link::shared::LinkShared;
use crate::link::{Link, RawConnection};
use crate::policy::{Fallback, Meet, Rdma};

/// How to open a link.
///
/// ```
/// use ferrite_fabric::ConnectOptions;
/// use std::time::Duration;
///
/// let options = ConnectOptions::new().local("127.0.0.1:0".parse()?).timeout(Duration::from_secs(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ConnectOptions {
    local: Option<SocketAddr>,
    timeout: Option<Duration>,
    rdma: Option<Rdma>,
    meet: Option<Meet>,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    require_encryption: bool,
}

impl ConnectOptions {
    /// From any local address, with the fabric's `connection_timeout`.
    pub fn new() -> Self {
        Self::default()
    }

    /// The local address, which chooses the device. Say it on hosts with several: by itself the
    /// kernel may pick another one that reaches the peer.
    pub fn local(mut self, addr: SocketAddr) -> Self {
        self.local = Some(addr);
        self
    }

    /// Whether RDMA may carry it; without this, what the fabric's settings say.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// How the peer is met on RDMA; without this, what the fabric's settings say.
    pub fn meet(mut self, meet: Meet) -> Self {
        self.meet = Some(meet);
        self
    }

    /// TLS for the case that TCP carries it: what to trust, and what the peer's certificate must be
    /// for.
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.tls = Some((config, name));
        self
    }

    /// Nothing in clear text. RDMA payload is, so TCP with TLS carries the link: see
    /// [`ConnectOptions::tls`].
    pub fn require_encryption(mut self) -> Self {
        self.require_encryption = true;
        self
    }

    /// How long the handshake may take on each way, waiting for its turn included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// Who waits for a link.
pub(crate) type Reply = oneshot::Sender<Opened>;
pub(crate) type Opened = Result<Arc<LinkShared>, Error>;

/// A link that is being opened.
#[must_use = "futures do nothing unless awaited"]
pub struct Connecting {
    fabric: Fabric,
    reply: oneshot::Receiver<Opened>,
}

impl Future for Connecting {
    type Output = Result<Link, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_opened(cx).map_ok(|link| Link::new(link, self.fabric.clone()))
    }
}

impl Connecting {
    pub(crate) fn new(fabric: Fabric, reply: oneshot::Receiver<Opened>) -> Self {
        Self { fabric, reply }
    }

    fn poll_opened(&mut self, cx: &mut Context<'_>) -> Poll<Opened> {
        Pin::new(&mut self.reply).poll(cx).map(|reply| {
            reply.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, "the fabric is gone")))
        })
    }
}

impl ConnectingRaw {
    pub(crate) fn new(fabric: Fabric, reply: oneshot::Receiver<Opened>) -> Self {
        Self(Connecting::new(fabric, reply))
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // A link that was made, and that nobody will ask for any more.
        self.reply.close();
        if let Ok(Some(Ok(link))) = self.reply.try_recv() {
            link.close();
        }
    }
}

/// See [`Fabric::connect_raw`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct ConnectingRaw(Connecting);

impl Future for ConnectingRaw {
    type Output = Result<RawConnection, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let fabric = self.0.fabric.clone();
        self.0.poll_opened(cx).map_ok(|link| RawConnection::new(link, fabric))
    }
}

/// A peer that was met without knowing what it speaks.
#[derive(Debug)]
pub enum Met {
    /// A Ferrite peer.
    Link(Link),
    /// One that speaks another protocol.
    RawConnection(RawConnection),
}

/// See [`Fabric::connect_either`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct ConnectingEither(Connecting);

impl Future for ConnectingEither {
    type Output = Result<Met, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let fabric = self.0.fabric.clone();
        self.0.poll_opened(cx).map_ok(|link| match link.is_raw() {
            true => Met::RawConnection(RawConnection::new(link, fabric)),
            false => Met::Link(Link::new(link, fabric)),
        })
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting").finish_non_exhaustive()
    }
}

impl Fabric {
    /// Opens a link to a peer. Begins at once; dropping the future gives it up.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Refused`], [`ErrorKind::Timeout`]: with likely
    /// causes.
    pub fn connect(&self, peer: SocketAddr) -> Connecting {
        self.connect_with(peer, &ConnectOptions::new())
    }

    /// The same, with options.
    pub fn connect_with(&self, peer: SocketAddr, options: &ConnectOptions) -> Connecting {
        let (reply, receiver) = oneshot::channel();
        let connecting = Connecting::new(self.clone(), receiver);
        let now = Instant::now();
        let timeout = options.timeout.unwrap_or(self.config().connection_timeout);
        let (rdma, over_tcp) = match self.ways(peer, options, timeout) {
            Ok(ways) => ways,
            Err(error) => {
                let _ = reply.send(Err(error));
                return connecting;
            }
        };
        if !rdma {
            if let Some(over_tcp) = over_tcp {
                self.shared().with_poller(|poller, shared| {
                    poller.now = now;
                    poller.dial(shared, over_tcp.dial(now, reply, None));
                });
            }
            return connecting;
        }
        let lacks = self.shared().devices.is_empty().then(|| self.shared().no_rdma());
        if let (Some(error), Some(Rdma::Prefer)) = (lacks, over_tcp.as_ref().map(|tcp| tcp.policy))
        {
            // Nothing to wait for.
            if let Some(over_tcp) = over_tcp {
                self.shared().with_poller(|poller, shared| {
                    poller.now = now;
                    poller.dial(shared, over_tcp.dial(now, reply, Some(Fallback::new(error))));
                });
            }
            return connecting;
        }
        let mut outgoing = Outgoing::new(peer, options.local, now, timeout, reply);
        outgoing.otherwise = over_tcp;
        self.call(outgoing);
        connecting
    }

    /// Connects to a peer that speaks another protocol, by RDMA CM. Begins at once; dropping the
    /// future gives it up. Of the options, the local address and the time count.
    ///
    /// # Errors
    /// As [`Fabric::connect`]. [`ErrorKind::Misuse`] if the options require encryption, which RDMA
    /// does not have, or RDMA is forbidden.
    pub fn connect_raw(&self, peer: SocketAddr, options: &ConnectOptions) -> ConnectingRaw {
        ConnectingRaw(self.call_by_rdma(peer, options, Speaks::Other))
    }

    /// Connects by RDMA CM to a peer of which it is not known what it speaks: says hello, and takes
    /// an answer without one for that of a peer that speaks another protocol. Of the options, the
    /// local address and the time count.
    ///
    /// # Errors
    /// As [`Fabric::connect_raw`].
    pub fn connect_either(&self, peer: SocketAddr, options: &ConnectOptions) -> ConnectingEither {
        ConnectingEither(self.call_by_rdma(peer, options, Speaks::Either))
    }

    fn call_by_rdma(
        &self,
        peer: SocketAddr,
        options: &ConnectOptions,
        speaks: Speaks,
    ) -> Connecting {
        let (reply, receiver) = oneshot::channel();
        let connecting = Connecting::new(self.clone(), receiver);
        let timeout = options.timeout.unwrap_or(self.config().connection_timeout);
        let refused = if options.require_encryption {
            let what =
                "encryption is required, and this call is over RDMA, whose payload is clear text";
            Some(Error::new(ErrorKind::Misuse, what))
        } else if options.rdma.unwrap_or(self.config().rdma) == Rdma::Forbid {
            let what = "the policy forbids RDMA, and this call knows no other way";
            Some(Error::new(ErrorKind::Misuse, what))
        } else {
            self.shared().devices.is_empty().then(|| self.shared().no_rdma())
        };
        if let Some(error) = refused {
            let _ = reply.send(Err(error));
            return connecting;
        }
        let mut outgoing = Outgoing::new(peer, options.local, Instant::now(), timeout, reply);
        outgoing.speaks = speaks;
        self.call(outgoing);
        connecting
    }

    fn call(&self, mut outgoing: Outgoing) {
        outgoing.retries = self.config().connection_retries;
        self.shared().with_poller(|poller, shared| {
            poller.now = Instant::now();
            poller.handshakes.waiting.push_back(Box::new(outgoing));
            poller.start_waiting(shared);
        });
    }

    /// Whether RDMA is tried, and how TCP is, if it may be.
    fn ways(
        &self,
        peer: SocketAddr,
        options: &ConnectOptions,
        timeout: Duration,
    ) -> Result<(bool, Option<OverTcp>), Error> {
        let policy = options.rdma.unwrap_or(self.config().rdma);
        if options.require_encryption && policy == Rdma::Require {
            let what = "encryption and RDMA are both required: RDMA payload is clear text";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        let name = || ServerName::IpAddress(peer.ip().into());
        let meet = options.meet.unwrap_or(self.config().connect);
        let tls = options.tls.clone().or_else(|| Some((self.shared().tls.client.clone()?, name())));
        if options.require_encryption && tls.is_none() {
            let what =
                "encryption is required, and there is no TLS configuration (ConnectOptions::tls)";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        let upgrade = policy != Rdma::Forbid && !options.require_encryption;
        let over_tcp = OverTcp { peer, local: options.local, timeout, tls, policy, upgrade };
        Ok(match (policy, meet) {
            (Rdma::Forbid, _) | (_, Meet::TcpFirst) => (false, Some(over_tcp)),
            (Rdma::Require, Meet::Cm | Meet::Auto) => (true, None),
            (Rdma::Prefer, _) => (!options.require_encryption, Some(over_tcp)),
        })
    }
}

/// How to connect over TCP.
pub(super) struct OverTcp {
    peer: SocketAddr,
    local: Option<SocketAddr>,
    timeout: Duration,
    pub(super) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    pub(super) policy: Rdma,
    /// To RDMA, as soon as the peers have met.
    upgrade: bool,
}

impl OverTcp {
    pub(super) fn dial(self, now: Instant, reply: Reply, fallback: Option<Fallback>) -> Dial {
        let Self { peer, local, timeout, tls, policy, upgrade } = self;
        let wants = match fallback {
            None if upgrade => Wants::Rdma(reply, policy),
            // by CM it did not work: over TCP it is tried later
            fallback => Wants::Link(reply, fallback),
        };
        Dial { peer, local, deadline: now + timeout, tls, wants }
    }
}
