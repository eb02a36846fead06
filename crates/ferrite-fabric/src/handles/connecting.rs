//! The connect calls of a fabric, and the futures that wait for their links.

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

use super::link::Link;
use super::raw_connection::RawConnection;
use crate::error::{Error, ErrorKind};
use crate::fabric::Fabric;
use crate::fabric::poller::connect::{Opened, Outgoing, OverTcp, PeerProtocol};
use crate::policy::{Attempts, ConnectMode, Fallback, Rdma};

/// Options of a connect.
///
/// ```
/// use ferrite_fabric::ConnectOptions;
/// use std::time::Duration;
///
/// let options =
///     ConnectOptions::new().local("127.0.0.1:0".parse()?).timeout(Duration::from_secs(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ConnectOptions {
    local: Option<SocketAddr>,
    timeout: Option<Duration>,
    rdma: Option<Rdma>,
    mode: Option<ConnectMode>,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    require_encryption: bool,
}

impl ConnectOptions {
    /// Returns the defaults: any local address, and the fabric's settings for the rest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the local address, which selects the device. Set it on hosts with several devices.
    /// Otherwise the kernel may pick any device that reaches the peer.
    pub fn local(mut self, addr: SocketAddr) -> Self {
        self.local = Some(addr);
        self
    }

    /// Sets whether the link may use RDMA. Default: the fabric's settings.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// Sets how the RDMA connection is established. Default: the fabric's settings.
    pub fn mode(mut self, mode: ConnectMode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// Sets TLS for a link that uses TCP. `config` says which certificates to trust, and the peer's
    /// certificate must have `name`.
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.tls = Some((config, name));
        self
    }

    /// Forbids clear text. RDMA payload is clear text, so the link uses TCP with TLS: see
    /// [`ConnectOptions::tls`].
    pub fn require_encryption(mut self) -> Self {
        self.require_encryption = true;
        self
    }

    /// Sets how long the handshake may take on each transport, including the time that it waits to
    /// start. Each retry over RDMA (`connection_retries`) has this time again. With `tcp-first`,
    /// the upgrade to RDMA after the handshake has the fabric's `connection_timeout`.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

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
        // Close a link that was opened but will not be taken.
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

/// The result of connecting to a peer whose protocol was not known.
#[derive(Debug)]
pub enum Connected {
    /// A Ferrite peer.
    Link(Link),
    /// A peer that speaks another protocol.
    RawConnection(RawConnection),
}

/// See [`Fabric::connect_either`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct ConnectingEither(Connecting);

impl Future for ConnectingEither {
    type Output = Result<Connected, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let fabric = self.0.fabric.clone();
        self.0.poll_opened(cx).map_ok(|link| match link.is_raw() {
            true => Connected::RawConnection(RawConnection::new(link, fabric)),
            false => Connected::Link(Link::new(link, fabric)),
        })
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting").finish_non_exhaustive()
    }
}

impl Fabric {
    /// Opens a link to a peer. The connect starts at once. Dropping the future cancels it.
    ///
    /// # Errors
    /// - [`ErrorKind::Unreachable`], [`ErrorKind::Refused`] or [`ErrorKind::Timeout`] if the peer
    ///   cannot be reached, refuses, or does not answer. If it did not answer over RDMA, the error
    ///   has likely causes.
    /// - [`ErrorKind::Protocol`] if the peer does not speak our protocol.
    /// - [`ErrorKind::Absent`], [`ErrorKind::DeviceGone`] or [`ErrorKind::Resources`] if this side
    ///   cannot open the link.
    /// - [`ErrorKind::Misuse`] if the options contradict each other.
    pub fn connect(&self, peer: SocketAddr) -> Connecting {
        self.connect_with(peer, &ConnectOptions::new())
    }

    /// Like [`Fabric::connect`], with options.
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
            // There is no device, so do not wait for RDMA.
            if let Some(over_tcp) = over_tcp {
                self.shared().with_poller(|poller, shared| {
                    poller.now = now;
                    poller.dial(shared, over_tcp.dial(now, reply, Some(Fallback::new(error))));
                });
            }
            return connecting;
        }
        let mut outgoing = Outgoing::new(peer, options.local, now, timeout, reply);
        outgoing.may_migrate = over_tcp.as_ref().is_some_and(|tcp| tcp.policy == Rdma::Prefer);
        outgoing.tls = over_tcp.as_ref().and_then(|tcp| tcp.tls.clone());
        outgoing.tcp_fallback = over_tcp;
        self.call(outgoing);
        connecting
    }

    /// Connects by RDMA CM to a peer that speaks another protocol. The connect starts at once.
    /// Dropping the future cancels it. Of the options, only the local address and the timeout
    /// affect the connection.
    ///
    /// # Errors
    /// Like [`Fabric::connect`]. [`ErrorKind::Misuse`] if RDMA is forbidden, or if the options
    /// require encryption, which RDMA does not have.
    pub fn connect_raw(&self, peer: SocketAddr, options: &ConnectOptions) -> ConnectingRaw {
        ConnectingRaw(self.call_by_rdma(peer, options, PeerProtocol::Other))
    }

    /// Connects by RDMA CM to a peer whose protocol is unknown. The request has a hello. If the
    /// response has none, the peer speaks another protocol. If RDMA CM fails, the connect fails,
    /// even if RDMA is only preferred.
    ///
    /// A link to a Ferrite peer may migrate to TCP later, if both sides prefer RDMA and this side
    /// has no TLS for the peer. The mode of the options has no effect.
    ///
    /// # Errors
    /// Like [`Fabric::connect_raw`].
    pub fn connect_either(&self, peer: SocketAddr, options: &ConnectOptions) -> ConnectingEither {
        ConnectingEither(self.call_by_rdma(peer, options, PeerProtocol::Unknown))
    }

    fn call_by_rdma(
        &self,
        peer: SocketAddr,
        options: &ConnectOptions,
        protocol: PeerProtocol,
    ) -> Connecting {
        let (reply, receiver) = oneshot::channel();
        let connecting = Connecting::new(self.clone(), receiver);
        let timeout = options.timeout.unwrap_or(self.config().connection_timeout);
        let policy = options.rdma.unwrap_or(self.config().rdma);
        let refused = if options.require_encryption {
            let what =
                "encryption is required, but this call uses RDMA, whose payload is clear text";
            Some(Error::new(ErrorKind::Misuse, what))
        } else if policy == Rdma::Forbid {
            let what = "the policy forbids RDMA, but this call supports nothing else";
            Some(Error::new(ErrorKind::Misuse, what))
        } else {
            self.shared().devices.is_empty().then(|| self.shared().no_rdma())
        };
        if let Some(error) = refused {
            let _ = reply.send(Err(error));
            return connecting;
        }
        let mut outgoing = Outgoing::new(peer, options.local, Instant::now(), timeout, reply);
        outgoing.protocol = protocol;
        // The peer of such a call may have no TLS, and clear text over TCP may be unwanted.
        let has_tls = self.tls_to(peer, options).is_some();
        outgoing.may_migrate =
            protocol == PeerProtocol::Unknown && policy == Rdma::Prefer && !has_tls;
        self.call(outgoing);
        connecting
    }

    fn call(&self, mut outgoing: Outgoing) {
        outgoing.retries = self.config().connection_retries;
        self.shared().with_poller(|poller, shared| {
            poller.now = Instant::now();
            poller.call(shared, outgoing);
        });
    }

    /// Decides whether to start by RDMA CM, and how to connect over TCP: at once, or if RDMA CM
    /// fails. The second value is `None` if only RDMA CM may be used.
    fn ways(
        &self,
        peer: SocketAddr,
        options: &ConnectOptions,
        timeout: Duration,
    ) -> Result<(bool, Option<OverTcp>), Error> {
        let policy = options.rdma.unwrap_or(self.config().rdma);
        let attempts = policy.attempts(options.require_encryption)?;
        let mode = options.mode.unwrap_or(self.config().connect);
        let tls = self.tls_to(peer, options);
        if options.require_encryption && tls.is_none() {
            let what = "encryption is required, but TLS is not configured; set ConnectOptions::tls";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        let upgrade = attempts != Attempts::Tcp;
        let over_tcp = OverTcp { peer, local: options.local, timeout, tls, policy, upgrade };
        Ok(match (attempts, mode) {
            (Attempts::Tcp, _) | (_, ConnectMode::TcpFirst) => (false, Some(over_tcp)),
            (Attempts::Rdma, ConnectMode::Cm | ConnectMode::Auto) => (true, None),
            (Attempts::RdmaThenTcp, ConnectMode::Cm | ConnectMode::Auto) => (true, Some(over_tcp)),
        })
    }

    /// Returns TLS for a connection over TCP, if the options or the fabric's settings have it.
    fn tls_to(
        &self,
        peer: SocketAddr,
        options: &ConnectOptions,
    ) -> Option<(Arc<ClientConfig>, ServerName<'static>)> {
        let name = || ServerName::IpAddress(peer.ip().into());
        options.tls.clone().or_else(|| Some((self.shared().tls.client.clone()?, name())))
    }
}
