//! The metrics of an agent: its links, streams and refusals.

use ferrite_fabric::Transport;
use ferrite_session::agent::{AgentHandle, AgentPeerStats, AgentStats};

use crate::exposition::Exposition;

/// The label of each class of streams, in the order of the counters. A stream is counted in the
/// class in which it was opened. No stream is opened in the third class, *bulk*, so that class has
/// no label.
const CLASSES: [&str; 2] = ["bus", "interactive"];
/// The label of each transport.
const TRANSPORTS: [(Transport, &str); 3] =
    [(Transport::Rdma, "rdma"), (Transport::Tcp, "tcp"), (Transport::TcpTls, "tls")];

/// Writes the metrics of an agent.
pub fn agent_metrics(agent: &AgentHandle, out: &mut Exposition) {
    let stats = agent.stats();
    let aliases: Vec<_> = stats.peers.iter().map(|peer| peer.alias.to_string()).collect();
    let peers: Vec<_> = aliases.iter().map(String::as_str).zip(&stats.peers).collect();
    let links = peers.iter().flat_map(|(alias, peer)| {
        TRANSPORTS.map(|(transport, name)| {
            let count = peer.links.iter().filter(|link| **link == transport).count();
            (vec![("peer", *alias), ("transport", name)], count as u64)
        })
    });
    let links: Vec<_> = links.collect();
    out.gauges("agent_links", "Links to agents of other hosts, by their transport", &links);
    let each = |of: fn(&AgentPeerStats) -> u64| -> Vec<_> {
        peers.iter().map(|(alias, peer)| (vec![("peer", *alias)], of(peer))).collect()
    };
    let opened = each(|peer| peer.links_opened);
    out.counters("agent_links_opened", "Links that were opened, by either side", &opened);
    let lost = each(|peer| peer.links_lost);
    out.counters("agent_links_lost", "Links that ended with a failure", &lost);
    let failures = each(|peer| peer.connect_failures);
    out.counters("agent_connect_failures", "Attempts to open a link that failed", &failures);
    let open = peers.iter().flat_map(|(alias, peer)| {
        let by_class = CLASSES.iter().zip(peer.open);
        by_class.map(|(class, count)| (vec![("peer", *alias), ("class", *class)], count))
    });
    let open: Vec<_> = open.collect();
    out.gauges("agent_streams", "Connections that are carried, by class", &open);
    let opened = peers.iter().flat_map(|(alias, peer)| {
        [("local", peer.opened), ("peer", peer.accepted)].into_iter().flat_map(
            move |(by, counts)| {
                let by_class = CLASSES.iter().zip(counts);
                by_class.map(move |(class, count)| {
                    (vec![("peer", *alias), ("class", *class), ("by", by)], count)
                })
            },
        )
    });
    let opened: Vec<_> = opened.collect();
    let help = "Connections that were carried, by class and by the side whose program opened them";
    out.counters("agent_streams_opened", help, &opened);
    let bytes = peers.iter().flat_map(|(alias, peer)| {
        [("to_peer", peer.bytes_to_peer), ("from_peer", peer.bytes_from_peer)]
            .map(|(direction, count)| (vec![("peer", *alias), ("direction", direction)], count))
    });
    let bytes: Vec<_> = bytes.collect();
    out.counters("agent_bytes", "Bytes of the connections that were carried", &bytes);
    refusals(&stats, out);
}

fn refusals(stats: &AgentStats, out: &mut Exposition) {
    let refused: Vec<_> =
        stats.refused.iter().map(|(cause, count)| (vec![("cause", *cause)], *count)).collect();
    out.counters("agent_opens_refused", "Connections of peers that were refused", &refused);
    let AgentStats { without_link, beyond_limits, no_descriptors, looped, .. } = *stats;
    let reset = [
        ("no_link", without_link),
        ("limit", beyond_limits),
        ("descriptors", no_descriptors),
        ("loop", looped),
    ];
    let reset = reset.map(|(cause, count)| (vec![("cause", cause)], count));
    let help = "Connections of local programs that were reset without being carried";
    out.counters("agent_connections_refused", help, &reset);
    let help = "Connections of local programs that went directly by TCP, without an agent";
    out.counter("agent_direct_connections", help, stats.direct);
    let help = "Connections to engines whose source port is not that of the peer's program, because \
                that port was in use on this host";
    out.counter("agent_source_ports_changed", help, stats.ports_changed);
    let refused: Vec<_> = stats
        .links_refused
        .iter()
        .map(|(cause, count)| (vec![("cause", *cause)], *count))
        .collect();
    out.counters("agent_links_refused", "Links of peers that were refused", &refused);
}
