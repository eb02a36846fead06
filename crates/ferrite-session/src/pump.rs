//! Bytes between a client and its connection to the engine, both ways, in order, until one of them ends.
//!
//! Nothing is looked at: every command works because the engine sees a client of its own. What a slow reader costs is one
//! buffer each way and what its window holds; the engine's output limits do the rest.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// As much as one write to a peer takes.
const BUFFER: usize = 64 << 10;

/// How many bytes have gone each way.
#[derive(Debug, Default)]
pub struct Moved {
    /// From the client.
    pub to_engine: AtomicU64,
    /// To the client.
    pub to_client: AtomicU64,
}

impl Moved {
    /// To the engine, and to the client.
    #[must_use]
    pub fn both(&self) -> (u64, u64) {
        (self.to_engine.load(Ordering::Relaxed), self.to_client.load(Ordering::Relaxed))
    }

    /// Of both ways together.
    #[must_use]
    pub fn total(&self) -> u64 {
        let (to_engine, to_client) = self.both();
        to_engine + to_client
    }
}

/// Moves bytes until both sides have ended.
///
/// # Errors
/// The first failure of either side.
pub async fn pump<C, E>(client: &mut C, engine: &mut E, moved: &Moved) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    E: AsyncRead + AsyncWrite + Unpin,
{
    let mut engine = Counted { engine, moved };
    tokio::io::copy_bidirectional_with_sizes(client, &mut engine, BUFFER, BUFFER).await?;
    Ok(())
}

/// The engine's side, counted.
struct Counted<'a, E> {
    engine: &'a mut E,
    moved: &'a Moved,
}

impl<E: AsyncRead + Unpin> AsyncRead for Counted<'_, E> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let polled = Pin::new(&mut *this.engine).poll_read(cx, out);
        this.moved.to_client.fetch_add((out.filled().len() - before) as u64, Ordering::Relaxed);
        polled
    }
}

impl<E: AsyncWrite + Unpin> AsyncWrite for Counted<'_, E> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut *this.engine).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = &polled {
            this.moved.to_engine.fetch_add(*count as u64, Ordering::Relaxed);
        }
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().engine).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().engine).poll_shutdown(cx)
    }
}
