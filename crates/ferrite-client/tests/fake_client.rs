//! Runs the client's tests on the fake provider, with a real `redis-server`.

mod client;

use client::{HOSTS, run_suite};
use ferrite_verbs::Verbs;
use ferrite_verbs::fake::{DeviceSpec, Objects, World};

/// Runs a test in a `World` of its own, and checks that no verbs objects are left.
fn run(test: impl AsyncFnOnce(&Verbs)) {
    let world = World::new();
    for (device, ip) in [("rxe1", HOSTS[0]), ("rxe2", HOSTS[1])] {
        world.add_device(DeviceSpec::new(device, ip.parse().expect("valid address")));
    }
    client::run(&world.verbs(), test);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
