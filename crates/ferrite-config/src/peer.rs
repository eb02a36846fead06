//! Aliases of hosts and the peers of an agent, as the settings of `ferrite agent` name them.

use std::net::Ipv4Addr;

use crate::address;

/// Parses an alias: an address in 127.0.0.0/8 that no program uses by default. 127.0.0.1 is the
/// address of every host, and the last one is for broadcasts.
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
