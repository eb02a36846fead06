//! The control messages of Valkey Over RDMA. Each has exactly 32 bytes, has integers in big endian,
//! and is sent with a SEND.
//!
//! ```text
//!   0        2        4                16       24         28     32
//!   ┌────────┬────────┬────────────────┬────────┬──────────┬──────┐
//!   │ opcode │ select │    reserved    │        │      features   │   0 GetServerFeature,
//!   │        │        │                │        │                 │   1 SetClientFeature
//!   ├────────┼────────┴────────────────┴────────┴──────────┴──────┤
//!   │ opcode │                    reserved                        │   2 Keepalive
//!   ├────────┼─────────────────────────┬────────┬──────────┬──────┤
//!   │ opcode │        reserved         │  addr  │  length  │ rkey │   3 RegisterXferMemory
//!   └────────┴─────────────────────────┴────────┴──────────┴──────┘
//! ```
//!
//! Reserved bytes are sent as zero and ignored on receipt. So 32 zero bytes are a valid message,
//! `GetServerFeature`.

/// The size of every [`Message`] in bytes.
pub const MESSAGE_BYTES: usize = 32;

/// Memory that its owner allows the peer to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration {
    /// The start address, in the owner's address space. Here it is only a number for the network
    /// card, never a pointer.
    pub addr: u64,
    /// The length in bytes.
    pub length: u32,
    /// The key for this permission at the owner's network card.
    pub rkey: u32,
}

/// A control message.
///
/// ```
/// use ferrite_proto::{Message, MessageError, Registration};
///
/// let memory = Registration { addr: 0x7F00_1122_3000, length: 1 << 20, rkey: 0x1F2A };
/// let bytes = Message::RegisterXferMemory(memory).encode();
/// assert_eq!(Message::decode(&bytes), Ok(Message::RegisterXferMemory(memory)));
/// assert_eq!(Message::decode(&bytes[..31]), Err(MessageError::Length { got: 31 }));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// A client's question about the server's features, or the server's answer. The question has no
    /// features set.
    GetServerFeature {
        /// The page of features. No meaning is defined; the answer repeats it.
        select: u16,
        /// The server's features, as bits.
        features: u64,
    },
    /// The features that a client wants to use. The message has no answer.
    SetClientFeature {
        /// The page of features.
        select: u16,
        /// The wanted features, as bits.
        features: u64,
    },
    /// Carries no data. If the peer's network card does not acknowledge it, the peer is gone.
    Keepalive,
    /// Announces memory that the peer may write, from the first byte on.
    RegisterXferMemory(Registration),
}

impl Message {
    /// Returns the bytes of the message.
    #[must_use]
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        match *self {
            Self::GetServerFeature { select, features } => {
                put(2, &select.to_be_bytes());
                put(24, &features.to_be_bytes());
            }
            Self::SetClientFeature { select, features } => {
                put(0, &1_u16.to_be_bytes());
                put(2, &select.to_be_bytes());
                put(24, &features.to_be_bytes());
            }
            Self::Keepalive => put(0, &2_u16.to_be_bytes()),
            Self::RegisterXferMemory(Registration { addr, length, rkey }) => {
                put(0, &3_u16.to_be_bytes());
                put(16, &addr.to_be_bytes());
                put(24, &length.to_be_bytes());
                put(28, &rkey.to_be_bytes());
            }
        }
        bytes
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// If the message does not have 32 bytes, or its opcode is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let bytes: &[u8; MESSAGE_BYTES] =
            bytes.try_into().map_err(|_| MessageError::Length { got: bytes.len() })?;
        let select = u16::from_be_bytes(field(bytes, 2));
        let features = u64::from_be_bytes(field(bytes, 24));
        Ok(match u16::from_be_bytes(field(bytes, 0)) {
            0 => Self::GetServerFeature { select, features },
            1 => Self::SetClientFeature { select, features },
            2 => Self::Keepalive,
            3 => Self::RegisterXferMemory(Registration {
                addr: u64::from_be_bytes(field(bytes, 16)),
                length: u32::from_be_bytes(field(bytes, 24)),
                rkey: u32::from_be_bytes(field(bytes, 28)),
            }),
            opcode => return Err(MessageError::Unknown { opcode }),
        })
    }
}

/// Returns the `N` bytes of a field that begins at `at`; see the layout at the top of this file.
fn field<const N: usize>(bytes: &[u8; MESSAGE_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

/// Why bytes are not a control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The length is wrong.
    #[error("a control message of {got} bytes, {MESSAGE_BYTES} expected")]
    Length {
        /// The number of bytes received.
        got: usize,
    },
    /// The opcode is not defined in this protocol.
    #[error("a control message of unknown opcode {opcode}")]
    Unknown {
        /// The opcode.
        opcode: u16,
    },
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Decodes a text of hex digits.
    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<_> = text.chars().filter_map(|c| c.to_digit(16)).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).expect("a byte")).collect()
    }

    #[test]
    fn encodes_and_decodes_golden_bytes() {
        let memory = Registration { addr: 0x7F00_1122_3000, length: 0x10_0000, rkey: 0x1F2A };
        let answer = Message::GetServerFeature { select: 0x0102, features: 0x0304_0506_0708_090A };
        for (message, bytes) in [
            (Message::Keepalive, format!("0002{}", "00".repeat(30))),
            (Message::GetServerFeature { select: 0, features: 0 }, "00".repeat(32)),
            (answer, format!("00000102{}030405060708090a", "00".repeat(20))),
            (
                Message::SetClientFeature { select: 0, features: 0 },
                format!("00010000{}0000000000000000", "00".repeat(20)),
            ),
            (
                Message::RegisterXferMemory(memory),
                format!("0003{}00007f0011223000 00100000 00001f2a", "00".repeat(14)),
            ),
        ] {
            let bytes = hex(&bytes);
            assert_eq!(message.encode()[..], bytes, "{message:?}");
            assert_eq!(Message::decode(&bytes), Ok(message));
        }
    }

    #[test]
    fn rejects_wrong_lengths_and_opcodes() {
        for got in (0..=40).filter(|got| *got != MESSAGE_BYTES) {
            assert_eq!(Message::decode(&vec![0; got]), Err(MessageError::Length { got }));
        }
        for opcode in [4, 0x0300, u16::MAX] {
            let mut bytes = [0; MESSAGE_BYTES];
            bytes[..2].copy_from_slice(&opcode.to_be_bytes());
            assert_eq!(Message::decode(&bytes), Err(MessageError::Unknown { opcode }));
        }
        let unknown = MessageError::Unknown { opcode: 9 };
        assert_eq!(unknown.to_string(), "a control message of unknown opcode 9");
    }

    #[test]
    fn ignores_reserved_bytes() {
        let mut bytes = [0xFF; MESSAGE_BYTES];
        bytes[..2].copy_from_slice(&[0, 2]);
        assert_eq!(Message::decode(&bytes), Ok(Message::Keepalive));
    }

    proptest! {
        #[test]
        fn decode_round_trip(mut bytes in vec(any::<u8>(), MESSAGE_BYTES), opcode in 0..6_u8) {
            bytes[..2].copy_from_slice(&[0, opcode]);
            match Message::decode(&bytes) {
                Ok(message) => prop_assert_eq!(Message::decode(&message.encode()), Ok(message)),
                Err(error) => {
                    prop_assert_eq!(error, MessageError::Unknown { opcode: opcode.into() });
                }
            }
        }
    }
}
