//! The stream test suite over TCP, on this host's own network.

mod streams;

use streams::{Host, Test, run_suite};

/// Runs a test between two addresses of this host.
fn run(test: impl Test) {
    let hosts = [Host::new("lo", "127.0.0.1"), Host::new("lo", "127.0.0.2")];
    streams::run(None, hosts, 1, test);
}

run_suite!(crate::run);
