//! Faults that only the fake provider can cause: each call that can fail does so once. The error is
//! reported, and the failed attempt leaves nothing behind.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, Error, ErrorKind, Fabric, Rdma};
use ferrite_verbs::fake::{Objects, World};
use futures_util::join;

use crate::links::pair::{
    Pair, buffer, clear, connect, drive, failed, filled, open_link, pattern, poll_once, run_for,
};
use crate::links::{Fixture, KIB};

const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;

/// Runs a test in a world of its own and checks that it leaves nothing behind.
pub(crate) fn run(test: impl FnOnce(&World, &Fixture)) {
    let (world, fixture) = crate::world(|_| {});
    test(&world, &fixture);
    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// Checks the kind of an error, and that it reports the first cause: a flushed request only shows
/// that something else failed before.
pub(crate) fn assert_root_cause(error: &Error, kinds: &[ErrorKind]) {
    assert!(kinds.contains(&error.kind()), "{error:?}");
    assert!(!error.to_string().contains("flush"), "{error}");
}

#[test]
fn failed_calls_while_building_a_fabric() {
    run(|world, fixture| {
        let build = || fixture.builder().device("fake1").build();
        for (call, errno, kind) in [
            ("ibv_open_device", 13, ErrorKind::Resources),
            ("ibv_query_device", EIO, ErrorKind::DeviceGone),
            ("ibv_alloc_pd", ENOMEM, ErrorKind::Resources),
            ("ibv_reg_mr", ENOMEM, ErrorKind::Resources),
            ("ibv_create_comp_channel", 24, ErrorKind::Resources),
            ("ibv_create_cq", ENOMEM, ErrorKind::Resources),
            ("ibv_create_srq", ENOMEM, ErrorKind::Resources),
        ] {
            world.fail_next(call, errno);
            let error = failed(build(), call);
            assert_eq!(error.kind(), kind, "{call}: {error}");
            assert!(error.to_string().contains(call), "{call}: {error}");
            assert_eq!(world.objects(), Objects::default(), "{call}");
        }
        world.fail_next("ibv_get_device_list", 38);
        let error = failed(build(), "no kernel support");
        assert_eq!(error.kind(), ErrorKind::Absent, "{error}");
        assert!(error.absence().is_some());
        let error =
            failed(Fabric::builder(&World::new().verbs()).rdma(Rdma::Require).build(), "no device");
        assert_eq!(error.kind(), ErrorKind::Absent, "{error}");
        build().expect("a fabric");
    });
}

#[test]
fn failed_calls_while_listening() {
    run(|world, fixture| {
        let fabric = fixture.fabric(&fixture.hosts[0], &Config::default());
        world.fail_next("rdma_create_event_channel", 19);
        let error = failed(fabric.listen(fixture.hosts[0].any_port()), "no connection manager");
        assert_eq!(error.kind(), ErrorKind::Absent, "{error}");
        fabric.listen(fixture.hosts[0].any_port()).expect("listen");
        for (call, errno, kind) in [
            ("rdma_create_id", 24, ErrorKind::Resources),
            ("rdma_bind_addr", 98, ErrorKind::Misuse),
            ("rdma_listen", 98, ErrorKind::Misuse),
        ] {
            world.fail_next(call, errno);
            let error = failed(fabric.listen(fixture.hosts[0].any_port()), call);
            assert_eq!(error.kind(), kind, "{call}: {error}");
        }
        fabric.listen(fixture.hosts[0].any_port()).expect("listen");
        clear([fabric]);
    });
}

/// Each of these calls fails once during a handshake, on either side. The connecting side gets a
/// link or an error in time, a later attempt succeeds, and the failed attempt leaves nothing
/// behind.
#[test]
fn failed_calls_during_the_handshake() {
    for call in [
        "rdma_create_id",
        "rdma_resolve_addr",
        "rdma_resolve_route",
        "rdma_connect",
        "rdma_accept",
        "rdma_establish",
        "rdma_init_qp_attr",
        "rdma_set_option",
        "rdma_get_cm_event",
        "ibv_create_qp",
        "ibv_modify_qp",
        "ibv_query_qp",
        "ibv_query_port",
    ] {
        for skip in 0..6 {
            run(|world, fixture| connect_with_a_fault(world, fixture, call, skip));
        }
    }
}

/// Connects, and causes the fault after `skip` passes of both fabrics.
fn connect_with_a_fault(world: &World, fixture: &Fixture, fault: &str, skip: u32) {
    let [host, peer] = &fixture.hosts;
    let config = Config { connection_timeout: Duration::from_millis(300), ..Config::default() };
    let [a, b] = [peer, host].map(|host| fixture.fabric(host, &config));
    let mut listener = b.listen(host.any_port()).expect("listen");
    if skip == 0 {
        world.fail_next(fault, EIO);
    }
    let mut connecting = connect(&a, peer, &listener);
    for _ in 0..skip {
        // A pass looks for events once per millisecond.
        std::thread::sleep(Duration::from_micros(1100));
        a.poll();
        b.poll();
    }
    if skip > 0 {
        world.fail_next(fault, EIO);
    }
    let begun = Instant::now();
    let made = drive(&[&a, &b], &mut connecting);
    assert!(begun.elapsed() < Duration::from_secs(4), "{fault}: {:?}", begun.elapsed());
    if let Err(error) = &made {
        let kinds =
            [ErrorKind::DeviceGone, ErrorKind::Refused, ErrorKind::Unreachable, ErrorKind::Timeout];
        assert_root_cause(error, &kinds);
    }
    drop((made, connecting));
    // A call has failed by now, or one of the following calls will.
    run_for(&[&a, &b], Duration::from_millis(5));
    while let Some(link) = poll_once(&mut listener.accept()) {
        drop(link);
    }
    for attempt in 0.. {
        let connecting = connect(&a, peer, &listener);
        match drive(&[&a, &b], connecting) {
            Ok(link) => {
                drop(link);
                break;
            }
            Err(error) => assert!(attempt < 2, "{fault} at {skip}: {error}"),
        }
    }
    drop(listener);
    clear([a, b]);
}

/// A refusal or a disconnect cannot be sent. The peer still gets an error or a close, and nothing
/// hangs.
#[test]
fn failed_reject_and_disconnect() {
    run(|world, fixture| {
        let [host, peer] = &fixture.hosts;
        let a = fixture.fabric(peer, &Config::default());
        let b = fixture.fabric(host, &Config { max_connections: 1, ..Config::default() });
        let mut listener = b.listen(host.any_port()).expect("listen");
        let [there, here] = open_link(&a, peer, &b, &mut listener);
        world.fail_next("rdma_reject", EIO);
        let error = failed(drive(&[&a, &b], connect(&a, peer, &listener)), "max_connections is 1");
        assert_root_cause(&error, &[ErrorKind::Refused]);
        world.fail_next("rdma_disconnect", EIO);
        drive(&[&a, &b], there.close()).expect("closed cleanly");
        drive(&[&a, &b], here.ended()).expect("closed cleanly");
        drop((there, here, listener));
        clear([a, b]);
    });
}

/// A queue pair whose destruction fails is destroyed by a later attempt.
#[test]
fn retries_destroying_a_queue_pair() {
    run(|world, fixture| {
        let pair = Pair::new(fixture);
        world.fail_next("ibv_destroy_qp", 16);
        world.fail_next("ibv_destroy_qp", 16);
        pair.end();
    });
}

/// A failed post ends the link with the device's error, whichever call made the post.
#[test]
fn failed_post_ends_the_link() {
    run(|world, fixture| {
        let mut pair = Pair::with(fixture, &Config { window: 2, ..Config::default() });
        let (region, token) = {
            let buf = buffer(&pair.b.fabric, &[1; 100]);
            let region = pair.b.link.register_memory(buf, Rights::READ).expect("a region");
            let token = region.grant(&pair.b.link);
            (region, token)
        };
        for case in 0..6 {
            let [a, b] = pair.another(fixture);
            let error = match case {
                // In the first four cases, the call itself posts.
                0 => {
                    world.fail_next("ibv_post_send", EIO);
                    failed(a.post_bytes(0, b"x"), "the post must fail")
                }
                1 => {
                    world.fail_next("ibv_post_send", EIO);
                    let (_, error) = a.post(0, filled(&pair.a.fabric, &[1; 1000])).map_or_else(
                        |(buf, error)| (Some(buf), error),
                        |()| (None, a.failure().expect("link is down")),
                    );
                    error
                }
                2 => {
                    world.fail_next("ibv_post_send", EIO);
                    failed(
                        pair.drive(a.send(0, filled(&pair.a.fabric, &[1; 1000]))),
                        "the post must fail",
                    )
                }
                3 => {
                    world.fail_next("ibv_post_send", EIO);
                    let buf = pair.a.fabric.buffer(100).expect("memory");
                    let failed_read = match a.rdma_read(&token, 0, buf) {
                        Ok(reading) => pair.drive(reading).expect_err("the post must fail"),
                        Err(failed_read) => failed_read,
                    };
                    assert!(failed_read.buf.is_some(), "the buffer must be returned");
                    failed_read.error
                }
                // In the last two cases, the post happens later, when the peer returns credit. Its
                // failure wakes the waiting future.
                4 | 5 => {
                    let mut sending: Vec<_> =
                        (0..8).map(|_| a.send(0, filled(&pair.a.fabric, &[1; 1000]))).collect();
                    for future in &mut sending {
                        assert!(poll_once(future).is_none());
                    }
                    // The window is 2, so the post of the third send fails while the last send is
                    // still queued.
                    let waiting = sending.remove(if case == 4 { 2 } else { 7 });
                    drive(&[&pair.b.fabric], b.recv()).expect("first message");
                    world.fail_next("ibv_post_send", EIO);
                    let sent = pair.drive(waiting);
                    drop(sending);
                    failed(sent, "the post must fail")
                }
                _ => unreachable!(),
            };
            assert_root_cause(
                &error,
                &[ErrorKind::DeviceGone, ErrorKind::System, ErrorKind::LinkDown],
            );
            pair.drive(async { join!(a.ended(), b.ended()) }).0.expect_err("the link is down");
        }
        drop(region);
        pair.end();
    });
}

/// Receives that cannot be posted now are posted later.
#[test]
fn failed_receive_posts_are_retried() {
    run(|world, fixture| {
        let pair = Pair::with(fixture, &Config { recv_queue_depth: 16, ..Config::default() });
        for number in 0..200_u64 {
            if number % 10 == 0 {
                world.fail_next("ibv_post_srq_recv", ENOMEM);
            }
            pair.a.link.post_bytes(0, &pattern(number, 300)).expect("room in the queue");
            assert!(
                pair.receive(&pair.b).to_vec() == pattern(number, 300),
                "message {number} is missing or was changed"
            );
        }
        pair.end();
    });
}

/// Each of these calls fails once while everything else works. No message is lost.
#[test]
fn transient_failures_lose_nothing() {
    for call in [
        "ibv_poll_cq",
        "ibv_req_notify_cq",
        "ibv_get_cq_event",
        "ibv_get_async_event",
        "rdma_get_cm_event",
    ] {
        run(|world, fixture| {
            let mut pair = Pair::new(fixture);
            for number in 0..20_u64 {
                world.fail_next(call, EAGAIN);
                pair.a.link.post_bytes(0, &pattern(number, 10 * KIB)).expect("room in the queue");
                // `progress` arms the completion queue.
                pair.a.fabric.progress();
                pair.b.fabric.progress();
                assert!(
                    pair.receive(&pair.b).to_vec() == pattern(number, 10 * KIB),
                    "{call}: message {number} was changed"
                );
            }
            let links = pair.another(fixture);
            drop(links);
            pair.end();
        });
    }
}

/// A failed registration is reported, and the next one works.
#[test]
fn failed_registration_is_reported() {
    run(|world, fixture| {
        let pair = Pair::with(fixture, &Config { inline_threshold: 0, ..Config::default() });
        world.fail_next("ibv_reg_mr", ENOMEM);
        let (buf, error) = pair
            .a
            .link
            .register_memory(buffer(&pair.a.fabric, &[1; 100]), Rights::READ)
            .expect_err("registration must fail");
        assert_root_cause(&error, &[ErrorKind::Resources]);
        let region = pair.a.link.register_memory(buf, Rights::READ).expect("second registration");

        // The pool has to grow but cannot.
        let kept: Vec<_> = (0..2).map_while(|_| pair.a.fabric.buffer(2 << 20).ok()).collect();
        world.fail_next("ibv_reg_mr", ENOMEM);
        let mut more = Vec::new();
        let error = loop {
            match pair.a.fabric.buffer(2 << 20) {
                Ok(buf) => more.push(buf),
                Err(error) => break error,
            }
        };
        assert_root_cause(&error, &[ErrorKind::Resources]);
        drop((kept, more, region));
        pair.end();
    });
}

/// The pool has to grow for a control frame but cannot. The frame waits or the link reports the
/// cause, and no place in the completion queue is lost.
#[test]
fn failed_registration_for_a_control_frame() {
    run(|world, fixture| {
        let config = Config { inline_threshold: 0, window: 2, ..Config::default() };
        let pair = Pair::with(fixture, &config);
        // Takes all memory that is registered for sends.
        let mut kept = vec![pair.b.fabric.buffer(2 << 20).expect("memory")];
        while pair.b.fabric.stats().memory.send.free_bytes >= 2 << 20 {
            kept.push(pair.b.fabric.buffer(2 << 20).expect("memory"));
        }
        for _ in 0..3 {
            world.fail_next("ibv_reg_mr", ENOMEM);
        }
        for number in 0..20_u64 {
            pair.a.link.post_bytes(0, &pattern(number, 300)).expect("room in the queue");
        }
        for number in 0..20_u64 {
            match pair.drive(pair.b.link.recv()) {
                Ok(message) => {
                    assert!(
                        message.to_vec() == pattern(number, 300),
                        "message {number} is missing or was changed"
                    );
                }
                Err(error) => {
                    assert_root_cause(&error, &[ErrorKind::Resources]);
                    break;
                }
            }
        }
        drop(kept);
        pair.clear();
    });
}

/// The device does not release a region. The owner gets an error, and the memory is not reused
/// until the device releases it.
#[test]
fn failed_deregistration_quarantines_the_memory() {
    run(|world, fixture| {
        let pair = Pair::new(fixture);
        let region = pair
            .b
            .link
            .register_memory(buffer(&pair.b.fabric, &[1; 100]), Rights::READ)
            .expect("a region");
        let _token = region.grant(&pair.b.link);
        // The deregistration fails for the revocation, and again for the drop.
        world.fail_next("ibv_dereg_mr", 16);
        world.fail_next("ibv_dereg_mr", 16);
        let error = pair.drive(region.revoke()).expect_err("deregistration must fail");
        assert_root_cause(
            &error,
            &[ErrorKind::Resources, ErrorKind::System, ErrorKind::DeviceGone],
        );
        let quarantined = pair.b.fabric.stats().memory.quarantined_bytes;
        assert_eq!(quarantined, 256);
        assert_eq!(pair.b.fabric.pool().retry_quarantined(), 1);
        pair.end();
    });
}
