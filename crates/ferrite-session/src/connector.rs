//! The calling side of a session: finds out what the server speaks, and falls back to TCP as the
//! policy says.
//!
//! ```text
//!   prefer, require:  RDMA with our hello ─┬─► a Ferrite peer answers: a link
//!                                          ├─► it stands, and nobody says hello: Valkey's protocol
//!                                          └─► it fails ─┬─ prefer: TCP, and why
//!                                                        └─ require: the error
//!   forbid:           TCP
//! ```
//!
//! Over TCP it is plain RESP: whoever listens there, an engine or a gateway, understands that. Or
//! RESP within TLS, if the caller says so: then RDMA, which encrypts nothing, is out unless the
//! caller says that too; where it was preferred, that is a fallback like others, with its cause.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{ConnectOptions, Error, Fabric, Fallback, Met, Rdma, Stream};
use ferrite_proto::Role;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::stream::{ValkeyConfig, ValkeyStream};

/// How RDMA is had all the same.
const ALLOW_CLEAR_TEXT: &str = "allow RDMA beside TLS (plain_rdma_beside_tls) on a network that only friends can listen to, or forbid RDMA";

/// What carries a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SessionTransport {
    /// RDMA between two Ferrite peers.
    FerriteRdma,
    /// Valkey Over RDMA.
    ValkeyRdma,
    /// TCP.
    Tcp,
    /// TCP with TLS.
    Tls,
}

impl fmt::Display for SessionTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FerriteRdma => "RDMA (Ferrite)",
            Self::ValkeyRdma => "RDMA (Valkey)",
            Self::Tcp => "TCP",
            Self::Tls => "TCP with TLS",
        })
    }
}

/// Opens sessions.
///
/// ```no_run
/// # async fn show() -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_fabric::Fabric;
/// use ferrite_session::Connector;
///
/// let fabric = Fabric::system().build()?;
/// tokio::spawn(fabric.drive());
/// let session = Connector::new(&fabric).connect("10.0.0.1:6380".parse()?).await?;
/// println!("over {}", session.transport());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Connector {
    fabric: Fabric,
    rdma: Rdma,
    local: Option<SocketAddr>,
    timeout: Duration,
    valkey: ValkeyConfig,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    may_be_plain_on_rdma: bool,
}

impl Connector {
    /// RDMA as the fabric's settings say, within its `connection_timeout`.
    #[must_use]
    pub fn new(fabric: &Fabric) -> Self {
        Self {
            fabric: fabric.clone(),
            rdma: fabric.config().rdma,
            local: None,
            timeout: fabric.config().connection_timeout,
            valkey: ValkeyConfig::default(),
            tls: None,
            may_be_plain_on_rdma: false,
        }
    }

    /// Whether RDMA may, must or must not carry it.
    #[must_use]
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = rdma;
        self
    }

    /// The local address for RDMA, which chooses the device.
    #[must_use]
    pub fn local(mut self, local: SocketAddr) -> Self {
        self.local = Some(local);
        self
    }

    /// How long each way may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// For servers of Valkey's protocol. Valkey's own has been tested with windows of 1 MiB; ours
    /// are as large as this says.
    #[must_use]
    pub fn valkey(mut self, config: ValkeyConfig) -> Self {
        self.valkey = config;
        self
    }

    /// TLS, with a server whose certificate is for this name. It is on TCP alone: RDMA encrypts
    /// nothing, so it is not tried where it is preferred ([`Session::fallback`] says so) and an
    /// error where it is required, unless [`Connector::plain_rdma_beside_tls`] allows it. Which
    /// cryptography is used is the caller's choice (`rustls` with the feature `ring` or
    /// `aws-lc-rs`).
    #[must_use]
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.tls = Some((config.into(), name));
        self
    }

    /// Allows RDMA, which is not encrypted, although TLS is set for TCP: for networks that only
    /// friends can listen to.
    #[must_use]
    pub fn plain_rdma_beside_tls(mut self) -> Self {
        self.may_be_plain_on_rdma = true;
        self
    }

    /// Opens a session.
    ///
    /// # Errors
    /// How RDMA failed, if it was required (a [`ferrite_fabric::Error`] is inside); else how TCP or
    /// TLS did, and RDMA before it. RDMA is required and TLS is set.
    pub async fn connect(&self, server: SocketAddr) -> io::Result<Session> {
        let must_be_tls = self.tls.is_some() && !self.may_be_plain_on_rdma;
        if must_be_tls && self.rdma == Rdma::Require {
            let contradiction = "TLS is set and RDMA is required, but RDMA is not encrypted: prefer or forbid RDMA, or allow it beside TLS";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, contradiction));
        }
        if self.rdma == Rdma::Forbid {
            return Ok(Session { stream: self.over_tcp(server).await?, fallback: None });
        }
        if must_be_tls {
            let stream = self.over_tcp(server).await?;
            let fallback =
                self.fabric.fell_back_to_tcp(server, Error::clear_text(ALLOW_CLEAR_TEXT));
            return Ok(Session { stream, fallback: Some(fallback) });
        }
        let error = match self.over_rdma(server).await {
            Ok(stream) => return Ok(Session { stream, fallback: None }),
            Err(error) if self.rdma == Rdma::Require => return Err(error.into()),
            Err(error) => error,
        };
        match self.over_tcp(server).await {
            Ok(stream) => {
                let fallback = Some(self.fabric.fell_back_to_tcp(server, error));
                Ok(Session { stream, fallback })
            }
            Err(tcp) => Err(io::Error::new(
                tcp.kind(),
                format!("{server}: TCP: {tcp}; RDMA (tried first): {error}"),
            )),
        }
    }

    async fn over_rdma(&self, server: SocketAddr) -> Result<Kind, Error> {
        let mut options = ConnectOptions::new().timeout(self.timeout);
        if let Some(local) = self.local {
            options = options.local(local);
        }
        Ok(match self.fabric.connect_either(server, &options).await? {
            Met::Link(link) => Kind::Ferrite(Stream::new(link)),
            Met::RawConnection(raw) => {
                Kind::Valkey(Box::new(ValkeyStream::open(raw, Role::Client, &self.valkey).await?))
            }
        })
    }

    async fn over_tcp(&self, server: SocketAddr) -> io::Result<Kind> {
        let connecting = async {
            let tcp = TcpStream::connect(server).await?;
            tcp.set_nodelay(true)?;
            let Some((tls, name)) = &self.tls else { return Ok(Kind::Tcp(tcp)) };
            let shaken = tls.connect(name.clone(), tcp).await;
            let shaken = shaken.map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("TLS with {server} as {}: {error}", name.to_str()),
                )
            });
            Ok(Kind::Tls(Box::new(shaken?)))
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "no answer in time");
        timeout(self.timeout, connecting).await.unwrap_or_else(|_| Err(late()))
    }
}

enum Kind {
    Ferrite(Stream),
    Valkey(Box<ValkeyStream>),
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection to a server that speaks RESP: [`AsyncRead`] and [`AsyncWrite`].
pub struct Session {
    stream: Kind,
    fallback: Option<Fallback>,
}

impl Session {
    /// What carries it.
    #[must_use]
    pub fn transport(&self) -> SessionTransport {
        match &self.stream {
            Kind::Ferrite(_) => SessionTransport::FerriteRdma,
            Kind::Valkey(_) => SessionTransport::ValkeyRdma,
            Kind::Tcp(_) => SessionTransport::Tcp,
            Kind::Tls(_) => SessionTransport::Tls,
        }
    }

    /// Why it is on TCP, if RDMA was preferred.
    #[must_use]
    pub fn fallback(&self) -> Option<&Fallback> {
        self.fallback.as_ref()
    }

    /// The device that carries it, on RDMA.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        match &self.stream {
            Kind::Ferrite(stream) => stream.link().device(),
            Kind::Valkey(stream) => stream.raw().device(),
            Kind::Tcp(_) | Kind::Tls(_) => None,
        }
    }
}

macro_rules! of_each {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().stream {
            Kind::Ferrite($stream) => $call,
            Kind::Valkey($stream) => $call,
            Kind::Tcp($stream) => $call,
            Kind::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Session {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        of_each!(self, stream => Pin::new(stream).poll_read(cx, out))
    }
}

impl AsyncWrite for Session {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        of_each!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        of_each!(self, stream => Pin::new(stream).poll_write_vectored(cx, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        of_each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        of_each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("rdma", &self.rdma)
            .field("local", &self.local)
            .field("timeout", &self.timeout)
            .field("tls", &self.tls.as_ref().map(|(_, name)| name))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("transport", &self.transport())
            .field("fallback", &self.fallback)
            .finish()
    }
}
