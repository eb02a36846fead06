//! redis-rs over RDMA.
//!
//! [`Connection`] is a `redis::aio::ConnectionLike`, so redis-rs's typed commands
//! (`AsyncCommands`), pipelines and scripts work on it. Below them, this crate adds:
//! - the transport: RDMA to a Ferrite gateway or to Valkey's own listener, or TCP. The caller sets
//!   the policy, and each connection reports a fallback to TCP with its cause,
//! - automatic reconnects.
//!
//! [`Client::connect`] opens one connection, [`Client::pool`] several.
#![forbid(unsafe_code)]

mod client;
mod connection;
mod pool;

pub use client::{Client, ClientBuilder, TransportInfo};
pub use connection::Connection;
pub use ferrite_session::client_config;
pub use pool::{Dedicated, Pool};
pub use redis;
