//! How long clients can stall the engine's event loop (`cargo xtask lab-test stall`): Debian's
//! Redis with the module on 10.0.0.1 (rxe1), clients on 10.0.0.2 (rxe2).
//!
//! The test sends a PING every 10 ms to the engine's own TCP port, which does not involve the
//! module. Whatever keeps the main thread from its event loop delays the reply. In the second test,
//! rounds with and without the attack alternate, under the same honest load over RDMA.
//!
//! The main thread and the thread that sends PING have real-time priority (`chrt`). In the lab, the
//! attackers and the kernel's emulated devices use the same CPUs as the engine, and waiting for a
//! CPU must not count as a stall.
//!
//! `FERRITE_STALL_STRICT=1` limits the difference to 10 ms. That needs an idle machine and a
//! release build of the module (`FERRITE_MODULE`). Without it, only stalls that no scheduler can
//! cause fail the test.
#![expect(clippy::print_stderr, reason = "prints figures for people to judge")]

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{
    ADDRESS_BYTES, Address, Features, GREETING_BYTES, Greeting, Hello, Program, TcpFrame,
    TcpFrameKind, Version,
};
use ferrite_fabric::{Config, ConnectOptions, Fabric, Rdma};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream, client_config};
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::{Engine, Start, TIMEOUT, free_port};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

const HOST: &str = "10.0.0.1";
const CLIENT: &str = "10.0.0.2";
/// An address that no host has. The kernel needs a second to find that out.
const SILENT: &str = "10.0.0.250";
const PORT: &str = "6390";
/// The interval between two PINGs.
const TICK: Duration = Duration::from_millis(10);
/// If a reply takes this long, the test prints what the main thread is doing.
const LATE: Duration = Duration::from_millis(100);
/// How much the attack may add to the longest stall, on an idle machine.
const STRICT: Duration = Duration::from_millis(10);
/// How much the attack may add to the longest stall, on any machine.
const LENIENT: Duration = Duration::from_millis(500);

fn start() -> (Engine, SocketAddr) {
    let port = free_port().to_string();
    let arguments = ["rdma-bind", HOST, "rdma-port", PORT, "rdma", "prefer", "rdma-device", "rxe1"];
    // On the call path the main thread drives the devices.
    let arguments = [&arguments[..], &["call-path", "yes"]].concat();
    let options = ["--port", &port, "--bind", "127.0.0.1", "--protected-mode", "no"];
    let server = Engine::start(&Start {
        program: Path::new(REDIS),
        module: Some(&arguments),
        options: &options,
    });
    prioritise(&server.pid().to_string());
    (server, format!("127.0.0.1:{port}").parse().expect("an address"))
}

fn target() -> SocketAddr {
    format!("{HOST}:{PORT}").parse().expect("an address")
}

/// Gives a thread real-time priority, but not the threads that it starts.
fn prioritise(thread: &str) {
    let set =
        Command::new("chrt").args(["--reset-on-fork", "--fifo", "--pid", "10", thread]).status();
    assert!(set.expect("chrt of util-linux").success(), "cannot prioritise thread {thread}");
}

/// Returns the id of the calling thread.
fn own_thread() -> String {
    let path = std::fs::read_link("/proc/thread-self").expect("a thread");
    path.file_name().expect("a number").to_string_lossy().into_owned()
}

/// Returns whether the socket becomes readable within this time.
fn is_readable(socket: &std::net::TcpStream, within: Duration) -> bool {
    socket.set_read_timeout(Some(within)).expect("a timeout");
    let peeked = socket.peek(&mut [0]).is_ok_and(|bytes| bytes > 0);
    socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    peeked
}

/// Describes the main thread of a process: its state, and where in the kernel it waits.
fn where_is(process: u32) -> String {
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/{process}/task/{process}/{name}"));
        text.unwrap_or_else(|error| error.to_string())
    };
    let state = read("stat");
    let state =
        state.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).unwrap_or("?");
    format!(
        "state {state}, wchan {}, syscall {}, stack {}",
        read("wchan"),
        read("syscall"),
        read("stack")
    )
}

/// Sends PING to the engine every 10 ms and measures the longest time to a reply.
struct Ticker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Duration, usize)>,
}

impl Ticker {
    fn start(engine: SocketAddr, main_thread: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            prioritise(&own_thread());
            let mut socket = std::net::TcpStream::connect(engine).expect("the engine's port");
            socket.set_nodelay(true).expect("an option");
            socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
            let (mut longest, mut ticks) = (Duration::ZERO, 0);
            while !stopped.load(Ordering::Relaxed) {
                let sent = Instant::now();
                socket.write_all(b"PING\r\n").expect("the connection is open");
                // For a late reply, print where the main thread is. That helps to find the cause.
                if !is_readable(&socket, LATE) {
                    eprintln!("no reply in {LATE:?}; the main thread: {}", where_is(main_thread));
                }
                socket.read_exact(&mut [0; 7]).expect("a reply");
                longest = longest.max(sent.elapsed());
                ticks += 1;
                std::thread::sleep(TICK.saturating_sub(sent.elapsed()));
            }
            (longest, ticks)
        });
        Self { stop, thread }
    }

    fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let (longest, ticks) = self.thread.join().expect("no panic");
        assert!(ticks > 10, "only {ticks} replies");
        longest
    }
}

/// Connects to the module's port over TCP and completes the handshake.
async fn greeted(session: u64) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(format!("{CLIENT}:0").parse().expect("an address")).expect("a free port");
    let mut client = socket.connect(target()).await.expect("a connection");
    let hello = Hello {
        version: Version::CURRENT,
        features: Features::WRITE_IMM | Features::ONE_SIDED | Features::MOVE,
        segment_bytes: 8 << 10,
        window: 64,
        channels: 16,
        max_message_bytes: 1 << 20,
        instance: 4711,
        session,
        mtu: 0,
        program: Program::UNKNOWN,
    };
    client
        .write_all(&Greeting { hello, resume: None }.encode())
        .await
        .expect("the connection is open");
    client.read_exact(&mut [0; GREETING_BYTES]).await.expect("a greeting");
    client
}

fn offer(address: &str) -> Vec<u8> {
    let ip: std::net::Ipv4Addr = address.parse().expect("an address");
    let gid = ip.to_ipv6_mapped().octets();
    let address = Address { qp_num: 0x11, psn: 1, lid: 0, mtu: 3, reads_in: 1, reads_out: 1, gid };
    let tcp_frame = tcp_frame(TcpFrameKind::Offer, ADDRESS_BYTES as u32);
    [&tcp_frame.encode()[..], &address.encode()].concat()
}

fn tcp_frame(kind: TcpFrameKind, len: u32) -> TcpFrame {
    TcpFrame { kind, imm: 0, len, op: 0, grant: 0, offset: 0 }
}

/// Reads a TCP frame and returns its kind; `None` if the link has ended.
async fn next_frame(client: &mut TcpStream) -> Option<TcpFrameKind> {
    let mut bytes = [0; ferrite_fabric::wire::TCP_FRAME_HEADER_BYTES];
    client.read_exact(&mut bytes).await.ok()?;
    let tcp_frame = TcpFrame::decode(&bytes)?;
    let mut rest = vec![0; tcp_frame.follows()];
    client.read_exact(&mut rest).await.ok()?;
    Some(tcp_frame.kind)
}

fn run<R>(test: impl AsyncFnOnce(Fabric) -> R) -> R {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let config = Config { busy_poll_us: 0, ..client_config() };
        let fabric = Fabric::system().rdma(Rdma::Require).device("rxe2").config(config);
        let fabric = fabric.command_threads().build().expect("a fabric");
        let driver = tokio::spawn(fabric.drive());
        let result = test(fabric).await;
        let ended = tokio::time::timeout(TIMEOUT, driver).await;
        ended.expect("the fabric stops in time").expect("no panic").expect("no fabric error");
        result
    })
}

async fn valkey(fabric: &Fabric) -> ValkeyStream {
    let options = ConnectOptions::new().local(format!("{CLIENT}:0").parse().expect("an address"));
    let raw = fabric.connect_raw(target(), &options).await.expect("a connection");
    ValkeyStream::open(raw, Role::Client, &ValkeyConfig::default()).await.expect("a window")
}

/// An attack that once stopped the engine for a second per offer: a client that has not
/// authenticated sends 72 bytes with an address that does not exist.
#[test]
fn offers_of_an_unreachable_address_do_not_stall_the_engine() {
    const OFFERS: u64 = 8;
    let (mut server, engine) = start();
    let ticker = Ticker::start(engine, server.pid());
    run(async |_| {
        for number in 0..OFFERS {
            let mut client = greeted(9 + number).await;
            client.write_all(&offer(SILENT)).await.expect("the connection is open");
            let reply = next_frame(&mut client).await;
            assert_eq!(reply, Some(TcpFrameKind::Withdraw), "the offer is declined");
        }
        // Sends all offers at once, as in the attack. Only one offer at a time is allowed, so the
        // second ends the link.
        let mut client = greeted(99).await;
        client.write_all(&offer(SILENT).repeat(8)).await.expect("the connection is open");
        while next_frame(&mut client).await.is_some() {}
    });
    let longest = ticker.stop();
    eprintln!("{OFFERS} offers of an unreachable address: longest PING {longest:.1?}");
    assert!(longest < LENIENT, "the engine stalled for {longest:?}");
    assert!(server.count("rdma_offers_refused") >= OFFERS);
    server.assert_healthy();
}

/// The size of a round. Four rounds have 1,000 connects, 1,000 offers and 200 window growths.
const CONNECTS: usize = 250;
const OFFERS: usize = 250;
const GROWING: usize = 25; // two growths each
/// The pause between two operations of a kind. There should be many operations, but they should not
/// use up the CPUs of a guest that has to emulate its devices.
const PACE: Duration = Duration::from_millis(20);

/// Returns the number of rounds: four with `FERRITE_STALL_STRICT=1`; otherwise one, to keep the
/// suite short.
fn rounds() -> usize {
    if is_strict() { 4 } else { 1 }
}

fn is_strict() -> bool {
    std::env::var("FERRITE_STALL_STRICT").is_ok_and(|strict| strict == "1")
}

async fn connects(fabric: Fabric) {
    for number in 0..CONNECTS {
        let options =
            ConnectOptions::new().local(format!("{CLIENT}:0").parse().expect("an address"));
        let connecting = fabric.connect_raw(target(), &options);
        // Half of the connects are given up at once. The others disconnect as soon as they are
        // connected.
        if number % 2 == 0 {
            drop(connecting);
        } else {
            tokio::spawn(async move { drop(connecting.await) });
        }
        tokio::time::sleep(PACE).await;
    }
}

async fn offers() {
    let mut number = 0;
    while number < OFFERS {
        let mut client = greeted(1000 + number as u64).await;
        for address in [SILENT, CLIENT] {
            client.write_all(&offer(address)).await.expect("the connection is open");
            match next_frame(&mut client).await.expect("a frame") {
                TcpFrameKind::Withdraw => {}
                _ => client
                    .write_all(&tcp_frame(TcpFrameKind::Withdraw, 0).encode())
                    .await
                    .expect("the connection is open"),
            }
            number += 1;
            tokio::time::sleep(PACE).await;
        }
    }
}

async fn growths(fabric: Fabric) {
    // This fills windows of 64 KiB, 512 KiB and 2 MiB, some more than once while the next one is
    // prepared.
    let value = vec![b'x'; 4 << 20];
    for _ in 0..GROWING {
        let mut stream = valkey(&fabric).await;
        let head = format!("*3\r\n$3\r\nSET\r\n$5\r\nlarge\r\n${}\r\n", value.len());
        stream.write_all(head.as_bytes()).await.expect("the connection is open");
        stream.write_all(&value).await.expect("the connection is open");
        stream.write_all(b"\r\n").await.expect("the connection is open");
        stream.read_exact(&mut [0; 5]).await.expect("a reply");
        tokio::time::sleep(PACE).await;
    }
}

/// Runs an honest client, with and without the attack. Returns the number of its commands.
async fn honest(fabric: Fabric, stop: Arc<AtomicBool>) -> u64 {
    let mut stream = valkey(&fabric).await;
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        stream
            .write_all(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n")
            .await
            .expect("the connection is open");
        stream.read_exact(&mut [0; 5]).await.expect("a reply");
        done += 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    done
}

#[test]
fn connects_offers_and_growing_windows_do_not_stall_the_engine() {
    let (mut server, address) = start();
    let pid = server.pid();
    let (calm, attacked) = run(async |fabric| {
        let stop = Arc::new(AtomicBool::new(false));
        let load: Vec<_> =
            (0..4).map(|_| tokio::spawn(honest(fabric.clone(), Arc::clone(&stop)))).collect();
        let (mut calm, mut attacked) = (Vec::new(), Vec::new());
        for round in 1..=rounds() {
            let ticker = Ticker::start(address, pid);
            let started = Instant::now();
            tokio::join!(connects(fabric.clone()), offers(), growths(fabric.clone()));
            let lasted = started.elapsed();
            attacked.push(tokio::task::spawn_blocking(|| ticker.stop()).await.expect("no panic"));
            let ticker = Ticker::start(address, pid);
            tokio::time::sleep(lasted).await;
            calm.push(tokio::task::spawn_blocking(|| ticker.stop()).await.expect("no panic"));
            let longest = (attacked[round - 1], calm[round - 1]);
            eprintln!(
                "round {round}: {lasted:.1?} of attack; longest PING with and without it: \
                 {longest:.1?}"
            );
        }
        stop.store(true, Ordering::Relaxed);
        for client in load {
            assert!(client.await.expect("no panic") > 0, "an honest client was not served");
        }
        (calm, attacked)
    });
    let median = |mut longest: Vec<Duration>| {
        longest.sort_unstable();
        longest[longest.len() / 2]
    };
    assert!(server.count("rdma_offers_refused") >= (rounds() * OFFERS / 2) as u64);
    let more = median(attacked).saturating_sub(median(calm));
    eprintln!(
        "{} connects, {} offers, {} growths: the median of the longest stalls is {more:.1?} longer \
         than without the attack",
        rounds() * CONNECTS,
        rounds() * OFFERS,
        rounds() * GROWING * 2
    );
    assert!(
        more <= if is_strict() { STRICT } else { LENIENT },
        "the engine stalled for {more:?} longer"
    );
    server.assert_healthy();
}
