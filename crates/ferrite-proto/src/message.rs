//! The control messages of Valkey Over RDMA. Exactly 32 bytes each, integers big endian, carried by
//! a SEND.
//!
//! ```text
//!   0        2        4                16       24         28     32
//!   ┌────────┬────────┬────────────────┬────────┬──────────┬──────┐
//!   │ opcode │ select │    reserved    │        │      features   │   0 GetServerFeature, 1 SetClientFeature
//!   ├────────┼────────┴────────────────┴────────┴──────────┴──────┤
//!   │ opcode │                    reserved                        │   2 Keepalive
//!   ├────────┼─────────────────────────┬────────┬──────────┬──────┤
//!   │ opcode │        reserved         │  addr  │  length  │ rkey │   3 RegisterXferMemory
//!   └────────┴─────────────────────────┴────────┴──────────┴──────┘
//! ```
//!
//! What is reserved is sent as zero and not looked at. So 32 zeros are a message.

/// The bytes of a [`Message`]: never more, never fewer.
pub const MESSAGE_BYTES: usize = 32;

/// Memory that its sender lets the peer write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration {
    /// Where it begins, in the owner's address space. A number for the network card, never a
    /// pointer here.
    pub addr: u64,
    /// How many bytes it has.
    pub length: u32,
    /// By which the owner's network card knows the permission.
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
    /// A client's question what the server can do, and the server's answer. The question has no
    /// features.
    GetServerFeature {
        /// Which page of features: no meaning is defined, the answer repeats it.
        select: u16,
        /// What the server can do, in bits.
        features: u64,
    },
    /// What a client wants to use. Nothing answers it.
    SetClientFeature {
        /// Which page of features.
        select: u16,
        /// What is wanted, in bits.
        features: u64,
    },
    /// Says nothing: a network card that does not acknowledge it has no peer any more.
    Keepalive,
    /// The peer may write here, from the first byte on.
    RegisterXferMemory(Registration),
}

impl Message {
    /// Its bytes.
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

    /// Reads a message.
    ///
    /// # Errors
    /// It does not have 32 bytes, or its opcode is not known.
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

/// `N` bytes from `at` on, which the layout above has.
fn field<const N: usize>(bytes: &[u8; MESSAGE_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

/// Why bytes are no control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Not as long as all messages are.
    #[error("a control message of {got} bytes, {MESSAGE_BYTES} expected")]
    Length {
        /// Bytes that came.
        got: usize,
    },
    /// No opcode of this protocol.
    #[error("a control message of unknown opcode {opcode}")]
    Unknown {
        /// What it says.
        opcode: u16,
    },
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// The bytes of a text of hex digits.
    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<_> = text.chars().filter_map(|c| c.to_digit(16)).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).expect("a byte")).collect()
    }

    #[test]
    fn golden_bytes() {
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
    fn what_is_no_message() {
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
    fn reserved_bytes_are_no_matter() {
        let mut bytes = [0xFF; MESSAGE_BYTES];
        bytes[..2].copy_from_slice(&[0, 2]);
        assert_eq!(Message::decode(&bytes), Ok(Message::Keepalive));
    }

    proptest! {
        #[test]
        fn any_bytes(mut bytes in vec(any::<u8>(), MESSAGE_BYTES), opcode in 0..6_u8) {
            bytes[..2].copy_from_slice(&[0, opcode]);
            match Message::decode(&bytes) {
                Ok(message) => prop_assert_eq!(Message::decode(&message.encode()), Ok(message)),
                Err(error) => prop_assert_eq!(error, MessageError::Unknown { opcode: opcode.into() }),
            }
        }
    }
}
