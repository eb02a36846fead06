//! The address of a queue pair, which two peers exchange over TCP to upgrade to RDMA.
//!
//! ```text
//!   0        4     8     10    11         12          13         16    32    40
//!   ┌────────┬─────┬─────┬─────┬──────────┬───────────┬──────────┬─────┬──────────┐
//!   │ qp_num │ psn │ lid │ mtu │ reads_in │ reads_out │ reserved │ gid │ reserved │
//!   │   4    │  4  │  2  │  1  │    1     │     1     │    3     │ 16  │    8     │
//!   └────────┴─────┴─────┴─────┴──────────┴───────────┴──────────┴─────┴──────────┘
//! ```

use super::{field, put};

/// Size of an [`Address`].
pub const ADDRESS_BYTES: usize = 40;

/// The address and the limits of a queue pair.
///
/// ```
/// use ferrite_fabric::wire::Address;
///
/// let gid = [7; 16];
/// let (qp_num, psn, lid, mtu, reads_in, reads_out) = (17, 1, 0, 3, 16, 16);
/// let address = Address { qp_num, psn, lid, mtu, reads_in, reads_out, gid };
/// assert_eq!(Address::decode(&address.encode()), Some(address));
/// assert_eq!(Address::decode(&[0; 39]), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The queue pair number.
    pub qp_num: u32,
    /// The sequence number of the first packet that the queue pair sends.
    pub psn: u32,
    /// The local identifier of the port (InfiniBand).
    pub lid: u16,
    /// The path MTU in the encoding of verbs: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Number of the peer's reads that the queue pair serves at a time.
    pub reads_in: u8,
    /// Number of reads that the queue pair may have outstanding.
    pub reads_out: u8,
    /// The GID of the port.
    pub gid: [u8; 16],
}

impl Address {
    /// Encodes the address.
    #[must_use]
    pub fn encode(&self) -> [u8; ADDRESS_BYTES] {
        let mut bytes = [0; ADDRESS_BYTES];
        put(&mut bytes, 0, self.qp_num.to_le_bytes());
        put(&mut bytes, 4, self.psn.to_le_bytes());
        put(&mut bytes, 8, self.lid.to_le_bytes());
        put(&mut bytes, 10, [self.mtu, self.reads_in, self.reads_out]);
        put(&mut bytes, 16, self.gid);
        bytes
    }

    /// Decodes an address; `None` if it is too short or has an invalid MTU.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..ADDRESS_BYTES)?;
        let [mtu, reads_in, reads_out] = field(bytes, 10)?;
        (1..=5).contains(&mtu).then_some(())?;
        Some(Self {
            qp_num: u32::from_le_bytes(field(bytes, 0)?) & 0x00ff_ffff,
            psn: u32::from_le_bytes(field(bytes, 4)?) & 0x00ff_ffff,
            lid: u16::from_le_bytes(field(bytes, 8)?),
            mtu,
            reads_in,
            reads_out,
            gid: field(bytes, 16)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let gid = std::array::from_fn(|at| at as u8 + 0x20);
        let address = Address {
            qp_num: 0x0003_0201,
            psn: 0x0007_0605,
            lid: 0x0A09,
            mtu: 5,
            reads_in: 12,
            reads_out: 13,
            gid,
        };
        let bytes = address.encode();
        assert_eq!(bytes[..16], [1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 5, 12, 13, 0, 0, 0]);
        assert_eq!((bytes[16], bytes[31], &bytes[32..]), (0x20, 0x2F, &[0; 8][..]));
        assert_eq!(Address::decode(&bytes), Some(address));
        for mtu in [0, 6, 255] {
            assert_eq!(Address::decode(&Address { mtu, ..address }.encode()), None);
        }
    }
}
