//! The settings of a client for clusters, and how it connects.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::cluster_read_routing::{RandomReplicaStrategy, RoundRobinReplicaStrategy};
use redis::{
    ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, RedisConnectionInfo, RedisResult,
};

use super::connection::ClusterConnection;
use super::node::Node;
use super::shared::Shared;
use crate::client::{ClientBuilder, current_runtime};

/// How often redis-rs tries to find a node before it fails. Then the cluster connection decides
/// whether it tries again.
const RETRIES: u32 = 8;
/// The range of redis-rs's pauses, in milliseconds.
const WAITS_MS: [u64; 2] = [10, 500];
/// The default of [`ClusterClientBuilder::retry_for`], which is longer than a failover takes: an
/// engine's default for `cluster-node-timeout` is 15 s, and an election takes a second or two.
const RETRY_FOR: Duration = Duration::from_secs(30);

/// Opens connections to a cluster. Cheap to clone.
///
/// ```no_run
/// # async fn show() -> ferrite_client::redis::RedisResult<()> {
/// use ferrite_client::ClusterClient;
/// use ferrite_client::redis::AsyncCommands as _;
///
/// // Some of the nodes; the others are found.
/// let client = ClusterClient::open("redis://10.0.0.1:6380,10.0.0.2:6380")?;
/// let mut connection = client.connect().await?;
/// let () = connection.set("greeting", "hello").await?;
/// for node in connection.transports() {
///     println!("{}: {}", node.address, node.transport_info.transport);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ClusterClient(Arc<ClusterClientBuilder>);

/// Which nodes serve commands that only read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadFrom {
    /// The primary, which has all acknowledged writes.
    #[default]
    Primary,
    /// A random replica of the slot, or the primary if it has none. A replica may be behind.
    Replica,
    /// The replicas of the slot in turn, or the primary if it has none.
    ReplicasInTurn,
}

/// Builds a [`ClusterClient`].
#[derive(Clone)]
#[must_use]
pub struct ClusterClientBuilder {
    client: ClientBuilder,
    read_from: ReadFrom,
    retry_for: Duration,
}

impl ClientBuilder {
    /// Returns a builder for a client of the cluster that the servers belong to. The servers may be
    /// any nodes, at the port of the engine or at the port of the module.
    ///
    /// The options for reconnects and [`ClientBuilder::config`] are not used: redis-rs's cluster
    /// client opens connections again ([`ClusterClientBuilder::retry_for`]).
    pub fn cluster(self) -> ClusterClientBuilder {
        let read_from = ReadFrom::default();
        ClusterClientBuilder { client: self, read_from, retry_for: RETRY_FOR }
    }
}

impl ClusterClient {
    /// Creates a client for the URL of [`Client::open`](crate::Client::open), which names one or
    /// more nodes of a cluster, with a fabric of its own. The calling tokio runtime drives the
    /// fabric.
    ///
    /// With `?rdma=require`, the ports must be those of modules, and every node must have the
    /// module.
    ///
    /// # Errors
    /// Fails like [`Client::open`](crate::Client::open).
    pub fn open(url: &str) -> RedisResult<Self> {
        Ok(ClientBuilder::open(url)?.cluster().build())
    }

    /// Connects to the cluster: to the first of the servers that answers, and then to all nodes.
    ///
    /// # Errors
    /// Returns an error if no server answers, if the login is rejected, or if the servers are no
    /// nodes of a cluster.
    pub async fn connect(&self) -> RedisResult<ClusterConnection> {
        current_runtime()?;
        let ClusterClientBuilder { client, read_from, retry_for } = &*self.0;
        let reads_replicas = *read_from != ReadFrom::Primary;
        let shared = Shared::new(client.clone().build(), *retry_for, reads_replicas);
        let info = RedisConnectionInfo::default()
            .set_username(shared.user())
            .set_protocol(client.info.protocol());
        let server = |(name, port): (String, u16)| -> RedisResult<ConnectionInfo> {
            let server = ConnectionAddr::Tcp(name, port).into_connection_info()?;
            Ok(server.set_redis_settings(info.clone()))
        };
        let servers = client.servers.iter().map(|host| (host.name.clone(), host.port_or_default()));
        let servers = servers.map(server).collect::<RedisResult<Vec<_>>>()?;
        let [shortest, longest] = WAITS_MS;
        let mut builder = redis::cluster::ClusterClientBuilder::new(servers)
            .retries(RETRIES)
            .min_retry_wait(shortest)
            .max_retry_wait(longest)
            .overall_response_timeout(None);
        builder = match read_from {
            ReadFrom::Primary => builder,
            ReadFrom::Replica => builder.read_routing_strategy(RandomReplicaStrategy),
            ReadFrom::ReplicasInTurn => {
                builder.read_routing_strategy(RoundRobinReplicaStrategy::default())
            }
        };
        if let Some(sender) = &client.push_sender {
            let sender = Arc::clone(sender);
            builder = builder.push_sender(move |push| sender.send(push));
        }
        let inner = builder.build()?.get_async_generic_connection::<Node>().await?;
        Ok(ClusterConnection::new(inner, shared))
    }
}

impl ClusterClientBuilder {
    /// Sets which nodes serve commands that only read (default: the primary).
    pub fn read_from(mut self, read_from: ReadFrom) -> Self {
        self.read_from = read_from;
        self
    }

    /// Sets for how long a command or pipeline is tried again while the cluster cannot serve it, or
    /// while its node cannot be reached (default 30 s, at least 1 s). That should be longer than a
    /// failover takes.
    /// All redirects, connects and retries of a command share this time. The pause between two
    /// attempts grows from 10 ms to 0.5 s.
    ///
    /// A command that was sent waits for its reply as long as the connection makes progress
    /// ([`ClientBuilder::response_timeout`]).
    pub fn retry_for(mut self, time: Duration) -> Self {
        self.retry_for = time;
        self
    }

    /// Builds the client.
    #[must_use]
    pub fn build(self) -> ClusterClient {
        ClusterClient(Arc::new(self))
    }
}

impl fmt::Debug for ClusterClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterClientBuilder")
            .field("client", &self.client)
            .field("read_from", &self.read_from)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ClusterClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClusterClient").field(&self.0).finish()
    }
}
