//! Copies bytes between a client and its connection to the engine, in both directions and in order,
//! until the engine closes its connection.
//!
//! The bytes are not changed, so every command works: the engine sees an ordinary client. The pump
//! finds out where commands end, so that a gateway can shut down between two of them. A slow
//! reader costs one buffer for each direction, and the contents of its window. Beyond that, the
//! engine's own output limits apply.

use std::future::{Future as _, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use ferrite_proto::resp::{CommandFramer, Limits};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader, ReadBuf, copy_buf};

/// The size of [`pump`]'s buffer for each direction, and so of its largest write.
pub(crate) const BUFFER: usize = 64 << 10;

/// Counts the bytes of a session in each direction, and holds flags about its commands.
#[derive(Debug, Default)]
pub struct Moved {
    /// The number of bytes from the client to the engine.
    pub to_engine: AtomicU64,
    /// The number of bytes from the engine to the client.
    pub to_client: AtomicU64,
    /// Whether [`pump`] has sent a complete command to the engine, and no byte has come back since.
    pub is_asking: AtomicBool,
    /// Whether the last command that [`pump`] has sent to the engine is still incomplete.
    pub is_partial: AtomicBool,
    /// Whether [`pump`] drops the client's bytes from now on. Set when the session is killed.
    pub drops_commands: AtomicBool,
}

impl Moved {
    /// Returns the numbers of bytes to the engine and to the client.
    #[must_use]
    pub fn both(&self) -> (u64, u64) {
        (self.to_engine.load(Ordering::Relaxed), self.to_client.load(Ordering::Relaxed))
    }

    /// Returns the number of bytes of both directions together.
    #[must_use]
    pub fn total(&self) -> u64 {
        let (to_engine, to_client) = self.both();
        to_engine + to_client
    }
}

/// Copies bytes until the engine closes its connection. When the client closes its side, the pump
/// closes its side of the engine's connection, and the engine then closes the connection.
///
/// The engine may disconnect a client that is still sending (after a protocol error, or CLIENT
/// KILL). Then the engine's last reply is delivered first, and bytes that the client sends in the
/// meantime are dropped.
///
/// # Errors
/// Returns the first error of either side.
pub async fn pump<C, E>(client: &mut C, engine: &mut E, moved: &Moved) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
    E: AsyncRead + AsyncWrite + Unpin,
{
    pump_after(&[], client, engine, moved, BUFFER).await
}

/// Like [`pump`], but sends the bytes in `first` to the engine before all others, and uses buffers
/// of `buffer_bytes`.
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
    let is_delivered = AtomicBool::new(false);
    let framer = CommandFramer::new(limits);
    let mut engine = CountedEngine { engine, moved, framer, is_delivered: &is_delivered };
    engine.write_all(first).await?;
    let ((from_client, mut to_client), (from_engine, mut to_engine)) =
        (tokio::io::split(client), tokio::io::split(engine));
    let mut from_client = BufReader::with_capacity(buffer_bytes, from_client);
    let mut from_engine = BufReader::with_capacity(buffer_bytes, from_engine);
    let mut forward_commands = std::pin::pin!(async {
        copy_buf(&mut from_client, &mut to_engine).await?;
        to_engine.shutdown().await
    });
    let mut forward_replies = std::pin::pin!(async {
        copy_buf(&mut from_engine, &mut to_client).await?;
        to_client.shutdown().await
    });
    tokio::select! {
        // The engine has closed, so it would ignore any further command. Bytes that have already
        // arrived from the client are still read and dropped: closing a socket with unread bytes
        // resets the connection, and the client could lose the engine's last reply.
        replies_done = &mut forward_replies => {
            is_delivered.store(true, Ordering::Relaxed);
            poll_fn(|cx| Poll::Ready(forward_commands.as_mut().poll(cx).is_ready())).await;
            replies_done
        }
        commands_done = &mut forward_commands => {
            commands_done?;
            forward_replies.await
        }
    }
}

/// A connection to the engine that counts its bytes in [`Moved`]. It drops the commands of a killed
/// session, and turns a disconnect by the engine into the end of the stream.
struct CountedEngine<'a, E> {
    engine: &'a mut E,
    moved: &'a Moved,
    /// Finds where the client's commands end. Only a complete command makes the engine owe a reply.
    framer: CommandFramer,
    /// Whether the client has the engine's last reply, and the end of the stream after it.
    is_delivered: &'a AtomicBool,
}

impl<E> CountedEngine<'_, E> {
    /// Updates `is_asking` and `is_partial` after these bytes have gone to the engine.
    fn track_commands(&mut self, mut bytes: &[u8]) {
        let mut is_whole = false;
        while !bytes.is_empty() {
            match self.framer.feed(bytes) {
                Ok(progress) => {
                    is_whole |= progress.complete;
                    bytes = bytes.get(progress.consumed..).unwrap_or_default();
                }
                // Not a valid command: the engine replies with an error.
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

impl<E: AsyncRead + Unpin> AsyncRead for CountedEngine<'_, E> {
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
        match polled {
            // An engine that closes with unread commands resets the connection. To the client this
            // is an ordinary end of the stream, after the last reply.
            Poll::Ready(Err(error)) if is_disconnect(&error) => Poll::Ready(Ok(())),
            polled => polled,
        }
    }
}

impl<E: AsyncWrite + Unpin> AsyncWrite for CountedEngine<'_, E> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.moved.drops_commands.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let polled = Pin::new(&mut *this.engine).poll_write(cx, bytes);
        match polled {
            Poll::Ready(Ok(count)) => {
                this.moved.to_engine.fetch_add(count as u64, Ordering::Relaxed);
                this.track_commands(&bytes[..count]);
                Poll::Ready(Ok(count))
            }
            // The engine is gone, but the client may still lack the engine's last reply. The bytes
            // that cannot be sent are dropped, so that the reply is delivered.
            Poll::Ready(Err(error))
                if is_disconnect(&error) && !this.is_delivered.load(Ordering::Relaxed) =>
            {
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

/// Returns whether an error means that the other side has closed the connection.
pub(crate) fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;

    /// The engine replies and disconnects while the client is still sending. The client receives
    /// the reply, then the end of the stream. The pump may notice the disconnect before or after it
    /// reads the reply.
    #[tokio::test]
    async fn delivers_the_last_reply_of_an_engine_that_disconnects() {
        for _ in 0..50 {
            disconnect_a_sending_client().await;
        }
    }

    async fn disconnect_a_sending_client() {
        let (mut client, mut outside) = UnixStream::pair().expect("create a socket pair");
        let (mut engine, mut inside) = UnixStream::pair().expect("create a socket pair");
        engine.write_all(b"-ERR why\r\n").await.expect("write the reply");
        drop(engine);
        client.write_all(&[0; 1000]).await.expect("write to the gateway");
        let pumping =
            tokio::spawn(async move { pump(&mut outside, &mut inside, &Moved::default()).await });
        let mut received = String::new();
        client.read_to_string(&mut received).await.expect("read until the end of the stream");
        assert_eq!(received, "-ERR why\r\n");
        // The pump ends although the client has not closed its side.
        pumping.await.expect("pump does not panic").expect("pump ends without an error");
    }

    /// A killed session sends no further command, but still gets the reply to the last one.
    #[tokio::test]
    async fn drops_the_commands_of_a_killed_session() {
        let (mut client, mut outside) = UnixStream::pair().expect("create a socket pair");
        let (mut engine, mut inside) = UnixStream::pair().expect("create a socket pair");
        let moved = Moved::default();
        moved.drops_commands.store(true, Ordering::Relaxed);
        client.write_all(b"PING\r\n").await.expect("write to the gateway");
        engine.write_all(b"+OK\r\n").await.expect("write the reply");
        engine.shutdown().await.expect("close");
        pump(&mut outside, &mut inside, &moved).await.expect("pump ends without an error");
        drop((outside, inside));
        let (mut received, mut ran) = (String::new(), String::new());
        client.read_to_string(&mut received).await.expect("read until the end of the stream");
        engine.read_to_string(&mut ran).await.expect("read until the end of the stream");
        assert_eq!((received.as_str(), ran.as_str()), ("+OK\r\n", ""));
    }

    /// An engine that has replied and then reset its connection.
    struct ResetEngine(&'static [u8]);

    impl AsyncRead for ResetEngine {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            out: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            match std::mem::take(&mut self.0) {
                [] => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                reply => {
                    out.put_slice(reply);
                    Poll::Ready(Ok(()))
                }
            }
        }
    }

    impl AsyncWrite for ResetEngine {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// A client that always has more to send, and whose close takes several polls.
    #[derive(Default)]
    struct BusyClient {
        has_sent: bool,
        received: Vec<u8>,
        close_polls: u32,
    }

    const CLOSE_POLLS: u32 = 5;

    #[tokio::test]
    async fn completes_the_close_of_a_client_that_keeps_sending() {
        let (mut client, mut engine) = (BusyClient::default(), ResetEngine(b"-ERR why\r\n"));
        let pumped = pump(&mut client, &mut engine, &Moved::default()).await;
        pumped.expect("an engine that resets has closed");
        assert_eq!(client.received, b"-ERR why\r\n");
        assert_eq!(client.close_polls, CLOSE_POLLS, "closed completely");
    }

    impl AsyncRead for BusyClient {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            out: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.has_sent = !self.has_sent;
            if !self.has_sent {
                cx.waker().wake_by_ref();
                return Poll::Pending; // so that the other direction runs, too
            }
            out.put_slice(b"x");
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for BusyClient {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.received.extend_from_slice(bytes);
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.close_polls += 1;
            if self.close_polls == CLOSE_POLLS {
                return Poll::Ready(Ok(()));
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }
}
