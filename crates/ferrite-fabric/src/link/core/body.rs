//! The payload of a frame that is sent on TCP, or kept so that it can be sent there.

use crate::mem::Buf;
use crate::wire::CONTROL_BYTES;

/// The payload of a frame.
pub(crate) enum Body {
    Nothing,
    /// A control message.
    Few([u8; CONTROL_BYTES]),
    Buf(Buf),
    /// Bytes outside the memory pool, for example a copy of the application's bytes.
    Loose(Box<[u8]>),
}

impl Body {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Nothing => &[],
            Self::Few(bytes) => bytes,
            Self::Buf(buf) => buf,
            Self::Loose(bytes) => bytes,
        }
    }
}
