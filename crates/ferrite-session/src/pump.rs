//! Bytes between a client and its connection to the engine, both ways, in order, until one of them ends.
//!
//! Nothing is looked at: every command works because the engine sees a client of its own. What a slow reader costs is one
//! buffer each way and what its window holds; the engine's output limits do the rest.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    /// The last bytes through [`pump`] went to the engine: it has not answered yet, or not all of a command has come.
    pub is_asking: AtomicBool,
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
/// An engine that hangs up on a client which still sends (a protocol error, a client killed) has said why: that is delivered
/// first, and what the client sends meanwhile is dropped.
///
/// # Errors
/// The first failure of either side.
pub async fn pump<C, E>(client: &mut C, engine: &mut E, moved: &Moved) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    E: AsyncRead + AsyncWrite + Unpin,
{
    let mut engine = Counted { engine, moved, has_ended: false };
    tokio::io::copy_bidirectional_with_sizes(client, &mut engine, BUFFER, BUFFER).await?;
    Ok(())
}

/// The engine's side, counted.
struct Counted<'a, E> {
    engine: &'a mut E,
    moved: &'a Moved,
    /// There is nothing more to be read from it.
    has_ended: bool,
}

impl<E: AsyncRead + Unpin> AsyncRead for Counted<'_, E> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = out.filled().len();
        let polled = Pin::new(&mut *this.engine).poll_read(cx, out);
        let count = out.filled().len() - before;
        if count > 0 {
            this.moved.to_client.fetch_add(count as u64, Ordering::Relaxed);
            this.moved.is_asking.store(false, Ordering::Relaxed);
        }
        this.has_ended |= polled.is_ready() && count == 0;
        polled
    }
}

impl<E: AsyncWrite + Unpin> AsyncWrite for Counted<'_, E> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut *this.engine).poll_write(cx, bytes);
        match polled {
            Poll::Ready(Ok(count)) => {
                this.moved.to_engine.fetch_add(count as u64, Ordering::Relaxed);
                this.moved.is_asking.store(true, Ordering::Relaxed);
                Poll::Ready(Ok(count))
            }
            Poll::Ready(Err(error)) if has_hung_up(&error) && !this.has_ended => Poll::Ready(Ok(bytes.len())),
            other => other,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().engine).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().engine).poll_shutdown(cx)
    }
}

fn has_hung_up(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;

    use super::*;

    /// The engine has answered and hung up while the client sends on: the answer arrives, then the end.
    #[tokio::test]
    async fn last_words_arrive() {
        let (mut client, mut outside) = UnixStream::pair().expect("sockets");
        let (mut engine, mut inside) = UnixStream::pair().expect("sockets");
        engine.write_all(b"-ERR why\r\n").await.expect("it hears");
        drop(engine);
        client.write_all(&[0; 1000]).await.expect("it hears");
        let pumping = tokio::spawn(async move { pump(&mut outside, &mut inside, &Moved::default()).await });
        let mut heard = String::new();
        client.read_to_string(&mut heard).await.expect("an end");
        assert_eq!(heard, "-ERR why\r\n");
        // Who sends on nevertheless is told.
        client.write_all(&[0; 1000]).await.expect("it hears");
        assert!(pumping.await.expect("no panic").is_err());
    }
}
