//! Counters of a multiplexer.

/// Counters of a [`Mux`](super::Mux). They only grow.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Number of messages that were packed.
    pub messages: u64,
    /// Number of records in these messages.
    pub records: u64,
    /// Number of bytes of streams in these messages.
    pub bytes_sent: u64,
    /// Number of bytes of streams that were received and passed on.
    pub bytes_received: u64,
    /// Number of streams that this side opened.
    pub opened: u64,
    /// Number of streams of the peer that were accepted.
    pub accepted: u64,
    /// Number of streams of the peer that were refused because of a limit.
    pub refused: u64,
    /// Number of streams that ended because the streams together held too many bytes.
    pub out_of_memory: u64,
    /// Number of changes of class that this side began.
    pub class_changes: u64,
    /// Number of records that were ignored, because their stream had ended, or came after the
    /// GOAWAY of this side.
    pub ignored: u64,
}
