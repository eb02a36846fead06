//! Which streams of a peer this host accepts. Has no I/O.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ferrite_config::ports::PortSet;
use ferrite_proto::mux::Route;

/// The rules for streams of peers.
#[derive(Debug, Clone)]
pub(super) struct Admission {
    /// The alias of this host, the only valid destination.
    pub(super) alias: Ipv4Addr,
    /// The ports that peers may connect to.
    pub(super) deliver: PortSet,
    /// The addresses on which the agent itself listens.
    pub(super) own: Vec<SocketAddr>,
}

/// Why a stream of a peer is forbidden.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Forbidden {
    /// The source is not the peer's alias.
    Source,
    /// The destination is not the alias of this host.
    Destination,
    /// The port is not one of those that peers may connect to.
    Port,
    /// The destination is the agent itself.
    Agent,
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "the source is not the peer's alias",
            Self::Destination => "the destination is not the alias of this host",
            Self::Port => "the port is not in `deliver`",
            Self::Agent => "the destination is this agent",
        })
    }
}

impl Admission {
    /// Returns the ports of this host that peers may connect to: those of engines, then those of
    /// cluster buses.
    pub(super) fn ports_for_checks(&self) -> Vec<u16> {
        let is_other = |port: &u16| !self.is_own((self.alias, *port).into());
        let mut ports: Vec<_> = self.deliver.iter().filter(is_other).collect();
        ports.sort_by_key(|port| self.deliver.engine_of_bus(*port).is_some());
        ports
    }

    /// Returns whether the agent itself listens at an address.
    fn is_own(&self, at: SocketAddr) -> bool {
        let is_at = |own: &SocketAddr| {
            own.port() == at.port() && (own.ip().is_unspecified() || own.ip() == at.ip())
        };
        self.own.iter().any(is_at)
    }

    /// Checks a stream of the peer with this alias.
    pub(super) fn check(&self, peer: Ipv4Addr, route: &Route) -> Result<(), Forbidden> {
        let Route { destination, source } = route;
        if source.ip() != IpAddr::V4(peer) {
            return Err(Forbidden::Source);
        }
        if destination.ip() != IpAddr::V4(self.alias) {
            return Err(Forbidden::Destination);
        }
        if self.is_own(*destination) {
            return Err(Forbidden::Agent);
        }
        if !self.deliver.contains(destination.port()) {
            return Err(Forbidden::Port);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, destination: &str) -> Result<(), Forbidden> {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let admission = Admission {
            alias: [127, 1, 0, 1].into(),
            deliver: PortSet::parse(["7000-7009", "7470", "9121"]).expect("ports"),
            own: vec![at("0.0.0.0:7470"), at("127.0.0.1:9121")],
        };
        let route = Route { destination: at(destination), source: at(source) };
        admission.check([127, 1, 0, 2].into(), &route)
    }

    #[test]
    fn accepts_only_the_peers_alias_to_this_hosts_alias() {
        assert_eq!(check("127.1.0.2:38808", "127.1.0.1:7001"), Ok(()));
        for source in ["127.1.0.3:1", "127.1.0.1:1", "127.0.0.1:1", "10.0.0.2:1", "[::1]:1"] {
            assert_eq!(check(source, "127.1.0.1:7001"), Err(Forbidden::Source), "{source}");
        }
        for destination in ["127.1.0.2:7001", "127.0.0.1:7001", "10.0.0.1:7001", "[::1]:7001"] {
            let result = check("127.1.0.2:1", destination);
            assert_eq!(result, Err(Forbidden::Destination), "{destination}");
        }
    }

    #[test]
    fn ports_for_checks_are_those_of_engines_first_and_never_the_agent() {
        let mut admission = Admission {
            alias: [10, 0, 0, 1].into(),
            deliver: PortSet::parse(["7000-7001", "7470", "17000"]).expect("ports"),
            own: vec!["10.0.0.1:7470".parse().expect("an address")],
        };
        assert_eq!(admission.ports_for_checks(), [7000, 7001, 17000]);
        admission.deliver = PortSet::parse(["7470"]).expect("ports");
        assert!(admission.ports_for_checks().is_empty());
    }

    #[test]
    fn accepts_only_ports_that_are_delivered_and_never_the_agent() {
        assert_eq!(check("127.1.0.2:1", "127.1.0.1:7010"), Err(Forbidden::Port));
        assert_eq!(check("127.1.0.2:1", "127.1.0.1:22"), Err(Forbidden::Port));
        assert_eq!(check("127.1.0.2:1", "127.1.0.1:7470"), Err(Forbidden::Agent));
        // The agent's admin port is at 127.0.0.1, so this is another port with the same number.
        assert_eq!(check("127.1.0.2:1", "127.1.0.1:9121"), Ok(()));
    }
}
