//! The sockets of transparent mode that the agent connects itself.
//!
//! The rules redirect no socket with one of the two marks. So every socket that the agent connects
//! to an engine has one. If the kernel refuses it the mark, the connection fails: without a mark,
//! it would come back to the agent, without end.

use std::io;
use std::net::SocketAddr;

use ferrite_proto::mux::Route;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};

/// The mark of connections to engines of this host, from the addresses of other hosts. The engine's
/// packets have it, too, and are routed back to this host by it.
pub const DELIVERY_MARK: u32 = 0xfe1;
/// The mark of direct connections to other hosts.
pub const DIRECT_MARK: u32 = 0xfe2;

/// Connects to the host that a program asked for, from the program's address.
pub(super) async fn connect_directly(
    Route { destination, source }: Route,
) -> io::Result<TcpStream> {
    let socket = direct_socket()?;
    // The program's own port is in use: by the connection of the program to the agent.
    socket.bind(SocketAddr::new(source.ip(), 0))?;
    socket.connect(destination).await
}

/// Returns a socket for a direct connection.
pub(super) fn direct_socket() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    SockRef::from(&socket).set_mark(DIRECT_MARK)?;
    Ok(socket)
}

/// Returns a socket that can have the address of another host.
pub(super) fn delivery_socket() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    SockRef::from(&socket).set_mark(DELIVERY_MARK)?;
    SockRef::from(&socket).set_ip_transparent_v4(true)?;
    Ok(socket)
}
