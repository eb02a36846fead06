//! Runs the suite of multiplexed links on Soft-RoCE devices in the lab's guest (`cargo xtask
//! lab-test mux`).
#![expect(clippy::print_stdout, reason = "prints the seed that replays a failure")]

mod mux;

use std::time::Duration;

use ferrite_fabric::{Config, Fabric};
use ferrite_testkit::lab::{HOSTS, any_port, slowdown, verbs};
use mux::load::{Load, streams_survive_moves};
use mux::{Harness, TIMEOUT, run_suite};

/// Returns the fabrics of the guest's two hosts.
fn harness() -> Harness {
    let hosts = [HOSTS[1], HOSTS[0]];
    let fabrics = hosts.map(|(device, _)| {
        let config = Config {
            upgrade_after: Duration::from_millis(200),
            ..ferrite_session::client_config()
        };
        let builder = Fabric::builder(&verbs()).device(device).config(config);
        let fabric = builder.build().expect("a fabric");
        fabric.spawn_thread().expect("a thread");
        fabric
    });
    let addresses = hosts.map(any_port);
    Harness { fabrics, addresses, has_rdma: true }
}

fn run(test: impl AsyncFnOnce(&Harness)) {
    mux::run(&harness(), TIMEOUT * slowdown(), test);
}

run_suite!(crate::run);

/// A thousand streams on one link that moves between RDMA and TCP: 8 times by default, 200 times
/// with `FERRITE_MOVES=200`. `FERRITE_SEED` replays the sizes.
#[test]
fn a_thousand_streams_survive_migrations() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seed = number("FERRITE_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let moves = number("FERRITE_MOVES").unwrap_or(8);
    println!("FERRITE_SEED={seed} FERRITE_MOVES={moves}");
    let slowdown = slowdown();
    let load = Load {
        streams: 1000 / slowdown as usize,
        moves: moves as usize,
        round_trips: 500 / slowdown as usize,
        seed,
    };
    let limit = (TIMEOUT + Duration::from_secs(4) * moves as u32) * slowdown;
    mux::run(&harness(), limit, async |harness| streams_survive_moves(harness, load).await);
}
