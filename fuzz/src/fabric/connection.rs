//! A link over TCP to a real fabric on this host's loopback. The peer sends what the input bytes
//! say: valid and invalid TCP frames of all kinds, greetings, or raw bytes. The fabric must not
//! panic or hang, and must itself send only TCP frames. If the link fails, the error must say that
//! the peer violated the protocol, that the link was lost, or that it was closed. At the end of a
//! run, all pending operations must complete, and all memory must be returned. Another link must
//! still work then.
//!
//! This check does not cover how a link handles frames, because that is the same as over RDMA
//! (`link.rs`).
//!
//! ```text
//!   first byte  even: a valid greeting comes first; odd: all bytes are sent as they are
//!   a step      low 4 bits of a byte; its other bits and the following bytes are arguments
//!   0           raw bytes: their number; the bytes
//!   1 to 13     a TCP frame of that kind: fields; then as much payload as it announces, or less
//!   14          the application receives, sends, reads, writes or closes
//!   15          the peer stops sending, or stops reading
//! ```

use std::cell::RefCell;
use std::future::Future;
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{
    Features, Frame, GREETING_BYTES, GrantToken, Greeting, Hello, Program, Rights,
    TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind, Version,
};
use ferrite_fabric::{Config, ErrorKind, Fabric, Link, Listener, Rdma, Region};

const HOUR: Duration = Duration::from_secs(3600);
/// The maximum time to wait. Only the kernel takes time here.
const TEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest frame over TCP, unless `segment_bytes` is larger.
const FRAME_BYTES: usize = 64 << 10;
const REGION_BYTES: usize = 1000;

/// Checks that the fabric and its other links continue, whatever arrives over a connection.
pub fn connection(bytes: &[u8]) {
    if cfg!(miri) {
        return; // Miri has no network
    }
    thread_local! {
        static HARNESS: RefCell<Option<Harness>> = const { RefCell::new(None) };
    }
    HARNESS.with_borrow_mut(|harness| harness.get_or_insert_with(Harness::new).run(bytes));
}

/// Everything that outlives a run.
struct Harness {
    fabric: Fabric,
    listener: Listener,
    region: Region,
    /// Both ends of a link that the run must not affect.
    bystanders: [Link; 2],
    idle: Counts,
}

/// The number of links, and of send and receive buffers in use.
type Counts = (u64, u64, u64);

/// A pending operation of the application.
type Waiting = (Of, Pin<Box<dyn Future<Output = ()>>>);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Message,
    Operation,
}

impl Harness {
    fn new() -> Self {
        let config = Config {
            memory: PoolConfig {
                memory_pool_max: 64 << 20,
                receive_reserve: 32 << 20,
                ..PoolConfig::default()
            },
            busy_poll_us: 0,
            recv_buffer_size: 256,
            window: 4,
            channels: 3,
            max_message_bytes: 100_000,
            send_queue_messages: 6,
            keepalive: HOUR,
            close_timeout: HOUR,
            ..Config::default()
        };
        let fabric = Fabric::system().rdma(Rdma::Forbid).config(config).build().expect("a fabric");
        let mut listener = fabric.listen((Ipv4Addr::LOCALHOST, 0).into()).expect("listen");
        let buf = fabric.buffer(REGION_BYTES).expect("a buffer");
        let (there, here) = fabric.block_on(async {
            let there = fabric.connect(listener.local_addr()).await;
            (there.expect("connect"), listener.accept().await.expect("a link"))
        });
        let region = here.register_memory(buf, Rights::READ | Rights::WRITE);
        let region = region.map_err(|(_, error)| error).expect("a region");
        let mut harness =
            Self { fabric, listener, region, bystanders: [there, here], idle: (0, 0, 0) };
        harness.check_other_link();
        harness.idle = harness.counts();
        harness
    }

    fn counts(&self) -> Counts {
        let stats = self.fabric.stats();
        let in_use = |blocks: &[u64]| blocks.iter().sum::<u64>();
        let memory = &stats.memory;
        (stats.links, in_use(&memory.send.in_use_blocks), in_use(&memory.receive.in_use_blocks))
    }

    fn run(&mut self, bytes: &[u8]) {
        let Some((first, bytes)) = bytes.split_first() else { return };
        let mut peer = Peer::new(&self.listener);
        let mut waiting = Vec::new();
        let link = if first & 1 == 0 {
            let link = self.greet(&mut peer);
            self.tcp_frames(&link, &mut peer, bytes, &mut waiting);
            Some(link)
        } else {
            peer.send(&self.fabric, bytes);
            self.fabric.progress();
            None
        };
        match &link {
            Some(link) if bytes.len().is_multiple_of(2) => link.abort(),
            _ => peer.hang_up(),
        }
        drop(link);
        self.until("the end of all operations and links of the run", |harness| {
            // The greeting may have been valid, so there may be a link to accept.
            drop(harness.listener.try_accept().expect("listener is up"));
            waiting.retain_mut(|(_, future)| {
                future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
            });
            waiting.is_empty() && harness.counts() == harness.idle
        });
        self.check_other_link();
    }

    /// Sends a valid greeting as the peer, and returns the link.
    fn greet(&mut self, peer: &mut Peer) -> Link {
        let hello = Hello {
            version: Version::CURRENT,
            features: Features::WRITE_IMM | Features::ONE_SIDED | Features::MOVE,
            segment_bytes: 256,
            window: 3,
            channels: 2,
            max_message_bytes: 100_000,
            instance: 1,
            session: 1,
            mtu: 0,
            program: Program::UNKNOWN,
        };
        peer.send(&self.fabric, &Greeting { hello, resume: None }.encode());
        let mut link = None;
        self.until("a link", |harness| {
            link = harness.listener.try_accept().expect("listener is up");
            link.is_some()
        });
        self.until("a greeting", |_| {
            peer.read();
            peer.unread.len() >= GREETING_BYTES
        });
        let theirs: Vec<_> = peer.unread.drain(..GREETING_BYTES).collect();
        assert!(Greeting::decode(&theirs).is_ok_and(|theirs| theirs.resume.is_none()));
        link.expect("a link")
    }

    fn tcp_frames(&self, link: &Link, peer: &mut Peer, bytes: &[u8], waiting: &mut Vec<Waiting>) {
        let granted = self.region.grant(link).grant;
        let mut input = bytes.iter().copied();
        while let Some(byte) = input.next() {
            match byte & 15 {
                0 => {
                    let raw: Vec<_> = input.by_ref().take(usize::from(byte >> 4)).collect();
                    peer.send(&self.fabric, &raw);
                }
                14 => self.application(link, byte >> 4, &mut input, waiting),
                15 => peer.stop_direction(byte),
                _ => {
                    let tcp_frame = peer.tcp_frame(byte, granted, &mut input);
                    peer.send(&self.fabric, &tcp_frame);
                }
            }
            self.fabric.progress();
            peer.take_frames();
            if let Some(error) = link.failure() {
                let fits = [ErrorKind::Protocol, ErrorKind::LinkDown, ErrorKind::Closed];
                assert!(fits.contains(&error.kind()), "{error}");
                return;
            }
        }
    }

    fn application(
        &self,
        link: &Link,
        what: u8,
        input: &mut impl Iterator<Item = u8>,
        waiting: &mut Vec<Waiting>,
    ) {
        let mut next = || input.next().unwrap_or_default();
        let token = GrantToken {
            grant: 5,
            addr: 0,
            len: 1 << 20,
            rkey: 0,
            rights: Rights::READ | Rights::WRITE,
        };
        let (len, offset) = (usize::from(next()), u64::from(next()));
        let buf = |len| self.fabric.buffer(len).expect("memory");
        match what & 7 {
            0 | 1 => drop(link.try_recv()),
            2 => drop(link.post_bytes(u16::from(next() & 1), &vec![what; len << 8])),
            3 => waiting.push(sent(link.send(0, buf(len << 4)))),
            4 => waiting.extend(link.rdma_read(&token, offset, buf(len)).ok().map(operation)),
            5 => waiting.extend(link.rdma_write(&token, offset, buf(len)).ok().map(operation)),
            6 => {
                waiting
                    .extend(link.rdma_write_imm(&token, offset, buf(len), 9).ok().map(operation));
            }
            _ => waiting.push(sent(link.close())),
        }
    }

    /// Checks that a message passes on the other link.
    fn check_other_link(&mut self) {
        let [there, here] = &self.bystanders;
        there.post_bytes(1, b"all is well").expect("room in the queue");
        let mut taken = None;
        let here = here.clone();
        self.until("a message on another link", |_| {
            taken = here.try_recv().expect("link is up");
            taken.is_some()
        });
        assert_eq!(taken.expect("a message").to_vec(), b"all is well");
    }

    fn until(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let begun = Instant::now();
        while !condition(self) {
            assert!(
                begun.elapsed() < TEST_TIMEOUT,
                "timeout waiting for {what}: {:?}",
                self.fabric.stats()
            );
            self.fabric.progress();
        }
    }
}

fn operation<F: Future + 'static>(future: F) -> Waiting {
    (Of::Operation, Box::pin(async { drop(future.await) }))
}

/// Polls the future once, so that the operation begins.
fn sent<F: Future + 'static>(future: F) -> Waiting {
    let mut future = Box::pin(future);
    let begun = future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending();
    let rest = async move {
        if begun {
            drop(future.await);
        }
    };
    (Of::Message, Box::pin(rest))
}

/// The other end of the connection.
struct Peer {
    stream: TcpStream,
    unread: Vec<u8>,
    /// Number of received frames that need credits. The peer returns valid credits with this
    /// number.
    frames: u16,
    stopped_reading: bool,
}

impl Peer {
    fn new(listener: &Listener) -> Self {
        let stream = TcpStream::connect(listener.local_addr()).expect("connect");
        stream.set_nonblocking(true).expect("set nonblocking");
        // This frees the port at once. Otherwise, thousands of runs per second would use up the
        // ports.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO))
            .expect("set SO_LINGER");
        Self { stream, unread: Vec::new(), frames: 0, stopped_reading: false }
    }

    fn tcp_frame(&self, byte: u8, granted: u64, input: &mut impl Iterator<Item = u8>) -> Vec<u8> {
        let mut next = || input.next().unwrap_or_default();
        let fields = next();
        let mut control = None;
        let imm = match fields & 3 {
            0 => u32::from_le_bytes([next(), next(), next(), next()]),
            1 => {
                let mut message = [0; 16];
                (message[0], message[8]) = (next(), next());
                control = Some(message);
                Frame { control: true, more: false, channel: 0, consumed: self.frames }.to_imm()
            }
            _ => {
                let channel = u16::from(byte >> 4 & 3);
                Frame { control: false, more: byte & 64 != 0, channel, consumed: self.frames }
                    .to_imm()
            }
        };
        let len = match (control, fields >> 2 & 7) {
            (Some(message), _) => message.len(),
            (None, 0 | 1) => usize::from(next()),
            (None, 2) => usize::from(next()) << 5,
            (None, 3) => 40,
            (None, 4) => (FRAME_BYTES - 128) + usize::from(next()),
            (None, 5) => (2 << 20) - 128 + usize::from(next()),
            (None, 6) => usize::MAX >> 33,
            (None, _) => 0,
        };
        let grant = if fields & 32 == 0 { granted } else { u64::from(next()) };
        let offset =
            if fields & 64 == 0 { u64::from(next()) << 2 } else { u64::MAX - u64::from(next()) };
        let op = u32::from(next());
        let mut tcp_frame =
            TcpFrame { kind: TcpFrameKind::Frame, imm, len: len as u32, op, grant, offset }
                .encode();
        tcp_frame[0] = byte & 15;
        let follows = TcpFrame::decode(&tcp_frame).map_or(0, |tcp_frame| tcp_frame.follows());
        let here = if byte & 128 == 0 { follows } else { follows / 2 };
        let mut bytes = tcp_frame.to_vec();
        // The payload has this value in every byte, so that its MTU may be valid if the payload is
        // an address.
        bytes.resize(TCP_FRAME_HEADER_BYTES + here.min(3 << 20), byte >> 4 & 3);
        if let Some(message) = control.filter(|message| here >= message.len()) {
            bytes[TCP_FRAME_HEADER_BYTES..][..message.len()].copy_from_slice(&message);
        }
        bytes
    }

    /// Sends all bytes, unless the connection is closed or the fabric stops reading.
    fn send(&mut self, fabric: &Fabric, mut bytes: &[u8]) {
        let begun = Instant::now();
        while !bytes.is_empty() && begun.elapsed() < TEST_TIMEOUT / 4 {
            match self.stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    fabric.progress();
                    self.take_frames();
                }
                Err(_) => return,
            }
        }
    }

    fn read(&mut self) {
        let mut bytes = [0; 64 << 10];
        while let Ok(len @ 1..) = self.stream.read(&mut bytes) {
            self.unread.extend_from_slice(&bytes[..len]);
        }
    }

    /// Takes the data that the fabric has sent, which must be TCP frames.
    fn take_frames(&mut self) {
        if self.stopped_reading {
            return;
        }
        self.read();
        let mut rest = &self.unread[..];
        while let Some(head) = rest.first_chunk() {
            let tcp_frame = TcpFrame::decode(head).expect("a TCP frame");
            let follows = tcp_frame.follows();
            match tcp_frame.kind {
                TcpFrameKind::Frame => assert!(follows <= FRAME_BYTES, "{tcp_frame:?}"),
                TcpFrameKind::Data => assert!(follows <= REGION_BYTES, "{tcp_frame:?}"),
                TcpFrameKind::Write | TcpFrameKind::WriteImm => {
                    assert!(follows <= 255, "{tcp_frame:?}");
                }
                TcpFrameKind::Read
                | TcpFrameKind::Done
                | TcpFrameKind::Denied
                | TcpFrameKind::Withdraw => {}
                other => panic!("the fabric must not send {other:?}"),
            }
            let Some(after) = rest.get(TCP_FRAME_HEADER_BYTES + follows..) else { break };
            let is_data =
                tcp_frame.kind == TcpFrameKind::Frame && !Frame::from_imm(tcp_frame.imm).control;
            self.frames = self
                .frames
                .wrapping_add((is_data || tcp_frame.kind == TcpFrameKind::WriteImm).into());
            rest = after;
        }
        let taken = self.unread.len() - rest.len();
        self.unread.drain(..taken);
    }

    fn stop_direction(&mut self, byte: u8) {
        if byte & 16 == 0 {
            let _ = self.stream.shutdown(Shutdown::Write); // the connection may be closed already
        } else {
            self.stopped_reading = true;
        }
    }

    fn hang_up(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
