//! The network goes away under a link: for a moment, for long, for ever.

use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ErrorKind, Link};
use ferrite_verbs::Status;

use crate::harness::{Clean, Host, OWN, TEST_TIMEOUT, pace, quick, stalled_after, within};
use crate::net::{Mend, Renewal, Wire, fault, sh};
use crate::pair::{Pair, Peer, connect, show};

/// An acknowledgement is waited for 67 ms, seven times (`ack_timeout` 14, `retries` 6): half a
/// second. But Soft-RoCE does not repeat while packets wait for the neighbour's address, for which
/// the kernel takes three more to give up.
const RETRIES_OVER: Duration = Duration::from_secs(5);

/// As by default, but an idle link asks for no sign of life within these outages, and closing takes
/// less: the kernel cannot say goodbye over a device whose interface was down (see `Renewal`), so
/// that it takes all of its time.
fn by_default() -> Config {
    Config {
        keepalive: Duration::from_secs(20),
        close_timeout: quick().close_timeout,
        ..Config::default()
    }
}

/// A second link on the same way, without traffic.
fn idle_link(pair: &Pair) -> Link {
    let link = connect(&pair.own, pair.peer.addr).expect("a link");
    drop(within(TEST_TIMEOUT, "the grant", link.recv()).expect("the grant"));
    link
}

fn echoes(link: &Link) {
    within(TEST_TIMEOUT, "an echo", async {
        link.send_bytes(1, b"echo?").await.expect("sent");
        assert_eq!(link.recv().await.expect("an echo").to_vec(), b"echo?");
    });
}

/// Shorter than the retries: a stall, then everything goes on, whichever direction was cut.
#[test]
fn path_cut_shortly() {
    for netdevs in [&["h1"][..], &["h2"], &["h1", "h2"]] {
        let wire = Wire::new(netdevs);
        // A loaded machine makes the outage longer: four times the usual patience, and no other
        // clock that is as short.
        let config = Config { ack_timeout: 16, ..Config::default() };
        let pair = Pair::start(config.clone(), config);
        wire.set("loss 100%");
        std::thread::sleep(Duration::from_millis(100));
        wire.set("loss 0%");
        pair.survives(&format!("nothing leaves {netdevs:?} for 0.1 s"));
        drop(wire);
    }
}

/// Takes an interface down for a time. A link without traffic does not notice. One with traffic
/// ends by an error, or goes on:
///
/// | interface | link with traffic |
/// |---|---|
/// | own | Soft-RoCE of Linux 7 ends a queue pair at once when it finds no way for a packet, however short the outage, where hardware would try again. That of 6.1 waits: the link stalls and goes on |
/// | the peer's | its end as above; this one is down when the retries are over, if the outage is longer or the other end is down |
fn interface_down(netdev: &str, mend: &'static str, outage: Duration) {
    let _renewed = Renewal;
    let pair = Pair::start(by_default(), by_default());
    let idle = idle_link(&pair);
    let since = Instant::now();
    let up = Mend(mend);
    sh(&format!("ip link set {netdev} down; sleep {}; {mend}", outage.as_secs_f32()));
    drop(up);
    echoes(&idle);
    drop(idle);
    pair.traffic.flows("after the outage");
    let what = format!("{netdev} down for {outage:?}");
    if pair.traffic.is_over() {
        pair.fails_during(&what, since, outage + RETRIES_OVER, || ());
    } else {
        pair.survives(&what);
    }
}

const SHORT: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(5);

#[test]
fn own_netdev_down_shortly() {
    interface_down("h2", "ip link set h2 up", SHORT);
}

#[test]
fn own_netdev_down() {
    interface_down("h2", "ip link set h2 up", LONG);
}

#[test]
fn netdev_of_the_peer_down_shortly() {
    interface_down("h1", "ip link set h1 up", SHORT);
}

#[test]
fn netdev_of_the_peer_down() {
    interface_down("h1", "ip link set h1 up", LONG);
}

#[test]
fn carrier_of_the_peer_lost() {
    let pair = Pair::start(quick(), quick());
    let since = Instant::now();
    let lost = fault("ip link set p1 down", "ip link set p1 up");
    let error = pair.fails_during("peer's transport lost", since, RETRIES_OVER, || drop(lost));
    assert_eq!(error.status(), Some(Status::RETRY_EXCEEDED), "{error}");
}

#[test]
fn own_carrier_lost() {
    let pair = Pair::start(quick(), quick());
    let since = Instant::now();
    let lost = fault("ip link set p2 down", "ip link set p2 up");
    let error = pair.fails_during("own transport lost", since, RETRIES_OVER, || drop(lost));
    assert!(error.to_string().contains("the own interface h2 has no transport"), "{error}");
}

/// What the peer sends does not arrive.
const HOLE: &str = "loss 100%";

#[test]
fn black_hole() {
    let wire = Wire::new(&["h1"]);
    let pair = Pair::start(quick(), quick());
    let since = Instant::now();
    wire.set(HOLE);
    let error = pair.fails_during("black hole", since, RETRIES_OVER, || drop(wire));
    assert_eq!(error.status(), Some(Status::RETRY_EXCEEDED), "{error}");
}

/// Where the device repeats for ever (7 retries, to Soft-RoCE), the clock ends the link; and nobody
/// may say then that the peer's device answers.
#[test]
fn black_hole_with_endless_retries() {
    let config = Config { retries: 7, ..quick() };
    let wire = Wire::new(&["h1"]);
    let pair = Pair::start(config.clone(), config.clone());
    let since = Instant::now();
    wire.set(HOLE);
    let limit = stalled_after(&config) + Duration::from_secs(1) * pace();
    let error =
        pair.fails_during("black hole, endless retries", since, limit / pace(), || drop(wire));
    assert!(!error.to_string().contains("device acknowledges"), "{error}");
}

/// A link without traffic finds out when it asks for a sign of life: by the retries of that
/// question.
#[test]
fn black_hole_around_an_idle_link() {
    let wire = Wire::new(&["h1"]);
    let clean = Clean::begin();
    let (own, peer) = (Host::new(&[OWN.0], quick()), Peer::start(quick()));
    let link = connect(&own, peer.addr).expect("a link");
    drop(within(TEST_TIMEOUT, "the grant", link.recv()).expect("the grant"));
    let since = Instant::now();
    wire.set(HOLE);
    let limit = quick().keepalive + RETRIES_OVER * pace();
    let error = within(limit, "the end", link.ended()).expect_err("by an error");
    show(&format!("black hole, idle, after {:.0?}", since.elapsed()), &error);
    assert_eq!(
        (error.kind(), error.status()),
        (ErrorKind::LinkDown, Some(Status::RETRY_EXCEEDED)),
        "{error}"
    );
    assert!(!error.causes().is_empty(), "{error}");
    drop((wire, link));
    for end in peer.finish() {
        end.expect_err("an error");
    }
    own.finish();
    clean.end();
}
