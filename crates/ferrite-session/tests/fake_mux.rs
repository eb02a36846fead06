//! Runs the suite of multiplexed links on the fake provider.

mod mux;

use std::net::SocketAddr;
use std::time::Duration;

use ferrite_fabric::{Config, Fabric};
use ferrite_verbs::fake::{DeviceSpec, World};
use mux::load::{Load, streams_survive_moves};
use mux::{Harness, TIMEOUT, run_suite};

const HOSTS: [(&str, [u8; 4]); 2] = [("rxe1", [127, 0, 0, 1]), ("rxe2", [127, 0, 0, 2])];

/// Runs a test in a `World` of its own.
fn run(test: impl AsyncFnOnce(&Harness)) {
    let world = World::new();
    for (device, ip) in HOSTS {
        world.add_device(DeviceSpec::new(device, ip.into()));
    }
    let fabrics = HOSTS.map(|(device, _)| {
        let config = Config {
            busy_poll_us: 0,
            upgrade_after: Duration::from_millis(50),
            ..ferrite_session::client_config()
        };
        let builder = Fabric::builder(&world.verbs()).device(device).config(config);
        let fabric = builder.build().expect("a fabric");
        fabric.spawn_thread().expect("a thread");
        fabric
    });
    let addresses = HOSTS.map(|(_, ip)| SocketAddr::from((ip, 0)));
    mux::run(&Harness { fabrics, addresses, has_rdma: true }, TIMEOUT, test);
}

run_suite!(crate::run);

#[test]
fn streams_survive_migrations() {
    let load = Load { streams: 100, moves: 10, round_trips: 200, seed: 2 };
    run(async |harness| streams_survive_moves(harness, load).await);
}
