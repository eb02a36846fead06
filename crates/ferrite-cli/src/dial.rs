//! Ways to a server: RDMA, TCP or a Unix socket, and words for the one that was taken.

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

/// How long RDMA is tried when nobody asked for it. A host that does not know RDMA may never
/// answer, and who did not ask should not wait for that long.
const UNASKED_PATIENCE: Duration = Duration::from_secs(1);

/// Opens connections.
pub(crate) struct Dialer {
    /// Made when a way needs one: a Unix socket does not.
    fabric: OnceCell<Fabric>,
    rdma: Rdma,
    rdma_patience: Duration,
    patience: Duration,
    local: Option<SocketAddr>,
    max_reply_bytes: u64,
    waits_for_people: bool,
}

/// What carries a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TransportInfo {
    /// For people.
    pub(crate) words: String,
    /// RDMA was preferred, and it is TCP.
    pub(crate) is_fallback: bool,
    /// What to say if it is, and others could listen: not for a server on this host.
    pub(crate) warning: Option<String>,
}

impl TransportInfo {
    fn as_wished(words: String) -> Self {
        Self { words, is_fallback: false, warning: None }
    }
}

impl Dialer {
    /// Whoever waits for people has no time for the fabric: then a thread drives it, else the
    /// runtime that dials.
    pub(crate) fn new(settings: &Settings, waits_for_people: bool) -> Self {
        let asked = settings.is_rdma_asked_for;
        Self {
            fabric: OnceCell::new(),
            rdma: settings.rdma,
            rdma_patience: if asked {
                settings.timeout
            } else {
                settings.timeout.min(UNASKED_PATIENCE)
            },
            patience: settings.timeout,
            local: settings.local,
            max_reply_bytes: settings.max_reply_bytes,
            waits_for_people,
        }
    }

    fn fabric(&self) -> anyhow::Result<&Fabric> {
        if let Some(fabric) = self.fabric.get() {
            return Ok(fabric);
        }
        let built = Fabric::system().config(client_config()).rdma(self.rdma).build();
        let fabric = built.context("RDMA is required (--rdma) and cannot be used on this host")?;
        if self.rdma != Rdma::Forbid && fabric.absence().is_none() {
            if self.waits_for_people {
                fabric.spawn_thread().context("cannot start a thread for RDMA")?;
            } else {
                tokio::spawn(fabric.drive());
            }
        }
        Ok(self.fabric.get_or_init(|| fabric))
    }

    /// Opens a connection.
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
        let transport_info = TransportInfo::as_wished("over a Unix socket".into());
        Ok((Connection::new(Box::new(stream), self.max_reply_bytes), transport_info))
    }

    /// Tries the addresses of a name one after the other.
    async fn dial_net(&self, host: &str, port: u16) -> anyhow::Result<(Connection, TransportInfo)> {
        let fabric = self.fabric()?;
        let found = tokio::net::lookup_host((host, port)).await;
        let mut addresses: Vec<_> = found.map_err(|error| anyhow!("{host}: {error}"))?.collect();
        // RoCE networks are IPv4 more often than not, and a name may have both.
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
        // Two ways with a time of their own each, so not one connector with the policy.
        let mut why_not_rdma = None;
        if self.rdma != Rdma::Forbid {
            match self.over_rdma(fabric, address).await {
                Ok(session) => {
                    let transport_info = TransportInfo::as_wished(rdma_words(&session));
                    return Ok((session, transport_info));
                }
                Err(error) if self.rdma == Rdma::Require => return Err(error.context("over RDMA")),
                Err(error) => why_not_rdma = Some(error),
            }
        }
        let connector = Connector::new(fabric).rdma(Rdma::Forbid).timeout(self.patience);
        match (connector.connect(address).await.map_err(without_number), why_not_rdma) {
            (Ok(session), None) => Ok((session, TransportInfo::as_wished("over TCP".into()))),
            (Ok(session), Some(why)) => {
                let why = with_remedy(&why);
                let words = format!("over TCP: RDMA is unavailable: {why}");
                let warning = (!address.ip().is_loopback()).then(|| {
                    format!("warning: RDMA is unavailable ({why}); using TCP without encryption")
                });
                Ok((session, TransportInfo { words, is_fallback: true, warning }))
            }
            // A host without RDMA has only one way, and its failure is all there is to say.
            (Err(tcp), why) => match why.filter(|_| fabric.absence().is_none()) {
                Some(why) => Err(anyhow!("TCP: {tcp}; RDMA (tried first): {}", with_remedy(&why))),
                None => Err(tcp.into()),
            },
        }
    }

    async fn over_rdma(&self, fabric: &Fabric, address: SocketAddr) -> anyhow::Result<Session> {
        if let Some(absence) = fabric.absence() {
            return Err(absence.clone().into());
        }
        let connector = Connector::new(fabric).rdma(Rdma::Require).timeout(self.rdma_patience);
        let connector = match self.local {
            Some(local) => connector.local(local),
            None => connector,
        };
        connector.connect(address).await.map_err(|error| {
            let fabric = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
            fabric.cloned().map_or_else(|| error.into(), anyhow::Error::from)
        })
    }
}

fn rdma_words(session: &Session) -> String {
    let device = session.device().map_or(String::new(), |device| format!(", device {device}"));
    let peer = match session.transport() {
        SessionTransport::FerriteRdma => "to a Ferrite module or gateway",
        SessionTransport::ValkeyRdma => "to a server of Valkey Over RDMA",
        _ => "to a server",
    };
    format!("over RDMA{device}, {peer}")
}

/// An error from the outermost cause to the innermost, and what to do about it where that is known.
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

/// `Connection refused`, as others say it, and not `(os error 111)` too.
fn without_number(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.split_once(" (os error ") {
        Some((text, _)) => io::Error::new(error.kind(), text.to_owned()),
        None => error,
    }
}
