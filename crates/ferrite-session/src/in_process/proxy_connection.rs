//! The proxy connection of a session inside the engine.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::engine::EngineSocket;
use crate::in_process_engine::InProcessEngine;

/// An empty command, to which engines send no reply.
pub(super) const EMPTY_LINE: &[u8] = b"\n";

/// A session's own connection to the engine's socket. If the session runs inside the engine, the
/// connection reports its writes to the engine ([`InProcessEngine::on_proxied`]).
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
        // An empty line runs no command, so it is not reported.
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
