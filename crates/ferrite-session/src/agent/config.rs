//! The settings of an agent.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use ferrite_config::peer::Network;
use ferrite_config::ports::PortSet;
use ferrite_fabric::rustls::pki_types::ServerName;

use super::identity::AgentTls;

/// The settings of an [`Agent`](super::Agent).
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// The alias of this host. Its engines bind it. In transparent mode the host's own address.
    pub alias: Ipv4Addr,
    /// The other hosts. In transparent mode, only those whose addresses the settings name; the
    /// hosts of [`Transparent::networks`] become peers when they are needed.
    pub peers: Vec<AgentPeer>,
    /// Set in transparent mode: connections are redirected to the agent.
    pub transparent: Option<Transparent>,
    /// The ports of engines and of their cluster bus. The agent listens on them at the aliases of
    /// the peers.
    pub ports: PortSet,
    /// The ports of this host's alias that peers may connect to.
    pub deliver: PortSet,
    /// The local address from which this agent opens links; `None` for any.
    pub local: Option<SocketAddr>,
    /// Further addresses of this program that peers must not reach, such as its admin port.
    pub own: Vec<SocketAddr>,
    /// Mutual TLS with all peers. Without it, a peer is recognised by its address alone.
    pub tls: Option<AgentTls>,
    /// Whether a connection goes directly to the peer's address by TCP while there is no link to
    /// the peer (default false).
    pub direct: bool,
    /// Whether to refuse peers while the engine requires no password (default true).
    pub protected_mode: bool,
    /// How long streams may go on when the agent shuts down (default 30 s).
    pub drain_timeout: Duration,
}

/// The settings of transparent mode.
#[derive(Debug, Clone)]
pub struct Transparent {
    /// The networks whose hosts may have agents. A host of them becomes a peer at the first
    /// connection to it or from it.
    pub networks: Vec<Network>,
    /// The ports whose connections are redirected: those of [`AgentConfig::ports`] that do not
    /// connect directly.
    pub redirected: PortSet,
    /// The port at which the agents of these hosts listen.
    pub port: u16,
    /// The addresses of this host when the agent starts (default: none but
    /// [`AgentConfig::alias`]). The peers and the networks may have them, but connections to them
    /// are not redirected, and they need no link.
    pub local: Vec<Network>,
}

impl Transparent {
    /// Returns the settings of a host with a single address.
    #[must_use]
    pub fn new(networks: Vec<Network>, redirected: PortSet, port: u16) -> Self {
        Self { networks, redirected, port, local: Vec::new() }
    }
}

/// A host of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPeer {
    /// The host's alias.
    pub alias: Ipv4Addr,
    /// The address of its agent.
    pub address: PeerAddress,
    /// With TLS: the address or the name that the certificate of its agent must have.
    pub name: ServerName<'static>,
}

impl AgentPeer {
    /// Returns a host whose certificate must have the address of its agent.
    #[must_use]
    pub fn new(alias: Ipv4Addr, address: SocketAddr) -> Self {
        let name = ServerName::from(address.ip().to_canonical());
        Self { alias, address: address.into(), name }
    }
}

/// The address of a peer's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerAddress {
    /// The address is known.
    Known(SocketAddr),
    /// A name whose address is not known yet, and the port. Before the agent opens a link, it looks
    /// for the address.
    Name(String, u16),
}

impl PeerAddress {
    /// Returns the address if it is known.
    #[must_use]
    pub fn known(&self) -> Option<SocketAddr> {
        match self {
            Self::Known(address) => Some(*address),
            Self::Name(..) => None,
        }
    }

    /// Returns the host without its port.
    fn host(&self) -> String {
        match self {
            Self::Known(address) => address.ip().to_string(),
            Self::Name(name, _) => name.clone(),
        }
    }
}

impl From<SocketAddr> for PeerAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Known(address)
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(address) => address.fmt(f),
            Self::Name(name, port) => write!(f, "{name}:{port}"),
        }
    }
}

impl AgentConfig {
    /// Returns the default settings for the host with this alias.
    #[must_use]
    pub fn new(alias: Ipv4Addr) -> Self {
        Self {
            alias,
            peers: Vec::new(),
            transparent: None,
            ports: PortSet::default(),
            deliver: PortSet::default(),
            local: None,
            own: Vec::new(),
            tls: None,
            direct: false,
            protected_mode: true,
            drain_timeout: Duration::from_secs(30),
        }
    }

    /// Checks that the hosts can be told apart.
    ///
    /// # Errors
    /// Returns what is wrong, and how to change it.
    pub fn check(&self) -> Result<(), String> {
        for (at, peer) in self.peers.iter().enumerate() {
            if peer.alias == self.alias {
                return Err(format!("peer {}: this is the alias of this host", peer.alias));
            }
            for other in &self.peers[..at] {
                if other.alias == peer.alias {
                    return Err(format!("peer {}: two peers have this alias", peer.alias));
                }
                // A peer that connects is recognised by its address.
                let host = peer.address.host();
                if other.address.host() == host {
                    return Err(format!(
                        "peers {} and {} are both at {host}",
                        other.alias, peer.alias
                    ));
                }
            }
        }
        if (!self.peers.is_empty() || self.transparent.is_some()) && self.ports.is_empty() {
            return Err("ports: none; name the ports of the engines on other hosts".into());
        }
        if let Some(Transparent { port, .. }) = self.transparent
            && self.ports.contains(port)
        {
            return Err(format!(
                "ports: {port} is the port of the agents, so their links would be redirected"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(peers: &[(u8, &str)], ports: &str) -> Result<(), String> {
        let mut config = AgentConfig::new([127, 1, 0, 1].into());
        config.peers = peers
            .iter()
            .map(|(host, address)| {
                let address = address.parse().expect("an address");
                AgentPeer::new([127, 1, 0, *host].into(), address)
            })
            .collect();
        config.ports = PortSet::parse(ports.split_whitespace()).expect("ports");
        config.check()
    }

    #[test]
    fn links_must_not_be_redirected() {
        let mut config = AgentConfig::new([10, 0, 0, 1].into());
        config.transparent = Some(Transparent::new(Vec::new(), PortSet::default(), 7470));
        assert!(config.check().expect_err("no ports").contains("ports: none"));
        config.ports = PortSet::parse(["7000-7500"]).expect("ports");
        assert!(config.check().expect_err("links").contains("7470 is the port of the agents"));
        config.ports = PortSet::parse(["7000-7009"]).expect("ports");
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn hosts_must_differ() {
        assert_eq!(check(&[], ""), Ok(()));
        assert_eq!(check(&[(2, "10.0.0.2:7470"), (3, "10.0.0.3:7470")], "7000"), Ok(()));
        for (peers, ports, expected) in [
            (&[(1, "10.0.0.2:7470")][..], "7000", "of this host"),
            (&[(2, "10.0.0.2:7470"), (2, "10.0.0.3:7470")], "7000", "two peers"),
            (&[(2, "10.0.0.2:7470"), (3, "10.0.0.2:7471")], "7000", "are both at 10.0.0.2"),
            (&[(2, "10.0.0.2:7470")], "", "ports: none"),
        ] {
            let error = check(peers, ports).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
