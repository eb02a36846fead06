//! Connects to a server over RDMA, TCP or a Unix socket, and describes the transport.

use std::cell::OnceCell;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use ferrite_fabric::rustls::crypto::ring;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::wire::Program;
use ferrite_fabric::{Error, Fabric, Rdma};
use ferrite_session::{
    ConnectError, Connector, Host, SessionTransport, TransportObserver, client_config,
};
use tokio::net::UnixStream;

use crate::connection::Connection;
use crate::settings::{Address, Settings, Tls};

/// The time limit for RDMA if neither `--rdma` nor the URI sets the RDMA policy. A host without
/// RDMA may never answer, and users who did not ask for RDMA should not wait long for it.
const DEFAULT_RDMA_TIMEOUT: Duration = Duration::from_secs(1);

/// Opens connections.
pub(crate) struct Dialer {
    /// Built when it is first needed. A Unix socket needs no fabric.
    fabric: OnceCell<Fabric>,
    rdma: Rdma,
    rdma_timeout: Duration,
    tcp_timeout: Duration,
    local: Option<SocketAddr>,
    tls: Option<Tls>,
    max_reply_bytes: u64,
    is_interactive: bool,
}

/// A connection that was opened.
pub(crate) struct Dialed {
    pub(crate) connection: Connection,
    pub(crate) transport: TransportSource,
    /// The host that has accepted it; `None` for a Unix socket.
    pub(crate) host: Option<Host>,
}

/// The transport of a connection at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TransportInfo {
    /// The transport in words, for people.
    pub(crate) description: String,
    /// The transport in a word, for the prompt.
    pub(crate) name: &'static str,
    /// Whether the connection uses TCP although RDMA was preferred.
    pub(crate) is_fallback: bool,
    /// The warning about a fallback to TCP. `None` without a fallback, and for a server on this
    /// host, because nobody can eavesdrop there.
    pub(crate) warning: Option<String>,
}

/// Tells the transport that a connection uses now. A session with a Ferrite peer may change between
/// RDMA and TCP at any time.
#[derive(Debug)]
pub(crate) enum TransportSource {
    Unix,
    Session {
        observer: TransportObserver,
        server: SocketAddr,
        /// The program of a Ferrite peer.
        program: Option<Program>,
    },
}

impl TransportSource {
    /// Describes the transport that the connection uses now.
    pub(crate) fn now(&self) -> TransportInfo {
        let Self::Session { observer, server, program } = self else {
            return TransportInfo::without_fallback("Unix", "over a Unix socket".into());
        };
        match (observer.fallback(), observer.transport()) {
            // With TLS, a fallback to TCP loses no encryption, so it needs no warning.
            (_, SessionTransport::Tls) => {
                TransportInfo::without_fallback("TLS", "over TCP with TLS".into())
            }
            (Some(fallback), _) => {
                let why = with_remedy(&fallback.error.clone().into());
                let description = format!("over TCP, because RDMA is unavailable: {why}");
                let warning = (!server.ip().is_loopback()).then(|| {
                    format!(
                        "warning: using TCP without encryption, because RDMA is unavailable: {why}"
                    )
                });
                TransportInfo { description, name: "TCP", is_fallback: true, warning }
            }
            (None, SessionTransport::Tcp) => {
                TransportInfo::without_fallback("TCP", "over TCP".into())
            }
            (None, transport) => {
                let description = describe_rdma(transport, observer.device(), *program);
                TransportInfo::without_fallback("RDMA", description)
            }
        }
    }
}

impl TransportInfo {
    fn without_fallback(name: &'static str, description: String) -> Self {
        Self { description, name, is_fallback: false, warning: None }
    }
}

impl Dialer {
    /// Creates a dialer. While an interactive program waits for input at the prompt, its runtime
    /// cannot drive the fabric, so a separate thread drives the fabric. In other modes, the runtime
    /// that opens the connection drives it.
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
            tls: settings.tls.clone(),
            max_reply_bytes: settings.max_reply_bytes,
            is_interactive,
        }
    }

    fn fabric(&self) -> anyhow::Result<&Fabric> {
        if let Some(fabric) = self.fabric.get() {
            return Ok(fabric);
        }
        let built = Fabric::system().config(client_config()).rdma(self.rdma).build();
        let fabric = built.context(match self.rdma {
            Rdma::Require => "RDMA is required, but this host cannot use it",
            _ => "cannot prepare for connections",
        })?;
        if self.rdma != Rdma::Forbid && fabric.absence().is_none() {
            if self.is_interactive {
                fabric
                    .spawn_thread()
                    .context("cannot start the thread that polls the RDMA devices")?;
            } else {
                tokio::spawn(fabric.drive());
            }
        }
        Ok(self.fabric.get_or_init(|| fabric))
    }

    /// Opens a connection to a server, with this policy for RDMA.
    pub(crate) async fn dial(&self, address: &Address, rdma: Rdma) -> anyhow::Result<Dialed> {
        let attempt = match address {
            Address::Unix(path) => self.dial_unix(path).await,
            Address::Net(hosts) => self.dial_hosts(hosts, rdma).await,
        };
        attempt.with_context(|| format!("Could not connect to Redis at {address}"))
    }

    async fn dial_unix(&self, path: &std::path::Path) -> anyhow::Result<Dialed> {
        let stream = UnixStream::connect(path).await.map_err(without_number)?;
        let connection = Connection::new(Box::new(stream), self.max_reply_bytes);
        Ok(Dialed { connection, transport: TransportSource::Unix, host: None })
    }

    /// Tries the hosts in turn.
    async fn dial_hosts(&self, hosts: &[Host], rdma: Rdma) -> anyhow::Result<Dialed> {
        self.fabric()?; // if RDMA is required but unavailable, this fails: no host can be reached
        let mut failures = Vec::new();
        for host in hosts {
            match self.dial_host(host, rdma).await {
                Err(error) => failures.push((host, error)),
                done => return done,
            }
        }
        if failures.len() == 1 {
            return Err(failures.remove(0).1);
        }
        let causes: Vec<_> =
            failures.iter().map(|(host, why)| format!("{host}: {why:#}")).collect();
        bail!(causes.join("; "))
    }

    /// Tries all addresses of a host in turn.
    async fn dial_host(&self, host: &Host, rdma: Rdma) -> anyhow::Result<Dialed> {
        let fabric = self.fabric()?;
        let (name, port) = (host.name.as_str(), host.port_or_default());
        let connector = self.connector(fabric, host)?.rdma(rdma);
        let found = tokio::net::lookup_host((name, port)).await;
        let mut addresses: Vec<_> = found.map_err(|error| anyhow!("{name}: {error}"))?.collect();
        // Tries IPv4 first: a name may have addresses of both kinds, and most RoCE networks use
        // IPv4.
        addresses.sort_by_key(SocketAddr::is_ipv6);
        let mut last = anyhow!("{name} has no address");
        for address in addresses {
            match connector.open(address).await {
                Ok(session) => {
                    let transport = TransportSource::Session {
                        observer: session.observer(),
                        server: address,
                        program: session.server_program(),
                    };
                    let connection = Connection::new(Box::new(session), self.max_reply_bytes);
                    return Ok(Dialed { connection, transport, host: Some(host.clone()) });
                }
                Err(error) => last = describe(fabric, error),
            }
        }
        Err(last)
    }

    /// Returns a connector for a host. With TLS, the host's certificate must be valid for its name,
    /// or for the name that `--sni` gives.
    fn connector(&self, fabric: &Fabric, host: &Host) -> anyhow::Result<Connector> {
        let mut connector =
            Connector::new(fabric).rdma_timeout(self.rdma_timeout).timeout(self.tcp_timeout);
        if let Some(local) = self.local {
            connector = connector.local(local);
        }
        if let Some(tls) = &self.tls {
            let name = tls.name.as_deref().unwrap_or(host.certificate_name());
            let name = ServerName::try_from(name).map_err(|_| {
                anyhow!("TLS needs a valid host name or address, not {name:?}; set one with --sni")
            })?;
            let provider = Arc::new(ring::default_provider());
            let config = tls.files.client_config(provider).context("cannot use TLS")?;
            connector = connector.tls(Arc::new(config), name.to_owned());
        }
        Ok(connector)
    }
}

/// Describes how each transport failed. On a host without RDMA, only TCP was tried, so only the
/// error of TCP is reported.
fn describe(fabric: &Fabric, error: ConnectError) -> anyhow::Error {
    match (error.rdma, error.tcp.map(without_number)) {
        (Some(rdma), Some(tcp)) if fabric.absence().is_none() => {
            anyhow!("TCP: {tcp}; RDMA (tried first): {}", with_remedy(&rdma.into()))
        }
        (_, Some(tcp)) => tcp.into(),
        (Some(rdma), None) => anyhow::Error::from(rdma).context("over RDMA"),
        (None, None) => anyhow!("no transport was tried"),
    }
}

fn describe_rdma(
    transport: SessionTransport,
    device: Option<String>,
    program: Option<Program>,
) -> String {
    let device = device.map_or(String::new(), |device| format!(", device {device}"));
    let peer = match (transport, program) {
        (_, Some(Program::MODULE)) => "to a Ferrite module",
        (_, Some(Program::GATEWAY)) => "to a Ferrite gateway",
        (SessionTransport::FerriteRdma, _) => "to a Ferrite module or gateway",
        (SessionTransport::ValkeyRdma, _) => "to a Valkey Over RDMA server",
        _ => "to a server",
    };
    format!("over RDMA{device}, {peer}")
}

/// Returns an error with all its causes, and the fix if one is known. Leaves out a cause that the
/// text already contains.
pub(crate) fn with_remedy(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
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
