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
//! configured TLS, the session is RESP within TLS. RDMA is not encrypted, so the connector then
//! does not use RDMA, unless the caller allows it explicitly. If RDMA was preferred,
//! [`Session::fallback`] reports why it was not used.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::wire::Program;
use ferrite_fabric::{Attempts, ConnectOptions, Connected, Error, Fabric, Fallback, Rdma, Stream};
use ferrite_proto::Role;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::stream::{ValkeyConfig, ValkeyStream};
use crate::tcp_keepalive::enable_tcp_keepalive;
use crate::tls;

/// The fix that the error names if RDMA is not tried because TLS is configured.
const ALLOW_CLEAR_TEXT: &str = "allow RDMA beside TLS (plain_rdma_beside_tls) if all who \
                                can listen on the network are trusted, or forbid RDMA";

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
    rdma_timeout: Option<Duration>,
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
            rdma_timeout: None,
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

    /// Returns whether sessions may, must or must not use RDMA.
    #[must_use]
    pub fn policy(&self) -> Rdma {
        self.rdma
    }

    /// Sets the local address. Over RDMA it selects the device.
    #[must_use]
    pub fn local(mut self, local: SocketAddr) -> Self {
        self.local = Some(local);
        self
    }

    /// Sets the time limit of each attempt: over RDMA, where each of the fabric's
    /// `connection_retries` has the limit again, and over TCP.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets a different time limit for each attempt over RDMA.
    #[must_use]
    pub fn rdma_timeout(mut self, timeout: Duration) -> Self {
        self.rdma_timeout = Some(timeout);
        self
    }

    /// Sets the configuration for servers that speak Valkey Over RDMA, such as the size of our
    /// window. Valkey's own server has been tested with windows of 1 MiB.
    #[must_use]
    pub fn valkey(mut self, config: ValkeyConfig) -> Self {
        self.valkey = config;
        self
    }

    /// Enables TLS over TCP. The server's certificate must be valid for `name`.
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

    /// Allows RDMA, which is not encrypted, although TLS is configured for TCP. Use this only on
    /// networks where nobody untrusted can listen.
    #[must_use]
    pub fn plain_rdma_beside_tls(mut self) -> Self {
        self.allows_plain_rdma = true;
        self
    }

    /// Logs and counts that a session uses TCP because RDMA to this server failed. For callers
    /// that use another address for TCP than for RDMA, and therefore open both themselves.
    #[must_use]
    pub fn fell_back_to_tcp(&self, server: SocketAddr, error: Error) -> Fallback {
        self.fabric.fell_back_to_tcp(server, error)
    }

    /// Opens a session.
    ///
    /// # Errors
    /// Returns an error if
    /// - RDMA is required and fails (a [`ferrite_fabric::Error`] is inside),
    /// - TCP or TLS fails; the message also says how RDMA failed if it was tried first,
    /// - RDMA is required and TLS is configured, without [`Connector::plain_rdma_beside_tls`].
    pub async fn connect(&self, server: SocketAddr) -> io::Result<Session> {
        self.open(server).await.map_err(|error| error.into_io(server))
    }

    /// Opens a session like [`Connector::connect`], and reports the error of each transport.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Connector::connect`].
    pub async fn open(&self, server: SocketAddr) -> Result<Session, ConnectError> {
        let must_encrypt = self.tls.is_some() && !self.allows_plain_rdma;
        let attempts = self.rdma.attempts(must_encrypt).map_err(|_| {
            let contradiction = "TLS is configured and RDMA is required, but RDMA is not \
                                 encrypted; prefer or forbid RDMA, or allow it beside TLS \
                                 (plain_rdma_beside_tls)";
            let contradiction = io::Error::new(io::ErrorKind::InvalidInput, contradiction);
            ConnectError { rdma: None, tcp: Some(contradiction) }
        })?;
        let why_not_rdma = match attempts {
            Attempts::Tcp if self.rdma == Rdma::Forbid => None,
            Attempts::Tcp => Some(Error::clear_text(ALLOW_CLEAR_TEXT)),
            Attempts::Rdma | Attempts::RdmaThenTcp => match self.over_rdma(server).await {
                Ok(stream) => return Ok(Session::new(stream, None)),
                Err(error) if attempts == Attempts::Rdma => {
                    return Err(ConnectError { rdma: Some(error), tcp: None });
                }
                Err(error) => Some(error),
            },
        };
        match self.over_tcp(server).await {
            Ok(stream) => {
                let fallback =
                    why_not_rdma.map(|error| self.fabric.fell_back_to_tcp(server, error));
                Ok(Session::new(stream, fallback))
            }
            Err(tcp) => {
                let rdma = why_not_rdma.filter(|_| attempts == Attempts::RdmaThenTcp);
                Err(ConnectError { rdma, tcp: Some(tcp) })
            }
        }
    }

    async fn over_rdma(&self, server: SocketAddr) -> Result<SessionStream, Error> {
        let mut options = ConnectOptions::new().timeout(self.rdma_timeout.unwrap_or(self.timeout));
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
        let is_connected = AtomicBool::new(false);
        let connecting = async {
            let tcp = self.connect_tcp(server).await?;
            is_connected.store(true, Ordering::Relaxed);
            tcp.set_nodelay(true)?;
            enable_tcp_keepalive(&tcp);
            let Some((tls, name)) = &self.tls else { return Ok(SessionStream::Tcp(tcp)) };
            let handshake = tls.connect(name.clone(), tcp).await;
            let handshake = handshake.map_err(|error| {
                let why = tls::explain(&error);
                let name = name.to_str();
                io::Error::new(
                    error.kind(),
                    format!("TLS handshake with {server} for the name {name} failed: {why}"),
                )
            });
            Ok(SessionStream::Tls(Box::new(handshake?)))
        };
        let timed_out = || {
            // A port without TLS may never answer: the engine takes the TLS handshake for the
            // beginning of a command, and waits for the rest of the command.
            let message = match is_connected.load(Ordering::Relaxed) {
                true => format!("TLS handshake with {server} timed out; is it a TLS port?"),
                false => "connection timed out".into(),
            };
            io::Error::new(io::ErrorKind::TimedOut, message)
        };
        timeout(self.timeout, connecting).await.unwrap_or_else(|_| Err(timed_out()))
    }
}

/// Why no session was opened: the error of each transport that was tried.
#[derive(Debug)]
pub struct ConnectError {
    /// The error of RDMA, which was tried first.
    pub rdma: Option<Error>,
    /// The error of TCP, or the error for settings that contradict each other.
    pub tcp: Option<io::Error>,
}

impl ConnectError {
    /// Combines both errors into one.
    #[must_use]
    pub fn into_io(self, server: SocketAddr) -> io::Error {
        match (self.rdma, self.tcp) {
            (Some(rdma), Some(tcp)) => io::Error::new(
                tcp.kind(),
                format!("{server}: TCP: {tcp}; RDMA (tried first): {rdma}"),
            ),
            (Some(rdma), None) => rdma.into(),
            (None, Some(tcp)) => tcp,
            (None, None) => io::Error::other(format!("{server}: no transport was tried")),
        }
    }
}

impl Connector {
    async fn connect_tcp(&self, server: SocketAddr) -> io::Result<TcpStream> {
        let Some(local) = self.local else { return TcpStream::connect(server).await };
        let named = |error: io::Error| {
            let text = format!("cannot connect from {}: {error}", local.ip());
            io::Error::new(error.kind(), text)
        };
        if local.is_ipv4() != server.is_ipv4() {
            let families = format!(
                "this address and the server's address {} must both be IPv4 or both be IPv6",
                server.ip()
            );
            return Err(named(io::Error::new(io::ErrorKind::InvalidInput, families)));
        }
        let socket = if local.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.bind(local).map_err(named)?;
        socket.connect(server).await
    }
}

enum SessionStream {
    Ferrite(Stream),
    Valkey(Box<ValkeyStream>),
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection to a server that speaks RESP. Implements [`AsyncRead`] and [`AsyncWrite`].
///
/// A server may refuse a client: it sends an error and closes the connection. Over TCP, the
/// client's first write then still succeeds. Over RDMA it fails, but a session reports success all
/// the same, so that the caller goes on to read the server's error. The next write fails.
pub struct Session {
    stream: SessionStream,
    fallback: Option<Fallback>,
    failed_write: Option<io::Error>,
    has_read_all: bool,
}

impl Session {
    fn new(stream: SessionStream, fallback: Option<Fallback>) -> Self {
        Self { stream, fallback, failed_write: None, has_read_all: false }
    }

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

    /// Returns the program of the server, if the server is a Ferrite peer over RDMA.
    #[must_use]
    pub fn server_program(&self) -> Option<Program> {
        match &self.stream {
            SessionStream::Ferrite(stream) => Some(stream.link().peer_hello().program),
            _ => None,
        }
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
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        let has_room = out.remaining() > 0;
        let session = self.as_mut();
        let polled = with_stream!(session, stream => Pin::new(stream).poll_read(cx, out));
        let is_end = has_room && out.filled().len() == before;
        if is_end && matches!(polled, Poll::Ready(Ok(()))) {
            self.get_mut().has_read_all = true;
        }
        polled
    }
}

impl Session {
    /// If a write failed because the peer has closed the connection, reports success, and lets the
    /// next write return the error ([`Session`] says why). Once everything was read from the peer,
    /// returns the error at once.
    fn accept_failed(
        &mut self,
        polled: Poll<io::Result<usize>>,
        total: usize,
    ) -> Poll<io::Result<usize>> {
        match polled {
            Poll::Ready(Err(error))
                if error.kind() == io::ErrorKind::BrokenPipe && !self.has_read_all =>
            {
                self.failed_write = Some(error);
                Poll::Ready(Ok(total))
            }
            polled => polled,
        }
    }
}

impl AsyncWrite for Session {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.failed_write.take() {
            return Poll::Ready(Err(error));
        }
        let session = self.as_mut();
        let polled = with_stream!(
            session, stream => Pin::new(stream).poll_write_vectored(cx, bytes)
        );
        let total = bytes.iter().map(|slice| slice.len()).sum();
        self.get_mut().accept_failed(polled, total)
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn local_address_also_applies_to_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let server = listener.local_addr().expect("an address");
        let fabric = Fabric::system().rdma(Rdma::Forbid).build().expect("build the fabric");
        let connect = async |local: &str| {
            let local = SocketAddr::new(local.parse().expect("an address"), 0);
            Connector::new(&fabric).rdma(Rdma::Forbid).local(local).connect(server).await
        };
        let session = connect("127.0.0.2").await.expect("connect");
        let (_, peer) = listener.accept().await.expect("accept");
        assert_eq!(peer.ip().to_string(), "127.0.0.2");
        let SessionStream::Tcp(socket) = &session.stream else { panic!("not TCP") };
        assert!(rustix::net::sockopt::socket_keepalive(socket).expect("an option"));
        drop(session);
        for elsewhere in ["192.0.2.1", "::1"] {
            let error = connect(elsewhere).await.expect_err("no such local address").to_string();
            assert!(error.starts_with(&format!("cannot connect from {elsewhere}: ")), "{error}");
        }
    }
}
