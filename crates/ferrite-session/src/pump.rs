//! Bytes between a client and its connection to the engine, both ways, in order, until one of them
//! ends.
//!
//! Nothing is changed: every command works because the engine sees a client of its own. Only where
//! commands end is looked at, for the end of the gateway. What a slow reader costs is one buffer
//! each way and what its window holds; the engine's output limits do the rest.

use std::future::{Future as _, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use ferrite_proto::resp::{CommandFramer, Limits};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader, ReadBuf, copy_buf};

/// As much as one write to a peer takes.
pub(crate) const BUFFER: usize = 64 << 10;

/// How many bytes have gone each way.
#[derive(Debug, Default)]
pub struct Moved {
    /// From the client.
    pub to_engine: AtomicU64,
    /// To the client.
    pub to_client: AtomicU64,
    /// A whole command went to the engine by [`pump`], and nothing has come back since.
    pub is_asking: AtomicBool,
    /// The last command that went to the engine by [`pump`] is not whole yet.
    pub is_partial: AtomicBool,
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

/// Moves bytes until the engine has ended, which it does when the client has.
///
/// An engine that hangs up on a client which still sends (a protocol error, a client killed) has
/// said why: that is delivered first, and what the client sends meanwhile is dropped.
///
/// # Errors
/// The first failure of either side.
pub async fn pump<C, E>(client: &mut C, engine: &mut E, moved: &Moved) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    E: AsyncRead + AsyncWrite + Unpin,
{
    pump_after(&[], client, engine, moved, BUFFER).await
}

/// The same, for an engine that gets these bytes of the client's first, by buffers of this size.
pub(crate) async fn pump_after<C, E>(
    first: &[u8],
    client: &mut C,
    engine: &mut E,
    moved: &Moved,
    buffer_bytes: usize,
) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    E: AsyncRead + AsyncWrite + Unpin,
{
    let limits = Limits { bulk_bytes: u64::MAX, multibulk_args: u64::MAX, ..Limits::default() };
    let mut engine =
        Counted { engine, moved, framer: CommandFramer::new(limits), has_ended: false };
    engine.write_all(first).await?;
    let ((from_client, mut to_client), (from_engine, mut to_engine)) =
        (tokio::io::split(client), tokio::io::split(engine));
    let mut from_client = BufReader::with_capacity(buffer_bytes, from_client);
    let mut from_engine = BufReader::with_capacity(buffer_bytes, from_engine);
    let mut asking = std::pin::pin!(async {
        copy_buf(&mut from_client, &mut to_engine).await?;
        to_engine.shutdown().await
    });
    let mut answering = std::pin::pin!(async {
        copy_buf(&mut from_engine, &mut to_client).await?;
        to_client.shutdown().await
    });
    tokio::select! {
        // For the engine the client is gone then: nothing that it could still send would be heard.
        // What has come is read and dropped all the same: a socket that is closed with unread bytes
        // resets the connection, and the client may lose the engine's last words.
        answered = &mut answering => {
            poll_fn(|cx| Poll::Ready(asking.as_mut().poll(cx).is_ready())).await;
            answered
        }
        asked = &mut asking => {
            asked?;
            answering.await
        }
    }
}

/// The engine's side, counted.
struct Counted<'a, E> {
    engine: &'a mut E,
    moved: &'a Moved,
    /// Where the client's commands end: by that alone it is known whether the engine owes an
    /// answer.
    framer: CommandFramer,
    /// There is nothing more to be read from it.
    has_ended: bool,
}

impl<E> Counted<'_, E> {
    /// These bytes have gone to the engine.
    fn note(&mut self, mut bytes: &[u8]) {
        let mut is_whole = false;
        while !bytes.is_empty() {
            match self.framer.feed(bytes) {
                Ok(progress) => {
                    is_whole |= progress.complete;
                    bytes = bytes.get(progress.consumed..).unwrap_or_default();
                }
                // No command, and the engine says so.
                Err(_) => {
                    is_whole = true;
                    break;
                }
            }
        }
        if is_whole {
            self.moved.is_asking.store(true, Ordering::Relaxed);
        }
        self.moved.is_partial.store(self.framer.is_inside(), Ordering::Relaxed);
    }
}

impl<E: AsyncRead + Unpin> AsyncRead for Counted<'_, E> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut *this.engine).poll_write(cx, bytes);
        match polled {
            Poll::Ready(Ok(count)) => {
                this.moved.to_engine.fetch_add(count as u64, Ordering::Relaxed);
                this.note(&bytes[..count]);
                Poll::Ready(Ok(count))
            }
            Poll::Ready(Err(error)) if has_hung_up(&error) && !this.has_ended => {
                Poll::Ready(Ok(bytes.len()))
            }
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

pub(crate) fn has_hung_up(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;

    /// The engine has answered and hung up while the client sends on: the answer arrives, then the
    /// end, whichever of the two is seen first.
    #[tokio::test]
    async fn last_words_arrive() {
        for _ in 0..50 {
            hang_up_on_a_client_that_sends().await;
        }
    }

    async fn hang_up_on_a_client_that_sends() {
        let (mut client, mut outside) = UnixStream::pair().expect("sockets");
        let (mut engine, mut inside) = UnixStream::pair().expect("sockets");
        engine.write_all(b"-ERR why\r\n").await.expect("it hears");
        drop(engine);
        client.write_all(&[0; 1000]).await.expect("it hears");
        let pumping =
            tokio::spawn(async move { pump(&mut outside, &mut inside, &Moved::default()).await });
        let mut heard = String::new();
        client.read_to_string(&mut heard).await.expect("an end");
        assert_eq!(heard, "-ERR why\r\n");
        // Whether the client closes or not.
        pumping.await.expect("no panic").expect("over");
    }
}
