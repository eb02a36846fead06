//! How a peer rejected a connection.

use crate::code::codes;

/// How a peer rejected a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The reason that the connection manager reported.
    pub reason: RejectReason,
    /// Private data from the peer's application, padded with zeros.
    pub private_data: Vec<u8>,
}

codes! {
    /// Why a connection was rejected (InfiniBand specification, table 108).
    pub struct RejectReason, unknown: "reason" {
        /// The port is wrong, or the server is not running.
        NO_LISTENER = 8, "no program listens on this port (reason 8)";
        /// A queue pair number was reused too soon.
        STALE_CONNECTION = 10,
            "the peer has not closed an older connection with this queue pair number (reason 10)";
        /// The application rejected the connection; the private data says why.
        BY_APPLICATION = 28, "the application refused (reason 28)";
    }
}
