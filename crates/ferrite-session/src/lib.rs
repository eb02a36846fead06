//! Sessions between clients and an engine (Redis or Valkey), over RDMA or TCP.
//!
//! ```text
//!   mux              many connections over one link
//!   agent            carries connections between the programs of a group of hosts, with mux
//!   ValkeyStream     a Valkey Over RDMA connection as a byte stream
//!   pump             copies bytes between a client and the engine's socket, in both directions
//!   Connector        the client side: connects to a Ferrite peer, a Valkey server, or over TCP
//!   Session          a session as the client sees it, with the transport that it uses now
//!   ServerUrl        the URL of a server; TlsFiles: certificates and keys of a client
//!   Gateway          the server side: accepts all kinds of clients and connects each to the engine
//!   in_process       sessions inside the engine: calls commands in-process, proxies the others
//!   InProcessEngine  the interface to the engine that an in-process session runs in
//!   frames           fabric settings for sessions, above all the frame size
//! ```
#![forbid(unsafe_code)]

pub mod agent;
mod connector;
mod disconnect_log;
mod ending;
mod engine;
mod frames;
mod gateway;
mod in_process;
mod in_process_engine;
pub mod mux;
mod polled_when_woken;
mod pump;
mod session;
mod sessions;
mod settings;
mod stream;
mod tcp_keepalive;
mod tls;
mod url;

pub use connector::{ConnectError, Connector};
pub use engine::{EngineAccess, EngineAddress, EngineSocket, probe_access};
pub use frames::{client_config, server_config};
pub use gateway::{Gateway, GatewayConfig, GatewayStats};
pub use in_process_engine::{
    Access, Callable, Called, ClientLimits, CommandKind, Commands, InProcessEngine, ProxyClient,
    Replies, SessionFuture,
};
pub use pump::{Moved, pump};
pub use session::{Session, SessionTransport, TransportObserver};
pub use sessions::{Killed, SessionInfo};
pub use settings::{fabric_config, open_fabric, rdma_policy, valkey_config};
pub use stream::{ValkeyConfig, ValkeyStream};
pub use tcp_keepalive::enable_tcp_keepalive;
pub use tls::TlsFiles;
pub use url::{Host, ServerUrl, UrlError};
