//! Admission over TCP. Connections that send nothing, too little or too much do not keep other
//! peers out. Also tests foreign peers, `Resume`, and links and listeners that run out of memory or
//! descriptors.
#![cfg(not(miri))] // Miri has no network

#[expect(dead_code, unused_imports, unused_macros, reason = "parts of the link suite")]
mod links;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{
    Features, GREETING_BYTES, Greeting, Hello, Resume, TcpFrame, TcpFrameKind,
};
use ferrite_fabric::{Config, ErrorKind, Fabric, ListenOptions, Listener, Rdma};
use ferrite_testkit::handshake::HELLO;
use futures_util::{FutureExt as _, join};
use links::pair::{drive, until};

/// Returns settings with few handshakes at a time and a long timeout.
fn few_handshakes() -> Config {
    Config { max_half_open: 4, connection_timeout: Duration::from_secs(20), ..Config::default() }
}

fn fabric(config: Config) -> Fabric {
    Fabric::system().rdma(Rdma::Forbid).config(config).build().expect("a fabric")
}

fn listen(fabric: &Fabric) -> Listener {
    fabric.listen("127.0.0.1:0".parse().expect("an address")).expect("listen")
}

/// Checks that an honest peer gets a link within 4 s, long before silent connections time out.
fn check_honest_peer_connects(fabric: &Fabric, listener: &mut Listener) {
    let client = self::fabric(Config::default());
    let begun = Instant::now();
    let connecting = client.connect(listener.local_addr());
    let (there, here) = drive(&[&client, fabric], async { join!(connecting, listener.accept()) });
    drop((there.expect("a link"), here.expect("a link")));
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

fn connect(fabric: &Fabric, to: SocketAddr, say: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(to).expect("a connection");
    socket.write_all(say).expect("write");
    fabric.progress();
    socket
}

/// A peer sends a byte of a frame now and then, and never the whole frame.
#[test]
fn frame_that_never_ends_ends_the_link() {
    let timeout = Duration::from_millis(50);
    let config = Config { keepalive: timeout, peer_timeout: timeout, ..Config::default() };
    let fabric = fabric(config);
    let mut listener = listen(&fabric);
    let greeting = Greeting { hello: HELLO, resume: None }.encode();
    let peer = connect(&fabric, listener.local_addr(), &greeting);
    let link = drive(&[&fabric], listener.accept()).expect("a link");
    let imm = ferrite_fabric::wire::Frame { control: false, more: false, channel: 0, consumed: 0 }
        .to_imm();
    let frame =
        TcpFrame { kind: TcpFrameKind::Frame, imm, len: 32 << 10, op: 0, grant: 0, offset: 0 };
    (&peer).write_all(&frame.encode()).expect("write");
    let begun = Instant::now();
    let mut sent = begun;
    until(&[&fabric], "the end of the link", || {
        if sent.elapsed() > timeout / 4 {
            let _ = (&peer).write(&[7]);
            sent = Instant::now();
        }
        link.failure().is_some()
    });
    assert!(begun.elapsed() > 8 * 2 * timeout, "{:?}", begun.elapsed());
    let error = link.failure().expect("a failure");
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error}");
}

/// A program with few descriptors. By default there would be 64 handshakes and 1,024 silent
/// connections.
#[test]
fn program_may_limit_unfinished_handshakes() {
    let fabric =
        fabric(Config { connection_timeout: Duration::from_secs(20), ..Config::default() });
    let mut listener = listen(&fabric);
    fabric.limit_unfinished_tcp(8);
    // All come from one source, which may use half of either limit.
    for say in [&b""[..], b"FRT"] {
        let before = fabric.stats().handshakes_displaced;
        let open: Vec<_> = (0..40).map(|_| connect(&fabric, listener.local_addr(), say)).collect();
        until(&[&fabric], "displaced connections", || {
            fabric.stats().handshakes_displaced >= before + 40 - 2
        });
        check_honest_peer_connects(&fabric, &mut listener);
        drop(open);
    }
}

#[test]
fn silent_connections_keep_nobody_out() {
    let fabric = fabric(few_handshakes());
    let mut listener = listen(&fabric);
    let held: Vec<_> = (0..200).map(|_| connect(&fabric, listener.local_addr(), b"")).collect();
    check_honest_peer_connects(&fabric, &mut listener);
    until(&[&fabric], "most connections were displaced", || {
        fabric.stats().handshakes_displaced >= 200 - 32
    });
    drop(held);
}

#[test]
fn half_a_hello_keeps_nobody_out() {
    let fabric = fabric(few_handshakes());
    let mut listener = listen(&fabric);
    let held: Vec<_> = (0..200).map(|_| connect(&fabric, listener.local_addr(), b"FRT")).collect();
    check_honest_peer_connects(&fabric, &mut listener);
    drop(held);
}

/// The listener hands a connection over as a foreign peer at the first byte that cannot belong to a
/// hello.
#[test]
fn hands_over_clients_at_their_first_foreign_byte() {
    let fabric = fabric(few_handshakes());
    let listener = listen(&fabric);
    let foreign_peers = listener.foreign_tcp_peers();
    // There are more connections than handshakes are allowed at a time.
    let held: Vec<_> = (0..20).map(|_| connect(&fabric, listener.local_addr(), b"*")).collect();
    for _ in &held {
        assert_eq!(drive(&[&fabric], foreign_peers.next()).expect("a client").heard, b"*");
    }
    let mut unclear = connect(&fabric, listener.local_addr(), b"FR");
    until(&[&fabric], "the bytes are read", || fabric.progress() == 0);
    assert!(foreign_peers.next().now_or_never().is_none(), "the bytes may begin a hello");
    unclear.write_all(b"E").expect("write");
    assert_eq!(drive(&[&fabric], foreign_peers.next()).expect("a client").heard, b"FRE");
}

/// When one source has too many silent connections, the listener hands the oldest of them over as
/// foreign peers. They may be clients of a connection pool that send only later.
#[test]
fn hands_over_silent_clients_when_many_wait() {
    let fabric = fabric(few_handshakes());
    let listener = listen(&fabric);
    let foreign_peers = listener.foreign_tcp_peers();
    let held: Vec<_> = (0..100).map(|_| connect(&fabric, listener.local_addr(), b"")).collect();
    let mut taken = Vec::new();
    until(&[&fabric], "connections beyond the limit of a source are handed over", || {
        while let Some(Ok(foreign_peer)) = foreign_peers.next().now_or_never() {
            taken.push(foreign_peer);
        }
        taken.len() >= held.len() - 32
    });
    assert!(taken.iter().all(|foreign_peer| foreign_peer.heard.is_empty()));
    let firsts: Vec<_> =
        held.iter().take(taken.len()).map(|socket| socket.local_addr().ok()).collect();
    let peers: Vec<_> = taken.iter().map(|foreign_peer| Some(foreign_peer.peer)).collect();
    assert_eq!(peers, firsts, "the oldest must come first, and none may be lost");
}

/// Both sides support MOVE, but RDMA has not carried the link: a `Resume` then violates the
/// protocol (docs/book/src/protocol/links.md).
#[test]
fn rejects_a_resume_without_a_move() {
    let fabric = fabric(Config::default());
    let how = ListenOptions::new().rdma(Rdma::Prefer);
    let mut listener =
        fabric.listen_with("127.0.0.1:0".parse().expect("an address"), &how).expect("listen");
    let hello = Hello { features: Features::MOVE, session: 9, ..HELLO };
    let mut peer =
        connect(&fabric, listener.local_addr(), &Greeting { hello, resume: None }.encode());
    let link = drive(&[&fabric], listener.accept()).expect("a link");
    let mut theirs = [0; GREETING_BYTES];
    peer.read_exact(&mut theirs).expect("a greeting");
    let theirs = Greeting::decode(&theirs).expect("a greeting");
    assert!(theirs.hello.features.contains(Features::MOVE), "{theirs:?}");
    let resume =
        TcpFrame { kind: TcpFrameKind::Resume, imm: 0, len: 0, op: 0, grant: 0, offset: 0 };
    peer.write_all(&resume.encode().repeat(1000)).expect("write");
    let error = drive(&[&fabric], link.recv()).expect_err("the link must fail");
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    let fallbacks: u64 = fabric.stats().fallbacks.iter().map(|(_, count)| count).sum();
    assert_eq!(fallbacks, 0);
    // Nor can a greeting resume this link, because RDMA has never carried it.
    let resume = Some(Resume { yours: theirs.hello.session, mine: 9, received: 0 });
    let _again = connect(&fabric, listener.local_addr(), &Greeting { hello, resume }.encode());
    until(&[&fabric], "the greeting is refused", || fabric.stats().refused == 1);
}

/// Links of one source whose messages nobody takes hold at most an eighth of the receive reserve,
/// plus 192 KiB for each link. An honest peer of the same source still gets a link. A link that
/// begins a write of too many bytes ends.
#[test]
fn unfinished_messages_are_charged_to_their_sender() {
    let config = Config { window: 16, max_message_bytes: 64 << 10, ..Config::default() };
    let (fabric, reserve) = (fabric(config.clone()), config.memory.receive_reserve as u64);
    let mut listener = listen(&fabric);
    let greeting = Greeting { hello: HELLO, resume: None }.encode();
    let frame = |len: u32, more: bool| {
        let imm =
            ferrite_fabric::wire::Frame { control: false, more, channel: 0, consumed: 0 }.to_imm();
        let tcp_frame =
            TcpFrame { kind: TcpFrameKind::Frame, imm, len, op: 0, grant: 0, offset: 0 };
        [&tcp_frame.encode()[..], &vec![7; len as usize]].concat()
    };
    // Each peer sends as much of this as its socket accepts: a message of two frames, then 14
    // messages of one frame. The application takes none of them.
    let words =
        [&greeting[..], &frame(32 << 10, true), &frame(32 << 10, false).repeat(15)].concat();
    let mut held = Vec::new();
    for _ in 0..300 {
        let mut peer = connect(&fabric, listener.local_addr(), &greeting);
        peer.set_nonblocking(true).expect("set nonblocking");
        let mut link = None;
        until(&[&fabric], "a link", || {
            link = listener.accept().now_or_never();
            link.is_some()
        });
        let _ = peer.write(&words[GREETING_BYTES..]);
        until(&[&fabric], "everything that may be read is read", || fabric.progress() == 0);
        held.push((peer, link));
    }
    let used = fabric.stats().memory.receive.in_use_bytes;
    assert!(used <= reserve / 8 + 300 * (192 << 10), "{} MiB", used >> 20);
    check_honest_peer_connects(&fabric, &mut listener);
    let large =
        TcpFrame { kind: TcpFrameKind::Write, imm: 0, len: 2 << 20, op: 1, grant: 1, offset: 0 };
    let mut peer = connect(&fabric, listener.local_addr(), &greeting);
    let link = drive(&[&fabric], listener.accept()).expect("a link");
    peer.write_all(&large.encode()).expect("write");
    let error = drive(&[&fabric], link.recv()).expect_err("the link must fail");
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    drop((held, link));
    until(&[&fabric], "all memory is returned", || fabric.stats().memory.receive.in_use_bytes == 0);
}

/// A link that has used up its budget of receive memory is read again only when some of the budget
/// is returned. Until then, the fabric sleeps.
#[test]
fn links_over_their_budget_wait_for_memory() {
    let config = Config { window: 16, max_message_bytes: 64 << 10, ..Config::default() };
    let memory = PoolConfig { receive_reserve: 8 << 20, ..config.memory.clone() };
    let fabric = fabric(Config { memory, busy_poll_us: 0, ..config });
    let mut listener = listen(&fabric);
    let imm = ferrite_fabric::wire::Frame { control: false, more: false, channel: 0, consumed: 0 }
        .to_imm();
    let frame =
        TcpFrame { kind: TcpFrameKind::Frame, imm, len: 32 << 10, op: 0, grant: 0, offset: 0 };
    let frame = [&frame.encode()[..], &[7; 32 << 10]].concat();
    let links: Vec<_> = (0..10)
        .map(|_| {
            let peer = connect(
                &fabric,
                listener.local_addr(),
                &Greeting { hello: HELLO, resume: None }.encode(),
            );
            let link = drive(&[&fabric], listener.accept()).expect("a link");
            peer.set_nonblocking(true).expect("set nonblocking");
            (peer, link)
        })
        .collect();
    // Each peer sends as many messages as the window allows. Nobody takes them yet.
    let mut left = vec![16 * frame.len(); links.len()];
    let write = |left: &mut Vec<usize>| {
        for ((peer, _), left) in links.iter().zip(left) {
            let rest = frame.repeat(16).split_off(16 * frame.len() - *left);
            *left -= (&*peer).write(&rest).unwrap_or(0);
        }
    };
    let mut idle = 0;
    let begun = Instant::now();
    while idle < 10 {
        write(&mut left);
        let readable = rustix::event::poll(
            &mut [rustix::event::PollFd::new(&fabric, rustix::event::PollFlags::IN)],
            Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }),
        );
        idle = if readable == Ok(0) { idle + 1 } else { 0 };
        fabric.progress();
        assert!(begun.elapsed() < Duration::from_secs(30), "the fabric never sleeps");
    }
    let taken_in = fabric.stats().memory.receive.in_use_bytes;
    assert!(taken_in < 10 * 16 * (32 << 10), "everything was read: no link has to wait");
    for round in 0..16 {
        for (_, link) in &links {
            let message = loop {
                write(&mut left);
                fabric.progress();
                if let Some(message) = link.recv().now_or_never() {
                    break message.expect("a message");
                }
                assert!(
                    begun.elapsed() < Duration::from_secs(60),
                    "no message arrives in round {round}"
                );
            };
            assert_eq!(message.len(), 32 << 10);
        }
    }
}

/// Nothing notifies a listener when descriptors are free again: it retries by itself.
#[test]
fn accepts_again_when_descriptors_are_free() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let fabric = fabric(Config::default());
    let listener = listen(&fabric);
    let foreign_peers = listener.foreign_tcp_peers();
    // Connects the client before the descriptors run out, because its socket needs one.
    let address = listener.local_addr();
    let client = TcpStream::connect(address).expect("a connection");
    let was = getrlimit(Resource::Nofile);
    let spare: Vec<_> =
        (0..4).map(|_| TcpListener::bind("127.0.0.1:0").expect("a descriptor")).collect();
    let used = std::fs::read_dir("/proc/self/fd").expect("descriptors").count() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(used - 1), ..was }).expect("a limit");
    let full: Vec<_> = std::iter::from_fn(|| TcpListener::bind("127.0.0.1:0").ok()).collect();
    until(&[&fabric], "accept fails because no descriptor is free", || {
        fabric.stats().accept_failures > 0
    });
    drop((spare, full));
    (&client).write_all(b"PING\r\n").expect("write");
    let foreign_peer = drive(&[&fabric], foreign_peers.next()).expect("a client");
    assert_eq!(foreign_peer.heard, b"PING\r\n");
    setrlimit(Resource::Nofile, was).expect("restore the limit");
}
