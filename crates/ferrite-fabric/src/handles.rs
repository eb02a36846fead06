//! The objects that users of a fabric hold: links, listeners, regions, and the futures that return
//! them.
//!
//! Each object is a thin handle. It refers to state that it shares with the fabric's poller, and
//! forwards calls to it.
//!
//! | file | what it is |
//! |---|---|
//! | `link.rs` | [`Link`]: messages and one-sided operations to a Ferrite peer |
//! | `raw_connection.rs` | [`RawConnection`]: a peer of another protocol |
//! | `connecting.rs` | [`Fabric::connect`](crate::Fabric::connect) and similar calls |
//! | `listener.rs` `foreign_peers.rs` | [`Listener`], and the foreign peers that connect to it |
//! | `region.rs` | [`Region`]: memory that peers may access until it is revoked |

mod connecting;
mod foreign_peers;
mod link;
mod listener;
mod raw_connection;
mod region;

pub use connecting::{ConnectOptions, Connected, Connecting, ConnectingEither, ConnectingRaw};
pub use foreign_peers::{ForeignPeers, ForeignTcpPeers};
pub use link::{Link, LinkObserver, Transport};
pub use listener::{Accepting, ListenOptions, Listener};
pub use raw_connection::{Arrival, Done, Preparing, RawConnection};
pub use region::{Region, Revoking};
