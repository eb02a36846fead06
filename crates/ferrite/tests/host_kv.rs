//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` over TCP, on any host.

mod kv {
    pub(crate) mod suite;
}

use std::process::Command;

use ferrite_testkit::{Engine, free_port};
use kv::suite::{self, Network};

const NETWORK: Network =
    Network { listen: "127.0.0.1:0", client: &[], rdma: "forbid", transport: "TCP" };

#[test]
fn gateway_carries_every_kind_of_load() {
    suite::gateway_carries_every_kind_of_load(&NETWORK);
}

#[test]
fn bench_reports_why_a_client_is_rejected() {
    suite::bench_reports_why_a_client_is_rejected(&NETWORK);
}

#[test]
fn relay_carries_load_and_reports_failures() {
    suite::relay_carries_load_and_reports_failures(&NETWORK);
}

#[test]
fn second_signal_stops_the_gateway_at_once() {
    suite::second_signal_stops_the_gateway_at_once(&NETWORK);
}

/// There is no RDMA on loopback.
#[test]
fn comparison_without_rdma_fails_before_it_measures() {
    let port = free_port().to_string();
    let redis = Engine::redis(&["--port", &port]);
    let server = format!("127.0.0.1:{port}");
    let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .args(["bench", "kv", &server, "--compare", "tcp,rdma", "--seconds", "0.1"])
        .output()
        .expect("ferrite starts");
    let (stdout, stderr) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && stdout.is_empty(), "{output:?}");
    assert!(stderr.contains("RDMA"), "{stderr}");
    let commands: String = redis.ask(&["INFO", "commandstats"]);
    assert!(!commands.contains("cmdstat_set:"), "{commands}");
}
