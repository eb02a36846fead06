//! The network fails under a link: for a moment, for long, or forever.

use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ErrorKind, Link};
use ferrite_testkit::lab::{
    Host, LeakCheck, OWN, RecreateDevices, Restore, TEST_TIMEOUT, Wire, fault, sh, short_timeouts,
    slowdown, stalled_after,
};
use ferrite_testkit::within;
use ferrite_verbs::Status;

use crate::pair::{Pair, Peer, connect, show};

/// The limit for the device to use up its retries. It waits 67 ms for an acknowledgement, seven
/// times (`ack_timeout` 14, `retries` 6), which is half a second. But Soft-RoCE does not retry
/// while packets wait for the neighbour's address, and the kernel gives up on that address only
/// three seconds later.
const RETRIES_TAKE: Duration = Duration::from_secs(5);

/// Returns the default settings, except that idle links send no keepalive within these outages and
/// closing takes less time. The kernel cannot send the disconnect over a device whose interface was
/// down (see `RecreateDevices`), so that closing takes its full time.
fn nearly_default() -> Config {
    Config {
        keepalive: Duration::from_secs(20),
        close_timeout: short_timeouts().close_timeout,
        ..Config::default()
    }
}

/// Opens a second link on the same path, without traffic.
fn idle_link(pair: &Pair) -> Link {
    let link = connect(&pair.own, pair.peer.addr).expect("a link");
    drop(within(TEST_TIMEOUT, "the grant", link.recv()).expect("a message with the grant"));
    link
}

fn check_echo(link: &Link) {
    within(TEST_TIMEOUT, "an echo", async {
        link.send_bytes(1, b"echo?").await.expect("sent");
        assert_eq!(link.recv().await.expect("echo").to_vec(), b"echo?");
    });
}

/// The outage is shorter than the retries. The link stalls, then continues, whichever direction was
/// cut.
#[test]
fn path_cut_briefly() {
    for netdevs in [&["h1"][..], &["h2"], &["h1", "h2"]] {
        let wire = Wire::new(netdevs);
        // A loaded machine makes the outage longer, so the retries last four times as long as
        // usual, and all other timeouts are longer still.
        let config = Config { ack_timeout: 16, ..Config::default() };
        let pair = Pair::start(config.clone(), config);
        wire.set("loss 100%");
        std::thread::sleep(Duration::from_millis(100));
        wire.set("loss 0%");
        pair.survives(&format!("nothing leaves {netdevs:?} for 0.1 s"));
        drop(wire);
    }
}

/// Takes an interface down for a time. A link without traffic is not affected. A link with traffic
/// fails or continues:
///
/// - Own interface: Soft-RoCE of Linux 7 ends a queue pair at once when it finds no route for a
///   packet, however short the outage, where hardware would retry. Soft-RoCE of Linux 6.1 waits:
///   the link stalls and continues.
/// - The peer's interface: the peer's end behaves as above. This end fails when its retries are
///   used up, because the outage was too long or the peer's end has failed.
fn take_interface_down(netdev: &str, restore: &'static str, outage: Duration) {
    let _recreate = RecreateDevices;
    let pair = Pair::start(nearly_default(), nearly_default());
    let idle = idle_link(&pair);
    let since = Instant::now();
    let up = Restore(restore);
    sh(&format!("ip link set {netdev} down; sleep {}; {restore}", outage.as_secs_f32()));
    drop(up);
    check_echo(&idle);
    drop(idle);
    pair.traffic.check_progress("after the outage");
    let what = format!("{netdev} down for {outage:?}");
    if pair.traffic.has_ended() {
        pair.fails_during(&what, since, outage + RETRIES_TAKE, || ());
    } else {
        pair.survives(&what);
    }
}

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(5);

#[test]
fn own_interface_down_briefly() {
    take_interface_down("h2", "ip link set h2 up", SHORT);
}

#[test]
fn own_interface_down() {
    take_interface_down("h2", "ip link set h2 up", LONG);
}

#[test]
fn peer_interface_down_briefly() {
    take_interface_down("h1", "ip link set h1 up", SHORT);
}

#[test]
fn peer_interface_down() {
    take_interface_down("h1", "ip link set h1 up", LONG);
}

#[test]
fn peer_carrier_lost() {
    let pair = Pair::start(short_timeouts(), short_timeouts());
    let since = Instant::now();
    let lost = fault("ip link set p1 down", "ip link set p1 up");
    let error = pair.fails_during("peer's carrier lost", since, RETRIES_TAKE, || drop(lost));
    assert_eq!(error.status(), Some(Status::RETRY_EXCEEDED), "{error}");
}

#[test]
fn own_carrier_lost() {
    let pair = Pair::start(short_timeouts(), short_timeouts());
    let since = Instant::now();
    let lost = fault("ip link set p2 down", "ip link set p2 up");
    let error = pair.fails_during("own carrier lost", since, RETRIES_TAKE, || drop(lost));
    assert!(error.to_string().contains("the local interface h2 has no carrier"), "{error}");
}

/// A netem setting. On the wire from h1, it drops everything that the peer sends.
const DROP_ALL: &str = "loss 100%";

#[test]
fn black_hole() {
    let wire = Wire::new(&["h1"]);
    let pair = Pair::start(short_timeouts(), short_timeouts());
    let since = Instant::now();
    wire.set(DROP_ALL);
    let error = pair.fails_during("black hole", since, RETRIES_TAKE, || drop(wire));
    assert_eq!(error.status(), Some(Status::RETRY_EXCEEDED), "{error}");
}

/// If the device retries forever, a timeout ends the link. To Soft-RoCE, 7 retries mean forever.
/// The error must not claim that the peer's device answers.
#[test]
fn black_hole_with_endless_retries() {
    let config = Config { retries: 7, ..short_timeouts() };
    let wire = Wire::new(&["h1"]);
    let pair = Pair::start(config.clone(), config.clone());
    let since = Instant::now();
    wire.set(DROP_ALL);
    let limit = stalled_after(&config) + Duration::from_secs(1) * slowdown();
    let error =
        pair.fails_during("black hole, endless retries", since, limit / slowdown(), || drop(wire));
    assert!(!error.to_string().contains("device acknowledges"), "{error}");
}

/// A link without traffic detects the failure when the device's retries of its keepalive are used
/// up.
#[test]
fn black_hole_around_an_idle_link() {
    let wire = Wire::new(&["h1"]);
    let leak_check = LeakCheck::begin();
    let (own, peer) = (Host::new(&[OWN.0], short_timeouts()), Peer::start(short_timeouts()));
    let link = connect(&own, peer.addr).expect("a link");
    drop(within(TEST_TIMEOUT, "the grant", link.recv()).expect("a message with the grant"));
    let since = Instant::now();
    wire.set(DROP_ALL);
    let limit = short_timeouts().keepalive + RETRIES_TAKE * slowdown();
    let error = within(limit, "the end", link.ended()).expect_err("the link must fail");
    show(&format!("black hole, idle, after {:.0?}", since.elapsed()), &error);
    assert_eq!(
        (error.kind(), error.status()),
        (ErrorKind::LinkDown, Some(Status::RETRY_EXCEEDED)),
        "{error}"
    );
    assert!(!error.causes().is_empty(), "{error}");
    drop((wire, link));
    for end in peer.finish() {
        end.expect_err("the peer's link must fail");
    }
    own.finish();
    leak_check.end();
}
