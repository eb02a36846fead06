//! The messages in the private data of the CM's handshake.
//!
//! Request, client to server, 40 bytes (56 fit; the CM pads with zeros), numbers big-endian:
//!
//! ```text
//!  0   4  magic "FEpp"
//!  4   1  version, 1
//!  5   1  operation: 1 send, 2 write, 3 read
//!  6   1  mode: 1 poll, 2 event
//!  7   1  reserved, 0
//!  8   4  message size in bytes, 1 to 64 MiB
//! 12   4  inline up to this many bytes
//! 16   8  number of rounds with warm-up, at least 1
//! 24   8  address of the client's memory for the server's writes
//! 32   4  its rkey
//! 36   4  reserved, 0
//! ```
//!
//! Reply, server to client when it accepts, 20 bytes:
//!
//! ```text
//!  0   4  magic "FEpp"
//!  4   1  version, 1
//!  5   3  reserved, 0
//!  8   8  address of the server's memory
//! 16   4  its rkey
//! ```

use std::fmt;

use super::{Mode, Op};

/// The largest message. It limits the memory that a client can make the server pin.
pub(super) const SIZE_MAX: u32 = 64 << 20;

const MAGIC: [u8; 4] = *b"FEpp";
const VERSION: u8 = 1;

/// The test that the client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) op: Op,
    pub(super) mode: Mode,
    pub(super) size: u32,
    pub(super) inline: u32,
    pub(super) rounds: u64,
    pub(super) memory: Memory,
}

/// Memory that the peer may write or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    pub(super) addr: u64,
    pub(super) rkey: u32,
}

/// Private data of another protocol or version, or with an invalid field.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    Short { len: usize, wanted: usize },
    Magic,
    Version(u8),
    Field(&'static str, u64),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { len, wanted } => {
                write!(f, "received {len} bytes of private data, expected at least {wanted}")
            }
            Self::Magic => f.write_str(
                "the peer is another program than `ferrite pingpong`; run `ferrite pingpong` on \
                 both hosts, with a port that no other program uses",
            ),
            Self::Version(version) => {
                write!(
                    f,
                    "the peer uses protocol version {version}, this side {VERSION}; run the same \
                     version of ferrite on both hosts"
                )
            }
            Self::Field(name, value) => write!(f, "the peer sent an invalid {name}: {value}"),
        }
    }
}

impl std::error::Error for Malformed {}

impl Request {
    pub(super) const LEN: usize = 40;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = match self.op {
            Op::Send => 1,
            Op::Write => 2,
            Op::Read => 3,
        };
        out[6] = match self.mode {
            Mode::Poll => 1,
            Mode::Event => 2,
        };
        out[8..12].copy_from_slice(&self.size.to_be_bytes());
        out[12..16].copy_from_slice(&self.inline.to_be_bytes());
        out[16..24].copy_from_slice(&self.rounds.to_be_bytes());
        out[24..32].copy_from_slice(&self.memory.addr.to_be_bytes());
        out[32..36].copy_from_slice(&self.memory.rkey.to_be_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes: &[u8; Self::LEN] = checked(bytes)?;
        let op = match bytes[5] {
            1 => Op::Send,
            2 => Op::Write,
            3 => Op::Read,
            other => return Err(Malformed::Field("operation", other.into())),
        };
        let mode = match bytes[6] {
            1 => Mode::Poll,
            2 if op != Op::Write => Mode::Event,
            other => return Err(Malformed::Field("mode", other.into())),
        };
        let size = u32_at(bytes, 8);
        if size == 0 || size > SIZE_MAX {
            return Err(Malformed::Field("message size", size.into()));
        }
        let rounds = u64_at(bytes, 16);
        if rounds == 0 {
            return Err(Malformed::Field("number of rounds", rounds));
        }
        let memory = Memory { addr: u64_at(bytes, 24), rkey: u32_at(bytes, 32) };
        Ok(Self { op, mode, size, inline: u32_at(bytes, 12), rounds, memory })
    }
}

impl Memory {
    const LEN: usize = 20;

    /// Encodes the server's reply.
    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[8..16].copy_from_slice(&self.addr.to_be_bytes());
        out[16..20].copy_from_slice(&self.rkey.to_be_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes: &[u8; Self::LEN] = checked(bytes)?;
        Ok(Self { addr: u64_at(bytes, 8), rkey: u32_at(bytes, 16) })
    }
}

/// Returns the first `N` bytes after a check of magic and version. Ignores the bytes after them,
/// with which the CM pads.
fn checked<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], Malformed> {
    let found: &[u8; N] =
        bytes.first_chunk().ok_or(Malformed::Short { len: bytes.len(), wanted: N })?;
    if found[0..4] != MAGIC {
        return Err(Malformed::Magic);
    }
    if found[4] != VERSION {
        return Err(Malformed::Version(found[4]));
    }
    Ok(found)
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    bytes[at..at + 8].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        op: Op::Read,
        mode: Mode::Event,
        size: 0x0102_0304,
        inline: 220,
        rounds: 1100,
        memory: Memory { addr: 0x1122_3344_5566_7788, rkey: 0x99aa_bbcc },
    };

    const GOLDEN_REQUEST: [u8; 40] = [
        b'F', b'E', b'p', b'p', 1, 3, 2, 0, // magic, version, read, event
        1, 2, 3, 4, 0, 0, 0, 220, // size, inline
        0, 0, 0, 0, 0, 0, 4, 0x4c, // rounds
        0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, // address
        0x99, 0xaa, 0xbb, 0xcc, 0, 0, 0, 0, // key
    ];

    const GOLDEN_REPLY: [u8; 20] = [
        b'F', b'E', b'p', b'p', 1, 0, 0, 0, // magic, version
        0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, // address
        0x99, 0xaa, 0xbb, 0xcc, // key
    ];

    #[test]
    fn golden_bytes() {
        assert_eq!(REQUEST.encode(), GOLDEN_REQUEST);
        assert_eq!(REQUEST.memory.encode(), GOLDEN_REPLY);
        const { assert!(Request::LEN <= ferrite_verbs::cm::REQUEST_PRIVATE_DATA_MAX) };
        const { assert!(Memory::LEN <= ferrite_verbs::cm::ACCEPT_PRIVATE_DATA_MAX) };
    }

    #[test]
    fn ignores_padding() {
        let mut padded = GOLDEN_REQUEST.to_vec();
        padded.resize(56, 0);
        assert_eq!(Request::decode(&padded), Ok(REQUEST));
        let mut padded = GOLDEN_REPLY.to_vec();
        padded.resize(196, 0);
        assert_eq!(Memory::decode(&padded), Ok(REQUEST.memory));
    }

    #[test]
    fn errors_name_the_invalid_field() {
        let with = |at: usize, value: u8| {
            let mut bytes = GOLDEN_REQUEST;
            bytes[at] = value;
            Request::decode(&bytes)
        };
        assert_eq!(
            Request::decode(&GOLDEN_REQUEST[..39]),
            Err(Malformed::Short { len: 39, wanted: 40 })
        );
        assert_eq!(with(0, b'X'), Err(Malformed::Magic));
        assert_eq!(with(4, 2), Err(Malformed::Version(2)));
        assert_eq!(with(5, 0), Err(Malformed::Field("operation", 0)));
        assert_eq!(with(5, 2), Err(Malformed::Field("mode", 2)), "write in event mode");
        assert_eq!(with(6, 9), Err(Malformed::Field("mode", 9)));
        assert_eq!(with(8, 255), Err(Malformed::Field("message size", 0xff02_0304)));
        assert_eq!(Memory::decode(&[]), Err(Malformed::Short { len: 0, wanted: 20 }));
    }

    #[test]
    fn no_input_panics() {
        // Tries every length, and every value of every single byte.
        for len in 0..=GOLDEN_REQUEST.len() {
            let _ = Request::decode(&GOLDEN_REQUEST[..len]);
            let _ = Memory::decode(&GOLDEN_REQUEST[..len]);
        }
        for at in 0..GOLDEN_REQUEST.len() {
            for value in 0..=255 {
                let mut bytes = GOLDEN_REQUEST;
                bytes[at] = value;
                if let Ok(request) = Request::decode(&bytes) {
                    assert_eq!(Request::decode(&request.encode()), Ok(request));
                }
                let _ = Memory::decode(&bytes);
            }
        }
    }
}
