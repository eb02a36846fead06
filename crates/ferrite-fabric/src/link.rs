//! The inside of a link: a connection to a peer, over RDMA or TCP. Users hold it as a
//! [`Link`](crate::Link), or as a [`RawConnection`](crate::RawConnection) if the peer speaks
//! another protocol.
//!
//! | file | what it is |
//! |---|---|
//! | `core.rs` | the protocol, without I/O: credits, closing, grants, migration |
//! | `outbox.rs` | cuts messages into frames, round-robin over the channels, without I/O |
//! | `inbox.rs` | assembles frames into messages, without I/O |
//! | `state.rs` | what the link's lock protects: the core, and the I/O on its RDMA and TCP paths |
//! | `tcp.rs` `tls.rs` `socket.rs` | the TCP connection of a link |
//! | `tickets.rs` `ops.rs` | how futures learn of results |
//! | `shared.rs` | what the fabric and users share |

pub(crate) mod core;
pub(crate) mod inbox;
pub(crate) mod keepalive;
pub(crate) mod kind;
pub(crate) mod message;
pub(crate) mod name;
mod ops;
mod outbox;
#[cfg(all(test, loom))]
mod races;
pub(crate) mod shared;
#[cfg(test)]
mod simulation;
pub(crate) mod socket;
pub(crate) mod state;
mod stats;
pub(crate) mod tcp;
mod tickets;
pub(crate) mod tls;

pub use message::Message;
pub use ops::{Ending, ReadError, Reading, Receiving, Sending, Writing};
pub use stats::LinkStats;
