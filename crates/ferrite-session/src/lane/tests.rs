//! When replies leave.

use std::collections::VecDeque;
use std::task::Context;

use ferrite_proto::resp::encode_command;
use tokio::io::ReadBuf;
use tokio::net::UnixStream;

use super::*;

/// What came of it lies ready in pieces, then nothing more comes. What is written to it is noted.
struct Client<'a> {
    pieces: VecDeque<&'a [u8]>,
    written: Vec<Vec<u8>>,
}

impl AsyncRead for Client<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(piece) = self.pieces.pop_front() else { return Poll::Pending };
        let (now, later) = piece.split_at(piece.len().min(room.remaining()));
        room.put_slice(now);
        if !later.is_empty() {
            self.pieces.push_front(later);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Client<'_> {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.written.push(bytes.to_vec());
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Calls everything, and all is well.
struct Willing;

impl Inside for Willing {
    fn spawn(&self, _: SessionFuture) {}

    fn is_open_to_all(&self) -> Option<bool> {
        Some(true)
    }

    fn find(&self, _: &[u8], _: Option<&[u8]>) -> Option<Callable> {
        Some(Callable { arity: -1, writes: true, is_subcommand: false, reads_string: false })
    }

    fn instead(&self, _: Args<'_>) -> Option<&'static [u8]> {
        None
    }

    fn call(&self, _: &Standing, commands: Commands<'_>, replies: &mut Vec<u8>) -> Called {
        let done = commands.iter().count();
        (0..done).for_each(|_| replies.extend_from_slice(b"+OK\r\n"));
        Called { done, wrote: true, ..Called::default() }
    }

    fn settled(&self) -> SessionFuture {
        Box::pin(std::future::ready(()))
    }

    fn mark(&self) -> &'static [u8] {
        b""
    }
}

/// How many replies left in each write, until the session waits.
fn replies_to(input: &[u8]) -> Vec<usize> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (ours, _engine) = UnixStream::pair().expect("a pair");
        let mut client = Client { pieces: [input].into(), written: Vec::new() };
        let (moved, lanes) = (Moved::default(), Lanes::default());
        let engine = EngineSocket::Unix(ours);
        {
            let mut session =
                std::pin::pin!(serve(&mut client, engine, Standing::new(true), &Willing, (&moved, &lanes)));
            // It yields now and then, and then it waits for ever.
            for _ in 0..1000 {
                let poll = std::future::poll_fn(|cx| Poll::Ready(session.as_mut().poll(cx))).await;
                assert!(poll.is_pending(), "the client is still there");
            }
        }
        client.written.iter().map(|bytes| bytes.len() / b"+OK\r\n".len()).collect()
    })
}

fn sets(count: usize, value_bytes: usize) -> Vec<u8> {
    let (value, mut bytes) = (vec![b'v'; value_bytes], Vec::new());
    (0..count).for_each(|_| encode_command([&b"SET"[..], b"k", &value], &mut bytes));
    bytes
}

/// One write of replies for a pipeline that has come, not one for each value that fills the buffer it is read into.
#[test]
fn replies_to_large_values_leave_together() {
    assert_eq!(replies_to(&sets(16, 64 << 10)), [16]);
}

/// What has begun and does not come holds nothing back.
#[test]
fn replies_do_not_wait_for_what_is_not_there() {
    let input = sets(3, 64 << 10);
    assert_eq!(replies_to(&input[..input.len() - 1]), [2]);
    let input = sets(3, 10);
    assert_eq!(replies_to(&input[..input.len() - 1]), [2]);
}

/// However much comes.
#[test]
fn replies_leave_in_time() {
    let replies = replies_to(&sets(200, 64 << 10));
    assert_eq!(replies.iter().sum::<usize>(), 200);
    assert!(replies.iter().all(|count| *count <= 1 + usize::from(KEPT_MAX)), "{replies:?}");
}
