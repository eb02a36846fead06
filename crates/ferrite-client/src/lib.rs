//! redis-rs over RDMA.
//!
//! # Quick start
//!
//! ```no_run
//! use ferrite_client::Client;
//! use ferrite_client::redis::{AsyncCommands as _, RedisResult};
//!
//! #[tokio::main]
//! async fn main() -> RedisResult<()> {
//!     let client = Client::open("redis://:password@server.example:6380/0")?;
//!     let mut connection = client.connect().await?;
//!     let () = connection.set("greeting", "hello").await?;
//!     let greeting: String = connection.get("greeting").await?;
//!     // RDMA (Ferrite), RDMA (Valkey), TCP, or TCP with TLS
//!     println!("{greeting} over {}", connection.transport_info().transport);
//!     Ok(())
//! }
//! ```
//!
//! | URL | transport |
//! |---|---|
//! | `redis://host:6380` | RDMA where available, else TCP |
//! | `redis+rdma://host:6380?rdma=require` | RDMA, or an error that says why not |
//! | `redis://host:6380?rdma=forbid` | TCP |
//! | `rediss://host:6379` | TCP with TLS |
//! | `redis://first:6380,second:6380` | the first server that can be reached |
//!
//! [`Client::open`] describes all parts. Programs that need more use a [`ClientBuilder`]:
//!
//! ```no_run
//! # async fn show() -> ferrite_client::redis::RedisResult<()> {
//! use std::time::Duration;
//!
//! use ferrite_client::{ClientBuilder, Rdma};
//!
//! let (pushes, mut pushed) = tokio::sync::mpsc::unbounded_channel();
//! let client = ClientBuilder::open("redis://server.example:6380")?
//!     .rdma(Rdma::Require)
//!     .response_timeout(Some(Duration::from_secs(60)))
//!     .push_sender(pushes) // messages of subscriptions
//!     .build();
//! let mut subscriber = client.connect().await?;
//! ferrite_client::redis::cmd("SUBSCRIBE").arg("news").exec_async(&mut subscriber).await?;
//! while let Some(push) = pushed.recv().await {
//!     println!("{push:?}");
//! }
//! # Ok(()) }
//! ```
//!
//! # What it adds to redis-rs
//!
//! [`Connection`] is a `redis::aio::ConnectionLike`, so redis-rs's typed commands
//! (`AsyncCommands`), pipelines and scripts work on it. Below them, this crate adds:
//! - the transport: RDMA to a Ferrite module or gateway, or to Valkey's own listener, or TCP. The
//!   caller sets the policy ([`Rdma`]), and each connection reports a fallback to TCP with its
//!   cause,
//! - automatic reconnects, which restore subscriptions.
//!
//! [`Client::connect`] opens one connection, [`Client::pool`] several. [`ClusterClient`] is for
//! clusters: each command goes to the node of its keys, over RDMA where that node has the module.
//!
//! # Outside of tokio
//!
//! All of this works only inside a tokio runtime. Outside of a runtime, opening a client,
//! connecting and every command return an error of the kind `InvalidClientConfig`. The runtime must
//! have I/O and time enabled (`enable_all`): tokio itself panics if one of them is missing.
#![forbid(unsafe_code)]

mod client;
mod cluster;
mod connection;
mod pool;
mod progress;
mod subscriptions;
mod tls;

pub use client::{Client, ClientBuilder, TransportInfo, connection_config};
pub use cluster::{
    ClusterClient, ClusterClientBuilder, ClusterConnection, NodeTransport, ReadFrom,
};
pub use connection::Connection;
pub use ferrite_fabric::{Builder as FabricBuilder, Fabric, Fallback, FallbackCause, Rdma, rustls};
pub use ferrite_session::{SessionTransport, TlsFiles, client_config};
pub use pool::{Dedicated, Pool};
pub use redis;
