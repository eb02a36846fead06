//! The client: the settings of its connections, and how it opens one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::rustls::ClientConfig;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::{Fabric, Fallback, Rdma};
use ferrite_session::{
    Connector, Host, ServerUrl, Session, SessionTransport, TransportObserver, client_config,
};
use redis::aio::{AsyncPushSender, MultiplexedConnection};
use redis::{
    AsyncConnectionConfig, ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError, RedisResult,
};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::progress::{Progress, Traffic, Watched};
use crate::tls;

/// The time limit for a wait without progress. Few commands take the server longer than this. A
/// network that moves no byte for this long is broken.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Opens connections to one server, or to the first of several that accepts. Cheap to clone.
///
/// ```no_run
/// # async fn show() -> Result<(), Box<dyn std::error::Error>> {
/// use ferrite_client::Client;
/// use ferrite_client::redis::AsyncCommands as _;
///
/// let client = Client::open("redis://10.0.0.1:6380")?;
/// let mut connection = client.connect().await?;
/// let () = connection.set("greeting", "hello").await?;
/// let greeting: String = connection.get("greeting").await?;
/// println!("{greeting} over {}", connection.transport_info().transport);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client(Arc<ClientBuilder>);

/// How a lost connection is opened again.
#[derive(Debug, Clone, Copy)]
struct Reconnect {
    /// The number of failed attempts in a row after which a command fails.
    tries: u32,
    /// The time before the second attempt. It doubles before each further attempt.
    wait: Duration,
    wait_max: Duration,
}

/// Describes the transport of a connection. A connection to a Ferrite peer may change between RDMA
/// and TCP at any time.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TransportInfo {
    /// RDMA to a Ferrite peer or a Valkey server, or TCP with or without TLS.
    pub transport: SessionTransport,
    /// The RDMA device, if the connection uses RDMA.
    pub device: Option<String>,
    /// Why the connection uses TCP although RDMA was preferred.
    pub fallback: Option<Fallback>,
}

impl TransportInfo {
    /// Describes the transport that a session uses now.
    pub(crate) fn now(observer: &TransportObserver) -> Self {
        let (device, fallback) = (observer.device(), observer.fallback());
        Self { transport: observer.transport(), device, fallback }
    }
}

/// An open connection, and the task that drives it. The task ends with the connection.
pub(crate) struct Dialed {
    pub(crate) connection: MultiplexedConnection,
    pub(crate) observer: TransportObserver,
    pub(crate) progress: Arc<Progress>,
    pub(crate) driver: JoinHandle<()>,
}

/// Builds a [`Client`].
#[derive(Clone)]
#[must_use]
pub struct ClientBuilder {
    pub(crate) connector: Connector,
    /// The servers, in the order in which they are tried.
    pub(crate) servers: Vec<Host>,
    /// TLS in which each server's certificate must be valid for that server's own name.
    tls_by_host: Option<Arc<ClientConfig>>,
    pub(crate) connect_timeout: Duration,
    pub(crate) info: RedisConnectionInfo,
    config: AsyncConnectionConfig,
    response_timeout: Option<Duration>,
    pub(crate) push_sender: Option<Arc<dyn AsyncPushSender>>,
    reconnect: Reconnect,
}

/// Returns redis-rs's own options without its limit of 500 ms for a whole reply, which is too short
/// for large values. Start from these options for [`ClientBuilder::config`].
#[must_use]
pub fn connection_config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_response_timeout(None)
}

impl Client {
    /// Creates a client for a URL, with a fabric of its own. The calling tokio runtime drives the
    /// fabric. The client uses RDMA where available, else TCP, unless the URL says otherwise.
    ///
    /// ```text
    /// redis://[[USER:]PASSWORD@]HOST[:PORT][,HOST[:PORT]]...[/DATABASE][?NAME=VALUE[&...]]
    /// ```
    ///
    /// - `redis://` (or `valkey://`) prefers RDMA. `?rdma=require` and `?rdma=forbid` change that.
    /// - `redis+rdma://` means the same, for programs that want to name RDMA.
    /// - `rediss://` is TCP with TLS, with the authorities that the system trusts
    ///   ([`ClientBuilder::tls`] sets others). RDMA is not encrypted, and is not used.
    /// - `?protocol=3` selects RESP3, which push messages need.
    /// - `HOST:PORT` without a scheme is `redis://HOST:PORT`.
    ///
    /// Whenever a connection is opened, the servers are tried in the given order, each with all its
    /// addresses. The first server that accepts is used.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid, if RDMA is required and this host cannot use it, if
    /// `rediss://` finds no cryptography or no authorities, or if there is no tokio runtime.
    pub fn open(url: &str) -> RedisResult<Self> {
        Ok(ClientBuilder::open(url)?.build())
    }

    /// Returns a builder for a client on an existing fabric, which the caller must drive. Build
    /// that fabric with [`client_config`], which makes large values faster.
    pub fn builder(fabric: &Fabric, server: SocketAddr) -> ClientBuilder {
        let name = match server {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            _ => server.ip().to_string(),
        };
        ClientBuilder::new(fabric, vec![Host { name, port: Some(server.port()) }])
    }

    /// Works like [`Client::builder`], but takes the URL of [`Client::open`].
    ///
    /// # Errors
    /// Returns an error if the URL is invalid, or if `rediss://` finds no cryptography or no
    /// authorities.
    pub fn builder_for(fabric: &Fabric, url: &str) -> RedisResult<ClientBuilder> {
        ClientBuilder::from_url(fabric, parse_url(url)?)
    }

    pub(crate) async fn dial_with_retries(&self) -> RedisResult<Dialed> {
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

    /// Opens a connection to the first server that accepts one. If a server rejects the login,
    /// returns that error without trying another server.
    pub(crate) async fn dial(&self) -> RedisResult<Dialed> {
        current_runtime()?;
        let mut failures: Vec<(String, RedisError)> = Vec::new();
        for host in &self.0.servers {
            let addresses = match resolve(host).await {
                Ok(addresses) => addresses,
                Err(error) => {
                    failures.push((host.to_string(), error.into()));
                    continue;
                }
            };
            for address in addresses {
                match self.dial_address(host, address).await {
                    Err(error) if is_connection_error(&error) => {
                        failures.push((address.to_string(), error));
                    }
                    done => return done,
                }
            }
        }
        Err(summarize(failures))
    }

    async fn dial_address(&self, host: &Host, address: SocketAddr) -> RedisResult<Dialed> {
        let session = self.connector_for(host)?.connect(address).await?;
        self.log_in(address, session, self.0.config.clone(), Arc::default()).await
    }

    /// Returns the connector for a server of this name.
    pub(crate) fn connector_for(&self, host: &Host) -> RedisResult<Connector> {
        let ClientBuilder { connector, tls_by_host, .. } = &*self.0;
        Ok(match tls_by_host {
            Some(tls) => {
                let name = tls::server_name(host.certificate_name())?;
                connector.clone().tls(Arc::clone(tls), name)
            }
            None => connector.clone(),
        })
    }

    /// Begins redis-rs's protocol on a session: login, database and version of RESP.
    pub(crate) async fn log_in(
        &self,
        address: SocketAddr,
        session: Session,
        config: AsyncConnectionConfig,
        traffic: Arc<Traffic>,
    ) -> RedisResult<Dialed> {
        let observer = session.observer();
        // The login has the time limit of connecting, not that of replies. A server that accepts
        // the connection and never answers must not delay the next server for long.
        let (session, progress) = Watched::new(session, traffic);
        let login = MultiplexedConnection::new_with_config(&self.0.info, session, config);
        let login = timeout(self.0.connect_timeout, login).await.map_err(|_| {
            let limit = self.0.connect_timeout;
            let message =
                format!("{address} accepted the connection, but did not answer within {limit:?}");
            io::Error::new(io::ErrorKind::TimedOut, message)
        });
        let (connection, driver) = login??;
        Ok(Dialed { connection, observer, progress, driver: tokio::spawn(driver) })
    }

    /// Returns the settings.
    pub(crate) fn settings(&self) -> &ClientBuilder {
        &self.0
    }

    /// Returns the time between the first two attempts to open a connection.
    pub(crate) fn first_wait(&self) -> Duration {
        self.0.reconnect.wait
    }

    /// Returns the longest time between two attempts to open a connection.
    pub(crate) fn longest_wait(&self) -> Duration {
        self.0.reconnect.wait_max
    }

    pub(crate) fn without_response_timeout(&self) -> Self {
        let mut settings = ClientBuilder::clone(&self.0);
        settings.config = settings.config.set_response_timeout(None);
        settings.response_timeout = None;
        Self(Arc::new(settings))
    }

    /// Returns the time after which a connection without progress is given up.
    pub(crate) fn response_timeout(&self) -> Option<Duration> {
        self.0.response_timeout
    }

    /// Returns the receiver of push messages, if the builder has set one.
    pub(crate) fn push_sender(&self) -> Option<&Arc<dyn AsyncPushSender>> {
        self.0.push_sender.as_ref()
    }

    pub(crate) fn is_resp3(&self) -> bool {
        self.0.info.protocol() != ProtocolVersion::RESP2
    }

    pub(crate) fn db(&self) -> i64 {
        self.0.info.db()
    }
}

/// Returns whether an error means that the connection failed. An error reply of the server does not
/// mean that, even for AUTH: redis-rs would reconnect after a rejected AUTH, only to be rejected
/// again.
pub(crate) fn is_connection_error(error: &RedisError) -> bool {
    if error.kind() == ErrorKind::AuthenticationFailed {
        return false;
    }
    error.is_io_error() || error.is_connection_dropped() || error.is_unrecoverable_error()
}

/// Returns the tokio runtime of the caller. Without one, tokio's own functions would panic.
pub(crate) fn current_runtime() -> RedisResult<Handle> {
    Handle::try_current().map_err(|_| {
        let message = "no tokio runtime: ferrite-client works only inside one \
                       (#[tokio::main], or Runtime::block_on)";
        RedisError::from((ErrorKind::InvalidClientConfig, message))
    })
}

fn parse_url(text: &str) -> RedisResult<ServerUrl> {
    let with_scheme = if text.contains("://") { text } else { &format!("redis://{text}") };
    let parsed = with_scheme.parse::<ServerUrl>().map_err(|error| error.to_string());
    let named = parsed.and_then(|url| match url.hosts.is_empty() {
        true => Err("no host is given".to_owned()),
        false => Ok(url),
    });
    named.map_err(|error| {
        RedisError::from((ErrorKind::InvalidClientConfig, "invalid server URL", error))
    })
}

/// Returns the addresses of a host, IPv4 first: a name may have addresses of both kinds, and most
/// RoCE networks use IPv4.
pub(crate) async fn resolve(host: &Host) -> io::Result<Vec<SocketAddr>> {
    let found = tokio::net::lookup_host((host.name.as_str(), host.port_or_default())).await;
    let mut addresses: Vec<_> = found
        .map_err(|error| {
            io::Error::new(error.kind(), format!("cannot resolve {}: {error}", host.name))
        })?
        .collect();
    addresses.sort_by_key(SocketAddr::is_ipv6);
    Ok(addresses)
}

/// Returns a single failure unchanged. Combines several failures into one error that names each
/// server with its cause.
pub(crate) fn summarize(mut failures: Vec<(String, RedisError)>) -> RedisError {
    if failures.len() == 1 {
        return failures.remove(0).1;
    }
    let causes: Vec<_> = failures.iter().map(|(server, why)| format!("{server}: {why}")).collect();
    let message = format!("no server can be reached: {}", causes.join("; "));
    io::Error::new(io::ErrorKind::NotConnected, message).into()
}

impl ClientBuilder {
    fn new(fabric: &Fabric, servers: Vec<Host>) -> Self {
        Self {
            connector: Connector::new(fabric),
            servers,
            tls_by_host: None,
            connect_timeout: fabric.config().connection_timeout,
            info: RedisConnectionInfo::default(),
            config: connection_config(),
            response_timeout: Some(RESPONSE_TIMEOUT),
            push_sender: None,
            reconnect: Reconnect {
                tries: 6,
                wait: Duration::from_millis(50),
                wait_max: Duration::from_secs(2),
            },
        }
    }

    /// Returns a builder for the URL of [`Client::open`], with a fabric of its own. The calling
    /// tokio runtime drives the fabric.
    ///
    /// # Errors
    /// Fails like [`Client::open`].
    pub fn open(url: &str) -> RedisResult<Self> {
        let url = parse_url(url)?;
        let runtime = current_runtime()?;
        let mut fabric = Fabric::system().config(client_config());
        if let Some(rdma) = url.rdma {
            fabric = fabric.rdma(rdma);
        }
        let fabric = fabric.build().map_err(|error| RedisError::from(io::Error::from(error)))?;
        runtime.spawn(fabric.drive());
        Self::from_url(&fabric, url)
    }

    fn from_url(fabric: &Fabric, url: ServerUrl) -> RedisResult<Self> {
        let ServerUrl { user, password, hosts, database, is_tls, rdma, protocol, .. } = url;
        let mut builder = Self::new(fabric, hosts);
        if is_tls {
            builder.tls_by_host = Some(tls::system_config()?);
        }
        if let Some(rdma) = rdma {
            builder = builder.rdma(rdma);
        }
        let mut info = RedisConnectionInfo::default().set_db(database.unwrap_or(0).into());
        if let Some(user) = user {
            info = info.set_username(user);
        }
        if let Some(password) = password {
            info = info.set_password(password);
        }
        if protocol == Some(3) {
            info = info.set_protocol(ProtocolVersion::RESP3);
        }
        Ok(builder.info(info))
    }

    /// Sets whether connections may, must or must not use RDMA.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.connector = self.connector.rdma(rdma);
        self
    }

    /// Sets the local address to connect from. Over RDMA it selects the device.
    pub fn local(mut self, local: SocketAddr) -> Self {
        self.connector = self.connector.local(local);
        self
    }

    /// Sets the time limit for connecting. It applies to RDMA, to TCP and to the login separately.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connector = self.connector.timeout(timeout);
        self.connect_timeout = timeout;
        self
    }

    /// Enables TLS over TCP (`rediss`). The server's certificate must be valid for this name.
    ///
    /// RDMA is not encrypted. If RDMA is preferred, it is not tried, and
    /// [`TransportInfo::fallback`](crate::TransportInfo::fallback) reports that. If RDMA is
    /// required, connecting fails. [`ClientBuilder::plain_rdma_beside_tls`] allows RDMA in both
    /// cases.
    ///
    /// Take `rustls` from [`ferrite_fabric::rustls`]. The caller chooses the cryptography by a
    /// feature of rustls, `ring` or `aws-lc-rs`.
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.connector = self.connector.tls(config, name);
        self.tls_by_host = None;
        self
    }

    /// Allows RDMA, which is not encrypted, although TLS is configured for TCP. Use this only in
    /// networks where no untrusted party can eavesdrop.
    pub fn plain_rdma_beside_tls(mut self) -> Self {
        self.connector = self.connector.plain_rdma_beside_tls();
        self
    }

    /// Sets the user, the password, the database, and RESP2 or RESP3.
    pub fn info(mut self, info: RedisConnectionInfo) -> Self {
        self.info = info;
        self
    }

    /// Sets how long a command waits for its reply while the connection makes no progress (default
    /// 1 min); `None` for no limit. If no byte arrives or leaves for this time, the command fails,
    /// and later commands use a new connection. A large value may take longer, as long as bytes
    /// keep arriving.
    pub fn response_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// Sets RESP3 and the receiver of push messages, such as the messages of subscriptions.
    ///
    /// If the server refuses to restore a subscription after a reconnect, the receiver gets a
    /// message of the kind `Unsubscribe`, `PUnsubscribe` or `SUnsubscribe` with two texts: the name
    /// and the reason.
    pub fn push_sender(mut self, sender: impl AsyncPushSender) -> Self {
        let sender: Arc<dyn AsyncPushSender> = Arc::new(sender);
        self.info = self.info.set_protocol(ProtocolVersion::RESP3);
        self.config = self.config.set_push_sender(Arc::clone(&sender));
        self.push_sender = Some(sender);
        self
    }

    /// Replaces all of redis-rs's own options, including the receiver of push messages. Start from
    /// [`connection_config`]: redis-rs's own limit for a whole reply is 500 ms, which is too short
    /// for large values.
    pub fn config(mut self, config: AsyncConnectionConfig) -> Self {
        self.config = config;
        self
    }

    /// Sets the number of attempts to open a lost connection before a command fails, and the time
    /// before the second attempt (default 6 and 50 ms). The time doubles with each attempt, up to 2
    /// s.
    pub fn reconnect(mut self, tries: u32, wait: Duration) -> Self {
        (self.reconnect.tries, self.reconnect.wait) = (tries, wait);
        self
    }

    /// Builds the client.
    #[must_use]
    pub fn build(self) -> Client {
        Client(Arc::new(self))
    }
}

impl std::fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientBuilder").field("servers", &self.servers).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("servers", &self.0.servers).finish_non_exhaustive()
    }
}
