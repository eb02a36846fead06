//! Control messages, which the two ends of a link exchange without the application.
//!
//! ```text
//!   0      1          8       16
//!   ┌──────┬──────────┬───────┐   kind   1 Credit  2 Ping    3 Pong  4 Revoke
//!   │ kind │ reserved │ value │          5 Revoked 6 Fin     7 FinAck
//!   │  1   │    7     │   8   │   value  Ping, Pong: any number, returned unchanged
//!   └──────┴──────────┴───────┘          Revoke, Revoked: the number of the grant; others: 0
//! ```

use super::{field, put};

/// Size of a [`Control`] message.
pub const CONTROL_BYTES: usize = 16;

/// The payload of a control frame.
///
/// ```
/// use ferrite_fabric::wire::{Control, ControlError};
///
/// let ping = Control::Ping(7).encode();
/// assert_eq!(Control::decode(&ping), Ok(Control::Ping(7)));
/// assert_eq!(Control::decode(&ping[..8]), Err(ControlError::Short { got: 8 }));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// No content. The frame returns credits when there is nothing else to send.
    Credit,
    /// Asks the peer for a sign of life.
    Ping(u64),
    /// Answers a ping, with the ping's number.
    Pong(u64),
    /// Revokes a grant of the sender. The peer must not start another operation with that grant.
    Revoke(u64),
    /// Answers a revocation. No operation with this grant is in progress.
    Revoked(u64),
    /// The sender has sent everything. No message follows, and the sender accepts none from its
    /// application any more.
    Fin,
    /// Answers a `Fin`. The sender has received everything up to the `Fin`, and has sent everything
    /// of its own.
    FinAck,
}

impl Control {
    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> [u8; CONTROL_BYTES] {
        let (kind, value) = match *self {
            Self::Credit => (1, 0),
            Self::Ping(number) => (2, number),
            Self::Pong(number) => (3, number),
            Self::Revoke(grant) => (4, grant),
            Self::Revoked(grant) => (5, grant),
            Self::Fin => (6, 0),
            Self::FinAck => (7, 0),
        };
        let mut bytes = [0; CONTROL_BYTES];
        put(&mut bytes, 0, [kind]);
        put(&mut bytes, 8, u64::to_le_bytes(value));
        bytes
    }

    /// Decodes a control message. The value is ignored if the kind has none.
    ///
    /// # Errors
    /// Fails if the message is too short, or if its kind is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self, ControlError> {
        let short = ControlError::Short { got: bytes.len() };
        let value = u64::from_le_bytes(field(bytes, 8).ok_or(short)?);
        let [kind] = field(bytes, 0).ok_or(short)?;
        Ok(match kind {
            1 => Self::Credit,
            2 => Self::Ping(value),
            3 => Self::Pong(value),
            4 => Self::Revoke(value),
            5 => Self::Revoked(value),
            6 => Self::Fin,
            7 => Self::FinAck,
            kind => return Err(ControlError::Unknown { kind }),
        })
    }
}

/// Why bytes are not a valid control message.
///
/// ```
/// use ferrite_fabric::wire::{Control, ControlError};
///
/// let error = Control::decode(&[200; 16]).unwrap_err();
/// assert_eq!(error, ControlError::Unknown { kind: 200 });
/// assert_eq!(error.to_string(), "a control message of unknown kind 200");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The message is too short.
    #[error("a control message of {got} bytes, {CONTROL_BYTES} expected")]
    Short {
        /// Number of received bytes.
        got: usize,
    },
    /// The kind is unknown in this version.
    #[error("a control message of unknown kind {kind}")]
    Unknown {
        /// The kind.
        kind: u8,
    },
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const VALUE: u64 = 0x0102_0304_0506_0708;

    #[test]
    fn golden_bytes() {
        let valued = [0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1];
        for (message, kind, rest) in [
            (Control::Credit, 1, [0; 15]),
            (Control::Ping(VALUE), 2, valued),
            (Control::Pong(VALUE), 3, valued),
            (Control::Revoke(VALUE), 4, valued),
            (Control::Revoked(VALUE), 5, valued),
            (Control::Fin, 6, [0; 15]),
            (Control::FinAck, 7, [0; 15]),
        ] {
            let bytes = message.encode();
            assert_eq!((bytes[0], &bytes[1..]), (kind, &rest[..]), "{message:?}");
            assert_eq!(Control::decode(&bytes), Ok(message));
        }
    }

    #[test]
    fn rejects_truncated_bytes_and_unknown_kinds() {
        for len in 0..CONTROL_BYTES {
            assert_eq!(
                Control::decode(&[1; CONTROL_BYTES][..len]),
                Err(ControlError::Short { got: len })
            );
        }
        for kind in [0, 8, 255] {
            assert_eq!(
                Control::decode(&[kind; CONTROL_BYTES]),
                Err(ControlError::Unknown { kind })
            );
        }
    }

    #[test]
    fn ignores_reserved_bytes_and_unused_values() {
        let mut bytes = [0xFF; CONTROL_BYTES + 1];
        bytes[0] = 6;
        assert_eq!(Control::decode(&bytes), Ok(Control::Fin));
    }

    proptest! {
        #[test]
        fn decodes_only_valid_messages(mut bytes in vec(any::<u8>(), 0..24), kind in 0..10_u8) {
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            match Control::decode(&bytes) {
                Ok(message) => prop_assert_eq!(Control::decode(&message.encode()), Ok(message)),
                Err(ControlError::Short { got }) => {
                    prop_assert!(got == bytes.len() && got < CONTROL_BYTES);
                }
                Err(ControlError::Unknown { kind }) => prop_assert!(kind == 0 || kind > 7),
            }
        }
    }
}
