//! The TCP connections of this host, as the kernel lists them in `/proc/net/tcp` and
//! `/proc/net/tcp6`. The lists have the sockets of this network namespace.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Context as _;

/// The state of a listening socket in the kernel's lists, which is no connection.
const LISTEN: &str = "0A";

/// The connections, each as the local and the remote address of its socket.
#[derive(Debug, Default)]
pub(super) struct Sockets(BTreeSet<(SocketAddr, SocketAddr)>);

impl Sockets {
    /// Reads the lists.
    ///
    /// # Errors
    /// The kernel's list of IPv4 connections cannot be read. A host without IPv6 has no other list.
    pub(super) fn read() -> anyhow::Result<Self> {
        let path = "/proc/net/tcp";
        let mut text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        text += &std::fs::read_to_string("/proc/net/tcp6").unwrap_or_default();
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(connection).collect())
    }

    /// Returns whether this host has a socket with these addresses.
    pub(super) fn has(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.0.contains(&(local, remote))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SocketAddr, SocketAddr)> {
        self.0.iter().copied()
    }
}

/// Parses a line: a number, the local address, the remote address, the state, and so on.
fn connection(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let mut words = line.split_whitespace().skip(1);
    let (local, remote) = (address(words.next()?)?, address(words.next()?)?);
    (words.next()? != LISTEN).then_some((local, remote))
}

/// Parses an address such as `0100007F:1F90`. Each group of eight digits is a number in the byte
/// order of this host. An IPv4 address that an IPv6 socket has is returned as an IPv4 address.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let groups = ip.as_bytes().chunks(8).map(|group| {
        u32::from_str_radix(str::from_utf8(group).ok()?, 16).ok().map(u32::to_ne_bytes)
    });
    let bytes = groups.collect::<Option<Vec<_>>>()?.concat();
    let ip = match <[u8; 4]>::try_from(bytes.as_slice()) {
        Ok(bytes) => IpAddr::V4(Ipv4Addr::from(bytes)),
        Err(_) => Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical().into(),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[cfg(target_endian = "little")]
    #[test]
    fn reads_the_kernels_lines() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr\n   0: \
                    0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000\n   1: \
                    0100007F:1F90 0200007F:D431 01 00000000:00000000 00:00000000\n   2: \
                    0000000000000000FFFF00000100000A:1F90 0000000000000000FFFF00000200000A:D431 01 \
                    00000000:00000000\n";
        let sockets = Sockets::parse(text);
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert!(sockets.has(at("127.0.0.1:8080"), at("127.0.0.2:54321")));
        assert!(sockets.has(at("10.0.0.1:8080"), at("10.0.0.2:54321")), "{sockets:?}");
        assert_eq!(sockets.iter().count(), 2, "a listening socket is no connection: {sockets:?}");
    }

    #[test]
    fn has_both_ends_of_a_connection_within_the_host() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("made");
        let (server, _) = listener.accept().expect("accepted");
        let (one, other) = (server.local_addr(), server.peer_addr());
        let (one, other) = (one.expect("an address"), other.expect("an address"));
        let sockets = Sockets::read().expect("the kernel's list");
        assert!(sockets.has(one, other) && sockets.has(other, one), "{one} {other}");
        drop(client);
    }
}
