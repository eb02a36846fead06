//! The counters of an endpoint: plain numbers for a driver to export.

/// Counters of one endpoint since its creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Control messages that `poll_message` returned.
    pub messages_sent: u64,
    /// Valid control messages received.
    pub messages_received: u64,
    /// Announcements of our window, among the messages sent.
    pub registrations_sent: u64,
    /// Announcements of the peer's window, among the messages received.
    pub registrations_received: u64,
    /// Keepalives among the messages sent.
    pub keepalives_sent: u64,
    /// Keepalives that were skipped because too many were unacknowledged.
    pub keepalives_skipped: u64,
    /// Keepalives among the messages received.
    pub keepalives_received: u64,
    /// Feature messages among the messages received.
    pub features_received: u64,
    /// Writes that `write_plan` returned.
    pub writes: u64,
    /// Bytes of these writes.
    pub bytes_written: u64,
    /// Valid immediates received.
    pub immediates: u64,
    /// Bytes that these immediates report.
    pub bytes_received: u64,
    /// Bytes that the reader consumed.
    pub bytes_consumed: u64,
    /// Calls of `write_plan` without a write, because the peer's window was full or not announced.
    pub stalled_by_window: u64,
    /// Calls of `write_plan` without a write, because too many earlier writes had no local
    /// completion.
    pub stalled_by_completions: u64,
    /// Calls of `write_plan` without a write, because nothing arrived from the peer after too many
    /// writes and messages.
    pub stalled_by_silence: u64,
}
