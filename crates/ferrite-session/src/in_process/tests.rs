//! When replies leave, and from where.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Context;

use ferrite_fabric::mem::{Pool, Purpose};
use ferrite_proto::resp::{encode_bulk, encode_command};
use ferrite_verbs::fake::{DeviceSpec, World};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;

use super::*;
use crate::engine::EngineSocket;
use crate::sessions::{ClientTransport, Sessions};

/// What came of it lies ready in pieces, then nothing more comes. What is written to it is noted.
struct Pieces<'a> {
    pieces: VecDeque<&'a [u8]>,
    written: Vec<Vec<u8>>,
    /// Of each write, at most.
    takes: usize,
}

impl AsyncRead for Pieces<'_> {
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

impl AsyncWrite for Pieces<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let count = bytes.len().min(self.takes);
        self.written.push(bytes[..count].to_vec());
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Client for Pieces<'_> {}

/// An engine that calls everything, and a client that it knows from the start.
#[derive(Default)]
struct Willing {
    /// Others wait for their turn, always.
    is_pressed: bool,
    /// The hard limit for unread replies.
    output_max: usize,
}

impl InProcessEngine for Willing {
    fn spawn(&self, _: SessionFuture) {}

    fn is_open_to_all(&self) -> Option<bool> {
        Some(true)
    }

    fn new_client(&self, _: Option<std::net::SocketAddr>, _: Arc<Notify>) -> Arc<dyn ProxyClient> {
        Arc::new(Self::default())
    }

    fn look_up(&self, _: &[u8], _: Option<&[u8]>) -> CommandKind {
        CommandKind::Callable(Callable {
            arity: -1,
            writes: true,
            unblocks: false,
            is_subcommand: false,
            reads_string: false,
        })
    }

    fn instead(&self, _: ferrite_proto::resp::Args<'_>) -> Option<&'static [u8]> {
        None
    }

    fn has_time(&self) -> bool {
        !self.is_pressed
    }

    fn settled(&self) -> SessionFuture {
        Box::pin(std::future::ready(()))
    }

    fn client_limits(&self) -> ClientLimits {
        ClientLimits { hard_bytes: self.output_max, ..ClientLimits::default() }
    }
}

impl ProxyClient for Willing {
    fn identify(&self) -> Vec<u8> {
        b"PING\r\n".to_vec()
    }

    fn probe_login(&self) -> &'static [u8] {
        b"PING\r\n"
    }

    fn identity_changes(&self, _: SessionCommand) {}

    fn refresh(&self) -> Access {
        Access::InProcess
    }

    fn call(&self, commands: Commands<'_>, replies: &mut Replies) -> Called {
        let done = commands.iter().count();
        (0..done).for_each(|_| replies.bytes().extend_from_slice(b"+OK\r\n"));
        Called { done, wrote: true, ..Called::default() }
    }

    fn mark_writes(&self) -> &'static [u8] {
        b""
    }

    fn is_marked(&self) -> bool {
        false
    }

    fn is_blocked(&self) -> bool {
        false
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn id(&self) -> Option<u64> {
        Some(1)
    }
}

/// How many replies left in each write, until the session waits.
fn replies_to(input: &[u8]) -> Vec<usize> {
    polled(&Willing::default(), input).0
}

/// The same, and how many commands had been called after each poll.
fn polled(inside: &Willing, input: &[u8]) -> (Vec<usize>, Vec<u64>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (ours, mut engine) = UnixStream::pair().expect("a pair");
        engine.write_all(b"+PONG\r\n").await.expect("it is there"); // the client is identified
        let mut client = Pieces { pieces: [input].into(), written: Vec::new(), takes: usize::MAX };
        let (sessions, paths) = (Arc::<Sessions>::default(), CommandPaths::default());
        let (open, _) = sessions.begin(None, None, ClientTransport::Tcp);
        let (proxy, mut called) =
            (ProxyConnection::new(EngineSocket::Unix(ours), None), Vec::new());
        {
            let mut session =
                std::pin::pin!(serve((&mut client, &[]), proxy, (inside, inside), (&open, &paths)));
            // It yields now and then, and then it waits for ever.
            for _ in 0..1000 {
                let poll = std::future::poll_fn(|cx| Poll::Ready(session.as_mut().poll(cx))).await;
                assert!(poll.is_pending(), "the client is still there");
                tokio::task::yield_now().await; // the runtime looks at the socket
                // Nothing is called before the client is identified.
                let so_far = paths.called.load(Ordering::Relaxed);
                if so_far > 0 {
                    called.push(so_far);
                }
            }
        }
        (client.written.iter().map(|bytes| bytes.len() / b"+OK\r\n".len()).collect(), called)
    })
}

fn sets(count: usize, value_bytes: usize) -> Vec<u8> {
    let (value, mut bytes) = (vec![b'v'; value_bytes], Vec::new());
    (0..count).for_each(|_| encode_command([&b"SET"[..], b"k", &value], &mut bytes));
    bytes
}

/// One write of replies for a pipeline that has come, not one for each value that fills the buffer
/// it is read into.
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

/// One step at a time while others wait, and nothing is lost by it.
#[test]
fn a_session_stops_when_its_time_is_over() {
    let (replies, called) =
        polled(&Willing { is_pressed: true, ..Willing::default() }, &sets(16, 64 << 10));
    assert_eq!((replies, &called[..3], called.last()), (vec![16], &[1, 2, 3][..], Some(&16)));
}

/// Values of these lengths, a short reply behind each, to a client that takes so much of them at
/// once.
fn comes_whole(memory: Option<&Pool>, lengths: &[usize], takes: usize) -> Pieces<'static> {
    let (mut replies, mut known) = (Replies::with_memory(memory.cloned()), Vec::new());
    for (length, first) in lengths.iter().zip(0u8..) {
        let value: Vec<u8> = (0..*length).map(|at| first.wrapping_add((at % 251) as u8)).collect();
        replies.push_string(&value);
        encode_bulk(&value, &mut known);
        replies.bytes().extend_from_slice(b"+OK\r\n");
        known.extend_from_slice(b"+OK\r\n");
    }
    assert_eq!(replies.len(), known.len());
    let mut client = Pieces { pieces: VecDeque::new(), written: Vec::new(), takes };
    while !replies.is_empty() {
        let polled =
            replies.poll_write(&mut client, &mut Context::from_waker(std::task::Waker::noop()));
        assert!(matches!(polled, Poll::Ready(Ok(1..))));
    }
    assert!(client.written.concat() == known, "{lengths:?}");
    client
}

const LENGTHS: [usize; 8] = [0, 9, 10, 1 << 10, 32 << 10, 64 << 10, 100_000, 3 << 20];

fn pool() -> Pool {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse().expect("an address")));
    let domain = world.verbs().device("fake1").and_then(|device| device.open()).expect("a device");
    let domain = domain.allocate_protection_domain().expect("a domain");
    Pool::builder(&[domain])
        .memory_pool_max(8 << 20)
        .receive_reserve(2 << 20)
        .build()
        .expect("a pool")
}

#[test]
fn values_come_whole_wherever_they_lie() {
    let pool = pool();
    for takes in [1000, 64 << 10, usize::MAX] {
        comes_whole(None, &LENGTHS, takes);
        comes_whole(Some(&pool), &LENGTHS, takes);
        assert_eq!(pool.stats().send.in_use_bytes, 0);
    }
    let client = comes_whole(Some(&pool), &[64 << 10], usize::MAX);
    assert_eq!(client.written[0].len(), 64 << 10, "a block of its own");
}

/// Those who are slow to take long values leave memory for others.
#[test]
fn long_values_take_half_of_the_memory() {
    let pool = pool();
    let others: Vec<_> =
        (0..50).map(|_| pool.take_uncharged(64 << 10, Purpose::Send).expect("memory")).collect();
    let before = pool.stats().send.in_use_bytes;
    let mut replies = Replies::with_memory(Some(pool.clone()));
    replies.push_string(&[b'v'; 64 << 10]);
    assert_eq!(pool.stats().send.in_use_bytes, before);
    drop(others);
    for _ in 0..100 {
        replies.push_string(&[b'v'; 64 << 10]);
    }
    assert_eq!(pool.stats().send.in_use_bytes, 1 << 20, "no more for one client");
}
