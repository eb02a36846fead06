//! A link whose peer acts as the input bytes say, through plain verbs on the fake provider. The
//! peer sends frames with any immediate data, control messages, writes with a notice, and invalid
//! credits. After every step the link must have done what the rules of
//! `docs/book/src/protocol/links.md` require (`model.rs`): delivered, answered, returned credits,
//! or failed.
//!
//! ```text
//!   a step     low 3 bits of a byte; its other bits and the following bytes are arguments
//!   0 1        a frame: channel, more, whether its credit is valid; length
//!   2          a well-formed control message: kind, value
//!   3          any immediate data and any payload
//!   4          the application receives a message
//!   5          the application sends a message: channel; length
//!   6          a write with notice
//!   7          the application closes the link, or the peer sends a frame without immediate data
//! ```

mod model;

use std::cell::RefCell;
use std::time::Duration;

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{Features, Frame, GrantToken, Hello, Program, Rights, Version};
use ferrite_fabric::{Config, Error, Fabric, Link, Listener, Rdma, Region};
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{
    Access, CmEventKind, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation,
    ProtectionDomain, QueuePair, QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State,
    Status, Verbs, WorkCompletion, cm,
};

use model::{Arrived, Model};

/// The limits of one side. They are low, so that inputs reach them.
struct Limits {
    segment: usize,
    window: u16,
    channels: u16,
    message: usize,
}

const OURS: Limits = Limits { segment: 256, window: 4, channels: 3, message: 1000 };
const PEERS: Limits = Limits { segment: 256, window: 3, channels: 2, message: 512 };

const TEST_TIMEOUT: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3600);
/// Number of receives of the link's device, and of its peer.
const RECEIVES: u32 = 32;
/// Maximum number of calls of `Fabric::progress` until everything has happened. No step has to
/// wait.
const PASSES: usize = 100;

/// Checks that a link follows the protocol whatever its peer does, and fails exactly when the peer
/// violates the protocol.
pub fn link(bytes: &[u8]) {
    thread_local! {
        static HARNESS: RefCell<Option<Harness>> = const { RefCell::new(None) };
    }
    HARNESS.with_borrow_mut(|harness| run(harness.get_or_insert_with(Harness::new), bytes));
}

fn run(harness: &mut Harness, bytes: &[u8]) {
    let (link, mut peer) = harness.connect();
    let grant = harness.region.grant(&link);
    let mut model = Model::default();
    let mut input = bytes.iter().copied();
    while model.down.is_none()
        && let Some(byte) = input.next()
    {
        step(byte, &mut input, &link, &mut peer, &grant, &mut model);
        harness.fabric.progress();
        peer.take_frames(&mut model);
        model.check_settled();
        let failure = link.failure().map(|error| error.kind());
        assert_eq!(failure, model.down, "{:?}", link.failure());
    }
    if model.down.is_none() {
        let stats = harness.fabric.stats();
        let in_use = stats.memory.receive.in_use_blocks.iter().sum::<u64>();
        assert_eq!(
            in_use,
            stats.receives_posted + model.kept_buffers() as u64,
            "receive buffers in use"
        );
    }
    loop {
        let taken = model.take();
        let more = matches!(taken, Ok(Some(_)));
        assert_eq!(received(&link), taken);
        if !more {
            break;
        }
    }
    link.abort();
    drop(link);
    harness.until(|harness| harness.fabric.stats().links == 0);
    drop(peer);
    harness.fabric.progress();
    let stats = harness.fabric.stats();
    assert_eq!((stats.in_flight, stats.receives_posted), (0, u64::from(RECEIVES)));
}

fn step(
    byte: u8,
    input: &mut impl Iterator<Item = u8>,
    link: &Link,
    peer: &mut Peer,
    grant: &GrantToken,
    model: &mut Model,
) {
    let mut next = || input.next().unwrap_or_default();
    match byte & 7 {
        0 | 1 => {
            let channel = u16::from(byte >> 3 & 3);
            let wrong = if byte >> 6 == 3 { u16::from(next()) << 8 | u16::from(next()) } else { 0 };
            let consumed = model.count().wrapping_sub(wrong);
            let frame = Frame { control: false, more: byte & 32 != 0, channel, consumed };
            let payload = vec![byte; usize::from(next()) + usize::from(byte & 1)];
            model.frame(frame.to_imm(), &payload);
            peer.post(Operation::SendImm(frame.to_imm()), &payload);
        }
        2 => {
            let mut payload = [0; 16];
            payload[0] = byte >> 3 & 7;
            payload[8] = next();
            let frame = Frame { control: true, more: false, channel: 0, consumed: model.count() };
            model.frame(frame.to_imm(), &payload);
            peer.post(Operation::SendImm(frame.to_imm()), &payload);
        }
        3 => {
            let imm = u32::from_le_bytes([next(), next(), next(), next()]);
            let payload: Vec<_> = (0..byte >> 3).map(|_| next()).collect();
            model.frame(imm, &payload);
            peer.post(Operation::SendImm(imm), &payload);
        }
        4 => assert_eq!(received(link), model.take()),
        5 => {
            let channel = u16::from(byte >> 3 & 3);
            let payload = vec![byte; usize::from(next()) * usize::from(1 + (byte >> 5))];
            let posted = link.post_bytes(channel, &payload).map_err(|error| error.kind());
            model.posted(channel, &payload, posted);
        }
        6 => {
            let remote = RemoteSlice { addr: grant.addr, len: 0, rkey: grant.rkey };
            model.notice(u32::from(byte));
            peer.post(Operation::WriteImm(remote, u32::from(byte)), &[]);
        }
        _ if byte & 8 != 0 => {
            model.violation();
            peer.post(Operation::Send, &[]);
        }
        _ => {
            drop(link.close()); // the close continues by itself
            model.closing = true;
        }
    }
}

fn received(link: &Link) -> Result<Option<Arrived>, ferrite_fabric::ErrorKind> {
    let message = link.try_recv().map_err(|error: Error| error.kind())?;
    Ok(message.map(|message| match message.notice() {
        Some(imm) => Arrived::Notice(imm),
        None => Arrived::Message { channel: message.channel(), bytes: message.to_vec() },
    }))
}

/// Everything that outlives a run, because building a fabric takes longer than the run itself.
struct Harness {
    listener: Listener,
    fabric: Fabric,
    region: Region,
    domain: ProtectionDomain,
    verbs: Verbs,
    _world: World,
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
            send_queue_depth: 16,
            recv_queue_depth: RECEIVES,
            recv_buffer_size: OURS.segment as u32,
            window: OURS.window,
            channels: OURS.channels,
            max_message_bytes: OURS.message as u64,
            send_queue_messages: 6,
            send_queue_bytes: 2000,
            cq_size: 256,
            keepalive: HOUR,
            close_timeout: HOUR,
            access_back_off: Duration::ZERO, // peers that violate the protocol reconnect at once
            ..Config::default()
        };
        let fabric = Fabric::builder(&verbs)
            .rdma(Rdma::Require)
            .device("ours")
            .config(config)
            .build()
            .expect("a fabric");
        let listener = fabric.listen(([10, 0, 0, 1], 0).into()).expect("listen");
        let buf = fabric.buffer(64).expect("a buffer");
        let region = fabric.register_memory("ours", buf, Rights::WRITE).map_err(|(_, error)| error);
        let context = verbs.device("peers").and_then(|device| device.open()).expect("a device");
        let domain = context.allocate_protection_domain().expect("a domain");
        Self { listener, fabric, region: region.expect("a region"), domain, verbs, _world: world }
    }

    fn until(&self, done: impl Fn(&Self) -> bool) {
        let passed = (0..PASSES).any(|_| {
            self.fabric.progress();
            done(self)
        });
        assert!(passed, "timeout after {PASSES} passes: {:?}", self.fabric.stats());
    }

    /// Connects the peer, and returns both ends.
    fn connect(&mut self) -> (Link, Peer) {
        let local = Some(([10, 0, 0, 2], 0).into());
        let id = cm::resolve(&self.verbs, local, self.listener.local_addr(), TEST_TIMEOUT)
            .expect("a route");
        let peer = Peer::new(&self.domain, id);
        let hello = Hello {
            version: Version::CURRENT,
            features: Features::WRITE_IMM | Features::ONE_SIDED,
            segment_bytes: PEERS.segment as u32,
            window: PEERS.window,
            channels: PEERS.channels,
            max_message_bytes: PEERS.message as u64,
            instance: 1,
            session: 0,
            mtu: 0,
            program: Program::UNKNOWN,
        };
        let params = ConnectParams {
            qp_num: peer.qp.number(),
            srq: false,
            private_data: &hello.encode(),
            reads_in: 1,
            reads_out: 1,
            retries: 7,
            rnr_retries: 7,
        };
        peer.id.connect(&params).expect("connect");
        self.until(|_| {
            let event = peer.id.channel().next_event().expect("a channel");
            event.is_some_and(|event| event.kind == CmEventKind::CONNECT_RESPONSE)
        });
        peer.bring_up();
        let link = (0..PASSES).find_map(|_| {
            self.fabric.progress();
            self.listener.try_accept().expect("listener is up")
        });
        (link.expect("a link"), peer)
    }
}

/// The peer, which uses plain verbs.
struct Peer {
    qp: QueuePair,
    cq: CompletionQueue,
    /// Memory for every receive, and for one payload to send.
    region: MemoryRegion,
    id: CmId,
}

impl Peer {
    fn new(domain: &ProtectionDomain, id: CmId) -> Self {
        let cq = domain.context().create_completion_queue(4 * RECEIVES, None, 0).expect("a queue");
        let config = QueuePairConfig {
            max_send_wr: RECEIVES,
            max_recv_wr: RECEIVES,
            ..QueuePairConfig::new(&cq)
        };
        let qp = domain.create_queue_pair(&config).expect("a queue pair");
        let room = (RECEIVES as usize + 1) * PEERS.segment;
        let region = domain.allocate(room, Access::LOCAL).expect("memory");
        let init = id.queue_pair_attributes(State::INIT).expect("attributes");
        qp.modify(&init.access(Access::LOCAL)).expect("INIT");
        let peer = Self { qp, cq, region, id };
        (0..RECEIVES as usize).for_each(|place| peer.receive(place));
        peer
    }

    fn bring_up(&self) {
        for state in [State::READY_TO_RECEIVE, State::READY_TO_SEND] {
            let attributes = self.id.queue_pair_attributes(state).expect("attributes");
            self.qp.modify(&attributes.access(Access::LOCAL)).expect("a state");
        }
        self.id.establish().expect("establish");
    }

    fn receive(&self, place: usize) {
        let piece = [self.region.sge(place * PEERS.segment..(place + 1) * PEERS.segment)];
        self.qp.post_recv(&[RecvRequest::new(place as u64, &piece)]).expect("room in the queue");
    }

    fn post(&mut self, operation: Operation, payload: &[u8]) {
        let at = RECEIVES as usize * PEERS.segment;
        self.region.write(at, payload);
        let piece = [self.region.sge(at..at + payload.len())];
        let local = if payload.is_empty() { &[] } else { &piece[..] };
        let request = SendRequest::new(u64::MAX, operation, local).signaled();
        self.qp.post_send(&[request]).map_err(|refused| refused.error).expect("room in the queue");
    }

    /// Takes the frames that the link has sent.
    fn take_frames(&self, model: &mut Model) {
        let mut out = [WorkCompletion::default(); 16];
        loop {
            let taken = self.cq.poll(&mut out).expect("a queue");
            for wc in &out[..taken] {
                if wc.status() == Status::SUCCESS && wc.wr_id() != u64::MAX {
                    let place = wc.wr_id() as usize;
                    let payload = self.region.to_vec(place * PEERS.segment, wc.byte_len() as usize);
                    model.frame_from_link(wc.imm().expect("a frame"), &payload);
                    self.receive(place);
                }
            }
            if taken == 0 {
                return;
            }
        }
    }
}
