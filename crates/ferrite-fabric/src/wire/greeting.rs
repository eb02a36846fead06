//! The greeting: the first bytes that each side of a TCP connection sends.
//!
//! ```text
//!   0       48     49         56      64      72         80
//!   ┌───────┬──────┬──────────┬───────┬───────┬──────────┐
//!   │ hello │ kind │ reserved │ yours │ mine  │ received │
//!   │  48   │  1   │    7     │   8   │   8   │    8     │
//!   └───────┴──────┴──────────┴───────┴───────┴──────────┘
//!   kind         1: a new link; 2: a link that has lost its path
//!   yours, mine  the sessions of that link (see the hello)
//!   received     number of frames of the recipient that have arrived
//! ```

use super::{HELLO_BYTES, Hello, HelloError, field, put};

/// Size of a [`Greeting`].
pub const GREETING_BYTES: usize = 80;

/// The first bytes of a TCP connection, in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The hello, with the same content as over RDMA.
    pub hello: Hello,
    /// The link that continues on this connection; `None` for a new link.
    pub resume: Option<Resume>,
}

/// Tells which link continues here, and from which frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The recipient's session of the link.
    pub yours: u64,
    /// The sender's session of the link.
    pub mine: u64,
    /// Number of frames that the sender has received. The recipient sends the later ones again.
    pub received: u64,
}

impl Resume {
    /// Returns whether this answers `request`: it names the same link, as seen from the other side.
    #[must_use]
    pub fn answers(&self, request: &Self) -> bool {
        (self.yours, self.mine) == (request.mine, request.yours)
    }
}

impl Greeting {
    /// Encodes the greeting.
    ///
    /// ```
    /// use ferrite_fabric::wire::{Features, Greeting, Hello, Program, Resume, Version};
    ///
    /// let hello = Hello {
    ///     version: Version::CURRENT,
    ///     features: Features::MOVE,
    ///     segment_bytes: 8 << 10,
    ///     window: 64,
    ///     channels: 16,
    ///     max_message_bytes: 512 << 20,
    ///     instance: 0x5EED,
    ///     session: 9,
    ///     mtu: 0,
    ///     program: Program::UNKNOWN,
    /// };
    /// let resume = Some(Resume { yours: 7, mine: 9, received: 300 });
    /// let greeting = Greeting { hello, resume };
    /// assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
    /// ```
    #[must_use]
    pub fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        put(&mut bytes, 0, self.hello.encode());
        put(&mut bytes, 48, [if self.resume.is_some() { 2 } else { 1 }]);
        if let Some(Resume { yours, mine, received }) = self.resume {
            put(&mut bytes, 56, yours.to_le_bytes());
            put(&mut bytes, 64, mine.to_le_bytes());
            put(&mut bytes, 72, received.to_le_bytes());
        }
        bytes
    }

    /// Decodes a greeting.
    ///
    /// # Errors
    /// Like [`Hello::decode`]. An unknown kind is a [`HelloError::Value`].
    pub fn decode(bytes: &[u8]) -> Result<Self, HelloError> {
        let hello = Hello::decode(bytes.get(..HELLO_BYTES).unwrap_or(bytes))?;
        let short = HelloError::Short { got: bytes.len() };
        let number = |at| field(bytes, at).map(u64::from_le_bytes).ok_or(short);
        let (yours, mine, received) = (number(56)?, number(64)?, number(72)?);
        let [kind] = field(bytes, 48).ok_or(short)?;
        let resume = match kind {
            1 => None,
            2 => Some(Resume { yours, mine, received }),
            kind => return Err(HelloError::Value { field: "kind", value: kind.into() }),
        };
        Ok(Self { hello, resume })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Features, Program, Version};
    use super::*;

    const HELLO: Hello = Hello {
        version: Version::CURRENT,
        features: Features::MOVE,
        segment_bytes: 8 << 10,
        window: 64,
        channels: 16,
        max_message_bytes: 1 << 20,
        instance: 7,
        session: 9,
        mtu: 0,
        program: Program::UNKNOWN,
    };

    #[test]
    fn golden_bytes() {
        let new = Greeting { hello: HELLO, resume: None };
        let mut bytes = [0; GREETING_BYTES];
        bytes[..48].copy_from_slice(&HELLO.encode());
        bytes[48] = 1;
        assert_eq!((new.encode(), Greeting::decode(&bytes)), (bytes, Ok(new)));

        let resume = Resume {
            yours: 0x0807_0605_0403_0201,
            mine: 0x100F_0E0D_0C0B_0A09,
            received: 0x1817_1615_1413_1211,
        };
        let lost = Greeting { hello: HELLO, resume: Some(resume) };
        bytes[48] = 2;
        for (at, byte) in bytes[56..].iter_mut().enumerate() {
            *byte = at as u8 + 1;
        }
        assert_eq!((lost.encode(), Greeting::decode(&bytes)), (bytes, Ok(lost)));
    }

    #[test]
    fn rejects_truncated_bytes_and_unknown_kinds() {
        let mut bytes = Greeting { hello: HELLO, resume: None }.encode();
        for len in 4..GREETING_BYTES {
            assert_eq!(
                Greeting::decode(&bytes[..len]),
                Err(HelloError::Short { got: len }),
                "{len}"
            );
        }
        for kind in [0, 3, 255] {
            bytes[48] = kind;
            let wrong = HelloError::Value { field: "kind", value: kind.into() };
            assert_eq!(Greeting::decode(&bytes), Err(wrong));
        }
    }
}
