//! A device is removed under traffic (`rdma link delete`). The kernel tells those who have an
//! identifier on it, and waits until the last user of a Soft-RoCE device has let go.

use std::net::SocketAddr;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, ErrorKind};

use crate::harness::{
    Clean, Host, OWN, PEER, TEST_TIMEOUT, any_port, held_on, pace, quick, until, within,
};
use crate::net::Mend;
use crate::pair::{Pair, Peer, connect, judge};
use crate::process::{peer, role, serve_as_peer, serve_at};
use crate::traffic::Traffic;

/// The kernel's message comes in milliseconds.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// The fabric lets go as soon as its links are gone, which takes 2 s at most.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);

/// The fabric looks every 8 s at least, and once more a second later if the device was not ready.
const BACK_WITHIN: Duration = Duration::from_secs(12);
/// How often a device goes and comes back.
const TIMES: usize = 5;

/// The removal of a device, under way; the device is made again at the end.
struct Removal {
    command: Child,
    _again: Mend,
}

fn remove(device: &str) -> Removal {
    let again = Mend(match device {
        "rxe1" => "rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev h1",
        _ => "rdma link show rxe2/1 >/dev/null 2>&1 || rdma link add rxe2 type rxe netdev h2",
    });
    let command = Command::new("rdma").args(["link", "delete", device]).spawn().expect("rdma");
    Removal { command, _again: again }
}

impl Removal {
    fn is_over(&mut self) -> bool {
        self.command.try_wait().expect("its status").is_some()
    }

    #[track_caller]
    fn ends(&mut self) {
        let begun = Instant::now();
        until(REMOVED_WITHIN * pace(), "the removal ends", || self.is_over());
        println!("  (removed {:.0?} later)", begun.elapsed());
    }
}

/// The only device of a fabric: it is let go of with the fabric.
#[test]
fn own_device_removed() {
    let pair = Pair::start(quick(), quick());
    let since = Instant::now();
    let mut removal = remove(OWN.0);
    let (own, peer, link, traffic, clean) = pair.into_parts();
    judge("own device removed", &link, traffic, since, &[ErrorKind::DeviceGone], HEARD_WITHIN);
    let error = connect(&own, peer.addr).expect_err("there is no device");
    println!("connect afterwards: {error:?}");
    drop(link);
    own.finish();
    removal.ends();
    drop(removal);
    for end in peer.finish() {
        assert_eq!(end.expect_err("an error").kind(), ErrorKind::LinkDown);
    }
    clean.end();
}

/// The peer's process holds its device until its fabric lets go; this side hears of it at once.
#[test]
fn device_of_the_peer_removed() {
    if role().is_some() {
        return serve_as_peer(quick());
    }
    let clean = Clean::with(&[OWN]); // or librdmacm would hold the other here
    let (process, addr) = peer("devices::device_of_the_peer_removed");
    let own = Host::new(&[OWN.0], quick());
    let link = connect(&own, addr).expect("a link");
    let traffic = Traffic::start(&link);
    let since = Instant::now();
    let mut removal = remove(PEER.0);
    judge("peer's device removed", &link, traffic, since, &[ErrorKind::LinkDown], HEARD_WITHIN);
    drop(link);
    own.finish();
    let listener = process.says("listener");
    assert!(listener.starts_with("DeviceGone"), "{listener}");
    for end in process.finish() {
        assert!(end.starts_with("failed DeviceGone"), "{end}");
    }
    removal.ends();
    drop(removal);
    clean.end();
}

/// A fabric on two devices goes on with the other, and the removal is over while it lives.
#[test]
fn one_of_two_devices_removed() {
    let clean = Clean::begin();
    let own = Host::new(&[OWN.0, PEER.0], quick());
    let peer = Peer::start(Config::default());
    let lost = connect(&own, peer.addr).expect("a link");
    // The other device, which talks to itself.
    let options = ConnectOptions::new().local(any_port(PEER));
    let kept = within(TEST_TIMEOUT, "a connect", own.fabric.connect_with(peer.addr, &options))
        .expect("a link");
    assert_eq!((lost.device().as_deref(), kept.device().as_deref()), (Some(OWN.0), Some(PEER.0)));
    let (on_lost, on_kept) = (Traffic::start(&lost), Traffic::start(&kept));
    let since = Instant::now();
    let mut removal = remove(OWN.0);
    judge(
        "one of two devices removed",
        &lost,
        on_lost,
        since,
        &[ErrorKind::DeviceGone],
        HEARD_WITHIN,
    );
    on_kept.flows("on the other device");
    let again = within(TEST_TIMEOUT, "a connect", own.fabric.connect_with(peer.addr, &options))
        .expect("a link");
    drop((lost, again));
    let begun = Instant::now();
    while !removal.is_over() && begun.elapsed() < REMOVED_WITHIN * pace() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let removed = removal.is_over();
    on_kept.flows("when the device is gone");
    on_kept.stop();
    drop(kept);
    peer.finish();
    own.finish();
    removal.ends();
    drop(removal);
    clean.end();
    assert!(removed, "the removal waited for the fabric's end");
}

/// A device goes and comes back, with links and without: each time the removal ends while the
/// fabric lives, links are made again, and no more is held than the first time.
#[test]
fn own_device_removed_and_added_again() {
    let (own, peer, mut link, mut traffic, clean) = Pair::start(quick(), quick()).into_parts();
    let first = held_on(OWN.0);
    for time in 1..=TIMES as u64 {
        let since = Instant::now();
        let mut removal = remove(OWN.0);
        judge("own device removed", &link, traffic, since, &[ErrorKind::DeviceGone], HEARD_WITHIN);
        drop(link);
        removal.ends();
        println!(
            "connect meanwhile: {:?}",
            connect(&own, peer.addr).expect_err("there is no device")
        );
        println!("missing: {:?}", own.fabric.missing_devices());
        drop(removal); // adds it again
        is_back(&own, time);
        link = connect(&own, peer.addr).expect("a link");
        traffic = Traffic::start(&link);
        let more = |(what, count): &(String, u64)| *count > first.get(what).copied().unwrap_or(0);
        let left = || held_on(OWN.0).into_iter().filter(more).collect::<Vec<_>>();
        // Identifiers linger in timewait.
        until(TEST_TIMEOUT, &format!("no more than at first: {first:?}"), || left().is_empty());
    }
    traffic.stop();
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed in good order");
    drop(link);
    until(TEST_TIMEOUT, "no link is left", || own.fabric.stats().links == 0);
    let mut removal = remove(OWN.0);
    removal.ends();
    drop(removal);
    is_back(&own, TIMES as u64 + 1);
    let link = connect(&own, peer.addr).expect("a link");
    Traffic::start(&link).stop();
    drop(link);
    let ends = peer.finish();
    assert_eq!(ends.len(), TIMES + 2);
    let lost = ends.into_iter().filter_map(Result::err).map(|error| error.kind());
    assert_eq!(lost.collect::<Vec<_>>(), [ErrorKind::LinkDown; TIMES]);
    own.finish();
    clean.end();
}

/// A device goes again at any moment of its return: before it was found, while everything is made
/// anew, and after.
#[test]
fn own_device_comes_and_goes() {
    let clean = Clean::begin();
    let (own, peer) = (Host::new(&[OWN.0], quick()), Peer::start(quick()));
    drop(connect(&own, peer.addr).expect("a link"));
    for pause in [0, 600, 700, 750, 800, 820, 840, 860, 880, 900, 920, 940, 960, 1000, 1200] {
        let mut removal = remove(OWN.0);
        removal.ends();
        drop(removal); // adds it again
        std::thread::sleep(Duration::from_millis(pause));
    }
    until(BACK_WITHIN * pace(), "the device is used again", || {
        own.fabric.missing_devices().is_empty()
    });
    let stats = own.fabric.stats();
    println!("lost {} times, back {} times", stats.devices_lost, stats.devices_back);
    assert_eq!(stats.devices_lost, stats.devices_back);
    let link = connect(&own, peer.addr).expect("a link");
    Traffic::start(&link).stop();
    drop(link);
    peer.finish();
    own.finish();
    clean.end();
}

#[track_caller]
fn is_back(host: &Host, times: u64) {
    let begun = Instant::now();
    until(BACK_WITHIN * pace(), "the device is used again", || {
        host.fabric.stats().devices_back == times
    });
    println!("  (used again {:.0?} later)", begun.elapsed());
    assert_eq!(host.fabric.stats().devices_lost, times);
    assert!(host.fabric.missing_devices().is_empty());
}

#[test]
fn device_of_the_peer_removed_and_added_again() {
    peer_comes_back("devices::device_of_the_peer_removed_and_added_again", "0.0.0.0:0", TIMES);
}

#[test]
fn device_of_the_peer_removed_and_added_again_under_ipv6() {
    peer_comes_back("devices::device_of_the_peer_removed_and_added_again_under_ipv6", "[::]:0", 2);
}

/// The peer listens on all addresses: its listener goes on with the device that came back.
fn peer_comes_back(test: &str, everywhere: &str, times: usize) {
    if role().is_some() {
        return serve_at(everywhere.parse().expect("an address"), quick(), || ());
    }
    let clean = Clean::with(&[OWN]); // or librdmacm would hold the other here
    let (process, addr) = peer(test);
    let addr = SocketAddr::new(any_port(PEER).ip(), addr.port());
    let own = Host::new(&[OWN.0], quick());
    let mut link = connect(&own, addr).expect("a link");
    let mut first = None;
    for _ in 0..times {
        let traffic = Traffic::start(&link);
        let first = first.get_or_insert_with(|| held_on(PEER.0));
        let more = |(what, count): &(String, u64)| *count > first.get(what).copied().unwrap_or(0);
        let left = || held_on(PEER.0).into_iter().filter(more).collect::<Vec<_>>();
        until(TEST_TIMEOUT, &format!("no more than at first: {first:?}"), || left().is_empty());
        let since = Instant::now();
        let mut removal = remove(PEER.0);
        judge("peer's device removed", &link, traffic, since, &[ErrorKind::LinkDown], HEARD_WITHIN);
        drop(link);
        removal.ends();
        drop(removal); // adds it again
        let begun = Instant::now();
        link = loop {
            match connect(&own, addr) {
                Ok(link) => break link,
                Err(error) => assert!(begun.elapsed() < BACK_WITHIN * pace(), "{error:?}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        println!("  (used again {:.0?} later)", begun.elapsed());
    }
    Traffic::start(&link).stop();
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed in good order");
    drop(link);
    own.finish();
    let ends = process.finish();
    let lost = ends.iter().filter(|end| end.starts_with("failed DeviceGone")).count();
    assert_eq!((lost, ends.len()), (times, times + 1), "{ends:?}");
    clean.end();
}
