//! A device is removed under traffic (`rdma link delete`). The kernel notifies programs that have
//! an RDMA CM identifier (`rdma_cm_id`) on the device, and waits until the last user of a Soft-RoCE
//! device has released it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, ErrorKind};
use ferrite_testkit::lab::{
    Host, LeakCheck, OWN, PEER, Restore, TEST_TIMEOUT, any_port, held_on, sh, short_timeouts,
    slowdown,
};
use ferrite_testkit::process::role;
use ferrite_testkit::wait::comes_true;
use ferrite_testkit::{until, within};

use crate::pair::{Pair, Peer, check_all_traffic_fails, connect};
use crate::process::{peer, serve_as_peer, serve_at};
use crate::traffic::Traffic;

/// The limit for traffic to fail after the removal begins. The kernel's event arrives within
/// milliseconds.
const NOTIFIED_WITHIN: Duration = Duration::from_secs(2);
/// The limit for the removal to complete. The fabric releases the device as soon as its links are
/// gone, which takes 2 s at most.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);

/// The limit for the fabric to use the device again. The fabric looks for the device at least every
/// 4 s, and again a second later if the device was not ready.
const BACK_WITHIN: Duration = Duration::from_secs(12);
/// How often a device is removed and added again.
const TIMES: usize = 5;

/// A removal in progress. Dropping it adds the device again.
struct Removal {
    command: Child,
    _restore: Restore,
}

fn remove(device: &str) -> Removal {
    let restore = Restore(match device {
        "rxe1" => "rdma link show rxe1/1 >/dev/null 2>&1 || rdma link add rxe1 type rxe netdev h1",
        _ => "rdma link show rxe2/1 >/dev/null 2>&1 || rdma link add rxe2 type rxe netdev h2",
    });
    let command = Command::new("rdma").args(["link", "delete", device]).spawn().expect("rdma");
    Removal { command, _restore: restore }
}

impl Removal {
    fn has_ended(&mut self) -> bool {
        self.command.try_wait().expect("exit status").is_some()
    }

    #[track_caller]
    fn wait(&mut self) {
        let begun = Instant::now();
        until(REMOVED_WITHIN * slowdown(), "the removal ends", || self.has_ended());
        println!("  (removed {:.0?} later)", begun.elapsed());
    }

    /// Waits until the device is removed, and adds it again.
    #[track_caller]
    fn undo(mut self) {
        self.wait();
    }
}

/// Waits until this host holds no more objects on a device than `first`. This takes time because
/// identifiers linger in timewait.
#[track_caller]
fn wait_until_no_more_held(device: &str, first: &BTreeMap<String, u64>) {
    let is_more = |(what, count): (String, u64)| count > first.get(&what).copied().unwrap_or(0);
    until(TEST_TIMEOUT, &format!("no more objects than at first: {first:?}"), || {
        !held_on(device).into_iter().any(is_more)
    });
}

/// The only device of a fabric is removed. The removal completes at the latest when the fabric
/// ends.
#[test]
fn own_device_removed() {
    let pair = Pair::start(short_timeouts(), short_timeouts());
    let since = Instant::now();
    let removal = remove(OWN.0);
    let (own, peer, link, traffic, leak_check) = pair.into_parts();
    check_all_traffic_fails(
        "own device removed",
        &link,
        traffic,
        since,
        &[ErrorKind::DeviceGone],
        NOTIFIED_WITHIN,
    );
    let error = connect(&own, peer.addr).expect_err("there is no device");
    println!("connect afterwards: {error:?}");
    drop(link);
    own.finish();
    removal.undo();
    for end in peer.finish() {
        assert_eq!(end.expect_err("the peer's link must fail").kind(), ErrorKind::LinkDown);
    }
    leak_check.end();
}

/// The peer's process holds the removed device until the peer's fabric releases it. This side is
/// notified at once.
#[test]
fn peer_device_removed() {
    if role().is_some() {
        return serve_as_peer(short_timeouts());
    }
    // The leak check leaves out the peer's device. Otherwise the check would make librdmacm open
    // that device in this process and keep it open.
    let leak_check = LeakCheck::with(&[OWN]);
    let (process, addr) = peer("devices::peer_device_removed");
    let own = Host::new(&[OWN.0], short_timeouts());
    let link = connect(&own, addr).expect("a link");
    let traffic = Traffic::start(&link);
    let since = Instant::now();
    let removal = remove(PEER.0);
    check_all_traffic_fails(
        "peer's device removed",
        &link,
        traffic,
        since,
        &[ErrorKind::LinkDown],
        NOTIFIED_WITHIN,
    );
    drop(link);
    own.finish();
    let listener = process.expect_line("listener");
    assert!(listener.starts_with("DeviceGone"), "{listener}");
    for end in process.finish() {
        assert!(end.starts_with("failed DeviceGone"), "{end}");
    }
    removal.undo();
    leak_check.end();
}

/// A fabric on two devices loses one and continues on the other. The removal completes while the
/// fabric runs.
#[test]
fn one_of_two_devices_removed() {
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0, PEER.0], short_timeouts());
    let peer = Peer::start(Config::default());
    let lost = connect(&own, peer.addr).expect("a link");
    // Connects the other device to itself.
    let options = ConnectOptions::new().local(any_port(PEER));
    let kept = within(TEST_TIMEOUT, "a connect", own.fabric.connect_with(peer.addr, &options))
        .expect("a link");
    assert_eq!((lost.device().as_deref(), kept.device().as_deref()), (Some(OWN.0), Some(PEER.0)));
    let (on_lost, on_kept) = (Traffic::start(&lost), Traffic::start(&kept));
    let since = Instant::now();
    let mut removal = remove(OWN.0);
    check_all_traffic_fails(
        "one of two devices removed",
        &lost,
        on_lost,
        since,
        &[ErrorKind::DeviceGone],
        NOTIFIED_WITHIN,
    );
    on_kept.check_progress("on the other device");
    let again = within(TEST_TIMEOUT, "a connect", own.fabric.connect_with(peer.addr, &options))
        .expect("a link");
    drop((lost, again));
    let removed = comes_true(REMOVED_WITHIN * slowdown(), || removal.has_ended());
    on_kept.check_progress("after the device is gone");
    on_kept.stop();
    drop(kept);
    peer.finish();
    own.finish();
    removal.undo();
    leak_check.end();
    assert!(removed, "the removal waited until the fabric ended");
}

/// A device is removed and added again, with and without links. Each time the removal completes
/// while the fabric runs, links can be made again, and no more objects are held than the first
/// time.
#[test]
fn own_device_removed_and_added_again() {
    let (own, peer, mut link, mut traffic, leak_check) =
        Pair::start(short_timeouts(), short_timeouts()).into_parts();
    let first = held_on(OWN.0);
    for time in 1..=TIMES as u64 {
        let since = Instant::now();
        let mut removal = remove(OWN.0);
        check_all_traffic_fails(
            "own device removed",
            &link,
            traffic,
            since,
            &[ErrorKind::DeviceGone],
            NOTIFIED_WITHIN,
        );
        drop(link);
        removal.wait();
        println!(
            "connect meanwhile: {:?}",
            connect(&own, peer.addr).expect_err("there is no device")
        );
        println!("missing: {:?}", own.fabric.missing_devices());
        drop(removal); // adds it again
        wait_until_used_again(&own, time);
        link = connect(&own, peer.addr).expect("a link");
        traffic = Traffic::start(&link);
        wait_until_no_more_held(OWN.0, &first);
    }
    traffic.stop();
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed cleanly");
    drop(link);
    until(TEST_TIMEOUT, "no link is left", || own.fabric.stats().links == 0);
    remove(OWN.0).undo();
    wait_until_used_again(&own, TIMES as u64 + 1);
    let link = connect(&own, peer.addr).expect("a link");
    Traffic::start(&link).stop();
    drop(link);
    let ends = peer.finish();
    assert_eq!(ends.len(), TIMES + 2);
    let lost = ends.into_iter().filter_map(Result::err).map(|error| error.kind());
    assert_eq!(lost.collect::<Vec<_>>(), [ErrorKind::LinkDown; TIMES]);
    own.finish();
    leak_check.end();
}

/// A device is removed again at various moments of its return: before the fabric found it, while
/// the fabric recreates its objects, and after.
#[test]
fn own_device_removed_while_returning() {
    let leak_check = LeakCheck::begin();
    let (own, peer) = (Host::new(&[OWN.0], short_timeouts()), Peer::start(short_timeouts()));
    drop(connect(&own, peer.addr).expect("a link"));
    for pause in [0, 600, 700, 750, 800, 820, 840, 860, 880, 900, 920, 940, 960, 1000, 1200] {
        remove(OWN.0).undo();
        std::thread::sleep(Duration::from_millis(pause));
    }
    until(BACK_WITHIN * slowdown(), "the device is used again", || {
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
    leak_check.end();
}

/// A fabric that loses its device does not open the other device of the host, which it does not
/// use. Otherwise nothing would release the other device, and a removal of that device would never
/// end.
#[test]
fn a_lost_device_leaves_the_others_alone() {
    let own = Host::new(&[OWN.0], short_timeouts());
    let listener = own.fabric.listen(any_port(OWN)).expect("a listener");
    let opened = || held_on(PEER.0)["rxe1 ctx"];
    let before = opened();
    remove(OWN.0).undo();
    wait_until_used_again(&own, 1);
    assert_eq!(opened(), before);
    remove(PEER.0).undo();
    drop(listener);
    own.finish();
}

/// The last device of a host is removed while a fabric uses it.
#[test]
fn last_device_of_the_host_removed() {
    let leak_check = LeakCheck::with(&[OWN]);
    let own = Host::new(&[OWN.0], short_timeouts());
    let listener = own.fabric.listen(any_port(OWN)).expect("a listener");
    let mut other = remove(PEER.0);
    other.wait();
    let mut removal = remove(OWN.0);
    removal.wait();
    sh("rdma link add rxe1 type rxe netdev h1");
    drop((removal, other)); // adds this one
    wait_until_used_again(&own, 1);
    drop(listener);
    own.finish();
    leak_check.end();
}

#[track_caller]
fn wait_until_used_again(host: &Host, times: u64) {
    let begun = Instant::now();
    until(BACK_WITHIN * slowdown(), "the device is used again", || {
        host.fabric.stats().devices_back == times
    });
    println!("  (used again {:.0?} later)", begun.elapsed());
    assert_eq!(host.fabric.stats().devices_lost, times);
    assert!(host.fabric.missing_devices().is_empty());
}

#[test]
fn peer_device_removed_and_added_again() {
    check_peer_device_returns("devices::peer_device_removed_and_added_again", "0.0.0.0:0", TIMES);
}

#[test]
fn peer_device_removed_and_added_again_with_ipv6() {
    check_peer_device_returns(
        "devices::peer_device_removed_and_added_again_with_ipv6",
        "[::]:0",
        2,
    );
}

/// The peer listens on all addresses: its listener continues on the device that came back.
fn check_peer_device_returns(test: &str, everywhere: &str, times: usize) {
    if role().is_some() {
        return serve_at(everywhere.parse().expect("an address"), short_timeouts(), || ());
    }
    // The leak check leaves out the peer's device. Otherwise the check would make librdmacm open
    // that device in this process and keep it open.
    let leak_check = LeakCheck::with(&[OWN]);
    let (process, addr) = peer(test);
    let addr = SocketAddr::new(any_port(PEER).ip(), addr.port());
    let own = Host::new(&[OWN.0], short_timeouts());
    let mut link = connect(&own, addr).expect("a link");
    let mut first = None;
    for _ in 0..times {
        let traffic = Traffic::start(&link);
        wait_until_no_more_held(PEER.0, first.get_or_insert_with(|| held_on(PEER.0)));
        let since = Instant::now();
        let removal = remove(PEER.0);
        check_all_traffic_fails(
            "peer's device removed",
            &link,
            traffic,
            since,
            &[ErrorKind::LinkDown],
            NOTIFIED_WITHIN,
        );
        drop(link);
        removal.undo();
        let begun = Instant::now();
        let mut connected = connect(&own, addr);
        let is_back = comes_true(BACK_WITHIN * slowdown(), || {
            if connected.is_err() {
                connected = connect(&own, addr);
            }
            connected.is_ok()
        });
        assert!(is_back, "{:?}", connected.err());
        link = connected.expect("a link");
        println!("  (used again {:.0?} later)", begun.elapsed());
    }
    Traffic::start(&link).stop();
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed cleanly");
    drop(link);
    own.finish();
    let ends = process.finish();
    let lost = ends.iter().filter(|end| end.starts_with("failed DeviceGone")).count();
    assert_eq!((lost, ends.len()), (times, times + 1), "{ends:?}");
    leak_check.end();
}
