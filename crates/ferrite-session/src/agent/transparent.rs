//! Transparent mode: connections that the kernel redirects to the agent, deliveries from the
//! addresses of other hosts, and the checks that both work.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_config::peer::Network;
use ferrite_fabric::LogLimit;
use ferrite_proto::mux::Route;
use rustix::io::Errno;
use rustix::net::sockopt::ip_original_dst;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::local::{admit, carry, join_directly, pause_after};
use super::marks::{DELIVERY_MARK, DIRECT_MARK, connect_directly, delivery_socket, direct_socket};
use super::socket::LocalSocket;
use super::stats::add;
use super::{Agent, AgentHandle, LocalListeners, Shared, listen_at};
use crate::mux::MuxSocket as _;

/// How long a check may take. It is a connection within this host.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// How many more ports a check of deliveries tries after a failure.
const MORE_PORTS: usize = 16;

/// The ports that the listener for redirected connections prefers. Only privileged processes can
/// listen there. When an agent was killed, the rules stay for a moment. At another port, any user
/// of the host could then accept the connections of programs, and receive their passwords.
const PRIVILEGED_PORTS: RangeInclusive<u16> = 1002..=1009;

/// Listens for redirected connections.
pub(super) fn listen() -> Result<TcpListener, (SocketAddr, io::Error)> {
    let mut ports = PRIVILEGED_PORTS.chain([0]);
    loop {
        let port = ports.next().unwrap_or(0);
        match listen_at((Ipv4Addr::LOCALHOST, port).into()) {
            Err(_) if port != 0 => {}
            listener => return listener,
        }
    }
}

/// Accepts redirected connections, for ever, after those that were accepted `early`.
pub(super) async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    early: Vec<(TcpStream, SocketAddr)>,
) {
    let Ok(own) = listener.local_addr() else { return };
    for (socket, source) in early {
        carry_redirected(&shared, own, socket, source);
    }
    loop {
        match listener.accept().await {
            Ok((socket, source)) => carry_redirected(&shared, own, socket, source),
            Err(error) => pause_after(&error, own).await,
        }
    }
}

fn carry_redirected(shared: &Arc<Shared>, own: SocketAddr, socket: TcpStream, source: SocketAddr) {
    // If nothing carries the connection, dropping the `LocalSocket` resets it.
    let destination = original_destination(&socket);
    let socket = LocalSocket::new(socket);
    if shared.own_addresses.contains(source) {
        return refuse_returned(shared, source, destination);
    }
    // It may have been a direct connection of this agent that came back, and is closed already.
    if socket.failure().is_some() {
        return;
    }
    match destination.filter(|destination| *destination != own) {
        Some(destination) => {
            if let Some(socket) = admit(shared, socket, source, destination) {
                begin(shared, socket, Route { destination, source });
            }
        }
        None => refuse_own(shared, source),
    }
}

/// Returns where a program wanted to connect to.
fn original_destination(socket: &TcpStream) -> Option<SocketAddr> {
    ip_original_dst(socket).ok().map(SocketAddr::V4)
}

fn begin(shared: &Arc<Shared>, socket: LocalSocket, route: Route) {
    let shared_too = Arc::clone(shared);
    // A peer accepts only streams whose source is the address that it knows this host by.
    let is_own = route.source.ip() == shared.admission.alias;
    let peer = if is_own { shared.peers.at(route.destination.ip()) } else { None };
    match peer {
        Some(peer) => shared.spawn(carry(shared_too, peer, socket, route)),
        None if shared.config().direct => shared.spawn(async move {
            let connecting = connect_directly(&shared_too.own_addresses, route);
            join_directly(&shared_too, socket, route.destination, connecting).await;
        }),
        None => add(&shared.counters.without_link, 1),
    }
}

fn refuse_own(shared: &Shared, source: SocketAddr) {
    add(&shared.counters.looped, 1);
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        tracing::warn!(
            "refused a connection from {source} to the agent's own listener, which accepts only \
             redirected connections{others}"
        );
    }
}

fn refuse_returned(shared: &Shared, source: SocketAddr, destination: Option<SocketAddr>) {
    add(&shared.counters.looped, 1);
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        let to = destination.map_or("another host".to_owned(), |address| address.to_string());
        tracing::error!(
            "refused the agent's own direct connection from {source} to {to}, which the kernel \
             redirected to the agent: a firewall rule of this host removes the mark \
             {DIRECT_MARK:#x} (for example `meta mark set ct mark`); let the rule keep it{others}"
        );
    }
}

impl LocalListeners {
    /// Returns the port to which connections are to be redirected, in transparent mode.
    #[must_use]
    pub fn redirect_port(&self) -> Option<u16> {
        let listener = self.redirected.as_ref()?;
        listener.local_addr().ok().map(|address| address.port())
    }
}

impl Agent {
    /// Checks that this process may mark sockets, and give them the addresses of other hosts.
    ///
    /// # Errors
    /// Returns what the process may not do.
    pub fn check_privileges(&self) -> Result<(), String> {
        let sockets = direct_socket().and_then(|_| delivery_socket());
        sockets.map(drop).map_err(|error| format!("cannot mark sockets: {error}"))
    }

    /// Checks that the rules redirect a connection of a program, but no connection that has a mark.
    /// The connections of the check do not leave this host. Programs may connect to peers
    /// meanwhile: [`Agent::serve`] carries their connections.
    ///
    /// # Errors
    /// Returns what the rules do instead.
    pub async fn check_redirection(&self, listeners: &mut LocalListeners) -> Result<(), String> {
        let LocalListeners { redirected: Some(listener), early, .. } = listeners else {
            return Ok(());
        };
        let (Some(ip), Some(port)) =
            (self.shared.peers.any_address(), self.shared.peers.any_redirected_port())
        else {
            return Ok(());
        };
        let failed = |error: io::Error| format!("cannot check the redirecting rules: {error}");
        let destination = SocketAddrV4::new(ip, port);
        // Opens the connections with a mark first. If the rules redirect one of them, `accept`
        // returns it before the connection without a mark.
        let mut marked = Vec::new();
        for mark in [DELIVERY_MARK, DIRECT_MARK] {
            marked.push(dial_on_loopback(Some(mark), destination).map_err(failed)?);
        }
        let sources: Result<Vec<_>, _> = marked.iter().map(source_of).collect();
        let of_marked = sources.map_err(failed)?;
        let program = dial_on_loopback(None, destination).map_err(failed)?;
        let expected = source_of(&program).map_err(failed)?;
        let deadline = Instant::now() + CHECK_TIMEOUT;
        let socket = loop {
            let late = |_| Err(io::ErrorKind::TimedOut.into());
            let accepted = timeout_at(deadline, listener.accept()).await.unwrap_or_else(late);
            let (socket, source) = accepted.map_err(|error| {
                format!("the rules do not redirect connections to {destination}: {error}")
            })?;
            if source == expected {
                break socket;
            }
            if of_marked.contains(&source) {
                return Err("the rules redirect the agent's own connections".into());
            }
            early.push((socket, source));
        };
        match original_destination(&socket) {
            Some(original) if original == SocketAddr::V4(destination) => Ok(()),
            original => {
                Err(format!("a connection to {destination} arrives as one to {original:?}"))
            }
        }
    }
}

impl AgentHandle {
    /// Returns an address that a host of the group may have, in transparent mode.
    #[must_use]
    pub fn any_peer(&self) -> Option<Ipv4Addr> {
        self.shared.peers.any_address()
    }

    /// Sets the addresses of this host, in transparent mode. Peers that have one of them count as
    /// this host.
    pub fn set_own_addresses(&self, own: &[Network]) {
        self.shared.peers.set_local(own);
    }

    /// Checks that an engine of this host can be reached from the address of another host. The
    /// engine's answers, also a refusal, must stay on this host.
    ///
    /// The check connects to a port that peers may connect to, because a firewall may admit no
    /// others: the one at which a connection was delivered last. If that fails, it tries more
    /// ports, because the firewall may admit only those of engines that exist.
    pub async fn check_delivery(&self) -> Delivery {
        let shared = &self.shared;
        let (own, ports) = (shared.admission.alias, shared.admission.ports_for_checks());
        let last = shared.delivered_port.load(Ordering::Relaxed);
        let first = ports.iter().copied().find(|port| *port == last).or(ports.first().copied());
        let (Some(foreign), Some(first)) = (shared.peers.any_address(), first) else {
            return Delivery::Works;
        };
        let result = deliver_to(foreign, SocketAddrV4::new(own, first)).await;
        let Delivery::Fails(why) = result else { return result };
        let mut checks = JoinSet::new();
        for port in ports.into_iter().filter(|port| *port != first).take(MORE_PORTS) {
            let at = SocketAddrV4::new(own, port);
            checks.spawn(async move { (port, deliver_to(foreign, at).await) });
        }
        while let Some(checked) = checks.join_next().await {
            match checked {
                Ok((port, Delivery::Works)) => {
                    shared.delivered_port.store(port, Ordering::Relaxed);
                    return Delivery::Works;
                }
                Ok((_, unknown @ Delivery::Unknown(_))) => return unknown,
                _ => {}
            }
        }
        Delivery::Fails(why)
    }
}

/// Connects from the address of another host to this one.
async fn deliver_to(foreign: Ipv4Addr, to: SocketAddrV4) -> Delivery {
    let connecting = async {
        let socket = delivery_socket()?;
        SockRef::from(&socket).set_linger(Some(Duration::ZERO))?; // leaves nothing behind
        socket.bind((foreign, 0).into())?;
        socket.connect(to.into()).await
    };
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    let answer = timeout(CHECK_TIMEOUT, connecting).await.unwrap_or_else(late);
    Delivery::of(answer.map(drop), || format!("from {foreign} to {to} on this host"))
}

/// What a check of deliveries has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivery {
    /// Connections of other hosts can be delivered.
    Works,
    /// They cannot be delivered, for this reason.
    Fails(String),
    /// The check was not possible for now, for this reason, for example for lack of descriptors.
    Unknown(String),
}

impl Delivery {
    fn of(answer: io::Result<()>, what: impl FnOnce() -> String) -> Self {
        let error = match answer {
            Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => error,
            _ => return Self::Works, // a refusal has come back, too
        };
        let why = format!("{}: {error}", what());
        if is_shortage(&error) { Self::Unknown(why) } else { Self::Fails(why) }
    }
}

/// Returns whether an error says that this process or host lacks descriptors, ports or memory.
fn is_shortage(error: &io::Error) -> bool {
    const SHORTAGES: [Errno; 6] = [
        Errno::ADDRINUSE,
        Errno::ADDRNOTAVAIL,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOBUFS,
        Errno::NOMEM,
    ];
    SHORTAGES.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Begins a connection that cannot leave this host.
fn dial_on_loopback(mark: Option<u32>, to: SocketAddrV4) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    if let Some(mark) = mark {
        socket.set_mark(mark)?;
    }
    socket.bind_device(Some(b"lo"))?;
    // Answers to an address of another interface count as packets of that interface, and this
    // socket would not get them.
    socket.bind(&SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0).into())?;
    socket.set_nonblocking(true)?;
    socket.set_linger(Some(Duration::ZERO))?;
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket),
    }
}

fn source_of(socket: &socket2::Socket) -> io::Result<SocketAddr> {
    let address = socket.local_addr()?.as_socket();
    address.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_and_refusal_show_that_connections_are_delivered() {
        let of = |answer: io::Result<()>| Delivery::of(answer, || "from A to B".into());
        assert_eq!(of(Ok(())), Delivery::Works);
        assert_eq!(of(Err(Errno::CONNREFUSED.into())), Delivery::Works);
        for error in [Errno::HOSTUNREACH, Errno::TIMEDOUT, Errno::PERM, Errno::NETUNREACH] {
            let why = format!("from A to B: {}", io::Error::from(error));
            assert_eq!(of(Err(error.into())), Delivery::Fails(why));
        }
        let late = of(Err(io::ErrorKind::TimedOut.into()));
        assert!(matches!(late, Delivery::Fails(_)), "{late:?}");
    }

    #[test]
    fn shortage_shows_nothing_about_deliveries() {
        for error in [
            Errno::ADDRINUSE,
            Errno::ADDRNOTAVAIL,
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOBUFS,
            Errno::NOMEM,
        ] {
            let shown = Delivery::of(Err(error.into()), || "from A to B".into());
            assert!(matches!(shown, Delivery::Unknown(_)), "{shown:?}");
        }
    }
}
