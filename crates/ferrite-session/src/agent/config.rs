//! The settings of an agent.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
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
    /// A name and a port. While there is no link to the peer, the agent looks for the address again
    /// and again.
    Name {
        /// The name.
        host: String,
        /// The port.
        port: u16,
        /// The address that was found last.
        found: Option<SocketAddr>,
    },
}

impl PeerAddress {
    /// Returns the address if it is known.
    #[must_use]
    pub fn known(&self) -> Option<SocketAddr> {
        match self {
            Self::Known(address) => Some(*address),
            Self::Name { found, .. } => *found,
        }
    }

    /// Returns whether the address is that of a name, and may change.
    #[must_use]
    pub fn is_name(&self) -> bool {
        matches!(self, Self::Name { .. })
    }

    /// Returns the host without its port.
    fn host(&self) -> String {
        match self {
            Self::Known(address) | Self::Name { found: Some(address), .. } => {
                address.ip().to_string()
            }
            Self::Name { host, found: None, .. } => host.clone(),
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
            Self::Known(address) | Self::Name { found: Some(address), .. } => address.fmt(f),
            Self::Name { host, port, found: None } => write!(f, "{host}:{port}"),
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

    /// Checks that an address that was found for the name of a peer is not one of this host.
    /// Without TLS, every program of this host could then pretend to be the peer.
    ///
    /// # Errors
    /// Returns what is wrong with the address.
    pub fn check_found(&self, ip: IpAddr) -> Result<(), String> {
        let ip = ip.to_canonical();
        let local = self.local.map(|local| local.ip());
        // A group on loopback addresses is for tests.
        let is_test = local.is_some_and(|local| local.is_loopback());
        if ip.is_loopback() && !is_test || ip.is_unspecified() {
            return Err(format!("{ip} is not the address of another host"));
        }
        let mut own = self.own.iter().map(SocketAddr::ip).chain(local);
        if own.any(|own| own == ip) || !is_test && is_of_this_host(ip) {
            return Err(format!("{ip} is an address of this host"));
        }
        Ok(())
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

/// Returns whether the kernel connects from an address to itself, which it does for the first
/// address of each network of this host. Sends nothing.
fn is_of_this_host(ip: IpAddr) -> bool {
    let any = if ip.is_ipv6() { IpAddr::from([0; 16]) } else { IpAddr::from([0; 4]) };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((ip, 9))?;
        socket.local_addr()
    });
    source.is_ok_and(|source| source.ip() == ip)
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

    #[test]
    fn names_must_not_lead_to_this_host() {
        let mut config = AgentConfig::new([127, 1, 0, 1].into());
        config.local = Some(([198, 51, 100, 1], 0).into());
        config.own = vec![([198, 51, 100, 1], 7470).into(), ([198, 51, 100, 9], 9121).into()];
        let check = |config: &AgentConfig, ip: &str| config.check_found(ip.parse().expect("an IP"));
        assert_eq!(check(&config, "198.51.100.2"), Ok(()));
        for ip in ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"] {
            assert!(
                check(&config, ip).expect_err(ip).contains("not the address of another"),
                "{ip}"
            );
        }
        for ip in ["198.51.100.1", "198.51.100.9", "::ffff:198.51.100.1"] {
            assert!(check(&config, ip).expect_err(ip).contains("of this host"), "{ip}");
        }
        config.local = Some(([127, 0, 0, 1], 0).into());
        assert_eq!(check(&config, "127.0.0.2"), Ok(()));
        assert!(check(&config, "127.0.0.1").is_err());
    }
}
