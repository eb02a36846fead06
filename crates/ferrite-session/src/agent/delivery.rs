//! Streams of peers: checks them, and connects them to the engines of this host.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_fabric::LogLimit;
use ferrite_proto::mux::{Cause, Class, Route};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use super::Shared;
use super::descriptors::BusSource;
use super::marks;
use super::peer::Peer;
use super::socket::LocalSocket;
use super::stats::{Meter, Refused, add, index};
use crate::engine::EngineAccess;
use crate::mux::IncomingStream;

/// How long a connection to an engine may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects a stream of a peer to its destination, or refuses it.
pub(super) async fn deliver(
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    stream: IncomingStream<LocalSocket>,
) {
    let route = stream.route();
    let class = class_of(&shared, &route, stream.class());
    match connect(&shared, &peer, &route, class).await {
        Ok(socket) => {
            add(&peer.counters.accepted[index(class)], 1);
            stream.accept(socket);
        }
        Err((refused, why)) => {
            shared.counters.count_refused(refused);
            let cause = match refused {
                Refused::Forbidden(_) | Refused::ProtectedMode => Cause::FORBIDDEN,
                Refused::Engine => Cause::REFUSED,
                Refused::Unreachable | Refused::Descriptors => Cause::UNREACHABLE,
            };
            stream.refuse(cause);
            warn(&peer, &route, refused, &why);
        }
    }
}

fn warn(peer: &Peer, Route { destination, source }: &Route, refused: Refused, why: &str) {
    // Several limits, so that many lines about stopped engines, which are common, do not suppress
    // the lines about forbidden streams.
    static FORBIDDEN: LogLimit = LogLimit::new();
    static UNAVAILABLE: LogLimit = LogLimit::new();
    static DESCRIPTORS: LogLimit = LogLimit::new();
    let limit = match refused {
        Refused::Descriptors => &DESCRIPTORS,
        Refused::Forbidden(_) | Refused::ProtectedMode => &FORBIDDEN,
        Refused::Engine | Refused::Unreachable => &UNAVAILABLE,
    };
    if let Some(others) = limit.pass() {
        tracing::warn!(
            "refused a connection of {peer} from {source} to {destination}: {why}{others}"
        );
    }
}

/// Returns the class of a stream of a peer. Only streams to the port of a bus are of the class bus,
/// because a peer may give any class to any stream. The peer leaves that class for connections
/// beyond the share of a user of its host.
fn class_of(shared: &Shared, Route { destination, .. }: &Route, given: Class) -> Class {
    match shared.admission.deliver.engine_of_bus(destination.port()) {
        Some(_) if given == Class::Bus => Class::Bus,
        _ => Class::Interactive,
    }
}

async fn connect(
    shared: &Shared,
    peer: &Peer,
    route: &Route,
    class: Class,
) -> Result<LocalSocket, (Refused, String)> {
    let checked = shared.admission.check(peer.alias, route);
    checked.map_err(|forbidden| (Refused::Forbidden(forbidden), forbidden.to_string()))?;
    check_password(shared, route.destination.port()).await?;
    let taken = match class {
        Class::Bus => {
            let source = BusSource::Peer(peer.alias);
            shared.descriptors.take_for_bus((source, route.destination.ip()))
        }
        _ => shared.descriptors.take(),
    };
    let taken = taken.ok_or_else(|| {
        let why = "connections have taken all descriptors that are not reserved; raise the limit \
                   of open files (LimitNOFILE)";
        (Refused::Descriptors, why.to_owned())
    })?;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::ConnectionRefused => (Refused::Engine, error.to_string()),
        _ => (Refused::Unreachable, error.to_string()),
    };
    let connecting = connect_from(shared.is_transparent(), route.source, route.destination);
    let connecting = timeout(CONNECT_TIMEOUT, connecting);
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    let (socket, is_port_changed) = connecting.await.unwrap_or_else(late).map_err(failed)?;
    shared.delivered_port.store(route.destination.port(), Ordering::Relaxed);
    if is_port_changed {
        add(&shared.counters.ports_changed, 1);
    }
    Ok(LocalSocket::new(socket).holding(taken).metered(Meter::begin(&peer.counters, class)))
}

/// Applies protected mode to a port: refuses streams to an engine that requires no password.
async fn check_password(shared: &Shared, port: u16) -> Result<(), (Refused, String)> {
    // In transparent mode the engine sees the program's address, so its own protected mode works.
    if !shared.config().protected_mode || shared.is_transparent() {
        return Ok(());
    }
    let alias = shared.admission.alias;
    let open = |port| {
        let why = format!(
            "the engine at {alias}:{port} requires no password, and protected mode is on; set \
             requirepass and masterauth in the engines, or start the agent with --protected-mode no"
        );
        Err((Refused::ProtectedMode, why))
    };
    let refused =
        |reply: &str| Err((Refused::Engine, format!("the engine replies {}", reply.trim_end())));
    if let Some(engine) = shared.admission.deliver.engine_of_bus(port) {
        // A cluster bus has no passwords and does not answer PING. If something answers at this
        // port, it is an engine.
        let access = &shared.access;
        let answers = tokio::join!(access.ask(alias, engine), access.ask_bus(alias, port));
        return match answers {
            (Ok(EngineAccess::Open), _) => open(engine),
            (_, Ok(EngineAccess::Open)) => open(port),
            (_, Ok(EngineAccess::Refused(reply))) => refused(&reply),
            // If the engine gives no definite answer now, its last one counts. The bus stays open
            // to peers unless that answer was `Open`: without the bus, the other nodes would regard
            // this node as dead.
            (Ok(EngineAccess::Refused(_)) | Err(_), _) if access.was_open(engine) => open(engine),
            _ => Ok(()),
        };
    }
    match shared.access.ask(alias, port).await {
        Ok(EngineAccess::NeedsPassword) => Ok(()),
        Ok(EngineAccess::Open) => open(port),
        Ok(EngineAccess::Refused(reply)) => refused(&reply),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Err((Refused::Engine, error.to_string()))
        }
        Err(error) => {
            let why = format!("cannot find out whether the engine requires a password: {error}");
            Err((Refused::Unreachable, why))
        }
    }
}

/// Connects from the program's own address and port. Uses another port if the program's port is in
/// use on this host or needs a privilege. Returns whether the port is another one.
async fn connect_from(
    is_transparent: bool,
    source: SocketAddr,
    destination: SocketAddr,
) -> io::Result<(TcpStream, bool)> {
    match connect_bound(is_transparent, source, destination).await {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::AddrInUse
                    | io::ErrorKind::AddrNotAvailable
                    | io::ErrorKind::PermissionDenied // below 1024
            ) =>
        {
            let any_port = SocketAddr::new(source.ip(), 0);
            Ok((connect_bound(is_transparent, any_port, destination).await?, true))
        }
        connected => Ok((connected?, false)),
    }
}

async fn connect_bound(
    is_transparent: bool,
    source: SocketAddr,
    destination: SocketAddr,
) -> io::Result<TcpStream> {
    let socket = match is_transparent {
        true => marks::delivery_socket()?,
        false => TcpSocket::new_v4()?,
    };
    // With this option, binding succeeds if other connections use the port or have used it, and
    // fails only if a program listens there.
    socket.set_reuseaddr(true)?;
    socket.bind(source)?;
    socket.connect(destination).await
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn listener(at: &str) -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind(at).expect("listen");
        let address = listener.local_addr().expect("an address");
        (listener, address)
    }

    #[tokio::test]
    async fn engine_sees_the_programs_own_address() {
        let (engine, destination) = listener("127.1.0.1:0");
        let (free, source) = listener("127.1.0.2:0");
        drop(free);
        let (socket, is_changed) = connect_from(false, source, destination).await.expect("connect");
        assert_eq!((socket.local_addr().expect("an address"), is_changed), (source, false));
        assert_eq!(engine.accept().expect("accept").1, source);
    }

    #[tokio::test]
    async fn another_port_of_the_same_address_is_used_if_the_port_is_taken() {
        let (_engine, destination) = listener("127.1.0.1:0");
        let (_taken, source) = listener("127.1.0.2:0");
        let (socket, is_changed) = connect_from(false, source, destination).await.expect("connect");
        let local = socket.local_addr().expect("an address");
        assert!(is_changed && local.ip() == source.ip() && local.port() != source.port());
        // A second connection from the same address and port to the same engine gets another port,
        // too.
        let (free, source) = listener("127.1.0.2:0");
        drop(free);
        let (_first, is_changed) = connect_from(false, source, destination).await.expect("connect");
        assert!(!is_changed);
        let (_second, is_changed) =
            connect_from(false, source, destination).await.expect("connect");
        assert!(is_changed);
    }

    #[tokio::test]
    async fn refusal_of_the_engine_is_passed_on() {
        let (closed, destination) = listener("127.1.0.1:0");
        drop(closed);
        let source = "127.1.0.2:0".parse().expect("an address");
        let error = connect_from(false, source, destination).await.expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
