//! What other network cards and their drivers do, on the fake, which has it from their sources.
#![cfg(not(miri))] // which has no network

#[expect(dead_code, unused_imports, unused_macros, reason = "what is for tests of links")]
mod links;

use std::net::SocketAddr;
use std::time::Instant;

use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Link, Listener, Rdma, Transport};
use ferrite_verbs::fake::{DeviceSpec, World};
use links::isolation::Scene;
use links::pair::{drive, open_link, until};
use links::{Fixture, Host, TEST_TIMEOUT};

/// Two hosts, the first of which has a device as `change` makes it.
fn world(change: impl FnOnce(&mut DeviceSpec)) -> (World, Fixture) {
    let world = World::new();
    let hosts = [Host::new("fake1", "127.0.0.1"), Host::new("fake2", "127.0.0.2")];
    let mut first = DeviceSpec::new("fake1", hosts[0].ip);
    change(&mut first);
    world.add_device(first);
    world.add_device(DeviceSpec::new("fake2", hosts[1].ip));
    let verbs = world.verbs();
    (world, Fixture { verbs: Some(verbs), tls: None, hosts, work_divisor: 1, storm_divisor: 1 })
}

/// bnxt_re: the kernel says that there are windows, and the provider makes none. As where there are
/// none.
#[test]
fn windows_that_cannot_be_made_are_none() {
    let (_world, fixture) = world(|device| device.windows_only_in_kernel = true);
    let scene = Scene::new(&fixture, &Config { shared_windows: true, ..Config::default() });
    let guest = scene.guest(); // allowed by name
    scene.check_write(&guest);
    assert_eq!(scene.fabrics[1].stats().devices_without_windows, 1, "told at the start");
    scene.end(vec![guest]);
    let scene = Scene::new(&fixture, &Config::default());
    let error = scene.refused();
    assert!(error.to_string().contains("rdma-shared-windows"), "{error}");
    scene.end(Vec::new());
}

/// The same: reads and writes between Ferrite peers.
#[test]
fn grants_where_windows_cannot_be_made() {
    let (_world, fixture) = world(|device| device.windows_only_in_kernel = true);
    links::one_sided::reads(&fixture);
}

/// mlx4 (ConnectX-3): windows of type 2, and `max_mw` is 0.
#[test]
fn windows_of_which_the_device_does_not_say_how_many() {
    let (_world, fixture) = world(|device| device.hides_max_mw = true);
    let scene = Scene::new(&fixture, &Config::default());
    assert_eq!(scene.fabrics[1].stats().devices_without_windows, 0);
    let guest = scene.guest();
    scene.check_write(&guest);
    scene.end(vec![guest]);
}

/// bnxt_re with rdma-core up to 60 takes 96 bytes inline, and refuses more without an error number
/// (`BNXT_RE_MAX_INLINE_SIZE`, `bnxt_re_check_qp_limits` in `providers/bnxt_re`).
#[test]
fn links_come_up_where_too_much_inline_is_refused_without_a_reason() {
    let (_world, fixture) =
        world(|device| (device.max_inline, device.refuses_silently) = (96, true));
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let _ = open_link(&client, &fixture.hosts[1], &server, &mut listener);
}

/// A single window: it is free again after the trial, and after the guest.
#[test]
fn few_windows() {
    let (_world, fixture) = world(|device| device.max_mw = 1);
    let scene = Scene::new(&fixture, &Config::default());
    let guest = scene.guest();
    scene.check_write(&guest);
    scene.end(vec![guest]);
    links::one_sided::reads(&fixture);
}

/// The cable is plugged in after the start.
#[test]
fn a_port_that_comes_up_after_the_start_is_used() {
    let (world, fixture) = world(|_| ());
    world.device_down("fake1");
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    world.device_up("fake1");
    let _ = open_link(&client, &fixture.hosts[1], &server, &mut listener);
}

/// The least that a device may have.
#[test]
fn messages_on_the_smallest_device() {
    let (_world, fixture) = world(|device| {
        (device.max_qp_wr, device.max_sge, device.max_inline) = (16, 1, 0);
        (device.max_cqe, device.max_srq_wr, device.max_srq_sge, device.max_reads) = (32, 16, 1, 1);
    });
    links::messages::of_every_size(&fixture);
    links::messages::small_beside_large(&fixture);
    links::one_sided::reads(&fixture);
    links::raw_connections::messages_and_writes(&fixture);
}

/// A link to a listener by a fabric that has no RDMA.
fn over_tcp(client: &Fabric, server: &Fabric, listener: &mut Listener) -> [Link; 2] {
    let calling = client.connect(listener.local_addr());
    let (there, here) =
        drive(&[client, server], async { futures_util::join!(calling, listener.accept()) });
    let links = [there.expect("connected over TCP"), here.expect("accepted over TCP")];
    assert_eq!(links.each_ref().map(Link::transport), [Transport::Tcp; 2]);
    links
}

/// A card is reset (firmware update, `devlink dev reload`): at its own address TCP goes on, and
/// RDMA is back with it.
#[test]
fn tcp_goes_on_when_the_device_of_the_address_is_reset() {
    let (world, fixture) = world(|_| ());
    let verbs = fixture.verbs.as_ref().expect("a world");
    let at = fixture.hosts[0].ip;
    let server = Fabric::builder(verbs).serving(at).build().expect("a fabric");
    let plain = Fabric::builder(verbs).rdma(Rdma::Forbid).build().expect("a fabric");
    let client = fixture.fabric(&fixture.hosts[1], &Config::default());
    let mut listener = server.listen(SocketAddr::new(at, 0)).expect("listen");
    let before = over_tcp(&plain, &server, &mut listener);
    for round in 1..=2 {
        world.disassociate_device("fake1");
        until(&[&server, &plain], "the device is gone", || server.stats().devices_lost == round);
        over_tcp(&plain, &server, &mut listener);
        let talking =
            async { futures_util::join!(before[0].send_bytes(0, b"still here"), before[1].recv()) };
        let (sent, got) = drive(&[&plain, &server], talking);
        sent.expect("sent");
        assert_eq!(got.expect("a message").to_vec(), b"still here");
        world.add_device(DeviceSpec::new("fake1", at));
        until(&[&server], "the device is back", || server.stats().devices_back == round);
        // It listens a moment after that.
        let options = ConnectOptions::new().local(fixture.hosts[1].any_port()).rdma(Rdma::Require);
        let begun = Instant::now();
        let there = loop {
            let calling = client.connect_with(listener.local_addr(), &options);
            match drive(&[&client, &server], calling) {
                Ok(there) => break there,
                Err(error) => assert!(begun.elapsed() < TEST_TIMEOUT, "no RDMA: {error}"),
            }
        };
        let here = drive(&[&client, &server], listener.accept()).expect("accepted");
        assert_eq!([there.transport(), here.transport()], [Transport::Rdma; 2]);
    }
    // A listener that is dropped while its device is gone does not come back with it.
    world.disassociate_device("fake1");
    until(&[&server, &client], "the device is gone", || server.stats().devices_lost == 3);
    let address = listener.local_addr();
    drop(listener);
    world.add_device(DeviceSpec::new("fake1", at));
    until(&[&server], "the device is back", || server.stats().devices_back == 3);
    server.listen(address).expect("nobody has the address");
}

/// Without TCP nothing is left of a listener whose device is reset.
#[test]
fn a_listener_for_rdma_alone_ends_with_its_device() {
    let (world, fixture) = world(|_| ());
    let verbs = fixture.verbs.as_ref().expect("a world");
    let server =
        Fabric::builder(verbs).rdma(Rdma::Require).device("fake1").build().expect("a fabric");
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    world.disassociate_device("fake1");
    let error = drive(&[&server], listener.accept()).expect_err("its device is gone");
    assert_eq!(error.kind(), ErrorKind::DeviceGone);
}

/// Software iWARP takes a port of the host's TCP to listen (`siw_create_listen` in the kernel's
/// `drivers/infiniband/sw/siw/siw_cm.c`), which is that of our own TCP listener. One such device is
/// enough for EADDRINUSE at `0.0.0.0`, where the kernel listens on all devices or on none
/// (`cma_listen_on_all`).
#[test]
fn tcp_is_taken_where_a_device_wants_the_port_for_itself() {
    const EADDRINUSE: i32 = 98;
    let (world, fixture) = world(|_| ());
    let verbs = fixture.verbs.as_ref().expect("a world");
    let server = Fabric::builder(verbs).device("fake1").build().expect("a fabric");
    for ip in ["0.0.0.0", "127.0.0.1"] {
        world.fail_next("rdma_listen", EADDRINUSE);
        let listener =
            server.listen(format!("{ip}:0").parse().expect("an address")).expect("TCP is free");
        let absence = listener.absence().expect("no RDMA");
        assert!(absence.remedy().is_some_and(|remedy| remedy.contains("iWARP")), "{absence}");
    }
    // A port that another has for RDMA is still an error of who asks for it.
    world.fail_next("rdma_bind_addr", EADDRINUSE);
    let at = SocketAddr::new(fixture.hosts[0].ip, free_port());
    assert_eq!(server.listen(at).expect_err("in use").kind(), ErrorKind::Misuse);
}

fn free_port() -> u16 {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
    socket.local_addr().expect("an address").port()
}
