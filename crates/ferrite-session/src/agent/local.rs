//! Connections of local programs to the aliases of peers.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ferrite_fabric::LogLimit;
use ferrite_proto::mux::{OpenError, Route};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::Shared;
use super::descriptors::BusSource;
use super::links::link_to;
use super::marks::connect_directly;
use super::peer::Peer;
use super::socket::LocalSocket;
use super::stats::{Meter, add, index};

/// The number of links to try for a connection. A link may end just when it is used.
const ATTEMPTS: usize = 3;
/// How long a direct connection may take to be opened.
const DIRECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed `accept`, for example for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections to a port of a peer's alias, for ever.
pub(super) async fn accept(shared: Arc<Shared>, peer: Arc<Peer>, listener: TcpListener) {
    let Ok(destination) = listener.local_addr() else { return };
    loop {
        match listener.accept().await {
            Ok((socket, from)) => {
                let (shared_too, peer) = (Arc::clone(&shared), Arc::clone(&peer));
                // Programs may connect from any address of this host. The peer knows the host by
                // its alias.
                let source = SocketAddr::from((shared.admission.alias, from.port()));
                let route = Route { destination, source };
                if let Some(socket) = admit(&shared, LocalSocket::new(socket), from, destination) {
                    shared.spawn(carry(shared_too, peer, socket, route));
                }
            }
            Err(error) => pause_after(&error, destination).await,
        }
    }
}

/// Reports that no connection can be accepted, and waits for a moment.
pub(super) async fn pause_after(error: &io::Error, at: SocketAddr) {
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        tracing::warn!(%error, "cannot accept a connection to {at}{others}");
    }
    sleep(ACCEPT_PAUSE).await;
}

/// Returns a program's connection, with its descriptor. Refuses it if there are too few. `source`
/// is the program's address.
pub(super) fn admit(
    shared: &Shared,
    socket: LocalSocket,
    source: SocketAddr,
    destination: SocketAddr,
) -> Option<LocalSocket> {
    let taken = match (shared.ports.engine_of_bus(destination.port()), source, destination) {
        (Some(_), SocketAddr::V4(source), SocketAddr::V4(to)) => {
            let user = BusSource::User(shared.users.of(source, to));
            shared.descriptors.take_for_bus((user, destination.ip()))
        }
        _ => shared.descriptors.take(),
    };
    if taken.is_none() {
        static LINES: LogLimit = LogLimit::new();
        refuse_for_descriptors(shared, &LINES, "a connection", destination);
    }
    Some(socket.holding(taken?))
}

fn refuse_for_descriptors(shared: &Shared, lines: &LogLimit, what: &str, to: SocketAddr) {
    add(&shared.counters.no_descriptors, 1);
    if let Some(others) = lines.pass() {
        tracing::warn!(
            "refused {what} to {to}: connections have taken all descriptors that are not reserved \
             for links, the cluster bus and the admin port; raise the limit of open files \
             (LimitNOFILE){others}"
        );
    }
}

/// Carries a connection to a peer.
pub(super) async fn carry(
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    mut socket: LocalSocket,
    route: Route,
) {
    let destination = route.destination;
    let class = socket.class();
    for _ in 0..ATTEMPTS {
        let Some((id, handle)) = link_to(&shared, &peer).await else { break };
        let metered = socket.metered(Meter::begin(&peer.counters, class));
        match handle.open(class, route, metered).await {
            Ok(_) => return add(&peer.counters.opened[index(class)], 1),
            Err((_, error @ OpenError::TooManyStreams)) => {
                add(&shared.counters.beyond_limits, 1);
                return warn(&peer, destination, &error.to_string());
            }
            Err((None, _)) => return, // the program's connection was reset
            Err((Some(unused), error)) => {
                peer.stop_using(id);
                if error == OpenError::NamesUsedUp {
                    handle.go_away();
                }
                socket = unused.unmetered();
            }
        }
    }
    let why = peer.error().unwrap_or_else(|| "there is no link yet".into());
    if shared.config().direct {
        warn(&peer, destination, &format!("{why}; connecting directly by TCP"));
        match shared.is_transparent() {
            true => {
                let connecting = connect_directly(&shared.own_addresses, route);
                join_directly(&shared, socket, destination, connecting).await;
            }
            false => {
                // The engine on the peer's host sees the address of this host, not its alias.
                let connecting = async {
                    let ip = peer.ip().ok_or(io::ErrorKind::AddrNotAvailable)?;
                    Ok((TcpStream::connect((ip, destination.port())).await?, ()))
                };
                join_directly(&shared, socket, destination, connecting).await;
            }
        }
    } else {
        add(&shared.counters.without_link, 1);
        warn(&peer, destination, &why);
    }
}

fn warn(peer: &Peer, destination: SocketAddr, why: &str) {
    static LINES: LogLimit = LogLimit::new();
    if let Some(others) = LINES.pass() {
        tracing::warn!(
            "cannot carry a connection to {destination} over a link to {peer}: {why}{others}"
        );
    }
}

/// Joins a program's connection with a direct connection to the engine, which `connecting` opens.
/// What it also returns is dropped after the connection.
pub(super) async fn join_directly<T>(
    shared: &Shared,
    mut socket: LocalSocket,
    destination: SocketAddr,
    connecting: impl Future<Output = io::Result<(TcpStream, T)>>,
) {
    let taken = socket.taken().and_then(|first| shared.descriptors.take_for_direct(first));
    let Some(taken) = taken else {
        static LINES: LogLimit = LogLimit::new();
        return refuse_for_descriptors(shared, &LINES, "a direct connection", destination);
    };
    add(&shared.counters.direct, 1);
    if let Ok(Ok((engine, _kept))) = timeout(DIRECT_TIMEOUT, connecting).await {
        let mut engine = LocalSocket::new(engine).holding(taken);
        // After a failure, dropping both sockets resets them.
        let _ = copy_bidirectional(&mut socket, &mut engine).await;
    }
}
