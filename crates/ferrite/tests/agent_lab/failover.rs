//! The time of a failover, through agents and without them.
#![expect(clippy::print_stdout, reason = "people judge how long the failovers took")]

use super::nodes::Nodes;
use super::size::{Times, is_strict, rounds};
use crate::agent::harness::{Group, NOBODY};
use crate::{OPTIONS, hosts};

/// The longest time through agents, as a part of the time without agents.
const RATIO_MAX: f64 = 1.2;

/// As many rounds as the median needs.
const ROUNDS_MAX: usize = 5;

/// Two clusters on the same hosts lose their primaries in turn: one uses the agents, whose links
/// use RDMA alone, and one uses TCP.
#[test]
fn failover_through_agents_takes_as_long_as_without() {
    let Some(hosts) = hosts(3) else { return };
    let group = Group::start(hosts, 3, OPTIONS, NOBODY);
    // On a busy machine, a live node may wait for a CPU for seconds.
    let node_timeout = if is_strict() { "3000" } else { "8000" };
    let options = ["--cluster-node-timeout", node_timeout];
    let mut by_agents = Nodes::create(&group, false, [7001, 7002], &options);
    let mut direct = Nodes::create(&group, true, [7003, 7004], &options);
    let [mut times_by_agents, mut times_direct] = [(); 2].map(|()| Times::default());
    let rounds = rounds(1).min(ROUNDS_MAX);
    for round in 0..rounds {
        // Neither is always first.
        if round % 2 == 0 {
            times_by_agents.add(by_agents.fail_over(round));
            times_direct.add(direct.fail_over(round));
        } else {
            times_direct.add(direct.fail_over(round));
            times_by_agents.add(by_agents.fail_over(round));
        }
    }
    let ratio = times_by_agents.median().as_secs_f64() / times_direct.median().as_secs_f64();
    println!(
        "failover after a kill, node timeout {node_timeout} ms, {rounds} rounds: through agents \
         {times_by_agents}; direct {times_direct}; ratio of the medians {ratio:.2}\n\
         through agents {:.1?}\ndirect {:.1?}",
        times_by_agents.all(),
        times_direct.all(),
    );
    if is_strict() {
        assert!(ratio <= RATIO_MAX, "{ratio:.2} of {RATIO_MAX}");
    }
}
