//! The suite of links on the fake provider, and what only the fake can do: every fault, on demand.

#[path = "links/breakage.rs"]
mod breakage;
#[path = "links/faults.rs"]
mod faults;
mod links;
#[path = "links/revival.rs"]
mod revival;

use ferrite_verbs::fake::{DeviceSpec, Objects, World};
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
