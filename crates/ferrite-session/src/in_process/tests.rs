//! Tests when replies are sent, and from which memory.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;

use ferrite_fabric::mem::{Pool, Purpose};
use ferrite_proto::resp::{encode_bulk, encode_command};
use ferrite_verbs::fake::{DeviceSpec, World};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;

use super::reading::READS_PER_SEND;
use super::*;
use crate::engine::EngineSocket;
use crate::in_process_engine::{
    Callable, Called, ClientLimits, CommandKind, Commands, SessionFuture,
};
use crate::sessions::{ClientTransport, Sessions};

/// A client that sends the given pieces and then nothing more. Records all writes to it.
struct ScriptedClient<'a> {
    pieces: VecDeque<&'a [u8]>,
    written: Vec<Vec<u8>>,
    /// The most bytes that the client accepts in a write.
    takes: usize,
}

impl AsyncRead for ScriptedClient<'_> {
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

impl AsyncWrite for ScriptedClient<'_> {
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

impl Client for ScriptedClient<'_> {}

/// A fake engine that calls commands. It is also the [`ProxyClient`], which is identified from
/// the start.
#[derive(Default)]
struct CallingEngine {
    /// Whether the event-loop slice is always used up.
    is_out_of_time: bool,
    /// The hard limit for unread replies.
    output_max: usize,
    /// How many of the last commands of a call are refused.
    refused: usize,
}

impl InProcessEngine for CallingEngine {
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
            has_several_keys: false,
            reports_disk_errors: false,
        })
    }

    fn instead(&self, _: ferrite_proto::resp::Args<'_>) -> Option<&'static [u8]> {
        None
    }

    fn has_time(&self) -> bool {
        !self.is_out_of_time
    }

    fn settled(&self) -> SessionFuture {
        Box::pin(std::future::ready(()))
    }

    fn client_limits(&self) -> ClientLimits {
        ClientLimits { hard_bytes: self.output_max, ..ClientLimits::default() }
    }
}

impl ProxyClient for CallingEngine {
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
        let count = commands.iter().count();
        let refused = self.refused.min(count);
        let done = count - refused;
        (0..done).for_each(|_| replies.bytes().extend_from_slice(b"+OK\r\n"));
        Called { done, refused, wrote: true, ..Called::default() }
    }

    fn mark_writes(&self) -> &'static [u8] {
        b""
    }

    fn is_marked(&self) -> bool {
        false
    }

    fn refuses_wait(&self) -> bool {
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

/// Runs a session until it waits, and returns how many replies were sent in each write.
fn replies_per_write(input: &[u8]) -> Vec<usize> {
    run_session(&CallingEngine::default(), input).replies
}

/// What a session has done until it waits.
struct Outcome {
    /// How many replies were sent in each write.
    replies: Vec<usize>,
    /// How many commands had been called after each poll.
    called: Vec<u64>,
    /// The bytes on the proxy connection.
    proxied: Vec<u8>,
}

/// Runs a session until it waits. The engine replies only to the session's `identify`.
fn run_session(inside: &CallingEngine, input: &[u8]) -> Outcome {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("build runtime");
    runtime.block_on(async {
        let (ours, mut engine) = UnixStream::pair().expect("create a socket pair");
        // The reply to the session's `identify`.
        engine.write_all(b"+PONG\r\n").await.expect("write the reply");
        let mut client =
            ScriptedClient { pieces: [input].into(), written: Vec::new(), takes: usize::MAX };
        let (sessions, paths) = (Arc::<Sessions>::default(), CommandPaths::default());
        let (open, _) = sessions.begin(None, None, ClientTransport::Tcp);
        let (proxy, mut called) =
            (ProxyConnection::new(EngineSocket::Unix(ours), None), Vec::new());
        {
            let mut session =
                std::pin::pin!(serve((&mut client, &[]), proxy, (inside, inside), (&open, &paths)));
            // The session yields from time to time, and finally waits forever.
            for _ in 0..1000 {
                let poll = std::future::poll_fn(|cx| Poll::Ready(session.as_mut().poll(cx))).await;
                assert!(poll.is_pending(), "the client is still connected");
                tokio::task::yield_now().await; // lets the runtime poll the socket
                // No command is called before the client is identified.
                let so_far = paths.called.load(Ordering::Relaxed);
                if so_far > 0 {
                    called.push(so_far);
                }
            }
        }
        let mut proxied = Vec::new();
        while engine.try_read_buf(&mut proxied).is_ok_and(|count| count > 0) {}
        let replies = client.written.iter().map(|bytes| bytes.len() / b"+OK\r\n".len()).collect();
        Outcome { replies, called, proxied }
    })
}

fn sets(count: usize, value_bytes: usize) -> Vec<u8> {
    let (value, mut bytes) = (vec![b'v'; value_bytes], Vec::new());
    (0..count).for_each(|_| encode_command([&b"SET"[..], b"k", &value], &mut bytes));
    bytes
}

/// A pipeline that has arrived gets its replies in one write, although each value fills the buffer
/// that input is read into.
#[test]
fn sends_replies_to_large_values_together() {
    assert_eq!(replies_per_write(&sets(16, 64 << 10)), [16]);
}

/// A command that stays incomplete does not delay the replies to the commands before it.
#[test]
fn sends_replies_without_waiting_for_an_incomplete_command() {
    let input = sets(3, 64 << 10);
    assert_eq!(replies_per_write(&input[..input.len() - 1]), [2]);
    let input = sets(3, 10);
    assert_eq!(replies_per_write(&input[..input.len() - 1]), [2]);
}

#[test]
fn sends_replies_regularly_during_a_long_pipeline() {
    let replies = replies_per_write(&sets(200, 64 << 10));
    assert_eq!(replies.iter().sum::<usize>(), 200);
    assert!(replies.iter().all(|count| *count <= 1 + usize::from(READS_PER_SEND)), "{replies:?}");
}

/// Once the event-loop slice is exhausted, the session calls one command and then yields. No
/// command is lost.
#[test]
fn yields_when_the_slice_is_used_up() {
    let Outcome { replies, called, .. } = run_session(
        &CallingEngine { is_out_of_time: true, ..CallingEngine::default() },
        &sets(16, 64 << 10),
    );
    assert_eq!((replies, &called[..3], called.last()), (vec![16], &[1, 2, 3][..], Some(&16)));
}

/// Commands that cannot be called, such as commands with several keys in a cluster, do not wait for
/// each other's replies.
#[test]
fn proxies_refused_commands_together() {
    let engine = CallingEngine { refused: 3, ..CallingEngine::default() };
    let Outcome { called, proxied, .. } = run_session(&engine, &sets(5, 10));
    assert_eq!(called.last(), Some(&2));
    let expected = [engine.identify(), sets(3, 10)].concat();
    assert_eq!(proxied.escape_ascii().to_string(), expected.escape_ascii().to_string());
}

/// Sends values of these lengths, each followed by a short reply, to a client that accepts `takes`
/// bytes in a write. Checks that all bytes arrive.
fn send_values(memory: Option<&Pool>, lengths: &[usize], takes: usize) -> ScriptedClient<'static> {
    let (mut replies, mut known) = (Replies::with_memory(memory.cloned()), Vec::new());
    for (length, first) in lengths.iter().zip(0u8..) {
        let value: Vec<u8> = (0..*length).map(|at| first.wrapping_add((at % 251) as u8)).collect();
        replies.push_string(&value);
        encode_bulk(&value, &mut known);
        replies.bytes().extend_from_slice(b"+OK\r\n");
        known.extend_from_slice(b"+OK\r\n");
    }
    assert_eq!(replies.len(), known.len());
    let mut client = ScriptedClient { pieces: VecDeque::new(), written: Vec::new(), takes };
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
    world.add_device(DeviceSpec::new("fake1", "127.0.0.1".parse().expect("valid address")));
    let domain =
        world.verbs().device("fake1").and_then(|device| device.open()).expect("open the device");
    let domain = domain.allocate_protection_domain().expect("allocate a protection domain");
    Pool::builder(&[domain])
        .memory_pool_max(8 << 20)
        .receive_reserve(2 << 20)
        .build()
        .expect("build the pool")
}

#[test]
fn sends_values_completely_with_and_without_blocks() {
    let pool = pool();
    for takes in [1000, 64 << 10, usize::MAX] {
        send_values(None, &LENGTHS, takes);
        send_values(Some(&pool), &LENGTHS, takes);
        assert_eq!(pool.stats().send.in_use_bytes, 0);
    }
    let client = send_values(Some(&pool), &[64 << 10], usize::MAX);
    assert_eq!(client.written[0].len(), 64 << 10, "a long value has a block of its own");
}

/// Clients that read long values slowly leave memory for other clients.
#[test]
fn limits_the_send_memory_of_long_values() {
    let pool = pool();
    let others: Vec<_> = (0..50)
        .map(|_| pool.take_uncharged(64 << 10, Purpose::Send).expect("take memory from the pool"))
        .collect();
    let before = pool.stats().send.in_use_bytes;
    let mut replies = Replies::with_memory(Some(pool.clone()));
    replies.push_string(&[b'v'; 64 << 10]);
    assert_eq!(pool.stats().send.in_use_bytes, before);
    drop(others);
    for _ in 0..100 {
        replies.push_string(&[b'v'; 64 << 10]);
    }
    assert_eq!(pool.stats().send.in_use_bytes, 1 << 20, "the limit for one client");
}
