//! Clients write while slots move between two shards and the primary of the third one changes.

use std::ops::Range;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ferrite_testkit::engine::engines;

use super::changes::{Slot, fail_over, move_slots};
use super::nodes::{Cluster, Port};
use super::writer::Writer;

/// The clients at each port.
const WRITERS: u64 = 3;
/// The nodes among which slots move. The share of in-process commands is that of these nodes only,
/// because nothing is called while a failover pauses clients.
const MOVING: Range<usize> = 0..2;
/// The least share of the commands on a node's own slots that must run in-process, in percent.
const SHARE: u64 = 95;
/// The least numbers of moves and failovers. The stress goes on until it has seen so many.
const MOVES: usize = 4;
const FAILOVERS: usize = 1;
/// How long a busy machine may need for them.
const DEADLINE: Duration = Duration::from_secs(240);

/// Returns the duration of the stress on each engine: FERRITE_CLUSTER, in seconds, or 6 seconds.
fn duration() -> Duration {
    let seconds = std::env::var("FERRITE_CLUSTER").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(6))
}

fn slots(cluster: &Cluster) -> Vec<Slot> {
    let mut slots = Vec::new();
    for (nodes, moves) in [([0, 1], true), ([1, 0], true), ([2, 5], false)] {
        for (tag, number) in cluster.tags(nodes[0], 2) {
            slots.push(Slot { tag, number, nodes, moves, changes: RwLock::new(0) });
        }
    }
    slots
}

#[test]
#[expect(clippy::print_stderr, reason = "reports the share of in-process commands")]
fn no_write_is_lost_while_the_cluster_changes() {
    for program in engines() {
        let mut cluster = Cluster::start(&program);
        let slots = slots(&cluster);
        let before = cluster.calls(MOVING);
        let must_stop = AtomicBool::new(false);
        let [moves, failovers] = [const { AtomicUsize::new(0) }; 2];
        let ports = [Port::Own, Port::Module];
        let numbers = (0..2 * WRITERS).zip(ports.into_iter().cycle());
        let writers: Vec<_> =
            numbers.map(|(number, port)| Writer::new(&cluster, &slots, number, port)).collect();
        let done: Vec<_> = std::thread::scope(|scope| {
            let (cluster, slots, must_stop) = (&cluster, &slots, &must_stop);
            let (moves, failovers) = (&moves, &failovers);
            let _stop = StopAtEnd(must_stop);
            let running: Vec<_> = writers
                .into_iter()
                .map(|mut writer| {
                    scope.spawn(move || {
                        let _stop = StopAtEnd(must_stop); // if a check fails
                        while !must_stop.load(Ordering::Relaxed) {
                            writer.round();
                        }
                        writer
                    })
                })
                .collect();
            let changes = [
                scope.spawn(move || move_slots(cluster, slots, moves, must_stop)),
                scope.spawn(move || fail_over(cluster, [2, 5], failovers, must_stop)),
            ];
            let begin = Instant::now();
            let is_done = || {
                let enough = moves.load(Ordering::Relaxed) >= MOVES
                    && failovers.load(Ordering::Relaxed) >= FAILOVERS;
                begin.elapsed() >= if enough { duration() } else { DEADLINE.max(duration()) }
            };
            while !is_done() && !must_stop.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
            }
            must_stop.store(true, Ordering::Relaxed);
            for change in changes {
                change.join().expect("the cluster accepts the changes");
            }
            let done = running.into_iter().map(|writer| {
                let mut writer = writer.join().expect("the replies are right");
                writer.check_all();
                [writer.served, writer.asked]
            });
            done.collect()
        });
        let (moves, failovers) = (moves.into_inner(), failovers.into_inner());
        let called = cluster.calls(MOVING) - before;
        let at = |port: usize, kind: usize| -> u64 {
            done.iter().skip(port).step_by(2).map(|counts| counts[kind]).sum()
        };
        let served = at(1, 0);
        eprintln!(
            "{}: {moves} moves, {failovers} failovers; at the engines' own ports {} commands, and \
             {} after ASKING; at the module's ports {served} commands ({called} \
             in-process), and {} after ASKING",
            program.display(),
            at(0, 0),
            at(0, 1),
            at(1, 1),
        );
        assert!(
            moves >= MOVES && failovers >= FAILOVERS,
            "only {moves} moves, {failovers} failovers"
        );
        assert!(called * 100 >= served * SHARE, "only {called} of {served} commands in-process");
        cluster.assert_healthy();
    }
}

/// Stops all threads of the test when one of them ends, so that a failure does not hang the test.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
