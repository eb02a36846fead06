//! Transparent mode over RDMA alone. The engines have no settings for their addresses, and run as a
//! user without rights.
#![expect(clippy::print_stdout, reason = "people judge how long the rules have stayed")]

use std::path::Path;
use std::time::Duration;

use ferrite_testkit::engine::{REDIS, valkey};

use super::faults::{tcp_packets, watch};
use super::size::{Times, is_strict, rounds};
use crate::agent::harness::{EngineProgram, Group, RDMA_NETWORK_ADMIN, strings};
use crate::agent::{cluster, killed, sentinels};
use crate::{OPTIONS, hosts, links_to};

/// How long the rules may stay after their agent was killed.
const RULES_MAX: Duration = Duration::from_millis(100);

/// Starts hosts with agents; `None` if there is no such engine, or if Soft-RoCE of this kernel does
/// not work in namespaces.
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn group(count: usize, engine: Option<&Path>) -> Option<Group> {
    let Some(engine) = engine else {
        eprintln!("SKIPPED: Valkey is not built (run lab/lab setup valkey)");
        return None;
    };
    let hosts = hosts(count)?;
    watch(&hosts);
    let engines = EngineProgram::of_nobody(engine);
    Some(Group::start_transparent_as(hosts, count, OPTIONS, strings(RDMA_NETWORK_ADMIN), engines))
}

/// Runs a test on three hosts, which must exchange no TCP packets.
fn with_three_hosts(engine: Option<&Path>, test: impl FnOnce(&Group)) {
    let Some(group) = group(3, engine) else { return };
    test(&group);
    assert_eq!(tcp_packets(&group.hosts), (0, 0), "TCP packets between the hosts");
}

fn cluster_works(group: &Group) {
    cluster::works(group, false);
    for host in 1..=3 {
        let samples = group.scrape(host);
        for peer in (1..=3).filter(|peer| *peer != host) {
            assert!(links_to(group, &samples, peer) == 2.0, "{samples:?}");
        }
    }
}

#[test]
fn cluster_of_redis_works() {
    with_three_hosts(Some(Path::new(REDIS)), cluster_works);
}

#[test]
fn cluster_of_valkey_works() {
    with_three_hosts(valkey().as_deref(), cluster_works);
}

#[test]
fn sentinels_of_redis_replace_primaries() {
    with_three_hosts(Some(Path::new(REDIS)), |group| sentinels::replace_primaries(group, false));
}

#[test]
fn sentinels_of_valkey_replace_primaries() {
    with_three_hosts(valkey().as_deref(), |group| sentinels::replace_primaries(group, false));
}

#[test]
fn rules_end_with_a_killed_agent() {
    let Some(mut group) = group(2, Some(Path::new(REDIS))) else { return };
    let mut times = Times::default();
    for time in killed::connections_are_direct(&mut group, rounds(2), false) {
        times.add(time);
    }
    println!("the rules were gone after a kill: {times}; {:.0?}", times.all());
    // Shows that TCP packets are counted: the connections were direct for a while.
    assert!(tcp_packets(&group.hosts).0 > 0);
    if is_strict() {
        assert!(times.max() <= RULES_MAX, "{:?} of {RULES_MAX:?}", times.max());
    }
}
