//! redis-rs over RDMA.
//!
//! Not another command interface: [`Connection`] is a `redis::aio::ConnectionLike`, so that
//! redis-rs's typed commands (`AsyncCommands`), pipelines and scripts work on it. What is added is
//! below them: the server is reached over RDMA (a Ferrite gateway, or Valkey's own listener) or
//! over TCP, as the policy says, and never silently; and a connection that is lost is opened again.
//! [`Client::connect`] gives one connection, [`Client::pool`] several.
#![forbid(unsafe_code)]

mod client;
mod connection;
mod pool;

pub use client::{Client, ClientBuilder};
pub use connection::{Connection, TransportInfo};
pub use ferrite_session::client_config;
pub use pool::{Dedicated, Pool};
pub use redis;
