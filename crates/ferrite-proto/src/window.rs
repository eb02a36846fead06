//! The two windows of a connection: memory of the peer that we may write, and our memory that the
//! peer may write.
//!
//! A window is a linear buffer. It is not a ring, does not wrap, and gives no partial credit:
//!
//! ```text
//!   announced ──► filled to exactly the last byte ──► consumed to the last ──► announced again
//! ```
//!
//! A sender that leaves a byte unfilled blocks its direction for ever. A receiver must not announce
//! early: it could not know which writes still go to the old window, because an immediate says how
//! many bytes arrived, not where. These types prevent both mistakes.

mod receive;
mod send;

pub use receive::ReceiveWindow;
pub use send::{SendWindow, Write};

/// How a peer violated the rules of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WindowError {
    /// The registration has no bytes, so no write could ever fill it.
    #[error("the peer registered no bytes")]
    Empty,
    /// The registration is longer than the limit.
    #[error("the peer registered {length} bytes, but the limit is {limit}")]
    TooLong {
        /// The registered length.
        length: u32,
        /// The limit.
        limit: u32,
    },
    /// The registration extends past the end of the address space.
    #[error("the peer registered {length} bytes at {addr:#x}, past the end of the address space")]
    Address {
        /// The start address.
        addr: u64,
        /// The length.
        length: u32,
    },
    /// The peer registered memory again although we had filled the previous registration only in
    /// part.
    #[error(
        "the peer registered memory again when only {offset} of {length} bytes of the previous \
         registration were written"
    )]
    Early {
        /// Bytes that we wrote.
        offset: u32,
        /// The length of the previous registration.
        length: u32,
    },
    /// The peer wrote more bytes than there was room for.
    #[error("the peer reports {bytes} written bytes, but there was room for {room}")]
    Overrun {
        /// The number in the immediate.
        bytes: u32,
        /// The room that was left.
        room: u32,
    },
}
