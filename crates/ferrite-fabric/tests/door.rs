//! Who may come in over TCP: connections that say nothing, too little or too much keep nobody else out.
#![cfg(not(miri))] // which has no network

#[expect(dead_code, unused_imports, unused_macros, reason = "what is for tests of links")]
mod links;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::wire::{Features, GREETING_BYTES, Greeting, Hello, Parcel, ParcelKind, Resume};
use ferrite_fabric::{Config, Engine, ErrorKind, ListenOptions, Listener, Rdma};
use futures_util::{FutureExt as _, join};
use links::hello::HELLO;
use links::pair::{drive, until};

/// Few places, for a long time.
fn small() -> Config {
    Config { max_half_open: 4, connection_timeout: Duration::from_secs(20), ..Config::default() }
}

fn engine(config: Config) -> Engine {
    Engine::system().rdma(Rdma::Forbid).config(config).build().expect("an engine")
}

fn listen(engine: &Engine) -> Listener {
    engine.listen("127.0.0.1:0".parse().expect("an address")).expect("listen")
}

/// An honest peer gets a link in less than a fifth of the time that a place is kept.
fn is_served(engine: &Engine, listener: &mut Listener) {
    let caller = self::engine(Config::default());
    let begun = Instant::now();
    let connecting = caller.connect(listener.local_addr());
    let (there, here) = drive(&[&caller, engine], async { join!(connecting, listener.accept()) });
    drop((there.expect("a link"), here.expect("a link")));
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

fn connect(engine: &Engine, to: SocketAddr, say: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(to).expect("a connection");
    socket.write_all(say).expect("said");
    engine.progress();
    socket
}

#[test]
fn silent_connections_keep_nobody_out() {
    let engine = engine(small());
    let mut listener = listen(&engine);
    let held: Vec<_> = (0..200).map(|_| connect(&engine, listener.local_addr(), b"")).collect();
    is_served(&engine, &mut listener);
    until(&[&engine], "most were ended", || engine.stats().crowded_out >= 200 - 32);
    drop(held);
}

#[test]
fn half_a_hello_keeps_nobody_out() {
    let engine = engine(small());
    let mut listener = listen(&engine);
    let held: Vec<_> = (0..200).map(|_| connect(&engine, listener.local_addr(), b"FRT")).collect();
    is_served(&engine, &mut listener);
    drop(held);
}

/// A client is one by its first byte that no hello has there: its session begins then, as at the engine's own port.
#[test]
fn hands_clients_over_at_the_first_byte_that_no_hello_has() {
    let engine = engine(small());
    let listener = listen(&engine);
    let strangers = listener.tcp_strangers();
    // More than there are places for handshakes.
    let held: Vec<_> = (0..20).map(|_| connect(&engine, listener.local_addr(), b"*")).collect();
    for _ in &held {
        assert_eq!(drive(&[&engine], strangers.next()).expect("a client").heard, b"*");
    }
    let mut unclear = connect(&engine, listener.local_addr(), b"FR");
    until(&[&engine], "it is read", || engine.progress() == 0);
    assert!(strangers.next().now_or_never().is_none(), "a hello begins like that");
    unclear.write_all(b"E").expect("said");
    assert_eq!(drive(&[&engine], strangers.next()).expect("a client").heard, b"FRE");
}

/// A client of a pool says nothing for long, and is served when it does. There is no limit for those but that of sessions.
#[test]
fn silent_strangers_are_handed_over_when_there_are_many() {
    let engine = engine(small());
    let listener = listen(&engine);
    let strangers = listener.tcp_strangers();
    let held: Vec<_> = (0..100).map(|_| connect(&engine, listener.local_addr(), b"")).collect();
    let mut taken = Vec::new();
    until(&[&engine], "those beyond the limit of a source are handed over", || {
        while let Some(Ok(stranger)) = strangers.next().now_or_never() {
            taken.push(stranger);
        }
        taken.len() >= held.len() - 32
    });
    assert!(taken.iter().all(|stranger| stranger.heard.is_empty()));
    let firsts: Vec<_> = held.iter().take(taken.len()).map(|socket| socket.local_addr().ok()).collect();
    let peers: Vec<_> = taken.iter().map(|stranger| Some(stranger.peer)).collect();
    assert_eq!(peers, firsts, "the oldest first, and none was lost");
}

/// Both know MOVE, and RDMA has not carried the link: a `Resume` then is against the rules (`docs/book/src/protocol/links.md`).
#[test]
fn rejects_a_resume_without_a_move() {
    let engine = engine(Config::default());
    let how = ListenOptions::new().rdma(Rdma::Prefer);
    let mut listener = engine.listen_with("127.0.0.1:0".parse().expect("an address"), &how).expect("listen");
    let hello = Hello { features: Features::MOVE, session: 9, ..HELLO };
    let mut peer = connect(&engine, listener.local_addr(), &Greeting { hello, resume: None }.encode());
    let link = drive(&[&engine], listener.accept()).expect("a link");
    let mut theirs = [0; GREETING_BYTES];
    peer.read_exact(&mut theirs).expect("a greeting");
    let theirs = Greeting::decode(&theirs).expect("a greeting");
    assert!(theirs.hello.features.contains(Features::MOVE), "{theirs:?}");
    let resume = Parcel { kind: ParcelKind::Resume, imm: 0, len: 0, op: 0, grant: 0, offset: 0 };
    peer.write_all(&resume.encode().repeat(1000)).expect("said");
    let error = drive(&[&engine], link.recv()).expect_err("the link is over");
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    let fallbacks: u64 = engine.stats().fallbacks.iter().map(|(_, count)| count).sum();
    assert_eq!(fallbacks, 0);
    // Nor does a greeting resume what is not lost.
    let resume = Some(Resume { yours: theirs.hello.session, mine: 9, received: 0 });
    let _again = connect(&engine, listener.local_addr(), &Greeting { hello, resume }.encode());
    until(&[&engine], "it is refused", || engine.stats().refused == 1);
}

/// Links of one source that never end a message, or begin a write, hold little of the receive memory, and what they do not get
/// is no loss to others; nor to another link of theirs that is honest.
#[test]
fn unfinished_messages_are_charged_to_who_sends_them() {
    let config = Config { window: 16, max_message_bytes: 64 << 10, ..Config::default() };
    let (engine, reserve) = (engine(config.clone()), config.memory.receive_reserve as u64);
    let mut listener = listen(&engine);
    let greeting = Greeting { hello: HELLO, resume: None }.encode();
    let frame = |len: u32, more: bool| {
        let imm = ferrite_fabric::wire::Frame { control: false, more, channel: 0, consumed: 0 }.to_imm();
        let parcel = Parcel { kind: ParcelKind::Frame, imm, len, op: 0, grant: 0, offset: 0 };
        [&parcel.encode()[..], &vec![7; len as usize]].concat()
    };
    // Half a message, and messages that nobody takes.
    let words = [&greeting[..], &frame(32 << 10, true), &frame(32 << 10, false).repeat(15)].concat();
    let mut held = Vec::new();
    for _ in 0..300 {
        let mut peer = connect(&engine, listener.local_addr(), &greeting);
        peer.set_nonblocking(true).expect("a mode");
        let mut link = None;
        until(&[&engine], "a link", || {
            link = listener.accept().now_or_never();
            link.is_some()
        });
        let _ = peer.write(&words[GREETING_BYTES..]);
        until(&[&engine], "it is read, as far as it may", || engine.progress() == 0);
        held.push((peer, link));
    }
    let used = engine.stats().memory.receive.in_use_bytes;
    assert!(used <= reserve / 8 + 300 * (192 << 10), "{} MiB", used >> 20);
    is_served(&engine, &mut listener);
    let large = Parcel { kind: ParcelKind::Write, imm: 0, len: 2 << 20, op: 1, grant: 1, offset: 0 };
    let mut peer = connect(&engine, listener.local_addr(), &greeting);
    let link = drive(&[&engine], listener.accept()).expect("a link");
    peer.write_all(&large.encode()).expect("said");
    let error = drive(&[&engine], link.recv()).expect_err("it is never taken");
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    drop((held, link));
    until(&[&engine], "all of it comes back", || engine.stats().memory.receive.in_use_bytes == 0);
}

/// Links that hold all that they may are looked at again when some of it comes back, and not before: the engine sleeps.
#[test]
fn links_over_their_budget_wait_until_some_of_it_is_back() {
    let config = Config { window: 16, max_message_bytes: 64 << 10, ..Config::default() };
    let memory = PoolConfig { receive_reserve: 8 << 20, ..config.memory.clone() };
    let engine = engine(Config { memory, busy_poll_us: 0, ..config });
    let mut listener = listen(&engine);
    let imm = ferrite_fabric::wire::Frame { control: false, more: false, channel: 0, consumed: 0 }.to_imm();
    let frame = Parcel { kind: ParcelKind::Frame, imm, len: 32 << 10, op: 0, grant: 0, offset: 0 };
    let frame = [&frame.encode()[..], &[7; 32 << 10]].concat();
    let links: Vec<_> = (0..10)
        .map(|_| {
            let peer =
                connect(&engine, listener.local_addr(), &Greeting { hello: HELLO, resume: None }.encode());
            let link = drive(&[&engine], listener.accept()).expect("a link");
            peer.set_nonblocking(true).expect("a mode");
            (peer, link)
        })
        .collect();
    // As many messages as the window allows, which nobody takes.
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
            &mut [rustix::event::PollFd::new(&engine, rustix::event::PollFlags::IN)],
            Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }),
        );
        idle = if readable == Ok(0) { idle + 1 } else { 0 };
        engine.progress();
        assert!(begun.elapsed() < Duration::from_secs(30), "it never sleeps");
    }
    let taken_in = engine.stats().memory.receive.in_use_bytes;
    assert!(taken_in < 10 * 16 * (32 << 10), "all of it: nobody waits");
    for round in 0..16 {
        for (_, link) in &links {
            let message = loop {
                write(&mut left);
                engine.progress();
                if let Some(message) = link.recv().now_or_never() {
                    break message.expect("a message");
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "nothing comes, in round {round}");
            };
            assert_eq!(message.len(), 32 << 10);
        }
    }
}

/// Nobody tells a listener when there are descriptors again: it looks by itself.
#[test]
fn accepts_again_when_there_are_descriptors_again() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let engine = engine(Config::default());
    let listener = listen(&engine);
    let strangers = listener.tcp_strangers();
    // The client's side is here already, and needs none.
    let address = listener.local_addr();
    let client = TcpStream::connect(address).expect("a connection");
    let was = getrlimit(Resource::Nofile);
    let spare: Vec<_> = (0..4).map(|_| TcpListener::bind("127.0.0.1:0").expect("a descriptor")).collect();
    let used = std::fs::read_dir("/proc/self/fd").expect("descriptors").count() as u64;
    setrlimit(Resource::Nofile, Rlimit { current: Some(used - 1), ..was }).expect("a limit");
    let full: Vec<_> = std::iter::from_fn(|| TcpListener::bind("127.0.0.1:0").ok()).collect();
    until(&[&engine], "there is no descriptor for it", || engine.stats().accept_failures > 0);
    drop((spare, full));
    (&client).write_all(b"PING\r\n").expect("said");
    let stranger = drive(&[&engine], strangers.next()).expect("a client");
    assert_eq!(stranger.heard, b"PING\r\n");
    setrlimit(Resource::Nofile, was).expect("the limit of before");
}
