//! One at a time: the loops behind the latencies, as perftest's ib_*_lat define them.
//!
//! | op | a round | ends by |
//! |---|---|---|
//! | send | a message there and one back | a word in place of a message |
//! | write | a write there and one back; each side watches the last byte of its own memory | another last byte |
//! | read | one read | a word |
//!
//! With several links, each round takes the next one, in the same order on both sides.

use anyhow::ensure;
use ferrite_fabric::mem::Buf;
use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Error, Fabric, Link, Region};

use super::ends::Ends;
use super::plan::{Case, Pace};
use super::talk::{DATA, Request, TALK, say};
use crate::choice::Op;
use crate::latency::{Recorder, RoundTrips};

/// The client's side.
pub(super) fn client(ends: &Ends, case: &Case) -> anyhow::Result<RoundTrips> {
    let mut recorder = Recorder::new(case.warmup)?;
    let pace = Pace::of(case);
    match case.op {
        Op::Send => ends.fabric.block_on(ping(ends, case.size, pace, &mut recorder))?,
        Op::Write => write_first(ends, case.size, pace, &mut recorder)?,
        Op::Read => ends.fabric.block_on(read(ends, case.size, pace, &mut recorder))?,
    }
    Ok(recorder.finish())
}

/// The server's side of what it takes part in; how many rounds there were.
pub(super) fn server(ends: &Ends, op: Op, size: u32) -> anyhow::Result<u64> {
    match op {
        Op::Send => ends.fabric.block_on(pong(ends, size)),
        Op::Write => write_back(ends, size),
        Op::Read => Ok(0),
    }
}

async fn ping(
    ends: &Ends,
    size: u32,
    mut pace: Pace,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let message = vec![0x5a; size as usize];
    let mut round = 0;
    while pace.another() {
        let link = ends.turn(round);
        link.post_bytes(DATA, &message)?;
        recorder.posted();
        let answer = link.recv().await?;
        ensure!(answer.len() == message.len(), "an answer of {} bytes to {size}", answer.len());
        round += 1;
    }
    say(ends.turn(round), &Request::Stop)
}

async fn pong(ends: &Ends, size: u32) -> anyhow::Result<u64> {
    let message = vec![0xa5; size as usize];
    let mut round = 0;
    loop {
        let link = ends.turn(round);
        let question = link.recv().await?;
        if question.channel() == TALK {
            return Ok(round);
        }
        ensure!(
            question.len() == message.len(),
            "a message of {} bytes, {size} were due",
            question.len()
        );
        link.post_bytes(DATA, &message)?;
        round += 1;
    }
}

async fn read(
    ends: &Ends,
    size: u32,
    mut pace: Pace,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let grants = ends.grants().await?;
    let mut buf = ends.fabric.buffer(size as usize)?;
    for (link, grant) in ends.links.iter().zip(&grants).cycle() {
        if !pace.another() {
            break;
        }
        let reading = link.rdma_read(grant, 0, buf).map_err(Error::from)?;
        recorder.posted();
        buf = reading.await.map_err(Error::from)?;
    }
    say(ends.talk(), &Request::Stop)
}

fn write_first(
    ends: &Ends,
    size: u32,
    mut pace: Pace,
    recorder: &mut Recorder,
) -> anyhow::Result<()> {
    let targets = ends.fabric.block_on(Target::all(ends, size))?;
    for (round, target) in (0..).zip(targets.iter().cycle()) {
        if !pace.another() {
            return target.write(STOP);
        }
        let value = value(round, targets.len());
        target.write(value)?;
        recorder.posted();
        target.watch(&ends.fabric, value)?;
    }
    Ok(())
}

fn write_back(ends: &Ends, size: u32) -> anyhow::Result<u64> {
    let targets = ends.fabric.block_on(Target::all(ends, size))?;
    for (round, target) in (0..).zip(targets.iter().cycle()) {
        let value = value(round, targets.len());
        if target.watch(&ends.fabric, value)? == STOP {
            return Ok(round);
        }
        target.write(value)?;
    }
    Ok(0)
}

/// What the last byte becomes. 0 is what memory begins with.
const VALUES: [u8; 2] = [1, 2];
const STOP: u8 = 3;

/// The two take turns, link by link, so that every write is seen to change the byte.
fn value(round: u64, links: usize) -> u8 {
    VALUES[usize::from(!(round / links as u64).is_multiple_of(2))]
}

/// Memory of ours that the peer writes, and memory of the peer's that we write, on one link.
struct Target<'a> {
    link: &'a Link,
    ours: Region,
    theirs: GrantToken,
    /// By the byte that they end in, from 1.
    messages: [Buf; 3],
}

impl<'a> Target<'a> {
    async fn all(ends: &'a Ends, size: u32) -> anyhow::Result<Vec<Self>> {
        let regions = ends.expose(size, Rights::WRITE)?;
        let grants = ends.grants().await?;
        let targets = ends.links.iter().zip(regions).zip(grants).map(|((link, ours), theirs)| {
            let [first, second] = VALUES;
            let messages = [
                ends.message(size, first)?,
                ends.message(size, second)?,
                ends.message(size, STOP)?,
            ];
            Ok(Self { link, ours, theirs, messages })
        });
        targets.collect()
    }

    /// Whether it arrived is seen in the peer's answer: nobody waits for the completion.
    fn write(&self, value: u8) -> anyhow::Result<()> {
        let message = self.messages[usize::from(value) - 1].clone();
        drop(self.link.rdma_write(&self.theirs, 0, message)?);
        Ok(())
    }

    /// Waits until our last byte is `wanted`, or the one that ends it all.
    fn watch(&self, fabric: &Fabric, wanted: u8) -> anyhow::Result<u8> {
        /// Fruitless looks between two questions whether the link still stands.
        const LOOKS_PER_CHECK: u32 = 1 << 12;
        let last = self.ours.len() - 1;
        let mut looks = 0_u32;
        loop {
            let mut byte = [0];
            ensure!(self.ours.read(last, &mut byte), "the memory was taken back");
            if byte[0] == wanted || byte[0] == STOP {
                return Ok(byte[0]);
            }
            fabric.poll();
            looks += 1;
            if looks.is_multiple_of(LOOKS_PER_CHECK)
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
