//! A client for clusters: redis-rs's own cluster client over connections of this crate.
//!
//! ```text
//!   ClusterConnection ── pipelines split by slot ──► Operation: redirects, retries, one deadline
//!                                                       │ commands      │ lookups
//!                                                       │               ▼
//!                                                       │    redis-rs: slots, replicas
//!                                                       │               │ connect(address)
//!                                                       ▼               ▼ CLUSTER SLOTS
//!                                                      Node ◄───────────┘
//!                                                   RDMA or TCP ◄── endpoints ── Directory
//! ```
//!
//! redis-rs decides to which address each command goes. Its connections are of our type
//! [`node::Node`]. redis-rs finds the `Node` for a command by a [`lookup::Lookup`], and the command
//! runs there, in the task of its caller. So a slow node holds up only its own commands. A command
//! without a key of its own (DBSIZE, or MGET of several slots) runs in redis-rs, which splits it.
//!
//! A `Node` looks up the RDMA endpoint of its cluster node in the [`directory::Directory`]. Each
//! time redis-rs asks a node for the slots, the `Node` also asks for FERRITE ENDPOINTS, and both
//! replies fill the directory.
//!
//! redis-rs exports `Connect` and the cluster client with connections of other types, but does not
//! document the function that makes the client. If a later version changes that function, the tests
//! in `crates/ferrite-client/tests/host_cluster.rs` fail.

mod client;
mod connection;
mod dial;
mod directory;
mod lookup;
mod node;
mod operation;
mod pending;
mod redis_rs;
mod reply;
mod route;
mod shared;

pub use client::{ClusterClient, ClusterClientBuilder, ReadFrom};
pub use connection::ClusterConnection;
pub use directory::NodeTransport;
