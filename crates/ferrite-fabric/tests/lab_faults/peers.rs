//! The peer's process dies, is stopped, or never drives its fabric.

use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Rdma};
use ferrite_testkit::lab::{
    Host, LeakCheck, OWN, PEER, TEST_TIMEOUT, any_port, short_timeouts, slowdown, stalled_after,
    verbs,
};
use ferrite_testkit::process::{PeerProcess, report, role};
use ferrite_testkit::{until, within};

use crate::pair::{Peer, check_all_traffic_fails, connect, show};
use crate::process::{end_of_input, peer, serve_as_peer};
use crate::traffic::Traffic;

/// The limit for this side to notice that the peer's process is dead. The kernel closes the
/// identifiers of a dead process at once, and sends a message that it repeats if lost.
const NOTIFIED_WITHIN: Duration = Duration::from_secs(2);
/// The time beyond the configured timeout, for the fabric to wake up and to diagnose the failure.
const SLACK: Duration = Duration::from_secs(1);

#[test]
fn peer_killed() {
    if role().is_some() {
        return serve_as_peer(short_timeouts());
    }
    let leak_check = LeakCheck::begin();
    let (process, addr) = peer("peers::peer_killed");
    let own = Host::new(&[OWN.0], short_timeouts());
    let link = connect(&own, addr).expect("a link");
    let traffic = Traffic::start(&link);
    let since = Instant::now();
    process.signal("KILL");
    check_all_traffic_fails(
        "peer killed",
        &link,
        traffic,
        since,
        &[ErrorKind::LinkDown],
        NOTIFIED_WITHIN,
    );
    drop((link, process));
    own.finish();
    leak_check.end();
}

/// The device of a stopped peer still works. Reads and writes succeed, and so do messages until the
/// credits are used up. Then the local send queue fills, and posts report that it is full. The
/// local side gives up the peer if the peer has not answered in time.
#[test]
fn peer_stopped() {
    if role().is_some() {
        return serve_as_peer(short_timeouts());
    }
    let leak_check = LeakCheck::begin();
    let (process, addr) = peer("peers::peer_stopped");
    let config = short_timeouts();
    let own = Host::new(&[OWN.0], config.clone());
    let [link, other] = [(); 2].map(|()| connect(&own, addr).expect("a link"));
    let traffic = Traffic::start(&link);
    drop(within(TEST_TIMEOUT, "the grant", other.recv()).expect("a message with the grant"));
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
    assert!(posted >= most && posted <= most + 1, "{posted} messages accepted, expected {most}");
    // Inline messages take no memory; each queued one takes the smallest block.
    let held = own.fabric.stats().memory.send.in_use_bytes;
    assert!(held < 256 * most as u64 + (1 << 20), "{held} bytes");
    traffic.check_one_sided_progress();

    let stalled = stalled_after(&config);
    let error = check_all_traffic_fails(
        "peer stopped",
        &link,
        traffic,
        since,
        &[ErrorKind::PeerStalled],
        stalled + SLACK,
    );
    assert!(!error.causes().is_empty(), "{error}");
    // The link must not fail too early. The connecting side sends a keepalive after half of
    // `keepalive` at the earliest.
    let earliest = config.keepalive / 2 + config.peer_timeout - Duration::from_millis(200);
    assert!(since.elapsed() >= earliest, "the link failed after only {:?}", since.elapsed());
    let error =
        within(stalled, "the other link ends", other.ended()).expect_err("the link must fail");
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error:?}");
    drop((link, other));
    own.finish();
    process.signal("CONT");
    // When the process continues, it finds that its links were given up.
    for end in process.finish() {
        assert!(end.starts_with("failed LinkDown"), "{end}");
    }
    leak_check.end();
}

/// The peer is stopped long enough to get a keepalive, but not long enough to be given up.
#[test]
fn peer_stopped_briefly() {
    let config = Config { peer_timeout: short_timeouts().peer_timeout * 2, ..short_timeouts() };
    if role().is_some() {
        return serve_as_peer(config);
    }
    let leak_check = LeakCheck::begin();
    let (process, addr) = peer("peers::peer_stopped_briefly");
    let own = Host::new(&[OWN.0], config.clone());
    let link = connect(&own, addr).expect("a link");
    let traffic = Traffic::start(&link);
    process.stop();
    // The keepalive is sent after `keepalive` at the latest. The peer is given up after half of
    // `keepalive` plus `peer_timeout` at the earliest.
    std::thread::sleep(config.keepalive + config.peer_timeout / 4);
    process.signal("CONT");
    traffic.check_progress("after the stop");
    traffic.stop();
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed cleanly");
    drop(link);
    own.finish();
    for end in process.finish() {
        assert!(end.starts_with("closed"), "{end}");
    }
    leak_check.end();
}

/// A process connects and then never drives its fabric. This side limits the memory that it keeps
/// for the peer, and gives up the peer.
#[test]
fn peer_never_polls() {
    if let Some(target) = role() {
        let fabric = Fabric::builder(&verbs())
            .rdma(Rdma::Require)
            .device(PEER.0)
            .config(short_timeouts())
            .build()
            .expect("a fabric");
        let options = ConnectOptions::new().local(any_port(PEER));
        let target = target.parse().expect("an address");
        let _link = fabric.block_on(fabric.connect_with(target, &options)).expect("a link");
        report("connected", "");
        let _ = within(TEST_TIMEOUT * 2, "the parent", end_of_input());
        return;
    }
    let leak_check = LeakCheck::begin();
    let config = short_timeouts();
    let own = Host::new(&[OWN.0], config.clone());
    let mut listener = own.fabric.listen(any_port(OWN)).expect("a listener");
    let process = PeerProcess::start("peers::peer_never_polls", &listener.local_addr().to_string());
    let link = within(TEST_TIMEOUT, "the child connects", listener.accept()).expect("a link");
    process.expect_line("connected");
    let since = Instant::now();
    let payload = vec![7; 4000];
    let mut posted = 0_u64;
    let error = loop {
        match link.post_bytes(0, &payload) {
            Ok(()) => posted += 1,
            Err(error) if error.kind() == ErrorKind::Full => {
                let held = own.fabric.stats().memory.send.in_use_bytes;
                let most = 8192 * (config.send_queue_messages as u64 + u64::from(config.window));
                assert!(held <= most, "{held} bytes, more than {most}");
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => break error,
        }
        assert!(since.elapsed() < TEST_TIMEOUT, "the peer is never given up");
    };
    let after = since.elapsed();
    show(&format!("peer never polls, after {after:.0?} and {posted} messages"), &error);
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error:?}");
    assert!(!error.causes().is_empty(), "{error}");
    assert!(after <= stalled_after(&config) + SLACK * slowdown(), "{after:?}");
    assert!(
        posted <= (config.send_queue_messages + usize::from(config.window)) as u64 + 1,
        "{posted}"
    );
    drop((link, listener));
    own.finish();
    process.finish();
    leak_check.end();
}

/// This process does not run from its keepalive until the time limit for the answer has passed. The
/// answer arrived long before, so the link must not fail.
#[test]
fn starved_process_does_not_blame_the_peer() {
    let leak_check = LeakCheck::begin();
    let peer = Peer::start(Config::default());
    let config = short_timeouts();
    let fabric = Fabric::builder(&verbs())
        .rdma(Rdma::Require)
        .device(OWN.0)
        .config(config.clone())
        .build()
        .expect("a fabric");
    let options = ConnectOptions::new().local(any_port(OWN));
    let link = fabric.block_on(fabric.connect_with(peer.addr, &options)).expect("a link");
    drop(fabric.block_on(link.recv()).expect("a message with the grant"));
    let asked = link.stats().controls_sent;
    until(config.keepalive * 2, "a keepalive is sent", || {
        while fabric.poll() > 0 && link.stats().controls_sent == asked {}
        link.stats().controls_sent > asked
    });
    std::thread::sleep(config.peer_timeout + Duration::from_millis(100));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(100) {
        fabric.poll();
    }
    assert!(link.failure().is_none(), "{:?}", link.failure());
    fabric.block_on(link.close()).expect("closed cleanly");
    drop((link, fabric));
    assert!(peer.finish().into_iter().all(|end| end.is_ok()), "the peer's link failed");
    leak_check.end();
}
