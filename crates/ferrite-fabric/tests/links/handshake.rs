//! Handshakes: how peers connect, and which errors they get when they cannot.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{Hello, Refusal, RefusalCode, Version};
use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Link};
use ferrite_verbs::cm;
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{
    Pair, clear, connect, drive, failed, open_link, pass, poll_once, run_for, until,
};
use super::verbs_peer::VerbsPeer;
use super::{Fixture, TEST_TIMEOUT};
use ferrite_testkit::handshake::HELLO;

/// When nobody listens on the port, the error comes at once.
pub(crate) fn refused_when_nobody_listens(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let fabric = fixture.fabric(host, &Config::default());
    let begun = Instant::now();
    let options = ConnectOptions::new().local(host.any_port());
    let error = failed(
        drive(&[&fabric], fabric.connect_with(SocketAddr::new(peer.ip, 4242), &options)),
        "nobody listens on the port",
    );
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert_eq!(
        error.refusal(),
        None,
        "the refusal comes from the connection manager, not from a Ferrite peer"
    );
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    clear([fabric]);
}

/// When no host has the address, the connect fails after its timeout, or before.
pub(crate) fn fails_when_no_host_has_the_address(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    let fabric = fixture.fabric(host, &Config::default());
    for target in ["10.0.0.77:7471", "192.0.2.1:7471"] {
        let begun = Instant::now();
        let options =
            ConnectOptions::new().local(host.any_port()).timeout(Duration::from_millis(600));
        let connecting = fabric.connect_with(target.parse().expect("an address"), &options);
        let error = failed(drive(&[&fabric], connecting), "no host has the address");
        let kinds = [ErrorKind::Unreachable, ErrorKind::Timeout];
        assert!(kinds.contains(&error.kind()), "{target}: {error:?}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{target}: {:?}", begun.elapsed());
    }
    let from = ConnectOptions::new().local("192.0.2.7:0".parse().expect("an address"));
    let error = failed(
        drive(&[&fabric], fabric.connect_with("10.0.0.2:1".parse().expect("an address"), &from)),
        "not a local address",
    );
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error =
        failed(fabric.listen("192.0.2.7:0".parse().expect("an address")), "not a local address");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    clear([fabric]);
}

/// The program decides about each link in the handshake, and the peer receives the reason.
pub(crate) fn refuses_peers_that_the_program_does_not_admit(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
    let mut listener = b.listen(host.any_port()).expect("listen");
    let (is_open, ip) = (Arc::new(AtomicBool::new(false)), peer.ip);
    let admits = Arc::clone(&is_open);
    listener.admit_if(move |request| {
        let is_from_peer = request.peer.is_some_and(|peer| peer.ip() == ip);
        match admits.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err((RefusalCode::POLICY, format!("closed, from the peer: {is_from_peer}"))),
        }
    });
    let error = failed(drive(&[&a, &b], connect(&a, peer, &listener)), "it is not admitted");
    let refusal = error.refusal().expect("a refusal of the peer");
    assert_eq!((error.kind(), refusal.code), (ErrorKind::Refused, RefusalCode::POLICY));
    assert_eq!((&*refusal.text, b.stats().refused), ("closed, from the peer: true", 1));
    assert!(poll_once(&mut listener.accept()).is_none(), "the program gets no link");
    is_open.store(true, Ordering::Relaxed);
    let links = open_link(&a, peer, &b, &mut listener);
    drop((links, listener));
    clear([a, b]);
}

/// A peer gets the request but never answers.
pub(crate) fn times_out_without_an_answer(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
    let listener = b.listen(host.any_port()).expect("listen");
    let options = ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_millis(500));
    let begun = Instant::now();
    // `b` is not driven.
    let error =
        failed(drive(&[&a], a.connect_with(listener.local_addr(), &options)), "b does not answer");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(490) && took < Duration::from_secs(2), "{took:?}");
    // When `b` runs again, it finds that the other side has given up.
    run_for(&[&a, &b], Duration::from_millis(50));
    assert_eq!(a.stats().links, 0);
    drop(listener);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while b.stats().links > 0 {
        pass(&[&a, &b]);
        assert!(Instant::now() < deadline, "a half-open link is left");
    }
    clear([a, b]);
}

/// Dropping the future cancels the handshake, at any point.
pub(crate) fn dropping_the_future_cancels(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
    let mut listener = b.listen(host.any_port()).expect("listen");
    for passes in 0..12 {
        let mut connecting = connect(&a, peer, &listener);
        for _ in 0..passes {
            run_for(&[&a, &b], Duration::from_micros(1100));
        }
        if passes % 2 == 1 {
            drop(poll_once(&mut connecting));
        }
        drop(connecting);
        // If the link was already made, it is closed.
        until(&[&a, &b], "the link is gone", || a.stats().links == 0);
    }
    run_for(&[&a, &b], Duration::from_millis(20));
    while let Some(link) = poll_once(&mut listener.accept()) {
        drive(&[&a, &b], link.expect("a link").ended()).expect("closed cleanly");
    }
    let links = open_link(&a, peer, &b, &mut listener);
    drop((links, listener));
    clear([a, b]);
}

/// A link is closed if its future is dropped after the link was made but before it was taken.
pub(crate) fn closes_links_that_are_never_taken(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
    let mut listener = b.listen(host.any_port()).expect("listen");
    let connecting = connect(&a, peer, &listener);
    until(&[&a, &b], "the link is made", || a.stats().connected == 1 && b.stats().accepted == 1);
    drop(connecting);
    let link = drive(&[&a, &b], listener.accept()).expect("a link");
    drive(&[&a, &b], link.ended()).expect("closed cleanly");
    drop((link, listener));
    clear([a, b]);
}

/// When the listener is dropped, links waiting to be accepted are closed, accepted links stay up,
/// and later connects are refused.
pub(crate) fn dropping_the_listener_closes_pending_links(fixture: &Fixture) {
    let peer = &fixture.hosts[1];
    let Pair { a, b, listener } = Pair::new(fixture);
    let target = listener.local_addr();
    let pending =
        drive(&[&a.fabric, &b.fabric], connect(&a.fabric, peer, &listener)).expect("a link");
    drop(listener);
    drive(&[&a.fabric, &b.fabric], pending.ended()).expect("closed cleanly");
    let options = ConnectOptions::new().local(peer.any_port());
    let late = drive(&[&a.fabric, &b.fabric], a.fabric.connect_with(target, &options));
    assert_eq!(failed(late, "the listener was dropped").kind(), ErrorKind::Refused);
    a.link.post_bytes(0, b"still here").expect("room in the queue");
    let message = drive(&[&a.fabric, &b.fabric], b.link.recv()).expect("a message");
    assert_eq!(message.to_vec(), b"still here");
    // Listens on the address again. The result is not checked.
    let listener = b.fabric.listen(target);
    drop((pending, message, a.link, b.link, listener));
    clear([a.fabric, b.fabric]);
}

/// A peer of another protocol is passed to the handler of foreign peers.
pub(crate) fn hands_over_foreign_peers(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    let fabric = fixture.fabric(host, &Config::default());
    let listener = fabric.listen(host.any_port()).expect("listen");
    let foreign_peers = listener.foreign_peers();
    std::thread::scope(|scope| {
        let target = listener.local_addr();
        let calling = scope.spawn(move || VerbsPeer::connect(fixture, target, b"*1 PING", &[]));
        let request = drive(&[&fabric], foreign_peers.next()).expect("a request");
        assert!(request.private_data.starts_with(b"*1 PING"));
        assert!(request.id.peer_addr().is_some());
        request.id.reject(b"-ERR another time").expect("reject");
        let error = calling.join().expect("the thread did not panic").err().expect("rejected");
        let answer = error.rejection().expect("a rejection").private_data.clone();
        assert!(answer.starts_with(b"-ERR another time"), "{error}");
    });
    assert_eq!(fabric.stats().foreign_peers, 1);
    drop((foreign_peers, listener));
    clear([fabric]);
}

/// Connects with this `private_data` as the hello, and returns the refusal.
fn refused(fixture: &Fixture, private_data: &[u8]) -> Refusal {
    let host = &fixture.hosts[0];
    let fabric = fixture.fabric(host, &Config::default());
    let listener = fabric.listen(host.any_port()).expect("listen");
    let error = VerbsPeer::connect(fixture, listener.local_addr(), private_data, &[&fabric])
        .err()
        .expect("the listener must refuse");
    let rejection = error.rejection().expect("a rejection");
    let refusal = Refusal::decode(&rejection.private_data).expect("a Ferrite refusal");
    assert_eq!(fabric.stats().refused, 1);
    drop(listener);
    clear([fabric]);
    refusal
}

/// Without a handler for foreign peers, the refusal says which peers the listener accepts.
pub(crate) fn rejects_foreign_peers(fixture: &Fixture) {
    for hello in [&b"*1 PING"[..], b"", b"FRT", &[0xff; 56]] {
        let refusal = refused(fixture, hello);
        assert_eq!(refusal.code, RefusalCode::FOREIGN_PEER, "{refusal}");
        assert!(refusal.text.contains("Ferrite"), "{refusal}");
    }
}

/// A hello with another major version is refused, and the refusal names both versions.
pub(crate) fn other_versions_are_refused(fixture: &Fixture) {
    let theirs = Version { major: Version::CURRENT.major + 1, minor: 3 };
    let refusal = refused(fixture, &Hello { version: theirs, ..HELLO }.encode());
    assert_eq!((refusal.code, refusal.version), (RefusalCode::VERSION, Version::CURRENT));
    for version in [theirs, Version::CURRENT] {
        assert!(refusal.text.contains(&version.to_string()), "{refusal}");
    }
    // A later minor version is accepted.
    let minor = Version { minor: 200, ..Version::CURRENT };
    let host = &fixture.hosts[0];
    let fabric = fixture.fabric(host, &Config::default());
    let mut listener = fabric.listen(host.any_port()).expect("listen");
    let hello = Hello { version: minor, ..HELLO };
    let verbs_peer =
        VerbsPeer::connect(fixture, listener.local_addr(), &hello.encode(), &[&fabric])
            .expect("a link");
    let link = drive(&[&fabric], listener.accept()).expect("a link");
    assert_eq!(link.peer_hello().version, minor);
    link.abort();
    drop((link, listener));
    clear([fabric]);
    drop(verbs_peer);
}

/// Hellos with invalid limits are refused.
pub(crate) fn malformed_hellos_are_refused(fixture: &Fixture) {
    for (hello, what) in [
        (Hello { window: 1, ..HELLO }, "window"),
        (Hello { channels: 0, ..HELLO }, "channels"),
        (Hello { segment_bytes: 10, ..HELLO }, "segment_bytes"),
        (Hello { max_message_bytes: 10, ..HELLO }, "max_message_bytes"),
    ] {
        let refusal = refused(fixture, &hello.encode());
        assert_eq!(refusal.code, RefusalCode::PROTOCOL, "{refusal}");
        assert!(refusal.text.contains(what), "{refusal}");
    }
}

/// The connect fails if the answer is not a valid hello.
pub(crate) fn rejects_invalid_answers(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let other = Hello { version: Version { major: 9, minor: 9 }, ..HELLO };
    for (answer, word) in
        [(&b"+PONG"[..], "not a compatible Ferrite peer"), (&other.encode()[..], "9.9")]
    {
        let fabric = fixture.fabric(peer, &Config::default());
        let listener = cm::Listener::bind(fixture.verbs(), host.any_port(), 4).expect("listen");
        let target = listener.id().local_addr().expect("an address");
        let mut connecting =
            fabric.connect_with(target, &ConnectOptions::new().local(peer.any_port()));
        let verbs_peer = VerbsPeer::accept(fixture, &listener, answer, &[&fabric]);
        assert!(verbs_peer.is_err(), "the handshake must not complete");
        let error = failed(drive(&[&fabric], &mut connecting), "not a valid hello");
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(word), "{error}");
        drop(connecting);
        clear([fabric]);
    }
}

/// A peer that does not complete its handshake is displaced by another that does.
pub(crate) fn displaces_stalled_handshakes(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let config = Config {
        max_half_open: 1,
        connection_timeout: Duration::from_secs(20),
        ..Config::default()
    };
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, &config));
    let mut listener = b.listen(host.any_port()).expect("listen");
    let id =
        cm::resolve(fixture.verbs(), Some(peer.any_port()), listener.local_addr(), TEST_TIMEOUT)
            .expect("resolve");
    let hello = HELLO.encode();
    let context =
        fixture.verbs().device(&peer.device).and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let cq = context.create_completion_queue(4, None, 0).expect("queue");
    let qp =
        domain.create_queue_pair(&ferrite_verbs::QueuePairConfig::new(&cq)).expect("queue pair");
    let params = ferrite_verbs::ConnectParams {
        qp_num: qp.number(),
        srq: false,
        private_data: &hello,
        reads_in: 1,
        reads_out: 1,
        retries: 1,
        rnr_retries: 1,
    };
    id.connect(&params).expect("connect");
    until(&[&b], "the handshake is half open", || b.stats().links == 1);
    // The listener may tell the second peer to retry. The second peer gets its turn long before the
    // timeout of the first.
    let begun = Instant::now();
    let options = ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_secs(10));
    let connecting = a.connect_with(listener.local_addr(), &options);
    let (there, here) = drive(&[&a, &b], async { join!(connecting, listener.accept()) });
    let links = (there.expect("a link"), here.expect("a link"));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(b.stats().handshakes_displaced, 1);
    drop((links, listener, id));
    clear([a, b]);
}

/// Connects beyond `max_connections` are refused, with a retry delay, until a link has ended.
pub(crate) fn refuses_links_beyond_max_connections(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let a = fixture.fabric(peer, &Config::default());
    let b = fixture.fabric(host, &Config { max_connections: 2, ..Config::default() });
    let mut listener = b.listen(host.any_port()).expect("listen");
    let [first, second] = [0, 1].map(|_| open_link(&a, peer, &b, &mut listener));
    let error = failed(drive(&[&a, &b], connect(&a, peer, &listener)), "max_connections is 2");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let refusal = error.refusal().expect("a Ferrite refusal");
    assert_eq!(refusal.code, RefusalCode::LIMIT, "{refusal}");
    assert!(refusal.retry_after_ms > 0, "{refusal:?}");
    drop(first);
    until(&[&a, &b], "one link has ended", || b.stats().links == 1);
    let third = open_link(&a, peer, &b, &mut listener);
    drop((second, third, listener));
    clear([a, b]);
}

/// Many connects at once: all succeed, even if one of the sides allows only four handshakes at a
/// time.
pub(crate) fn fifty_concurrent_connects(fixture: &Fixture) {
    let count = 50 / fixture.work_divisor.min(5);
    let [host, peer] = &fixture.hosts;
    for (ours, theirs) in [(64, 64), (4, 64), (64, 4)] {
        let timeout = Duration::from_secs(20);
        let config = |max_half_open| Config {
            max_half_open,
            connection_timeout: timeout,
            ..Config::default()
        };
        let (a, b) = (fixture.fabric(peer, &config(ours)), fixture.fabric(host, &config(theirs)));
        let mut listener = b.listen(host.any_port()).expect("listen");
        let connecting: Vec<_> = (0..count).map(|_| connect(&a, peer, &listener)).collect();
        let accept = async {
            let mut links = Vec::new();
            while links.len() < count {
                links.push(listener.accept().await.expect("a link"));
            }
            links
        };
        let (there, here) = drive(&[&a, &b], async { join!(join_all(connecting), accept) });
        let there: Vec<Link> = there.into_iter().collect::<Result<_, Error>>().expect("links");
        assert_eq!((there.len(), here.len()), (count, count));
        assert_eq!((a.stats().connected, b.stats().accepted), (count as u64, count as u64));
        for link in &there {
            link.post_bytes(0, b"hello").expect("room in the queue");
        }
        for link in &here {
            assert_eq!(drive(&[&a, &b], link.recv()).expect("a message").to_vec(), b"hello");
        }
        drop((there, here, listener));
        clear([a, b]);
    }
}

/// A listener whose loop was delayed does not displace handshakes that have completed meanwhile,
/// even if another connect request is queued before the events that complete them.
pub(crate) fn keeps_handshakes_when_the_listener_was_delayed(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    // A handshake may be displaced after a twentieth of this time.
    let timeout = Duration::from_secs(4);
    let config = Config { max_half_open: 2, connection_timeout: timeout, ..Config::default() };
    let server = fixture.fabric(host, &config);
    let [first, second] = [0, 1].map(|_| fixture.fabric(peer, &Config::default()));
    let mut listener = server.listen(host.any_port()).expect("listen");
    let step = Duration::from_millis(20);
    let answered = connect(&first, peer, &listener);
    run_for(&[&first], step);
    until(&[&server], "the handshake is half open", || server.stats().links == 1);
    run_for(&[&server], step); // sends the answer, which `first` has not read yet
    let another = connect(&second, peer, &listener);
    run_for(&[&second], step); // sends the second request
    run_for(&[&first], step); // then completes the first handshake
    std::thread::sleep(timeout / 10);
    let accept = async {
        [listener.accept().await.expect("a link"), listener.accept().await.expect("a link")]
    };
    let fabrics = [&server, &first, &second];
    let (there, other, here) = drive(&fabrics, async { join!(answered, another, accept) });
    assert_eq!(server.stats().handshakes_displaced, 0);
    drop((there.expect("a link"), other.expect("a link"), here, listener));
    clear([server, first, second]);
}

/// One fabric on both devices connects to itself: over the wire, and within one device.
pub(crate) fn connects_to_itself(fixture: &Fixture) {
    let fabric = fixture.builder().build().expect("a fabric");
    let [host, peer] = &fixture.hosts;
    assert!(fabric.devices().len() >= 2, "{:?}", fabric.devices());
    let mut listener = fabric.listen(host.any_port()).expect("listen");
    for from in [peer, host] {
        let connecting = connect(&fabric, from, &listener);
        let (there, here) = fabric.block_on(async { join!(connecting, listener.accept()) });
        let (there, here) = (there.expect("connect"), here.expect("accept"));
        assert_eq!(
            (there.device(), here.device()),
            (Some(from.device.clone()), Some(host.device.clone()))
        );
        assert_eq!(there.peer_addr(), Some(listener.local_addr()));
        assert_eq!(here.peer_addr(), there.local_addr());
        there.post_bytes(0, &[7; 100_000]).expect("room in the queue");
        assert_eq!(fabric.block_on(here.recv()).expect("a message").len(), 100_000);
        fabric.block_on(there.close()).expect("closed cleanly");
    }
    drop(listener);
    clear([fabric]);
}
