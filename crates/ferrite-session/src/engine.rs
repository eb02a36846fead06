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

/// The address where an engine listens: `unix:/run/redis.sock`, an absolute path, or `host:port`.
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
                Err("unix: expected a path after the colon".into())
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
        // Closing is not enough: the child's copy would keep the connection open, and a client that
        // is blocked in BLPOP would pop an element that nobody receives.
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
    /// Returns the system's error if the name cannot be resolved or the connection fails. If a name
    /// has several addresses, this is the error of the last one.
    pub async fn connect(address: &EngineAddress) -> io::Result<Self> {
        match address {
            EngineAddress::Unix(path) => {
                let socket = open(AddressFamily::UNIX)?;
                connect(&socket, &SocketAddrUnix::new(path)?)?; // never in progress on Unix sockets
                UnixStream::from_std(socket.into()).map(Self::Unix)
            }
            EngineAddress::Tcp(address) => {
                let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
                for address in lookup_host(address).await? {
                    let family =
                        if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                    let socket = TcpSocket::from_std_stream(open(family)?.into());
                    match socket.connect(address).await {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(Self::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// Returns whether the engine accepts commands without a password. Must be the first command on
    /// the connection.
    ///
    /// # Errors
    /// Returns an error if the connection fails, or if the server does not speak RESP.
    pub async fn is_open_to_all(&mut self) -> io::Result<bool> {
        self.write_all(b"PING\r\n").await?;
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            if answer.len() >= 512 {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "invalid reply to PING: no end of line within 512 bytes",
                ));
            }
            answer.push(self.read_u8().await?);
        }
        match answer[0] {
            b'+' => Ok(true),
            b'-' => Ok(!answer.starts_with(b"-NOAUTH")),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "invalid reply to PING: not RESP")),
        }
    }
}

/// Opens a socket. Its descriptor is moved out of the range that the surrounding engine needs for
/// its own clients, before the socket connects.
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
}
