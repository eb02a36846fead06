//! The fabric on a fake provider that imitates various network cards, drivers and kernels,
//! according to their sources.
#![cfg(not(miri))] // Miri has no network

#[expect(dead_code, unused_imports, unused_macros, reason = "parts of the link suite")]
mod links;
mod links_on_fake {
    pub(crate) mod world;
}

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, ErrorKind, Fabric, Link, Listener, Rdma, Transport,
};
use ferrite_testkit::free_port;
use ferrite_verbs::fake::{DeviceSpec, World};
use links::isolation::ForeignPeerServer;
use links::pair::{drive, open_link, until};
use links::{Fixture, TEST_TIMEOUT};

/// Makes two hosts; `change` changes the device of the first.
fn world(change: impl FnOnce(&mut DeviceSpec)) -> (World, Fixture) {
    links_on_fake::world::world(["127.0.0.1", "127.0.0.2"], change)
}

/// bnxt_re: the kernel reports memory windows, but the provider cannot create any. The fabric
/// treats the device as one without windows.
#[test]
fn treats_windows_that_cannot_be_created_as_none() {
    let (_world, fixture) = world(|device| device.windows_only_in_kernel = true);
    let server =
        ForeignPeerServer::new(&fixture, &Config { shared_windows: true, ..Config::default() });
    let client = server.client(); // the settings allow shared windows
    server.check_write(&client);
    assert_eq!(
        server.fabrics[1].stats().devices_without_windows,
        1,
        "reported when the fabric is built"
    );
    server.end(vec![client]);
    let server = ForeignPeerServer::new(&fixture, &Config::default());
    let error = server.refused();
    assert!(error.to_string().contains("rdma-shared-windows"), "{error}");
    server.end(Vec::new());
}

/// Reads and writes between Ferrite peers work on a device that cannot create windows.
#[test]
fn grants_work_without_windows() {
    let (_world, fixture) = world(|device| device.windows_only_in_kernel = true);
    links::one_sided::read_returns_granted_bytes(&fixture);
}

/// mlx4 (ConnectX-3): windows of type 2 exist although `max_mw` is 0.
#[test]
fn uses_windows_although_max_mw_is_zero() {
    let (_world, fixture) = world(|device| device.hides_max_mw = true);
    let server = ForeignPeerServer::new(&fixture, &Config::default());
    assert_eq!(server.fabrics[1].stats().devices_without_windows, 0);
    let client = server.client();
    server.check_write(&client);
    server.end(vec![client]);
}

/// bnxt_re with rdma-core up to version 60 accepts 96 bytes inline and refuses more without an
/// error number (`BNXT_RE_MAX_INLINE_SIZE`, `bnxt_re_check_qp_limits` in `providers/bnxt_re`).
#[test]
fn opens_links_when_inline_is_refused_without_errno() {
    let (_world, fixture) =
        world(|device| (device.max_inline, device.refuses_silently) = (96, true));
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let _ = open_link(&client, &fixture.hosts[1], &server, &mut listener);
}

/// A queue pair is refused once, for a reason that has nothing to do with inline data. Later queue
/// pairs still get the full inline size.
#[test]
fn one_refusal_does_not_limit_inline_data() {
    const EINVAL: i32 = 22;
    let (world, fixture) = world(|_| ());
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    for refused in [true, false] {
        if refused {
            world.fail_next("ibv_create_qp", EINVAL);
        }
        let _ = open_link(&client, &fixture.hosts[1], &server, &mut listener);
        assert_eq!(world.sizes().inline, Config::default().inline_threshold, "refused: {refused}");
    }
}

/// An InfiniBand port without IPoIB has no address that the connection manager can bind to. The
/// fabric uses a device with such a port again after a reset.
#[test]
fn a_device_without_an_address_comes_back() {
    let (world, fixture) = world(|device| device.addresses.clear());
    let verbs = fixture.verbs.as_ref().expect("fake provider");
    let fabric = Fabric::builder(verbs).build().expect("a fabric on both devices");
    // Listening opens the connection manager.
    let _listener = fabric.listen(fixture.hosts[1].any_port()).expect("listen");
    for round in 1..=2 {
        world.disassociate_device("fake1");
        until(&[&fabric], "the device is gone", || fabric.stats().devices_lost == round);
        let mut back = DeviceSpec::new("fake1", fixture.hosts[0].ip);
        back.addresses.clear();
        world.add_device(back);
        until(&[&fabric], "the device is back", || fabric.stats().devices_back == round);
    }
}

/// The device has a single window. It is free again after the fabric's probe at the start, and
/// after the client's connection.
#[test]
fn releases_the_only_window() {
    let (_world, fixture) = world(|device| device.max_mw = 1);
    let server = ForeignPeerServer::new(&fixture, &Config::default());
    let client = server.client();
    server.check_write(&client);
    server.end(vec![client]);
    links::one_sided::read_returns_granted_bytes(&fixture);
}

/// The cable is plugged in after the start.
#[test]
fn uses_a_port_that_comes_up_later() {
    let (world, fixture) = world(|_| ());
    world.device_down("fake1");
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    world.device_up("fake1");
    let _ = open_link(&client, &fixture.hosts[1], &server, &mut listener);
}

/// A device with very low limits.
#[test]
fn messages_on_the_smallest_device() {
    let (_world, fixture) = world(|device| {
        (device.max_qp_wr, device.max_sge, device.max_inline) = (16, 1, 0);
        (device.max_cqe, device.max_srq_wr, device.max_srq_sge, device.max_reads) = (32, 16, 1, 1);
    });
    links::messages::every_size_arrives(&fixture);
    links::messages::large_messages_do_not_delay_small_ones(&fixture);
    links::one_sided::read_returns_granted_bytes(&fixture);
    links::raw_connections::messages_and_writes_arrive_in_order(&fixture);
}

/// Connects to a listener with a fabric that does not use RDMA.
fn connect_over_tcp(client: &Fabric, server: &Fabric, listener: &mut Listener) -> [Link; 2] {
    let calling = client.connect(listener.local_addr());
    let (there, here) =
        drive(&[client, server], async { futures_util::join!(calling, listener.accept()) });
    let links = [there.expect("connected over TCP"), here.expect("accepted over TCP")];
    assert_eq!(links.each_ref().map(Link::transport), [Transport::Tcp; 2]);
    links
}

/// A card is reset (firmware update, `devlink dev reload`). TCP on its address continues, and RDMA
/// returns with the card.
#[test]
fn tcp_continues_while_the_device_is_reset() {
    let (world, fixture) = world(|_| ());
    let verbs = fixture.verbs.as_ref().expect("fake provider");
    let at = fixture.hosts[0].ip;
    let server = Fabric::builder(verbs).serving(SocketAddr::new(at, 0)).build().expect("a fabric");
    let plain = Fabric::builder(verbs).rdma(Rdma::Forbid).build().expect("a fabric");
    let client = fixture.fabric(&fixture.hosts[1], &Config::default());
    let mut listener = server.listen(SocketAddr::new(at, 0)).expect("listen");
    let before = connect_over_tcp(&plain, &server, &mut listener);
    for round in 1..=2 {
        world.disassociate_device("fake1");
        until(&[&server, &plain], "the device is gone", || server.stats().devices_lost == round);
        connect_over_tcp(&plain, &server, &mut listener);
        let talking =
            async { futures_util::join!(before[0].send_bytes(0, b"still here"), before[1].recv()) };
        let (sent, got) = drive(&[&plain, &server], talking);
        sent.expect("sent");
        assert_eq!(got.expect("a message").to_vec(), b"still here");
        world.add_device(DeviceSpec::new("fake1", at));
        until(&[&server], "the device is back", || server.stats().devices_back == round);
        // The RDMA listener is ready a moment after the device is back.
        let options = ConnectOptions::new().local(fixture.hosts[1].any_port()).rdma(Rdma::Require);
        let begun = Instant::now();
        let there = loop {
            let calling = client.connect_with(listener.local_addr(), &options);
            match drive(&[&client, &server], calling) {
                Ok(there) => break there,
                Err(error) => {
                    assert!(begun.elapsed() < TEST_TIMEOUT, "RDMA did not return: {error}");
                }
            }
        };
        let here = drive(&[&client, &server], listener.accept()).expect("accepted");
        assert_eq!([there.transport(), here.transport()], [Transport::Rdma; 2]);
    }
    // A listener that is dropped while its device is gone does not come back with the device.
    world.disassociate_device("fake1");
    until(&[&server, &client], "the device is gone", || server.stats().devices_lost == 3);
    let address = listener.local_addr();
    drop(listener);
    world.add_device(DeviceSpec::new("fake1", at));
    until(&[&server], "the device is back", || server.stats().devices_back == 3);
    server.listen(address).expect("the address is free");
}

/// A listener without TCP ends when its device is reset.
#[test]
fn rdma_only_listener_ends_with_its_device() {
    let (world, fixture) = world(|_| ());
    let verbs = fixture.verbs.as_ref().expect("fake provider");
    let server =
        Fabric::builder(verbs).rdma(Rdma::Require).device("fake1").build().expect("a fabric");
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    world.disassociate_device("fake1");
    let error = drive(&[&server], listener.accept()).expect_err("the device is gone");
    assert_eq!(error.kind(), ErrorKind::DeviceGone);
}

/// Software iWARP listens on a TCP port of the host (`siw_create_listen` in the kernel's
/// `drivers/infiniband/sw/siw/siw_cm.c`), which our own TCP listener already uses. On `0.0.0.0` the
/// kernel listens on all devices or on none (`cma_listen_on_all`), so one iWARP device is enough
/// for EADDRINUSE.
#[test]
fn falls_back_to_tcp_when_iwarp_needs_the_port() {
    const EADDRINUSE: i32 = 98;
    let (world, fixture) = world(|_| ());
    let verbs = fixture.verbs.as_ref().expect("fake provider");
    let server = Fabric::builder(verbs).device("fake1").build().expect("a fabric");
    for ip in ["0.0.0.0", "127.0.0.1"] {
        world.fail_next("rdma_listen", EADDRINUSE);
        let listener =
            server.listen(format!("{ip}:0").parse().expect("an address")).expect("TCP is free");
        let absence = listener.absence().expect("RDMA is unavailable");
        assert!(absence.remedy().is_some_and(|remedy| remedy.contains("iWARP")), "{absence}");
    }
    // If another process uses the port for RDMA, `listen` still fails.
    world.fail_next("rdma_bind_addr", EADDRINUSE);
    let at = SocketAddr::new(fixture.hosts[0].ip, free_port());
    assert_eq!(server.listen(at).expect_err("the port is in use").kind(), ErrorKind::Misuse);
}

/// Makes two hosts with a fabric each; `change` changes the device of the first.
fn two_hosts(change: impl FnOnce(&mut DeviceSpec)) -> (World, [Fabric; 2]) {
    let world = World::new();
    let mut first = DeviceSpec::new("fake1", "127.0.0.1".parse().expect("an address"));
    change(&mut first);
    world.add_device(first);
    world.add_device(DeviceSpec::new("fake2", "127.0.0.2".parse().expect("an address")));
    let long = Duration::from_secs(600);
    let config =
        Config { busy_poll_us: 0, keepalive: long, peer_timeout: long, ..Config::default() };
    let verbs = world.verbs();
    let fabrics = ["fake1", "fake2"].map(|name| {
        Fabric::builder(&verbs).device(name).config(config.clone()).build().expect("a fabric")
    });
    (world, fabrics)
}

/// Connects the second host to the first; both are driven by threads.
fn linked([server, client]: &[Fabric; 2]) -> (Listener, [Link; 2]) {
    for fabric in [server, client] {
        fabric.spawn_thread().expect("a thread");
    }
    let mut listener = server.listen("127.0.0.1:0".parse().expect("an address")).expect("listen");
    let options = ConnectOptions::new()
        .local("127.0.0.2:0".parse().expect("an address"))
        .mode(ConnectMode::Cm)
        .rdma(Rdma::Require);
    let connecting = client.connect_with(listener.local_addr(), &options);
    let (there, here) =
        client.block_on(async { futures_util::join!(connecting, listener.accept()) });
    (listener, [there.expect("connect"), here.expect("accept")])
}

/// A driver may fail to arm a completion queue once. If the provider has no doorbell for it,
/// `ibv_req_notify_cq` is a kernel command (`ibv_cmd_req_notify_cq` in rdma-core).
#[test]
fn receives_messages_when_a_completion_queue_could_not_be_armed_once() {
    let (world, fabrics) = two_hosts(|_| {});
    let (listener, [there, here]) = linked(&fabrics);
    for _ in 0..10 {
        world.fail_next("ibv_req_notify_cq", 12);
        there.post_bytes(0, b"are you there?").expect("room in the queue");
        let begun = Instant::now();
        while here.try_recv().expect("the link is up").is_none() {
            assert!(begun.elapsed() < TEST_TIMEOUT, "the message was not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    drop((listener, there, here));
}

/// Kernels before 5.1 have no RDMA_OPTION_ID_ACK_TIMEOUT (`ucma_set_option_id` in their
/// `drivers/infiniband/core/ucma.c` returns ENOSYS).
#[test]
fn sets_the_ack_timeout_on_old_kernels() {
    let (world, fabrics) = two_hosts(|_| {});
    (0..2).for_each(|_| world.fail_next("rdma_set_option", 38));
    let linked = linked(&fabrics);
    assert_eq!(world.ack_timeouts(), [Config::default().ack_timeout; 2]);
    drop(linked);
}

/// Some devices serve no reads: `max_qp_rd_atom` is 0.
#[test]
fn connects_over_a_device_without_reads() {
    let (_world, fabrics) = two_hosts(|device| device.max_reads = 0);
    let (listener, [there, here]) = linked(&fabrics);
    there.post_bytes(0, b"hello").expect("room in the queue");
    let message = fabrics[0].block_on(here.recv()).expect("a message");
    assert_eq!(message.to_vec(), b"hello");
    drop((listener, there, here));
}

#[test]
fn names_iwarp_devices_and_does_not_listen_on_them() {
    let (world, [server, _client]) = two_hosts(|device| device.is_iwarp = true);
    let error = server.absence().expect("no device is usable");
    assert!(error.to_string().contains("fake1 is an iWARP device"), "{error}");
    let listener = server.listen("127.0.0.1:0".parse().expect("an address")).expect("TCP is free");
    assert!(listener.absence().is_some());
    assert_eq!(world.objects().cm_ids, 0, "nobody listens for RDMA");
    drop(listener);
}

#[test]
fn handles_a_storm_of_port_events_in_parts() {
    const EVENTS: usize = 10_000;
    let (world, [server, _client]) = two_hosts(|_| {});
    world.change_gids("fake1", EVENTS);
    let begun = Instant::now();
    let mut handled = 0;
    while handled < EVENTS {
        let in_one_pass = server.poll();
        assert!(in_one_pass < 200, "{in_one_pass} events in one pass");
        handled += in_one_pass;
        assert!(begun.elapsed() < TEST_TIMEOUT, "only {handled} events were handled");
    }
}
