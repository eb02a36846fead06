//! The grant token. The owner of memory sends it to a peer, in any message of the application. The
//! peer needs it to access the memory.
//!
//! ```text
//!   0       8      16     24     28       29         32      40
//!   ┌───────┬──────┬──────┬──────┬────────┬──────────┬───────┐
//!   │ grant │ addr │ len  │ rkey │ rights │ reserved │ check │   check: FNV-1a-64 of bytes 0..32
//!   │   8   │  8   │  8   │  4   │   1    │    3     │   8   │
//!   └───────┴──────┴──────┴──────┴────────┴──────────┴───────┘
//! ```
//!
//! The checksum protects against corruption, not against malice: anybody can compute it. Over RDMA,
//! the registration or memory window behind the remote key decides what a peer may access. Over
//! TCP, the owner's fabric decides. The owner can end the access at any time.

use std::fmt;
use std::ops::BitOr;

use super::{field, put};

/// Size of a [`GrantToken`].
pub const GRANT_BYTES: usize = 40;

const CHECKED_BYTES: usize = 32;

/// What a peer may do with a grant: at least one right.
///
/// ```
/// use ferrite_fabric::wire::Rights;
///
/// let rights = Rights::READ | Rights::WRITE;
/// assert!(rights.contains(Rights::READ));
/// assert_eq!(rights.to_string(), "read and write");
/// assert_eq!(Rights::from_bits(8), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rights(u8);

impl Rights {
    /// Read the memory.
    pub const READ: Self = Self(1);
    /// Write to the memory.
    pub const WRITE: Self = Self(2);
    /// Read and write the memory.
    pub const READ_WRITE: Self = Self(3);

    /// Creates rights from the bits on the wire, if the bits are valid.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        match bits {
            1..=3 => Some(Self(bits)),
            _ => None,
        }
    }

    /// Returns the bits on the wire.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns whether these rights contain all of `others`.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

impl BitOr for Rights {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::READ => "read",
            Self::WRITE => "write",
            _ => "read and write",
        })
    }
}

/// The permission to access a range of the owner's memory, over the link on which it was received.
///
/// ```
/// use ferrite_fabric::wire::{GrantToken, Rights};
///
/// let (addr, rights) = (0x7F00_0000_0000, Rights::READ);
/// let token = GrantToken { grant: 1, addr, len: 4096, rkey: 0x1234, rights };
/// assert_eq!(GrantToken::decode(&token.encode()), Ok(token));
/// assert_eq!(token.range(4000, 96), Some(0x7F00_0000_0FA0));
/// assert_eq!(token.range(4000, 97), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantToken {
    /// The number of the grant, which is used to revoke it.
    pub grant: u64,
    /// The start of the memory, as the owner's device addresses it.
    pub addr: u64,
    /// The length of the memory in bytes.
    pub len: u64,
    /// The remote key.
    pub rkey: u32,
    /// What the peer may do with the memory.
    pub rights: Rights,
}

impl GrantToken {
    /// Encodes the token.
    #[must_use]
    pub fn encode(&self) -> [u8; GRANT_BYTES] {
        let mut bytes = [0; GRANT_BYTES];
        put(&mut bytes, 0, self.grant.to_le_bytes());
        put(&mut bytes, 8, self.addr.to_le_bytes());
        put(&mut bytes, 16, self.len.to_le_bytes());
        put(&mut bytes, 24, self.rkey.to_le_bytes());
        put(&mut bytes, 28, [self.rights.bits()]);
        let check = fnv_1a_64(&bytes[..CHECKED_BYTES]);
        put(&mut bytes, CHECKED_BYTES, check.to_le_bytes());
        bytes
    }

    /// Decodes a token.
    ///
    /// # Errors
    /// Fails in this order: the token is too short, is corrupt, or has invalid rights.
    pub fn decode(bytes: &[u8]) -> Result<Self, GrantError> {
        let short = GrantError::Short { got: bytes.len() };
        let check = u64::from_le_bytes(field(bytes, CHECKED_BYTES).ok_or(short)?);
        let checked: [u8; CHECKED_BYTES] = field(bytes, 0).ok_or(short)?;
        if fnv_1a_64(&checked) != check {
            return Err(GrantError::Check);
        }
        let [bits] = field(&checked, 28).ok_or(short)?;
        let rights = Rights::from_bits(bits).ok_or(GrantError::Rights { bits })?;
        Self::fields(rights, &checked).ok_or(short)
    }

    fn fields(rights: Rights, bytes: &[u8]) -> Option<Self> {
        Some(Self {
            grant: u64::from_le_bytes(field(bytes, 0)?),
            addr: u64::from_le_bytes(field(bytes, 8)?),
            len: u64::from_le_bytes(field(bytes, 16)?),
            rkey: u32::from_le_bytes(field(bytes, 24)?),
            rights,
        })
    }

    /// Returns the address of `len` bytes at `offset`, if they lie within the grant. A grant that
    /// exceeds the address space contains nothing.
    #[must_use]
    pub fn range(&self, offset: u64, len: u64) -> Option<u64> {
        self.addr.checked_add(self.len)?;
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        self.addr.checked_add(offset)
    }
}

fn fnv_1a_64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// Why bytes are not a valid grant token.
///
/// ```
/// use ferrite_fabric::wire::{GrantError, GrantToken};
///
/// assert_eq!(GrantToken::decode(&[0; 39]), Err(GrantError::Short { got: 39 }));
/// assert_eq!(GrantToken::decode(&[0; 40]), Err(GrantError::Check));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// The token is too short.
    #[error("the grant has {got} bytes, expected {GRANT_BYTES}")]
    Short {
        /// Number of received bytes.
        got: usize,
    },
    /// The checksum does not match.
    #[error("the grant is corrupt: its checksum does not match")]
    Check,
    /// The token has no right, or one that this version does not know.
    #[error("the grant has invalid rights {bits:#x}")]
    Rights {
        /// The bits.
        bits: u8,
    },
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const TOKEN: GrantToken = GrantToken {
        grant: 0x0102_0304_0506_0708,
        addr: 0x1112_1314_1516_1718,
        len: 0x2122_2324_2526_2728,
        rkey: 0x3132_3334,
        rights: Rights::WRITE,
    };

    /// Returns the bytes with a matching checksum.
    fn with_checksum(mut bytes: [u8; GRANT_BYTES]) -> [u8; GRANT_BYTES] {
        let check = fnv_1a_64(&bytes[..CHECKED_BYTES]);
        put(&mut bytes, CHECKED_BYTES, check.to_le_bytes());
        bytes
    }

    #[test]
    fn golden_bytes() {
        let bytes: [u8; GRANT_BYTES] = [
            8, 7, 6, 5, 4, 3, 2, 1, // grant
            0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, // addr
            0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, // len
            0x34, 0x33, 0x32, 0x31, 2, 0, 0, 0, // rkey, rights, reserved
            0xB7, 0xE9, 0x02, 0x84, 0x07, 0x2C, 0x8B, 0x16, // check
        ];
        assert_eq!(TOKEN.encode(), bytes);
        assert_eq!(GrantToken::decode(&bytes), Ok(TOKEN));
    }

    #[test]
    fn the_checksum_is_fnv_1a() {
        assert_eq!(fnv_1a_64(b""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv_1a_64(b"a"), 0xAF63_DC4C_8601_EC8C);
        assert_eq!(fnv_1a_64(b"foobar"), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn rejects_truncated_corrupt_and_invalid_bytes() {
        let bytes = TOKEN.encode();
        for len in 0..GRANT_BYTES {
            assert_eq!(GrantToken::decode(&bytes[..len]), Err(GrantError::Short { got: len }));
        }
        for at in 0..GRANT_BYTES * 8 {
            let mut corrupt = bytes;
            corrupt[at / 8] ^= 1 << (at % 8);
            assert_eq!(GrantToken::decode(&corrupt), Err(GrantError::Check), "bit {at}");
        }
        for bits in [0, 4, 7, 255] {
            let mut other = bytes;
            other[28] = bits;
            assert_eq!(GrantToken::decode(&with_checksum(other)), Err(GrantError::Rights { bits }));
        }
    }

    #[test]
    fn ignores_reserved_and_trailing_bytes() {
        let mut bytes = TOKEN.encode();
        bytes[29..32].fill(0xFF);
        let mut bytes = with_checksum(bytes).to_vec();
        bytes.push(0xFF);
        assert_eq!(GrantToken::decode(&bytes), Ok(TOKEN));
    }

    #[test]
    fn refuses_ranges_outside_of_the_grant() {
        let token = GrantToken { addr: 1000, len: 100, ..TOKEN };
        for (offset, len, addr) in [
            (0, 0, Some(1000)),
            (0, 100, Some(1000)),
            (99, 1, Some(1099)),
            (100, 0, Some(1100)),
            (0, 101, None),
            (100, 1, None),
            (101, 0, None),
            (u64::MAX, 2, None),
            (2, u64::MAX, None),
        ] {
            assert_eq!(token.range(offset, len), addr, "{len} bytes at {offset}");
        }
        let beyond_all = GrantToken { addr: u64::MAX - 1, len: 100, ..TOKEN };
        assert_eq!(beyond_all.range(0, 1), None);
    }

    prop_compose! {
        fn tokens()(grant: u64, addr: u64, len: u64, rkey: u32, bits in 1..=3_u8) -> GrantToken {
            GrantToken { grant, addr, len, rkey, rights: Rights(bits) }
        }
    }

    proptest! {
        #[test]
        fn decodes_what_it_encodes(token in tokens()) {
            prop_assert_eq!(GrantToken::decode(&token.encode()), Ok(token));
        }

        #[test]
        fn decodes_only_valid_grants(bytes in vec(any::<u8>(), 0..48), fit: bool) {
            let bytes = match bytes.first_chunk() {
                Some(whole) if fit => with_checksum(*whole).to_vec(),
                _ => bytes,
            };
            if let Ok(token) = GrantToken::decode(&bytes) {
                prop_assert_eq!(GrantToken::decode(&token.encode()), Ok(token));
            }
        }

        #[test]
        fn ranges_lie_in_the_grant(token in tokens(), offset: u64, len: u64, small in 0..1000_u64) {
            for (offset, len) in [(offset, len), (offset, small), (small, len), (small, small)] {
                if let Some(addr) = token.range(offset, len) {
                    let (addr, len) = (u128::from(addr), u128::from(len));
                    prop_assert!(addr >= token.addr.into());
                    prop_assert!(addr + len <= u128::from(token.addr) + u128::from(token.len));
                }
            }
        }
    }
}
