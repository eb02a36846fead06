//! The sockets of transparent mode that the agent connects itself.
//!
//! The rules do not redirect sockets with one of the two marks. So every socket that the agent
//! connects to an engine gets a mark. If the kernel refuses to mark the socket, connecting fails:
//! a connection without a mark would be redirected to the agent again and again.

use std::io;
use std::net::SocketAddr;

use ferrite_proto::mux::Route;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};

/// The mark of connections to engines of this host, from the addresses of other hosts. The packets
/// that the engine sends have the same mark, and a routing rule for the mark keeps them on this
/// host.
pub const DELIVERY_MARK: u32 = 0xfe1;
/// The mark of direct connections to other hosts.
pub const DIRECT_MARK: u32 = 0xfe2;

/// Connects to the host that a program asked for, from the program's address.
pub(super) async fn connect_directly(
    Route { destination, source }: Route,
) -> io::Result<TcpStream> {
    let socket = direct_socket()?;
    // Takes any port: the program's own port is in use by its connection to the agent.
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
