//! How a peer refused a connection.

use crate::code::codes;

/// How a peer refused a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// Why, as far as the connection manager knows.
    pub reason: RejectReason,
    /// What its application had to say, padded with zeros.
    pub private_data: Vec<u8>,
}

codes! {
    /// Why a connection was refused (InfiniBand specification, table 108).
    pub struct RejectReason, unknown: "reason" {
        /// Wrong port, or the server is not up.
        NO_LISTENER = 8, "nobody listens there (reason 8)";
        /// A queue pair number was used again too soon.
        STALE_CONNECTION = 10, "the peer still knows an older connection (reason 10)";
        /// Its private data says why.
        BY_APPLICATION = 28, "the application refused (reason 28)";
    }
}
