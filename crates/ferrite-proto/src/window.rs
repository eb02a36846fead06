//! The two windows of a connection: what we may write at the peer, and what the peer may write
//! here.
//!
//! A window is a linear buffer. There is no ring, no wrap and no partial credit:
//!
//! ```text
//!   announced ──► filled, from the first byte to exactly the last ──► consumed to the last ──► announced again
//! ```
//!
//! A sender that leaves a byte unfilled stops its direction for ever; a receiver that announces
//! early cannot know which writes still go to the old one, because an immediate says how many bytes
//! came and not where. So neither happens here.

mod receive;
mod send;

pub use receive::ReceiveWindow;
pub use send::{SendWindow, Write};

/// How a peer broke the rules of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WindowError {
    /// A registration without a byte: no write could ever fill it.
    #[error("the peer registered no bytes")]
    Empty,
    /// A registration of more than we take.
    #[error("the peer registered {length} bytes, at most {limit} are taken")]
    TooLong {
        /// What it says.
        length: u32,
        /// What we take.
        limit: u32,
    },
    /// A registration that goes past the end of the address space.
    #[error(
        "the peer registered {length} bytes at {addr:#x}, which is past the end of its addresses"
    )]
    Address {
        /// Where it begins.
        addr: u64,
        /// How long it is.
        length: u32,
    },
    /// A registration while bytes of ours are in the one before, and it is not full.
    #[error("the peer registered anew when {offset} of {length} bytes were written")]
    Early {
        /// Bytes that we wrote.
        offset: u32,
        /// Bytes that the registration had.
        length: u32,
    },
    /// More bytes than there is room for.
    #[error("the peer says that it wrote {bytes} bytes, there was room for {room}")]
    Overrun {
        /// What the immediate says.
        bytes: u32,
        /// What was left.
        room: u32,
    },
}
