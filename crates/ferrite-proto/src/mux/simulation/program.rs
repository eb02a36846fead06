//! The programs at both ends of all streams: what each sends, how it reads, and what has arrived.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_testkit::Random;

use super::wire::Clock;
use super::{Summary, Violation, chance, violation};
use crate::mux::{Cause, Class, End, Filled, Side, StreamId};

/// How a program ends its direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Plan {
    Fin,
    /// The program's connection breaks at the end.
    Break,
    /// The program keeps the stream open until the adversary has stopped.
    Keep,
}

/// How a program reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reader {
    Prompt,
    Slow,
    /// Reads nothing until the adversary has stopped.
    Never,
}

/// One program: one end of a stream.
#[derive(Debug)]
pub(super) struct Program {
    plan: Plan,
    reader: Reader,
    total: u64,
    sent: u64,
    has_sent_fin: bool,
    received: u64,
    has_received_fin: bool,
    /// The number of bytes that were received and not consumed.
    held: u32,
    /// Whether the stream has ended at this side, and why.
    end: Option<End>,
    has_reset: bool,
    /// For each small message of the class *bus* that has not arrived: the offset of its end in the
    /// stream, and when it became ready.
    ready: std::collections::VecDeque<(u64, u64)>,
}

/// The size of each small message whose latency is measured, in bytes.
const PROBE_BYTES: u64 = 80;

impl Program {
    fn new(random: &mut Random, is_probe: bool, is_calm: bool) -> Self {
        let total = match random.below(6) {
            0 => 0,
            1..4 => random.below(2000),
            4 => random.below(20_000),
            _ => random.below(200_000),
        };
        let plan = match random.below(10) {
            0..6 => Plan::Fin,
            6 => Plan::Break,
            _ => Plan::Keep,
        };
        let reader = match random.below(10) {
            0..6 => Reader::Prompt,
            6..9 => Reader::Slow,
            _ => Reader::Never,
        };
        let mut it = Self {
            plan,
            reader,
            total,
            sent: 0,
            has_sent_fin: false,
            received: 0,
            has_received_fin: false,
            held: 0,
            end: None,
            has_reset: false,
            ready: std::collections::VecDeque::new(),
        };
        if is_probe {
            (it.total, it.plan, it.reader) = (0, Plan::Keep, Reader::Prompt);
        }
        if is_calm {
            it.calm();
        }
        it
    }

    fn calm(&mut self) {
        if self.plan == Plan::Keep {
            self.plan = Plan::Fin;
        }
        self.total = self.total.min(self.sent + 5000);
        self.reader = Reader::Prompt;
    }
}

/// Returns the byte of a stream at an offset.
fn content(stream: StreamId, from: Side, offset: u64) -> u8 {
    let mixed = (offset ^ u64::from(stream.to_wire()) << 20 ^ (from as u64) << 60)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

pub(super) struct Programs {
    /// The programs at both sides, of streams that exist there or have existed.
    all: BTreeMap<(StreamId, Side), Program>,
    /// The streams that exist at each side.
    live: [BTreeSet<StreamId>; 2],
    pub(super) is_calm: bool,
    /// When the wires work again after the path has moved.
    blocked_until: u64,
    /// The streams of the class *bus* whose latency is measured, by opener.
    probes: [Option<StreamId>; 2],
    /// How long a small message of a probe may take at most, by sender.
    allowed_micros: [u64; 2],
    /// In a turn, a program may send nothing, send less than it could, or claim that it has no more
    /// bytes. Each of these happens with half of this probability, in percent.
    pub(super) idle_percent: u64,
    bytes: u64,
}

impl Programs {
    pub(super) fn new(random: &mut Random) -> Self {
        Self {
            all: BTreeMap::new(),
            live: Default::default(),
            is_calm: false,
            blocked_until: 0,
            probes: [None; 2],
            allowed_micros: [0; 2],
            idle_percent: random.below(90),
            bytes: 0,
        }
    }

    pub(super) fn block(&mut self, clock: &Clock, micros: u64) {
        self.blocked_until = self.blocked_until.max(clock.micros() + micros);
    }

    pub(super) fn allow_probe(&mut self, side: Side, micros: u64) {
        let allowed = &mut self.allowed_micros[side as usize];
        *allowed = micros.max(*allowed);
    }

    fn get(&mut self, stream: StreamId, side: Side) -> Result<&mut Program, Violation> {
        let found = self.all.get_mut(&(stream, side));
        found.ok_or_else(|| Violation(format!("{side:?}: {stream} does not exist")))
    }

    pub(super) fn open(&mut self, stream: StreamId, side: Side, random: &mut Random) {
        let is_probe =
            stream.class() == Class::Bus && self.probes[stream.opener() as usize].is_none();
        if is_probe {
            self.probes[stream.opener() as usize] = Some(stream);
        }
        let is_probe = self.is_probe(stream);
        let program = Program::new(random, is_probe, self.is_calm);
        self.all.insert((stream, side), program);
        self.live[side as usize].insert(stream);
    }

    pub(super) fn is_probe(&self, stream: StreamId) -> bool {
        self.probes[stream.opener() as usize] == Some(stream)
    }

    /// Returns whether a side has no probe yet.
    pub(super) fn lacks_probe(&self, side: Side) -> bool {
        self.probes[side as usize].is_none()
    }

    /// Returns whether a stream was ever reported to a side.
    pub(super) fn has(&self, stream: StreamId, side: Side) -> bool {
        self.all.contains_key(&(stream, side))
    }

    /// Returns the streams that have not ended at a side.
    pub(super) fn live(&self, side: Side) -> Vec<StreamId> {
        self.live[side as usize].iter().copied().collect()
    }

    /// Makes a small message of the class *bus* ready to be sent.
    pub(super) fn probe(&mut self, side: Side, clock: &Clock) -> Option<StreamId> {
        let stream = self.probes[side as usize]?;
        let program = self.all.get_mut(&(stream, side))?;
        if self.is_calm || !program.ready.is_empty() {
            return None;
        }
        program.total += PROBE_BYTES;
        program.ready.push_back((program.total, clock.micros()));
        Some(stream)
    }

    /// Fills the room for a stream's next bytes.
    pub(super) fn fill(
        &mut self,
        stream: StreamId,
        side: Side,
        room: &mut [u8],
        random: &mut Random,
    ) -> Result<Filled, Violation> {
        let idle_percent =
            if self.is_calm || self.is_probe(stream) { 0 } else { self.idle_percent };
        let program = self.get(stream, side)?;
        if program.end.is_some() || program.has_reset || program.has_sent_fin {
            return violation(format!("{side:?}: got a turn for {stream}, which has ended"));
        }
        if room.is_empty() {
            return violation(format!("{side:?}: the turn for {stream} has no room for bytes"));
        }
        let left = (program.total - program.sent) as usize;
        if left == 0 {
            return Ok(match program.plan {
                Plan::Fin => {
                    program.has_sent_fin = true;
                    Filled::End
                }
                Plan::Break => {
                    program.has_reset = true;
                    self.live[side as usize].remove(&stream);
                    Filled::Failed(Cause::CONNECTION_LOST)
                }
                Plan::Keep => Filled::Bytes { len: 0, is_more: false },
            });
        }
        if chance(random, idle_percent / 2) {
            return Ok(Filled::Bytes { len: 0, is_more: false });
        }
        let mut len = left.min(room.len());
        if chance(random, idle_percent / 2) {
            len = 1 + random.index(len);
        }
        for (at, byte) in room[..len].iter_mut().enumerate() {
            *byte = content(stream, side, program.sent + at as u64);
        }
        program.sent += len as u64;
        self.bytes += len as u64;
        Ok(Filled::Bytes { len, is_more: !chance(random, idle_percent / 2) })
    }

    /// Checks bytes that have arrived at a side. Returns how many of them are read at once.
    pub(super) fn receive(
        &mut self,
        stream: StreamId,
        side: Side,
        bytes: &[u8],
        clock: &Clock,
    ) -> Result<u32, Violation> {
        let blocked_until = self.blocked_until;
        let allowed_micros = self.allowed_micros[side.other() as usize];
        let is_probe = self.is_probe(stream);
        let program = self.get(stream, side)?;
        if program.has_received_fin || program.end.is_some() || program.has_reset {
            return violation(format!("{side:?}: received bytes of {stream} after its end"));
        }
        for (at, byte) in bytes.iter().enumerate() {
            if *byte != content(stream, side.other(), program.received + at as u64) {
                let offset = program.received + at as u64;
                return violation(format!("{side:?}: byte {offset} of {stream} is wrong"));
            }
        }
        program.received += bytes.len() as u64;
        let received = program.received;
        let read = match program.reader {
            Reader::Prompt => bytes.len() as u32,
            Reader::Slow | Reader::Never => 0,
        };
        program.held += bytes.len() as u32 - read;
        let sender = self.get(stream, side.other())?;
        if received > sender.sent {
            return violation(format!("{side:?}: received more bytes of {stream} than were sent"));
        }
        if is_probe
            && let Some((end, since)) = sender.ready.front().copied()
            && received >= end
        {
            sender.ready.pop_front();
            let since = since.max(blocked_until);
            let took = clock.micros().saturating_sub(since);
            if took > allowed_micros {
                let what = format!(
                    "{took} µs from {since} µs, {allowed_micros} µs allowed, wires blocked until \
                     {blocked_until} µs"
                );
                return violation(format!(
                    "{side:?}: a small message of the class bus took {what}"
                ));
            }
        }
        Ok(read)
    }

    pub(super) fn on_fin(&mut self, stream: StreamId, side: Side) -> Result<(), Violation> {
        let sender = self.get(stream, side.other())?;
        let (sent, has_sent_fin) = (sender.sent, sender.has_sent_fin);
        let program = self.get(stream, side)?;
        if !has_sent_fin || std::mem::replace(&mut program.has_received_fin, true) {
            return violation(format!(
                "{side:?}: the FIN of {stream} was not sent, or arrived twice"
            ));
        }
        if program.received != sent {
            let received = program.received;
            return violation(format!(
                "{side:?}: the FIN of {stream} arrived after {received} of {sent} bytes"
            ));
        }
        Ok(())
    }

    pub(super) fn on_ended(
        &mut self,
        stream: StreamId,
        side: Side,
        end: End,
    ) -> Result<(), Violation> {
        if end == End::ResetByPeer(Cause::GOING_AWAY) && self.has(stream, side.other()) {
            return violation(format!(
                "the peer is going away and reset {stream}, but had processed it"
            ));
        }
        self.live[side as usize].remove(&stream);
        let program = self.get(stream, side)?;
        if program.has_reset || program.end.replace(end).is_some() {
            return violation(format!("{side:?}: the end of {stream} was reported twice"));
        }
        let is_complete = program.has_sent_fin && program.has_received_fin && program.held == 0;
        if end == End::Finished && !is_complete {
            return violation(format!("{side:?}: {stream} finished early: {program:?}"));
        }
        Ok(())
    }

    pub(super) fn on_reset(&mut self, stream: StreamId, side: Side) -> Result<(), Violation> {
        self.live[side as usize].remove(&stream);
        self.get(stream, side)?.has_reset = true;
        Ok(())
    }

    /// Returns how many held bytes of a stream are read now.
    pub(super) fn read(
        &mut self,
        stream: StreamId,
        side: Side,
        random: &mut Random,
    ) -> Result<u32, Violation> {
        let is_calm = self.is_calm;
        let program = self.get(stream, side)?;
        if is_calm {
            program.calm();
        }
        let read = match program.reader {
            Reader::Never => 0,
            Reader::Prompt => program.held,
            Reader::Slow => random.below(u64::from(program.held) + 1) as u32,
        };
        program.held -= read;
        Ok(read)
    }

    /// Checks that each stream has ended at both sides.
    pub(super) fn finish(&self) -> Result<Summary, Violation> {
        let mut summary = Summary { bytes: self.bytes, ..Summary::default() };
        for ((stream, side), program) in &self.all {
            summary.streams += u64::from(stream.opener() == *side);
            match program.end {
                None if !program.has_reset => {
                    return violation(format!("{side:?}: {stream} has not ended: {program:?}"));
                }
                Some(End::Finished) => summary.finished += 1,
                _ => summary.resets += 1,
            }
        }
        Ok(summary)
    }
}
