//! The suite of links on the fake provider, and what only the fake can do: every fault, on demand.

#[path = "links/breakage.rs"]
mod breakage;
#[path = "links/faults.rs"]
mod faults;
mod links;
#[path = "links/providers.rs"]
mod providers;
#[path = "links/revival.rs"]
mod revival;

use ferrite_fabric::{Config, ErrorKind};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use links::isolation::Scene;
use links::{Fixture, Host, run_suite};

/// Two hosts, `fake1` and `fake2`.
fn world() -> (World, Fixture) {
    let world = World::new();
    let hosts = [Host::new("fake1", "10.0.0.1"), Host::new("fake2", "10.0.0.2")];
    for host in &hosts {
        world.add_device(DeviceSpec::new(&host.device, host.ip));
    }
    let verbs = world.verbs();
    (world, Fixture { verbs: Some(verbs), tls: None, hosts, slower: 1, storm_part: 1 })
}

/// Runs a test in a world of its own; nothing may be left of it.
fn run(test: impl FnOnce(&Fixture)) {
    let (world, fixture) = world();
    test(&fixture);
    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

/// A device that cannot keep peers of other protocols apart takes none of them, unless it is told
/// to.
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
    let fixture = Fixture { verbs: Some(verbs), tls: None, hosts, slower: 1, storm_part: 1 };

    let scene = Scene::new(&fixture, &Config::default());
    let error = scene.refused();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("rdma-shared-windows"), "{error}");
    let stats = scene.fabrics[1].stats();
    assert_eq!((stats.refused_without_windows, stats.devices_without_windows), (1, 1));
    scene.end(Vec::new());

    let scene = Scene::new(&fixture, &Config { shared_windows: true, ..Config::default() });
    let guest = scene.guest();
    scene.is_well(&guest);
    assert_eq!(scene.fabrics[1].stats().shared_windows, 1);
    scene.end(vec![guest]);

    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
}
