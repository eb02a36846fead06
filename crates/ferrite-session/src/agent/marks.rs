//! The sockets of transparent mode that the agent connects itself.
//!
//! The rules do not redirect sockets with one of the two marks. So every socket that the agent
//! connects to an engine gets a mark. If the kernel refuses to mark the socket, connecting fails:
//! a connection without a mark would be redirected to the agent again and again.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_proto::mux::Route;
use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};

/// The mark of connections to engines of this host, from the addresses of other hosts. The packets
/// that the engine sends have the same mark, and a routing rule for the mark keeps them on this
/// host.
pub const DELIVERY_MARK: u32 = 0x1062;
/// The mark of direct connections to other hosts.
pub const DIRECT_MARK: u32 = 0x1064;
/// The bits of a mark that are compared with the two marks. Programs that mark packets of all
/// connections use other bits, and may set them in the packets of this agent:
///
/// | bits | program |
/// |---|---|
/// | 0 | Antrea |
/// | 7 (0x80) | AWS VPC CNI; Cilium |
/// | 8-11 (0xf00) | Cilium: 0 means that the other bits are no identity of Cilium |
/// | 13 (0x2000) | the CNI plugin portmap |
/// | 14, 15 (0xc000) | kube-proxy |
/// | 16-31 | Calico; Cilium, Weave Net and Tailscale use some of them |
pub const MARK_BITS: u32 = 0x107e;
const _: () = assert!(DELIVERY_MARK & !MARK_BITS == 0 && DIRECT_MARK & !MARK_BITS == 0);

/// The local addresses of this agent's direct connections.
///
/// A firewall of the host may remove the mark of such a connection. The kernel then redirects it to
/// this agent, which must refuse it, or it would connect again and again. No other socket has the
/// address meanwhile, because the agent binds it without sharing it.
#[derive(Debug, Default)]
pub(super) struct OwnAddresses(Mutex<HashSet<SocketAddr>>);

/// An address in [`OwnAddresses`], until this is dropped.
#[derive(Debug)]
pub(super) struct OwnAddress<'a> {
    all: &'a OwnAddresses,
    address: SocketAddr,
}

impl OwnAddresses {
    pub(super) fn contains(&self, address: SocketAddr) -> bool {
        self.lock().contains(&address)
    }

    fn add(&self, address: SocketAddr) -> OwnAddress<'_> {
        self.lock().insert(address);
        OwnAddress { all: self, address }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<SocketAddr>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OwnAddress<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.address);
    }
}

/// Connects to the host that a program asked for, from the program's address. The caller must keep
/// the [`OwnAddress`] for longer than the connection.
pub(super) async fn connect_directly(
    own: &OwnAddresses,
    Route { destination, source }: Route,
) -> io::Result<(TcpStream, OwnAddress<'_>)> {
    let socket = direct_socket()?;
    // Takes any port: the program's own port is in use by its connection to the agent.
    socket.bind(SocketAddr::new(source.ip(), 0))?;
    // The agent may accept the connection as soon as it is opened, so its address is noted before.
    let registered = own.add(socket.local_addr()?);
    Ok((socket.connect(destination).await?, registered))
}

/// Returns a socket for a direct connection.
pub(super) fn direct_socket() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    SockRef::from(&socket).set_mark(DIRECT_MARK)?;
    // If the agent stops waiting for the connection, it is reset, also for a listener that has not
    // accepted it yet.
    SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
    Ok(socket)
}

/// Returns a socket that can have the address of another host.
pub(super) fn delivery_socket() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    SockRef::from(&socket).set_mark(DELIVERY_MARK)?;
    SockRef::from(&socket).set_ip_transparent_v4(true)?;
    Ok(socket)
}
