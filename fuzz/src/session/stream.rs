//! A stream of Valkey's protocol, in either role, through its driver and the fabric: its peer does
//! as the bytes say, by plain verbs on the fake provider. What the application reads must be what
//! the peer wrote, what it writes must be in the peer's memory and nowhere else, and the connection
//! ends exactly when the peer breaks a rule (`model.rs`). Whatever happened, nothing is left of it
//! in the end.
//!
//! ```text
//!   first byte  role
//!   a step      low 4 bits of a byte, the rest of it and the bytes that follow are its arguments
//!   0           the peer writes what is due next: how many bytes
//!   1           the peer writes anything: where; how many bytes; what it says of that
//!   2           the peer writes and does not tell: where; how many bytes
//!   3           the peer registers its memory: from where; how many bytes
//!   4           the peer registers anything: length; address and key
//!   5           the peer asks, tells, or says that it is alive
//!   6           a message of any bytes: how many; those
//!   7           a message with immediate data
//!   8 9         the application reads: how many bytes
//!   10 11       the application writes: how many bytes
//!   12          time passes
//!   13          the peer hangs up, or breaks off
//!   14          the application ends it
//! ```

mod model;
mod peer;

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
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

/// Of our own: small, so that it is used up often.
const WINDOW: u32 = 200;
/// The longest that a peer may announce.
const PEER_WINDOW_MAX: u32 = 1 << 16;
const TEST_TIMEOUT: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3600);
const RECEIVES: u32 = 64;
/// Passes of the fabric after which everything must have happened: nothing here takes time.
const PASSES: usize = 100;

/// Whatever a peer does, a stream keeps to the rules, and loses its peer exactly when that breaks
/// one.
pub fn valkey_stream(bytes: &[u8]) {
    thread_local! {
        static SCENE: RefCell<Option<Scene>> = const { RefCell::new(None) };
    }
    SCENE.with_borrow_mut(|scene| play(scene.get_or_insert_with(Scene::new), bytes));
}

fn play(scene: &mut Scene, bytes: &[u8]) {
    let mut input = Input(bytes);
    let role = if input.byte() & 1 == 0 { Role::Client } else { Role::Server };
    let (raw, peer) = match role {
        Role::Client => scene.call(),
        Role::Server => scene.answer(),
    };
    // The model is of a window that stays.
    let mut config =
        ValkeyConfig { window_bytes: WINDOW, window_max_bytes: WINDOW, ..ValkeyConfig::default() };
    config.proto.max_peer_window = PEER_WINDOW_MAX;
    let entered = scene.runtime.enter();
    let stream = ValkeyStream::new(raw, role, &config).expect("a window");
    drop(entered);
    let mut run = Run { stream, peer, model: Model::new(role), written: 0 };
    scene.settle(&mut run);
    while run.model.ending == Ending::None && !run.model.is_hung_up() && !input.0.is_empty() {
        step(scene, &mut run, &mut input);
        scene.settle(&mut run);
    }
    // What came before the end is there after it.
    if run.model.ending != Ending::Unknown {
        while read(scene, &mut run, 100) {
            scene.settle(&mut run);
        }
    }
    run.peer.hear(&mut run.model);
    let Run { stream, peer, .. } = run;
    let entered = scene.runtime.enter();
    drop(stream);
    drop(entered);
    scene.fabric.progress();
    drop(peer);
    scene.until(|scene| scene.fabric.stats().links == 0);
    let stats = scene.fabric.stats();
    let receives = stats.memory.receive.in_use_blocks.iter().sum::<u64>();
    let sends = stats.memory.send.in_use_blocks.iter().sum::<u64>();
    assert_eq!((stats.in_flight, stats.receives_posted), (0, u64::from(RECEIVES)));
    assert_eq!((receives - stats.receives_overdue, sends), (u64::from(RECEIVES), 0), "memory");
}

/// One connection.
struct Run {
    stream: ValkeyStream,
    peer: Peer,
    model: Model,
    /// Bytes of the application so far.
    written: usize,
}

fn step(scene: &Scene, run: &mut Run, input: &mut Input<'_>) {
    let (step, more) = input.step();
    let window = run.peer.theirs;
    match step {
        0 => {
            let Some(window) = window else { return };
            let at = run.model.due_at();
            let payload =
                vec![input.byte(); usize::from(input.byte()).min((window.length - at) as usize)];
            let told = payload.len() as u32;
            run.model.wrote(at, &payload, Some(told));
            run.peer.write(window, at, &payload, Some(told));
        }
        1 => {
            let Some(window) = window else { return };
            let (at, payload) = (u32::from(input.byte()), vec![more; input.byte().into()]);
            let told = if more & 1 == 0 { u32::from(input.byte()) } else { input.word() };
            run.model.wrote(at, &payload, Some(told));
            run.peer.write(window, at, &payload, Some(told));
        }
        2 => {
            let Some(mut window) = window else { return };
            if more & 1 == 1 {
                window.rkey ^= u32::from(input.byte()) << 8;
            }
            let (at, payload) = (u32::from(input.byte()), vec![more; input.byte().into()]);
            if window.rkey == run.peer.theirs.expect("as above").rkey {
                run.model.wrote(at, &payload, None);
            } else {
                run.model.ending = Ending::Unknown; // the device refuses it
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
        8 | 9 => drop(read(scene, run, usize::from(input.byte()) + 1)),
        10 | 11 => write(scene, run, usize::from(input.byte()) + 1),
        12 => scene.pass(Duration::from_millis(u64::from(input.byte()) * 100)),
        13 => {
            run.model.ending = Ending::Unknown;
            match more & 1 {
                0 => run.peer.hang_up(),
                _ => run.peer.break_off(&scene.world),
            }
        }
        14 => {
            let entered = scene.runtime.enter();
            let _ =
                Pin::new(&mut run.stream).poll_shutdown(&mut Context::from_waker(Waker::noop()));
            drop(entered);
            run.model.ending = Ending::Unknown;
        }
        _ => {}
    }
}

/// The application reads up to `count` bytes; whether there were some.
fn read(scene: &Scene, run: &mut Run, count: usize) -> bool {
    let mut bytes = vec![0; count];
    let mut out = ReadBuf::new(&mut bytes);
    let entered = scene.runtime.enter();
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
        Poll::Ready(Ok(())) => assert!(!got.is_empty(), "an end that nobody has made"),
        Poll::Ready(Err(_)) => assert_eq!(run.model.ending, Ending::Broken),
    }
    !got.is_empty()
}

/// The application writes `count` bytes, or as many as may go.
fn write(scene: &Scene, run: &mut Run, count: usize) {
    let bytes: Vec<u8> =
        (run.written..run.written + count).map(|at| (at ^ at >> 8) as u8).collect();
    let entered = scene.runtime.enter();
    let polled =
        Pin::new(&mut run.stream).poll_write(&mut Context::from_waker(Waker::noop()), &bytes);
    drop(entered);
    run.model.drive();
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

/// What outlives a run: making a fabric takes longer than all the rest.
struct Scene {
    foreign_peers: ForeignPeers,
    listener: Listener,
    fabric: Fabric,
    peers: cm::Listener,
    domain: ProtectionDomain,
    verbs: Verbs,
    /// Whose clock stands still.
    runtime: Runtime,
    world: World,
}

impl Scene {
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
            access_back_off: Duration::ZERO, // who breaks the rules comes back at once
            ..Config::default()
        };
        let builder = Fabric::builder(&verbs).rdma(Rdma::Require).device("ours").config(config);
        let fabric = builder.build().expect("a fabric");
        let listener = fabric.listen(([10, 0, 0, 1], 0).into()).expect("to listen");
        let peers = cm::Listener::bind(&verbs, ([10, 0, 0, 2], 0).into(), 8).expect("to listen");
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
        assert!(passed, "never: {:?}", self.fabric.stats());
    }

    /// What a future comes to while the fabric is driven.
    fn ready<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let output = (0..PASSES).find_map(|_| {
            self.fabric.progress();
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(output) => Some(output),
                Poll::Pending => None,
            }
        });
        output.unwrap_or_else(|| panic!("never: {:?}", self.fabric.stats()))
    }

    /// We are the server: the peer calls.
    fn answer(&self) -> (RawConnection, Peer) {
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

    /// We are the client: the peer answers.
    fn call(&self) -> (RawConnection, Peer) {
        let at = self.peers.id().local_addr().expect("it listens");
        let options = ConnectOptions::new().local(([10, 0, 0, 1], 0).into());
        let mut calling = pin!(self.fabric.connect_raw(at, &options));
        let mut peer = None;
        self.until(|scene| {
            let request = scene.peers.next_request(Duration::ZERO).expect("a listener");
            peer = request.map(|request| Peer::new(&scene.domain, request.id));
            peer.is_some()
        });
        let peer = peer.expect("as above");
        peer.accept();
        let raw = self.ready(calling.as_mut()).expect("a connection");
        (raw, peer)
    }

    /// Everything that is under way happens.
    fn settle(&self, run: &mut Run) {
        self.fabric.progress();
        run.peer.hear(&mut run.model);
        if run.model.ending == Ending::None && run.model.is_quiet() {
            assert!(run.stream.raw().failure().is_none(), "{:?}", run.stream.raw().failure());
        }
    }

    fn pass(&self, time: Duration) {
        self.runtime.block_on(tokio::time::advance(time));
    }
}

/// For who has an address only.
fn slice(window: Registration, at: u32, len: usize) -> RemoteSlice {
    RemoteSlice { addr: window.addr.wrapping_add(at.into()), len: len as u64, rkey: window.rkey }
}
