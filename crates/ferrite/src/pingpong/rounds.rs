//! The measured loops. Each does what its rival in perftest does per round, and nothing that could wait.

use std::time::Duration;

use ferrite_verbs::QueuePair;

use super::Op;
use super::lane::Lane;
use super::watch::Watch;
use super::wire::Memory;
use crate::latency::Recorder;

/// The client's side of `rounds` rounds.
pub(super) fn client(
    op: Op,
    rounds: u64,
    (qp, lane): (&QueuePair, &mut Lane),
    memory: Memory,
    watch: &Watch,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let remote = lane.remote(memory);
    for round in 1..=rounds {
        match op {
            Op::Send => {
                lane.stamp(round);
                lane.post(qp, None)?;
                recorder.posted();
                lane.wait_recv(watch)?;
                lane.verify(round)?;
                lane.post_recv(qp)?;
            }
            Op::Write => {
                lane.stamp(round);
                lane.post(qp, Some(remote))?;
                recorder.posted();
                lane.wait_write(round, watch)?;
            }
            Op::Read => {
                lane.wipe();
                lane.post_read(qp, remote)?;
                recorder.posted();
                lane.wait_sends(watch)?;
                lane.verify(READ_ROUND)?;
            }
        }
        watch.progress(round);
    }
    lane.verify_pattern()
}

/// The number that the server's memory carries for reads: the server takes no part in them.
const READ_ROUND: u64 = 0;

/// The server's side.
pub(super) fn server(
    op: Op,
    rounds: u64,
    (qp, lane): (&QueuePair, &mut Lane),
    memory: Memory,
    watch: &Watch,
) -> anyhow::Result<()> {
    let remote = lane.remote(memory);
    match op {
        Op::Send => {
            for round in 1..=rounds {
                lane.wait_recv(watch)?;
                lane.verify(round)?;
                lane.stamp(round);
                lane.post(qp, None)?;
                lane.post_recv(qp)?;
                watch.progress(round);
            }
        }
        Op::Write => {
            for round in 1..=rounds {
                lane.wait_write(round, watch)?;
                lane.stamp(round);
                lane.post(qp, Some(remote))?;
                watch.progress(round);
            }
        }
        Op::Read => return serve_reads((qp, lane), watch),
    }
    lane.verify_pattern()?;
    // Our last message is on its way until the client has left. The watcher has the patience to wait for that.
    watch.peer_leaves_within(Duration::MAX)?;
    Ok(())
}

/// Reads pass this side by. It asks the client's device from time to time whether it is still there.
fn serve_reads((qp, lane): (&QueuePair, &mut Lane), watch: &Watch) -> anyhow::Result<()> {
    const BETWEEN_PROBES: Duration = Duration::from_millis(500);
    let mut probes = 0;
    while !watch.peer_leaves_within(BETWEEN_PROBES)? {
        lane.probe(qp)?;
        lane.wait_sends(watch)?;
        probes += 1;
        watch.progress(probes);
    }
    Ok(())
}

/// What the server's memory must hold before a client reads it.
pub(super) fn prepare(op: Op, lane: &mut Lane) {
    if op == Op::Read {
        lane.stamp(READ_ROUND);
    }
}
