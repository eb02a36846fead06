//! The wire format of links: values and their bytes, without I/O. `docs/book/src/protocol/links.md`
//! describes the format for peers in other languages.
//!
//! | message | where it is sent |
//! |---|---|
//! | [`Hello`] | private data of a CM request and its response; start of a greeting |
//! | [`Greeting`] | first bytes of a TCP connection |
//! | [`Refusal`] | private data of a CM rejection; on TCP, the answer to a refused greeting |
//! | [`Frame`] | immediate data of every two-sided frame |
//! | [`Control`] | payload of a control frame |
//! | [`TcpFrame`] | header of everything on a TCP connection after the greeting |
//! | [`Address`] | payload of an `Offer` or `Answer` on TCP |
//! | [`GrantToken`] | anywhere in the application's messages |
//!
//! All layouts follow the same rules. Integers are little-endian. Reserved bytes are sent as zeros
//! and ignored when received. Bytes after a layout are ignored, too, because the CM pads private
//! data. A decoder accepts any bytes, never panics, and never allocates an amount that the peer
//! chose.

mod address;
mod control;
mod frame;
mod grant;
mod greeting;
mod hello;
mod refusal;
mod tcp_frame;

pub use address::{ADDRESS_BYTES, Address};
pub use control::{CONTROL_BYTES, Control, ControlError};
pub use frame::Frame;
pub use grant::{GRANT_BYTES, GrantError, GrantToken, Rights};
pub use greeting::{GREETING_BYTES, Greeting, Resume};
pub use hello::{Features, HELLO_BYTES, Hello, HelloError, MAGIC, Program, Version};
pub use refusal::{REFUSAL_BYTES_MAX, REFUSAL_MAGIC, Refusal, RefusalCode};
pub use tcp_frame::{TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind};

/// Returns the `N` bytes of a field, if the message is long enough.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Writes a field of a message. `at` and `N` are constants of the layout.
fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}
