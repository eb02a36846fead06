//! Aliases of hosts and the peers of an agent, as the settings of `ferrite agent` name them.

use std::fmt;
use std::net::Ipv4Addr;

use crate::address;

/// Parses an alias: an address in 127.0.0.0/8 that no program uses by default. 127.0.0.1 is the
/// address of every host, 127.0.0.0 is the network's own address, and 127.255.255.255 is for
/// broadcasts.
///
/// ```
/// use ferrite_config::peer::alias;
///
/// assert_eq!(alias("127.1.0.2"), Some([127, 1, 0, 2].into()));
/// assert_eq!(alias("127.0.0.1"), None);
/// assert_eq!(alias("10.0.0.2"), None);
/// ```
#[must_use]
pub fn alias(text: &str) -> Option<Ipv4Addr> {
    let ip: Ipv4Addr = text.parse().ok()?;
    let is_shared = ip == Ipv4Addr::LOCALHOST || ip.octets() == [127, 0, 0, 0];
    (ip.is_loopback() && !is_shared && ip.octets() != [127, 255, 255, 255]).then_some(ip)
}

/// Splits a peer, `ALIAS=HOST` or `ALIAS=HOST:PORT`, into its alias and the address of its agent.
///
/// ```
/// use ferrite_config::peer::split;
///
/// let peer = split("127.1.0.2=10.0.0.2:7470");
/// assert_eq!(peer, Some(([127, 1, 0, 2].into(), "10.0.0.2:7470")));
/// assert_eq!(split("127.1.0.2"), None);
/// assert_eq!(split("10.0.0.2=127.1.0.2"), None);
/// ```
#[must_use]
pub fn split(text: &str) -> Option<(Ipv4Addr, &str)> {
    let (name, at) = text.split_once('=')?;
    let has_port_0 = address::split(at)?.1 == Some(0);
    Some((alias(name)?, at)).filter(|_| !has_port_0)
}

/// An IPv4 network, or a single address.
///
/// ```
/// use ferrite_config::peer::network;
///
/// let hosts = network("10.0.0.0/16").unwrap();
/// assert!(hosts.contains([10, 0, 3, 4].into()) && !hosts.contains([10, 1, 0, 0].into()));
/// assert_eq!((hosts.to_string(), hosts.address()), ("10.0.0.0/16".into(), None));
/// assert_eq!(network("10.0.0.2").unwrap().address(), Some([10, 0, 0, 2].into()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    first: Ipv4Addr,
    /// The number of leading bits that all addresses of the network have.
    prefix: u8,
}

impl Network {
    /// Returns whether an address belongs to the network.
    #[must_use]
    pub fn contains(&self, ip: Ipv4Addr) -> bool {
        (ip.to_bits() ^ self.first.to_bits()) & self.mask() == 0
    }

    /// Returns the address if there is only one.
    #[must_use]
    pub fn address(&self) -> Option<Ipv4Addr> {
        (self.prefix == 32).then_some(self.first)
    }

    /// Returns the addresses that hosts can have: without the first one, which is the network's
    /// own, unless it is the only one.
    pub fn hosts(&self) -> impl Iterator<Item = Ipv4Addr> {
        let (first, last) = (self.first.to_bits(), self.first.to_bits() | !self.mask());
        (if first == last { first } else { first + 1 }..=last).map(Ipv4Addr::from_bits)
    }

    fn mask(&self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            32 => write!(f, "{}", self.first),
            prefix => write!(f, "{}/{prefix}", self.first),
        }
    }
}

/// Parses a network, `10.0.0.0/16`, or an address. The addresses must be ones that hosts can have.
/// The bits after the prefix must be zero, so that a typing error is noticed.
///
/// ```
/// use ferrite_config::peer::network;
///
/// for wrong in ["10.0.0.1/16", "10.0.0.0/33", "0.0.0.0/0", "127.1.0.0/16", "224.0.0.1", "host"] {
///     assert_eq!(network(wrong), None, "{wrong}");
/// }
/// ```
#[must_use]
pub fn network(text: &str) -> Option<Network> {
    let (first, prefix) = text.split_once('/').unwrap_or((text, "32"));
    let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
    let prefix = prefix.parse().ok().filter(|prefix| is_number && (1..=32).contains(prefix))?;
    let network = Network { first: first.parse().ok()?, prefix };
    let is_exact = network.first.to_bits() & !network.mask() == 0;
    let Network { first, .. } = network;
    let is_shared = first.is_loopback() || first.is_multicast() || first.is_broadcast();
    (is_exact && !is_shared && !first.is_unspecified()).then_some(network)
}
