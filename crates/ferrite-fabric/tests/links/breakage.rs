//! What only the fake can do: devices, ports, queue pairs and wires break while things are under
//! way. Everything that waits is told the first failure, and everything comes back.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ConnectOptions, Error, ErrorKind, Fabric};
use ferrite_verbs::fake::World;
use futures_util::future::join_all;
use futures_util::join;

use crate::faults::{assert_told, run};
use crate::links::pair::{
    End, Pair, assert_unused, buffer, call, clear, drive, failed, filled, meet, once, run_for,
    until,
};

/// What is under way on a link when something breaks: sends that wait, requests that the device
/// has, a receive.
struct UnderWay {
    sending: Vec<ferrite_fabric::Sending>,
    reading: Vec<ferrite_fabric::Reading>,
    writing: Vec<ferrite_fabric::Writing>,
}

/// The peer is not driven, and has 16 receives: the device keeps the rest, and the queue what is
/// behind that.
fn stuck() -> Config {
    Config { recv_queue_depth: 16, window: 30, send_queue_depth: 20, ..Config::default() }
}

impl UnderWay {
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
            once(future);
        }
        let reading = (0..5).map(|_| {
            let buf = from.fabric.buffer(100).expect("memory");
            from.link.rdma_read(&token, 0, buf).expect("room")
        });
        let reading = reading.collect();
        let writing = (0..5).map(|imm| {
            let buf = filled(&from.fabric, &[1; 100]);
            from.link.rdma_write_imm(&token, 0, buf, imm).expect("room")
        });
        let writing = writing.collect();
        // Its buffer is in quarantine or free when the link has gone.
        pair.b.fabric.poll();
        std::mem::drop(region.expires_in(Duration::from_secs(3600)));
        Self { sending, reading, writing }
    }

    /// How everything ended; with the end of the link, and of a receive.
    fn ends(self, fabric: &Fabric, end: &End) -> Vec<Error> {
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
        assert!(!errors.is_empty(), "some were under way");
        let read = read.into_iter().filter_map(Result::err);
        errors.extend(read.map(|failed| {
            assert!(failed.buf.is_some(), "the buffer comes back");
            failed.error
        }));
        errors.extend(written.into_iter().filter_map(Result::err));
        errors.extend(received.err());
        errors.extend(ended.err());
        errors
    }
}

fn breaks(kinds: &[ErrorKind], fault: impl FnOnce(&World, &Pair)) {
    run(|world, fixture| {
        let pair = Pair::with(fixture, &stuck());
        let under_way = UnderWay::new(&pair);
        let begun = Instant::now();
        fault(world, &pair);
        let errors = under_way.ends(&pair.a.fabric, &pair.a);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(errors.len() > 40, "{}", errors.len());
        let first = &errors[0];
        for error in &errors {
            assert_told(error, kinds);
            assert_eq!(error.to_string(), first.to_string(), "all are told the first failure");
        }
        drop(errors);
        let Pair { a, b, listener } = pair;
        // The peer's side ends, too, for its own reason; and if it is told nothing, when it is
        // dropped.
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
    breaks(&[ErrorKind::LinkDown], |world, pair| {
        assert!(world.break_queue_pair(pair.a.link.qp_num().expect("on RDMA")));
    });
}

#[test]
fn broken_queue_pair_of_the_peer() {
    breaks(&[ErrorKind::LinkDown], |world, pair| {
        assert!(world.break_queue_pair(pair.b.link.qp_num().expect("on RDMA")));
        // What waits for a receive is tried again, and nobody answers.
        pair.b.fabric.poll();
    });
}

#[test]
fn port_down() {
    breaks(&[ErrorKind::LinkDown], |world, _| {
        world.device_down("fake2");
    });
}

#[test]
fn port_of_the_peer_down() {
    breaks(&[ErrorKind::LinkDown], |world, _| {
        world.device_down("fake1");
    });
}

#[test]
fn device_removed() {
    breaks(&[ErrorKind::DeviceGone], |world, _| world.remove_device("fake2"));
}

#[test]
fn device_of_the_peer_removed() {
    breaks(&[ErrorKind::LinkDown], |world, _| world.remove_device("fake1"));
}

#[test]
fn black_hole() {
    breaks(&[ErrorKind::LinkDown], |world, _| world.black_hole("fake1", "fake2"));
}

/// One of a fabric's devices goes: links on the other do not notice.
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
            let connecting = call(&fabric, from, listener);
            let (there, here) = fabric.block_on(async { join!(connecting, listener.accept()) });
            links.push([there.expect("connect"), here.expect("accept")]);
        }
        assert!(links[0].iter().all(|link| link.device().as_deref() == Some("fake1")));
        world.remove_device("fake2");
        for link in &links[1] {
            let error = failed(fabric.block_on(link.ended()), "its device is gone");
            assert_told(&error, &[ErrorKind::DeviceGone]);
        }
        let error = failed(fabric.block_on(listeners[1].accept()), "its device is gone");
        assert_told(&error, &[ErrorKind::DeviceGone]);
        let options =
            ConnectOptions::new().local(peer.any_port()).timeout(Duration::from_millis(500));
        let target = listeners[0].local_addr();
        failed(fabric.block_on(fabric.connect_with(target, &options)), "no such device");
        links[0][0].post_bytes(0, b"still here").expect("room");
        assert_eq!(fabric.block_on(links[0][1].recv()).expect("a message").to_vec(), b"still here");
        drop((links, listeners));
        clear([fabric]);
    });
}

/// A handshake into a black hole ends by the clock; when the hole is healed the next succeeds.
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
            "nobody hears",
        );
        assert_told(&error, &[ErrorKind::Timeout, ErrorKind::Unreachable]);
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        world.heal("fake1", "fake2");
        let links = meet(&a, peer, &b, &mut listener);
        drop((links, listener));
        clear([a, b]);
    });
}

/// A short outage in which nothing was sent is nobody's business.
#[test]
fn idle_through_a_black_hole() {
    run(|world, fixture| {
        let pair = Pair::new(fixture);
        world.black_hole("fake1", "fake2");
        pair.run_for(Duration::from_millis(50));
        world.heal("fake1", "fake2");
        pair.a.link.post_bytes(0, b"still here").expect("room");
        assert_eq!(pair.receive(&pair.b).to_vec(), b"still here");
        pair.end();
    });
}

/// A thousand farewells at once.
#[test]
fn many_part_at_once() {
    run(|_, fixture| {
        let mut pair = Pair::with(
            fixture,
            &Config { close_timeout: Duration::from_secs(30), ..Config::default() },
        );
        let links: Vec<_> = (0..300).map(|_| pair.another(fixture)).collect();
        let ending: Vec<_> = links.iter().flatten().map(ferrite_fabric::Link::close).collect();
        for ended in pair.drive(join_all(ending)) {
            ended.expect("in good order");
        }
        drop(links);
        until(&[&pair.a.fabric, &pair.b.fabric], "they are gone", || {
            pair.a.fabric.stats().links == 1
        });
        pair.end();
    });
}
