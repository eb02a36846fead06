//! Devices, ports, queue pairs and paths of the fake provider break while operations are pending.
//! Every pending operation fails with the first cause, and all memory is returned.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Fabric};
use ferrite_verbs::fake::World;
use futures_util::future::join_all;
use futures_util::join;

use super::faults::{assert_root_cause, run};
use crate::links::pair::{
    End, Pair, assert_unused, buffer, clear, connect, drive, failed, filled, open_link, poll_once,
    run_for, until,
};

/// The operations that are pending on a link when it breaks. The device already has some of them,
/// the others are queued.
struct PendingOperations {
    sending: Vec<ferrite_fabric::Sending>,
    reading: Vec<ferrite_fabric::Reading>,
    writing: Vec<ferrite_fabric::Writing>,
}

/// Returns settings under which operations stay pending. The peer is not driven and has 16
/// receives. The device holds further requests, and the send queue holds the rest.
fn config_that_blocks() -> Config {
    Config { recv_queue_depth: 16, window: 30, send_queue_depth: 20, ..Config::default() }
}

impl PendingOperations {
    fn new(pair: &Pair) -> Self {
        let (from, to) = (&pair.a, &pair.b);
        let region = to
            .link
            .register_memory(buffer(&to.fabric, &[1; 1000]), Rights::READ_WRITE)
            .expect("a region");
        let token = region.grant(&to.link);
        let mut sending: Vec<_> =
            (0..60).map(|_| from.link.send(0, filled(&from.fabric, &[1; 1000]))).collect();
        for future in &mut sending {
            poll_once(future);
        }
        let reading = (0..5).map(|_| {
            let buf = from.fabric.buffer(100).expect("memory");
            from.link.rdma_read(&token, 0, buf).expect("room in the queue")
        });
        let reading = reading.collect();
        let writing = (0..5).map(|imm| {
            let buf = filled(&from.fabric, &[1; 100]);
            from.link.rdma_write_imm(&token, 0, buf, imm).expect("room in the queue")
        });
        let writing = writing.collect();
        // Drops the region. Its buffer is free or in quarantine once the link is gone.
        pair.b.fabric.poll();
        std::mem::drop(region.expires_in(Duration::from_secs(3600)));
        Self { sending, reading, writing }
    }

    /// Waits for all operations, for the end of the link and for a receive, and returns their
    /// errors.
    fn into_errors(self, fabric: &Fabric, end: &End) -> Vec<Error> {
        let Self { sending, reading, writing } = self;
        let all = async {
            join!(
                join_all(sending),
                join_all(reading),
                join_all(writing),
                end.link.recv(),
                end.link.ended()
            )
        };
        let (sent, read, written, received, ended) = drive(&[fabric], all);
        let mut errors: Vec<Error> = sent.into_iter().filter_map(Result::err).collect();
        assert!(!errors.is_empty(), "no operation was pending");
        let read = read.into_iter().filter_map(Result::err);
        errors.extend(read.map(|failed| {
            assert!(failed.buf.is_some(), "the buffer must be returned");
            failed.error
        }));
        errors.extend(written.into_iter().filter_map(Result::err));
        errors.extend(received.err());
        errors.extend(ended.err());
        errors
    }
}

/// Causes `fault` while operations are pending, and checks that all fail with the same error.
fn check_fault(kinds: &[ErrorKind], fault: impl FnOnce(&World, &Pair)) {
    run(|world, fixture| {
        let pair = Pair::with(fixture, &config_that_blocks());
        let pending = PendingOperations::new(&pair);
        let begun = Instant::now();
        fault(world, &pair);
        let errors = pending.into_errors(&pair.a.fabric, &pair.a);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(errors.len() > 40, "only {} operations failed", errors.len());
        let first = &errors[0];
        for error in &errors {
            assert_root_cause(error, kinds);
            assert_eq!(
                error.to_string(),
                first.to_string(),
                "every operation must report the first failure"
            );
        }
        drop(errors);
        let Pair { a, b, listener } = pair;
        // The peer's link ends, too: with an error of its own, or because it is dropped here.
        drop((a.link, b.link, listener));
        let pools = [&a.fabric, &b.fabric].map(|fabric| fabric.pool().clone());
        run_for(&[&a.fabric, &b.fabric], Duration::from_millis(20));
        assert_eq!(a.fabric.stats().in_flight, 0);
        drop((a.fabric, b.fabric));
        pools.iter().for_each(assert_unused);
    });
}

#[test]
fn broken_queue_pair() {
    check_fault(&[ErrorKind::LinkDown], |world, pair| {
        assert!(world.break_queue_pair(pair.a.link.qp_num().expect("on RDMA")));
    });
}

#[test]
fn broken_peer_queue_pair() {
    check_fault(&[ErrorKind::LinkDown], |world, pair| {
        assert!(world.break_queue_pair(pair.b.link.qp_num().expect("on RDMA")));
        // The device retries requests that wait for a receive, and gets no answer.
        pair.b.fabric.poll();
    });
}

#[test]
fn port_down() {
    check_fault(&[ErrorKind::LinkDown], |world, _| {
        world.device_down("fake2");
    });
}

#[test]
fn peer_port_down() {
    check_fault(&[ErrorKind::LinkDown], |world, _| {
        world.device_down("fake1");
    });
}

#[test]
fn device_removed() {
    check_fault(&[ErrorKind::DeviceGone], |world, _| world.remove_device("fake2"));
}

#[test]
fn peer_device_removed() {
    check_fault(&[ErrorKind::LinkDown], |world, _| world.remove_device("fake1"));
}

#[test]
fn black_hole() {
    check_fault(&[ErrorKind::LinkDown], |world, _| world.black_hole("fake1", "fake2"));
}

/// When one of a fabric's devices is removed, links on the other are not affected.
#[test]
fn one_of_two_devices_removed() {
    run(|world, fixture| {
        let [host, peer] = &fixture.hosts;
        let fabric = fixture.builder().build().expect("a fabric");
        let mut listeners =
            [host, peer].map(|host| fabric.listen(host.any_port()).expect("listen"));
        let mut links = Vec::new();
        for (at, listener) in listeners.iter_mut().enumerate() {
            let from = &fixture.hosts[at];
            let connecting = connect(&fabric, from, listener);
            let (there, here) = fabric.block_on(async { join!(connecting, listener.accept()) });
            links.push([there.expect("connect"), here.expect("accept")]);
        }
        assert!(links[0].iter().all(|link| link.device().as_deref() == Some("fake1")));
        world.remove_device("fake2");
        for link in &links[1] {
            let error = failed(fabric.block_on(link.ended()), "the device is gone");
            assert_root_cause(&error, &[ErrorKind::DeviceGone]);
        }
        let error = failed(fabric.block_on(listeners[1].accept()), "the device is gone");
        assert_root_cause(&error, &[ErrorKind::DeviceGone]);
        let options =
            ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_millis(500));
        let target = listeners[0].local_addr();
        failed(fabric.block_on(fabric.connect_with(target, &options)), "the device was removed");
        links[0][0].post_bytes(0, b"still here").expect("room in the queue");
        assert_eq!(fabric.block_on(links[0][1].recv()).expect("a message").to_vec(), b"still here");
        drop((links, listeners));
        clear([fabric]);
    });
}

/// A handshake into a black hole times out. Once the path is restored, the next one succeeds.
#[test]
fn black_hole_during_handshake() {
    run(|world, fixture| {
        let [host, peer] = &fixture.hosts;
        let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
        let mut listener = b.listen(host.any_port()).expect("listen");
        world.black_hole("fake1", "fake2");
        let options =
            ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_millis(300));
        let begun = Instant::now();
        let error = failed(
            drive(&[&a, &b], a.connect_with(listener.local_addr(), &options)),
            "the path is a black hole",
        );
        assert_root_cause(&error, &[ErrorKind::Timeout, ErrorKind::Unreachable]);
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        world.heal("fake1", "fake2");
        let links = open_link(&a, peer, &b, &mut listener);
        drop((links, listener));
        clear([a, b]);
    });
}

/// A short outage during which nothing is sent does not end the link.
#[test]
fn idle_link_survives_a_black_hole() {
    run(|world, fixture| {
        let pair = Pair::new(fixture);
        world.black_hole("fake1", "fake2");
        pair.run_for(Duration::from_millis(50));
        world.heal("fake1", "fake2");
        pair.a.link.post_bytes(0, b"still here").expect("room in the queue");
        assert_eq!(pair.receive(&pair.b).to_vec(), b"still here");
        pair.end();
    });
}

/// 300 links close at once, at both ends.
#[test]
fn many_links_close_at_once() {
    run(|_, fixture| {
        let mut pair = Pair::with(
            fixture,
            &Config { close_timeout: Duration::from_secs(30), ..Config::default() },
        );
        let links: Vec<_> = (0..300).map(|_| pair.another(fixture)).collect();
        let ending: Vec<_> = links.iter().flatten().map(ferrite_fabric::Link::close).collect();
        for ended in pair.drive(join_all(ending)) {
            ended.expect("closed cleanly");
        }
        drop(links);
        until(&[&pair.a.fabric, &pair.b.fabric], "the links are gone", || {
            pair.a.fabric.stats().links == 1
        });
        pair.end();
    });
}
