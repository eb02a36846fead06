//! A client for clusters: redis-rs's own cluster client over connections of this crate.
//!
//! ```text
//!   ClusterConnection ── pipelines split by slot ──► redis-rs: slots, redirects, retries, replicas
//!        ▲                                              │ CLUSTER SLOTS       │ connect(address)
//!        │ commands that were redirected                ▼                     ▼
//!        └──────────────────────────────────────── Node ◄── endpoints ── Directory
//!                                                  RDMA or TCP
//! ```
//!
//! redis-rs decides to which address each command goes, follows MOVED and ASK, and retries. What
//! it calls a connection is a [`node::Node`]. That finds the RDMA endpoint of the node in the
//! [`directory::Directory`], which is filled each time redis-rs asks for the slots: the same node
//! is then also asked for FERRITE ENDPOINTS.
//!
//! redis-rs exports `Connect` and the cluster client with connections of other types, but does not
//! document the function that makes the client. `crates/ferrite-client/tests/host_cluster.rs` would
//! notice a change.

mod client;
mod connection;
mod directory;
mod node;
mod route;

pub use client::{ClusterClient, ClusterClientBuilder, ReadFrom};
pub use connection::ClusterConnection;
pub use directory::NodeTransport;
