//! The link test suite on the fake provider, and tests of faults and devices that the fake
//! imitates.

mod links;
mod links_on_fake {
    mod breakage;
    mod devices;
    mod faults;
    mod providers;
    mod revival;
    pub(crate) mod world;
}

use ferrite_fabric::{Config, ErrorKind};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use links::isolation::ForeignPeerServer;
use links::{Fixture, run_suite};

/// Makes two hosts; `change` changes the device of the first.
fn world(change: impl FnOnce(&mut DeviceSpec)) -> (World, Fixture) {
    links_on_fake::world::world(["10.0.0.1", "10.0.0.2"], change)
}

/// Runs a test in a world of its own and checks that it leaves nothing behind.
fn run(test: impl FnOnce(&Fixture)) {
    let (world, fixture) = world(|_| {});
    test(&fixture);
    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

/// A fabric accepts no foreign peers on a device that cannot isolate them from each other, unless
/// the settings allow it.
#[test]
fn rejects_foreign_peers_on_a_device_without_windows() {
    let (world, fixture) = world(|device| device.queue_pair_windows = false);
    let server = ForeignPeerServer::new(&fixture, &Config::default());
    let error = server.refused();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("rdma-shared-windows"), "{error}");
    let stats = server.fabrics[1].stats();
    assert_eq!((stats.refused_without_windows, stats.devices_without_windows), (1, 1));
    server.end(Vec::new());

    let server =
        ForeignPeerServer::new(&fixture, &Config { shared_windows: true, ..Config::default() });
    let client = server.client();
    server.check_write(&client);
    assert_eq!(server.fabrics[1].stats().shared_windows, 1);
    server.end(vec![client]);

    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
}
