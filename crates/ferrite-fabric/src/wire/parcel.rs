//! The parcel: what a link sends over TCP, where nobody but the other engine reads.
//!
//! ```text
//!   0      1          4     8         12    16      24       32
//!   ┌──────┬──────────┬─────┬─────────┬─────┬───────┬────────┬ ─ ─ ─ ─ ┐
//!   │ kind │ reserved │ imm │ payload │ op  │ grant │ offset │ payload │
//!   │  1   │    3     │  4  │    4    │  4  │   8   │   8    │         │
//!   └──────┴──────────┴─────┴─────────┴─────┴───────┴────────┴ ─ ─ ─ ─ ┘
//!   1 Frame    imm as on RDMA, and its payload
//!   2 Write    op, grant, offset, and the bytes         3 WriteImm  the same, and imm for the peer
//!   4 Read     op, grant, offset; `payload` says how many bytes are wanted, none follow
//!   5 Done     op: the write was carried out            6 Data      op, and the bytes that were read
//!   7 Denied   op: the grant does not cover it, or is over
//!
//!   8 Offer    an address: go on over RDMA?             9 Answer    an address: yes, there
//!  10 Withdraw not over RDMA after all                 11 Switch    the last of this side on TCP, answers excepted
//!  12 Resume   offset: frames that came; RDMA is lost, the rest comes here
//!  13 Rekey    grant, offset, imm: address and key of a grant on the device that is next
//! ```
//!
//! One-sided operations are served by the peer's engine in the order in which they come, among the frames: as on a queue pair.

use super::{field, put};

/// The bytes of a [`Parcel`] without its payload.
pub const PARCEL_BYTES: usize = 32;

/// What a parcel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the table above says it")]
pub enum ParcelKind {
    Frame,
    Write,
    WriteImm,
    Read,
    Done,
    Data,
    Denied,
    Offer,
    Answer,
    Withdraw,
    Switch,
    Resume,
    Rekey,
}

/// What stands before the payload of everything on a TCP path.
///
/// ```
/// use ferrite_fabric::wire::{Parcel, ParcelKind};
///
/// let read = Parcel { kind: ParcelKind::Read, imm: 0, len: 4096, op: 7, grant: 3, offset: 512 };
/// assert_eq!(Parcel::decode(&read.encode()), Some(read));
/// assert_eq!(read.follows(), 0, "a question has no payload");
/// assert_eq!(Parcel::decode(&[99; 32]), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parcel {
    /// What it is.
    pub kind: ParcelKind,
    /// As on RDMA: see [`Frame`](super::Frame). Of a write with immediate data: the application's.
    pub imm: u32,
    /// Bytes of payload; of a read: bytes that are wanted.
    pub len: u32,
    /// The number of a one-sided operation, and of its answer.
    pub op: u32,
    /// What a one-sided operation uses.
    pub grant: u64,
    /// Where in it.
    pub offset: u64,
}

impl Parcel {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; PARCEL_BYTES] {
        let kind = match self.kind {
            ParcelKind::Frame => 1,
            ParcelKind::Write => 2,
            ParcelKind::WriteImm => 3,
            ParcelKind::Read => 4,
            ParcelKind::Done => 5,
            ParcelKind::Data => 6,
            ParcelKind::Denied => 7,
            ParcelKind::Offer => 8,
            ParcelKind::Answer => 9,
            ParcelKind::Withdraw => 10,
            ParcelKind::Switch => 11,
            ParcelKind::Resume => 12,
            ParcelKind::Rekey => 13,
        };
        let mut bytes = [0; PARCEL_BYTES];
        put(&mut bytes, 0, [kind]);
        put(&mut bytes, 4, self.imm.to_le_bytes());
        put(&mut bytes, 8, self.len.to_le_bytes());
        put(&mut bytes, 12, self.op.to_le_bytes());
        put(&mut bytes, 16, self.grant.to_le_bytes());
        put(&mut bytes, 24, self.offset.to_le_bytes());
        bytes
    }

    /// Reads the head of a parcel; `None` if its kind is not known.
    #[must_use]
    pub fn decode(bytes: &[u8; PARCEL_BYTES]) -> Option<Self> {
        let kind = match bytes[0] {
            1 => ParcelKind::Frame,
            2 => ParcelKind::Write,
            3 => ParcelKind::WriteImm,
            4 => ParcelKind::Read,
            5 => ParcelKind::Done,
            6 => ParcelKind::Data,
            7 => ParcelKind::Denied,
            8 => ParcelKind::Offer,
            9 => ParcelKind::Answer,
            10 => ParcelKind::Withdraw,
            11 => ParcelKind::Switch,
            12 => ParcelKind::Resume,
            13 => ParcelKind::Rekey,
            _ => return None,
        };
        Some(Self {
            kind,
            imm: u32::from_le_bytes(field(bytes, 4)?),
            len: u32::from_le_bytes(field(bytes, 8)?),
            op: u32::from_le_bytes(field(bytes, 12)?),
            grant: u64::from_le_bytes(field(bytes, 16)?),
            offset: u64::from_le_bytes(field(bytes, 24)?),
        })
    }

    /// Whether it is of a kind that has a payload, if only an empty one.
    #[must_use]
    pub fn has_payload(&self) -> bool {
        matches!(
            self.kind,
            ParcelKind::Frame
                | ParcelKind::Write
                | ParcelKind::WriteImm
                | ParcelKind::Data
                | ParcelKind::Offer
                | ParcelKind::Answer
        )
    }

    /// Bytes that follow it.
    #[must_use]
    pub fn follows(&self) -> usize {
        if self.has_payload() { self.len as usize } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let parcel = Parcel {
            kind: ParcelKind::WriteImm,
            imm: 0x0403_0201,
            len: 0x0807_0605,
            op: 0x0C0B_0A09,
            grant: 0x1413_1211_100F_0E0D,
            offset: 0x1C1B_1A19_1817_1615,
        };
        let mut bytes = [0; PARCEL_BYTES];
        bytes[0] = 3;
        for (at, byte) in bytes[4..].iter_mut().enumerate() {
            *byte = at as u8 + 1;
        }
        assert_eq!(parcel.encode(), bytes);
        assert_eq!(Parcel::decode(&bytes), Some(parcel));
    }

    proptest! {
        #[test]
        fn any_bytes(mut bytes: [u8; PARCEL_BYTES]) {
            bytes[1..4].fill(0);
            if let Some(parcel) = Parcel::decode(&bytes) {
                prop_assert_eq!(parcel.encode(), bytes);
            } else {
                prop_assert!(!(1..=13).contains(&bytes[0]));
            }
        }
    }
}
