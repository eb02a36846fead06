//! Runs the session suite on the fake provider, with a real `redis-server` behind the gateway.

mod sessions;

use ferrite_verbs::Verbs;
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use sessions::{HOSTS, Harness, run_suite};

/// Runs a test in a `World` of its own, and checks that it leaves no objects behind.
fn run(test: impl AsyncFnOnce(Harness)) {
    run_in(&World::new(), |verbs| sessions::run(verbs, 1, test));
}

fn run_in(world: &World, run: impl FnOnce(Verbs)) {
    for (device, ip) in [("rxe1", HOSTS[0]), ("rxe2", HOSTS[1])] {
        world.add_device(DeviceSpec::new(device, ip.parse().expect("valid address")));
    }
    run(world.verbs());
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

#[test]
fn detects_a_server_that_vanished() {
    let world = World::new();
    run_in(&world, |verbs| {
        sessions::idle::detects_a_server_that_vanished(verbs, || world.black_hole("rxe1", "rxe2"));
    });
}
