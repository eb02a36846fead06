//! Who a peer is, wherever peers are counted, limited or held to account: handshakes under way,
//! commands, memory, requests that a device refused.
//!
//! One meaning for all, because a peer that is two sources in one place has twice its share there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Where a peer is: an IPv4 address, or the first 64 bits of an IPv6 address, of which one host may
/// use all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Source(IpAddr);

impl Source {
    /// Peers of which no address is known, all together.
    const UNKNOWN: Self = Self(IpAddr::V4(Ipv4Addr::UNSPECIFIED));

    pub(crate) fn of(peer: SocketAddr) -> Self {
        Self(match peer.ip().to_canonical() {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        })
    }

    /// That of a peer whose address may be unknown.
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
        assert_eq!(scoped(1), scoped(2), "whatever the interface");
        assert_eq!(Source::of_any(None), Source::UNKNOWN);
    }
}
