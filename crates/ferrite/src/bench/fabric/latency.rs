//! The loops that measure latency, as perftest's ib_*_lat define it: one operation at a time.
//!
//! | op | a round | how the client ends the test |
//! |---|---|---|
//! | send | a message there and one back | a control message instead of data |
//! | write | a write there and one back; each side polls its own last byte | the last byte `STOP` |
//! | read | one read | a control message |
//!
//! With several links, each round uses the next one, in the same order on both sides.

use anyhow::ensure;
use ferrite_fabric::mem::Buf;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Error, Fabric, Link, Region};

use super::plan::{Budget, Case};
use super::protocol::{CONTROL, DATA, Request, send_control};
use super::side::Side;
use crate::choice::Op;
use crate::latency::{Recorder, RoundTrips};

/// Runs the client's side.
pub(super) fn client(side: &Side, case: &Case) -> anyhow::Result<RoundTrips> {
    let mut recorder = Recorder::new(case.warmup)?;
    let budget = Budget::of(case);
    match case.op {
        Op::Send => side.fabric.block_on(ping(side, case.size, budget, &mut recorder))?,
        Op::Write => write_first(side, case.size, budget, &mut recorder)?,
        Op::Read => side.fabric.block_on(read(side, case.size, budget, &mut recorder))?,
    }
    Ok(recorder.finish())
}

/// Runs the server's side. Returns the number of rounds, or 0 for read, which needs no work here.
pub(super) fn server(side: &Side, op: Op, size: u32) -> anyhow::Result<u64> {
    match op {
        Op::Send => side.fabric.block_on(pong(side, size)),
        Op::Write => write_back(side, size),
        Op::Read => Ok(0),
    }
}

async fn ping(
    side: &Side,
    size: u32,
    mut budget: Budget,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let message = vec![0x5a; size as usize];
    let mut round = 0;
    while budget.take() {
        let link = side.link_of_round(round);
        link.post_bytes(DATA, &message)?;
        recorder.posted();
        let reply = link.recv().await?;
        ensure!(
            reply.len() == message.len(),
            "received a reply of {} bytes, expected {size}",
            reply.len()
        );
        round += 1;
    }
    send_control(side.link_of_round(round), &Request::Stop)
}

async fn pong(side: &Side, size: u32) -> anyhow::Result<u64> {
    let message = vec![0xa5; size as usize];
    let mut round = 0;
    loop {
        let link = side.link_of_round(round);
        let received = link.recv().await?;
        if received.channel() == CONTROL {
            return Ok(round);
        }
        ensure!(
            received.len() == message.len(),
            "received a message of {} bytes, expected {size}",
            received.len()
        );
        link.post_bytes(DATA, &message)?;
        round += 1;
    }
}

async fn read(
    side: &Side,
    size: u32,
    mut budget: Budget,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let grants = side.grants().await?;
    let mut buf = side.fabric.buffer(size as usize)?;
    for (link, grant) in side.links.iter().zip(&grants).cycle() {
        if !budget.take() {
            break;
        }
        let reading = link.rdma_read(grant, 0, buf).map_err(Error::from)?;
        recorder.posted();
        buf = reading.await.map_err(Error::from)?;
    }
    send_control(side.control_link(), &Request::Stop)
}

fn write_first(
    side: &Side,
    size: u32,
    mut budget: Budget,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let targets = side.fabric.block_on(Target::all(side, size))?;
    for (round, target) in (0..).zip(targets.iter().cycle()) {
        if !budget.take() {
            return target.write(STOP);
        }
        let value = value(round, targets.len());
        target.write(value)?;
        recorder.posted();
        target.watch(&side.fabric, value)?;
    }
    Ok(())
}

fn write_back(side: &Side, size: u32) -> anyhow::Result<u64> {
    let targets = side.fabric.block_on(Target::all(side, size))?;
    for (round, target) in (0..).zip(targets.iter().cycle()) {
        let value = value(round, targets.len());
        if target.watch(&side.fabric, value)? == STOP {
            return Ok(round);
        }
        target.write(value)?;
    }
    Ok(0)
}

/// Successive writes store these values in the last byte, alternately. The byte starts as 0, so
/// that the first write changes it, too.
const VALUES: [u8; 2] = [1, 2];
const STOP: u8 = 3;

/// Returns the value for a round. The two values alternate on each link, so that every write
/// changes the byte.
fn value(round: u64, links: usize) -> u8 {
    VALUES[usize::from(!(round / links as u64).is_multiple_of(2))]
}

/// The memory of both sides on one link: ours, which the peer writes, and the peer's, which we
/// write.
struct Target<'a> {
    link: &'a Link,
    ours: Region,
    theirs: GrantToken,
    /// The messages that end in 1, 2 and 3.
    messages: [Buf; 3],
}

impl<'a> Target<'a> {
    async fn all(side: &'a Side, size: u32) -> anyhow::Result<Vec<Self>> {
        let regions = side.expose(size, Rights::WRITE)?;
        let grants = side.grants().await?;
        let targets = side.links.iter().zip(regions).zip(grants).map(|((link, ours), theirs)| {
            let [first, second] = VALUES;
            let messages = [
                side.message(size, first)?,
                side.message(size, second)?,
                side.message(size, STOP)?,
            ];
            Ok(Self { link, ours, theirs, messages })
        });
        targets.collect()
    }

    /// Writes a message without waiting for its completion: the peer's reply shows that it arrived.
    fn write(&self, value: u8) -> anyhow::Result<()> {
        let message = self.messages[usize::from(value) - 1].clone();
        drop(self.link.rdma_write(&self.theirs, 0, message)?);
        Ok(())
    }

    /// Waits until our last byte is `expected` or [`STOP`], and returns it.
    fn watch(&self, fabric: &Fabric, expected: u8) -> anyhow::Result<u8> {
        /// Number of reads between two checks of the link.
        const READS_PER_CHECK: u32 = 1 << 12;
        let last = self.ours.len() - 1;
        let mut reads = 0_u32;
        loop {
            let mut byte = [0];
            ensure!(
                self.ours.read(last, &mut byte),
                "the memory that the peer writes to was revoked"
            );
            if byte[0] == expected || byte[0] == STOP {
                return Ok(byte[0]);
            }
            fabric.poll();
            reads += 1;
            if reads.is_multiple_of(READS_PER_CHECK)
                && let Some(error) = self.link.failure()
            {
                return Err(error.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_write_changes_the_byte() {
        for links in 1..4 {
            let rounds: Vec<_> = (0..12).map(|round| value(round, links)).collect();
            assert!(
                rounds.iter().zip(&rounds[links..]).all(|(one, next)| one != next),
                "{links}: {rounds:?}"
            );
        }
    }
}
