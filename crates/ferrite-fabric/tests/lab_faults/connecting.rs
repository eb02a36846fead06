//! Connects that fail because nobody listens or the address is unreachable, and many connects at
//! once.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Link};
use ferrite_testkit::lab::{
    Host, LeakCheck, OWN, PEER, TEST_TIMEOUT, Wire, any_port, fault, short_timeouts, slowdown,
};
use ferrite_testkit::{until, within};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::pair::{Peer, connect, show};

/// The timeout of each connect that must fail. The kernel would wait for 81 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The time beyond `CONNECT_TIMEOUT` to wake up and to diagnose the failure.
const SLACK: Duration = Duration::from_secs(1);
/// The limit for an immediate answer. Resolving an unknown neighbour takes a quarter of a second.
const SOON: Duration = Duration::from_secs(1);

/// Returns the error of a connect from `local` to `target`, which must fail within `limit`.
#[track_caller]
fn failure(own: &Host, local: Option<SocketAddr>, target: SocketAddr, limit: Duration) -> Error {
    let mut options = ConnectOptions::new().timeout(CONNECT_TIMEOUT * slowdown());
    if let Some(local) = local {
        options = options.local(local);
    }
    let since = Instant::now();
    let error = within(TEST_TIMEOUT, "a connect", own.fabric.connect_with(target, &options))
        .expect_err("the connect must fail");
    let after = since.elapsed();
    show(&format!("connect to {target}, after {after:.0?}"), &error);
    assert!(after <= limit * slowdown(), "after {after:?}: {error}");
    error
}

#[test]
fn refused_when_nobody_listens() {
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0], Config::default());
    let target = SocketAddr::new(any_port(PEER).ip(), 7);
    let error = failure(&own, Some(any_port(OWN)), target, SOON);
    assert_eq!(error.kind(), ErrorKind::Refused, "{error:?}");
    own.finish();
    leak_check.end();
}

#[test]
fn fails_when_no_host_has_the_address() {
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0], Config::default());
    let target = "10.0.0.77:7471".parse().expect("an address");
    let error = failure(&own, Some(any_port(OWN)), target, CONNECT_TIMEOUT + SLACK);
    assert!([ErrorKind::Unreachable, ErrorKind::Timeout].contains(&error.kind()), "{error:?}");
    assert!(!error.causes().is_empty(), "{error}");
    own.finish();
    leak_check.end();
}

/// No RDMA device has these addresses: two of this host, and one without a route. The fabric also
/// refuses to connect from the address of a device that it does not use.
#[test]
fn fails_when_no_device_has_the_address() {
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0], Config::default());
    let dummy = fault(
        "ip link add d0 type dummy && ip addr add 10.9.0.1/24 dev d0 && ip link set d0 up",
        "ip link delete d0",
    );
    for target in ["10.9.0.1:7471", "127.0.0.1:7471"] {
        let error =
            failure(&own, None, target.parse().expect("an address"), CONNECT_TIMEOUT + SLACK);
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{target}: {error:?}");
    }
    let error = own
        .fabric
        .listen("10.9.0.1:0".parse().expect("an address"))
        .expect_err("no device has the address");
    show("listen on 10.9.0.1", &error);
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    drop(dummy);
    let error = failure(
        &own,
        None,
        "203.0.113.5:7471".parse().expect("an address"),
        CONNECT_TIMEOUT + SLACK,
    );
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:?}");
    // `PEER` is the other device of this host, which the fabric may not use.
    let error =
        failure(&own, Some(any_port(PEER)), "10.0.0.2:7471".parse().expect("an address"), SOON);
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error:?}");
    own.finish();
    leak_check.end();
}

/// A connect fails after the configured timeout, which is shorter than the kernel's.
#[test]
fn times_out_in_a_black_hole() {
    let leak_check = LeakCheck::begin();
    let (own, peer) = (Host::new(&[OWN.0], Config::default()), Peer::start(short_timeouts()));
    // Resolves the neighbour first. Otherwise the connect would fail as if no host had the address.
    let link = connect(&own, peer.addr).expect("a link");
    drop(within(TEST_TIMEOUT, "the grant", link.recv()).expect("a message with the grant"));
    within(TEST_TIMEOUT, "closing", link.close()).expect("closed cleanly");
    drop(link);
    let hole = Wire::new(&["h1"]);
    hole.set("loss 100%");
    let error = failure(&own, Some(any_port(OWN)), peer.addr, CONNECT_TIMEOUT + SLACK);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
    assert!(!error.causes().is_empty(), "{error}");
    drop(hole);
    // The listener's side gives up its half-open link in time, too.
    let limit = peer.host.fabric.config().connection_timeout + TEST_TIMEOUT;
    until(limit, "the half-open link is gone", || peer.host.fabric.stats().links == 0);
    peer.finish();
    own.finish();
    leak_check.end();
}

/// There are many more connects than handshakes may be pending. All succeed, and each link works.
#[test]
fn five_hundred_concurrent_connects() {
    const LINKS: usize = 500;
    /// The limit that the product promises.
    const LIMIT: Duration = Duration::from_secs(60);
    let leak_check = LeakCheck::begin();
    let own = Host::new(&[OWN.0], Config::default());
    let peer = Host::new(&[PEER.0], Config::default());
    let mut listener = peer.fabric.listen(any_port(PEER)).expect("a listener");
    let options = ConnectOptions::new().local(any_port(OWN)).timeout(LIMIT * slowdown());
    let target = listener.local_addr();
    let since = Instant::now();
    let mut here: Vec<Link> = Vec::new();
    let mut there = Vec::new();
    within(LIMIT * slowdown() + SLACK, "all connects end", async {
        let connects: FuturesUnordered<_> =
            (0..LINKS).map(|_| own.fabric.connect_with(target, &options)).collect();
        let connected = async { there = connects.collect::<Vec<_>>().await };
        let accepted = async {
            while here.len() < LINKS {
                here.push(listener.accept().await.expect("listener is up"));
            }
        };
        futures_util::join!(connected, accepted);
    });
    println!("{LINKS} connects at once: all up after {:.1?}", since.elapsed());
    let there: Vec<Link> = there.into_iter().map(|link| link.expect("a link")).collect();
    let since = Instant::now();
    within(LIMIT * slowdown(), "all links carry a message", async {
        for (number, link) in there.iter().enumerate() {
            link.send_bytes(0, &number.to_le_bytes()).await.expect("sent");
        }
        let mut seen = vec![false; LINKS];
        for link in &here {
            let message = link.recv().await.expect("a message").to_vec();
            let number = usize::from_le_bytes(message.try_into().expect("a number"));
            assert!(!std::mem::replace(&mut seen[number], true), "message {number} arrived twice");
        }
    });
    println!("{LINKS} messages on {LINKS} links: {:.1?}", since.elapsed());
    let since = Instant::now();
    within(LIMIT * slowdown(), "all links close", async {
        let endings: FuturesUnordered<_> = there.iter().map(Link::close).collect();
        assert!(
            endings.collect::<Vec<_>>().await.into_iter().all(|end| end.is_ok()),
            "links did not close cleanly"
        );
    });
    println!("{LINKS} links closed: {:.1?}", since.elapsed());
    drop((there, here, listener));
    own.finish();
    peer.finish();
    leak_check.end();
}
