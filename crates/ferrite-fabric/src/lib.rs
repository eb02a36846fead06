//! The fabric: everything between raw verbs and a product.
//!
//! | module | what it is |
//! |---|---|
//! | `stream` | [`Stream`], [`StreamListener`]: a link as a byte stream, like TCP |
//! | `handles` | [`Link`], [`Listener`], [`Region`]: what users hold |
//! | `fabric` | [`Fabric`]: completions, handshakes, timers, and the ways to drive it |
//! | `link` | the inside of a link: the protocol, and its paths over RDMA and TCP |
//! | `device` | one device: its verbs objects, and the requests in flight |
//! | `wake` | how drivers sleep, and what wakes them |
//! | [`mem`] | registered memory: pools, buffers, budgets, memory that a peer may touch |
//! | `policy` | [`Rdma`]: RDMA required, preferred or forbidden; [`Fallback`]: why TCP is used |
//! | [`wire`] | the wire format of links |
//! | [`diagnose`] | the likely causes of a link's failure, from measurements |
//!
//! Of the modules in this table, each uses only those below it.
//!
//! Memory safety: a buffer is a value. Its owner may use its memory. The device may use that memory
//! only while an operation owns the value. `unsafe` is confined to `src/mem`, to the slots, where
//! requests in flight own their buffers (`src/device/slots.rs` and `src/device/slots/receives.rs`),
//! to `src/fabric/watch.rs`, and to `src/link/tcp/info.rs`.

mod config;
mod deceptive;
pub mod descriptors;
mod device;
pub mod diagnose;
mod error;
mod fabric;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod handles;
mod latency;
mod link;
mod log_limit;
pub mod mem;
mod policy;
pub mod random;
mod source;
#[cfg(feature = "tokio")]
mod stream;
mod sync;
mod wake;
pub mod wire;

pub use config::Config;
pub use deceptive::is_deceptive;
pub use error::{Error, ErrorKind};
pub use fabric::listener::{ForeignTcpPeer, LinkRequest};
pub use fabric::{Builder, Fabric, FabricStats};
pub use ferrite_verbs::Status; // part of errors and of a fabric's statistics
pub use ferrite_verbs::rdma_core; // for `--version`
pub use handles::{
    Accepting, Arrival, ConnectOptions, Connected, Connecting, ConnectingEither, ConnectingRaw,
    Done, ForeignPeers, ForeignTcpPeers, Link, LinkObserver, ListenOptions, Listener, Preparing,
    RawConnection, Region, Revoking, Transport,
};
pub use latency::LatencyStats;
pub use link::{Ending, LinkStats, Message, ReadError, Reading, Receiving, Sending, Writing};
pub use log_limit::{LogLimit, Suppressed};
pub use policy::{Attempts, ConnectMode, Fallback, FallbackCause, Rdma};
pub use rustls;
#[cfg(feature = "tokio")]
pub use stream::{OwnedReadHalf, OwnedWriteHalf, ReuniteError, Stream, StreamListener};
pub use wake::event_fd::EventFd;
pub use wake::sleep_flags::SleepFlags;
