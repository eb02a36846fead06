//! The client side of a session: detects what the server speaks, and falls back to TCP if the
//! policy allows it.
//!
//! ```text
//!   prefer, require:  RDMA with our hello ─┬─► the server sends a hello: a Ferrite link
//!                                          ├─► it accepts, but sends no hello: Valkey Over RDMA
//!                                          └─► it fails ─┬─ prefer: TCP, with the cause
//!                                                        └─ require: the error
//!   forbid:           TCP
//! ```
//!
//! Over TCP, a session is plain RESP, which engines and gateways both understand. If the caller has
//! configured TLS, it is RESP within TLS. RDMA is then not used, because it is not encrypted,
//! unless the caller allows that explicitly. If RDMA was preferred, this counts as a fallback, with
//! its cause.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{ConnectOptions, Connected, Error, Fabric, Fallback, Rdma, Stream};
use ferrite_proto::Role;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::stream::{ValkeyConfig, ValkeyStream};

/// The fix that the error names if RDMA is not tried because TLS is configured.
const ALLOW_CLEAR_TEXT: &str = "allow RDMA beside TLS (plain_rdma_beside_tls) on a network \
                                where nobody untrusted can listen, or forbid RDMA";

/// The transport of a session.
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

/// Opens sessions to servers.
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
    allows_plain_rdma: bool,
}

impl Connector {
    /// Creates a connector with the RDMA policy and the `connection_timeout` of the fabric.
    #[must_use]
    pub fn new(fabric: &Fabric) -> Self {
        Self {
            fabric: fabric.clone(),
            rdma: fabric.config().rdma,
            local: None,
            timeout: fabric.config().connection_timeout,
            valkey: ValkeyConfig::default(),
            tls: None,
            allows_plain_rdma: false,
        }
    }

    /// Sets whether sessions may, must or must not use RDMA.
    #[must_use]
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = rdma;
        self
    }

    /// Sets the local address for RDMA, which selects the device.
    #[must_use]
    pub fn local(mut self, local: SocketAddr) -> Self {
        self.local = Some(local);
        self
    }

    /// Sets the time limit of each attempt: one over RDMA, and one over TCP.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the configuration for servers that speak Valkey Over RDMA. Valkey's own server has been
    /// tested with windows of 1 MiB; this configuration sets the size of ours.
    #[must_use]
    pub fn valkey(mut self, config: ValkeyConfig) -> Self {
        self.valkey = config;
        self
    }

    /// Enables TLS over TCP, with a server whose certificate is valid for this name.
    ///
    /// RDMA is not encrypted. If RDMA is preferred, it is not tried, and [`Session::fallback`]
    /// reports that. If RDMA is required, connecting is an error.
    /// [`Connector::plain_rdma_beside_tls`] allows RDMA in both cases.
    ///
    /// The caller chooses the cryptography (`rustls` with the feature `ring` or `aws-lc-rs`).
    #[must_use]
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.tls = Some((config.into(), name));
        self
    }

    /// Allows RDMA, which is not encrypted, although TLS is configured for TCP. Meant for networks
    /// where nobody untrusted can listen.
    #[must_use]
    pub fn plain_rdma_beside_tls(mut self) -> Self {
        self.allows_plain_rdma = true;
        self
    }

    /// Opens a session.
    ///
    /// # Errors
    /// Returns an error if
    /// - RDMA is required and fails (a [`ferrite_fabric::Error`] is inside),
    /// - TCP or TLS fails; the message also says how RDMA failed if it was tried first,
    /// - RDMA is required and TLS is configured, without [`Connector::plain_rdma_beside_tls`].
    pub async fn connect(&self, server: SocketAddr) -> io::Result<Session> {
        let must_be_tls = self.tls.is_some() && !self.allows_plain_rdma;
        if must_be_tls && self.rdma == Rdma::Require {
            let contradiction = "TLS is configured and RDMA is required, but RDMA is not \
                                 encrypted; prefer or forbid RDMA, or allow it beside TLS \
                                 (plain_rdma_beside_tls)";
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

    async fn over_rdma(&self, server: SocketAddr) -> Result<SessionStream, Error> {
        let mut options = ConnectOptions::new().timeout(self.timeout);
        if let Some(local) = self.local {
            options = options.local(local);
        }
        Ok(match self.fabric.connect_either(server, &options).await? {
            Connected::Link(link) => SessionStream::Ferrite(Stream::new(link)),
            Connected::RawConnection(raw) => {
                let stream = ValkeyStream::open(raw, Role::Client, &self.valkey).await?;
                SessionStream::Valkey(Box::new(stream))
            }
        })
    }

    async fn over_tcp(&self, server: SocketAddr) -> io::Result<SessionStream> {
        let connecting = async {
            let tcp = TcpStream::connect(server).await?;
            tcp.set_nodelay(true)?;
            let Some((tls, name)) = &self.tls else { return Ok(SessionStream::Tcp(tcp)) };
            let handshake = tls.connect(name.clone(), tcp).await;
            let handshake = handshake.map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("TLS handshake with {server} as {}: {error}", name.to_str()),
                )
            });
            Ok(SessionStream::Tls(Box::new(handshake?)))
        };
        let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "connection timed out");
        timeout(self.timeout, connecting).await.unwrap_or_else(|_| Err(timed_out()))
    }
}

enum SessionStream {
    Ferrite(Stream),
    Valkey(Box<ValkeyStream>),
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection to a server that speaks RESP: [`AsyncRead`] and [`AsyncWrite`].
pub struct Session {
    stream: SessionStream,
    fallback: Option<Fallback>,
}

impl Session {
    /// Returns the transport of the session.
    #[must_use]
    pub fn transport(&self) -> SessionTransport {
        match &self.stream {
            SessionStream::Ferrite(_) => SessionTransport::FerriteRdma,
            SessionStream::Valkey(_) => SessionTransport::ValkeyRdma,
            SessionStream::Tcp(_) => SessionTransport::Tcp,
            SessionStream::Tls(_) => SessionTransport::Tls,
        }
    }

    /// Returns why the session uses TCP although RDMA was preferred.
    #[must_use]
    pub fn fallback(&self) -> Option<&Fallback> {
        self.fallback.as_ref()
    }

    /// Returns the RDMA device, if the session uses RDMA.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        match &self.stream {
            SessionStream::Ferrite(stream) => stream.link().device(),
            SessionStream::Valkey(stream) => stream.raw().device(),
            SessionStream::Tcp(_) | SessionStream::Tls(_) => None,
        }
    }
}

macro_rules! with_stream {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().stream {
            SessionStream::Ferrite($stream) => $call,
            SessionStream::Valkey($stream) => $call,
            SessionStream::Tcp($stream) => $call,
            SessionStream::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Session {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        with_stream!(self, stream => Pin::new(stream).poll_read(cx, out))
    }
}

impl AsyncWrite for Session {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        with_stream!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        with_stream!(self, stream => Pin::new(stream).poll_write_vectored(cx, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_stream!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_stream!(self, stream => Pin::new(stream).poll_shutdown(cx))
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
