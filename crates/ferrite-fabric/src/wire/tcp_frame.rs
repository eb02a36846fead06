//! The TCP frame: the header of everything that a link sends over TCP after the greeting.
//!
//! ```text
//!   0      1          4     8         12    16      24       32
//!   ┌──────┬──────────┬─────┬─────────┬─────┬───────┬────────┬ ─ ─ ─ ─ ┐
//!   │ kind │ reserved │ imm │   len   │ op  │ grant │ offset │ payload │
//!   │  1   │    3     │  4  │    4    │  4  │   8   │   8    │         │
//!   └──────┴──────────┴─────┴─────────┴─────┴───────┴────────┴ ─ ─ ─ ─ ┘
//!   1 Frame     imm as over RDMA, and its payload
//!   2 Write     op, grant, offset, and the bytes
//!   3 WriteImm  as Write, and imm for the peer
//!   4 Read      op, grant, offset; len is the number of requested bytes, and none follow
//!   5 Done      op: the write was executed
//!   6 Data      op, and the bytes that were read
//!   7 Denied    op: the grant does not cover the operation, or was revoked
//!
//!   8 Offer     op: number of the offer, and an address: offers to upgrade to RDMA
//!   9 Answer    op, and an address: accepts the offer
//!  10 Withdraw  op: cancels the upgrade
//!  11 Switch    op: from now on this side sends only 5 to 13 over TCP, until RDMA is lost
//!  12 Resume    offset: number of received frames; RDMA is lost, and the rest is sent over TCP
//!  13 Rekey     grant, offset, imm: address and key of a grant on the next device
//! ```
//!
//! The peer's fabric executes one-sided operations and frames in the order in which they arrive, as
//! a queue pair does.

use super::{field, put};

/// Size of a [`TcpFrame`] without its payload.
pub const TCP_FRAME_HEADER_BYTES: usize = 32;

/// The kind of a TCP frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "described in the table above")]
pub enum TcpFrameKind {
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

impl TcpFrameKind {
    /// Returns whether the frame is part of an upgrade or a migration. Only links that can migrate
    /// send these frames.
    #[must_use]
    pub fn is_migration(self) -> bool {
        matches!(
            self,
            Self::Offer | Self::Answer | Self::Withdraw | Self::Switch | Self::Resume | Self::Rekey
        )
    }
}

/// The header of everything on a TCP connection after the greeting.
///
/// ```
/// use ferrite_fabric::wire::{TcpFrame, TcpFrameKind};
///
/// let (kind, grant, offset) = (TcpFrameKind::Read, 3, 512);
/// let read = TcpFrame { kind, imm: 0, len: 4096, op: 7, grant, offset };
/// assert_eq!(TcpFrame::decode(&read.encode()), Some(read));
/// assert_eq!(read.follows(), 0, "a read request has no payload");
/// assert_eq!(TcpFrame::decode(&[99; 32]), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpFrame {
    /// The kind of the frame.
    pub kind: TcpFrameKind,
    /// The immediate data, as over RDMA: see [`Frame`](super::Frame). For `WriteImm`, the
    /// application's immediate data. For `Rekey`, the key.
    pub imm: u32,
    /// Number of payload bytes; for a read, the number of requested bytes.
    pub len: u32,
    /// The number of a one-sided operation, also in its answer. For frames of an upgrade, the
    /// number of the offer.
    pub op: u32,
    /// The grant of a one-sided operation or of `Rekey`.
    pub grant: u64,
    /// The offset in the grant. For `Resume`, the number of received frames; for `Rekey`, the
    /// address.
    pub offset: u64,
}

impl TcpFrame {
    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; TCP_FRAME_HEADER_BYTES] {
        let kind = match self.kind {
            TcpFrameKind::Frame => 1,
            TcpFrameKind::Write => 2,
            TcpFrameKind::WriteImm => 3,
            TcpFrameKind::Read => 4,
            TcpFrameKind::Done => 5,
            TcpFrameKind::Data => 6,
            TcpFrameKind::Denied => 7,
            TcpFrameKind::Offer => 8,
            TcpFrameKind::Answer => 9,
            TcpFrameKind::Withdraw => 10,
            TcpFrameKind::Switch => 11,
            TcpFrameKind::Resume => 12,
            TcpFrameKind::Rekey => 13,
        };
        let mut bytes = [0; TCP_FRAME_HEADER_BYTES];
        put(&mut bytes, 0, [kind]);
        put(&mut bytes, 4, self.imm.to_le_bytes());
        put(&mut bytes, 8, self.len.to_le_bytes());
        put(&mut bytes, 12, self.op.to_le_bytes());
        put(&mut bytes, 16, self.grant.to_le_bytes());
        put(&mut bytes, 24, self.offset.to_le_bytes());
        bytes
    }

    /// Decodes the header of a TCP frame. Returns `None` if its kind is unknown.
    #[must_use]
    pub fn decode(bytes: &[u8; TCP_FRAME_HEADER_BYTES]) -> Option<Self> {
        let kind = match bytes[0] {
            1 => TcpFrameKind::Frame,
            2 => TcpFrameKind::Write,
            3 => TcpFrameKind::WriteImm,
            4 => TcpFrameKind::Read,
            5 => TcpFrameKind::Done,
            6 => TcpFrameKind::Data,
            7 => TcpFrameKind::Denied,
            8 => TcpFrameKind::Offer,
            9 => TcpFrameKind::Answer,
            10 => TcpFrameKind::Withdraw,
            11 => TcpFrameKind::Switch,
            12 => TcpFrameKind::Resume,
            13 => TcpFrameKind::Rekey,
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

    /// Returns whether this kind has a payload, possibly an empty one.
    #[must_use]
    pub fn has_payload(&self) -> bool {
        matches!(
            self.kind,
            TcpFrameKind::Frame
                | TcpFrameKind::Write
                | TcpFrameKind::WriteImm
                | TcpFrameKind::Data
                | TcpFrameKind::Offer
                | TcpFrameKind::Answer
        )
    }

    /// Returns the number of bytes that follow the header.
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
        let tcp_frame = TcpFrame {
            kind: TcpFrameKind::WriteImm,
            imm: 0x0403_0201,
            len: 0x0807_0605,
            op: 0x0C0B_0A09,
            grant: 0x1413_1211_100F_0E0D,
            offset: 0x1C1B_1A19_1817_1615,
        };
        let mut bytes = [0; TCP_FRAME_HEADER_BYTES];
        bytes[0] = 3;
        for (at, byte) in bytes[4..].iter_mut().enumerate() {
            *byte = at as u8 + 1;
        }
        assert_eq!(tcp_frame.encode(), bytes);
        assert_eq!(TcpFrame::decode(&bytes), Some(tcp_frame));
    }

    proptest! {
        #[test]
        fn decodes_only_known_kinds(mut bytes: [u8; TCP_FRAME_HEADER_BYTES]) {
            bytes[1..4].fill(0);
            if let Some(tcp_frame) = TcpFrame::decode(&bytes) {
                prop_assert_eq!(tcp_frame.encode(), bytes);
            } else {
                prop_assert!(!(1..=13).contains(&bytes[0]));
            }
        }
    }
}
