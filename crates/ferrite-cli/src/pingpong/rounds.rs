//! The measured loops. Each does what its rival in perftest does per round, and nothing that could wait.
//!
//! A time is taken right after each post, while the message is on its way; two such moments are one round trip
//! apart. It is taken from the CPU's time stamp counter where there is a steady one: asking the kernel costs a
//! system call on hosts whose clock is not mapped into the process (many guests).

use std::time::{Duration, Instant};

use ferrite_verbs::QueuePair;
use hdrhistogram::Histogram;

use super::Op;
use super::lane::Lane;
use super::watch::Watch;
use super::wire::Memory;

/// Takes the time of round trips.
pub(super) struct Recorder {
    clock: quanta::Clock,
    /// The same moment by both clocks: what a tick is worth follows from a later such pair.
    started: (u64, Instant),
    warmup: u64,
    posted: u64,
    last: u64,
    ticks: Histogram<u64>,
}

/// Round trips, in ticks of the counter.
pub(super) struct RoundTrips {
    pub(super) ticks: Histogram<u64>,
    pub(super) us_per_tick: f64,
}

impl Recorder {
    /// Leaves the first `warmup` round trips out.
    pub(super) fn new(warmup: u64) -> anyhow::Result<Self> {
        /// About an hour; what is longer counts as this.
        const LONGEST_TICKS: u64 = 1 << 43;
        let clock = quanta::Clock::new();
        let started = (clock.raw(), Instant::now());
        let ticks = Histogram::new_with_bounds(1, LONGEST_TICKS, 3)?;
        Ok(Self { clock, started, warmup, posted: 0, last: 0, ticks })
    }

    /// A message has just been posted.
    fn posted(&mut self) {
        let now = self.clock.raw();
        if self.posted >= self.warmup {
            self.ticks.saturating_record(now.saturating_sub(self.last));
        }
        self.posted += 1;
        self.last = now;
    }

    /// What was recorded.
    pub(super) fn finish(self) -> RoundTrips {
        let (ticks, time) = (self.clock.raw().saturating_sub(self.started.0), self.started.1.elapsed());
        #[expect(clippy::cast_precision_loss, reason = "2^53 ticks are a month")]
        let us_per_tick = time.as_secs_f64() * 1e6 / ticks.max(1) as f64;
        RoundTrips { ticks: self.ticks, us_per_tick }
    }
}

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
