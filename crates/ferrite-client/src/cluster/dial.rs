//! Opens the connection to one node: over RDMA to the node's module, or over TCP to its engine.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_fabric::{Fallback, Rdma};
use ferrite_session::{ConnectError, Connector, Host, Session, SessionTransport};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Pipeline, RedisError, RedisResult, Value};
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

use super::directory::{Way, is_rdma, own_endpoints};
use super::shared::Shared;
use crate::client::{Client, Dialed, is_connection_error, resolve, summarize};
use crate::progress::Progress;

/// An open connection, and the task that drives it. The task ends with the connection.
pub(super) struct Opened {
    pub(super) connection: MultiplexedConnection,
    pub(super) progress: Arc<Progress>,
    pub(super) driver: JoinHandle<()>,
    /// The transport with which the connection was opened.
    transport: SessionTransport,
}

/// Opens a connection to one node.
pub(super) struct Dialer<'a> {
    pub(super) shared: &'a Shared,
    pub(super) host: &'a Host,
    pub(super) config: &'a AsyncConnectionConfig,
}

/// Why a module was not reached over RDMA.
enum NoRdma {
    /// RDMA to this address failed, or the server accepted it and did not answer the login.
    Failed(SocketAddr, ferrite_fabric::Error),
    /// The server refused the login, or the settings allow no RDMA.
    Refused(RedisError),
}

impl Dialer<'_> {
    /// Opens a connection on which commands can run.
    pub(super) async fn open(&self) -> RedisResult<Opened> {
        let opened = self.dial().await?;
        if self.shared.reads_replicas {
            // A replica then serves commands that only read. A primary ignores it.
            let mut readonly = Pipeline::with_capacity(1);
            readonly.cmd("READONLY");
            opened.ask(&readonly, self.shared.client()).await?;
        }
        Ok(opened)
    }

    async fn dial(&self) -> RedisResult<Opened> {
        let policy = self.shared.policy();
        let way = self.shared.directory().way_to(self.host);
        match (way, policy) {
            (_, Rdma::Forbid) => self.dial_engine(Rdma::Forbid, None).await,
            // A server that was given to the client may be a module.
            (Way::Unknown, _) => {
                let opened = self.dial_engine(policy, None).await?;
                Ok(self.upgrade(opened).await)
            }
            (Way::Engine { id }, Rdma::Require) => {
                self.ask_for_endpoints().await;
                let way = self.shared.directory().way_to(self.host);
                if let Way::Rdma { id, endpoints } = way {
                    return self.require_rdma(&id, &endpoints).await;
                }
                let why = "its module is not loaded, has no RDMA, or has not announced itself yet; \
                           load ferrite.so there, or prefer RDMA instead of requiring it";
                Err(self.without_rdma(&id, why))
            }
            // The list of endpoints may have come from a node that had not heard of this one.
            (Way::Engine { .. }, _) => {
                let opened = self.dial_engine(Rdma::Forbid, None).await?;
                Ok(self.upgrade(opened).await)
            }
            (Way::Rdma { id, endpoints }, Rdma::Require) => {
                self.require_rdma(&id, &endpoints).await
            }
            (Way::Rdma { endpoints, .. }, _) => match self.dial_rdma(&endpoints).await {
                Ok(opened) => Ok(opened),
                Err(NoRdma::Refused(error)) => Err(error),
                Err(NoRdma::Failed(endpoint, error)) => {
                    let fallback = self.connector()?.fell_back_to_tcp(endpoint, error);
                    self.dial_engine(Rdma::Forbid, Some(fallback)).await
                }
            },
        }
    }

    async fn require_rdma(&self, id: &str, endpoints: &[Host]) -> RedisResult<Opened> {
        self.dial_rdma(endpoints).await.map_err(|error| match error {
            NoRdma::Refused(error) => error,
            // The node may be down, so another attempt may succeed.
            NoRdma::Failed(_, error) => {
                let text = self.without_rdma(id, &error.to_string()).to_string();
                io::Error::new(io::ErrorKind::NotConnected, text).into()
            }
        })
    }

    /// Asks a node whose module is known for the endpoints of all nodes.
    async fn ask_for_endpoints(&self) {
        let known = self.shared.directory().all_endpoints();
        let mut ask = Pipeline::with_capacity(1);
        ask.cmd("FERRITE").arg("ENDPOINTS");
        let until = Instant::now() + self.rdma_time();
        for endpoint in known {
            if Instant::now() >= until {
                return;
            }
            let asked = [endpoint];
            let Ok(opened) = self.dial_rdma(&asked).await else { continue };
            if let Ok(replies) = opened.ask(&ask, self.shared.client()).await {
                return self.shared.directory().note_endpoints(&replies[0], &asked[0]);
            }
        }
    }

    fn connector(&self) -> RedisResult<Connector> {
        self.shared.client().connector_for(self.host)
    }

    /// Connects to the address that redis-rs has asked for.
    async fn dial_engine(&self, policy: Rdma, fallback: Option<Fallback>) -> RedisResult<Opened> {
        let connector = self.connector()?.rdma(policy);
        let mut failures = Vec::new();
        for address in resolve(self.host).await? {
            match connector.connect(address).await {
                Ok(session) => return self.log_in(address, session, fallback).await,
                Err(error) => failures.push((address.to_string(), error.into())),
            }
        }
        Err(summarize(failures))
    }

    /// Returns how long RDMA to all endpoints of a node may take: a quarter of the time for which a
    /// command is tried, and at most the time limit for connecting. The rest remains for TCP.
    fn rdma_time(&self) -> Duration {
        self.shared.client().settings().connect_timeout.min(self.shared.retry_for / 4)
    }

    /// Logs in at the first of a module's addresses that accepts RDMA and answers. An address that
    /// does not answer leaves an equal part of the time to each of the others.
    async fn dial_rdma(&self, endpoints: &[Host]) -> Result<Opened, NoRdma> {
        let connector = self.connector().map_err(NoRdma::Refused)?;
        let until = Instant::now() + self.rdma_time();
        let mut addresses = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints {
            addresses
                .extend(resolve(endpoint).await.map_err(|error| NoRdma::Refused(error.into()))?);
        }
        let mut failure = None;
        for (index, address) in addresses.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            let share = part(left, addresses.len() - index);
            let share_ends = tokio::time::Instant::now() + share;
            match connector.clone().rdma_timeout(share).open_over_rdma(*address).await {
                Ok(session) => {
                    let login = timeout_at(share_ends, self.log_in(*address, session, None)).await;
                    let why = match login {
                        Ok(Err(error)) if is_connection_error(&error) => error.to_string(),
                        Ok(opened) => return opened.map_err(NoRdma::Refused),
                        Err(_) => format!("no answer to the login within {share:.1?}"),
                    };
                    let why = format!("{address} accepted the connection over RDMA, but: {why}");
                    failure = Some((*address, ferrite_fabric::Error::not_served(why)));
                }
                Err(ConnectError { rdma: Some(error), .. }) => failure = Some((*address, error)),
                // TLS is configured, so RDMA is not allowed.
                Err(error) => return Err(NoRdma::Refused(error.into_io(*address).into())),
            }
        }
        let (address, error) = failure.ok_or_else(|| NoRdma::Refused(summarize(Vec::new())))?;
        Err(NoRdma::Failed(address, error))
    }

    /// Asks a node for its own RDMA endpoints, if the connection is over TCP, and connects to them.
    /// Keeps the connection if that fails.
    async fn upgrade(&self, opened: Opened) -> Opened {
        if is_rdma(opened.transport) {
            return opened;
        }
        let mut ask = Pipeline::with_capacity(2);
        ask.cmd("CLUSTER").arg("MYID").cmd("FERRITE").arg("ENDPOINTS");
        let replies = opened.ask(&ask, self.shared.client()).await;
        let Ok([my_id, reply]) = replies.as_deref() else { return opened };
        let endpoints = own_endpoints(my_id, reply, self.host);
        if endpoints.is_empty() {
            return opened;
        }
        match self.dial_rdma(&endpoints).await {
            Ok(over_rdma) => over_rdma,
            Err(NoRdma::Failed(endpoint, error)) => {
                if let Ok(connector) = self.connector() {
                    let fallback = connector.fell_back_to_tcp(endpoint, error);
                    self.shared.directory().note_fallback(self.host, opened.transport, fallback);
                }
                opened
            }
            Err(NoRdma::Refused(_)) => opened,
        }
    }

    async fn log_in(
        &self,
        address: SocketAddr,
        session: Session,
        fallback: Option<Fallback>,
    ) -> RedisResult<Opened> {
        let transport = session.transport();
        let traffic =
            self.shared.directory().note_connecting(self.host, session.observer(), fallback);
        // The limit for replies counts the time without progress, so redis-rs needs none.
        let config = self.config.clone().set_response_timeout(None);
        let client = self.shared.client();
        let Dialed { connection, progress, driver, .. } =
            client.log_in(address, session, config, traffic).await?;
        Ok(Opened { connection, progress, driver, transport })
    }

    /// Returns the error for a node that must be reached over RDMA, and cannot.
    fn without_rdma(&self, id: &str, why: &str) -> RedisError {
        let text = format!("cannot reach node {id} at {} over RDMA: {why}", self.host);
        // Errors of this kind are not retried.
        io::Error::new(io::ErrorKind::Unsupported, text).into()
    }
}

impl Opened {
    /// Runs commands on a connection that has just been opened, within the time for connecting.
    async fn ask(&self, ask: &Pipeline, client: &Client) -> RedisResult<Vec<Value>> {
        let mut connection = self.connection.clone();
        let limit = client.settings().connect_timeout;
        let replies = connection.req_packed_commands(ask, 0, ask.len());
        let silent = || io::Error::new(io::ErrorKind::TimedOut, "the node does not answer");
        tokio::time::timeout(limit, replies).await.map_err(|_| silent())?
    }
}

/// Returns the part of a time that one of `count` attempts may take.
fn part(time: Duration, count: usize) -> Duration {
    time / u32::try_from(count.max(1)).unwrap_or(u32::MAX)
}
