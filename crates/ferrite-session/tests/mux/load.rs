//! Many streams on a link that moves between RDMA and TCP: nothing is lost, repeated, reordered or
//! changed, and memory stays bounded.
#![expect(clippy::print_stdout, reason = "prints latency and memory, for people to judge")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_fabric::Transport;
use ferrite_session::mux::MuxIncoming;
use ferrite_session::mux::protocol::{Class, Config};
use ferrite_testkit::Random;
use ferrite_testkit::wait::until_async;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::task::JoinSet;

use super::{Harness, Peer, Pipe, Program, pipe, route, wait_for};

/// The destination ports: of the streams that nobody reads, of the stream whose latency is
/// measured, and of all others.
const UNREAD: u16 = 1;
const MEASURED: u16 = 2;
const LOADED: u16 = 3;
/// The number of streams that nobody reads.
const UNREAD_STREAMS: u64 = 8;
/// The longest message of a program.
const MESSAGE_BYTES: u64 = 20_000;

/// How much a run does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) streams: usize,
    /// How often the link leaves RDMA, if it uses it.
    pub(crate) moves: usize,
    /// Number of round trips by which latency is measured.
    pub(crate) round_trips: usize,
    pub(crate) seed: u64,
}

/// Accepts streams. Most programs send back what they read.
async fn serve(mut incoming: MuxIncoming<Pipe>) {
    let mut unread = Vec::new();
    while let Some(stream) = incoming.next().await {
        let (program, socket) = pipe();
        let port = stream.route().destination.port();
        stream.accept(socket);
        if port == UNREAD {
            unread.push(program); // stays open until the driver ends
        } else {
            tokio::spawn(async move {
                let (mut read, mut write) = tokio::io::split(program.io);
                if tokio::io::copy(&mut read, &mut write).await.is_ok() {
                    let _ = write.shutdown().await;
                }
            });
        }
    }
}

async fn open(peer: &Peer<Pipe>, class: Class, port: u16) -> Program {
    let (program, socket) = pipe();
    let opened = peer.handle.open(class, route(port), socket).await;
    opened.map_err(|(_, error)| error).expect("a stream");
    program
}

/// Writes messages of random sizes and checks their echo, until it is stopped.
async fn exchange(
    io: DuplexStream,
    seed: u64,
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
) -> Result<u64, String> {
    let mut random = Random::new(seed);
    let (mut read, mut write) = tokio::io::split(io);
    let mut bytes = 0;
    while !stop.load(Ordering::Relaxed) {
        let len = match random.below(10) {
            0 => random.below(MESSAGE_BYTES),
            _ => 1 + random.below(500),
        };
        let message = random.bytes(len as usize);
        let mut echo = vec![0; message.len()];
        let both =
            async { tokio::try_join!(write.write_all(&message), read.read_exact(&mut echo)) };
        both.await.map_err(|error| format!("after {bytes} bytes: {error}"))?;
        if echo != message {
            return Err(format!("after {bytes} bytes: the echo differs from what was sent"));
        }
        bytes += len;
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    write.shutdown().await.map_err(|error| format!("the shutdown failed: {error}"))?;
    match read.read(&mut [0]).await {
        Ok(0) => Ok(bytes),
        other => Err(format!("expected the end of the stream, received {other:?}")),
    }
}

/// Returns the median and the 99th percentile of round trips of 64 bytes.
async fn latency(io: &mut DuplexStream, round_trips: usize) -> [Duration; 2] {
    let mut times = Vec::new();
    for _ in 0..round_trips {
        let begun = Instant::now();
        io.write_all(&[3; 64]).await.expect("write");
        io.read_exact(&mut [0; 64]).await.expect("read");
        times.push(begun.elapsed());
    }
    times.sort();
    [times[times.len() / 2], times[times.len() * 99 / 100]]
}

/// Carries many streams while the link moves between RDMA and TCP. Prints latency and memory.
pub(crate) async fn streams_survive_moves(harness: &Harness, load: Load) {
    let config = Config { opens_per_second: 100_000, ..Config::default() };
    let ([peer, called], _listener) = harness.pair::<Pipe>(&config).await;
    let Peer { link, handle: server, incoming, driver: server_driver } = called;
    let links = [peer.link.clone(), link];
    let serving = tokio::spawn(serve(incoming));

    let mut measured = open(&peer, Class::Interactive, MEASURED).await;
    let _ = latency(&mut measured.io, load.round_trips / 4 + 1).await; // warms up
    let idle = latency(&mut measured.io, load.round_trips).await;

    let mut unread = Vec::new();
    for _ in 0..UNREAD_STREAMS {
        let mut program = open(&peer, Class::Interactive, UNREAD).await;
        unread.push(tokio::spawn(async move {
            let _ = program.io.write_all(&vec![1; 4 << 20]).await; // fails when the link ends
        }));
    }
    let window = u64::from(config.window);
    until_async("the unread streams are full", async || {
        server.state().held_bytes >= UNREAD_STREAMS * (window - (64 << 10))
    })
    .await;
    let beside = latency(&mut measured.io, load.round_trips).await;
    let ratio = beside[1].as_secs_f64() / idle[1].as_secs_f64();
    println!(
        "round trips of 64 bytes, median and p99: idle {idle:?}; beside {UNREAD_STREAMS} streams \
         that nobody reads {beside:?}; p99 ratio {ratio:.2}"
    );

    let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut programs = JoinSet::new();
    for at in 0..load.streams {
        let class = if at % 10 == 0 { Class::Bus } else { Class::Interactive };
        let program = open(&peer, class, LOADED).await;
        let seed = load.seed.wrapping_mul(10_000) + at as u64;
        programs.spawn(exchange(program.io, seed, Arc::clone(&stop), Arc::clone(&rounds)));
    }
    let begun = Instant::now();
    let each = load.streams as u64 / 2;
    progress(&mut programs, &rounds, 2 * each).await;
    let mut random = Random::new(load.seed);
    for at in 0..if harness.has_rdma { load.moves } else { 0 } {
        wait_for(&links, Transport::Rdma).await;
        let link = &links[random.index(2)];
        until_async(&format!("move {at}"), async || link.leave_rdma()).await;
        // A link may still report RDMA for a moment after it has left it, and its peer notices the
        // loss later. Another loss before that would be part of this one.
        until_async("both sides have counted the move", async || {
            links.iter().all(|link| link.stats().moves > at as u64)
        })
        .await;
        let more = random.below(each) + 1;
        progress(&mut programs, &rounds, more).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut bytes = 0;
    while let Some(ended) = programs.join_next().await {
        bytes += ended.expect("no panic").unwrap_or_else(|why| panic!("a stream failed: {why}"));
    }
    let (state, moves) = (server.state(), links[0].stats().moves);
    println!(
        "{} streams, {} echoes of {} KiB in {:.1?}, {moves} moves; {} records in {} messages; at \
         most {} KiB held",
        load.streams,
        rounds.load(Ordering::Relaxed),
        bytes >> 10,
        begun.elapsed(),
        state.stats.records,
        state.stats.messages,
        state.most_held_bytes >> 10,
    );
    assert!(moves >= if harness.has_rdma { load.moves as u64 } else { 0 });
    let pipes = load.streams as u64 * MESSAGE_BYTES;
    assert!(state.most_held_bytes <= (UNREAD_STREAMS + 1) * window + pipes, "{state:?}");
    assert_eq!(state.stats.out_of_memory, 0);

    drop(measured);
    unread.iter().for_each(tokio::task::JoinHandle::abort);
    drop(unread);
    // The streams that nobody reads do not end by themselves.
    peer.link.abort();
    for driver in [peer.driver, server_driver] {
        assert!(driver.await.expect("no panic").is_err());
    }
    serving.await.expect("no panic");
}

/// Waits for more echoes on the streams together. Fails if a stream fails.
async fn progress(programs: &mut JoinSet<Result<u64, String>>, rounds: &Arc<AtomicU64>, more: u64) {
    let target = rounds.load(Ordering::Relaxed) + more;
    until_async("echoes", async || {
        if let Some(ended) = programs.try_join_next() {
            panic!("a stream has ended: {ended:?}");
        }
        rounds.load(Ordering::Relaxed) >= target
    })
    .await;
}
