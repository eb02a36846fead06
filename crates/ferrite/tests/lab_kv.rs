//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` over RDMA, in the lab's virtual
//! machine.

mod kv {
    pub(crate) mod suite;
}

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Command;

use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::REDIS;
use kv::suite::{self, Network};

const NETWORK: Network = Network {
    listen: "10.0.0.1:6380",
    client: &["--local", "10.0.0.2"],
    rdma: "require",
    transport: "RDMA (Ferrite)",
};

#[test]
fn gateway_carries_every_kind_of_load() {
    suite::gateway_carries_every_kind_of_load(&NETWORK);
}

#[test]
fn bench_reports_why_a_client_is_rejected() {
    suite::bench_reports_why_a_client_is_rejected(&NETWORK);
}

#[test]
fn bench_compares_transports_in_turns() {
    suite::bench_compares_transports_in_turns(&NETWORK);
}

#[test]
fn bench_fabric_names_a_redis_server() {
    suite::bench_fabric_names_a_redis_server(&NETWORK);
}

#[test]
fn relay_carries_load_and_reports_failures() {
    suite::relay_carries_load_and_reports_failures(&NETWORK);
}

#[test]
fn second_signal_stops_the_gateway_at_once() {
    suite::second_signal_stops_the_gateway_at_once(&NETWORK);
}

/// Two nodes are reached over RDMA, one has no module.
#[test]
fn bench_uses_the_modules_of_a_cluster() {
    let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    let shape = Shape { without_module: &[2], ip, ..Shape::primaries(Path::new(REDIS), 3) };
    let mut cluster = Cluster::start(&shape);
    cluster.wait_until("the endpoints of all modules", |cluster, number| {
        number == 2 || cluster.nodes[number].engine.count("cluster_endpoints") == 1
    });
    let server = cluster.nodes[0].module_address().to_string();
    let bench = |rdma: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .args(["bench", "kv", &server, "--cluster", "--json", "--local", "10.0.0.2"])
            .args(["--seconds", "1", "--warmup", "0", "--rdma", rdma])
            .output()
            .expect("ferrite starts");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        serde_json::from_slice::<serde_json::Value>(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {stderr}"))
    };
    let report = bench("prefer");
    assert_eq!(report["transport"], "RDMA (Ferrite) and TCP", "{report}");
    for result in report["results"].as_array().expect("results") {
        assert_eq!((&result["errors"], &result["complete"]), (&0.into(), &true.into()));
    }
    let error = bench("require")["error"]["message"].to_string();
    assert!(error.contains(&cluster.nodes[2].id), "{error}");
    cluster.assert_healthy();
}
