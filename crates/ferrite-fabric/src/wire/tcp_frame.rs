//! The TCP frame: what a link sends over TCP, where nobody but the other fabric reads.
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
//! One-sided operations are served by the peer's fabric in the order in which they come, among the
//! frames: as on a queue pair.

use super::{field, put};

/// The bytes of a [`TcpFrame`] without its payload.
pub const TCP_FRAME_HEADER_BYTES: usize = 32;

/// What a TCP frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the table above says it")]
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
    /// Whether it is about another path: only for links that both sides let move.
    #[must_use]
    pub fn is_of_moving(self) -> bool {
        matches!(
            self,
            Self::Offer | Self::Answer | Self::Withdraw | Self::Switch | Self::Resume | Self::Rekey
        )
    }
}

/// What stands before the payload of everything on a TCP path.
///
/// ```
/// use ferrite_fabric::wire::{TcpFrame, TcpFrameKind};
///
/// let read = TcpFrame { kind: TcpFrameKind::Read, imm: 0, len: 4096, op: 7, grant: 3, offset: 512 };
/// assert_eq!(TcpFrame::decode(&read.encode()), Some(read));
/// assert_eq!(read.follows(), 0, "a question has no payload");
/// assert_eq!(TcpFrame::decode(&[99; 32]), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpFrame {
    /// What it is.
    pub kind: TcpFrameKind,
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

impl TcpFrame {
    /// Its bytes.
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

    /// Reads the head of a TCP frame; `None` if its kind is not known.
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

    /// Whether it is of a kind that has a payload, if only an empty one.
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
        fn any_bytes(mut bytes: [u8; TCP_FRAME_HEADER_BYTES]) {
            bytes[1..4].fill(0);
            if let Some(tcp_frame) = TcpFrame::decode(&bytes) {
                prop_assert_eq!(tcp_frame.encode(), bytes);
            } else {
                prop_assert!(!(1..=13).contains(&bytes[0]));
            }
        }
    }
}
