//! Hours of load on a cluster through agents, with cuts of RDMA, kills and moved slots, beside the
//! same over TCP.
#![expect(clippy::print_stdout, reason = "people judge the figures")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_testkit::lab::resources;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{descriptors, rss_bytes, signal};
use ferrite_testkit::trend::assert_flat;

use super::faults::{cut, cut_direct, mend, mend_direct, wait_for_transport, watch};
use super::ledger::{Ledger, Lost};
use super::nodes::{Failover, Nodes};
use super::size::{Times, seconds};
use crate::agent::harness::{Group, NOBODY};
use crate::hosts;
use crate::metrics::harness::Running;

/// The time from one cut to the next.
const ROUND: Duration = Duration::from_secs(20);
/// How long packets of RoCE are lost.
const CUT: Duration = Duration::from_secs(5);
/// How long packets of the cluster without agents are lost: about as long as links need to move to
/// TCP.
const DIRECT_CUT: Duration = Duration::from_secs(2);
/// How long a node may be silent. It is more than a cut, and more than a busy machine needs.
const NODE_TIMEOUT_MS: &str = "8000";
/// The slots that move at once.
const SLOTS: usize = 20;
/// How old a write may be that is lost because its primary was killed: longer than a cut holds up
/// replication, and TCP after it.
const LOST_MAX: Duration = Duration::from_secs(6);
/// How much the memory of an agent may vary.
const RSS_SLACK: u64 = 4 << 20;
const OPTIONS: &[&str] = &["--rdma", "prefer", "--direct", "refuse", "--rdma-device", "DEVICE"];

/// What happens in a round, beside a cut.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Event {
    Reshard,
    KillPrimaries,
    KillAgent,
}

const EVENTS: [Event; 3] = [Event::Reshard, Event::KillPrimaries, Event::KillAgent];

/// A cluster, and the clients that write to it.
struct Arm {
    name: &'static str,
    nodes: Nodes,
    ledgers: Vec<Ledger>,
    failovers: Times,
    /// How old the lost writes were when their primary was killed.
    lost: Times,
    lost_writes: usize,
}

impl Arm {
    fn start(group: &Group, name: &'static str, is_direct: bool, ports: [u16; 2]) -> Self {
        let options = ["--cluster-node-timeout", NODE_TIMEOUT_MS];
        let nodes = Nodes::create(group, is_direct, ports, &options);
        let first = nodes.address_of(&nodes.all[0]);
        // On two hosts, so that there is a client for which each primary is on another host.
        let ledgers = [1, 2].map(|host| Ledger::new(host, &first)).into();
        let [failovers, lost] = [(); 2].map(|()| Times::default());
        Self { name, nodes, ledgers, failovers, lost, lost_writes: 0 }
    }

    /// Finds lost writes. Only a failover may lose some: those of the killed primary that its
    /// replica had not received.
    fn compare(&mut self, hosts: &Hosts, failover: Option<Failover>) {
        let lost: Vec<_> = self.ledgers.iter_mut().flat_map(|it| it.lost(hosts)).collect();
        let Some(Failover { slots, killed, took }) = failover else {
            assert!(lost.is_empty(), "{}: {lost:?}", self.name);
            return;
        };
        self.failovers.add(took);
        for Lost { slot, writes, since } in lost {
            let age = killed.saturating_duration_since(since);
            let is_of_killed = slots.iter().any(|range| range.contains(&slot));
            assert!(is_of_killed, "{}: slot {slot} was not of the killed primary", self.name);
            assert!(since <= killed, "{}: slot {slot}: lost after the kill", self.name);
            assert!(age <= LOST_MAX, "{}: slot {slot}: {age:?} of {LOST_MAX:?}", self.name);
            self.lost.add(age);
            self.lost_writes += writes;
        }
    }

    fn report(&self) {
        let sum: u64 = self.ledgers.iter().map(|ledger| ledger.acknowledged).sum();
        let gap = self.ledgers.iter().map(|ledger| ledger.longest_gap).max();
        println!(
            "{:>6}: {sum} writes acknowledged, longest time between two {:.1?}; {} failovers: {}; \
             writes lost by them: {}, age at the kill: {}",
            self.name,
            gap.unwrap_or_default(),
            self.failovers.all().len(),
            self.failovers,
            self.lost_writes,
            self.lost,
        );
    }
}

/// The resources of the agents, a sample for each round.
#[derive(Default)]
struct Held {
    descriptors: Vec<u64>,
    queue_pairs: Vec<u64>,
    memory: Vec<u64>,
}

impl Held {
    fn sample(&mut self, group: &Group) {
        let ids = || group.agents.iter().map(|agent| agent.process.0.id());
        self.descriptors.push(ids().map(descriptors).sum());
        self.memory.push(ids().map(rss_bytes).sum());
        let of = |host| resources()[&format!("{} qp", group.hosts.device(host))];
        self.queue_pairs.push((1..=group.agents.len()).map(of).sum());
    }

    fn assert_flat(&self) {
        assert_flat("descriptors of the agents", &self.descriptors, 8);
        assert_flat("queue pairs", &self.queue_pairs, 2);
        assert_flat("memory of the agents", &self.memory, RSS_SLACK);
    }
}

/// Each round cuts RDMA, and the other cluster's TCP for a part of the time. An event happens at
/// the same time. No acknowledged write may be lost, except those of a primary that was killed
/// before it had sent them to its replica, as over TCP.
#[test]
fn no_acknowledged_write_is_lost_beyond_what_failovers_lose() {
    let Some(hosts) = hosts(3) else { return };
    watch(&hosts);
    let mut group = Group::start_with_tls(hosts, 3, OPTIONS, NOBODY);
    wait_for_transport(&group, "rdma");
    let duration = seconds(50);
    let arms = [("agents", false, [7001, 7002]), ("tcp", true, [7008, 7009])];
    let mut arms = arms.map(|(name, is_direct, ports)| Arm::start(&group, name, is_direct, ports));
    let (begun, mut held) = (Instant::now(), Held::default());
    for number in 0.. {
        let event = EVENTS[number % EVENTS.len()];
        let (replaced, failovers) = round(&group, &mut arms, event, number / EVENTS.len());
        if let Some((host, agent)) = replaced {
            group.agents[host - 1] = agent;
        }
        group.wait_for_links();
        wait_for_transport(&group, "rdma");
        for (arm, failover) in arms.iter_mut().zip(failovers) {
            arm.nodes.wait_until_whole();
            arm.compare(&group.hosts, failover);
        }
        held.sample(&group);
        println!("{:>6.0?}: {event:?}", begun.elapsed());
        if begun.elapsed() >= duration && number + 1 >= EVENTS.len() {
            break;
        }
    }
    arms.iter().for_each(Arm::report);
    held.assert_flat();
    // Shows that lost writes are found.
    let client = &mut arms[0].ledgers[0];
    client.delete(&group.hosts);
    assert_eq!(client.lost(&group.hosts).len(), 1);
}

/// Runs the clients of both clusters during a cut and an event. Returns the agent that was started
/// for a killed one, with its host, and the failovers of both clusters.
fn round(
    group: &Group,
    arms: &mut [Arm; 2],
    event: Event,
    number: usize,
) -> (Option<(usize, Running)>, [Option<Failover>; 2]) {
    let (begun, must_stop) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&must_stop);
        scope.spawn(|| lose_packets(&group.hosts));
        let changes = arms.each_mut().map(|arm| {
            for ledger in &mut arm.ledgers {
                scope.spawn(|| {
                    let _stop = StopAtEnd(&must_stop); // if a check fails
                    ledger.write_until(&group.hosts, &must_stop);
                });
            }
            let nodes = &mut arm.nodes;
            scope.spawn(move || match event {
                Event::Reshard => {
                    nodes.reshard(group, number, SLOTS);
                    None
                }
                Event::KillPrimaries => Some(nodes.fail_over(group, number)),
                Event::KillAgent => None,
            })
        });
        let replaced = (event == Event::KillAgent).then(|| {
            let host = number % 3 + 1;
            signal("KILL", group.agent(host).process.0.id());
            (host, group.start_agent(host, 3))
        });
        let failovers = changes.map(|change| change.join().expect("the cluster changes"));
        while begun.elapsed() < ROUND && !must_stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
        }
        (replaced, failovers)
    })
}

fn lose_packets(hosts: &Hosts) {
    cut(hosts);
    cut_direct(hosts);
    std::thread::sleep(DIRECT_CUT);
    mend_direct(hosts);
    std::thread::sleep(CUT - DIRECT_CUT);
    mend(hosts);
}

/// Stops the clients when a round ends, also if it fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
