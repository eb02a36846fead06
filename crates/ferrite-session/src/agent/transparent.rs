//! Transparent mode: connections that the kernel redirects to the agent, deliveries from the
//! addresses of other hosts, and the checks that both work.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::LogLimit;
use ferrite_proto::mux::Route;
use rustix::net::sockopt::ip_original_dst;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::local::{carry, join_directly, pause_after};
use super::marks::{DELIVERY_MARK, DIRECT_MARK, connect_directly, delivery_socket, direct_socket};
use super::socket::LocalSocket;
use super::stats::add;
use super::{Agent, LocalListeners, Shared};

/// How long a check may take. It is a connection within this host.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Accepts redirected connections, for ever.
pub(super) async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    let Ok(own) = listener.local_addr() else { return };
    loop {
        match listener.accept().await {
            Ok((socket, source)) => {
                // If nothing carries the connection, dropping the `LocalSocket` resets it.
                let destination = original_destination(&socket);
                let socket = LocalSocket::new(socket);
                match destination.filter(|destination| *destination != own) {
                    Some(destination) => begin(&shared, socket, Route { destination, source }),
                    None => refuse_own(&shared, source),
                }
            }
            Err(error) => pause_after(&error, own).await,
        }
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
            join_directly(&shared_too, socket, connect_directly(route)).await;
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

impl LocalListeners {
    /// Returns the port to which connections are to be redirected, in transparent mode.
    #[must_use]
    pub fn redirect_port(&self) -> Option<u16> {
        let listener = self.redirected.as_ref()?;
        listener.local_addr().ok().map(|address| address.port())
    }
}

impl Agent {
    /// Returns an address that a host of the group may have, in transparent mode.
    #[must_use]
    pub fn any_peer(&self) -> Option<Ipv4Addr> {
        self.shared.peers.any_address()
    }

    /// Checks that this process may mark sockets, and give them the addresses of other hosts.
    ///
    /// # Errors
    /// Returns what the process may not do.
    pub fn check_privileges(&self) -> Result<(), String> {
        let sockets = direct_socket().and_then(|_| delivery_socket());
        sockets.map(drop).map_err(|error| format!("cannot mark sockets: {error}"))
    }

    /// Checks that an engine of this host can be reached from the address of another host. The
    /// engine's answers, also a refusal, must stay on this host.
    ///
    /// # Errors
    /// Returns what failed.
    pub async fn check_delivery(&self) -> Result<(), String> {
        let (own, foreign) = (self.shared.admission.alias, self.shared.peers.any_address());
        let Some(foreign) = foreign else { return Ok(()) };
        let connect = async |to: SocketAddr| {
            let socket = delivery_socket()?;
            socket.bind((foreign, 0).into())?;
            let late = |_| Err(io::ErrorKind::TimedOut.into());
            timeout(CHECK_TIMEOUT, socket.connect(to)).await.unwrap_or_else(late)
        };
        let failed = |error: io::Error| format!("from {foreign} to {own} on this host: {error}");
        let engine = TcpListener::bind((own, 0)).await.map_err(failed)?;
        let address = engine.local_addr().map_err(failed)?;
        connect(address).await.map_err(failed)?;
        drop(engine);
        match connect(address).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Err(error) => Err(format!(
                "from {foreign} to {own} on this host: the refusal of a closed port does not \
                 arrive: {error}"
            )),
            Ok(_) => Ok(()), // another program listens there now
        }
    }

    /// Checks that the rules redirect a connection of a program, but no connection that has a mark.
    /// The connections of the check do not leave this host.
    ///
    /// # Errors
    /// Returns what the rules do instead.
    pub async fn check_redirection(&self, listeners: &LocalListeners) -> Result<(), String> {
        let Some(listener) = &listeners.redirected else { return Ok(()) };
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
        let program = dial_on_loopback(None, destination).map_err(failed)?;
        let expected = local_port(&program).map_err(failed)?;
        let late = |_| Err(io::ErrorKind::TimedOut.into());
        let accepted = timeout(CHECK_TIMEOUT, listener.accept()).await.unwrap_or_else(late);
        let (socket, source) = accepted.map_err(|error| {
            format!("the rules do not redirect connections to {destination}: {error}")
        })?;
        if source.port() != expected {
            return Err("the rules redirect the agent's own connections".into());
        }
        match original_destination(&socket) {
            Some(original) if original == SocketAddr::V4(destination) => Ok(()),
            original => {
                Err(format!("a connection to {destination} arrives as one to {original:?}"))
            }
        }
    }
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
        Err(error)
            if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) =>
        {
            Err(error)
        }
        _ => Ok(socket),
    }
}

fn local_port(socket: &socket2::Socket) -> io::Result<u16> {
    let address = socket.local_addr()?.as_socket_ipv4();
    Ok(address.unwrap_or(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0)).port())
}
