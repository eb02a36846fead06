//! The counters of a port by their meaning, because every driver has its own names.

use std::path::Path;

use super::files::number;

/// The meaning of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning {
    /// RDMA packets that were sent.
    Sent,
    /// RDMA packets that were received, from any peer.
    Received,
    /// Requests that were sent again because no acknowledgement came.
    TimedOut,
    /// Reports of peers that they had no receive posted.
    PeerNotReady,
    /// Messages of peers for which this side had no receive posted.
    OwnNotReady,
    /// Gaps in the packet sequence, seen here or reported by a peer.
    Lost,
    /// Packets that arrived damaged.
    Damaged,
    /// Packets that the port discarded.
    Discarded,
    /// Congestion marks, here or on the path.
    Congested,
    /// Packets that this host could not send.
    Unsent,
    /// Times that the link of the port went down.
    LinkDown,
}

/// The names of the counters in Soft-RoCE, mlx5, bnxt_re and efa. InfiniBand defines the files in
/// `counters`, and RoCE drivers provide them, too. Reading a file in `counters` may need a firmware
/// command, so only few are used.
const NAMES: &[(Meaning, &str)] = &[
    (Meaning::Sent, "hw_counters/sent_pkts"),
    (Meaning::Sent, "hw_counters/tx_pkts"),
    (Meaning::Sent, "counters/port_xmit_packets"),
    (Meaning::Received, "hw_counters/rcvd_pkts"),
    (Meaning::Received, "hw_counters/rx_pkts"),
    (Meaning::Received, "counters/port_rcv_packets"),
    (Meaning::TimedOut, "hw_counters/completer_retry_err"),
    (Meaning::TimedOut, "hw_counters/local_ack_timeout_err"),
    (Meaning::TimedOut, "hw_counters/roce_adp_retrans_to"),
    (Meaning::TimedOut, "hw_counters/to_retransmits"),
    (Meaning::PeerNotReady, "hw_counters/rcvd_rnr_err"),
    (Meaning::PeerNotReady, "hw_counters/rnr_nak_retry_err"),
    (Meaning::PeerNotReady, "hw_counters/rnr_naks_rcvd"),
    (Meaning::OwnNotReady, "hw_counters/send_rnr_err"),
    (Meaning::OwnNotReady, "hw_counters/out_of_buffer"),
    (Meaning::OwnNotReady, "hw_counters/rx_out_of_buffer"),
    (Meaning::Lost, "hw_counters/out_of_seq_request"),
    (Meaning::Lost, "hw_counters/rcvd_seq_err"),
    (Meaning::Lost, "hw_counters/out_of_sequence"),
    (Meaning::Lost, "hw_counters/packet_seq_err"),
    (Meaning::Lost, "hw_counters/seq_err_naks_rcvd"),
    (Meaning::Lost, "hw_counters/oos_drop_count"),
    (Meaning::Damaged, "hw_counters/rx_icrc_encapsulated"),
    (Meaning::Damaged, "hw_counters/rx_roce_errors"),
    (Meaning::Damaged, "counters/symbol_error"),
    (Meaning::Damaged, "counters/port_rcv_errors"),
    (Meaning::Discarded, "hw_counters/rx_roce_discards"),
    (Meaning::Discarded, "hw_counters/rx_drops"),
    (Meaning::Discarded, "counters/port_xmit_discards"),
    (Meaning::Congested, "hw_counters/rp_cnp_handled"),
    (Meaning::Congested, "hw_counters/np_cnp_sent"),
    (Meaning::Unsent, "hw_counters/send_err"),
    (Meaning::LinkDown, "hw_counters/link_downed"),
    (Meaning::LinkDown, "counters/link_downed"),
];

/// The values of a port's counters at one time. Counters that the driver does not have are missing.
#[derive(Debug, Clone, Default)]
pub(super) struct Counters(Vec<Counter>);

#[derive(Debug, Clone)]
struct Counter {
    meaning: Meaning,
    name: &'static str,
    value: u64,
}

/// The increase of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Increase {
    /// The driver's name for the counter.
    pub(super) name: &'static str,
    pub(super) by: u64,
}

impl Counters {
    /// Reads the counters of the port with this directory.
    pub(super) fn read(port: &Path) -> Self {
        let found = NAMES.iter().filter_map(|&(meaning, name)| {
            let value = number(&port.join(name))?;
            Some(Counter { meaning, name: name.rsplit('/').next().unwrap_or(name), value })
        });
        Self(found.collect())
    }

    /// Returns the counter with this meaning that increased most since `then`. Returns `None` if
    /// the driver has no such counter.
    pub(super) fn increase_since(&self, then: &Self, meaning: Meaning) -> Option<Increase> {
        let of_both = self.0.iter().filter(|now| now.meaning == meaning).filter_map(|now| {
            let then =
                then.0.iter().find(|then| then.meaning == meaning && then.name == now.name)?;
            // A smaller value means that the counter was reset or has wrapped around (32 bits on
            // mlx5).
            let by = now.value.checked_sub(then.value).unwrap_or(now.value);
            Some(Increase { name: now.name, by })
        });
        // If increases are equal, return the first: the driver's own counter before InfiniBand's.
        of_both.rev().max_by_key(|increase| increase.by)
    }
}

#[cfg(test)]
impl Counters {
    /// Returns counters with these values.
    pub(super) fn of(values: &[(Meaning, &'static str, u64)]) -> Self {
        Self(
            values.iter().map(|&(meaning, name, value)| Counter { meaning, name, value }).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_the_counter_that_increased_most() {
        let then = Counters::of(&[
            (Meaning::Sent, "a", 10),
            (Meaning::Sent, "b", 0),
            (Meaning::Lost, "c", 7),
        ]);
        let now = Counters::of(&[
            (Meaning::Sent, "a", 15),
            (Meaning::Sent, "b", 0),
            (Meaning::Lost, "c", 3),
        ]);
        assert_eq!(now.increase_since(&then, Meaning::Sent), Some(Increase { name: "a", by: 5 }));
        assert_eq!(
            now.increase_since(&then, Meaning::Lost),
            Some(Increase { name: "c", by: 3 }),
            "a counter that was reset counts from 0"
        );
        assert_eq!(now.increase_since(&then, Meaning::Damaged), None);
        assert_eq!(then.increase_since(&then, Meaning::Sent), Some(Increase { name: "a", by: 0 }));
    }
}
