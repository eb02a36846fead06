//! Which devices a fabric opens, which it leaves out, and how it handles devices that the kernel
//! takes away.

use std::net::SocketAddrV6;
use std::time::{Duration, Instant};

use ferrite_fabric::mem::Purpose;
use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, ListenOptions, Rdma};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};

use super::providers::{flood, server_config};
use crate::links::pair::{clear, drive, open_link, until};
use crate::world;

/// EFA has no shared receive queues: `efa_query_device` in the kernel's
/// `drivers/infiniband/hw/efa/efa_verbs.c` does not set `max_srq`.
#[test]
fn leaves_out_a_device_without_srq_and_serves_on_the_other() {
    let (world, fixture) = world(|device| (device.max_srq, device.max_srq_wr) = (0, 0));
    let verbs = fixture.verbs.as_ref().expect("fake provider");
    let server = fixture.builder().build().expect("one device is usable");
    assert_eq!(server.devices(), ["fake2"]);
    let [(name, error)] = server.unused_devices() else {
        panic!("expected one unused device: {:?}", server.unused_devices())
    };
    assert_eq!(name, "fake1");
    assert!(
        error.to_string().contains("fake1 supports 0 receives in a shared receive queue"),
        "{error}"
    );
    let mut listener = server.listen(fixture.hosts[1].any_port()).expect("listen");
    let client = fixture.fabric(&fixture.hosts[1], &Config::default());
    flood(&fixture, &server, &client, &mut listener, 1);
    // A connection over the device that was left out fails with the reason.
    let options = ConnectOptions::new().local(fixture.hosts[0].any_port()).rdma(Rdma::Require);
    let calling = server.connect_with(listener.local_addr(), &options);
    let error = drive(&[&server], calling).expect_err("the device is not used");
    assert!(error.to_string().contains("fake1 supports 0 receives"), "{error}");
    assert!(error.is_unavailable(), "{error:?}");
    // A fabric on this device alone fails with an error, not with a panic.
    let alone =
        Fabric::builder(verbs).device("fake1").rdma(Rdma::Require).build().expect_err("no SRQ");
    assert_eq!(alone.kind(), ErrorKind::Absent, "{alone}");
    drop(listener);
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// A device that refuses queues or memory is left out, too.
#[test]
fn leaves_out_devices_that_refuse_queues_or_memory() {
    for call in ["ibv_open_device", "ibv_alloc_pd", "ibv_create_cq", "ibv_create_srq", "ibv_reg_mr"]
    {
        let (world, fixture) = world(|_| {});
        world.fail_next(call, 12);
        let fabric =
            Fabric::builder(fixture.verbs.as_ref().expect("fake provider")).build().expect(call);
        assert_eq!((fabric.devices().len(), fabric.unused_devices().len()), (1, 1), "{call}");
        clear([fabric]);
        assert_eq!(world.objects(), Objects::default(), "{call}");
    }
}

/// Makes a world with this many devices.
fn world_with_devices(devices: u8) -> World {
    let world = World::new();
    for n in 1..=devices {
        let address = format!("10.0.0.{n}").parse().expect("an address");
        world.add_device(DeviceSpec::new(&format!("fake{n}"), address));
    }
    world
}

/// The amount of pinned memory does not depend on devices that do not serve the address.
#[test]
fn opens_only_the_device_that_has_the_address() {
    for devices in [1, 2, 4, 8] {
        let world = world_with_devices(devices);
        let builder = Fabric::builder(&world.verbs()).config(server_config());
        let fabric =
            builder.serving("10.0.0.1:0".parse().expect("an address")).build().expect("a fabric");
        assert_eq!(fabric.devices(), ["fake1"]);
        let memory = fabric.stats().memory;
        assert!(memory.registered_bytes <= 40 << 20, "{devices} devices: {memory:?}");
        assert_eq!(world.objects().contexts, 1);
        clear([fabric]);
    }
    let world = world_with_devices(2);
    let builder = Fabric::builder(&world.verbs()).rdma(Rdma::Require);
    let error = builder
        .serving("10.0.0.9:0".parse().expect("an address"))
        .build()
        .expect_err("no device has the address");
    assert!(error.to_string().contains("no RDMA device has the address 10.0.0.9"), "{error}");
}

/// The connection manager does not find a link-local address without its scope.
#[test]
fn opens_the_device_of_a_link_local_address() {
    let world = world_with_devices(1);
    world.add_device(DeviceSpec::new("fake9", "fe80::9".parse().expect("an address")));
    let builder = Fabric::builder(&world.verbs()).rdma(Rdma::Require);
    let at = SocketAddrV6::new("fe80::9".parse().expect("an address"), 6380, 0, 5);
    let fabric = builder.serving(at.into()).build().expect("a fabric");
    assert_eq!(fabric.devices(), ["fake9"]);
    clear([fabric]);
}

/// A listener at the address of an unused device would refuse every RDMA peer.
#[test]
fn does_not_listen_for_rdma_at_the_address_of_a_device_that_is_left_out() {
    let world = world_with_devices(2);
    let fabric = Fabric::builder(&world.verbs()).device("fake2").build().expect("a fabric");
    let required = ListenOptions::new().rdma(Rdma::Require);
    let listen = |at: &str| fabric.listen_with(at.parse().expect("an address"), &required);
    let error = listen("10.0.0.1:0").expect_err("the address of fake1");
    assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    assert!(error.to_string().contains("device fake1, but only fake2 may be used"), "{error}");
    drop(listen("10.0.0.2:0").expect("the address of fake2"));
    clear([fabric]);
}

/// An idle fabric pins at most 40 MiB for each device. When all memory is in use, the total for all
/// devices stays within the limit of 1 GiB.
#[test]
fn pins_memory_in_proportion_to_the_devices_and_within_the_limit() {
    for devices in [1, 2, 4, 8] {
        let world = world_with_devices(devices);
        let any = "0.0.0.0:0".parse().expect("an address");
        let builder = Fabric::builder(&world.verbs()).config(server_config());
        let fabric = builder.serving(any).build().expect("a fabric");
        assert_eq!(fabric.devices().len(), usize::from(devices));
        let idle = fabric.stats().memory.registered_bytes;
        assert!(idle <= u64::from(devices) * (40 << 20), "{devices} devices: {idle}");
        // Takes all memory of the pool.
        let mut held = Vec::new();
        for purpose in Purpose::ALL {
            while let Ok(buf) = fabric.pool().take_uncharged(2 << 20, purpose) {
                held.push(buf);
            }
        }
        let memory = fabric.stats().memory;
        assert!(memory.registered_bytes <= 1 << 30, "{devices} devices: {memory:?}");
        assert!(memory.registered_bytes > 900 << 20, "{devices} devices: {memory:?}");
        assert!(memory.registered_max_bytes <= 1 << 30, "{devices} devices: {memory:?}");
        drop(held);
        clear([fabric]);
    }
}

/// The kernel takes a device away (mlx5: removal, firmware reset). Its descriptors report an error
/// forever, and every destroy fails with EIO.
#[test]
fn lets_go_of_a_device_that_the_kernel_took_away_and_sleeps() {
    let (world, fixture) = world(|_| {});
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let [there, here] = open_link(&client, &fixture.hosts[1], &server, &mut listener);
    there.post_bytes(0, b"on its way").expect("room in the queue");
    world.disassociate_device("fake1");
    until(&[&server, &client], "the links have ended", || {
        server.stats().links + client.stats().links == 0
    });
    assert_eq!(here.failure().map(|error| error.kind()), Some(ErrorKind::DeviceGone));
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
    // Nothing is left to do until a timer looks for the device again.
    let begun = Instant::now();
    let mut idle = 0;
    while idle < 5 {
        let readable = rustix::event::poll(
            &mut [rustix::event::PollFd::new(&server, rustix::event::PollFlags::IN)],
            Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }),
        );
        idle = if readable == Ok(0) { idle + 1 } else { 0 };
        server.progress();
        assert!(begun.elapsed() < Duration::from_secs(20), "the descriptor stays readable");
    }
    drop((listener, there, here));
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}
