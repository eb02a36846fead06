//! `ferrite-cli -c` over RDMA, in the lab's guest: all nodes on 10.0.0.1 (rxe1), the client on
//! 10.0.0.2 (rxe2).

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Command, Output};

use ferrite_testkit::cluster::{Cluster, Shape};
use ferrite_testkit::engine::REDIS;

fn run(cluster: &Cluster, words: &[&str]) -> Output {
    let port = cluster.nodes[0].module_port.to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-cli"));
    command.args(["-c", "-h", "10.0.0.1", "-p", &port, "--local", "10.0.0.2"]).args(words);
    command.env_remove("REDISCLI_AUTH").output().expect("start ferrite-cli")
}

#[test]
fn redirects_lead_to_the_rdma_endpoints_of_nodes() {
    let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    let shape = Shape { without_module: &[2], ip, ..Shape::primaries(Path::new(REDIS), 3) };
    let mut cluster = Cluster::start(&shape);
    cluster.wait_until("the endpoints of all modules", |cluster, number| {
        number == 2 || cluster.nodes[number].engine.count("cluster_endpoints") == 1
    });
    let slot = |key: &str| cluster.ask::<u16>(0, &["CLUSTER", "KEYSLOT", key]);
    let key_of = |node: usize| {
        let [first, last] = cluster.slots_of(node);
        let is_there = |key: &String| (first..=last).contains(&slot(key));
        (0..).map(|number| format!("key{number}")).find(is_there).expect("a key")
    };
    let keys = [0, 1, 2].map(key_of);
    let sessions = |node: usize| cluster.nodes[node].engine.count("begun_ferrite");
    for (node, key) in keys.iter().enumerate() {
        let set = run(&cluster, &["--rdma", "prefer", "SET", key, "value"]);
        let stderr = String::from_utf8_lossy(&set.stderr);
        assert_eq!(set.stdout, b"OK\n", "{stderr}");
        let warns = stderr.contains("announces no RDMA endpoint; using TCP");
        assert_eq!(warns, node == 2, "{stderr}");
    }
    assert_eq!((sessions(0), sessions(1)), (3, 1));
    let get = run(&cluster, &["--rdma", "require", "GET", &keys[1]]);
    assert_eq!(get.stdout, b"value\n");
    let get = run(&cluster, &["--rdma", "require", "GET", &keys[2]]);
    let stderr = String::from_utf8_lossy(&get.stderr);
    let address = cluster.nodes[2].address.to_string();
    assert!(!get.status.success() && stderr.contains(&address), "{stderr}");
    cluster.assert_healthy();
}
