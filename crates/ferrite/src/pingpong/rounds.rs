//! The measured loops. A round does the same work as in perftest, and also numbers and checks the
//! message. All other checks follow after the last round.

use std::time::Duration;

use ferrite_verbs::QueuePair;

use super::Op;
use super::endpoint::Endpoint;
use super::watch::Watch;
use super::wire::Memory;
use crate::latency::Recorder;

/// Runs the client's side of `rounds` rounds.
pub(super) fn client(
    op: Op,
    rounds: u64,
    (qp, endpoint): (&QueuePair, &mut Endpoint),
    memory: Memory,
    watch: &Watch,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let remote = endpoint.remote(memory);
    for round in 1..=rounds {
        match op {
            Op::Send => {
                endpoint.stamp(round);
                endpoint.post(qp, None)?;
                recorder.posted();
                endpoint.wait_recv(watch)?;
                endpoint.verify(round)?;
                endpoint.post_recv(qp)?;
            }
            Op::Write => {
                endpoint.stamp(round);
                endpoint.post(qp, Some(remote))?;
                recorder.posted();
                endpoint.wait_write(round, watch)?;
            }
            Op::Read => {
                endpoint.wipe();
                endpoint.post_read(qp, remote)?;
                recorder.posted();
                endpoint.wait_sends(watch)?;
                endpoint.verify(READ_ROUND)?;
            }
        }
        watch.progress(round);
    }
    endpoint.verify_pattern()
}

/// The number in the server's memory for reads. It is constant, because the server takes no part in
/// reads.
const READ_ROUND: u64 = 0;

/// Runs the server's side of `rounds` rounds.
pub(super) fn server(
    op: Op,
    rounds: u64,
    (qp, endpoint): (&QueuePair, &mut Endpoint),
    memory: Memory,
    watch: &Watch,
) -> anyhow::Result<()> {
    let remote = endpoint.remote(memory);
    match op {
        Op::Send => {
            for round in 1..=rounds {
                endpoint.wait_recv(watch)?;
                endpoint.verify(round)?;
                endpoint.stamp(round);
                endpoint.post(qp, None)?;
                endpoint.post_recv(qp)?;
                watch.progress(round);
            }
        }
        Op::Write => {
            for round in 1..=rounds {
                endpoint.wait_write(round, watch)?;
                endpoint.stamp(round);
                endpoint.post(qp, Some(remote))?;
                watch.progress(round);
            }
        }
        Op::Read => return serve_reads((qp, endpoint), watch),
    }
    endpoint.verify_pattern()?;
    // The last message may still be on its way. It has arrived when the client disconnects. The
    // watcher limits the wait.
    watch.peer_leaves_within(Duration::MAX)?;
    Ok(())
}

/// Waits while the client reads, which needs no work on this side. Probes from time to time whether
/// the client's device still answers.
fn serve_reads((qp, endpoint): (&QueuePair, &mut Endpoint), watch: &Watch) -> anyhow::Result<()> {
    const BETWEEN_PROBES: Duration = Duration::from_millis(500);
    let mut probes = 0;
    while !watch.peer_leaves_within(BETWEEN_PROBES)? {
        endpoint.probe(qp)?;
        endpoint.wait_sends(watch)?;
        probes += 1;
        watch.progress(probes);
    }
    Ok(())
}

/// Prepares the server's memory before a client reads it.
pub(super) fn prepare(op: Op, endpoint: &mut Endpoint) {
    if op == Op::Read {
        endpoint.stamp(READ_ROUND);
    }
}
