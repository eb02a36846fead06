//! The client: the settings of its connections, and how one is opened.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{Error, Fabric, Fallback, Rdma};
use ferrite_session::{Connector, SessionTransport, client_config};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo, RedisError, RedisResult};
use tokio::time::sleep;

/// Opens connections to one server. Cheap to clone.
///
/// ```no_run
/// # async fn show() -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_client::Client;
/// use ferrite_client::redis::AsyncCommands as _;
///
/// let client = Client::open("10.0.0.1:6380".parse()?)?;
/// let mut connection = client.connect().await?;
/// let () = connection.set("greeting", "hello").await?;
/// let greeting: String = connection.get("greeting").await?;
/// println!("{greeting} over {}", connection.transport_info().transport);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client(Arc<Settings>);

#[derive(Clone)]
struct Settings {
    connector: Connector,
    server: SocketAddr,
    info: RedisConnectionInfo,
    config: AsyncConnectionConfig,
    reconnect: Reconnect,
}

/// How a lost connection is opened again.
#[derive(Debug, Clone, Copy)]
struct Reconnect {
    /// The number of attempts in a row, after which a command fails.
    tries: u32,
    /// The time before the second attempt. It doubles before each further one.
    wait: Duration,
    wait_max: Duration,
}

/// Describes the transport of a connection.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TransportInfo {
    /// RDMA to a Ferrite peer or a Valkey server, or TCP, with TLS or without.
    pub transport: SessionTransport,
    /// The RDMA device, if the connection uses RDMA.
    pub device: Option<String>,
    /// Why the connection uses TCP although RDMA was preferred.
    pub fallback: Option<Fallback>,
}

/// Builds a [`Client`].
#[must_use]
pub struct ClientBuilder {
    connector: Connector,
    server: SocketAddr,
    info: RedisConnectionInfo,
    config: AsyncConnectionConfig,
    reconnect: Reconnect,
}

impl Client {
    /// Creates a client with a fabric of its own, which the calling tokio runtime drives. It uses
    /// RDMA where available, else TCP.
    ///
    /// # Errors
    /// Returns an error if the fabric cannot be built.
    ///
    /// # Panics
    /// Panics if there is no tokio runtime.
    pub fn open(server: SocketAddr) -> Result<Self, Error> {
        let fabric = Fabric::system().config(client_config()).build()?;
        tokio::spawn(fabric.drive());
        Ok(Self::builder(&fabric, server).build())
    }

    /// Returns a builder for a client on an existing fabric, which the caller must drive. A fabric
    /// that is built for this should use [`client_config`], which makes large values faster.
    pub fn builder(fabric: &Fabric, server: SocketAddr) -> ClientBuilder {
        ClientBuilder {
            connector: Connector::new(fabric),
            server,
            info: RedisConnectionInfo::default(),
            config: AsyncConnectionConfig::new(),
            reconnect: Reconnect {
                tries: 6,
                wait: Duration::from_millis(50),
                wait_max: Duration::from_secs(2),
            },
        }
    }

    pub(crate) async fn dial_with_retries(
        &self,
    ) -> RedisResult<(MultiplexedConnection, TransportInfo)> {
        let Reconnect { tries, mut wait, wait_max } = self.0.reconnect;
        let mut tried = 1;
        loop {
            match self.dial().await {
                Err(error) if tried < tries && is_connection_error(&error) => tried += 1,
                done => return done,
            }
            sleep(wait).await;
            wait = (wait * 2).min(wait_max);
        }
    }

    pub(crate) async fn dial(&self) -> RedisResult<(MultiplexedConnection, TransportInfo)> {
        let Settings { connector, server, info, config, .. } = &*self.0;
        let session = connector.connect(*server).await?;
        let transport_info = TransportInfo {
            transport: session.transport(),
            device: session.device(),
            fallback: session.fallback().cloned(),
        };
        let connected = MultiplexedConnection::new_with_config(info, session, config.clone()).await;
        let (connection, driver) = connected?;
        tokio::spawn(driver);
        Ok((connection, transport_info))
    }

    pub(crate) fn without_response_timeout(&self) -> Self {
        let mut settings = Settings::clone(&self.0);
        settings.config = settings.config.set_response_timeout(None);
        Self(Arc::new(settings))
    }

    pub(crate) fn db(&self) -> i64 {
        self.0.info.db()
    }
}

/// Returns whether an error means that the connection failed. Other errors are replies of the
/// server.
pub(crate) fn is_connection_error(error: &RedisError) -> bool {
    error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error()
}

impl ClientBuilder {
    /// Sets whether connections may, must or must not use RDMA.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.connector = self.connector.rdma(rdma);
        self
    }

    /// Sets the local address for RDMA, which selects the device.
    pub fn local(mut self, local: SocketAddr) -> Self {
        self.connector = self.connector.local(local);
        self
    }

    /// Sets the time limit for connecting, separately for RDMA and for TCP.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connector = self.connector.timeout(timeout);
        self
    }

    /// Enables TLS over TCP (`rediss`), with a server whose certificate is valid for this name.
    ///
    /// RDMA is not encrypted. If RDMA is preferred, it is not tried, and
    /// [`TransportInfo::fallback`](crate::TransportInfo::fallback) reports that. If RDMA is
    /// required, connecting fails. [`ClientBuilder::plain_rdma_beside_tls`] allows RDMA in both
    /// cases.
    ///
    /// `rustls` is [`ferrite_fabric::rustls`]. The caller chooses its cryptography (its feature
    /// `ring` or `aws-lc-rs`).
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.connector = self.connector.tls(config, name);
        self
    }

    /// Allows RDMA, which is not encrypted, although TLS is configured for TCP. Meant for networks
    /// where nobody untrusted can listen.
    pub fn plain_rdma_beside_tls(mut self) -> Self {
        self.connector = self.connector.plain_rdma_beside_tls();
        self
    }

    /// Sets the user, the password, the database, and RESP2 or RESP3.
    pub fn info(mut self, info: RedisConnectionInfo) -> Self {
        self.info = info;
        self
    }

    /// Sets redis-rs's own options, such as the response timeout and the receiver of push messages.
    pub fn config(mut self, config: AsyncConnectionConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets how often a lost connection is tried before a command fails, and the time before the
    /// second attempt (default 6 and 50 ms). The time doubles with each attempt, up to 2 s.
    pub fn reconnect(mut self, tries: u32, wait: Duration) -> Self {
        (self.reconnect.tries, self.reconnect.wait) = (tries, wait);
        self
    }

    /// Builds the client.
    #[must_use]
    pub fn build(self) -> Client {
        let Self { connector, server, info, config, reconnect } = self;
        Client(Arc::new(Settings { connector, server, info, config, reconnect }))
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("server", &self.0.server).finish_non_exhaustive()
    }
}
