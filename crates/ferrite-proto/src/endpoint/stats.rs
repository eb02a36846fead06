//! What an endpoint counts. Plain numbers: a driver exports them.

/// Counts of one endpoint since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Control messages handed out.
    pub messages_sent: u64,
    /// Control messages taken.
    pub messages_received: u64,
    /// Announcements of our window, among the messages sent.
    pub registrations_sent: u64,
    /// Announcements of the peer's window, among the messages received.
    pub registrations_received: u64,
    /// Keepalives among the messages sent.
    pub keepalives_sent: u64,
    /// Keepalives that were due when too many were without acknowledgement.
    pub keepalives_skipped: u64,
    /// Keepalives among the messages received.
    pub keepalives_received: u64,
    /// Questions and wishes about features among the messages received.
    pub features_received: u64,
    /// Writes handed out.
    pub writes: u64,
    /// Their bytes.
    pub bytes_written: u64,
    /// Immediates taken.
    pub immediates: u64,
    /// The bytes that they stand for.
    pub bytes_received: u64,
    /// Those that the reader took.
    pub bytes_consumed: u64,
    /// Times that a write was wanted and the peer's window was full or not announced.
    pub stalled_by_window: u64,
    /// Times that a write was wanted and too many were without a local completion.
    pub stalled_by_completions: u64,
    /// Times that a write was wanted and the peer gave no sign for too many.
    pub stalled_by_silence: u64,
}
