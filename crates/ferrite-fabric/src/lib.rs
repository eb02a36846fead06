//! The fabric: everything between raw verbs and a product.
//!
//! | module | what it is |
//! |---|---|
//! | [`mem`] | registered memory: pools, buffers, budgets, memory that a peer may touch |
//! | `fabric` | [`Fabric`]: devices, completions, and the ways to drive it |
//! | `link` | [`Link`]: messages and one-sided operations to a peer |
//! | `connect` `listener` | handshakes with peers: [`Fabric::connect`], [`Listener`] |
//! | `policy` | [`Rdma`]: RDMA required, preferred or forbidden; [`Fallback`]: why TCP is used |
//! | `one_sided` | [`Region`]: memory that peers are granted, and that can be revoked |
//! | `stream` | [`Stream`], [`StreamListener`]: a link as a byte stream, like TCP |
//! | [`wire`] | the wire format of links |
//! | [`diagnose`] | the likely causes of a link's failure, from measurements |
//!
//! Memory safety: a buffer is a value. Its owner may use its memory; the device may use that memory
//! only while an operation owns the value. `unsafe` is confined to `src/mem`, to
//! `src/fabric/slots.rs` and `src/fabric/slots/receives.rs`, where requests in flight own their
//! buffers, and to `src/fabric/watch.rs`.

mod connect;
pub mod descriptors;
pub mod diagnose;
mod error;
mod fabric;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod latency;
mod link;
mod listener;
mod log_limit;
pub mod mem;
mod one_sided;
mod policy;
pub mod random;
mod source;
#[cfg(feature = "tokio")]
mod stream;
mod sync;
pub mod wire;

pub use connect::{
    ConnectOptions, Connected, Connecting, ConnectingAny, ConnectingEither, ConnectingRaw,
};
pub use error::{Error, ErrorKind};
pub use fabric::{Builder, Config, Fabric, FabricStats};
pub use ferrite_verbs::Status; // part of errors and of a fabric's statistics
pub use latency::LatencyStats;
pub use link::{
    Arrival, Done, Ending, Link, LinkStats, Message, Preparing, RawConnection, ReadError, Reading,
    Receiving, Sending, Transport, Writing,
};
pub use listener::{
    Accepting, ForeignPeers, ForeignTcpPeer, ForeignTcpPeers, ListenOptions, Listener,
};
pub use log_limit::{LogLimit, Suppressed};
pub use one_sided::{Region, Revoking};
pub use policy::{ConnectMode, Fallback, FallbackCause, Rdma};
pub use rustls;
#[cfg(feature = "tokio")]
pub use stream::{OwnedReadHalf, OwnedWriteHalf, ReuniteError, Stream, StreamListener};
