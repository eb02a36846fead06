//! Runs the session suite on the fake provider, with a real `redis-server` behind the gateway.

mod sessions;

use ferrite_verbs::Verbs;
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use sessions::{HOSTS, Harness, run_suite};
use tokio::io::AsyncWriteExt as _;

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

/// A device may refuse to register memory for a moment.
#[test]
fn a_write_waits_while_memory_cannot_grow() {
    const ENOMEM: i32 = 12;
    let world = World::new();
    run_in(&world, |verbs| {
        sessions::run(verbs, 1, async |harness| {
            let config = ferrite_session::ValkeyConfig::default();
            let (client, mut server, fabrics) = sessions::streams::pair(&harness, &config).await;
            server.write_all(b"hello").await.expect("the client's window has arrived");
            let mut held = Vec::new();
            for size in [1 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10, 1 << 10, 256, 64, 1] {
                let take = || {
                    world.fail_next("ibv_reg_mr", ENOMEM);
                    fabrics[0].buffer(size)
                };
                while let Ok(buf) = take() {
                    held.push(buf);
                }
            }
            world.fail_next("ibv_reg_mr", ENOMEM);
            server.write_all(&[7; 3000]).await.expect("the second attempt succeeds");
            drop((held, client));
        });
    });
}
