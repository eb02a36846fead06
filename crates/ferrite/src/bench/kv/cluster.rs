//! The primaries of a cluster, among which `--cluster` divides the connections and the keys.
//!
//! Each connection belongs to one primary, and uses only keys whose slots that primary serves at
//! the start. Redirects are not followed: they count as errors.

use std::io;
use std::net::SocketAddr;

use anyhow::{Context as _, bail, ensure};
use ferrite_fabric::Rdma;
use ferrite_proto::cluster::{Node, SlotMap, rdma_endpoints, slot_of};
use ferrite_proto::resp::Value;
use ferrite_session::{Connector, Session};

use super::Options;
use super::connection::LoadConnection;
use super::dial::Dialer;
use super::key_space::KeySpace;

/// A primary, and the addresses at which it is reached.
#[derive(Debug, Clone)]
struct Primary {
    node: Node,
    engine: SocketAddr,
    /// The RDMA endpoints of its module.
    endpoints: Vec<SocketAddr>,
}

/// The primaries of a cluster, and which of them has each key of the run.
#[derive(Debug)]
pub(super) struct Primaries {
    primaries: Vec<Primary>,
    /// The number of the primary of each key.
    of_key: Vec<u16>,
}

impl Primaries {
    /// Asks the server for the slots and the endpoints. The server may be any node of the cluster.
    pub(super) async fn find(
        options: &Options,
        rdma: Rdma,
        keys: &KeySpace,
    ) -> anyhow::Result<Self> {
        let dialer = Dialer::new(options, rdma)?;
        let (stream, _) = dialer.connect().await.context("cannot connect")?;
        let mut connection = LoadConnection::new(options, stream, 0);
        connection.authenticate().await?;
        let asked =
            options.server.context("--cluster needs the address of a node")?.ip().to_string();
        let slots = connection.ask(&["CLUSTER", "SLOTS"]).await?;
        let slots = Value::parse(&slots).context("the reply to CLUSTER SLOTS")?;
        let Some(map) = SlotMap::parse(&slots, &asked) else {
            let why = match slots {
                Value::Error(text) => String::from_utf8_lossy(text).into_owned(),
                other => format!("{other:?}"),
            };
            bail!("--cluster: the server is no node of a cluster: {why}");
        };
        let listed = connection.ask(&["FERRITE", "ENDPOINTS"]).await?;
        let listed = Value::parse(&listed).context("the reply to FERRITE ENDPOINTS")?;
        let mut primaries = Vec::new();
        for node in map.primaries() {
            let mut found = tokio::net::lookup_host((node.host.as_str(), node.port))
                .await
                .with_context(|| format!("cannot resolve node {}", node.host))?;
            let engine = found.next().with_context(|| format!("{} has no address", node.host))?;
            let endpoints = match rdma {
                Rdma::Forbid => Vec::new(),
                _ => rdma_endpoints(&listed, &node.id, &asked),
            };
            ensure!(
                !endpoints.is_empty() || rdma != Rdma::Require,
                "RDMA is required (--rdma), but node {} at {engine} announces no RDMA endpoint: \
                 its module is not loaded, has no RDMA, or has not announced itself yet",
                node.id
            );
            primaries.push(Primary { node: node.clone(), engine, endpoints });
        }
        let of_key = (0..options.keys).map(|key| {
            let slot = slot_of(keys.name(key).as_bytes());
            let id = map.primary_of(slot).map(|node| &node.id);
            let number = primaries.iter().position(|primary| Some(&primary.node.id) == id);
            let number = number.with_context(|| format!("no node serves slot {slot}"))?;
            Ok(u16::try_from(number)?)
        });
        let of_key = of_key.collect::<anyhow::Result<Vec<_>>>()?;
        for (number, Primary { node, .. }) in primaries.iter().enumerate() {
            ensure!(
                of_key.iter().any(|of| usize::from(*of) == number),
                "none of the {} keys belongs to node {}; use more --keys",
                options.keys,
                node.id
            );
        }
        ensure!(
            options.connections as usize >= primaries.len(),
            "the cluster has {} primaries; use at least as many --connections",
            primaries.len()
        );
        Ok(Self { primaries, of_key })
    }

    /// Returns the number of primaries.
    pub(super) fn count(&self) -> usize {
        self.primaries.len()
    }

    /// Returns the number of the primary that a connection belongs to.
    pub(super) fn of_connection(&self, connection: u32) -> usize {
        connection as usize % self.primaries.len()
    }

    /// Returns whether a primary has a key.
    pub(super) fn has(&self, primary: usize, key: u32) -> bool {
        self.of_key.get(key as usize).is_some_and(|of| usize::from(*of) == primary)
    }

    /// Connects to a primary: to the first of its RDMA endpoints that accepts, otherwise to its
    /// engine over TCP unless RDMA is required.
    pub(super) async fn connect(
        &self,
        primary: usize,
        connector: &Connector,
    ) -> io::Result<Session> {
        let Primary { engine, endpoints, .. } = &self.primaries[primary];
        let Some((last, others)) = endpoints.split_last() else {
            return connector.clone().rdma(Rdma::Forbid).connect(*engine).await;
        };
        for endpoint in others {
            if let Ok(session) = connector.clone().rdma(Rdma::Require).connect(*endpoint).await {
                return Ok(session);
            }
        }
        connector.connect(*last).await
    }
}
