//! How streams and links end. A stream ends as its local connection does: with a close or a reset.
//! After a failure, it never ends with a close.

use std::io::ErrorKind;
use std::time::Duration;

use ferrite_session::mux::protocol::{Class, Config, Control, MuxError, RecordError, StreamId};
use ferrite_session::mux::{Multiplexer, MuxFailure, OpenError, Side, multiplex};
use ferrite_testkit::wait::until_async;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::{Harness, Peer, Pipe, TIMEOUT, connect, finish, pipe, route};

/// Returns both ends of a TCP connection on this host.
async fn tcp() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
    let connecting = TcpStream::connect(listener.local_addr().expect("an address"));
    let (one, two) = tokio::join!(connecting, listener.accept());
    [one.expect("connect"), two.expect("accept").0]
}

/// Opens a stream between two programs that have TCP connections.
async fn connect_tcp(peers: &mut [Peer<TcpStream>; 2]) -> [TcpStream; 2] {
    let [one, socket] = tcp().await;
    let opened = peers[0].handle.open(Class::Interactive, route(1), socket).await;
    opened.map_err(|(_, error)| error).expect("a stream");
    let incoming = peers[1].incoming.next().await.expect("the stream");
    let [two, socket] = tcp().await;
    incoming.accept(socket);
    [one, two]
}

pub(crate) async fn a_reset_connection_is_reset_at_the_other_end(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<TcpStream>(&Config::default()).await;
    for at in 0..2 {
        let mut ends = connect_tcp(&mut peers).await;
        ends[at].write_all(b"x").await.expect("write");
        ends[1 - at].read_exact(&mut [0]).await.expect("read");
        let [one, two] = ends;
        let (breaks, mut other) = if at == 0 { (one, two) } else { (two, one) };
        breaks.set_zero_linger().expect("set the option");
        drop(breaks);
        let error = other.read(&mut [0]).await.expect_err("a reset, and not the end");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    finish(peers).await;
}

pub(crate) async fn a_reset_connection_is_noticed_without_credit(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<TcpStream>(&Config::default()).await;
    let [mut one, mut two] = connect_tcp(&mut peers).await;
    // The other program does not read, so the stream loses its credit, and nothing is read here.
    let full = Duration::from_millis(500);
    while let Ok(written) = tokio::time::timeout(full, one.write(&[7; 65_536])).await {
        written.expect("write");
    }
    assert_eq!(peers[0].handle.state().streams, 1);
    one.set_zero_linger().expect("set the option");
    drop(one);
    until_async("the end of the stream", async || peers[0].handle.state().streams == 0).await;
    let error = two.read_to_end(&mut Vec::new()).await.expect_err("a reset, and not the end");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    finish(peers).await;
}

pub(crate) async fn a_closed_connection_ends_at_the_other_end(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<TcpStream>(&Config::default()).await;
    let [mut one, mut two] = connect_tcp(&mut peers).await;
    two.write_all(&[5; 100_000]).await.expect("write");
    drop(two);
    let mut received = Vec::new();
    one.read_to_end(&mut received).await.expect("all bytes, and then the end");
    assert_eq!(received, [5; 100_000]);
    drop(one);
    finish(peers).await;
}

pub(crate) async fn streams_are_reset_when_the_link_is_lost(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<Pipe>(&Config::default()).await;
    let [mut one, mut two] = connect(&mut peers, 1).await;
    let [first, second] = peers;
    first.link.abort();
    for driver in [first.driver, second.driver] {
        let result = tokio::time::timeout(TIMEOUT, driver).await.expect("the driver ends");
        let failure = result.expect("no panic").expect_err("the link was lost");
        assert!(matches!(failure, MuxFailure::Link(_)), "{failure}");
    }
    for program in [&mut one, &mut two] {
        assert_eq!(program.io.read(&mut [0]).await.expect("the end"), 0);
        assert!(program.is_reset());
    }
    let (_program, socket) = pipe();
    let opened = first.handle.open(Class::Bus, route(1), socket).await;
    assert!(matches!(opened, Err((Some(_), OpenError::Ended))));
}

pub(crate) async fn drains_after_go_away(harness: &Harness) {
    let (mut peers, _listener) = harness.pair::<Pipe>(&Config::default()).await;
    let [mut one, mut two] = connect(&mut peers, 1).await;
    peers[1].handle.go_away();
    let is_told = async || peers[0].handle.state().is_peer_going_away;
    until_async("the peer learns that this side is going away", is_told).await;
    let (_program, socket) = pipe();
    let opened = peers[0].handle.open(Class::Bus, route(2), socket).await;
    assert!(matches!(opened, Err((Some(_), OpenError::GoingAway))));
    // The stream that existed goes on.
    one.io.write_all(b"late").await.expect("write");
    let mut late = [0; 4];
    two.io.read_exact(&mut late).await.expect("read");
    assert_eq!(&late, b"late");
    assert!(!peers[1].driver.is_finished());
    drop((one, two));
    let [first, second] = peers;
    second.driver.await.expect("no panic").expect("an orderly end");
    first.driver.await.expect("no panic").expect("the peer has closed the link");
}

pub(crate) async fn hostile_records_end_the_link(harness: &Harness) {
    let ([hostile, link], _listener) = harness.link().await;
    let multiplexer = multiplex::<Pipe>(link, Side::Called, &Config::default());
    let Multiplexer { handle, mut incoming, driver } = multiplexer.expect("a multiplexer");
    let driver = tokio::spawn(driver.run());
    let stream = StreamId::new(Side::Caller, Class::Interactive, 1).expect("an id");
    let open = Control::Open { stream, route: route(7) }.encode();
    hostile.send_bytes(1, &open).await.expect("send");
    let (mut program, socket) = pipe();
    incoming.next().await.expect("a stream").accept(socket);
    hostile.send_bytes(1, &[9; 12]).await.expect("send");
    let failure = driver.await.expect("no panic").expect_err("a violation");
    let expected = MuxError::Record(RecordError::Type { kind: 9 });
    assert!(matches!(failure, MuxFailure::Peer(error) if error == expected), "{failure}");
    assert_eq!(program.io.read(&mut [0]).await.expect("the end"), 0);
    assert!(program.is_reset() && handle.state().stats.accepted == 1);
    assert!(hostile.ended().await.is_err() || hostile.failure().is_some(), "the link ends");
}
