//! `ferrite agent` with a real cluster over Soft-RoCE, on hosts in network namespaces of the lab's
//! guest. Needs a kernel whose Soft-RoCE works in namespaces.

mod agent {
    pub(crate) mod cluster;
    pub(crate) mod harness;
    pub(crate) mod killed;
    pub(crate) mod sentinels;
    pub(crate) mod wire;
}
mod agent_lab {
    pub(crate) mod bulk;
    pub(crate) mod failover;
    pub(crate) mod faults;
    pub(crate) mod ledger;
    pub(crate) mod nodes;
    pub(crate) mod replication;
    pub(crate) mod size;
    pub(crate) mod soak;
    pub(crate) mod transparent;
    pub(crate) mod unit;
}
mod metrics {
    pub(crate) mod harness;
}
mod server {
    pub(crate) mod harness;
    pub(crate) mod unit;
}

use std::collections::BTreeMap;

use agent::cluster;
use agent::harness::{EngineProgram, Group, NOBODY, sum};
use ferrite_testkit::engine::valkey;
use ferrite_testkit::lab::{resources, sh};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::{TIMEOUT, until};

/// Starts hosts with an RDMA device each. Returns `None` if Soft-RoCE of this kernel does not
/// work in network namespaces.
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn hosts(count: usize) -> Option<Hosts> {
    if std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml") {
        eprintln!("SKIPPED: Soft-RoCE of this kernel receives only in the first namespace");
        return None;
    }
    let hosts = Hosts::start(count).expect("the lab runs tests as root");
    hosts.add_devices();
    sh("chmod 666 /dev/infiniband/*");
    Some(hosts)
}

const OPTIONS: &[&str] = &["--rdma", "require", "--direct", "refuse", "--rdma-device", "DEVICE"];

/// Returns the number of links over RDMA to a peer.
fn links_to(group: &Group, samples: &BTreeMap<String, f64>, peer: usize) -> f64 {
    let address = group.address(peer);
    sum(samples, &format!("agent_links{{peer=\"{address}\",transport=\"rdma\"}}"), "")
}

/// Asserts that each host has this number of links to each of its two peers, over RDMA.
#[track_caller]
fn assert_links(group: &Group, count: u64, before: &BTreeMap<String, u64>) {
    for host in 1..=3 {
        let samples = group.scrape(host);
        for peer in (1..=3).filter(|peer| *peer != host) {
            assert!(links_to(group, &samples, peer) == count as f64, "{samples:?}");
        }
        // The queue pairs of ended links are destroyed after a while.
        let device = format!("{} qp", group.hosts.device(host));
        until(TIMEOUT, "a queue pair for each link", || {
            resources()[&device] == before[&device] + 2 * count
        });
    }
}

/// The agents run as a user without rights. RDMA is required, and direct connections are refused.
/// Each pair of hosts has two queue pairs at each end, one for each direction.
#[test]
fn cluster_of_three_hosts_works_over_rdma_alone() {
    let Some(hosts) = hosts(3) else { return };
    let before = resources();
    let group = Group::start(hosts, 3, OPTIONS, NOBODY);
    cluster::works(&group, false);
    assert_links(&group, 2, &before);
}

/// Also moves slots with Valkey's own `CLUSTER MIGRATESLOTS`.
#[test]
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn cluster_of_valkey_works_over_rdma_alone() {
    let Some(program) = valkey() else {
        eprintln!("SKIPPED: Valkey is not built (run lab/lab setup valkey)");
        return;
    };
    let Some(hosts) = hosts(3) else { return };
    let mut group = Group::start(hosts, 3, OPTIONS, NOBODY);
    group.engines = EngineProgram::of(&program);
    cluster::works(&group, false);
}

/// Links begin over TCP with TLS and move to RDMA. The TCP connection stays open, but carries no
/// more data.
#[test]
fn cluster_of_three_hosts_works_over_rdma_behind_tls() {
    let Some(hosts) = hosts(3) else { return };
    let before = resources();
    let group = Group::start_with_tls(hosts, 3, OPTIONS, NOBODY);
    cluster::works(&group, true);
    assert_links(&group, 1, &before);
    for host in 1..=3 {
        let samples = group.scrape(host);
        assert!(sum(&samples, "rdma_tcp_bytes_total", "") == 0.0, "{samples:?}");
        assert!(sum(&samples, "rdma_tls_failures_total", "") == 0.0, "{samples:?}");
    }
}
