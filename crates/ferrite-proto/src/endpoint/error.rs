//! How a peer ends a connection: by breaking the rules, or by not being there any more.

use std::time::Duration;

use crate::message::MessageError;
use crate::window::WindowError;

/// What the peer did wrong. The connection is over.
///
/// ```
/// use ferrite_proto::{ProtocolError, WindowError};
///
/// let error = ProtocolError::from(WindowError::Overrun { bytes: 9, room: 8 });
/// assert_eq!(error.to_string(), "the peer says that it wrote 9 bytes, there was room for 8");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// No message of this protocol.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Against the rules of the windows.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A write of more bytes than its immediate says. Fewer are legal: writes without immediate may
    /// have gone before.
    #[error("the peer wrote {byte_len} bytes and says {immediate}")]
    Immediate {
        /// What it says.
        immediate: u32,
        /// What the network card says.
        byte_len: u32,
    },
    /// A server told its features to a client that did not ask, or for another page.
    #[error("the server answers a question that was not asked")]
    UnaskedFeatures,
    /// A client asks for features faster than answers can be sent.
    #[error("the client asked for features {asked} times without taking an answer")]
    TooManyQuestions {
        /// Questions without an answer.
        asked: usize,
    },
    /// Keepalives are not acknowledged, and nothing else is heard.
    #[error("the peer has not been heard for {after:?}")]
    Dead {
        /// Since the oldest keepalive without acknowledgement, or since the last sign if that is
        /// later.
        after: Duration,
    },
}
