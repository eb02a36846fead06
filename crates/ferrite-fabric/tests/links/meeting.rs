//! How peers meet, and how they are told that they do not.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{Hello, Refusal, RefusalCode, Version};
use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Link};
use ferrite_verbs::cm;
use futures_util::future::join_all;
use futures_util::join;

use super::hello::HELLO;
use super::pair::{Pair, call, clear, drive, failed, meet, once, pass, run_for, until};
use super::raw::Raw;
use super::{Fixture, PATIENCE};

/// Nobody listens at that port: said at once.
pub(crate) fn nobody_listens(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let engine = fixture.engine(host, &Config::default());
    let begun = Instant::now();
    let options = ConnectOptions::new().local(host.any_port());
    let error = failed(
        drive(&[&engine], engine.connect_with(SocketAddr::new(peer.ip, 4242), &options)),
        "nobody listens",
    );
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert_eq!(error.refusal(), None, "the connection manager said so, no peer of ours");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    clear([engine]);
}

/// No host has the address: said when the time is over, or before.
pub(crate) fn nobody_there(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    let engine = fixture.engine(host, &Config::default());
    for target in ["10.0.0.77:7471", "192.0.2.1:7471"] {
        let begun = Instant::now();
        let options = ConnectOptions::new().local(host.any_port()).timeout(Duration::from_millis(600));
        let connecting = engine.connect_with(target.parse().expect("an address"), &options);
        let error = failed(drive(&[&engine], connecting), "nobody is there");
        let kinds = [ErrorKind::Unreachable, ErrorKind::Timeout];
        assert!(kinds.contains(&error.kind()), "{target}: {error:?}");
        assert!(begun.elapsed() < Duration::from_secs(4), "{target}: {:?}", begun.elapsed());
    }
    let from = ConnectOptions::new().local("192.0.2.7:0".parse().expect("an address"));
    let error =
        failed(drive(&[&engine], engine.connect_with("10.0.0.2:1".parse().expect("one"), &from)), "not ours");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    let error = failed(engine.listen("192.0.2.7:0".parse().expect("an address")), "not ours");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    clear([engine]);
}

/// A peer that accepts the packet and never answers.
pub(crate) fn nobody_answers(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.engine(host, &Config::default()));
    let listener = b.listen(host.any_port()).expect("listen");
    let options = ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_millis(500));
    let begun = Instant::now();
    // `b` is not driven.
    let error = failed(drive(&[&a], a.connect_with(listener.local_addr(), &options)), "b sleeps");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(490) && took < Duration::from_secs(2), "{took:?}");
    // When it wakes it finds that the asker has given up.
    run_for(&[&a, &b], Duration::from_millis(50));
    assert_eq!(a.stats().links, 0);
    drop(listener);
    let deadline = Instant::now() + PATIENCE;
    while b.stats().links > 0 {
        pass(&[&a, &b]);
        assert!(Instant::now() < deadline, "a half-open link stays");
    }
    clear([a, b]);
}

/// Dropping the future gives the handshake up, at whatever point.
pub(crate) fn given_up(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.engine(host, &Config::default()));
    let mut listener = b.listen(host.any_port()).expect("listen");
    for passes in 0..12 {
        let mut connecting = call(&a, peer, &listener);
        for _ in 0..passes {
            run_for(&[&a, &b], Duration::from_micros(1100));
        }
        if passes % 2 == 1 {
            drop(once(&mut connecting));
        }
        drop(connecting);
        // The link may have come about; then it is closed, not left to itself.
        until(&[&a, &b], "nothing is left of it", || a.stats().links == 0);
    }
    run_for(&[&a, &b], Duration::from_millis(20));
    while let Some(link) = once(&mut listener.accept()) {
        drive(&[&a, &b], link.expect("a link").ended()).expect("closed in good order");
    }
    let links = meet(&a, peer, &b, &mut listener);
    drop((links, listener));
    clear([a, b]);
}

/// A link whose future was never asked after it was made does not stay.
pub(crate) fn made_and_never_taken(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let [a, b] = [peer, host].map(|host| fixture.engine(host, &Config::default()));
    let mut listener = b.listen(host.any_port()).expect("listen");
    let connecting = call(&a, peer, &listener);
    until(&[&a, &b], "it is made", || a.stats().connected == 1 && b.stats().accepted == 1);
    drop(connecting);
    let link = drive(&[&a, &b], listener.accept()).expect("a link");
    drive(&[&a, &b], link.ended()).expect("closed in good order");
    drop((link, listener));
    clear([a, b]);
}

/// Who is in line when the listener goes is told; who was accepted stays; who comes later is refused.
pub(crate) fn dropped_listener(fixture: &Fixture) {
    let peer = &fixture.hosts[1];
    let Pair { a, b, listener } = Pair::new(fixture);
    let target = listener.local_addr();
    let in_line = drive(&[&a.engine, &b.engine], call(&a.engine, peer, &listener)).expect("a link");
    drop(listener);
    drive(&[&a.engine, &b.engine], in_line.ended()).expect("closed in good order");
    let options = ConnectOptions::new().local(peer.any_port());
    let late = drive(&[&a.engine, &b.engine], a.engine.connect_with(target, &options));
    assert_eq!(failed(late, "nobody listens").kind(), ErrorKind::Refused);
    a.link.post_bytes(0, b"still here").expect("room");
    let message = drive(&[&a.engine, &b.engine], b.link.recv()).expect("a message");
    assert_eq!(message.to_vec(), b"still here");
    // The address is free again.
    let listener = b.engine.listen(target);
    drop((in_line, message, a.link, b.link, listener));
    clear([a.engine, b.engine]);
}

/// A peer of another protocol is handed to whoever takes such.
pub(crate) fn strangers_are_handed_over(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    let engine = fixture.engine(host, &Config::default());
    let listener = engine.listen(host.any_port()).expect("listen");
    let strangers = listener.strangers();
    std::thread::scope(|scope| {
        let target = listener.local_addr();
        let calling = scope.spawn(move || Raw::call(fixture, target, b"*1 PING", &[]));
        let request = drive(&[&engine], strangers.next()).expect("a request");
        assert!(request.private_data.starts_with(b"*1 PING"));
        assert!(request.id.peer_addr().is_some());
        request.id.reject(b"-ERR another time").expect("reject");
        let error = calling.join().expect("no panic").err().expect("rejected");
        let said = error.rejection().expect("a rejection").private_data.clone();
        assert!(said.starts_with(b"-ERR another time"), "{error}");
    });
    assert_eq!(engine.stats().strangers, 1);
    drop((strangers, listener));
    clear([engine]);
}

/// Says hello as `private_data`, and reads the refusal.
fn refused(fixture: &Fixture, private_data: &[u8]) -> Refusal {
    let host = &fixture.hosts[0];
    let engine = fixture.engine(host, &Config::default());
    let listener = engine.listen(host.any_port()).expect("listen");
    let error = Raw::call(fixture, listener.local_addr(), private_data, &[&engine]).err().expect("refused");
    let rejection = error.rejection().expect("a rejection");
    let refusal = Refusal::decode(&rejection.private_data).expect("a refusal of ours");
    assert_eq!(engine.stats().refused, 1);
    drop(listener);
    clear([engine]);
    refusal
}

/// Nobody takes strangers: they are told whom this listener takes.
pub(crate) fn strangers_are_refused(fixture: &Fixture) {
    for hello in [&b"*1 PING"[..], b"", b"FRT", &[0xff; 56]] {
        let refusal = refused(fixture, hello);
        assert_eq!(refusal.code, RefusalCode::STRANGER, "{refusal}");
        assert!(refusal.text.contains("Ferrite"), "{refusal}");
    }
}

/// Another major version: both are named.
pub(crate) fn other_versions_are_refused(fixture: &Fixture) {
    let theirs = Version { major: Version::CURRENT.major + 1, minor: 3 };
    let refusal = refused(fixture, &Hello { version: theirs, ..HELLO }.encode());
    assert_eq!((refusal.code, refusal.version), (RefusalCode::VERSION, Version::CURRENT));
    for version in [theirs, Version::CURRENT] {
        assert!(refusal.text.contains(&version.to_string()), "{refusal}");
    }
    // A later minor one is welcome.
    let minor = Version { minor: 200, ..Version::CURRENT };
    let host = &fixture.hosts[0];
    let engine = fixture.engine(host, &Config::default());
    let mut listener = engine.listen(host.any_port()).expect("listen");
    let hello = Hello { version: minor, ..HELLO };
    let raw = Raw::call(fixture, listener.local_addr(), &hello.encode(), &[&engine]).expect("a link");
    let link = drive(&[&engine], listener.accept()).expect("a link");
    assert_eq!(link.peer_hello().version, minor);
    link.abort();
    drop((link, listener));
    clear([engine]);
    drop(raw);
}

/// Limits that no peer may have.
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

/// We call, and what answers is none of ours.
pub(crate) fn strange_answers(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let other = Hello { version: Version { major: 9, minor: 9 }, ..HELLO };
    for (answer, word) in [(&b"+PONG"[..], "not a Ferrite peer"), (&other.encode()[..], "9.9")] {
        let engine = fixture.engine(peer, &Config::default());
        let listener = cm::Listener::bind(fixture.verbs(), host.any_port(), 4).expect("listen");
        let target = listener.id().local_addr().expect("an address");
        let mut connecting = engine.connect_with(target, &ConnectOptions::new().local(peer.any_port()));
        let raw = Raw::answer(fixture, &listener, answer, &[&engine]);
        assert!(raw.is_err(), "we do not finish the handshake");
        let error = failed(drive(&[&engine], &mut connecting), "not ours");
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(word), "{error}");
        drop(connecting);
        clear([engine]);
    }
}

/// A peer that begins the handshake and does not end it makes place for another that means it.
pub(crate) fn half_open(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let config =
        Config { max_half_open: 1, connection_timeout: Duration::from_secs(20), ..Config::default() };
    let [a, b] = [peer, host].map(|host| fixture.engine(host, &config));
    let mut listener = b.listen(host.any_port()).expect("listen");
    let id = cm::resolve(fixture.verbs(), Some(peer.any_port()), listener.local_addr(), PATIENCE)
        .expect("resolve");
    let hello = HELLO.encode();
    let context = fixture.verbs().device(&peer.device).and_then(|device| device.open()).expect("device");
    let domain = context.allocate_protection_domain().expect("domain");
    let cq = context.create_completion_queue(4, None, 0).expect("queue");
    let qp = domain.create_queue_pair(&ferrite_verbs::QueuePairConfig::new(&cq)).expect("queue pair");
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
    until(&[&b], "it is half open", || b.stats().links == 1);
    // Another may be told to come again, comes again, and gets its turn long before the first has used up its time.
    let begun = Instant::now();
    let options = ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_secs(10));
    let connecting = a.connect_with(listener.local_addr(), &options);
    let (there, here) = drive(&[&a, &b], async { join!(connecting, listener.accept()) });
    let links = (there.expect("a link"), here.expect("a link"));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!(b.stats().crowded_out, 1);
    drop((links, listener, id));
    clear([a, b]);
}

/// As many as there may be; one more is told so, and may come when one has gone.
pub(crate) fn limit_of_links(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let a = fixture.engine(peer, &Config::default());
    let b = fixture.engine(host, &Config { max_connections: 2, ..Config::default() });
    let mut listener = b.listen(host.any_port()).expect("listen");
    let [first, second] = [0, 1].map(|_| meet(&a, peer, &b, &mut listener));
    let error = failed(drive(&[&a, &b], call(&a, peer, &listener)), "two are the limit");
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let refusal = error.refusal().expect("a refusal of ours");
    assert_eq!(refusal.code, RefusalCode::LIMIT, "{refusal}");
    assert!(refusal.retry_after_ms > 0, "{refusal:?}");
    drop(first);
    until(&[&a, &b], "one has gone", || b.stats().links == 1);
    let third = meet(&a, peer, &b, &mut listener);
    drop((second, third, listener));
    clear([a, b]);
}

/// Many at once, with few handshakes at a time on either side: all come through.
pub(crate) fn fifty_at_once(fixture: &Fixture) {
    let count = 50 / fixture.slower.min(5);
    let [host, peer] = &fixture.hosts;
    for (ours, theirs) in [(64, 64), (4, 64), (64, 4)] {
        let timeout = Duration::from_secs(20);
        let config =
            |max_half_open| Config { max_half_open, connection_timeout: timeout, ..Config::default() };
        let (a, b) = (fixture.engine(peer, &config(ours)), fixture.engine(host, &config(theirs)));
        let mut listener = b.listen(host.any_port()).expect("listen");
        let connecting: Vec<_> = (0..count).map(|_| call(&a, peer, &listener)).collect();
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
            link.post_bytes(0, b"hello").expect("room");
        }
        for link in &here {
            assert_eq!(drive(&[&a, &b], link.recv()).expect("a message").to_vec(), b"hello");
        }
        drop((there, here, listener));
        clear([a, b]);
    }
}

/// A listener that was away for long: what peers said meanwhile counts, although others ask before it is read.
pub(crate) fn listener_was_away(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    let timeout = Duration::from_secs(4); // a twentieth of it is what a handshake has before it may be pushed out
    let server =
        fixture.engine(host, &Config { max_half_open: 2, connection_timeout: timeout, ..Config::default() });
    let [first, second] = [0, 1].map(|_| fixture.engine(peer, &Config::default()));
    let mut listener = server.listen(host.any_port()).expect("listen");
    let answered = call(&first, peer, &listener);
    run_for(&[&first], Duration::from_millis(20));
    until(&[&server], "it is half open", || server.stats().links == 1);
    run_for(&[&server], Duration::from_millis(20)); // the answer is sent, and the caller has not read it
    let another = call(&second, peer, &listener);
    run_for(&[&second], Duration::from_millis(20)); // asks, before
    run_for(&[&first], Duration::from_millis(20)); // the first says that it is there
    std::thread::sleep(timeout / 10);
    let accept =
        async { [listener.accept().await.expect("a link"), listener.accept().await.expect("a link")] };
    let engines = [&server, &first, &second];
    let (there, other, here) = drive(&engines, async { join!(answered, another, accept) });
    assert_eq!(server.stats().crowded_out, 0);
    drop((there.expect("a link"), other.expect("a link"), here, listener));
    clear([server, first, second]);
}

/// One engine on both devices talks to itself: over the wire, and over one device.
pub(crate) fn with_itself(fixture: &Fixture) {
    let engine = fixture.builder().build().expect("an engine");
    let [host, peer] = &fixture.hosts;
    assert!(engine.devices().len() >= 2, "{:?}", engine.devices());
    let mut listener = engine.listen(host.any_port()).expect("listen");
    for from in [peer, host] {
        let connecting = call(&engine, from, &listener);
        let (there, here) = engine.block_on(async { join!(connecting, listener.accept()) });
        let (there, here) = (there.expect("connect"), here.expect("accept"));
        assert_eq!((there.device(), here.device()), (Some(from.device.clone()), Some(host.device.clone())));
        assert_eq!(there.peer_addr(), Some(listener.local_addr()));
        assert_eq!(here.peer_addr(), there.local_addr());
        there.post_bytes(0, &[7; 100_000]).expect("room");
        assert_eq!(engine.block_on(here.recv()).expect("a message").len(), 100_000);
        engine.block_on(there.close()).expect("in good order");
    }
    drop(listener);
    clear([engine]);
}
