//! Errors of a peer that end a connection: a violation of the protocol, or silence.

use std::time::Duration;

use crate::message::MessageError;
use crate::window::WindowError;

/// Why the peer's behaviour ended the connection.
///
/// ```
/// use ferrite_proto::{ProtocolError, WindowError};
///
/// let error = ProtocolError::from(WindowError::Overrun { bytes: 9, room: 8 });
/// assert_eq!(error.to_string(), "the peer reports 9 written bytes, but there was room for 8");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The message is not one of this protocol.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The peer violated the rules of the windows.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A write has more bytes than its immediate says. Fewer bytes are legal, because the immediate
    /// also counts the bytes of earlier writes without an immediate.
    #[error("the peer wrote {byte_len} bytes, but its immediate data says {immediate}")]
    Immediate {
        /// The number in the immediate.
        immediate: u32,
        /// The number that the network card reports.
        byte_len: u32,
    },
    /// A server sent its features to a client, which never asks for them.
    #[error("the server sent features that were not requested")]
    UnrequestedFeatures,
    /// A client requests features faster than replies can be sent.
    #[error("the client requested features {requests} times without receiving a reply")]
    TooManyFeatureRequests {
        /// The number of requests whose replies wait to be sent, including the one that exceeds the
        /// limit.
        requests: usize,
    },
    /// Keepalives are not acknowledged, and nothing else arrives.
    #[error("the peer has been silent for {after:?}")]
    Dead {
        /// The limit [`Config::dead_after`](super::Config::dead_after). It counts from the oldest
        /// keepalive without acknowledgement, or from the last arrival if that is later.
        after: Duration,
    },
}
