//! The primaries of a cluster, among which `--cluster` divides the connections and the keys.
//!
//! Each connection belongs to one primary, and uses only keys whose slots that primary serves at
//! the start. Redirects are not followed: they count as errors. `cluster.rs` finds the primaries.

use std::io;
use std::net::SocketAddr;

use anyhow::Context as _;
use ferrite_fabric::Rdma;
use ferrite_proto::cluster::Node;
use ferrite_session::{Connector, Session};

/// A primary, and the addresses at which it is reached.
#[derive(Debug, Clone)]
pub(super) struct Primary {
    pub(super) node: Node,
    pub(super) engine: SocketAddr,
    /// The RDMA endpoints of its module.
    pub(super) endpoints: Vec<SocketAddr>,
}

/// The primaries of a cluster, and which of them has each key of the run.
#[derive(Debug)]
pub(super) struct Primaries {
    pub(super) primaries: Vec<Primary>,
    /// The number of the primary of each key.
    pub(super) of_key: Vec<u16>,
}

impl Primaries {
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

    /// Returns the node of a connection, for errors.
    pub(super) fn describe(&self, connection: u32) -> String {
        let Primary { node, engine, .. } = &self.primaries[self.of_connection(connection)];
        format!("node {} at {engine}", node.id)
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
            if let Ok(session) = connector.open_over_rdma(*endpoint).await {
                return Ok(session);
            }
        }
        connector.connect(*last).await
    }
}

/// Adds the node of a connection to an error, in a cluster.
pub(super) fn name_node<T>(
    result: anyhow::Result<T>,
    primaries: Option<&Primaries>,
    connection: u32,
) -> anyhow::Result<T> {
    match primaries {
        Some(primaries) => result.with_context(|| primaries.describe(connection)),
        None => result,
    }
}
