//! The suite of sessions on the fake provider, with a real `redis-server` behind the gateway.

mod sessions;

use ferrite_verbs::Verbs;
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use sessions::{HOSTS, Scene, run_suite};

/// Runs a test in a world of its own; nothing may be left of it.
fn run(test: impl AsyncFnOnce(Scene)) {
    run_in(&World::new(), |verbs| sessions::run(verbs, 1, test));
}

fn run_in(world: &World, run: impl FnOnce(Verbs)) {
    for (device, ip) in [("rxe1", HOSTS[0]), ("rxe2", HOSTS[1])] {
        world.add_device(DeviceSpec::new(device, ip.parse().expect("an address")));
    }
    run(world.verbs());
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);

#[test]
fn gone_without_a_word() {
    let world = World::new();
    run_in(&world, |verbs| {
        sessions::idle::gone_without_a_word(verbs, || world.black_hole("rxe1", "rxe2"));
    });
}
