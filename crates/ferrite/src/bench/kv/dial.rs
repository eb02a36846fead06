//! Opens the connections of a test.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_session::{Connector, Session, SessionTransport, TransportObserver, client_config};
use ferrite_verbs::Verbs;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

use super::Options;
use super::primaries::{Primaries, name_node};

pub(super) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Duplex for S {}

/// The transport of a test.
#[derive(Debug, Clone)]
pub(super) struct TransportInfo {
    pub(super) transport: String,
    pub(super) device: Option<String>,
    /// Whether the device is emulated in software.
    pub(super) software: bool,
    pub(super) fallback: Option<String>,
    /// Tells whether the connection still uses this transport; `None` for a Unix socket.
    pub(super) observer: Option<TransportObserver>,
}

impl TransportInfo {
    /// Adds the transport of another connection, if it is a different one.
    pub(super) fn add(&mut self, other: &Self) {
        if !self.transport.split(" and ").any(|known| known == other.transport) {
            self.transport = format!("{} and {}", self.transport, other.transport);
        }
        self.device = self.device.take().or_else(|| other.device.clone());
        self.fallback = self.fallback.take().or_else(|| other.fallback.clone());
        self.software |= other.software;
    }

    /// Adds TCP if the connection has lost its RDMA path in the meantime.
    pub(super) fn add_moves(&mut self) {
        let Some(observer) = self.observer.as_ref().filter(|observer| observer.moves() > 0) else {
            return;
        };
        let fallback = observer.fallback().map_or_else(
            || "the RDMA path was lost and has returned".into(),
            |fallback| fallback.to_string(),
        );
        let over_tcp = Self {
            transport: SessionTransport::Tcp.to_string(),
            device: None,
            software: false,
            fallback: Some(fallback),
            observer: None,
        };
        self.add(&over_tcp);
    }
}

/// Opens connections.
pub(super) enum Dialer {
    Unix(PathBuf),
    Net { connector: Connector, server: SocketAddr },
}

impl Dialer {
    pub(super) fn new(options: &Options, rdma: Rdma) -> anyhow::Result<Self> {
        if let Some(path) = &options.unix {
            return Ok(Self::Unix(path.clone()));
        }
        let server =
            options.server.context("no server given: give the server's address, or --unix")?;
        // Four receives for each connection, but at least 64 and at most 512. Up to 512 connections
        // can then receive a reply at the same time.
        let recv_queue_depth = options.connections.saturating_mul(4).clamp(64, 512);
        let config =
            Config { busy_poll_us: options.busy_poll_us, recv_queue_depth, ..client_config() };
        let fabric = Fabric::system().rdma(rdma).config(config).build()?;
        if rdma != Rdma::Forbid {
            tokio::spawn(fabric.drive());
        }
        let connector = Connector::new(&fabric).rdma(rdma);
        let connector = match options.local {
            Some(local) => connector.local(local),
            None => connector,
        };
        Ok(Self::Net { connector, server })
    }

    /// Connects to the server or, in a cluster, to the primary of the connection with this number.
    pub(super) async fn connect_number(
        &self,
        number: u32,
        primaries: Option<&Primaries>,
    ) -> anyhow::Result<(Box<dyn Duplex>, TransportInfo)> {
        match (self, primaries) {
            (Self::Net { connector, .. }, Some(primaries)) => {
                let connecting = primaries.connect(primaries.of_connection(number), connector);
                let opened = connecting.await.map_err(anyhow::Error::from);
                Ok(described(name_node(opened, Some(primaries), number)?))
            }
            _ => Ok(self.connect().await?),
        }
    }

    pub(super) async fn connect(&self) -> io::Result<(Box<dyn Duplex>, TransportInfo)> {
        match self {
            Self::Unix(path) => {
                let transport_info = TransportInfo {
                    transport: "Unix socket".into(),
                    device: None,
                    software: false,
                    fallback: None,
                    observer: None,
                };
                let stream = UnixStream::connect(path).await.map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
                })?;
                Ok((Box::new(stream), transport_info))
            }
            Self::Net { connector, server } => Ok(described(connector.connect(*server).await?)),
        }
    }
}

fn described(session: Session) -> (Box<dyn Duplex>, TransportInfo) {
    let transport_info = TransportInfo {
        transport: session.transport().to_string(),
        software: session.device().is_some_and(|device| is_software(&device)),
        device: session.device(),
        fallback: session.fallback().map(|fallback| fallback.to_string()),
        observer: Some(session.observer()),
    };
    (Box::new(session), transport_info)
}

fn is_software(device: &str) -> bool {
    let verbs = Verbs::system().ok();
    let device = verbs.and_then(|verbs| verbs.device(device).ok());
    device.is_some_and(|device| device.quirks().is_software)
}
