//! The hello: how each side describes itself before the first frame.
//!
//! ```text
//!   0        4     5     6   7        8          16              20       22         24
//!   ┌────────┬─────┬─────┬───┬────────┬──────────┬───────────────┬────────┬──────────┐
//!   │ "FRTE" │major│minor│mtu│program │ features │ segment_bytes │ window │ channels │
//!   │   4    │  1  │  1  │ 1 │   1    │    8     │       4       │   2    │    2     │
//!   └────────┴─────┴─────┴───┴────────┴──────────┴───────────────┴────────┴──────────┘
//!   24                  32         40        48
//!   ┌───────────────────┬──────────┬─────────┐
//!   │ max_message_bytes │ instance │ session │
//!   │         8         │    8     │    8    │
//!   └───────────────────┴──────────┴─────────┘
//! ```
//!
//! Magic and version have the same position in every version. Everything else may change with the
//! major version. A hello must fit into the 56 bytes of private data of a CM request.

use std::fmt;
use std::ops::{BitAnd, BitOr, RangeInclusive};

use super::{field, put};

/// Size of a [`Hello`].
pub const HELLO_BYTES: usize = 48;

/// The first bytes of a [`Hello`].
pub const MAGIC: [u8; 4] = *b"FRTE";

/// A version of the protocol. Peers with different major versions are incompatible. A minor version
/// adds only things that older peers may ignore.
///
/// ```
/// use ferrite_fabric::wire::Version;
///
/// assert_eq!(Version::CURRENT.to_string(), "1.0");
/// assert!(Version { major: 1, minor: 2 } > Version::CURRENT);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Another major version is another protocol.
    pub major: u8,
    /// A later minor version understands earlier ones.
    pub minor: u8,
}

impl Version {
    /// The version of this implementation.
    pub const CURRENT: Self = Self { major: 1, minor: 0 };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Optional capabilities of a peer. A link uses only those that both sides have.
///
/// ```
/// use ferrite_fabric::wire::Features;
///
/// let ours = Features::WRITE_IMM | Features::ONE_SIDED;
/// let theirs = Features::from_bits(0xF0 | 2); // some from a later version
/// let agreed = ours & theirs;
/// assert_eq!(agreed, Features::ONE_SIDED);
/// assert!(!agreed.contains(Features::WRITE_IMM));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Features(u64);

impl Features {
    /// Only two-sided frames.
    pub const NONE: Self = Self(0);
    /// Accepts writes with immediate data.
    pub const WRITE_IMM: Self = Self(1);
    /// Issues and uses grants: one-sided reads and writes.
    pub const ONE_SIDED: Self = Self(2);
    /// Can migrate: a link that loses RDMA continues over TCP, and a link over TCP can be upgraded
    /// to RDMA.
    pub const MOVE: Self = Self(4);

    /// Creates features from the bits on the wire. Unknown bits are kept.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the bits on the wire.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Returns whether these features contain all of `others`.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }
}

impl BitAnd for Features {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The program that a side belongs to. It is information for people; no rule of the protocol
/// depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Program(pub u8);

impl Program {
    /// The side does not tell its program.
    pub const UNKNOWN: Self = Self(0);
    /// The module inside an engine.
    pub const MODULE: Self = Self(1);
    /// The gateway in front of an engine.
    pub const GATEWAY: Self = Self(2);
    /// The agent of a host.
    pub const AGENT: Self = Self(3);
}

/// The description of one side. The limits say what the sender of the hello accepts, not what it
/// will use.
///
/// ```
/// use ferrite_fabric::wire::{Features, Hello, HelloError, Program, Version};
///
/// let hello = Hello {
///     version: Version::CURRENT,
///     features: Features::ONE_SIDED,
///     segment_bytes: 8 << 10,
///     window: 64,
///     channels: 16,
///     max_message_bytes: 512 << 20,
///     instance: 0x5EED,
///     session: 0,
///     mtu: 3,
///     program: Program::GATEWAY,
/// };
/// let mut private_data = hello.encode().to_vec();
/// private_data.resize(56, 0); // as the CM does
/// assert_eq!(Hello::decode(&private_data), Ok(hello));
/// assert_eq!(Hello::decode(b"*1\r\n$4\r\nPING\r\n"), Err(HelloError::ForeignPeer));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The protocol version of the sender.
    pub version: Version,
    /// The capabilities of the sender.
    pub features: Features,
    /// The largest payload of one frame that the sender accepts over RDMA. Over TCP it accepts 64
    /// KiB, or this if it is larger.
    pub segment_bytes: u32,
    /// Number of frames that may be sent to the sender of the hello before it returns credits.
    pub window: u16,
    /// Number of channels that the sender serves. Channels are numbered from 0.
    pub channels: u16,
    /// The largest message that the sender accepts, in bytes. Also limits the bytes of all
    /// unfinished messages together.
    pub max_message_bytes: u64,
    /// A random number per fabric, to distinguish a restarted peer from the old one.
    pub instance: u64,
    /// A random number that the sender chooses for this link; 0 if the link cannot migrate. A peer
    /// that knows the numbers of both sides can migrate the link to another path.
    pub session: u64,
    /// The largest packet that the sender's port carries, in the encoding of verbs: 1 is 256 bytes,
    /// 5 is 4096. 0 if unknown.
    pub mtu: u8,
    /// The program that the sender belongs to.
    pub program: Program,
}

impl Hello {
    /// The valid range of [`Hello::segment_bytes`].
    pub const SEGMENT_BYTES: RangeInclusive<u32> = 256..=2 << 20;
    /// The valid range of [`Hello::window`]: less than half of the range of the 16-bit credit
    /// counter.
    pub const WINDOW: RangeInclusive<u16> = 2..=32_767;
    /// The valid range of [`Hello::channels`]: a frame has 14 bits for the channel.
    pub const CHANNELS: RangeInclusive<u16> = 1..=16_384;

    /// Returns the maximum number of frames of all unfinished messages together. They are limited
    /// because even a short frame may take a whole receive.
    #[must_use]
    pub fn max_frames(&self) -> u64 {
        let whole = self.max_message_bytes / u64::from(self.segment_bytes.max(1));
        whole.saturating_mul(2).saturating_add(self.window.into())
    }

    /// Encodes the hello, valid or not: see [`Hello::check`].
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 4, [self.version.major, self.version.minor, self.mtu, self.program.0]);
        put(&mut bytes, 8, self.features.bits().to_le_bytes());
        put(&mut bytes, 16, self.segment_bytes.to_le_bytes());
        put(&mut bytes, 20, self.window.to_le_bytes());
        put(&mut bytes, 22, self.channels.to_le_bytes());
        put(&mut bytes, 24, self.max_message_bytes.to_le_bytes());
        put(&mut bytes, 32, self.instance.to_le_bytes());
        put(&mut bytes, 40, self.session.to_le_bytes());
        bytes
    }

    /// Decodes a hello of our major version.
    ///
    /// # Errors
    /// Fails in this order: the bytes are not a hello, are too short, have another major version,
    /// or a limit is out of range.
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(HelloError::ForeignPeer);
        }
        let short = HelloError::Short { got: bytes.len() };
        let [major, minor] = field(bytes, 4).ok_or(short)?;
        let version = Version { major, minor };
        if version.major != Version::CURRENT.major {
            return Err(HelloError::Version { theirs: version });
        }
        let hello = Self::fields(version, bytes).ok_or(short)?;
        hello.check()?;
        Ok(hello)
    }

    fn fields(version: Version, bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..HELLO_BYTES)?;
        Some(Self {
            version,
            features: Features(u64::from_le_bytes(field(bytes, 8)?)),
            segment_bytes: u32::from_le_bytes(field(bytes, 16)?),
            window: u16::from_le_bytes(field(bytes, 20)?),
            channels: u16::from_le_bytes(field(bytes, 22)?),
            max_message_bytes: u64::from_le_bytes(field(bytes, 24)?),
            instance: u64::from_le_bytes(field(bytes, 32)?),
            session: u64::from_le_bytes(field(bytes, 40)?),
            // These two bytes were reserved at first, so any value is accepted.
            program: field(bytes, 7).map_or(Program::UNKNOWN, |[program]| Program(program)),
            mtu: field(bytes, 6).filter(|[mtu]| *mtu <= 5).map_or(0, |[mtu]| mtu),
        })
    }

    /// Checks whether a peer would accept these limits. Call this before sending a hello.
    ///
    /// # Errors
    /// [`HelloError::Value`] for the first limit that is out of range.
    pub fn check(&self) -> Result<(), HelloError> {
        let wrong = |field, value| Err(HelloError::Value { field, value });
        if !Self::SEGMENT_BYTES.contains(&self.segment_bytes) {
            return wrong("segment_bytes", self.segment_bytes.into());
        }
        if !Self::WINDOW.contains(&self.window) {
            return wrong("window", self.window.into());
        }
        if !Self::CHANNELS.contains(&self.channels) {
            return wrong("channels", self.channels.into());
        }
        if self.max_message_bytes < self.segment_bytes.into() {
            return wrong("max_message_bytes", self.max_message_bytes);
        }
        Ok(())
    }
}

/// Why bytes are not a valid hello of our version.
///
/// ```
/// use ferrite_fabric::wire::{Hello, HelloError, Version};
///
/// let theirs = Version { major: 2, minor: 1 };
/// let error = Hello::decode(b"FRTE\x02\x01").unwrap_err();
/// assert_eq!(error, HelloError::Version { theirs });
/// assert_eq!(error.to_string(), "the peer speaks version 2.1, this side 1.0");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// The bytes do not start with [`MAGIC`]: the peer is not one of ours, for example a Valkey
    /// client.
    #[error("the peer does not speak Ferrite's protocol")]
    ForeignPeer,
    /// The bytes start like a hello but are too short.
    #[error("the hello has {got} bytes, expected {HELLO_BYTES}")]
    Short {
        /// Number of received bytes.
        got: usize,
    },
    /// The peer has another major version. The rest was not decoded.
    #[error("the peer speaks version {theirs}, this side {}", Version::CURRENT)]
    Version {
        /// The peer's version.
        theirs: Version,
    },
    /// A limit is out of range.
    #[error("{field} {value} of the hello is out of range")]
    Value {
        /// The name of the field.
        field: &'static str,
        /// The value of the field.
        value: u64,
    },
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const HELLO: Hello = Hello {
        version: Version::CURRENT,
        features: Features(0x8000_0000_0000_0003),
        segment_bytes: 0x0001_0203,
        window: 0x0405,
        channels: 0x0607,
        max_message_bytes: 0x0809_0A0B_0C0D_0E0F,
        instance: 0x1011_1213_1415_1617,
        session: 0x1819_1A1B_1C1D_1E1F,
        mtu: 3,
        program: Program::GATEWAY,
    };

    #[test]
    fn golden_bytes() {
        let bytes: [u8; HELLO_BYTES] = [
            b'F', b'R', b'T', b'E', 1, 0, 3, 2, // magic, version, mtu, program
            3, 0, 0, 0, 0, 0, 0, 0x80, // features
            3, 2, 1, 0, 5, 4, 7, 6, // segment_bytes, window, channels
            15, 14, 13, 12, 11, 10, 9, 8, // max_message_bytes
            0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x10, // instance
            0x1F, 0x1E, 0x1D, 0x1C, 0x1B, 0x1A, 0x19, 0x18, // session
        ];
        assert_eq!(HELLO.encode(), bytes);
        assert_eq!(Hello::decode(&bytes), Ok(HELLO));
    }

    #[test]
    fn accepts_unknown_values_trailing_bytes_and_later_minor_versions() {
        let mut bytes = HELLO.encode().to_vec();
        bytes[5] = 9;
        bytes[6..8].fill(0xFF);
        bytes.extend([0xFF; 8]);
        let version = Version { major: 1, minor: 9 };
        let later = Hello { version, mtu: 0, program: Program(0xFF), ..HELLO };
        assert_eq!(Hello::decode(&bytes), Ok(later));
    }

    #[test]
    fn rejects_foreign_and_truncated_bytes() {
        let bytes = HELLO.encode();
        for len in 0..HELLO_BYTES {
            let expected =
                if len < 4 { HelloError::ForeignPeer } else { HelloError::Short { got: len } };
            assert_eq!(Hello::decode(&bytes[..len]), Err(expected), "{len}");
        }
        assert_eq!(Hello::decode(&[0; 56]), Err(HelloError::ForeignPeer));
        assert_eq!(Hello::decode(b"FRNO\x01\x00"), Err(HelloError::ForeignPeer));
    }

    #[test]
    fn rejects_another_major_version_without_decoding_the_rest() {
        let mut bytes = [0xFF; HELLO_BYTES];
        bytes[..6].copy_from_slice(b"FRTE\x00\x07");
        let theirs = Version { major: 0, minor: 7 };
        assert_eq!(Hello::decode(&bytes), Err(HelloError::Version { theirs }));
        assert_eq!(Hello::decode(&bytes[..6]), Err(HelloError::Version { theirs }));
    }

    #[test]
    fn rejects_limits_out_of_range() {
        let least =
            Hello { segment_bytes: 256, window: 2, channels: 1, max_message_bytes: 256, ..HELLO };
        let most = Hello {
            segment_bytes: 2 << 20,
            window: 32_767,
            channels: 16_384,
            max_message_bytes: u64::MAX,
            ..HELLO
        };
        for hello in [least, most] {
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        for (hello, field, value) in [
            (Hello { segment_bytes: 255, ..least }, "segment_bytes", 255),
            (Hello { segment_bytes: (2 << 20) + 1, ..most }, "segment_bytes", (2 << 20) + 1),
            (Hello { window: 1, ..least }, "window", 1),
            (Hello { window: 32_768, ..most }, "window", 32_768),
            (Hello { channels: 0, ..least }, "channels", 0),
            (Hello { channels: 16_385, ..most }, "channels", 16_385),
            (Hello { max_message_bytes: 255, ..least }, "max_message_bytes", 255),
        ] {
            assert_eq!(Hello::decode(&hello.encode()), Err(HelloError::Value { field, value }));
        }
    }

    prop_compose! {
        fn hellos()(
            minor: u8,
            features: u64,
            segment_bytes in Hello::SEGMENT_BYTES,
            window in Hello::WINDOW,
            channels in Hello::CHANNELS,
            beyond: u64,
            instance: u64,
            session: u64,
            mtu in 0..=5_u8,
            program: u8,
        ) -> Hello {
            Hello {
                version: Version { major: Version::CURRENT.major, minor },
                features: Features(features),
                segment_bytes,
                window,
                channels,
                max_message_bytes: beyond.saturating_add(segment_bytes.into()),
                instance,
                session,
                mtu,
                program: Program(program),
            }
        }
    }

    proptest! {
        #[test]
        fn decodes_what_it_encodes(hello in hellos(), padding in 0..16_usize) {
            let mut bytes = hello.encode().to_vec();
            bytes.resize(HELLO_BYTES + padding, 0);
            prop_assert_eq!(Hello::decode(&bytes), Ok(hello));
        }

        #[test]
        fn decodes_only_valid_hellos(mut bytes in vec(any::<u8>(), 0..64), ours: bool) {
            if ours && bytes.len() >= 6 {
                bytes[..6].copy_from_slice(b"FRTE\x01\x00");
            }
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(hello.check(), Ok(()));
                prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            }
        }
    }
}
