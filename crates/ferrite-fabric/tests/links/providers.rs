//! What devices other than Soft-RoCE do, on the fake that has learned it from their sources.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::Purpose;
use ferrite_fabric::{Config, Engine, ErrorKind, ListenOptions, Listener, Rdma};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use futures_util::future::join_all;
use futures_util::join;

use crate::links::isolation::Scene;
use crate::links::pair::{call, clear, drive, meet, until};
use crate::links::{Fixture, Host};

/// Two hosts, the first of which has a device as `change` makes it.
fn world(change: impl FnOnce(&mut DeviceSpec)) -> (World, Fixture) {
    let world = World::new();
    let hosts = [Host::new("fake1", "10.0.0.1"), Host::new("fake2", "10.0.0.2")];
    let mut first = DeviceSpec::new("fake1", hosts[0].ip);
    change(&mut first);
    world.add_device(first);
    world.add_device(DeviceSpec::new("fake2", hosts[1].ip));
    let verbs = world.verbs();
    (world, Fixture { verbs: Some(verbs), tls: None, hosts, slower: 1, storm_part: 1 })
}

/// Receives that an engine has posted, that links took along, and the bytes of both.
fn receives(engine: &Engine) -> (u64, u64, u64) {
    let stats = engine.stats();
    (stats.receives_posted, stats.receives_overdue, stats.memory.receive.in_use_bytes)
}

/// Clients that go on sending while the server ends their sessions, `together` at a time.
fn flood(fixture: &Fixture, server: &Engine, client: &Engine, listener: &mut Listener, together: usize) {
    let calls: Vec<_> = (0..together).map(|_| call(client, &fixture.hosts[1], listener)).collect();
    let accepting = async {
        let mut ours = Vec::new();
        while ours.len() < together {
            ours.push(listener.accept().await.expect("accept"));
        }
        ours
    };
    let (theirs, ours) = drive(&[server, client], async { join!(join_all(calls), accepting) });
    let theirs: Vec<_> = theirs.into_iter().map(|link| link.expect("connect")).collect();
    for link in &theirs {
        for _ in 0..8 {
            link.post_bytes(0, b"one of many").expect("room");
        }
    }
    for link in &ours {
        link.abort(); // with what has come and was not taken
    }
    drop(ours);
    drop(theirs);
    until(&[server, client], "the links have ended", || server.stats().links + client.stats().links == 0);
}

/// M2: mlx5 removes completions that nobody has polled when their queue pair is destroyed.
#[test]
fn keeps_all_receives_when_clients_flood_sessions_that_end() {
    const SESSIONS: usize = 10_000;
    const TOGETHER: usize = 50;
    let (world, fixture) = world(|device| device.cleans_completions = true);
    // A pass takes few completions, so that some are left when a link is torn down. All may begin at once: on a host that
    // stands still for a while, one would push out another.
    let config = Config {
        poll_batch: 1,
        recv_queue_depth: 256,
        window: 16,
        max_half_open: 2 * TOGETHER,
        ..Config::default()
    };
    let server = fixture.engine(&fixture.hosts[0], &config);
    let client = fixture.engine(&fixture.hosts[1], &Config::default());
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let before = receives(&server);
    assert_eq!(before.0, 256);
    for _ in 0..SESSIONS / TOGETHER {
        flood(&fixture, &server, &client, &mut listener, TOGETHER);
        until(&[&server, &client], "receives are back", || receives(&server) == before);
    }
    drop(listener);
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// Soft-RoCE before Linux 6.11 never says that a queue pair has taken its last receive.
#[test]
fn ends_links_on_devices_that_report_no_last_receive() {
    let (world, fixture) = world(|device| device.reports_last_receive = false);
    let [server, client] = [0, 1].map(|host| fixture.engine(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let before = receives(&server);
    let begun = Instant::now();
    flood(&fixture, &server, &client, &mut listener, 10);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    until(&[&server, &client], "receives are back", || receives(&server) == before);
    drop(listener);
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// M3: EFA has no shared receive queues (`max_srq` is not set by `efa_query_device` in the kernel's
/// `drivers/infiniband/hw/efa/efa_verbs.c`).
#[test]
fn leaves_out_a_device_without_srq_and_serves_on_the_other() {
    let (world, fixture) = world(|device| (device.max_srq, device.max_srq_wr) = (0, 0));
    let verbs = fixture.verbs.as_ref().expect("a world");
    let server = fixture.builder().build().expect("one device is good");
    assert_eq!(server.devices(), ["fake2"]);
    let [(name, error)] = server.unused_devices() else { panic!("{:?}", server.unused_devices()) };
    assert_eq!(name, "fake1");
    assert!(error.to_string().contains("fake1 has 0 receives in a shared receive queue"), "{error}");
    let mut listener = server.listen(fixture.hosts[1].any_port()).expect("listen");
    let client = fixture.engine(&fixture.hosts[1], &Config::default());
    flood(&fixture, &server, &client, &mut listener, 1);
    // By itself it is an error, and no panic.
    let alone = Engine::builder(verbs).device("fake1").rdma(Rdma::Require).build().expect_err("no SRQ");
    assert_eq!(alone.kind(), ErrorKind::Absent, "{alone}");
    drop(listener);
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// A device that fails for another reason does not fail the others either.
#[test]
fn leaves_out_devices_that_refuse_queues_or_memory() {
    for call in ["ibv_open_device", "ibv_alloc_pd", "ibv_create_cq", "ibv_create_srq", "ibv_reg_mr"] {
        let (world, fixture) = world(|_| {});
        world.fail_next(call, 12);
        let engine = Engine::builder(fixture.verbs.as_ref().expect("a world")).build().expect(call);
        assert_eq!((engine.devices().len(), engine.unused_devices().len()), (1, 1), "{call}");
        clear([engine]);
        assert_eq!(world.objects(), Objects::default(), "{call}");
    }
}

/// A host with so many devices.
fn many(devices: u8) -> World {
    let world = World::new();
    for n in 1..=devices {
        let address = format!("10.0.0.{n}").parse().expect("an address");
        world.add_device(DeviceSpec::new(&format!("fake{n}"), address));
    }
    world
}

/// M5: what is pinned does not depend on devices that do not serve the address.
#[test]
fn opens_only_the_device_that_has_the_address() {
    for devices in [1, 2, 4, 8] {
        let world = many(devices);
        let builder = Engine::builder(&world.verbs()).config(server_config());
        let engine = builder.serving("10.0.0.1".parse().expect("an address")).build().expect("an engine");
        assert_eq!(engine.devices(), ["fake1"]);
        let memory = engine.stats().memory;
        assert!(memory.registered_bytes <= 40 << 20, "{devices} devices: {memory:?}");
        assert_eq!(world.objects().contexts, 1);
        clear([engine]);
    }
    let world = many(2);
    let builder = Engine::builder(&world.verbs()).rdma(Rdma::Require);
    let error = builder.serving("10.0.0.9".parse().expect("an address")).build().expect_err("nobody's");
    assert!(error.to_string().contains("no RDMA device has the address 10.0.0.9"), "{error}");
}

/// A listener there would refuse every peer over RDMA.
#[test]
fn does_not_listen_for_rdma_at_the_address_of_a_device_that_is_left_out() {
    let world = many(2);
    let engine = Engine::builder(&world.verbs()).device("fake2").build().expect("an engine");
    let required = ListenOptions::new().rdma(Rdma::Require);
    let listen = |at: &str| engine.listen_with(at.parse().expect("an address"), &required);
    let error = listen("10.0.0.1:0").expect_err("the address of fake1");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("the device fake1, and only fake2 may be used"), "{error}");
    drop(listen("10.0.0.2:0").expect("the address of fake2"));
    clear([engine]);
}

/// M5: a module pinned 36, 136, 528 and 2,080 MiB on 1, 2, 4 and 8 devices, and went above its limit.
#[test]
fn pins_memory_in_proportion_to_the_devices_and_within_the_limit() {
    for devices in [1, 2, 4, 8] {
        let world = many(devices);
        let any = "0.0.0.0".parse().expect("an address");
        let builder = Engine::builder(&world.verbs()).config(server_config());
        let engine = builder.serving(any).build().expect("an engine");
        assert_eq!(engine.devices().len(), usize::from(devices));
        let idle = engine.stats().memory.registered_bytes;
        assert!(idle <= u64::from(devices) * (40 << 20), "{devices} devices: {idle}");
        // Take all there is.
        let mut held = Vec::new();
        for purpose in Purpose::ALL {
            while let Ok(buf) = engine.pool().take_uncharged(2 << 20, purpose) {
                held.push(buf);
            }
        }
        let memory = engine.stats().memory;
        assert!(memory.registered_bytes <= 1 << 30, "{devices} devices: {memory:?}");
        assert!(memory.registered_bytes > 900 << 20, "{devices} devices: {memory:?}");
        assert!(memory.registered_max_bytes <= 1 << 30, "{devices} devices: {memory:?}");
        drop(held);
        clear([engine]);
    }
}

/// As a gateway or a module has it.
fn server_config() -> Config {
    Config { recv_buffer_size: 64 << 10, ..Config::default() }
}

/// M6: the kernel takes a device away (mlx5: removal, firmware reset). Its descriptors report an error
/// for ever, and every destroy fails with EIO.
#[test]
fn lets_go_of_a_device_that_the_kernel_took_away_and_sleeps() {
    let (world, fixture) = world(|_| {});
    let [server, client] = [0, 1].map(|host| fixture.engine(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let [there, here] = meet(&client, &fixture.hosts[1], &server, &mut listener);
    there.post_bytes(0, b"on its way").expect("room");
    world.disassociate_device("fake1");
    until(&[&server, &client], "the links have ended", || server.stats().links + client.stats().links == 0);
    assert_eq!(here.failure().map(|error| error.kind()), Some(ErrorKind::DeviceGone));
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
    // Nothing is left to do until the device is looked for again, which the clock tells.
    let begun = Instant::now();
    let mut idle = 0;
    while idle < 5 {
        let readable = rustix::event::poll(
            &mut [rustix::event::PollFd::new(&server, rustix::event::PollFlags::IN)],
            Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }),
        );
        idle = if readable == Ok(0) { idle + 1 } else { 0 };
        server.progress();
        assert!(begun.elapsed() < Duration::from_secs(20), "its descriptor is ready for ever");
    }
    drop((listener, there, here));
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// M8: a post failed, and the provider does not say which request it refused: all may be in its queue.
#[test]
fn ends_the_link_when_a_post_fails_without_naming_a_request() {
    for bytes in [16, 4096] {
        let (world, fixture) = world(|_| {});
        let config = Config { inline_threshold: 64, ..Config::default() };
        let [server, client] = [0, 1].map(|host| fixture.engine(&fixture.hosts[host], &config));
        let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
        let [there, here] = meet(&client, &fixture.hosts[1], &server, &mut listener);
        world.fail_next_doorbell(5);
        let posted = there.post_bytes(0, &vec![7; bytes]);
        assert!(posted.is_err() || there.failure().is_some(), "{bytes}: the link goes on");
        drop((there, here));
        until(&[&server, &client], "the links have ended", || {
            server.stats().links + client.stats().links == 0
        });
        drop(listener);
        clear([server, client]);
        assert_eq!(world.objects(), Objects::default());
    }
}

/// M8, of the request that binds a window: it may be in the queue, and then its memory stays until it is done.
#[test]
fn ends_the_connection_when_a_bind_fails_without_naming_a_request() {
    let (world, fixture) = world(|_| {});
    let scene = Scene::new(&fixture, &Config::default());
    let guest = scene.guest();
    scene.is_well(&guest);
    world.fail_next_doorbell(5);
    let other = guest.expose();
    until(&scene.engines(), "the connection has ended", || scene.engines[1].stats().links == 0);
    assert_eq!(scene.engines[1].stats().totals.stale_completions, 0, "the request was in flight");
    drop(other);
    scene.end(vec![guest]);
    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
}
