//! The engine's own socket: any server that speaks RESP, on a Unix or TCP socket.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};

use ferrite_fabric::descriptors::lift;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream, lookup_host};

use crate::in_process::InProcessEngine;

/// Where an engine listens: `unix:/run/redis.sock`, a path, or `host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// Host and port.
    Tcp(String),
}

impl FromStr for EngineAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) =
            text.strip_prefix("unix:").or_else(|| text.starts_with('/').then_some(text))
        {
            return if path.is_empty() {
                Err("unix: needs a path".into())
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
            _ => Err(format!("{text}: neither a path nor host:port")),
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

/// A connection to an engine. Dropping it ends it, also if a forked child (an engine's that saves)
/// holds its descriptor still.
#[derive(Debug)]
pub enum EngineSocket {
    /// Over a Unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Drop for EngineSocket {
    fn drop(&mut self) {
        // Closing would not: the child's copy keeps the connection, and a client that waits in
        // BLPOP would take an element that nobody hears of.
        let _ = match self {
            Self::Unix(socket) => shutdown(socket, Shutdown::Both),
            Self::Tcp(socket) => shutdown(socket, Shutdown::Both),
        };
    }
}

impl EngineSocket {
    /// Connects.
    ///
    /// # Errors
    /// What the system says.
    pub async fn connect(address: &EngineAddress) -> io::Result<Self> {
        match address {
            EngineAddress::Unix(path) => {
                let socket = open(AddressFamily::UNIX)?;
                connect(&socket, &SocketAddrUnix::new(path)?)?; // done, or refused
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

    /// Whether the engine answers who has not said a password. To be asked first on a connection.
    ///
    /// # Errors
    /// The connection fails, or what is there speaks no RESP.
    pub async fn is_open_to_all(&mut self) -> io::Result<bool> {
        self.write_all(b"PING\r\n").await?;
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            if answer.len() >= 512 {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the answer to PING has no end",
                ));
            }
            answer.push(self.read_u8().await?);
        }
        match answer[0] {
            b'+' => Ok(true),
            b'-' => Ok(!answer.starts_with(b"-NOAUTH")),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the answer to PING is not RESP")),
        }
    }
}

/// A socket whose descriptor is none of those that the engine around us needs, also while it
/// connects.
fn open(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    lift(socket_with(family, SocketType::STREAM, flags, None)?)
}

macro_rules! both {
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
        both!(self, socket => Pin::new(socket).poll_read(cx, out))
    }
}

impl AsyncWrite for EngineSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        both!(self, socket => Pin::new(socket).poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        both!(self, socket => Pin::new(socket).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        both!(self, socket => Pin::new(socket).poll_shutdown(cx))
    }
}

/// An empty command, which engines do not answer.
pub(crate) const EMPTY_LINE: &[u8] = b"\n";

/// A session's own connection to the engine's socket. An engine that the session runs inside of
/// hears of what is sent there.
pub(crate) struct ProxyConnection {
    socket: EngineSocket,
    engine: Option<Arc<dyn InProcessEngine>>,
}

impl ProxyConnection {
    pub(crate) fn new(socket: EngineSocket, engine: Option<Arc<dyn InProcessEngine>>) -> Self {
        Self { socket, engine }
    }
}

impl AsyncRead for ProxyConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_read(cx, out)
    }
}

impl AsyncWrite for ProxyConnection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { socket, engine } = self.get_mut();
        let written = Pin::new(socket).poll_write(cx, bytes);
        // An empty line runs nothing.
        if let (Poll::Ready(Ok(1..)), Some(engine)) = (&written, engine)
            && bytes != EMPTY_LINE
        {
            engine.on_proxied();
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
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
