//! Parses addresses given on the command line.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};

/// Parses an IP address or a host name, with an optional port.
///
/// Pass `DEFAULT_PORT` 0 for a local address, where any port will do.
pub(crate) fn parse<const DEFAULT_PORT: u16>(text: &str) -> Result<SocketAddr, String> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let raw = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(ip) = raw.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, DEFAULT_PORT));
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => (name, port.parse().map_err(|_| format!("{port:?} is not a port"))?),
        None => (text, DEFAULT_PORT),
    };
    if name.is_empty() || name.contains([':', '[', ']']) {
        return Err("expected ADDRESS or ADDRESS:PORT ([ADDRESS]:PORT for IPv6)".to_owned());
    }
    let found = (name, port).to_socket_addrs().map_err(|error| format!("{name}: {error}"))?;
    // Prefer IPv4 if the name has both: most RoCE networks use it.
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found.first().copied().ok_or_else(|| format!("{name} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> String {
        parse::<7471>(text).map_or_else(|error| error, |addr| addr.to_string())
    }

    #[test]
    fn parses_addresses_with_and_without_a_port() {
        assert_eq!(parsed("10.0.0.1"), "10.0.0.1:7471");
        assert_eq!(parsed("10.0.0.1:99"), "10.0.0.1:99");
        assert_eq!(parsed("2001:db8::1"), "[2001:db8::1]:7471");
        assert_eq!(parsed("[2001:db8::1]"), "[2001:db8::1]:7471");
        assert_eq!(parsed("[2001:db8::1]:99"), "[2001:db8::1]:99");
        assert_eq!(parse::<0>("10.0.0.2").map(|addr| addr.port()), Ok(0));
    }

    #[test]
    fn explains_invalid_addresses() {
        assert_eq!(parsed("10.0.0.1:http"), "\"http\" is not a port");
        assert_eq!(parsed("10.0.0.1:70000"), "\"70000\" is not a port");
        for bad in ["", ":7471", "[10.0.0.1", "a:b:1"] {
            assert!(parsed(bad).starts_with("expected ADDRESS"), "{bad}: {}", parsed(bad));
        }
    }
}
