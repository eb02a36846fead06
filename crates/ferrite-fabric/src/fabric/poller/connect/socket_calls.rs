//! System calls on TCP sockets, and the conversion of their errors.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::error::{Error, ErrorKind};

/// Opens a socket of the family of an address.
pub(super) fn open_socket(of: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if of.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

pub(super) fn address(found: Result<rustix::net::SocketAddrAny, Errno>) -> Option<SocketAddr> {
    found.ok().and_then(|found| SocketAddr::try_from(found).ok())
}

pub(super) fn tcp_error(call: &'static str, addr: SocketAddr) -> impl Fn(Errno) -> Error {
    move |errno| {
        let kind = match errno {
            Errno::CONNREFUSED => ErrorKind::Refused,
            Errno::CONNRESET | Errno::PIPE => ErrorKind::LinkDown,
            Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::ADDRNOTAVAIL
            // The peer cannot be reached from this local address.
            | Errno::INVAL => ErrorKind::Unreachable,
            Errno::TIMEDOUT => ErrorKind::Timeout,
            Errno::ADDRINUSE | Errno::ACCESS => ErrorKind::Misuse,
            Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM => ErrorKind::Resources,
            _ => ErrorKind::System,
        };
        let hint = match errno {
            Errno::ADDRINUSE => {
                "; choose another port, or stop the program that has it (`ss -ltnp` lists it)"
            }
            Errno::ADDRNOTAVAIL if call == "bind" => {
                "; this host has no such address (`ip addr` lists those it has)"
            }
            Errno::INVAL if lacks_scope(addr) => {
                "; a link-local address needs its interface, as in [fe80::1%eth0]:6380"
            }
            Errno::ACCESS if call == "bind" && addr.port() < 1024 => {
                "; ports below 1024 need root or CAP_NET_BIND_SERVICE: choose another port"
            }
            _ => "",
        };
        Error::new(kind, format!("{call} {addr} over TCP: {errno}{hint}"))
    }
}

/// Returns whether an address is link-local and lacks the interface.
fn lacks_scope(addr: SocketAddr) -> bool {
    matches!(addr, SocketAddr::V6(at) if at.ip().is_unicast_link_local() && at.scope_id() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_for_the_interface_of_a_link_local_address() {
        let error =
            |at: &str| tcp_error("bind", at.parse().expect("an address"))(Errno::INVAL).to_string();
        assert!(error("[fe80::1]:6380").contains("needs its interface"));
        assert!(!error("[fe80::1%2]:6380").contains("interface"));
        assert!(!error("[2001:db8::1]:6380").contains("interface"));
    }
}
