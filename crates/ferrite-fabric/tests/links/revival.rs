//! What only the fake can do at will: devices that are pulled out come back, and the fabrics that
//! had them go on.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Link, Listener};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use futures_util::join;

use crate::faults::{assert_told, run};
use crate::links::pair::{
    Pair, assert_unused, buffer, call, clear, drive, failed, filled, meet, pattern, until,
};
use crate::links::{Host, KIB, PATIENCE};

fn add(world: &World, host: &Host) {
    world.add_device(DeviceSpec::new(&host.device, host.ip));
}

/// Removes a device; the fabric has let go of everything on it.
fn pull(world: &World, host: &Host, fabric: &Fabric, others: &[&Fabric]) {
    let (lost, before) = (fabric.stats().devices_lost, world.objects());
    world.remove_device(&host.device);
    let fabrics: Vec<&Fabric> = others.iter().copied().chain([fabric]).collect();
    until(&fabrics, "the device is gone", || fabric.stats().devices_lost > lost);
    until(&fabrics, "it is let go of", || world.objects().contexts < before.contexts);
    let missing = fabric.missing_devices();
    assert_eq!(missing.len(), 1);
    assert_eq!(missing[0].kind(), ErrorKind::DeviceGone);
}

/// Adds it again; the fabric has found it.
fn put_back(world: &World, host: &Host, fabric: &Fabric) {
    let back = fabric.stats().devices_back;
    add(world, host);
    until(&[fabric], "the device is back", || fabric.stats().devices_back > back);
    assert!(fabric.missing_devices().is_empty());
}

/// Messages of several sizes both ways, and a read of memory that is registered now.
fn talk(fabrics: [&Fabric; 2], links: [&Link; 2]) {
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
        assert_eq!(&drive(&fabrics, reading.expect("room")).expect("read")[..], [7; 8]);
        drive(&fabrics, region.revoke()).expect("revoked");
    }
}

/// The device of the side that connects: what was taken and registered before is good afterwards,
/// or told to be gone.
#[test]
fn own_device() {
    run(|world, fixture| {
        let a_host = &fixture.hosts[1];
        let Pair { a, b, mut listener } = Pair::new(fixture);
        let (fabrics, mut links) = ([&a.fabric, &b.fabric], [a.link, b.link]);
        let kept = filled(&a.fabric, b"from before");
        talk(fabrics, [&links[0], &links[1]]); // the pools grow
        let everything = world.objects();
        for round in 1..=3 {
            talk(fabrics, [&links[0], &links[1]]);
            let region = links[0]
                .register_memory(buffer(&a.fabric, &[1; 100]), Rights::READ)
                .expect("a region");
            pull(world, a_host, &a.fabric, &[&b.fabric]);
            let error = failed(drive(&fabrics, links[0].ended()), "its device is gone");
            assert_told(&error, &[ErrorKind::DeviceGone]);
            assert!(!region.is_live());
            let buf = drive(&fabrics, region.revoke()).expect("the buffer");
            let (_, error) =
                links[0].register_memory(buf, Rights::READ).expect_err("there is no device");
            assert_told(&error, &[ErrorKind::DeviceGone]);
            failed(drive(&fabrics, call(&a.fabric, a_host, &listener)), "there is no device");
            put_back(world, a_host, &a.fabric);
            links = meet(&a.fabric, a_host, &b.fabric, &mut listener);
            until(&fabrics, "the old links are gone", || {
                fabrics.iter().all(|fabric| fabric.stats().links == 1)
            });
            links[0].post(0, kept.clone()).expect("room");
            assert_eq!(
                drive(&fabrics, links[1].recv()).expect("a message").to_vec(),
                b"from before"
            );
            assert_eq!(world.objects(), everything, "as before");
            let stats = a.fabric.stats();
            assert_eq!((stats.devices_lost, stats.devices_back), (round, round));
            assert!(stats.receives_posted > 0);
        }
        assert_eq!(b.fabric.stats().devices_lost, 0);
        talk(fabrics, [&links[0], &links[1]]);
        drop((links, listener, kept));
        clear([a.fabric, b.fabric]);
    });
}

/// A listener on the device's address is lost with it; one on all addresses goes on with the device
/// that came back.
#[test]
fn device_of_listeners() {
    run(|world, fixture| {
        let [b_host, a_host] = &fixture.hosts;
        let [a, b] = [a_host, b_host].map(|host| fixture.fabric(host, &Config::default()));
        let mut everywhere = b.listen("0.0.0.0:0".parse().expect("an address")).expect("listen");
        let meet_there = |everywhere: &mut Listener| {
            let target = std::net::SocketAddr::new(b_host.ip, everywhere.local_addr().port());
            let calling = a.connect_with(target, &ConnectOptions::new().local(a_host.any_port()));
            let (there, here) = drive(&[&a, &b], async { join!(calling, everywhere.accept()) });
            [there.expect("connect"), here.expect("accept")]
        };
        for _ in 0..2 {
            let mut bound = b.listen(b_host.any_port()).expect("listen");
            let links = meet_there(&mut everywhere);
            pull(world, b_host, &b, &[&a]);
            let error = failed(drive(&[&a, &b], bound.accept()), "its device is gone");
            assert_told(&error, &[ErrorKind::DeviceGone]);
            assert!(everywhere.try_accept().expect("it has no device").is_none());
            drop(links);
            put_back(world, b_host, &b);
            let error = failed(bound.try_accept(), "lost for good");
            assert_told(&error, &[ErrorKind::DeviceGone]);
            let [there, here] = meet_there(&mut everywhere);
            talk([&a, &b], [&there, &here]);
        }
        drop(everywhere);
        clear([a, b]);
    });
}

/// Nobody uses the device when it goes; the other one goes on all the time.
#[test]
fn one_of_two_devices() {
    run(|world, fixture| {
        let [host, idle] = &fixture.hosts;
        let fabric = fixture.builder().build().expect("a fabric");
        let mut listener = fabric.listen(host.any_port()).expect("listen");
        let [there, here] = meet(&fabric, host, &fabric, &mut listener);
        for _ in 0..2 {
            pull(world, idle, &fabric, &[]);
            talk([&fabric, &fabric], [&there, &here]);
            put_back(world, idle, &fabric);
            let on_idle = meet(&fabric, idle, &fabric, &mut listener);
            assert_eq!(on_idle[0].device().as_ref(), Some(&idle.device));
            talk([&fabric, &fabric], [&on_idle[0], &on_idle[1]]);
        }
        talk([&fabric, &fabric], [&there, &here]);
        drop((there, here, listener));
        clear([fabric]);
    });
}

/// A device that is there and does not work yet: each step that can fail fails once. Nothing is
/// left of the try, the reason is told, and the next succeeds. Each in a world of its own, all at
/// the same time, because they wait for the clock.
#[test]
fn by_and_by() {
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
        let (world, fixture) = crate::world();
        let fabric = fixture.fabric(&fixture.hosts[0], &Config::default());
        let listener = fabric.listen("0.0.0.0:0".parse().expect("an address")).expect("listen");
        pull(&world, &fixture.hosts[0], &fabric, &[]);
        let held = world.objects();
        // The device has two addresses: an identifier is tried on each.
        let times = if call.starts_with("rdma") { 2 } else { 1 };
        (0..times).for_each(|_| world.fail_next(call, errno));
        add(&world, &fixture.hosts[0]);
        (call, world, fixture, fabric, listener, held)
    });
    let fabrics: Vec<&Fabric> = worlds.iter().map(|(_, _, _, fabric, ..)| fabric).collect();
    let reason = |fabric: &Fabric| fabric.missing_devices()[0].to_string();
    for (call, world, _, fabric, _, held) in &worlds {
        until(&fabrics, "it was looked for", || reason(fabric).contains("not back"));
        let told = reason(fabric);
        let word = if call.contains("gid") || call.starts_with("rdma") { "address" } else { call };
        assert!(told.contains(word), "{call}: {told}");
        assert_eq!(world.objects(), *held, "{call}: nothing is left of the try");
    }
    for (.., fabric, _, _) in &worlds {
        until(&fabrics, "it is back", || fabric.stats().devices_back == 1);
    }
    for (_, world, fixture, fabric, mut listener, _) in worlds {
        let target = std::net::SocketAddr::new(fixture.hosts[0].ip, listener.local_addr().port());
        let calling =
            fabric.connect_with(target, &ConnectOptions::new().local(fixture.hosts[0].any_port()));
        let (there, here) = drive(&[&fabric], async { join!(calling, listener.accept()) });
        let links = [there.expect("connect"), here.expect("accept")];
        talk([&fabric, &fabric], [&links[0], &links[1]]);
        drop((links, listener));
        clear([fabric]);
        drop(fixture);
        assert_eq!(world.objects(), Objects::default());
    }
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

/// A port that is down is not usable; a fabric that ends meanwhile leaves nothing.
#[test]
fn port_down_at_first() {
    run(|world, fixture| {
        let host = &fixture.hosts[0];
        let [fabric, ends] = [0, 1].map(|_| fixture.fabric(host, &Config::default()));
        let listener = fabric.listen(host.any_port()).expect("listen");
        world.remove_device(&host.device);
        until(&[&fabric, &ends], "both hear of it", || {
            [&fabric, &ends].iter().all(|fabric| fabric.stats().devices_lost == 1)
        });
        drop(listener);
        add(world, host);
        world.device_down(&host.device);
        let told = || fabric.missing_devices()[0].to_string();
        until(&[&fabric], "it was looked for", || told().contains("not back"));
        assert!(told().contains("fake1"), "{}", told());
        drop(ends);
        world.device_up(&host.device);
        until(&[&fabric], "it is back", || fabric.stats().devices_back == 1);
        clear([fabric]);
    });
}

/// A device goes again at any moment of its return, while a thread drives the fabric.
#[test]
fn comes_and_goes() {
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
        // Each look may have missed it: the last begins a second after the last removal was heard.
        let deadline = Instant::now() + PATIENCE;
        while !fabric.missing_devices().is_empty() {
            assert!(Instant::now() < deadline, "{:?}", fabric.missing_devices());
            std::thread::sleep(Duration::from_millis(5));
        }
        let target = std::net::SocketAddr::new(host.ip, listener.local_addr().port());
        let calling = fabric.connect_with(target, &ConnectOptions::new().local(host.any_port()));
        let (there, here) = fabric.block_on(async { join!(calling, listener.accept()) });
        let links = [there.expect("connect"), here.expect("accept")];
        talk([&fabric, &fabric], [&links[0], &links[1]]);
        drop((links, listener));
        let pool = fabric.pool().clone();
        drop(fabric);
        driver.join().expect("it ends");
        assert_unused(&pool);
    });
}
