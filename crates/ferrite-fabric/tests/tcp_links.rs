//! The suite of links over TCP, on this host's own network: everything in it that is not about RDMA
//! itself.

#[expect(dead_code, reason = "what is about RDMA alone")]
mod links;

use links::{Fixture, Host, run_suite};

/// Runs a test between two addresses of this host.
fn run(test: impl FnOnce(&Fixture)) {
    let hosts = [Host::new("lo", "127.0.0.1"), Host::new("lo", "127.0.0.2")];
    test(&Fixture { verbs: None, tls: None, hosts, slower: 1, storm_part: 1 });
}

run_suite!(over any transport: crate::run);
