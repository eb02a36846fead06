//! The fabric: everything between raw verbs and a product.
//!
//! | module | what it is |
//! |---|---|
//! | [`mem`] | registered memory: pools, buffers, budgets, memory that a peer may touch |
//! | `fabric` | [`Fabric`]: devices, completions, and the ways to drive it |
//! | `link` | [`Link`]: messages and one-sided operations to a peer |
//! | `connect` `listener` | how peers meet: [`Fabric::connect`], [`Listener`] |
//! | `policy` | [`Rdma`]: whether RDMA may carry links, must, or must not; [`Fallback`]: why it does not |
//! | `one_sided` | [`Region`]: memory for peers, granted and revoked |
//! | `stream` | [`Stream`], [`StreamListener`]: a link as a stream of bytes, for software that knows TCP |
//! | [`wire`] | what links say to each other |
//! | [`diagnose`] | why a link failed, by what can be measured |
//!
//! Safety in one paragraph: a buffer is a value. Whoever has it may use its memory; the device may
//! use it only while an operation owns the value. `unsafe` stands in `src/mem` and in
//! `src/fabric/slots.rs`, where requests in flight own their buffers.

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
    ConnectOptions, Connecting, ConnectingAny, ConnectingEither, ConnectingRaw, Met,
};
pub use error::{Error, ErrorKind};
pub use fabric::{Builder, Config, Fabric, FabricStats};
pub use ferrite_verbs::Status; // of errors, and counted by fabrics
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
pub use policy::{Fallback, FallbackCause, Meet, Rdma};
pub use rustls;
#[cfg(feature = "tokio")]
pub use stream::{OwnedReadHalf, OwnedWriteHalf, ReuniteError, Stream, StreamListener};
