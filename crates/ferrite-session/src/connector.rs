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
//! A link to a Ferrite peer outlives its RDMA path, if both sides prefer RDMA and no TLS is
//! configured: it continues over TCP, and returns to RDMA. A session that begins over TCP is plain
//! RESP, which engines and gateways both understand, and stays on TCP. If the caller has configured
//! TLS, the session is RESP within TLS. RDMA is not encrypted, so the connector then does not use
//! RDMA, unless the caller allows it explicitly. If RDMA was preferred, [`Session::fallback`]
//! reports why it is not used.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{Attempts, ConnectOptions, Connected, Error, Fabric, Fallback, Rdma, Stream};
use ferrite_proto::Role;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::session::{Session, SessionStream};
use crate::stream::{ValkeyConfig, ValkeyStream};
use crate::tcp_keepalive::enable_tcp_keepalive;
use crate::tls;

/// The fix that the error names if RDMA is not tried because TLS is configured.
const ALLOW_CLEAR_TEXT: &str = "allow RDMA beside TLS (plain_rdma_beside_tls) if all who \
                                can listen on the network are trusted, or forbid RDMA";

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
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
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
        self.tls = Some((config, name));
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
        let attempts = self.attempts(self.rdma)?;
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

    /// Opens a session over RDMA, or fails. If RDMA is preferred and no TLS is configured, the
    /// session may continue over TCP later. For callers that use another address for TCP than for
    /// RDMA.
    ///
    /// # Errors
    /// Returns an error if RDMA is forbidden or fails, or if TLS is configured without
    /// [`Connector::plain_rdma_beside_tls`].
    pub async fn open_over_rdma(&self, server: SocketAddr) -> Result<Session, ConnectError> {
        self.attempts(Rdma::Require)?;
        match self.over_rdma(server).await {
            Ok(stream) => Ok(Session::new(stream, None)),
            Err(error) => Err(ConnectError { rdma: Some(error), tcp: None }),
        }
    }

    /// Returns the transports that a policy allows with the TLS of this connector.
    fn attempts(&self, rdma: Rdma) -> Result<Attempts, ConnectError> {
        let must_encrypt = self.tls.is_some() && !self.allows_plain_rdma;
        rdma.attempts(must_encrypt).map_err(|_| {
            let contradiction = "TLS is configured and RDMA is required, but RDMA is not \
                                 encrypted; prefer or forbid RDMA, or allow it beside TLS \
                                 (plain_rdma_beside_tls)";
            let contradiction = io::Error::new(io::ErrorKind::InvalidInput, contradiction);
            ConnectError { rdma: None, tcp: Some(contradiction) }
        })
    }

    async fn over_rdma(&self, server: SocketAddr) -> Result<SessionStream, Error> {
        let mut options = ConnectOptions::new()
            .rdma(self.rdma)
            .timeout(self.rdma_timeout.unwrap_or(self.timeout));
        if let Some(local) = self.local {
            options = options.local(local);
        }
        if let Some((tls, name)) = &self.tls {
            // With TLS, the link never migrates to TCP.
            options = options.tls(Arc::clone(tls), name.clone());
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
            let handshake = TlsConnector::from(Arc::clone(tls)).connect(name.clone(), tcp).await;
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
        let SessionStream::Tcp(socket) = session.stream() else {
            panic!("the session does not use TCP")
        };
        assert!(rustix::net::sockopt::socket_keepalive(socket).expect("an option"));
        drop(session);
        for elsewhere in ["192.0.2.1", "::1"] {
            let error = connect(elsewhere).await.expect_err("no such local address").to_string();
            assert!(error.starts_with(&format!("cannot connect from {elsewhere}: ")), "{error}");
        }
    }
}
