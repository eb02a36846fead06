//! What links say to each other: pure values and their bytes, no I/O. For peers in other languages:
//! `docs/book/src/protocol/links.md`.
//!
//! | message | where it travels |
//! |---|---|
//! | [`Hello`] | private data of a CM request and of its acceptance; the first bytes of a TCP connection, each way |
//! | [`Refusal`] | private data of a CM rejection; the answer over TCP |
//! | [`Frame`] | immediate data of every two-sided frame |
//! | [`Control`] | payload of a control frame |
//! | [`Parcel`] | before everything on a TCP path |
//! | [`GrantToken`] | anywhere in the application's messages |
//!
//! Rules of all layouts: integers are little-endian; reserved bytes are sent as zeros and ignored when received; so is
//! whatever follows a layout, because the CM pads private data. A decoder takes any bytes, never panics, and never
//! allocates by a number of the peer's.

mod address;
mod control;
mod frame;
mod grant;
mod greeting;
mod hello;
mod parcel;
mod refusal;

pub use address::{ADDRESS_BYTES, Address};
pub use control::{CONTROL_BYTES, Control, ControlError};
pub use frame::Frame;
pub use grant::{GRANT_BYTES, GrantError, GrantToken, Rights};
pub use greeting::{GREETING_BYTES, Greeting, Resume};
pub use hello::{Features, HELLO_BYTES, Hello, HelloError, MAGIC, Version};
pub use parcel::{PARCEL_BYTES, Parcel, ParcelKind};
pub use refusal::{REFUSAL_BYTES_MAX, REFUSAL_MAGIC, Refusal, RefusalCode};

/// The `N` bytes of a field, if the message is long enough.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Writes a field of a message that we lay out ourselves: `at` and the length are constants of the layout.
fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}
