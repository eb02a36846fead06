//! Clusters on loopback. Each node gives the same replies at the module's port as at its own port,
//! and no write is lost or applied twice while slots move and primaries change.
//!
//! `FERRITE_CLUSTER=60` runs the stress for 60 seconds on each engine.

mod client;
mod host_cluster {
    pub(crate) mod changes;
    pub(crate) mod nodes;
    mod parity;
    mod stress;
    pub(crate) mod writer;
}
