//! Where connections come from.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{Error, Fabric, Rdma};
use ferrite_session::{Connector, client_config};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisConnectionInfo, RedisError, RedisResult};
use tokio::time::sleep;

use crate::connection::{Connection, TransportInfo};
use crate::pool::Pool;

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
/// println!("{} over {}", connection.get::<_, String>("greeting").await?, connection.transport_info().transport);
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

/// How a connection that is lost is opened again.
#[derive(Debug, Clone, Copy)]
struct Reconnect {
    /// Tries in a row, after which a command fails.
    tries: u32,
    /// Before the second; twice as long before each further one.
    wait: Duration,
    wait_max: Duration,
}

/// Settings of a [`Client`].
#[must_use]
pub struct ClientBuilder {
    connector: Connector,
    server: SocketAddr,
    info: RedisConnectionInfo,
    config: AsyncConnectionConfig,
    reconnect: Reconnect,
}

impl Client {
    /// With a fabric of its own, which the calling tokio runtime drives: RDMA where there is some,
    /// else TCP.
    ///
    /// # Errors
    /// The fabric cannot be made.
    pub fn open(server: SocketAddr) -> Result<Self, Error> {
        let fabric = Fabric::system().config(client_config()).build()?;
        tokio::spawn(fabric.drive());
        Ok(Self::builder(&fabric, server).build())
    }

    /// On a fabric that somebody drives. One made for this has [`client_config`]: large values are
    /// faster by it.
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

    /// Opens a connection. Its clones share it: their commands are under way together.
    ///
    /// # Errors
    /// The server is not to be had, or does not let us in.
    pub async fn connect(&self) -> RedisResult<Connection> {
        let (connection, transport_info) = self.dial().await?;
        Ok(Connection::new(self.clone(), connection, transport_info))
    }

    /// A pool of up to `size` connections (at least one), each of which is opened when it is first
    /// needed.
    #[must_use]
    pub fn pool(&self, size: usize) -> Pool {
        Pool::new(self, size)
    }

    /// As [`Client::connect`], as often as a lost connection would be tried.
    pub(crate) async fn connect_patiently(&self) -> RedisResult<Connection> {
        let (connection, transport_info) = self.dial_patiently().await?;
        Ok(Connection::new(self.clone(), connection, transport_info))
    }

    pub(crate) async fn dial_patiently(
        &self,
    ) -> RedisResult<(MultiplexedConnection, TransportInfo)> {
        let Reconnect { tries, mut wait, wait_max } = self.0.reconnect;
        let mut tried = 1;
        loop {
            match self.dial().await {
                Err(error) if tried < tries && is_of_the_connection(&error) => tried += 1,
                done => return done,
            }
            sleep(wait).await;
            wait = (wait * 2).min(wait_max);
        }
    }

    async fn dial(&self) -> RedisResult<(MultiplexedConnection, TransportInfo)> {
        let Settings { connector, server, info, config, .. } = &*self.0;
        let session = connector.connect(*server).await?;
        let transport_info = TransportInfo {
            transport: session.transport(),
            device: session.device(),
            fallback: session.fallback().cloned(),
        };
        let made = MultiplexedConnection::new_with_config(info, session, config.clone()).await;
        let (connection, driver) = made?;
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

/// Whether an error is the connection's rather than an answer.
pub(crate) fn is_of_the_connection(error: &RedisError) -> bool {
    error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error()
}

impl ClientBuilder {
    /// Whether RDMA may, must or must not carry connections.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.connector = self.connector.rdma(rdma);
        self
    }

    /// The local address for RDMA, which chooses the device.
    pub fn local(mut self, local: SocketAddr) -> Self {
        self.connector = self.connector.local(local);
        self
    }

    /// How long opening may take on each way.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connector = self.connector.timeout(timeout);
        self
    }

    /// TLS on TCP (`rediss`), with a server whose certificate is for this name. RDMA encrypts
    /// nothing: with this it is not tried where it is preferred
    /// ([`TransportInfo::fallback`](crate::TransportInfo::fallback) says so) and connecting fails
    /// where it is required, unless [`ClientBuilder::plain_rdma_beside_tls`] allows it.
    ///
    /// `rustls` is [`ferrite_fabric::rustls`]; its cryptography is the caller's choice (its feature
    /// `ring` or `aws-lc-rs`).
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.connector = self.connector.tls(config, name);
        self
    }

    /// Allows RDMA, which is not encrypted, although TLS is set for TCP: for networks that only
    /// friends can listen to.
    pub fn plain_rdma_beside_tls(mut self) -> Self {
        self.connector = self.connector.plain_rdma_beside_tls();
        self
    }

    /// User, password, database, RESP2 or RESP3.
    pub fn info(mut self, info: RedisConnectionInfo) -> Self {
        self.info = info;
        self
    }

    /// redis-rs's own settings: how long an answer may take, who gets pushes.
    pub fn config(mut self, config: AsyncConnectionConfig) -> Self {
        self.config = config;
        self
    }

    /// Tries to open a lost connection before a command fails, and the time before the second; it
    /// doubles up to 2 s. 6 and 50 ms.
    pub fn reconnect(mut self, tries: u32, wait: Duration) -> Self {
        (self.reconnect.tries, self.reconnect.wait) = (tries, wait);
        self
    }

    /// The client.
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
