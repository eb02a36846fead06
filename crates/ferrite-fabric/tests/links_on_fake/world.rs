//! Two hosts of the fake provider.

use ferrite_verbs::fake::{DeviceSpec, World};

use crate::links::{Fixture, Host};

/// Makes two hosts, `fake1` and `fake2`, with these addresses. `change` changes the device of the
/// first.
pub(crate) fn world(ips: [&str; 2], change: impl FnOnce(&mut DeviceSpec)) -> (World, Fixture) {
    let world = World::new();
    let hosts = [Host::new("fake1", ips[0]), Host::new("fake2", ips[1])];
    let [mut first, second] = hosts.each_ref().map(|host| DeviceSpec::new(&host.device, host.ip));
    change(&mut first);
    world.add_device(first);
    world.add_device(second);
    let verbs = world.verbs();
    (world, Fixture { verbs: Some(verbs), tls: None, hosts, work_divisor: 1, storm_divisor: 1 })
}
