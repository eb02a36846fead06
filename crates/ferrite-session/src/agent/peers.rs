//! The peers: those of the settings and, in transparent mode, hosts of the networks in the
//! settings, from the first connection on.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};

use ferrite_config::peer::Network;
use ferrite_fabric::LogLimit;

use super::config::{AgentConfig, AgentPeer, Transparent};
use super::peer::Peer;
use super::peer_links::Sharing;
use super::stats::AgentPeerStats;

/// Maximum number of peers. Beyond it, further hosts of the networks take the place of those that
/// never had a link.
const PEERS_MAX: usize = 4096;

/// The peers of an agent.
#[derive(Debug)]
pub(super) struct Peers {
    /// The peers of the settings in their order, then the hosts that have become peers later.
    known: RwLock<Vec<Arc<Peer>>>,
    /// The number of peers in the settings.
    configured: usize,
    transparent: Option<Transparent>,
    /// The addresses of this host now, in transparent mode.
    local: RwLock<Vec<Network>>,
    own: Ipv4Addr,
    /// Set if pairs of agents share a link.
    sharing: Option<Sharing>,
    /// The limit of all hosts of the networks together. See [`Peer::new`].
    failure_lines: Arc<LogLimit>,
}

impl Peers {
    /// Returns the peers of the settings. See [`Peer::new`] for `sharing`.
    pub(super) fn new(config: &AgentConfig, sharing: Option<Sharing>) -> Self {
        let AgentConfig { alias, peers, transparent, .. } = config;
        let new = |peer: &AgentPeer| Arc::new(Peer::new(peer.clone(), sharing, Arc::default()));
        let known: Vec<_> = peers.iter().map(new).collect();
        Self {
            configured: known.len(),
            known: RwLock::new(known),
            local: RwLock::new(transparent.iter().flat_map(|it| it.local.clone()).collect()),
            transparent: transparent.clone(),
            own: *alias,
            sharing,
            failure_lines: Arc::default(),
        }
    }

    pub(super) fn is_transparent(&self) -> bool {
        self.transparent.is_some()
    }

    /// Returns all peers.
    pub(super) fn all(&self) -> Vec<Arc<Peer>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns an address that a host of the group may have, in transparent mode.
    pub(super) fn any_address(&self) -> Option<Ipv4Addr> {
        let networks = &self.transparent.as_ref()?.networks;
        let local = self.local();
        let not_own = |ip: &Ipv4Addr| *ip != self.own && !contains(&local, *ip);
        networks.iter().find_map(|network| network.hosts().find(not_own))
    }

    /// Sets the addresses of this host, in transparent mode.
    pub(super) fn set_local(&self, local: &[Network]) {
        let before = std::mem::replace(
            &mut *self.local.write().unwrap_or_else(PoisonError::into_inner),
            local.to_vec(),
        );
        for peer in self.all().iter().take(self.configured) {
            match (contains(&before, peer.alias), contains(local, peer.alias)) {
                (false, true) => tracing::info!("{} is an address of this host now", peer.alias),
                (true, false) => {
                    tracing::info!("{} is an address of this host no longer", peer.alias);
                }
                _ => {}
            }
        }
    }

    fn local(&self) -> Vec<Network> {
        self.local.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the first port whose connections are redirected, in transparent mode.
    pub(super) fn any_redirected_port(&self) -> Option<u16> {
        self.transparent.as_ref()?.redirected.iter().next()
    }

    /// Returns the peers that the settings name, without those whose address this host has now: the
    /// address may move between hosts.
    pub(super) fn configured(&self) -> Vec<Arc<Peer>> {
        let (mut peers, local) = (self.all(), self.local());
        peers.truncate(self.configured);
        peers.retain(|peer| !contains(&local, peer.alias));
        peers
    }

    /// Returns the peer with this address. In transparent mode, makes a host of the networks a
    /// peer. Returns `None` for addresses that belong to no peer.
    pub(super) fn at(&self, ip: IpAddr) -> Option<Arc<Peer>> {
        let find = |known: &[Arc<Peer>]| known.iter().find(|peer| peer.ip() == Some(ip)).cloned();
        if let Some(peer) = find(&self.known.read().unwrap_or_else(PoisonError::into_inner)) {
            return Some(peer);
        }
        let (alias, port) = self.host_of_networks(ip)?;
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = find(&known) {
            return Some(peer);
        }
        if known.len() >= PEERS_MAX {
            let unused = self.oldest_unused(&known);
            static LINES: LogLimit = LogLimit::new();
            if let Some(others) = LINES.pass() {
                let effect = match unused {
                    Some(_) => "takes the place of a host that never had a link",
                    None => "does not become a peer",
                };
                tracing::warn!("{alias} {effect}: there are {PEERS_MAX} peers already{others}");
            }
            known.remove(unused?);
        }
        let address = SocketAddr::from((alias, port));
        let lines = Arc::clone(&self.failure_lines);
        let peer = Arc::new(Peer::new(AgentPeer::new(alias, address), self.sharing, lines));
        known.push(Arc::clone(&peer));
        Some(peer)
    }

    /// Returns whether a host of the networks cannot become a peer because there are too many.
    pub(super) fn has_no_room_for(&self, ip: IpAddr) -> bool {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        known.len() >= PEERS_MAX
            && self.host_of_networks(ip).is_some()
            && !known.iter().any(|peer| peer.ip() == Some(ip))
    }

    /// Returns whether a host of the networks is no peer yet, and can become one.
    pub(super) fn may_add(&self, ip: IpAddr) -> bool {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        self.host_of_networks(ip).is_some()
            && !known.iter().any(|peer| peer.ip() == Some(ip))
            && (known.len() < PEERS_MAX || self.oldest_unused(&known).is_some())
    }

    /// Returns the address of another host of the networks, and the port of its agent.
    fn host_of_networks(&self, ip: IpAddr) -> Option<(Ipv4Addr, u16)> {
        let (Some(transparent), IpAddr::V4(alias)) = (&self.transparent, ip) else { return None };
        let is_in_network = transparent.networks.iter().any(|network| network.contains(alias));
        (alias != self.own && is_in_network).then_some((alias, transparent.port))
    }

    /// Returns the place of a host of the networks that never had a link, and that no connection or
    /// attempt to connect uses.
    fn oldest_unused(&self, known: &[Arc<Peer>]) -> Option<usize> {
        // Others get a peer from this list alone, which is locked.
        let is_unused = |peer: &Arc<Peer>| Arc::strong_count(peer) == 1 && !peer.had_link();
        let mut hosts = known.iter().enumerate().skip(self.configured);
        hosts.find(|(_, peer)| is_unused(peer)).map(|(at, _)| at)
    }

    /// Returns the state of the peers. Hosts of the networks, and peers whose address this host
    /// has, are left out if they never had a link.
    pub(super) fn stats(&self) -> Vec<AgentPeerStats> {
        let local = self.local();
        let all = self.all().into_iter().map(|peer| peer.stats()).enumerate();
        let is_needed = |index: usize, stats: &AgentPeerStats| {
            index < self.configured && !contains(&local, stats.alias)
        };
        let shown = all.filter(|(index, it)| is_needed(*index, it) || it.links_opened > 0);
        shown.map(|(_, stats)| stats).collect()
    }
}

fn contains(networks: &[Network], ip: Ipv4Addr) -> bool {
    networks.iter().any(|network| network.contains(ip))
}

#[cfg(test)]
mod tests {
    use ferrite_config::peer::network;
    use ferrite_config::ports::PortSet;

    use super::*;

    fn config(networks: &[&str]) -> AgentConfig {
        let mut config = AgentConfig::new([10, 0, 0, 1].into());
        let networks = networks.iter().filter_map(|text| network(text)).collect();
        config.transparent = Some(Transparent::new(networks, PortSet::default(), 7470));
        let ip = Ipv4Addr::from([10, 9, 0, 1]);
        config.peers = vec![AgentPeer::new(ip, (ip, 7470).into())];
        config
    }

    #[test]
    fn hosts_of_a_network_become_peers_once() {
        let peers = Peers::new(&config(&["10.0.0.0/24"]), None);
        let peer = peers.at([10, 0, 0, 2].into()).expect("a peer");
        assert_eq!(peer.address().to_string(), "10.0.0.2:7470");
        assert!(Arc::ptr_eq(&peer, &peers.at([10, 0, 0, 2].into()).expect("a peer")));
        assert!(peers.at([10, 9, 0, 1].into()).is_some(), "one of the settings");
        assert!(peers.at([10, 0, 1, 2].into()).is_none(), "another network");
        assert!(peers.at([10, 0, 0, 1].into()).is_none(), "this host");
        assert_eq!((peers.all().len(), peers.configured().len()), (2, 1));
        assert_eq!(peers.stats().len(), 1, "no link to the other one");
    }

    #[test]
    fn hosts_of_the_networks_together_log_one_failure_a_minute() {
        let peers = Peers::new(&config(&["10.0.0.0/24"]), None);
        let passes =
            |host: [u8; 4]| peers.at(host.into()).expect("a peer").failure_lines.pass().is_some();
        let hosts = [[10, 0, 0, 2], [10, 0, 0, 3], [10, 9, 0, 1], [10, 9, 0, 1]];
        assert_eq!(hosts.map(passes), [true, false, true, false], "the third is in the settings");
    }

    #[test]
    fn hosts_without_a_link_give_way_to_others_if_there_are_too_many() {
        let peers = Peers::new(&config(&["10.0.0.0/8"]), None);
        let ip = |number: usize| Ipv4Addr::from_bits(0x0a01_0000 + number as u32).into();
        let at = |number: usize| peers.at(ip(number));
        let used: Vec<_> = (1..PEERS_MAX).map(|number| at(number).expect("a peer")).collect();
        assert!(at(PEERS_MAX).is_none(), "all others are in use");
        assert!(peers.has_no_room_for(ip(PEERS_MAX)) && !peers.has_no_room_for(ip(1)));
        assert!(!peers.has_no_room_for([192, 0, 2, 1].into()), "another network");
        crate::agent::stats::add(&used[0].counters.links_opened, 1);
        drop(used);
        assert!(at(PEERS_MAX).is_some());
        assert!(!peers.has_no_room_for(ip(PEERS_MAX)));
        let all = peers.all();
        assert_eq!(all.len(), PEERS_MAX);
        let has = |number: usize| all.iter().any(|peer| peer.ip() == Some(ip(number)));
        assert_eq!([1, 2, 3].map(has), [true, false, true], "the first one had a link");
        assert_eq!(all[0].alias, Ipv4Addr::from([10, 9, 0, 1]), "one of the settings");
    }
}
