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
//! redis-rs decides to which address each command goes, follows MOVED and ASK, and retries. Its
//! connections are of our type [`node::Node`]. A `Node` looks up the RDMA endpoint of its cluster
//! node in the [`directory::Directory`]. Each time redis-rs asks a node for the slots, the `Node`
//! also asks for FERRITE ENDPOINTS, and both replies fill the directory.
//!
//! redis-rs exports `Connect` and the cluster client with connections of other types, but does not
//! document the function that makes the client. If a later version changes that function, the tests
//! in `crates/ferrite-client/tests/host_cluster.rs` fail.

mod client;
mod connection;
mod directory;
mod node;
mod route;

pub use client::{ClusterClient, ClusterClientBuilder, ReadFrom};
pub use connection::ClusterConnection;
pub use directory::NodeTransport;
