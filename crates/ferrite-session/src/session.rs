//! A session as the client sees it: a byte stream to a server, with the transport that it uses.
//!
//! A link to a Ferrite peer may change between RDMA and TCP at any time. So the transport is asked
//! for when it is needed and never kept. [`TransportObserver`] tells it to code that does not own
//! the session.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use ferrite_fabric::wire::Program;
use ferrite_fabric::{Fallback, LinkObserver, Stream, Transport};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::stream::ValkeyStream;

/// The transport of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SessionTransport {
    /// RDMA between two Ferrite peers.
    FerriteRdma,
    /// Valkey Over RDMA.
    ValkeyRdma,
    /// TCP.
    Tcp,
    /// TCP with TLS.
    Tls,
}

impl fmt::Display for SessionTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::FerriteRdma => "RDMA (Ferrite)",
            Self::ValkeyRdma => "RDMA (Valkey)",
            Self::Tcp => "TCP",
            Self::Tls => "TCP with TLS",
        })
    }
}

/// What a session runs over.
pub(crate) enum SessionStream {
    Ferrite(Stream),
    Valkey(Box<ValkeyStream>),
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection to a server that speaks RESP. Implements [`AsyncRead`] and [`AsyncWrite`].
///
/// A server may refuse a client: it sends an error and closes the connection. Over TCP, the
/// client's first write then still succeeds. Over RDMA it fails, but a session reports success all
/// the same, so that the caller goes on to read the server's error. The next write fails.
pub struct Session {
    stream: SessionStream,
    /// Why the session was opened over TCP. A link has its own reason.
    fallback: Option<Fallback>,
    failed_write: Option<io::Error>,
    has_read_all: bool,
}

impl Session {
    pub(crate) fn new(stream: SessionStream, fallback: Option<Fallback>) -> Self {
        Self { stream, fallback, failed_write: None, has_read_all: false }
    }

    #[cfg(test)]
    pub(crate) fn stream(&self) -> &SessionStream {
        &self.stream
    }

    /// Returns the transport that the session uses now. A session with a Ferrite peer may change
    /// between RDMA and TCP at any time.
    #[must_use]
    pub fn transport(&self) -> SessionTransport {
        match &self.stream {
            SessionStream::Ferrite(stream) => of_link(stream.link().transport()),
            SessionStream::Valkey(_) => SessionTransport::ValkeyRdma,
            SessionStream::Tcp(_) => SessionTransport::Tcp,
            SessionStream::Tls(_) => SessionTransport::Tls,
        }
    }

    /// Returns why the session uses TCP now although RDMA is preferred.
    #[must_use]
    pub fn fallback(&self) -> Option<Fallback> {
        match &self.stream {
            SessionStream::Ferrite(stream) => stream.link().fallback(),
            _ => self.fallback.clone(),
        }
    }

    /// Returns the program of the server, if the session began with a Ferrite peer over RDMA.
    #[must_use]
    pub fn server_program(&self) -> Option<Program> {
        match &self.stream {
            SessionStream::Ferrite(stream) => Some(stream.link().peer_hello().program),
            _ => None,
        }
    }

    /// Returns the RDMA device, if the session uses RDMA now.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        match &self.stream {
            SessionStream::Ferrite(stream) => stream.link().device(),
            SessionStream::Valkey(stream) => stream.raw().device(),
            SessionStream::Tcp(_) | SessionStream::Tls(_) => None,
        }
    }

    /// Returns an observer of the session's transport, for code that gives the session away.
    #[must_use]
    pub fn observer(&self) -> TransportObserver {
        let link = match &self.stream {
            SessionStream::Ferrite(stream) => Some(stream.link().observer()),
            _ => None,
        };
        let first = (self.transport(), self.device(), self.fallback());
        TransportObserver { link, first }
    }
}

/// Reports the transport that a session uses now. It does not keep the session open.
#[derive(Debug, Clone)]
pub struct TransportObserver {
    /// The link of the session, which may migrate. `None` if the session has none.
    link: Option<LinkObserver>,
    /// The transport, the device and the fallback when the session was opened. They apply if there
    /// is no link, or no longer.
    first: (SessionTransport, Option<String>, Option<Fallback>),
}

impl TransportObserver {
    /// Returns the transport that the session uses now. After the session has ended, returns the
    /// first one.
    #[must_use]
    pub fn transport(&self) -> SessionTransport {
        self.link.as_ref().and_then(LinkObserver::transport).map_or(self.first.0, of_link)
    }

    /// Returns the RDMA device, if the session uses RDMA now. After the session has ended, returns
    /// the first one.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        match self.link.as_ref().filter(|link| link.transport().is_some()) {
            Some(link) => link.device(),
            None => self.first.1.clone(),
        }
    }

    /// Returns why the session uses TCP now although RDMA is preferred. After the session has
    /// ended, returns why it used TCP at first.
    #[must_use]
    pub fn fallback(&self) -> Option<Fallback> {
        match self.link.as_ref().filter(|link| link.transport().is_some()) {
            Some(link) => link.fallback(),
            None => self.first.2.clone(),
        }
    }

    /// Returns how often the session has lost its RDMA path and continued, over TCP or another
    /// device. Returns 0 after the session has ended.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.link.as_ref().and_then(LinkObserver::moves).unwrap_or(0)
    }
}

/// Returns the transport of a session whose link uses `transport`.
pub(crate) fn of_link(transport: Transport) -> SessionTransport {
    match transport {
        Transport::Rdma => SessionTransport::FerriteRdma,
        Transport::TcpTls => SessionTransport::Tls,
        _ => SessionTransport::Tcp,
    }
}

macro_rules! with_stream {
    ($self:ident, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().stream {
            SessionStream::Ferrite($stream) => $call,
            SessionStream::Valkey($stream) => $call,
            SessionStream::Tcp($stream) => $call,
            SessionStream::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Session {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        let has_room = out.remaining() > 0;
        let session = self.as_mut();
        let polled = with_stream!(session, stream => Pin::new(stream).poll_read(cx, out));
        let is_end = has_room && out.filled().len() == before;
        if is_end && matches!(polled, Poll::Ready(Ok(()))) {
            self.get_mut().has_read_all = true;
        }
        polled
    }
}

impl Session {
    /// If a write failed because the peer has closed the connection, reports success, and lets the
    /// next write return the error ([`Session`] says why). Once everything was read from the peer,
    /// returns the error at once.
    fn accept_failed(
        &mut self,
        polled: Poll<io::Result<usize>>,
        total: usize,
    ) -> Poll<io::Result<usize>> {
        match polled {
            Poll::Ready(Err(error))
                if error.kind() == io::ErrorKind::BrokenPipe && !self.has_read_all =>
            {
                self.failed_write = Some(error);
                Poll::Ready(Ok(total))
            }
            polled => polled,
        }
    }
}

impl AsyncWrite for Session {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.failed_write.take() {
            return Poll::Ready(Err(error));
        }
        let session = self.as_mut();
        let polled = with_stream!(
            session, stream => Pin::new(stream).poll_write_vectored(cx, bytes)
        );
        let total = bytes.iter().map(|slice| slice.len()).sum();
        self.get_mut().accept_failed(polled, total)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_stream!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_stream!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("transport", &self.transport())
            .field("fallback", &self.fallback())
            .finish()
    }
}
