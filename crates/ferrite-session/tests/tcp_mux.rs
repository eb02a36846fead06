//! Runs the suite of multiplexed links over TCP on this host.

mod mux;

use ferrite_fabric::{Config, Fabric, Rdma};
use mux::load::{Load, streams_survive_moves};
use mux::{Harness, TIMEOUT, run_suite};

fn harness() -> Harness {
    let address = "127.0.0.1:0".parse().expect("an address");
    let fabrics = [0, 1].map(|_| {
        let config = Config { busy_poll_us: 0, ..ferrite_session::client_config() };
        let fabric = Fabric::system().rdma(Rdma::Forbid).config(config).build();
        let fabric = fabric.expect("a fabric");
        fabric.spawn_thread().expect("a thread");
        fabric
    });
    Harness { fabrics, addresses: [address; 2], has_rdma: false }
}

fn run(test: impl AsyncFnOnce(&Harness)) {
    mux::run(&harness(), TIMEOUT, test);
}

run_suite!(crate::run);

#[test]
fn carries_many_streams() {
    let load = Load { streams: 200, moves: 0, round_trips: 200, seed: 1 };
    run(async |harness| streams_survive_moves(harness, load).await);
}
