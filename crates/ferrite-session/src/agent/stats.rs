//! Counters of an agent, and the copies of them that a caller gets.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_fabric::Transport;
use ferrite_proto::mux::Class;

use super::admission::Forbidden;
use super::config::PeerAddress;

/// Why a peer's stream was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    Forbidden(Forbidden),
    /// The engine requires no password, and protected mode is on.
    ProtectedMode,
    /// The engine refuses connections.
    Engine,
    /// The engine did not answer in time, or its answer is not understood.
    Unreachable,
    /// The agent has too few descriptors.
    Descriptors,
}

impl Refused {
    const ALL: [Self; 8] = [
        Self::Forbidden(Forbidden::Source),
        Self::Forbidden(Forbidden::Destination),
        Self::Forbidden(Forbidden::Port),
        Self::Forbidden(Forbidden::Agent),
        Self::ProtectedMode,
        Self::Engine,
        Self::Unreachable,
        Self::Descriptors,
    ];

    /// Returns the cause as one word, for metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Forbidden(Forbidden::Source) => "source",
            Self::Forbidden(Forbidden::Destination) => "destination",
            Self::Forbidden(Forbidden::Port) => "port",
            Self::Forbidden(Forbidden::Agent) => "agent",
            Self::ProtectedMode => "protected_mode",
            Self::Engine => "engine_refused",
            Self::Unreachable => "engine_unreachable",
            Self::Descriptors => "descriptors",
        }
    }
}

/// Why a link of a peer was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkRefused {
    /// The address of the link belongs to no peer.
    Address,
    /// The certificate of the link belongs to no peer.
    Certificate,
    /// There are too many links to the peer.
    TooMany,
    /// The link does not use RDMA, which is required.
    Transport,
}

impl LinkRefused {
    const ALL: [Self; 4] = [Self::Address, Self::Certificate, Self::TooMany, Self::Transport];

    /// Returns the cause as one word, for metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Certificate => "certificate",
            Self::TooMany => "too_many",
            Self::Transport => "transport",
        }
    }
}

/// Counters of the whole agent.
#[derive(Debug, Default)]
pub(super) struct Counters {
    refused: [AtomicU64; Refused::ALL.len()],
    /// Local connections that were reset because there was no link.
    pub(super) without_link: AtomicU64,
    /// Local connections that were reset because of a limit of the link.
    pub(super) beyond_limits: AtomicU64,
    /// Local connections that were reset because the agent has too few descriptors.
    pub(super) no_descriptors: AtomicU64,
    /// Connections to the agent's own listener that were reset: those that no rule has redirected,
    /// and the agent's own direct connections.
    pub(super) looped: AtomicU64,
    /// Local connections that went directly by TCP.
    pub(super) direct: AtomicU64,
    /// Connections to engines from another port than that of the program.
    pub(super) ports_changed: AtomicU64,
    links_refused: [AtomicU64; LinkRefused::ALL.len()],
}

impl Counters {
    pub(super) fn count_refused(&self, refused: Refused) {
        let at = Refused::ALL.iter().position(|cause| *cause == refused);
        add(&self.refused[at.unwrap_or_default()], 1);
    }

    pub(super) fn count_refused_link(&self, refused: LinkRefused) {
        add(&self.links_refused[refused as usize], 1);
    }
}

/// Counters of a peer.
#[derive(Debug, Default)]
pub(super) struct PeerCounters {
    /// Streams that are open, by class.
    open: [AtomicU64; Class::ALL.len()],
    /// Streams that this side has opened, by class.
    pub(super) opened: [AtomicU64; Class::ALL.len()],
    /// Streams of the peer that were connected to an engine, by class.
    pub(super) accepted: [AtomicU64; Class::ALL.len()],
    bytes_to_peer: AtomicU64,
    bytes_from_peer: AtomicU64,
    pub(super) links_opened: AtomicU64,
    pub(super) links_lost: AtomicU64,
    pub(super) connect_failures: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// Returns the place of a class in the counters.
pub(super) fn index(class: Class) -> usize {
    usize::from(class.channel())
}

/// Counts a stream as open until it is dropped, and the stream's bytes.
#[derive(Debug)]
pub(super) struct Meter {
    counters: Arc<PeerCounters>,
    class: Class,
}

impl Meter {
    pub(super) fn begin(counters: &Arc<PeerCounters>, class: Class) -> Self {
        add(&counters.open[index(class)], 1);
        Self { counters: Arc::clone(counters), class }
    }

    pub(super) fn add_to_peer(&self, bytes: usize) {
        add(&self.counters.bytes_to_peer, bytes as u64);
    }

    pub(super) fn add_from_peer(&self, bytes: usize) {
        add(&self.counters.bytes_from_peer, bytes as u64);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.counters.open[index(self.class)].fetch_sub(1, Ordering::Relaxed);
    }
}

/// The state and the counters of an agent.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AgentStats {
    /// The state of each peer, in the order of the settings.
    pub peers: Vec<AgentPeerStats>,
    /// Streams of peers that were refused: the cause in a word, and how many.
    pub refused: Vec<(&'static str, u64)>,
    /// Local connections that were reset because there was no link to the peer.
    pub without_link: u64,
    /// Local connections that were reset because the link had too many streams.
    pub beyond_limits: u64,
    /// Local connections that were reset because the agent has too few descriptors.
    pub no_descriptors: u64,
    /// Local connections that were reset because they were opened to the agent's own listener, not
    /// redirected to it, or were this agent's own direct connections. Carried on, they would have
    /// come back to this agent.
    pub looped: u64,
    /// Local connections that went directly by TCP, without an agent.
    pub direct: u64,
    /// Connections to engines whose source port differs from the peer program's, because that
    /// port was in use.
    pub ports_changed: u64,
    /// Links that were refused: the cause in a word, and how many. `tls` are failed handshakes, and
    /// `cm` requests by RDMA CM, which agents with TLS do not accept.
    pub links_refused: Vec<(&'static str, u64)>,
}

/// The state and the counters of a peer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AgentPeerStats {
    /// The alias of the host.
    pub alias: Ipv4Addr,
    /// The address of its agent.
    pub address: PeerAddress,
    /// The transports of the links to the peer. Usually there is one link with TLS. Without TLS,
    /// there are two, of which each side has opened one.
    pub links: Vec<Transport>,
    /// Why the last attempt to connect failed, if there was no link since.
    pub error: Option<String>,
    /// Streams that are open, by the class in which they were opened.
    pub open: [u64; Class::ALL.len()],
    /// Streams that this agent has opened, by class.
    pub opened: [u64; Class::ALL.len()],
    /// Streams of the peer that were connected to an engine, by class.
    pub accepted: [u64; Class::ALL.len()],
    /// Bytes that local programs have sent to the peer.
    pub bytes_to_peer: u64,
    /// Bytes that local programs have received from the peer.
    pub bytes_from_peer: u64,
    /// Links that were opened, by either side.
    pub links_opened: u64,
    /// Links that ended with a failure.
    pub links_lost: u64,
    /// Attempts to connect that failed.
    pub connect_failures: u64,
}

impl Counters {
    /// Returns the counters, without the peers.
    pub(super) fn stats(&self) -> AgentStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let refused = Refused::ALL.iter().zip(&self.refused);
        AgentStats {
            peers: Vec::new(),
            refused: refused.map(|(cause, count)| (cause.label(), of(count))).collect(),
            without_link: of(&self.without_link),
            beyond_limits: of(&self.beyond_limits),
            no_descriptors: of(&self.no_descriptors),
            looped: of(&self.looped),
            direct: of(&self.direct),
            ports_changed: of(&self.ports_changed),
            links_refused: LinkRefused::ALL
                .iter()
                .zip(&self.links_refused)
                .map(|(cause, count)| (cause.label(), of(count)))
                .collect(),
        }
    }
}

impl PeerCounters {
    /// Returns the counters. The caller adds the links and the error.
    pub(super) fn stats(&self, alias: Ipv4Addr, address: PeerAddress) -> AgentPeerStats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let each = |counters: &[AtomicU64; 3]| counters.each_ref().map(of);
        AgentPeerStats {
            alias,
            address,
            links: Vec::new(),
            error: None,
            open: each(&self.open),
            opened: each(&self.opened),
            accepted: each(&self.accepted),
            bytes_to_peer: of(&self.bytes_to_peer),
            bytes_from_peer: of(&self.bytes_from_peer),
            links_opened: of(&self.links_opened),
            links_lost: of(&self.links_lost),
            connect_failures: of(&self.connect_failures),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn every_cause_has_a_counter_and_a_label_of_its_own() {
        let counters = Counters::default();
        for (count, cause) in (1..).zip(Refused::ALL) {
            (0..count).for_each(|_| counters.count_refused(cause));
        }
        let stats = counters.stats();
        let counts: Vec<_> = stats.refused.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [1, 2, 3, 4, 5, 6, 7, 8]);
        let labels: std::collections::BTreeSet<_> =
            stats.refused.iter().map(|(label, _)| *label).collect();
        assert_eq!(labels.len(), Refused::ALL.len());
    }

    #[test]
    fn every_cause_of_a_refused_link_has_a_counter() {
        let counters = Counters::default();
        for (count, cause) in (1..).zip(LinkRefused::ALL) {
            (0..count).for_each(|_| counters.count_refused_link(cause));
        }
        let expected = [("address", 1), ("certificate", 2), ("too_many", 3), ("transport", 4)];
        assert_eq!(counters.stats().links_refused, expected);
    }

    #[test]
    fn stream_is_open_until_its_meter_is_dropped() {
        let counters = Arc::new(PeerCounters::default());
        let meter = Meter::begin(&counters, Class::Bus);
        meter.add_to_peer(5);
        meter.add_from_peer(7);
        let address = SocketAddr::from(([10, 0, 0, 2], 7470));
        let stats = || counters.stats([127, 1, 0, 2].into(), address.into());
        assert_eq!(stats().open, [1, 0, 0]);
        drop(meter);
        assert_eq!((stats().open, stats().bytes_to_peer, stats().bytes_from_peer), ([0; 3], 5, 7));
    }
}
