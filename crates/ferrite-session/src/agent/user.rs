//! Which user of this host has opened a connection. The kernel tells it (`sock_diag`): it finds a
//! socket by its addresses, however many sockets there are, and requires no privilege.

use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// The type of the question and of its answer (`SOCK_DIAG_BY_FAMILY`).
const BY_FAMILY: u16 = 20;
/// A question (`NLM_F_REQUEST`).
const REQUEST: u16 = 1;
/// The number of the protocol TCP.
const TCP: u8 = 6;
/// The number of the address family IPv4.
const IPV4: u8 = 2;
/// The state of a connection that neither side has closed.
const ESTABLISHED: u8 = 1;
/// The sizes of the header of a message, of the question, and of the answer (`inet_diag_msg`).
const HEADER: usize = 16;
const QUESTION: usize = 56;
const ANSWER: usize = 72;

/// Asks the kernel who owns a socket.
#[derive(Debug)]
pub(super) struct Users {
    /// `None` if the kernel does not answer such questions.
    kernel: Option<OwnedFd>,
    sequence: AtomicU32,
}

impl Default for Users {
    fn default() -> Self {
        let kernel = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(netlink::SOCK_DIAG),
        );
        Self { kernel: kernel.ok(), sequence: AtomicU32::new(0) }
    }
}

impl Users {
    /// Returns the user whose program has this end of an open connection. Returns `None` if the
    /// kernel does not know, for example because the program has closed it already.
    pub(super) fn of(&self, local: SocketAddrV4, remote: SocketAddrV4) -> Option<u32> {
        let kernel = self.kernel.as_ref()?;
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        send(kernel, &question(local, remote, sequence), SendFlags::empty()).ok()?;
        // The kernel has answered when `send` returns.
        let mut answer = [0; HEADER + ANSWER];
        loop {
            let (bytes, _) = recv(kernel, &mut answer, RecvFlags::empty()).ok()?;
            // An answer that was not read, because of an error, may come first.
            if number(&answer, 8) == sequence {
                return user(&answer[..bytes]);
            }
        }
    }
}

fn question(local: SocketAddrV4, remote: SocketAddrV4, sequence: u32) -> [u8; HEADER + QUESTION] {
    let mut message = [0; HEADER + QUESTION];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &((HEADER + QUESTION) as u32).to_ne_bytes());
    put(4, &BY_FAMILY.to_ne_bytes());
    put(6, &REQUEST.to_ne_bytes());
    put(8, &sequence.to_ne_bytes());
    put(16, &[IPV4, TCP]);
    put(20, &u32::MAX.to_ne_bytes()); // all states
    put(24, &local.port().to_be_bytes());
    put(26, &remote.port().to_be_bytes());
    put(28, &local.ip().octets());
    put(44, &remote.ip().octets());
    put(64, &[u8::MAX; 8]); // any cookie
    message
}

/// Returns the user in an answer.
fn user(answer: &[u8]) -> Option<u32> {
    let is_whole = answer.len() == HEADER + ANSWER && answer[4..6] == BY_FAMILY.to_ne_bytes();
    (is_whole && answer[HEADER + 1] == ESTABLISHED).then(|| number(answer, HEADER + 64))
}

fn number(message: &[u8], at: usize) -> u32 {
    let bytes = message.get(at..).and_then(<[u8]>::first_chunk);
    bytes.copied().map_or(0, u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use super::*;

    fn ends(socket: &TcpStream) -> [SocketAddrV4; 2] {
        let ends = [socket.local_addr(), socket.peer_addr()];
        ends.map(|end| match end.expect("an address") {
            SocketAddr::V4(address) => address,
            SocketAddr::V6(_) => unreachable!("the listener is at an IPv4 address"),
        })
    }

    #[test]
    fn connection_belongs_to_the_user_who_has_opened_it() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let at = listener.local_addr().expect("an address");
        let users = Users::default();
        let own = rustix::process::geteuid().as_raw();
        for _ in 0..3 {
            let program = TcpStream::connect(at).expect("a connection");
            let [local, remote] = ends(&program);
            assert_eq!(users.of(local, remote), Some(own));
            drop(program);
            assert_eq!(users.of(local, remote), None, "closed");
        }
        let nobody = SocketAddrV4::new([127, 0, 0, 1].into(), 1);
        assert_eq!(users.of(nobody, nobody), None);
    }
}
