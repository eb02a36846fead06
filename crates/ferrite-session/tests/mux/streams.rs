//! Bytes, half-closes, refusals, and streams that nobody reads.

use ferrite_session::mux::OpenError;
use ferrite_session::mux::protocol::{Cause, Class, Config};
use ferrite_testkit::wait::until_async;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Harness, Pipe, connect, finish, pipe, route};

pub(crate) async fn carries_bytes_and_half_closes(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<Pipe>(&Config::default()).await;
    let [mut one, mut two] = connect(&mut peers, 6379).await;
    one.io.write_all(b"question").await.expect("write");
    one.io.shutdown().await.expect("shut down");
    let mut question = String::new();
    two.io.read_to_string(&mut question).await.expect("read to the end");
    assert_eq!(question, "question");
    // The other direction is still open.
    let answer: Vec<u8> = (0..1_000_000_u32).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
    let sent = answer.clone();
    let writing = tokio::spawn(async move {
        two.io.write_all(&sent).await.expect("write");
        two
    });
    let mut received = Vec::new();
    let mut part = vec![0; answer.len()];
    one.io.read_exact(&mut part).await.expect("read");
    received.append(&mut part);
    assert!(received == answer, "the bytes differ");
    drop(writing.await.expect("no panic"));
    assert_eq!(one.io.read(&mut [0]).await.expect("the end"), 0);
    assert!(!one.is_reset());
    finish(peers).await;
}

pub(crate) async fn passes_refusals_on(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<Pipe>(&Config::default()).await;
    for cause in [Some(Cause::REFUSED), None] {
        let (mut one, socket) = pipe();
        let opened = peers[0].handle.open(Class::Bus, route(1), socket).await;
        opened.map_err(|(_, error)| error).expect("a stream");
        let incoming = peers[1].incoming.next().await.expect("the stream");
        match cause {
            Some(cause) => incoming.refuse(cause),
            None => drop(incoming),
        }
        assert_eq!(one.io.read(&mut [0]).await.expect("the end"), 0);
        assert!(one.is_reset());
    }
    finish(peers).await;
}

pub(crate) async fn bytes_wait_for_a_slow_connect(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<Pipe>(&Config::default()).await;
    let (mut one, socket) = pipe();
    let opened = peers[0].handle.open(Class::Interactive, route(1), socket).await;
    opened.map_err(|(_, error)| error).expect("a stream");
    one.io.write_all(&[7; 5000]).await.expect("write");
    one.io.shutdown().await.expect("shut down");
    let incoming = peers[1].incoming.next().await.expect("the stream");
    until_async("the bytes have arrived", async || peers[1].handle.state().held_bytes == 5000)
        .await;
    let (mut two, socket) = pipe();
    incoming.accept(socket);
    let mut received = Vec::new();
    two.io.read_to_end(&mut received).await.expect("read to the end");
    assert_eq!(received, [7; 5000]);
    drop((one, two));
    finish(peers).await;
}

pub(crate) async fn unread_streams_hold_up_no_others(harness: &Harness) {
    let config = Config::default();
    let (mut peers, _listener) = harness.pair::<Pipe>(&config).await;
    let mut unread = Vec::new();
    for port in 0..8 {
        let [mut one, two] = connect(&mut peers, port).await;
        let writing = tokio::spawn(async move {
            // More than all buffers together. It fails when the stream is reset.
            let _ = one.io.write_all(&vec![1; 2 << 20]).await;
        });
        unread.push((writing, two));
    }
    let window = u64::from(config.window);
    until_async("the unread streams are full", async || {
        peers[1].handle.state().held_bytes >= 8 * (window - (64 << 10))
    })
    .await;
    let [mut one, mut two] = connect(&mut peers, 100).await;
    for round in 0..200_u8 {
        one.io.write_all(&[round; 64]).await.expect("write");
        let mut question = [0; 64];
        two.io.read_exact(&mut question).await.expect("read");
        two.io.write_all(&question).await.expect("write");
        let mut answer = [0; 64];
        one.io.read_exact(&mut answer).await.expect("read");
        assert_eq!(answer, [round; 64]);
    }
    let state = peers[1].handle.state();
    assert!(state.most_held_bytes <= 9 * window, "{state:?}");
    drop((one, two));
    for (writing, two) in unread {
        drop(two); // the program ends without having read
        writing.await.expect("no panic");
    }
    finish(peers).await;
}

pub(crate) async fn refuses_streams_beyond_the_limits(harness: &Harness) {
    let config = Config { max_streams: 3, bus_streams: 0, ..Config::default() };
    let (mut peers, _listener) = harness.pair::<Pipe>(&config).await;
    let mut programs = Vec::new();
    for port in 0..3 {
        programs.push(connect(&mut peers, port).await);
    }
    let (_one, socket) = pipe();
    let refused = peers[0].handle.open(Class::Bulk, route(9), socket).await;
    let Err((Some(_), OpenError::TooManyStreams)) = refused else {
        panic!("expected that a fourth stream is refused")
    };
    drop(programs.pop());
    until_async("a stream has ended", async || peers[0].handle.state().streams == 2).await;
    until_async("a stream has ended", async || peers[1].handle.state().streams == 2).await;
    programs.push(connect(&mut peers, 10).await);
    drop(programs);
    finish(peers).await;
}
