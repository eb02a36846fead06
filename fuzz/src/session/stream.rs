//! A stream of Valkey's protocol, in either role, through its driver and the fabric. Its peer acts
//! as the input bytes say, through plain verbs on the fake provider. The application must read the
//! bytes that the peer wrote. Its own writes must change only the peer's registered memory. The
//! connection must end exactly when the peer violates the protocol (`model.rs`). At the end, all
//! memory and all requests must be released.
//!
//! ```text
//!   first byte  role
//!   a step      low 4 bits of a byte; its other bits and the following bytes are arguments
//!   0           the peer writes what is due next: number of bytes
//!   1           the peer writes anywhere: offset; number of bytes; immediate data
//!   2           the peer writes without immediate data: offset; number of bytes
//!   3           the peer registers its memory: offset; number of bytes
//!   4           the peer registers anything: length; address and key
//!   5           the peer queries or sets features, or sends a keepalive
//!   6           a message of any bytes: their number; the bytes
//!   7           a message with immediate data
//!   8 9         the application reads: number of bytes
//!   10 11       the application writes: number of bytes
//!   12          time passes
//!   13          the peer disconnects, or its queue pair breaks
//!   14          the application shuts the stream down
//!   15          nothing
//! ```

mod model;
mod peer;

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{Config, ConnectOptions, Fabric, ForeignPeers, Listener, RawConnection, Rdma};
use ferrite_proto::{Message, Registration, Role};
use ferrite_session::{ValkeyConfig, ValkeyStream};
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{Operation, ProtectionDomain, RemoteSlice, Verbs, cm};
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::runtime::{Builder, Runtime};

use super::input::Input;
use model::{Ending, Model};
use peer::Peer;

/// The length of our own window. It is small, so that it is used up often.
const WINDOW: u32 = 200;
/// The longest window that a peer may announce.
const PEER_WINDOW_MAX: u32 = 1 << 16;
const TEST_TIMEOUT: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3600);
const RECEIVES: u32 = 64;
/// Maximum number of calls of `Fabric::progress` until everything has happened. No step has to
/// wait.
const PASSES: usize = 100;

/// Checks that a stream follows the protocol whatever its peer does, and fails exactly when the
/// peer violates the protocol.
pub fn valkey_stream(bytes: &[u8]) {
    thread_local! {
        static HARNESS: RefCell<Option<Harness>> = const { RefCell::new(None) };
    }
    HARNESS.with_borrow_mut(|harness| run_session(harness.get_or_insert_with(Harness::new), bytes));
}

fn run_session(harness: &mut Harness, bytes: &[u8]) {
    let mut input = Input(bytes);
    let role = if input.byte() & 1 == 0 { Role::Client } else { Role::Server };
    let (raw, peer) = match role {
        Role::Client => harness.connect_client(),
        Role::Server => harness.accept_peer(),
    };
    // The model expects a window that never changes its size.
    let mut config =
        ValkeyConfig { window_bytes: WINDOW, window_max_bytes: WINDOW, ..ValkeyConfig::default() };
    config.proto.max_peer_window = PEER_WINDOW_MAX;
    let entered = harness.runtime.enter();
    let stream = ValkeyStream::new(raw, role, &config).expect("a window");
    drop(entered);
    let mut run = Run { stream, peer, model: Model::new(role), written: 0 };
    harness.settle(&mut run);
    while run.model.ending == Ending::None && !run.model.is_disconnected() && !input.0.is_empty() {
        step(harness, &mut run, &mut input);
        harness.settle(&mut run);
    }
    // Data that arrived before the end of the connection can still be read.
    if run.model.ending != Ending::Unknown {
        while read(harness, &mut run, 100) {
            harness.settle(&mut run);
        }
    }
    run.peer.take_messages(&mut run.model);
    let Run { stream, peer, .. } = run;
    let entered = harness.runtime.enter();
    drop(stream);
    drop(entered);
    harness.fabric.progress();
    drop(peer);
    harness.until(|harness| harness.fabric.stats().links == 0);
    let stats = harness.fabric.stats();
    let receives = stats.memory.receive.in_use_blocks.iter().sum::<u64>();
    let sends = stats.memory.send.in_use_blocks.iter().sum::<u64>();
    assert_eq!((stats.in_flight, stats.receives_posted), (0, u64::from(RECEIVES)));
    assert_eq!(
        (receives - stats.receives_overdue, sends),
        (u64::from(RECEIVES), 0),
        "blocks in use"
    );
}

/// One connection.
struct Run {
    stream: ValkeyStream,
    peer: Peer,
    model: Model,
    /// The number of bytes that the application has written so far.
    written: usize,
}

fn step(harness: &Harness, run: &mut Run, input: &mut Input<'_>) {
    let (step, more) = input.step();
    let window = run.peer.theirs;
    match step {
        0 => {
            let Some(window) = window else { return };
            let at = run.model.due_at();
            let payload =
                vec![input.byte(); usize::from(input.byte()).min((window.length - at) as usize)];
            let imm = payload.len() as u32;
            run.model.wrote(at, &payload, Some(imm));
            run.peer.write(window, at, &payload, Some(imm));
        }
        1 => {
            let Some(window) = window else { return };
            let (at, payload) = (u32::from(input.byte()), vec![more; input.byte().into()]);
            let imm = if more & 1 == 0 { u32::from(input.byte()) } else { input.word() };
            run.model.wrote(at, &payload, Some(imm));
            run.peer.write(window, at, &payload, Some(imm));
        }
        2 => {
            let Some(mut window) = window else { return };
            if more & 1 == 1 {
                window.rkey ^= u32::from(input.byte()) << 8;
            }
            let (at, payload) = (u32::from(input.byte()), vec![more; input.byte().into()]);
            if window.rkey == run.peer.theirs.expect("checked above").rkey {
                run.model.wrote(at, &payload, None);
            } else {
                run.model.ending = Ending::Unknown; // the device refuses the write
            }
            run.peer.write(window, at, &payload, None);
        }
        3 => {
            let (at, length) = (usize::from(input.byte()), usize::from(input.byte()) + 1);
            let memory = run.peer.memory(at, length);
            run.model.message(&Message::RegisterXferMemory(memory).encode(), true);
            run.peer.send(&Message::RegisterXferMemory(memory).encode());
        }
        4 => {
            let (length, addr) = (input.word(), u64::from(input.word()) << (more * 4));
            let memory = Registration { addr, length, rkey: input.word() };
            run.model.message(&Message::RegisterXferMemory(memory).encode(), false);
            run.peer.send(&Message::RegisterXferMemory(memory).encode());
        }
        5 => {
            let (select, features) = (input.byte().into(), input.byte().into());
            let message = match more % 3 {
                0 => Message::GetServerFeature { select, features },
                1 => Message::SetClientFeature { select, features },
                _ => Message::Keepalive,
            };
            run.model.message(&message.encode(), false);
            run.peer.send(&message.encode());
        }
        6 => {
            let length = usize::from(input.byte()).min(60);
            let message = input.take(length).to_vec();
            run.model.message(&message, false);
            run.peer.send(&message);
        }
        7 => {
            run.model.violation();
            run.peer.post(Operation::SendImm(more.into()), &[0; 32]);
        }
        8 | 9 => drop(read(harness, run, usize::from(input.byte()) + 1)),
        10 | 11 => write(harness, run, usize::from(input.byte()) + 1),
        12 => harness.pass(Duration::from_millis(u64::from(input.byte()) * 100)),
        13 => {
            run.model.ending = Ending::Unknown;
            match more & 1 {
                0 => run.peer.disconnect(),
                _ => run.peer.break_queue_pair(&harness.world),
            }
        }
        14 => {
            let entered = harness.runtime.enter();
            let _ =
                Pin::new(&mut run.stream).poll_shutdown(&mut Context::from_waker(Waker::noop()));
            drop(entered);
            run.model.ending = Ending::Unknown;
        }
        _ => {}
    }
}

/// Reads up to `count` bytes as the application, and returns whether there were some.
fn read(harness: &Harness, run: &mut Run, count: usize) -> bool {
    let mut bytes = vec![0; count];
    let mut out = ReadBuf::new(&mut bytes);
    let entered = harness.runtime.enter();
    let polled =
        Pin::new(&mut run.stream).poll_read(&mut Context::from_waker(Waker::noop()), &mut out);
    drop(entered);
    let got = out.filled();
    run.model.drive();
    let expected = run.model.read(count);
    assert_eq!(got, expected);
    match polled {
        Poll::Pending => {
            assert!(got.is_empty() && run.model.ending == Ending::None, "{:?}", run.model.ending);
        }
        Poll::Ready(Ok(())) => {
            assert!(!got.is_empty(), "the stream ended although the peer did not end it");
        }
        Poll::Ready(Err(_)) => assert_eq!(run.model.ending, Ending::Broken),
    }
    !got.is_empty()
}

/// Writes up to `count` bytes as the application.
fn write(harness: &Harness, run: &mut Run, count: usize) {
    let bytes: Vec<u8> =
        (run.written..run.written + count).map(|at| (at ^ at >> 8) as u8).collect();
    let kept = Arc::new(NoWake);
    let waker = Waker::from(Arc::clone(&kept));
    let entered = harness.runtime.enter();
    let polled = Pin::new(&mut run.stream).poll_write(&mut Context::from_waker(&waker), &bytes);
    drop((entered, waker));
    // While there is room, a write may leave the data that has arrived unhandled. A stream that has
    // handled the data has kept the waker, or the write has failed.
    if Arc::strong_count(&kept) > 1 || matches!(polled, Poll::Ready(Err(_))) {
        run.model.drive();
    } else {
        assert!(
            run.model.writable() >= count,
            "a write that leaves arrived data unhandled must have room"
        );
    }
    match polled {
        Poll::Pending => assert_eq!((run.model.writable(), run.model.ending), (0, Ending::None)),
        Poll::Ready(Err(_)) => assert_eq!(run.model.ending, Ending::Broken),
        Poll::Ready(Ok(taken)) => {
            assert_eq!((taken, run.model.ending), (count.min(run.model.writable()), Ending::None));
            run.model.application_wrote(&bytes[..taken]);
            run.written += taken;
        }
    }
}

/// A waker that does nothing. Its reference count tells whether someone keeps it.
struct NoWake;

impl Wake for NoWake {
    fn wake(self: Arc<Self>) {}
}

/// Everything that outlives a run, because building a fabric takes longer than the run itself.
struct Harness {
    foreign_peers: ForeignPeers,
    listener: Listener,
    fabric: Fabric,
    peers: cm::Listener,
    domain: ProtectionDomain,
    verbs: Verbs,
    /// The runtime, whose clock is paused.
    runtime: Runtime,
    world: World,
}

impl Harness {
    fn new() -> Self {
        let world = World::new();
        world.add_device(DeviceSpec::new("ours", [10, 0, 0, 1].into()));
        world.add_device(DeviceSpec::new("peers", [10, 0, 0, 2].into()));
        let verbs = world.verbs();
        let config = Config {
            memory: PoolConfig {
                memory_pool_max: 8 << 20,
                receive_reserve: 4 << 20,
                thread_cache_blocks: 16,
                ..PoolConfig::default()
            },
            busy_poll_us: 0,
            recv_queue_depth: RECEIVES,
            recv_buffer_size: 256,
            max_message_bytes: 1000,
            cq_size: 512,
            close_timeout: HOUR,
            access_back_off: Duration::ZERO, // peers that violate the protocol reconnect at once
            ..Config::default()
        };
        let builder = Fabric::builder(&verbs).rdma(Rdma::Require).device("ours").config(config);
        let fabric = builder.build().expect("a fabric");
        let listener = fabric.listen(([10, 0, 0, 1], 0).into()).expect("listen");
        let peers = cm::Listener::bind(&verbs, ([10, 0, 0, 2], 0).into(), 8).expect("listen");
        let context = verbs.device("peers").and_then(|device| device.open()).expect("a device");
        let domain = context.allocate_protection_domain().expect("a domain");
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        Self {
            foreign_peers: listener.foreign_peers(),
            listener,
            fabric,
            peers,
            domain,
            verbs,
            runtime,
            world,
        }
    }

    fn until(&self, mut done: impl FnMut(&Self) -> bool) {
        let passed = (0..PASSES).any(|_| {
            self.fabric.progress();
            done(self)
        });
        assert!(passed, "timeout after {PASSES} passes: {:?}", self.fabric.stats());
    }

    /// Drives the fabric until a future is ready, and returns its output.
    fn ready<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let output = (0..PASSES).find_map(|_| {
            self.fabric.progress();
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(output) => Some(output),
                Poll::Pending => None,
            }
        });
        output.unwrap_or_else(|| panic!("timeout after {PASSES} passes: {:?}", self.fabric.stats()))
    }

    /// Connects the peer to our server.
    fn accept_peer(&self) -> (RawConnection, Peer) {
        let local = Some(([10, 0, 0, 2], 0).into());
        let id = cm::resolve(&self.verbs, local, self.listener.local_addr(), TEST_TIMEOUT)
            .expect("a route");
        let peer = Peer::new(&self.domain, id);
        peer.connect();
        let request = self.ready(self.foreign_peers.next()).expect("a request");
        let mut accepting = pin!(self.foreign_peers.accept(request));
        self.until(|_| peer.is_answered());
        peer.establish();
        let raw = self.ready(accepting.as_mut()).expect("a connection");
        (raw, peer)
    }

    /// Connects our client to the peer.
    fn connect_client(&self) -> (RawConnection, Peer) {
        let at = self.peers.id().local_addr().expect("listening address");
        let options = ConnectOptions::new().local(([10, 0, 0, 1], 0).into());
        let mut calling = pin!(self.fabric.connect_raw(at, &options));
        let mut peer = None;
        self.until(|harness| {
            let request = harness.peers.next_request(Duration::ZERO).expect("listener is up");
            peer = request.map(|request| Peer::new(&harness.domain, request.id));
            peer.is_some()
        });
        let peer = peer.expect("set above");
        peer.accept();
        let raw = self.ready(calling.as_mut()).expect("a connection");
        (raw, peer)
    }

    /// Lets the fabric make a pass, and the peer take what the stream has sent. Checks that the
    /// connection has not failed although the peer has kept to the protocol.
    fn settle(&self, run: &mut Run) {
        self.fabric.progress();
        run.peer.take_messages(&mut run.model);
        if run.model.ending == Ending::None && run.model.is_quiet() {
            assert!(run.stream.raw().failure().is_none(), "{:?}", run.stream.raw().failure());
        }
    }

    fn pass(&self, time: Duration) {
        self.runtime.block_on(tokio::time::advance(time));
    }
}

/// Returns the range of a window as a peer computes it, without checks.
fn slice(window: Registration, at: u32, len: usize) -> RemoteSlice {
    RemoteSlice { addr: window.addr.wrapping_add(at.into()), len: len as u64, rkey: window.rkey }
}
