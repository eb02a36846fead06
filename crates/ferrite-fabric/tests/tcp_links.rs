//! The link test suite over TCP, on this host's own network, without the tests of RDMA itself.

#[expect(dead_code, reason = "helpers of tests of RDMA itself")]
mod links;

use links::{Fixture, Host, run_suite};

/// Runs a test between two addresses of this host.
fn run(test: impl FnOnce(&Fixture)) {
    let hosts = [Host::new("lo", "127.0.0.1"), Host::new("lo", "127.0.0.2")];
    test(&Fixture { verbs: None, tls: None, hosts, work_divisor: 1, storm_divisor: 1 });
}

run_suite!(over any transport: crate::run);
