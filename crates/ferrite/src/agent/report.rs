//! What an agent reports about itself: log lines, and events in JSON.

use std::net::{IpAddr, SocketAddr};

use ferrite_config::{Policy, Values, table};
use ferrite_fabric::{Listener, Rdma};
use ferrite_session::agent::{AgentConfig, AgentStats};
use serde::Serialize;

use super::Setup;
use crate::{admin, output};

/// Warns if data is not encrypted, or peers are not authenticated.
pub(super) fn warn_of_clear_text(values: &Values, config: &AgentConfig, rdma: Rdma) {
    if config.tls.is_some() && rdma != Rdma::Forbid {
        tracing::warn!(
            "agents authenticate each other, but data over RDMA is not encrypted: anyone who can \
             capture packets in the network can read it. With rdma forbid and direct refuse, all \
             data is encrypted"
        );
    }
    if values.switch(&table::ALLOW_UNAUTHENTICATED_PEERS) {
        tracing::warn!(
            "agents do not authenticate each other and encrypt nothing \
             (allow-unauthenticated-peers yes): any host with the address of a peer can connect to \
             the engines"
        );
    }
}

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    addresses: &'a [SocketAddr],
    mode: &'a str,
    alias: IpAddr,
    peers: &'a [String],
    ports: String,
    rdma: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    admin: Option<SocketAddr>,
}

/// Reports that the agent listens.
pub(super) fn listening(setup: &Setup, listeners: &[Listener], admin: Option<SocketAddr>) {
    let Setup { values, config, json, .. } = setup;
    let addresses: Vec<_> = listeners.iter().map(Listener::local_addr).collect();
    if *json {
        output::print_event(&Listening {
            event: "listening",
            address: addresses.first().copied(),
            addresses: &addresses,
            mode: values.text(&table::AGENT_MODE).unwrap_or_default(),
            alias: config.alias.into(),
            peers: &setup.peers(),
            ports: config.ports.to_string(),
            rdma: values.policy().map_or("prefer", Policy::name),
            admin,
        });
        return;
    }
    let at: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let at = if at.is_empty() { "no address".into() } else { at.join(", ") };
    tracing::info!("listening for agents on {at}; {}", setup.describe());
    admin::report(admin);
}

#[derive(Serialize)]
struct Ended {
    event: &'static str,
    streams: Streams,
    refused: u64,
    without_link: u64,
    direct: u64,
    to_peer_bytes: u64,
    from_peer_bytes: u64,
}

#[derive(Serialize)]
struct Streams {
    opened: u64,
    accepted: u64,
}

/// Reports that the agent has ended.
pub(super) fn ended(json: bool, stats: &AgentStats) {
    let AgentStats { peers, without_link, direct, .. } = stats;
    let opened = peers.iter().flat_map(|peer| peer.opened).sum();
    let accepted = peers.iter().flat_map(|peer| peer.accepted).sum();
    let refused: u64 = stats.refused.iter().map(|(_, count)| count).sum();
    let to_peer_bytes = peers.iter().map(|peer| peer.bytes_to_peer).sum();
    let from_peer_bytes = peers.iter().map(|peer| peer.bytes_from_peer).sum();
    if json {
        output::print_event(&Ended {
            event: "ended",
            streams: Streams { opened, accepted },
            refused,
            without_link: *without_link,
            direct: *direct,
            to_peer_bytes,
            from_peer_bytes,
        });
        return;
    }
    tracing::info!(
        "agent ended: streams opened {opened}, accepted {accepted}, refused {refused}, \
         without a link {without_link}, direct {direct}, bytes to peers {to_peer_bytes}, \
         from peers {from_peer_bytes}"
    );
}
