//! What a link has done, as plain numbers.

use super::kind::Kind;

/// Counts of one link, or of all links of a fabric together. `INFO rdma` shows most of them, with
/// the prefix `rdma_`.
///
/// ```
/// # fn show(link: &ferrite_fabric::Link) {
/// let stats = link.stats();
/// println!("{} messages, {} bytes", stats.send_ops, stats.send_bytes);
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
#[non_exhaustive]
pub struct LinkStats {
    /// Frames of messages that the peer's device acknowledged or, on TCP, that were written.
    pub send_ops: u64,
    pub send_bytes: u64,
    /// Messages and notices that were received completely.
    pub recv_ops: u64,
    pub recv_bytes: u64,
    pub read_ops: u64,
    pub read_bytes: u64,
    pub write_ops: u64,
    pub write_bytes: u64,
    pub controls_sent: u64,
    /// Requests that failed, flushed ones included.
    pub completion_errors: u64,
    /// Completions that matched no request in flight.
    pub stale_completions: u64,
    /// RDMA paths that were lost, or left at the application's request, without ending the link.
    pub moves: u64,
    /// The part of the bytes sent, written and read that went over TCP. The others went over RDMA.
    pub tcp_bytes: u64,
    /// Memory windows for the peer that were not bound, because the link was down or no longer used
    /// their device.
    pub binds_dropped: u64,
}

impl LinkStats {
    pub(crate) fn completed(&mut self, kind: Kind, bytes: u32, failed: bool) {
        if kind == Kind::Last {
            return;
        }
        if failed {
            self.completion_errors += 1;
            return;
        }
        let (ops, total) = match kind {
            Kind::Last | Kind::Control | Kind::Again | Kind::Bind => return,
            Kind::Send => (&mut self.send_ops, &mut self.send_bytes),
            Kind::Write | Kind::Notice => (&mut self.write_ops, &mut self.write_bytes),
            Kind::Read => (&mut self.read_ops, &mut self.read_bytes),
        };
        *ops += 1;
        *total += u64::from(bytes);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        let Self {
            send_ops,
            send_bytes,
            recv_ops,
            recv_bytes,
            read_ops,
            read_bytes,
            write_ops,
            write_bytes,
            controls_sent,
            completion_errors,
            stale_completions,
            moves,
            tcp_bytes,
            binds_dropped,
        } = other;
        self.send_ops += send_ops;
        self.send_bytes += send_bytes;
        self.recv_ops += recv_ops;
        self.recv_bytes += recv_bytes;
        self.read_ops += read_ops;
        self.read_bytes += read_bytes;
        self.write_ops += write_ops;
        self.write_bytes += write_bytes;
        self.controls_sent += controls_sent;
        self.completion_errors += completion_errors;
        self.stale_completions += stale_completions;
        self.moves += moves;
        self.tcp_bytes += tcp_bytes;
        self.binds_dropped += binds_dropped;
    }
}
