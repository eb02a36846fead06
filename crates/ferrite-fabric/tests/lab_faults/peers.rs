//! The peer's process dies, stops, or never looks again.

use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Rdma};

use crate::harness::{
    Clean, Host, OWN, PEER, TEST_TIMEOUT, any_port, pace, quick, stalled_after, until, verbs,
    within,
};
use crate::pair::{Peer, connect, judge, show};
use crate::process::{Process, end_of_input, peer, role, say, serve_as_peer};
use crate::traffic::Traffic;

/// The kernel closes a dead process's identifiers at once, and the peer hears it by a message that
/// is repeated if lost.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// Beyond the time that was agreed: for the fabric to wake up, and for the diagnosis.
const SLACK: Duration = Duration::from_secs(1);

#[test]
fn peer_killed() {
    if role().is_some() {
        return serve_as_peer(quick());
    }
    let clean = Clean::begin();
    let (process, addr) = peer("peers::peer_killed");
    let own = Host::new(&[OWN.0], quick());
    let link = connect(&own, addr).expect("a link");
    let traffic = Traffic::start(&link);
    let since = Instant::now();
    process.signal("KILL");
    judge("peer killed", &link, traffic, since, &[ErrorKind::LinkDown], HEARD_WITHIN);
    drop((link, process));
    own.finish();
    clean.end();
}

/// Its device goes on: reads and writes succeed, and messages until the credits are used up. Then
/// the own queue fills, and says so. The process is given up when it has not answered in time.
#[test]
fn peer_stopped() {
    if role().is_some() {
        return serve_as_peer(quick());
    }
    let clean = Clean::begin();
    let (process, addr) = peer("peers::peer_stopped");
    let config = quick();
    let own = Host::new(&[OWN.0], config.clone());
    let [link, other] = [(); 2].map(|()| connect(&own, addr).expect("a link"));
    let traffic = Traffic::start(&link);
    drop(within(TEST_TIMEOUT, "the grant", other.recv()).expect("the grant"));
    let since = Instant::now();
    process.stop();
    let mut posted = 0;
    let full = loop {
        match other.post_bytes(1, b"are you there?") {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::Full, "{full:?}");
    let most = usize::from(config.window) + config.send_queue_messages;
    assert!(posted >= most && posted <= most + 1, "{posted} messages for {most} places");
    // Inline ones have no memory; those that wait have the smallest block each.
    let held = own.fabric.stats().memory.send.in_use_bytes;
    assert!(held < 256 * most as u64 + (1 << 20), "{held} bytes");
    traffic.flows_one_sided();

    let stalled = stalled_after(&config);
    let error =
        judge("peer stopped", &link, traffic, since, &[ErrorKind::PeerStalled], stalled + SLACK);
    assert!(!error.causes().is_empty(), "{error}");
    // Not before its time: who called asks after half of `keepalive` at the earliest.
    let earliest = config.keepalive / 2 + config.peer_timeout - Duration::from_millis(200);
    assert!(since.elapsed() >= earliest, "given up after {:?}", since.elapsed());
    let error = within(stalled, "the other link ends", other.ended()).expect_err("by an error");
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error:?}");
    drop((link, other));
    own.finish();
    process.signal("CONT");
    // When it goes on it finds that it was given up.
    for end in process.finish() {
        assert!(end.starts_with("failed LinkDown"), "{end}");
    }
    clean.end();
}

/// Long enough to be asked, not to be given up.
#[test]
fn peer_stopped_shortly() {
    let config = Config { peer_timeout: quick().peer_timeout * 2, ..quick() };
    if role().is_some() {
        return serve_as_peer(config);
    }
    let clean = Clean::begin();
    let (process, addr) = peer("peers::peer_stopped_shortly");
    let own = Host::new(&[OWN.0], config.clone());
    let link = connect(&own, addr).expect("a link");
    let traffic = Traffic::start(&link);
    process.stop();
    // It is asked after `keepalive` at the latest, and given up after half of that and
    // `peer_timeout` at the earliest.
    std::thread::sleep(config.keepalive + config.peer_timeout / 4);
    process.signal("CONT");
    traffic.flows("after the stop");
    traffic.stop();
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed in good order");
    drop(link);
    own.finish();
    for end in process.finish() {
        assert!(end.starts_with("closed"), "{end}");
    }
    clean.end();
}

/// A process that connects and then never drives its fabric: what is kept for it is bounded, and it
/// is given up.
#[test]
fn peer_never_polls() {
    if let Some(target) = role() {
        let fabric = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .config(quick())
            .build()
            .expect("a fabric");
        let options = ConnectOptions::new().local(any_port(PEER));
        let target = target.parse().expect("an address");
        let _link = fabric.block_on(fabric.connect_with(target, &options)).expect("a link");
        say("connected", "");
        let _ = within(TEST_TIMEOUT * 2, "the parent", end_of_input());
        return;
    }
    let clean = Clean::begin();
    let config = quick();
    let own = Host::new(&[OWN.0], config.clone());
    let mut listener = own.fabric.listen(any_port(OWN)).expect("a listener");
    let process = Process::start("peers::peer_never_polls", &listener.local_addr().to_string());
    let link = within(TEST_TIMEOUT, "the child connects", listener.accept()).expect("a link");
    process.says("connected");
    let since = Instant::now();
    let payload = vec![7; 4000];
    let mut posted = 0_u64;
    let error = loop {
        match link.post_bytes(0, &payload) {
            Ok(()) => posted += 1,
            Err(error) if error.kind() == ErrorKind::Full => {
                let held = own.fabric.stats().memory.send.in_use_bytes;
                let most = 8192 * (config.send_queue_messages as u64 + u64::from(config.window));
                assert!(held <= most, "{held} bytes, of {most}");
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => break error,
        }
        assert!(since.elapsed() < TEST_TIMEOUT, "never given up");
    };
    let after = since.elapsed();
    show(&format!("peer never polls, after {after:.0?} and {posted} messages"), &error);
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error:?}");
    assert!(!error.causes().is_empty(), "{error}");
    assert!(after <= stalled_after(&config) + SLACK * pace(), "{after:?}");
    assert!(
        posted <= (config.send_queue_messages + usize::from(config.window)) as u64 + 1,
        "{posted}"
    );
    drop((link, listener));
    own.finish();
    process.finish();
    clean.end();
}

/// This process gets no time between asking the peer and looking for the answer, which has long
/// been there.
#[test]
fn a_starved_process_blames_nobody() {
    let clean = Clean::begin();
    let peer = Peer::start(Config::default());
    let config = quick();
    let fabric = Fabric::builder(&verbs())
        .rdma(Rdma::Require)
        .device(OWN.0)
        .config(config.clone())
        .build()
        .expect("a fabric");
    let options = ConnectOptions::new().local(any_port(OWN));
    let link = fabric.block_on(fabric.connect_with(peer.addr, &options)).expect("a link");
    drop(fabric.block_on(link.recv()).expect("the grant"));
    let asked = link.stats().controls_sent;
    until(config.keepalive * 2, "the peer is asked", || {
        while fabric.poll() > 0 && link.stats().controls_sent == asked {}
        link.stats().controls_sent > asked
    });
    std::thread::sleep(config.peer_timeout + Duration::from_millis(100));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(100) {
        fabric.poll();
    }
    assert!(link.failure().is_none(), "{:?}", link.failure());
    fabric.block_on(link.close()).expect("closed in good order");
    drop((link, fabric));
    assert!(peer.finish().into_iter().all(|end| end.is_ok()), "the peer's end");
    clean.end();
}
