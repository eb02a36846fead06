//! TCP keepalive: the kernel probes a silent peer, and ends the connection if no answer comes.
//!
//! A peer whose host has died sends nothing, not even a close. A program that only waits, such as a
//! subscriber, would wait for ever. Links between Ferrite peers do not use TCP keepalive, because
//! they have their own keepalives.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

/// The silence after which the kernel probes a peer, the time between probes, and their number. A
/// dead peer is noticed after a minute.
const IDLE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_secs(10);
const PROBES: u32 = 3;

/// Enables TCP keepalive on a connection. A failure is ignored, because the connection also works
/// without keepalive.
pub fn enable_tcp_keepalive(socket: impl AsFd) {
    let enable = || {
        sockopt::set_tcp_keepidle(&socket, IDLE)?;
        sockopt::set_tcp_keepintvl(&socket, INTERVAL)?;
        sockopt::set_tcp_keepcnt(&socket, PROBES)?;
        sockopt::set_socket_keepalive(&socket, true)
    };
    let _ = enable();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_peer_is_noticed_after_a_minute() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address");
        let socket = std::net::TcpStream::connect(address).expect("a connection");
        enable_tcp_keepalive(&socket);
        assert!(sockopt::socket_keepalive(&socket).expect("an option"));
        let idle = sockopt::tcp_keepidle(&socket).expect("an option");
        let interval = sockopt::tcp_keepintvl(&socket).expect("an option");
        let probes = sockopt::tcp_keepcnt(&socket).expect("an option");
        assert_eq!(idle + interval * probes, Duration::from_secs(60));
    }
}
