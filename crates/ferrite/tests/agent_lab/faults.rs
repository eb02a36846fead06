//! Faults of RDMA between the hosts of a group, and counters of TCP packets, at the bridge.
//!
//! The filters are for packets that come from the hosts, at the ports of the bridge. They drop
//! packets only after the sender's interface has taken them, because Soft-RoCE ends a queue pair
//! whose send fails.

use std::process::Command;

use ferrite_testkit::lab::sh;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::exit_within;
use ferrite_testkit::{TIMEOUT, until};

use crate::agent::harness::{Group, sum};

/// The filters that count packets: their preferences, and the ports of TCP. The mask covers the
/// ports from 7000 to 7007, and those of their cluster buses.
const ENGINES: [(u32, &str); 4] =
    [(11, "dport 7000"), (12, "sport 7000"), (13, "dport 17000"), (14, "sport 17000")];
const ALL_TCP: u32 = 20;

/// Prepares the bridge for [`cut`], and begins to count packets of TCP.
pub(crate) fn watch(hosts: &Hosts) {
    tc(hosts, "qdisc add dev PORT ingress");
    for (pref, port) in ENGINES {
        let matches = format!("match ip protocol 6 0xff match ip {port} 0xfff8");
        add_filter(hosts, pref, &matches, "continue");
    }
    add_filter(hosts, ALL_TCP, "match ip protocol 6 0xff", "continue");
}

/// Drops all packets of RoCE.
pub(crate) fn cut(hosts: &Hosts) {
    let roce = "match ip protocol 17 0xff match ip dport 4791 0xffff";
    add_filter(hosts, 1, roce, "drop");
}

/// Ends [`cut`].
pub(crate) fn mend(hosts: &Hosts) {
    tc(hosts, "filter del dev PORT ingress pref 1");
}

/// Returns the number of TCP packets with a port of an engine or its bus, and that of all TCP
/// packets.
pub(crate) fn tcp_packets(hosts: &Hosts) -> (u64, u64) {
    let of = |pref| (1..=hosts.count()).map(|host| packets(hosts, host, pref)).sum::<u64>();
    (ENGINES.into_iter().map(|(pref, _)| of(pref)).sum(), of(ALL_TCP))
}

fn packets(hosts: &Hosts, host: usize, pref: u32) -> u64 {
    let words = format!("-s filter show dev {} ingress pref {pref}", hosts.bridge_port(host));
    let words: Vec<_> = words.split(' ').collect();
    let output = hosts.within_bridge(|| Command::new("tc").args(&words).output());
    let text = String::from_utf8_lossy(&output.expect("tc").stdout).into_owned();
    // "Sent 5040 bytes 60 pkt (dropped 0, overlimits 0 requeues 0)"
    let (_, sent) = text.split_once("Sent ").unwrap_or_else(|| panic!("{words:?}: {text}"));
    let count = sent.split_whitespace().nth(2).and_then(|count| count.parse().ok());
    count.unwrap_or_else(|| panic!("{text}"))
}

fn add_filter(hosts: &Hosts, pref: u32, matches: &str, action: &str) {
    let filter = format!("protocol ip pref {pref} u32 {matches} action {action}");
    tc(hosts, &format!("filter add dev PORT ingress {filter}"));
}

fn tc(hosts: &Hosts, words: &str) {
    for host in 1..=hosts.count() {
        let command = format!("tc {}", words.replace("PORT", &hosts.bridge_port(host)));
        hosts.within_bridge(|| sh(&command));
    }
}

/// Removes the RDMA device of a host, and waits until the programs that hold it have released it.
pub(crate) fn remove_device(group: &Group, host: usize) {
    let device = group.hosts.device(host);
    let removal = || Command::new("rdma").args(["link", "delete", &device]).spawn();
    let mut removal = group.hosts.within(host, removal).expect("rdma");
    let status = exit_within(&mut removal, TIMEOUT);
    assert!(status.expect("the agent releases the device").success());
}

/// Adds the RDMA device of a host again.
pub(crate) fn add_device(group: &Group, host: usize) {
    group.hosts.add_device(host);
    // As rdma-core's rules for udev do.
    sh("chmod 666 /dev/infiniband/*");
}

/// Waits until all links between the hosts use this transport.
#[track_caller]
pub(crate) fn wait_for_transport(group: &Group, transport: &str) {
    let transport = format!("transport=\"{transport}\"");
    until(TIMEOUT, &format!("all links with {transport}"), || {
        (1..=group.agents.len()).all(|host| {
            let samples = group.scrape(host);
            let all = sum(&samples, "agent_links{", "");
            all >= 1.0 && all <= sum(&samples, "agent_links{", &transport)
        })
    });
}
