//! The link test suite on the fake provider, and tests that only the fake can run: every fault, on
//! demand.

mod links;
mod links_on_fake {
    mod breakage;
    mod faults;
    mod providers;
    mod revival;
}

use ferrite_fabric::{Config, ErrorKind};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use links::isolation::ForeignPeerServer;
use links::{Fixture, Host, run_suite};

/// Makes two hosts, `fake1` and `fake2`.
fn world() -> (World, Fixture) {
    let world = World::new();
    let hosts = [Host::new("fake1", "10.0.0.1"), Host::new("fake2", "10.0.0.2")];
    for host in &hosts {
        world.add_device(DeviceSpec::new(&host.device, host.ip));
    }
    let verbs = world.verbs();
    (world, Fixture { verbs: Some(verbs), tls: None, hosts, work_divisor: 1, storm_divisor: 1 })
}

/// Runs a test in a world of its own and checks that it leaves nothing behind.
fn run(test: impl FnOnce(&Fixture)) {
    let (world, fixture) = world();
    test(&fixture);
    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

/// A device that cannot isolate foreign peers from each other accepts none of them, unless the
/// settings allow it.
#[test]
fn rejects_foreign_peers_on_a_device_without_windows() {
    let world = World::new();
    let hosts = [Host::new("fake1", "10.0.0.1"), Host::new("fake2", "10.0.0.2")];
    let [with, without] = [true, false];
    for (host, queue_pair_windows) in hosts.iter().zip([without, with]) {
        world.add_device(DeviceSpec {
            queue_pair_windows,
            ..DeviceSpec::new(&host.device, host.ip)
        });
    }
    let verbs = world.verbs();
    let fixture =
        Fixture { verbs: Some(verbs), tls: None, hosts, work_divisor: 1, storm_divisor: 1 };

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
