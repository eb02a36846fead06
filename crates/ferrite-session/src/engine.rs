//! Connections to the engine: any server that speaks RESP on a Unix or TCP socket.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};

use ferrite_fabric::descriptors::lift;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream, lookup_host};

use crate::tcp_keepalive::enable_tcp_keepalive;

/// The address where an engine listens: `unix:/run/redis.sock`, an absolute path, `host:port` or
/// `tcp:host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineAddress {
    /// The path of a Unix socket.
    Unix(PathBuf),
    /// A TCP address as `host:port`.
    Tcp(String),
}

impl FromStr for EngineAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) =
            text.strip_prefix("unix:").or_else(|| text.starts_with('/').then_some(text))
        {
            return if path.is_empty() {
                Err("expected a path after unix:".into())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        let address = text.strip_prefix("tcp:").unwrap_or(text);
        match address.rsplit_once(':') {
            Some((host, port))
                if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) =>
            {
                Ok(Self::Tcp(address.into()))
            }
            _ => Err(format!("{text}: expected an absolute path, unix:PATH or HOST:PORT")),
        }
    }
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

/// The largest number of bytes in a line of the reply to [`probe_access`]. The error of an engine
/// in protected mode has about 1,000 bytes.
const REPLY_MAX: usize = 4096;
/// The first byte that a TLS server sends if the client does not use TLS.
const TLS_ALERT: u8 = 0x15;
const CLOSED: &str = "the engine closed the connection without a reply; if its port expects TLS, \
                      use its Unix socket or a port without TLS";

/// Whether an engine accepts commands without a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineAccess {
    /// The engine accepts commands without a login. It may deny some of them (`-NOPERM`).
    Open,
    /// The engine asks for a login.
    NeedsPassword,
    /// The engine rejected the command for another reason: it is at `maxclients`, for example.
    /// Contains the engine's RESP error line with its line end.
    Refused(String),
}

/// A connection to an engine. Dropping it ends the connection, even if a forked child of the
/// process (an engine that saves in the background) still has the descriptor open.
#[derive(Debug)]
pub enum EngineSocket {
    /// A connection over a Unix socket.
    Unix(UnixStream),
    /// A connection over TCP.
    Tcp(TcpStream),
}

impl Drop for EngineSocket {
    fn drop(&mut self) {
        // Closing is not enough: a forked child's descriptor would keep the connection open. A
        // client that is blocked in BLPOP would then pop an element that nobody receives.
        let _ = match self {
            Self::Unix(socket) => shutdown(socket, Shutdown::Both),
            Self::Tcp(socket) => shutdown(socket, Shutdown::Both),
        };
    }
}

impl EngineSocket {
    /// Connects to an engine.
    ///
    /// # Errors
    /// Returns the system's error if no socket can be opened, the name cannot be resolved or the
    /// connection fails. If no address of a name accepts the connection, this is the error of the
    /// last one.
    pub async fn connect(address: &EngineAddress) -> io::Result<Self> {
        match address {
            EngineAddress::Unix(path) => {
                let socket = open(AddressFamily::UNIX)?;
                connect(&socket, &SocketAddrUnix::new(path)?)?; // never EINPROGRESS on Unix sockets
                UnixStream::from_std(socket.into()).map(Self::Unix)
            }
            EngineAddress::Tcp(address) => {
                let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
                // The system resolves an IPv6 address with a scope (`fe80::1%eth0`) only without
                // brackets.
                let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
                let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
                let found: Vec<_> = match (host, port.parse::<u16>()) {
                    (Some(host), Ok(port)) => lookup_host((host, port)).await?.collect(),
                    _ => lookup_host(address).await?.collect(),
                };
                for address in found {
                    let family =
                        if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                    let socket = TcpSocket::from_std_stream(open(family)?.into());
                    match socket.connect(address).await {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            enable_tcp_keepalive(&stream);
                            return Ok(Self::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }
}

/// Finds out whether a server accepts commands without a password, by sending PING (or ECHO, if
/// PING is unknown). Must be called before any command is sent on the connection.
///
/// # Errors
/// Returns an error if the connection fails, or if the server does not speak RESP.
pub async fn probe_access<S>(server: &mut S) -> io::Result<EngineAccess>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // Some operators rename PING. An unknown command says nothing about passwords.
    let mut access = probe_with(server, b"PING\r\n").await?;
    if matches!(&access, EngineAccess::Refused(error) if error.contains("unknown command")) {
        access = probe_with(server, b"ECHO ferrite\r\n").await?;
    }
    Ok(access)
}

/// Like [`probe_access`], for a port that may be a cluster bus. A bus closes the connection as soon
/// as it has 8 bytes that are no message of a bus; an engine ignores the empty line.
pub(crate) async fn probe_bus<S>(server: &mut S) -> io::Result<EngineAccess>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    probe_with(server, b"PING\r\n\r\n").await
}

async fn probe_with<S>(server: &mut S, command: &[u8]) -> io::Result<EngineAccess>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // An engine that refuses the connection sends the reason and closes it. Then the write may
    // fail although there is a reply to read. If there is none, the read fails and says why.
    if server.write_all(command).await.is_ok() {
        let _ = server.flush().await;
    }
    let reply = read_line(server).await?;
    match reply[0] {
        b'+' => Ok(EngineAccess::Open),
        b'$' => read_line(server).await.map(|_| EngineAccess::Open),
        // Engines ask for a login before they check permissions, so this one needs no login.
        b'-' if reply.starts_with(b"-NOPERM") => Ok(EngineAccess::Open),
        b'-' if reply.starts_with(b"-NOAUTH") => Ok(EngineAccess::NeedsPassword),
        b'-' => Ok(EngineAccess::Refused(String::from_utf8_lossy(&reply).into_owned())),
        TLS_ALERT => Err(invalid_reply("the engine's port expects TLS, which is not supported")),
        _ => Err(invalid_reply("the engine's reply is not RESP")),
    }
}

/// Reads a line, including its line end.
async fn read_line<S: AsyncRead + Unpin>(server: &mut S) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        if line.len() >= REPLY_MAX {
            return Err(invalid_reply("a line of the engine's reply is too long"));
        }
        match server.read_u8().await {
            Ok(byte) => line.push(byte),
            // A TLS alert has no line end, and the server closes the connection after it.
            Err(_) if line.first() == Some(&TLS_ALERT) => return Ok(line),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(io::Error::new(error.kind(), CLOSED));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(line)
}

fn invalid_reply(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Opens a socket. Inside an engine, moves its descriptor out of the range that the engine needs
/// for its own clients ([`lift`]), before the socket connects.
fn open(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    lift(socket_with(family, SocketType::STREAM, flags, None)?)
}

macro_rules! with_socket {
    ($self:ident, $socket:ident => $call:expr) => {
        match $self.get_mut() {
            EngineSocket::Unix($socket) => $call,
            EngineSocket::Tcp($socket) => $call,
        }
    };
}

impl AsyncRead for EngineSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        with_socket!(self, socket => Pin::new(socket).poll_read(cx, out))
    }
}

impl AsyncWrite for EngineSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        with_socket!(self, socket => Pin::new(socket).poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_socket!(self, socket => Pin::new(socket).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_socket!(self, socket => Pin::new(socket).poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_addresses() {
        let unix = EngineAddress::Unix("/run/redis.sock".into());
        assert_eq!("unix:/run/redis.sock".parse(), Ok(unix.clone()));
        assert_eq!("/run/redis.sock".parse(), Ok(unix.clone()));
        assert_eq!(unix.to_string().parse(), Ok(unix));
        assert_eq!("tcp:localhost:6379".parse(), Ok(EngineAddress::Tcp("localhost:6379".into())));
        assert_eq!("[::1]:6379".parse(), Ok(EngineAddress::Tcp("[::1]:6379".into())));
        for wrong in ["", "unix:", "localhost", ":6379", "localhost:0", "localhost:http"] {
            assert!(wrong.parse::<EngineAddress>().is_err(), "{wrong}");
        }
    }

    /// Without keepalive, a subscriber behind a gateway would not notice that the engine's host has
    /// died.
    #[tokio::test]
    async fn tcp_connections_have_keepalive() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
        let address = listener.local_addr().expect("an address").to_string();
        let socket = EngineSocket::connect(&EngineAddress::Tcp(address)).await.expect("connect");
        let EngineSocket::Tcp(socket) = &socket else { panic!("the socket is not a TCP socket") };
        assert!(rustix::net::sockopt::socket_keepalive(socket).expect("an option"));
    }

    /// Probes a server that sends `reply` and closes the connection.
    async fn probe(reply: &[u8]) -> io::Result<EngineAccess> {
        let (ours, mut theirs) = UnixStream::pair()?;
        theirs.write_all(reply).await?;
        drop(theirs);
        probe_access(&mut EngineSocket::Unix(ours)).await
    }

    #[tokio::test]
    async fn only_a_command_that_ran_proves_that_no_password_is_needed() {
        for (reply, access) in [
            ("+PONG\r\n", EngineAccess::Open),
            ("-NOPERM this user has no permissions\r\n", EngineAccess::Open),
            ("-NOAUTH Authentication required.\r\n", EngineAccess::NeedsPassword),
            ("-ERR unknown command 'PING'\r\n$7\r\nferrite\r\n", EngineAccess::Open),
            ("-ERR unknown command 'PING'\r\n-NOAUTH x\r\n", EngineAccess::NeedsPassword),
        ] {
            assert_eq!(probe(reply.as_bytes()).await.expect(reply), access, "{reply}");
        }
        let long = format!("-DENIED {}\r\n", "why ".repeat(300));
        for reply in ["-ERR max number of clients reached\r\n", "-LOADING it is\r\n", long.as_str()]
        {
            let refused = EngineAccess::Refused(reply.into());
            assert_eq!(probe(reply.as_bytes()).await.expect(reply), refused);
        }
    }

    #[tokio::test]
    async fn names_tls_as_the_likely_cause() {
        for reply in [b"\x15\x03\x01\x00\x02\x02\x46".as_slice(), b""] {
            let error = probe(reply).await.expect_err("not RESP").to_string();
            assert!(error.contains("expects TLS"), "{error}");
        }
        assert!(
            probe(b"HTTP/1.1 400\r\n").await.expect_err("not RESP").to_string().contains("RESP")
        );
    }
}
