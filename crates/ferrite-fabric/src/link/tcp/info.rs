//! What the kernel knows about a TCP connection.

#![expect(unsafe_code, reason = "getsockopt with TCP_INFO, which rustix does not have")]

use std::mem::size_of;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use super::TcpPath;

impl TcpPath {
    /// Returns how long ago the peer's kernel has last acknowledged anything. `None` if this is
    /// unknown.
    pub(crate) fn since_acknowledged(&self) -> Option<Duration> {
        since_acknowledged(&self.socket)
    }
}

fn since_acknowledged(socket: &OwnedFd) -> Option<Duration> {
    // SAFETY: the structure consists of integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut bytes = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).ok()?;
    // SAFETY: the descriptor is open. The kernel writes at most `bytes` bytes, which is the size of
    // the structure, and any bytes are a value of its integers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut bytes,
        )
    };
    (result == 0).then(|| Duration::from_millis(info.tcpi_last_ack_recv.into()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "needs sockets")]
    fn time_since_the_last_acknowledgement_grows_until_the_next_one() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address");
        let mut sender = TcpStream::connect(address).expect("a connection");
        let (mut receiver, _) = listener.accept().expect("a connection");
        let socket = OwnedFd::from(sender.try_clone().expect("a descriptor"));
        let since = || since_acknowledged(&socket).expect("known");
        let begun = Instant::now();
        while since() < Duration::from_millis(300) {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(10));
        }
        sender.write_all(b"x").expect("sent");
        receiver.read_exact(&mut [0]).expect("received");
        // The kernel acknowledges within 40 ms, unless the host is busy.
        let begun = Instant::now();
        while since() >= Duration::from_millis(300) {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
    }
}
