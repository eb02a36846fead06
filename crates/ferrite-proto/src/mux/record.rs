//! The records of the multiplexer. Each has a head of 12 bytes and a body. Integers are in little
//! endian.
//!
//! ```text
//!   0      1       2          4          8          12
//!   ┌──────┬───────┬──────────┬──────────┬──────────┬──────────────────────┐
//!   │ type │ flags │ reserved │  stream  │  length  │ body, `length` bytes │
//!   └──────┴───────┴──────────┴──────────┴──────────┴──────────────────────┘
//!
//!   1 OPEN    destination, source: 20 bytes each
//!   2 DATA    bytes of the stream    flag 1: the sender changes to the class in flags 2 and 4
//!   3 GRANT   number of bytes        flag 1: answers a change of the class
//!   4 FIN     empty
//!   5 RESET   cause: 4 bytes
//!   6 GOAWAY  empty; `stream` is the last stream that is accepted, or 0
//! ```
//!
//! Reserved bytes and unknown flags are sent as zeros and ignored on receipt.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::cause::Cause;
use super::id::{Class, StreamId};

/// The size of the head of a record in bytes.
pub const HEAD_BYTES: usize = 12;
/// The size of an address in an OPEN record.
const ADDRESS_BYTES: usize = 20;
/// The size of the largest record that is not DATA.
pub const CONTROL_BYTES: usize = HEAD_BYTES + 2 * ADDRESS_BYTES;

const FLAG: u8 = 1;
const CLASS_SHIFT: u8 = 1;

/// Where a stream leads, and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The address that the program asked for.
    pub destination: SocketAddr,
    /// The address of the program.
    pub source: SocketAddr,
}

/// A record without bytes of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Opens a stream. Its data may follow at once.
    Open {
        /// The new stream.
        stream: StreamId,
        /// The destination and the source of the stream.
        route: Route,
    },
    /// Allows the peer to send more bytes.
    Grant {
        /// The stream.
        stream: StreamId,
        /// How many more bytes the peer may send.
        bytes: u32,
        /// Whether this answers a DATA record that announced a change of class.
        answers_move: bool,
    },
    /// Ends one direction of a stream.
    Fin {
        /// The stream.
        stream: StreamId,
    },
    /// Ends a stream in both directions. Bytes under way are lost.
    Reset {
        /// The stream.
        stream: StreamId,
        /// Why the stream is reset.
        cause: Cause,
    },
    /// Says that the sender accepts no further streams.
    GoAway {
        /// The last stream of the peer that is accepted; `None` if there was none.
        last: Option<StreamId>,
    },
}

/// The head of a DATA record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataHead {
    /// The stream.
    pub stream: StreamId,
    /// The number of bytes that follow.
    pub length: u32,
    /// The class that the sender changes to. It sends nothing more of the stream until the peer has
    /// answered.
    pub next_class: Option<Class>,
}

/// An encoded record.
#[derive(Debug, Clone, Copy)]
pub struct Encoded {
    bytes: [u8; CONTROL_BYTES],
    len: usize,
}

impl std::ops::Deref for Encoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Encoded {
    fn new(kind: u8, flags: u8, stream: u32, body: &[u8]) -> Self {
        let mut bytes = [0; CONTROL_BYTES];
        bytes[0] = kind;
        bytes[1] = flags;
        bytes[4..8].copy_from_slice(&stream.to_le_bytes());
        bytes[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
        bytes[HEAD_BYTES..HEAD_BYTES + body.len()].copy_from_slice(body);
        Self { bytes, len: HEAD_BYTES + body.len() }
    }
}

impl Control {
    /// Returns the bytes of the record.
    #[must_use]
    pub fn encode(&self) -> Encoded {
        match *self {
            Self::Open { stream, route: Route { destination, source } } => {
                let mut body = [0; 2 * ADDRESS_BYTES];
                let (first, second) = body.split_at_mut(ADDRESS_BYTES);
                encode_address(destination, first);
                encode_address(source, second);
                Encoded::new(1, 0, stream.to_wire(), &body)
            }
            Self::Grant { stream, bytes, answers_move } => {
                Encoded::new(3, u8::from(answers_move), stream.to_wire(), &bytes.to_le_bytes())
            }
            Self::Fin { stream } => Encoded::new(4, 0, stream.to_wire(), &[]),
            Self::Reset { stream, cause } => {
                Encoded::new(5, 0, stream.to_wire(), &cause.to_wire().to_le_bytes())
            }
            Self::GoAway { last } => Encoded::new(6, 0, last.map_or(0, StreamId::to_wire), &[]),
        }
    }
}

impl DataHead {
    /// Returns the bytes of the head.
    #[must_use]
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[0] = 2;
        head[1] = self.next_class.map_or(0, |class| FLAG | (class as u8) << CLASS_SHIFT);
        head[4..8].copy_from_slice(&self.stream.to_wire().to_le_bytes());
        head[8..].copy_from_slice(&self.length.to_le_bytes());
        head
    }
}

/// Why bytes are not a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The type is not defined in this protocol.
    #[error("a record of unknown type {kind}")]
    Type {
        /// The type.
        kind: u8,
    },
    /// The length does not fit the type.
    #[error("a record of type {kind} cannot have a body of {length} bytes")]
    Length {
        /// The type.
        kind: u8,
        /// The length.
        length: u32,
    },
    /// No stream can have this name.
    #[error("a record of type {kind} for stream {value:#x}, which is no valid name")]
    Stream {
        /// The type.
        kind: u8,
        /// The name.
        value: u32,
    },
    /// The class in the flags does not exist.
    #[error("a change to class {value}, which does not exist")]
    Class {
        /// The class.
        value: u8,
    },
    /// An address of an OPEN record has an unknown family.
    #[error("an address of unknown family {family}")]
    Family {
        /// The family.
        family: u8,
    },
    /// A GRANT record allows nothing.
    #[error("a grant of no bytes")]
    EmptyGrant,
    /// A message ends within a record.
    #[error("a message that ends within a record")]
    Truncated,
}

/// A head whose body is not decoded yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// A record with bytes of a stream.
    Data(DataHead),
    /// Another record, and the length of its body.
    Control { length: usize },
}

/// Decodes a head, and checks everything that does not need the body.
pub(super) fn decode_head(head: &[u8; HEAD_BYTES]) -> Result<Head, RecordError> {
    let (kind, flags) = (head[0], head[1]);
    let (value, length) = (word(head, 4), word(head, 8));
    let expected = match kind {
        1 => 2 * ADDRESS_BYTES as u32,
        2 => {
            let stream = stream(kind, value)?;
            if length == 0 {
                return Err(RecordError::Length { kind, length });
            }
            let class = u16::from(flags >> CLASS_SHIFT & 3);
            let next_class = match (flags & FLAG != 0, Class::from_channel(class)) {
                (false, _) => None,
                (true, None) => return Err(RecordError::Class { value: class as u8 }),
                (true, class) => class,
            };
            return Ok(Head::Data(DataHead { stream, length, next_class }));
        }
        3 | 5 => 4,
        4 | 6 => 0,
        kind => return Err(RecordError::Type { kind }),
    };
    if length != expected {
        return Err(RecordError::Length { kind, length });
    }
    Ok(Head::Control { length: length as usize })
}

/// Decodes a record that is complete, and whose head was accepted.
pub(super) fn decode_control(record: &[u8; CONTROL_BYTES]) -> Result<Control, RecordError> {
    let (kind, flags, value) = (record[0], record[1], word(record, 4));
    if kind == 6 && value == 0 {
        return Ok(Control::GoAway { last: None });
    }
    let stream = stream(kind, value)?;
    Ok(match kind {
        1 => Control::Open {
            stream,
            route: Route {
                destination: decode_address(record, HEAD_BYTES)?,
                source: decode_address(record, HEAD_BYTES + ADDRESS_BYTES)?,
            },
        },
        3 => {
            let (bytes, answers_move) = (word(record, HEAD_BYTES), flags & FLAG != 0);
            if bytes == 0 && !answers_move {
                return Err(RecordError::EmptyGrant);
            }
            Control::Grant { stream, bytes, answers_move }
        }
        4 => Control::Fin { stream },
        5 => Control::Reset { stream, cause: Cause::from_wire(word(record, HEAD_BYTES)) },
        6 => Control::GoAway { last: Some(stream) },
        kind => return Err(RecordError::Type { kind }),
    })
}

fn stream(kind: u8, value: u32) -> Result<StreamId, RecordError> {
    StreamId::from_wire(value).ok_or(RecordError::Stream { kind, value })
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

/// Encodes an address.
///
/// ```text
///   0        1          2      4                   20
///   ┌────────┬──────────┬──────┬───────────────────┐
///   │ family │ reserved │ port │ address, in order │   family 4: the first 4 bytes of the address
///   └────────┴──────────┴──────┴───────────────────┘   family 6: all 16
/// ```
fn encode_address(address: SocketAddr, out: &mut [u8]) {
    out[2..4].copy_from_slice(&address.port().to_le_bytes());
    match address.ip() {
        IpAddr::V4(ip) => {
            out[0] = 4;
            out[4..8].copy_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            out[0] = 6;
            out[4..].copy_from_slice(&ip.octets());
        }
    }
}

fn decode_address(record: &[u8; CONTROL_BYTES], at: usize) -> Result<SocketAddr, RecordError> {
    let ip = match record[at] {
        4 => Ipv4Addr::from(std::array::from_fn(|index| record[at + 4 + index])).into(),
        6 => {
            Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|index| record[at + 4 + index])).into()
        }
        family => return Err(RecordError::Family { family }),
    };
    Ok(SocketAddr::new(ip, u16::from_le_bytes([record[at + 2], record[at + 3]])))
}
