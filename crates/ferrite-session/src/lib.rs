//! Valkey Over RDMA between the fabric and those who use it.
//!
//! ```text
//!   ValkeyStream   one connection as bytes: ferrite-proto decides, ferrite-fabric carries
//!   pump           bytes between a client and the engine's own socket, both ways, in order
//!   Connector      the calling side: Ferrite peer, Valkey server or TCP, as the policy says
//!   Gateway        takes clients of every kind and gives each a connection to the engine
//!   in_process     a session inside the engine: calls where possible, the engine's own socket for the rest
//!   frames         how large the pieces are that links carry values in
//! ```
#![forbid(unsafe_code)]

mod connector;
mod ending;
mod engine;
mod frames;
mod gateway;
mod in_process;
mod pump;
mod sessions;
mod stream;

pub use connector::{Connector, Session, SessionTransport};
pub use engine::{EngineAddress, EngineSocket};
pub use frames::{client_config, server_config};
pub use gateway::{Gateway, GatewayConfig, GatewayStats};
pub use in_process::{
    Access, Callable, Called, ClientLimits, CommandKind, Commands, InProcessEngine, ProxyClient,
    Replies, SessionFuture,
};
pub use pump::{Moved, pump};
pub use sessions::SessionInfo;
pub use stream::{ValkeyConfig, ValkeyStream};
