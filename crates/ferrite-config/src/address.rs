//! Parses addresses, each a host with an optional port, in files, arguments and flags.

use std::net::{IpAddr, Ipv6Addr};

/// Splits an address into its host, without brackets, and its port.
///
/// The host is an IP address, an IPv6 address with its interface (`fe80::1%eth0`) or a name. With a
/// port, an IPv6 address stands in brackets.
///
/// ```
/// use ferrite_config::address::split;
///
/// assert_eq!(split("192.0.2.1:6380"), Some(("192.0.2.1", Some(6380))));
/// assert_eq!(split("[fe80::1%eth0]:6380"), Some(("fe80::1%eth0", Some(6380))));
/// assert_eq!(split("2001:db8::1"), Some(("2001:db8::1", None)));
/// assert_eq!(split("cache.example.com"), Some(("cache.example.com", None)));
/// assert_eq!(split("cache:port"), None);
/// ```
#[must_use]
pub fn split(text: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').filter(|(host, _)| is_ip_v6(host))?;
            (host, if after.is_empty() { None } else { Some(after.strip_prefix(':')?) })
        }
        None if is_ip_v6(text) => (text, None),
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        Some(port) => Some(port.parse().ok()?),
        None => None,
    };
    is_host(host).then_some((host, port))
}

/// Returns the host of an address that has no port, without brackets.
#[must_use]
pub fn host(text: &str) -> Option<&str> {
    split(text).filter(|(_, port)| port.is_none()).map(|(host, _)| host)
}

/// Returns the words of a list of addresses, which commas or spaces separate.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ' ']).filter(|word| !word.is_empty())
}

/// Returns whether a text has the form of a host name. The name need not exist.
#[must_use]
pub fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
        && text.contains(|c: char| c.is_ascii_alphabetic())
        && !text.starts_with('-')
}

fn is_host(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || is_ip_v6(text) || is_name(text)
}

/// Returns whether a text is an IPv6 address, with or without its interface.
fn is_ip_v6(text: &str) -> bool {
    let (ip, interface) = text.split_once('%').unwrap_or((text, "1"));
    let is_interface =
        !interface.is_empty() && interface.chars().all(|c| c.is_ascii_graphic() && c != ']');
    is_interface && ip.parse::<Ipv6Addr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_hosts_and_ports() {
        for (text, host, port) in [
            ("10.0.0.1", "10.0.0.1", None),
            ("10.0.0.1:0", "10.0.0.1", Some(0)),
            ("::1", "::1", None),
            ("[::1]", "::1", None),
            ("[::1]:6380", "::1", Some(6380)),
            ("fe80::1%eth0", "fe80::1%eth0", None),
            ("[fe80::1%eth0.7]:1", "fe80::1%eth0.7", Some(1)),
            ("localhost", "localhost", None),
            ("a-b.example:65535", "a-b.example", Some(65_535)),
        ] {
            assert_eq!(split(text), Some((host, port)), "{text}");
        }
        assert_eq!(host("[::1]"), Some("::1"));
        assert_eq!(host("[::1]:1"), None);
    }

    #[test]
    fn rejects_what_is_no_address() {
        for text in [
            "",
            ":6380",
            "10.0.0.1:",
            "10.0.0.1:http",
            "10.0.0.1:65536",
            "10.0.0.1.2",
            "[10.0.0.1]",
            "[::1",
            "[::1]6380",
            "[::1]:",
            "fe80::1%",
            "10.0.0.1%eth0",
            "a b",
            "a:b:1",
            "-a",
            "a/b",
        ] {
            assert_eq!(split(text), None, "{text}");
        }
    }
}
