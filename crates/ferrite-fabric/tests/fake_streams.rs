//! The stream test suite on the fake provider.

mod streams;

use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use streams::{Host, Test, run_suite};

/// Runs a test in a world of its own and checks that it leaves nothing behind.
fn run(test: impl Test) {
    let world = World::new();
    let hosts = [Host::new("fake1", "10.0.0.1"), Host::new("fake2", "10.0.0.2")];
    for host in &hosts {
        world.add_device(DeviceSpec::new(host.device, host.ip));
    }
    streams::run(Some(world.verbs()), hosts, 1, test);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

run_suite!(crate::run);
