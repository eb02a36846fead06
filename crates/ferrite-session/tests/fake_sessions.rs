//! The suite of sessions on the fake provider, with a real `redis-server` behind the gateway.

mod sessions;

use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use sessions::{HOSTS, Scene, run_suite};

/// Runs a test in a world of its own; nothing may be left of it.
fn run(test: impl AsyncFnOnce(Scene)) {
    let world = World::new();
    for (device, ip) in [("rxe1", HOSTS[0]), ("rxe2", HOSTS[1])] {
        world.add_device(DeviceSpec::new(device, ip.parse().expect("an address")));
    }
    sessions::run(world.verbs(), 1, test);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
