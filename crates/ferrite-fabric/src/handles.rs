//! What users of a fabric hold: links, listeners, regions, and the futures that lead to them.
//!
//! Each is a thin handle: it refers to state that the fabric's poller shares, and passes calls on.
//!
//! | file | what it is |
//! |---|---|
//! | `link.rs` | [`Link`]: messages and one-sided operations to a Ferrite peer |
//! | `raw_connection.rs` | [`RawConnection`]: a peer of another protocol |
//! | `connecting.rs` | [`Fabric::connect`](crate::Fabric::connect) and its relatives |
//! | `listener.rs` `foreign_peers.rs` | [`Listener`], and the foreign peers that connect to it |
//! | `region.rs` | [`Region`]: memory that peers are granted, and that can be revoked |

mod connecting;
mod foreign_peers;
mod link;
mod listener;
mod raw_connection;
mod region;

pub use connecting::{ConnectOptions, Connected, Connecting, ConnectingEither, ConnectingRaw};
pub use foreign_peers::{ForeignPeers, ForeignTcpPeers};
pub use link::{Link, Transport};
pub use listener::{Accepting, ListenOptions, Listener};
pub use raw_connection::{Arrival, Done, Preparing, RawConnection};
pub use region::{Region, Revoking};
