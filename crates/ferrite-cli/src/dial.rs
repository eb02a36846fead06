//! Connects to a server over RDMA, TCP or a Unix socket, and describes the transport.

use std::cell::OnceCell;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use ferrite_fabric::{Error, Fabric, Rdma};
use ferrite_session::{Connector, Session, SessionTransport, client_config};
use tokio::net::UnixStream;

use crate::connection::Connection;
use crate::settings::{Address, Settings};

/// The time limit of RDMA without `--rdma` on the command line. A host without RDMA may never
/// answer, and users who did not ask for RDMA should not wait long for it.
const DEFAULT_RDMA_TIMEOUT: Duration = Duration::from_secs(1);

/// Opens connections.
pub(crate) struct Dialer {
    /// Built when it is first needed. A Unix socket needs none.
    fabric: OnceCell<Fabric>,
    rdma: Rdma,
    rdma_timeout: Duration,
    tcp_timeout: Duration,
    local: Option<SocketAddr>,
    max_reply_bytes: u64,
    is_interactive: bool,
}

/// The transport of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TransportInfo {
    /// The transport in words, for people.
    pub(crate) description: String,
    /// Whether the connection uses TCP although RDMA was preferred.
    pub(crate) is_fallback: bool,
    /// The warning about such a fallback. `None` for a server on this host, because nobody can
    /// listen there.
    pub(crate) warning: Option<String>,
}

impl TransportInfo {
    fn without_fallback(description: String) -> Self {
        Self { description, is_fallback: false, warning: None }
    }
}

impl Dialer {
    /// Creates a dialer. A program that waits for people at a prompt cannot drive the fabric, so a
    /// thread drives it then. Otherwise the runtime that dials does.
    pub(crate) fn new(settings: &Settings, is_interactive: bool) -> Self {
        let is_explicit = settings.is_rdma_explicit;
        Self {
            fabric: OnceCell::new(),
            rdma: settings.rdma,
            rdma_timeout: if is_explicit {
                settings.timeout
            } else {
                settings.timeout.min(DEFAULT_RDMA_TIMEOUT)
            },
            tcp_timeout: settings.timeout,
            local: settings.local,
            max_reply_bytes: settings.max_reply_bytes,
            is_interactive,
        }
    }

    fn fabric(&self) -> anyhow::Result<&Fabric> {
        if let Some(fabric) = self.fabric.get() {
            return Ok(fabric);
        }
        let built = Fabric::system().config(client_config()).rdma(self.rdma).build();
        let fabric = built.context("RDMA is required (--rdma), but this host cannot use it")?;
        if self.rdma != Rdma::Forbid && fabric.absence().is_none() {
            if self.is_interactive {
                fabric.spawn_thread().context("cannot start the thread for RDMA")?;
            } else {
                tokio::spawn(fabric.drive());
            }
        }
        Ok(self.fabric.get_or_init(|| fabric))
    }

    /// Opens a connection to a server.
    pub(crate) async fn dial(
        &self,
        address: &Address,
    ) -> anyhow::Result<(Connection, TransportInfo)> {
        let attempt = match address {
            Address::Unix(path) => self.dial_unix(path).await,
            Address::Net { host, port } => self.dial_net(host, *port).await,
        };
        attempt.with_context(|| format!("Could not connect to Redis at {address}"))
    }

    async fn dial_unix(
        &self,
        path: &std::path::Path,
    ) -> anyhow::Result<(Connection, TransportInfo)> {
        let stream = UnixStream::connect(path).await.map_err(without_number)?;
        let transport_info = TransportInfo::without_fallback("over a Unix socket".into());
        Ok((Connection::new(Box::new(stream), self.max_reply_bytes), transport_info))
    }

    /// Tries all addresses of a host in turn.
    async fn dial_net(&self, host: &str, port: u16) -> anyhow::Result<(Connection, TransportInfo)> {
        let fabric = self.fabric()?;
        let found = tokio::net::lookup_host((host, port)).await;
        let mut addresses: Vec<_> = found.map_err(|error| anyhow!("{host}: {error}"))?.collect();
        // A name may have addresses of both kinds, and most RoCE networks use IPv4.
        addresses.sort_by_key(SocketAddr::is_ipv6);
        let mut last = anyhow!("{host} has no address");
        for address in addresses {
            match self.dial_address(fabric, address).await {
                Ok((session, transport_info)) => {
                    return Ok((
                        Connection::new(Box::new(session), self.max_reply_bytes),
                        transport_info,
                    ));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn dial_address(
        &self,
        fabric: &Fabric,
        address: SocketAddr,
    ) -> anyhow::Result<(Session, TransportInfo)> {
        // RDMA and TCP have separate time limits, so one connector with the policy is not enough.
        let mut why_not_rdma = None;
        if self.rdma != Rdma::Forbid {
            match self.over_rdma(fabric, address).await {
                Ok(session) => {
                    let transport_info = TransportInfo::without_fallback(describe_rdma(&session));
                    return Ok((session, transport_info));
                }
                Err(error) if self.rdma == Rdma::Require => return Err(error.context("over RDMA")),
                Err(error) => why_not_rdma = Some(error),
            }
        }
        let connector = self.connector(fabric, Rdma::Forbid, self.tcp_timeout);
        match (connector.connect(address).await.map_err(without_number), why_not_rdma) {
            (Ok(session), None) => {
                Ok((session, TransportInfo::without_fallback("over TCP".into())))
            }
            (Ok(session), Some(why)) => {
                let why = with_remedy(&why);
                let description = format!("over TCP: RDMA is unavailable: {why}");
                let warning = (!address.ip().is_loopback()).then(|| {
                    format!("warning: RDMA is unavailable ({why}); using TCP without encryption")
                });
                Ok((session, TransportInfo { description, is_fallback: true, warning }))
            }
            // On a host without RDMA only TCP was tried, so only its error is reported.
            (Err(tcp), why) => match why.filter(|_| fabric.absence().is_none()) {
                Some(why) => Err(anyhow!("TCP: {tcp}; RDMA (tried first): {}", with_remedy(&why))),
                None => Err(tcp.into()),
            },
        }
    }

    fn connector(&self, fabric: &Fabric, rdma: Rdma, timeout: Duration) -> Connector {
        let connector = Connector::new(fabric).rdma(rdma).timeout(timeout);
        match self.local {
            Some(local) => connector.local(local),
            None => connector,
        }
    }

    async fn over_rdma(&self, fabric: &Fabric, address: SocketAddr) -> anyhow::Result<Session> {
        if let Some(absence) = fabric.absence() {
            return Err(absence.clone().into());
        }
        let connector = self.connector(fabric, Rdma::Require, self.rdma_timeout);
        connector.connect(address).await.map_err(|error| {
            let fabric = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
            fabric.cloned().map_or_else(|| error.into(), anyhow::Error::from)
        })
    }
}

fn describe_rdma(session: &Session) -> String {
    let device = session.device().map_or(String::new(), |device| format!(", device {device}"));
    let peer = match session.transport() {
        SessionTransport::FerriteRdma => "to a Ferrite module or gateway",
        SessionTransport::ValkeyRdma => "to a server of Valkey Over RDMA",
        _ => "to a server",
    };
    format!("over RDMA{device}, {peer}")
}

/// Returns an error with all its causes, and the fix if one is known.
pub(crate) fn with_remedy(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            let _ = write!(text, ": {cause}");
        }
    }
    let remedy =
        error.chain().find_map(|cause| cause.downcast_ref::<Error>().and_then(Error::remedy));
    if let Some(remedy) = remedy {
        let _ = write!(text, " (to do: {remedy})");
    }
    text
}

/// Removes the error number: `Connection refused` instead of `Connection refused (os error 111)`.
fn without_number(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" (os error ") {
        Some((text, _)) => io::Error::new(error.kind(), text.to_owned()),
        None => error,
    }
}
