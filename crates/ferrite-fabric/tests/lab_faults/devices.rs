//! A device is removed under traffic (`rdma link delete`). The kernel tells those who have an identifier on it, and waits until
//! the last user of a Soft-RoCE device has let go.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, ErrorKind};

use crate::net::Mend;
use crate::pair::{Pair, Peer, connect, judge};
use crate::process::{peer, role, serve_as_peer};
use crate::rig::{Clean, Host, OWN, PATIENCE, PEER, any_port, pace, quick, until, within};
use crate::traffic::Traffic;

/// The kernel's message comes in milliseconds.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// The engine lets go as soon as its links are gone, which takes 2 s at most.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);

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

/// The only device of an engine: it is let go of with the engine.
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

/// The peer's process holds its device until its engine lets go; this side hears of it at once.
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

/// An engine on two devices goes on with the other, and the removal is over while it lives.
#[test]
fn one_of_two_devices_removed() {
    let clean = Clean::begin();
    let own = Host::new(&[OWN.0, PEER.0], quick());
    let peer = Peer::start(Config::default());
    let lost = connect(&own, peer.addr).expect("a link");
    // The other device, which talks to itself.
    let options = ConnectOptions::new().local(any_port(PEER));
    let kept = within(PATIENCE, "a connect", own.engine.connect_with(peer.addr, &options)).expect("a link");
    assert_eq!((lost.device().as_deref(), kept.device().as_deref()), (Some(OWN.0), Some(PEER.0)));
    let (on_lost, on_kept) = (Traffic::start(&lost), Traffic::start(&kept));
    let since = Instant::now();
    let mut removal = remove(OWN.0);
    judge("one of two devices removed", &lost, on_lost, since, &[ErrorKind::DeviceGone], HEARD_WITHIN);
    on_kept.flows("on the other device");
    let again = within(PATIENCE, "a connect", own.engine.connect_with(peer.addr, &options)).expect("a link");
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
    assert!(removed, "the removal waited for the engine's end");
}
