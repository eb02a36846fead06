//! `ferrite agent` with a real cluster over Soft-RoCE, on hosts in network namespaces of the lab's
//! guest. Needs a kernel whose Soft-RoCE works in namespaces.

mod agent {
    pub(crate) mod cluster;
    pub(crate) mod harness;
}
mod metrics {
    pub(crate) mod harness;
}

use agent::cluster;
use agent::harness::{Group, NOBODY, alias, sum};
use ferrite_testkit::lab::{resources, sh};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::{TIMEOUT, until};

/// The agents are a user without rights, RDMA is required, and nothing may go directly. Each pair
/// of hosts has one queue pair at each end.
#[test]
#[expect(clippy::print_stderr, reason = "tells that the test is left out")]
fn cluster_of_three_hosts_works_over_rdma_alone() {
    if std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml") {
        eprintln!("SKIPPED: Soft-RoCE of this kernel receives only in the first namespace");
        return;
    }
    let hosts = Hosts::start(3).expect("the lab runs tests as root");
    hosts.add_devices();
    sh("chmod 666 /dev/infiniband/*");
    let before = resources();
    let options = ["--rdma", "require", "--direct", "refuse", "--rdma-device", "DEVICE"];
    let group = Group::start(hosts, 3, &options, NOBODY);
    cluster::works(&group, false);
    for host in 1..=3 {
        let samples = group.scrape(host);
        for peer in (1..=3).filter(|peer| *peer != host) {
            let links = format!("agent_links{{peer=\"{}\",transport=\"rdma\"}}", alias(peer));
            assert!(sum(&samples, &links, "") == 1.0, "{samples:?}");
        }
        // Of ended links, none is left after a while.
        let device = format!("{} qp", group.hosts.device(host));
        until(TIMEOUT, "one queue pair for each of the two peers", || {
            resources()[&device] == before[&device] + 2
        });
    }
}
