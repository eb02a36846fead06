//! Devices of the fake provider are removed and come back, and the fabrics that used them continue.

use std::time::Duration;

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Link, Listener};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use futures_util::join;

use super::faults::{assert_root_cause, run};
use crate::links::pair::{
    Pair, assert_unused, buffer, clear, connect, drive, failed, filled, open_link, pattern, until,
};
use crate::links::{Host, KIB, TEST_TIMEOUT};

fn add(world: &World, host: &Host) {
    world.add_device(DeviceSpec::new(&host.device, host.ip));
}

/// Removes a device and waits until the fabric has released everything on it.
fn remove_device_from(world: &World, host: &Host, fabric: &Fabric, others: &[&Fabric]) {
    let (lost, before) = (fabric.stats().devices_lost, world.objects());
    world.remove_device(&host.device);
    let fabrics: Vec<&Fabric> = others.iter().copied().chain([fabric]).collect();
    until(&fabrics, "the device is gone", || fabric.stats().devices_lost > lost);
    until(&fabrics, "its objects are released", || world.objects().contexts < before.contexts);
    let missing = fabric.missing_devices();
    assert_eq!(missing.len(), 1);
    assert_eq!(missing[0].kind(), ErrorKind::DeviceGone);
}

/// Adds a device again and waits until the fabric uses it.
fn restore_device(world: &World, host: &Host, fabric: &Fabric) {
    let back = fabric.stats().devices_back;
    add(world, host);
    until(&[fabric], "the device is back", || fabric.stats().devices_back > back);
    assert!(fabric.missing_devices().is_empty());
}

/// Checks both ends of a link: messages of several sizes both ways, and reads of newly registered
/// memory.
fn check_links(fabrics: [&Fabric; 2], links: [&Link; 2]) {
    for (from, to) in [(0, 1), (1, 0)] {
        for len in [10, 3 * KIB, 60 * KIB] {
            let bytes = pattern(len as u64, len);
            let sending = links[from].send(0, filled(fabrics[from], &bytes));
            let (sent, got) = drive(&fabrics, async { join!(sending, links[to].recv()) });
            sent.expect("sent");
            assert_eq!(got.expect("a message").to_vec(), bytes);
        }
        let region = links[to]
            .register_memory(buffer(fabrics[to], &[7; 1000]), Rights::READ)
            .expect("a region");
        let token = region.grant(links[to]);
        let reading = links[from].rdma_read(&token, 100, fabrics[from].buffer(8).expect("memory"));
        assert_eq!(
            &drive(&fabrics, reading.expect("room in the queue")).expect("read")[..],
            [7; 8]
        );
        drive(&fabrics, region.revoke()).expect("revoked");
    }
}

/// The device of the connecting side returns. Buffers taken before still work afterwards. Regions
/// registered before do not.
#[test]
fn connecting_side_device_returns() {
    run(|world, fixture| {
        let a_host = &fixture.hosts[1];
        let Pair { a, b, mut listener } = Pair::new(fixture);
        let (fabrics, mut links) = ([&a.fabric, &b.fabric], [a.link, b.link]);
        let kept = filled(&a.fabric, b"from before");
        check_links(fabrics, [&links[0], &links[1]]); // lets the pools grow
        let everything = world.objects();
        for round in 1..=3 {
            check_links(fabrics, [&links[0], &links[1]]);
            let region = links[0]
                .register_memory(buffer(&a.fabric, &[1; 100]), Rights::READ)
                .expect("a region");
            remove_device_from(world, a_host, &a.fabric, &[&b.fabric]);
            let error = failed(drive(&fabrics, links[0].ended()), "the device is gone");
            assert_root_cause(&error, &[ErrorKind::DeviceGone]);
            assert!(!region.is_live());
            let buf = drive(&fabrics, region.revoke()).expect("buffer returned");
            let (_, error) =
                links[0].register_memory(buf, Rights::READ).expect_err("there is no device");
            assert_root_cause(&error, &[ErrorKind::DeviceGone]);
            failed(drive(&fabrics, connect(&a.fabric, a_host, &listener)), "there is no device");
            restore_device(world, a_host, &a.fabric);
            links = open_link(&a.fabric, a_host, &b.fabric, &mut listener);
            until(&fabrics, "the old links are gone", || {
                fabrics.iter().all(|fabric| fabric.stats().links == 1)
            });
            links[0].post(0, kept.clone()).expect("room in the queue");
            assert_eq!(
                drive(&fabrics, links[1].recv()).expect("a message").to_vec(),
                b"from before"
            );
            assert_eq!(world.objects(), everything, "the same objects as before");
            let stats = a.fabric.stats();
            assert_eq!((stats.devices_lost, stats.devices_back), (round, round));
            assert!(stats.receives_posted > 0);
        }
        assert_eq!(b.fabric.stats().devices_lost, 0);
        check_links(fabrics, [&links[0], &links[1]]);
        drop((links, listener, kept));
        clear([a.fabric, b.fabric]);
    });
}

/// A listener on the device's address is lost with the device. A listener on all addresses
/// continues on the device that came back.
#[test]
fn listener_device_returns() {
    run(|world, fixture| {
        let [b_host, a_host] = &fixture.hosts;
        let [a, b] = [a_host, b_host].map(|host| fixture.fabric(host, &Config::default()));
        let mut everywhere = b.listen("0.0.0.0:0".parse().expect("an address")).expect("listen");
        let connect_everywhere = |everywhere: &mut Listener| {
            let target = std::net::SocketAddr::new(b_host.ip, everywhere.local_addr().port());
            let calling = a.connect_with(target, &ConnectOptions::new().local(a_host.any_port()));
            let (there, here) = drive(&[&a, &b], async { join!(calling, everywhere.accept()) });
            [there.expect("connect"), here.expect("accept")]
        };
        for _ in 0..2 {
            let mut bound = b.listen(b_host.any_port()).expect("listen");
            let links = connect_everywhere(&mut everywhere);
            remove_device_from(world, b_host, &b, &[&a]);
            let error = failed(drive(&[&a, &b], bound.accept()), "the device is gone");
            assert_root_cause(&error, &[ErrorKind::DeviceGone]);
            assert!(
                everywhere
                    .try_accept()
                    .expect("the listener stays open without a device")
                    .is_none()
            );
            drop(links);
            restore_device(world, b_host, &b);
            let error = failed(bound.try_accept(), "the listener is lost");
            assert_root_cause(&error, &[ErrorKind::DeviceGone]);
            let [there, here] = connect_everywhere(&mut everywhere);
            check_links([&a, &b], [&there, &here]);
        }
        drop(everywhere);
        clear([a, b]);
    });
}

/// An unused device is removed and comes back. Links on the other device are not affected.
#[test]
fn unused_device_returns() {
    run(|world, fixture| {
        let [host, idle] = &fixture.hosts;
        let fabric = fixture.builder().build().expect("a fabric");
        let mut listener = fabric.listen(host.any_port()).expect("listen");
        let [there, here] = open_link(&fabric, host, &fabric, &mut listener);
        for _ in 0..2 {
            remove_device_from(world, idle, &fabric, &[]);
            check_links([&fabric, &fabric], [&there, &here]);
            restore_device(world, idle, &fabric);
            let on_idle = open_link(&fabric, idle, &fabric, &mut listener);
            assert_eq!(on_idle[0].device().as_ref(), Some(&idle.device));
            check_links([&fabric, &fabric], [&on_idle[0], &on_idle[1]]);
        }
        check_links([&fabric, &fabric], [&there, &here]);
        drop((there, here, listener));
        clear([fabric]);
    });
}

/// The device is present but does not work yet: in each case, one call fails during the first
/// attempt to use the device. The failed attempt leaves nothing behind, the reason is reported, and
/// a later attempt succeeds. Each case has its own world. All run at the same time, because each
/// has to wait for the retry timer.
#[test]
fn retries_until_the_device_works() {
    const CALLS: [(&str, i32); 11] = [
        ("ibv_open_device", 13),
        ("ibv_query_port", 5),
        ("ibv_query_gid_table", 5),
        ("rdma_create_id", 12),
        ("rdma_bind_addr", 19),
        ("ibv_alloc_pd", 12),
        ("ibv_query_device", 5),
        ("ibv_create_cq", 12),
        ("ibv_create_srq", 12),
        ("ibv_reg_mr", 12),
        ("ibv_post_srq_recv", 5),
    ];
    let worlds = CALLS.map(|(call, errno)| {
        let (world, fixture) = crate::world(|_| {});
        let fabric = fixture.fabric(&fixture.hosts[0], &Config::default());
        let listener = fabric.listen("0.0.0.0:0".parse().expect("an address")).expect("listen");
        remove_device_from(&world, &fixture.hosts[0], &fabric, &[]);
        let held = world.objects();
        // The device has two addresses, and the fabric tries an identifier on each.
        let times = if call.starts_with("rdma") { 2 } else { 1 };
        (0..times).for_each(|_| world.fail_next(call, errno));
        add(&world, &fixture.hosts[0]);
        (call, world, fixture, fabric, listener, held)
    });
    let fabrics: Vec<&Fabric> = worlds.iter().map(|(_, _, _, fabric, ..)| fabric).collect();
    let reason = |fabric: &Fabric| fabric.missing_devices()[0].to_string();
    for (call, world, _, fabric, _, held) in &worlds {
        until(&fabrics, "the fabric looked for the device", || reason(fabric).contains("not back"));
        let text = reason(fabric);
        let word = if call.contains("gid") || call.starts_with("rdma") { "address" } else { call };
        assert!(text.contains(word), "{call}: {text}");
        assert_eq!(world.objects(), *held, "{call}: the attempt left objects behind");
    }
    for (.., fabric, _, _) in &worlds {
        until(&fabrics, "the device is back", || fabric.stats().devices_back == 1);
    }
    for (_, world, fixture, fabric, mut listener, _) in worlds {
        let target = std::net::SocketAddr::new(fixture.hosts[0].ip, listener.local_addr().port());
        let calling =
            fabric.connect_with(target, &ConnectOptions::new().local(fixture.hosts[0].any_port()));
        let (there, here) = drive(&[&fabric], async { join!(calling, listener.accept()) });
        let links = [there.expect("connect"), here.expect("accept")];
        check_links([&fabric, &fabric], [&links[0], &links[1]]);
        drop((links, listener));
        clear([fabric]);
        drop(fixture);
        assert_eq!(world.objects(), Objects::default());
    }
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// The fabric does not use a device whose port is down. A fabric dropped meanwhile leaves nothing
/// behind.
#[test]
fn waits_until_the_port_is_up() {
    run(|world, fixture| {
        let host = &fixture.hosts[0];
        let [fabric, ends] = [0, 1].map(|_| fixture.fabric(host, &Config::default()));
        let listener = fabric.listen(host.any_port()).expect("listen");
        world.remove_device(&host.device);
        until(&[&fabric, &ends], "both fabrics lose the device", || {
            [&fabric, &ends].iter().all(|fabric| fabric.stats().devices_lost == 1)
        });
        drop(listener);
        add(world, host);
        world.device_down(&host.device);
        let reason = || fabric.missing_devices()[0].to_string();
        until(&[&fabric], "the fabric looked for the device", || reason().contains("not back"));
        assert!(reason().contains("fake1"), "{}", reason());
        drop(ends);
        world.device_up(&host.device);
        until(&[&fabric], "the device is back", || fabric.stats().devices_back == 1);
        clear([fabric]);
    });
}

/// A device is removed again at various moments of its return, while a thread drives the fabric.
#[test]
fn device_removed_while_returning() {
    run(|world, fixture| {
        let host = &fixture.hosts[0];
        let fabric = fixture.fabric(host, &Config::default());
        let mut listener = fabric.listen("0.0.0.0:0".parse().expect("an address")).expect("listen");
        let driver = fabric.spawn_thread().expect("a thread");
        for pause in (0..8).map(|step| 990 + 5 * step) {
            world.remove_device(&host.device);
            add(world, host);
            std::thread::sleep(Duration::from_millis(pause));
        }
        // Each attempt may have missed the device. The last attempt begins a second after the last
        // removal.
        let is_back = || fabric.missing_devices().is_empty();
        ferrite_testkit::until(TEST_TIMEOUT, "the device is back", is_back);
        let target = std::net::SocketAddr::new(host.ip, listener.local_addr().port());
        let calling = fabric.connect_with(target, &ConnectOptions::new().local(host.any_port()));
        let (there, here) = fabric.block_on(async { join!(calling, listener.accept()) });
        let links = [there.expect("connect"), here.expect("accept")];
        check_links([&fabric, &fabric], [&links[0], &links[1]]);
        drop((links, listener));
        let pool = fabric.pool().clone();
        drop(fabric);
        driver.join().expect("driver thread ends");
        assert_unused(&pool);
    });
}
