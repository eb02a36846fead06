//! `ferrite gateway`, `ferrite relay` and `ferrite bench kv` over TCP, on any host.

mod kv {
    pub(crate) mod suite;
}

use std::process::Command;

use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::engines;
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

/// Every primary gets a share of the load and of the keys, and no request is redirected.
#[test]
fn bench_divides_the_load_among_the_primaries_of_a_cluster() {
    for program in engines() {
        let shape = Shape { without_module: &[2], ..Shape::primaries(&program, 3) };
        let mut cluster = Cluster::start(&shape);
        let server = cluster.nodes[0].address.to_string();
        let bench = |more: &[&str]| {
            let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
                .args(["bench", "kv", &server, "--cluster", "--json", "--warmup", "0"])
                .args(["--seconds", "0.5"])
                .args(more)
                .output()
                .expect("ferrite starts");
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            (serde_json::from_slice::<serde_json::Value>(&output.stdout), stderr)
        };
        let (report, stderr) = bench(&["--pipeline", "8", "--threads", "2", "--zipf", "0.9"]);
        let report = report.unwrap_or_else(|error| panic!("{error}: {stderr}"));
        assert_eq!(report["transport"], "TCP", "{report}");
        for result in report["results"].as_array().expect("results") {
            assert_eq!((&result["errors"], &result["complete"]), (&0.into(), &true.into()));
            assert!(result["requests"].as_u64().is_some_and(|count| count > 100), "{report}");
        }
        let (report, stderr) = bench(&["--command", "INCR __key__", "--keys", "100"]);
        let report = report.unwrap_or_else(|error| panic!("{error}: {stderr}"));
        assert_eq!(report["results"][0]["errors"], 0, "{report}");
        for node in 0..3 {
            let stats: String = cluster.ask(node, &["INFO", "commandstats"]);
            for command in ["set", "get", "incr", "del"] {
                assert!(stats.contains(&format!("cmdstat_{command}:")), "node {node}: {stats}");
            }
            let errors: String = cluster.ask(node, &["INFO", "errorstats"]);
            assert!(!errors.contains("MOVED"), "{errors}");
            assert_eq!(cluster.ask::<u64>(node, &["DBSIZE"]), 0, "the keys are removed");
        }
        for (more, expected) in [
            (&["--connections", "2"][..], "the cluster has 3 primaries"),
            (&["--keys", "1"], "use more --keys"),
        ] {
            let (report, _) = bench(more);
            let error = report.expect("JSON")["error"]["message"].to_string();
            assert!(error.contains(expected), "{error}");
        }
        // A node that is gone is named, with its id and its address.
        cluster.nodes[1].engine.kill();
        let (report, stderr) = bench(&[]);
        let error = report.map_or(stderr, |report| report["error"]["message"].to_string());
        let lost = &cluster.nodes[1];
        let expected = format!("node {} at {}", lost.id, lost.address);
        assert!(error.contains(&expected), "{expected}: {error}");
        cluster.assert_healthy();
    }
    let port = free_port().to_string();
    let _redis = Engine::redis(&["--port", &port]);
    let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .args(["bench", "kv", &format!("127.0.0.1:{port}"), "--cluster", "--rdma", "forbid"])
        .output()
        .expect("ferrite starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("the server is no node of a cluster"), "{stderr}");
}
