//! Ports for servers that cannot pick one themselves.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a port that is free at the moment and that no other call in this process returns. The
/// port is below the kernel's range of ephemeral ports. Otherwise an outgoing connection could take
/// the port before the server listens, or a client could even connect to itself.
#[must_use]
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        // Tests run at the same time in processes of their own, so each process begins with a
        // different port.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = std::process::id().wrapping_mul(31).wrapping_add(number);
        let port = 10_000 + (number % 20_000) as u16; // at most 29,999
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

/// Returns a link-local address of this host with its interface (`fe80::1%eth0`), if there is one.
#[must_use]
pub fn link_local_address() -> Option<String> {
    const SCOPE: &str = "20";
    let all = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    all.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [address, _, _, SCOPE, _, interface] = words[..] else { return None };
        let ip = std::net::Ipv6Addr::from(u128::from_str_radix(address, 16).ok()?);
        Some(format!("{ip}%{interface}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_ports_in_use_and_returns_none_twice() {
        let first = free_port();
        let _taken = TcpListener::bind(("0.0.0.0", first + 1)); // the next candidate
        let more: Vec<_> = (0..10).map(|_| free_port()).collect();
        assert!(!more.contains(&first) && !more.contains(&(first + 1)), "{first} {more:?}");
    }
}
