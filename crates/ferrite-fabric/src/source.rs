//! Identifies a peer wherever peers are counted, limited or blocked: handshakes in progress,
//! commands, memory, requests that a device refused.
//!
//! All of these use the same definition. Otherwise a peer could count as two sources somewhere, and
//! would get two shares there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The address that stands for an unknown peer address.
pub(crate) const UNKNOWN_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// The origin of a peer: an IPv4 address, or the first 64 bits of an IPv6 address, because one host
/// may use the whole /64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Source(IpAddr, Urgency);

/// Whether others wait for the commands of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Urgency {
    Waited,
    Unwaited,
}

impl Source {
    /// All peers whose address is unknown.
    const UNKNOWN: Self = Self(IpAddr::V4(Ipv4Addr::UNSPECIFIED), Urgency::Waited);

    pub(crate) fn of(peer: SocketAddr) -> Self {
        let ip = match peer.ip().to_canonical() {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        };
        Self(ip, Urgency::Waited)
    }

    /// Returns the same source for commands that nobody waits for. These commands have a queue of
    /// their own, so that they do not delay the source's other commands. For example, destroying an
    /// identifier of the connection manager can take seconds if its peer does not answer.
    pub(crate) fn unwaited(self) -> Self {
        Self(self.0, Urgency::Unwaited)
    }

    /// Returns the source of a peer whose address may be unknown.
    pub(crate) fn of_any(peer: Option<SocketAddr>) -> Self {
        peer.map_or(Self::UNKNOWN, Self::of)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn source(address: &str) -> Source {
        Source::of(SocketAddr::new(address.parse().expect("an address"), 1))
    }

    #[test]
    fn sources_are_hosts() {
        assert_eq!(source("::ffff:10.0.0.1"), source("10.0.0.1"));
        assert_eq!(source("2001:db8::1"), source("2001:db8::ffff:0:1"), "one host has a whole /64");
        assert_ne!(source("2001:db8::1"), source("2001:db8:0:1::1"));
        assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
        let scoped =
            |scope| Source::of(format!("[fe80::1%{scope}]:1").parse().expect("an address"));
        assert_eq!(scoped(1), scoped(2), "the interface does not matter");
        assert_eq!(Source::of_any(None), Source::UNKNOWN);
    }
}
