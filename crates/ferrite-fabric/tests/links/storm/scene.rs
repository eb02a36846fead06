//! The storm itself: one caller, two harbours, and links between them that come and go.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use ferrite_fabric::mem::Pool;
use ferrite_fabric::wire::GrantToken;
use ferrite_fabric::{
    Config, Connecting, Ending, Error, ErrorKind, Fabric, Link, Reading, Revoking, Sending, Writing,
};

use super::harbour::{CELL, Granted, Harbour, REGION, cell, check_cell};
use super::{check, message};
use crate::links::pair::{assert_unused, call, once, pass, pattern_from, until};
use crate::links::random::Random;
use crate::links::{Fixture, KIB, PATIENCE};

const LINKS: usize = 6;
const CHANNELS: usize = 4;
/// Futures that are kept at a time.
const KEPT: usize = 150;

/// How a connect ends whose peer is lost meanwhile.
const LOST: [ErrorKind; 4] =
    [ErrorKind::Refused, ErrorKind::Timeout, ErrorKind::Unreachable, ErrorKind::LinkDown];

/// A link, both ends: `ends[0]` called, `ends[1]` was called.
struct Slot {
    ends: [Link; 2],
    harbour: u64,
    granted: Option<Granted>,
    /// By direction and channel: the number of the next message, and of the last that came of those
    /// that were posted.
    next: [[u64; CHANNELS]; 2],
    last: [[Option<u64>; CHANNELS]; 2],
    /// Names of those that came through a future, which goes when it is asked.
    came: HashSet<(usize, u16, u64)>,
}

/// A future that is kept, with what must come of it.
enum Kept {
    Sending(Sending),
    Writing(Writing),
    /// Of a region with this name, from there.
    Reading(Reading, u64, usize),
    ReadingCell(Reading),
    Revoking(Revoking),
    Ending(Ending),
}

pub(super) struct Scene<'f> {
    fixture: &'f Fixture,
    random: Random,
    config: Config,
    operations: u64,
    caller: Fabric,
    harbours: [Harbour; 2],
    slots: Vec<Slot>,
    connecting: Vec<(Connecting, u64)>,
    called: Vec<(Link, u64)>,
    kept: VecDeque<(Kept, u64)>,
    /// Of fabrics that are gone: they must get everything back.
    pools: Vec<Pool>,
    names: u64,
    pub(super) begun: u64,
    report: Report,
}

#[derive(Default)]
struct Report {
    received: u64,
    finished: u64,
    failed: u64,
    dropped: u64,
    links: u64,
    harbours: u64,
    revoked: u64,
}

impl<'f> Scene<'f> {
    pub(super) fn new(
        fixture: &'f Fixture,
        random: Random,
        config: Config,
        operations: u64,
    ) -> Self {
        let caller = fixture.fabric(&fixture.hosts[1], &config);
        let harbours = [1, 2].map(|serial| Harbour::new(fixture, &config, serial));
        Self {
            fixture,
            random,
            config,
            operations,
            caller,
            harbours,
            slots: Vec::new(),
            connecting: Vec::new(),
            called: Vec::new(),
            kept: VecDeque::new(),
            pools: Vec::new(),
            names: 0,
            begun: 0,
            report: Report { harbours: 2, ..Report::default() },
        }
    }

    fn name(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.random.below(n) == 0
    }

    fn fabrics(&self) -> [&Fabric; 3] {
        [&self.caller, &self.harbours[0].fabric, &self.harbours[1].fabric]
    }

    pub(super) fn step(&mut self) {
        self.replace_links();
        if !self.slots.is_empty() {
            let at = self.random.below(self.slots.len() as u64) as usize;
            self.operate(at);
            self.receive(at);
            self.disturb(at);
        }
        if self.one_in((self.operations / 6).max(1)) {
            self.lose_a_harbour();
        }
        if self.one_in(2) {
            pass(&self.fabrics());
        }
        for _ in 0..self.random.below(4) {
            self.look_at_one();
        }
        while self.kept.len() > KEPT {
            let (kept, _) = self.kept.pop_front().expect("one");
            drop(kept);
            self.report.dropped += 1;
        }
    }

    /// As many links as there should be, or on their way.
    fn replace_links(&mut self) {
        self.slots.retain(|slot| slot.ends.iter().all(|end| end.failure().is_none()));
        let harbours = [0, 1].map(|at: usize| self.harbours[at].serial);
        self.called
            .retain(|(link, harbour)| link.failure().is_none() && harbours.contains(harbour));
        if self.slots.len() + self.connecting.len() + self.called.len() < LINKS {
            let at = self.random.below(2) as usize;
            let connecting =
                call(&self.caller, &self.fixture.hosts[1], &self.harbours[at].listener);
            self.connecting.push((connecting, harbours[at]));
        }
        if self.connecting.is_empty() && self.called.is_empty() {
            return;
        }
        let mut waiting = Vec::new();
        for (mut connecting, harbour) in std::mem::take(&mut self.connecting) {
            match once(&mut connecting) {
                _ if self.random.below(500) == 0 => drop(connecting),
                None => waiting.push((connecting, harbour)),
                Some(Ok(link)) => self.called.push((link, harbour)),
                // Its harbour was lost.
                Some(Err(error)) => assert_expected(&error, &LOST),
            }
        }
        self.connecting = waiting;
        for harbour in &mut self.harbours {
            harbour.accept();
            for here in std::mem::take(&mut harbour.came) {
                let same = |(there, _): &(Link, u64)| there.local_addr() == here.peer_addr();
                let Some(at) = self.called.iter().position(same) else {
                    harbour.came.push(here);
                    continue;
                };
                let (there, _) = self.called.swap_remove(at);
                self.report.links += 1;
                self.slots.push(Slot {
                    ends: [there, here],
                    harbour: harbour.serial,
                    granted: None,
                    next: [[0; CHANNELS]; 2],
                    last: [[None; CHANNELS]; 2],
                    came: HashSet::new(),
                });
            }
        }
        pass(&self.fabrics());
    }

    fn size(&mut self) -> usize {
        let most = match self.random.below(40) {
            0..20 => 250,
            20..35 => 2 * KIB,
            35..39 => 20 * KIB,
            _ => 100 * KIB,
        };
        self.random.below(most as u64) as usize
    }

    /// Begins an operation on a link; its future is dropped, or kept for a while.
    fn operate(&mut self, at: usize) {
        if self.slots[at].granted.is_none() {
            let name = self.name();
            self.slots[at].granted = Granted::new(&self.slots[at].ends[1], name);
        }
        let name = self.name();
        let tokens = self.slots[at].granted.as_ref().map(|granted| (granted.name, granted.tokens));
        let begun = match (self.random.below(10), tokens) {
            (5..7, Some((region, [readable, _]))) => self.read(at, region, &readable),
            (7, Some((_, [_, cells]))) => self.read_cell(at, &cells),
            (8.., Some((_, [_, cells]))) => self.write(at, name, &cells),
            _ => self.send(at, name),
        };
        let harbour = self.slots[at].harbour;
        match begun {
            Ok(Some(kept)) => {
                self.begun += 1;
                self.keep_or_drop(kept, harbour);
            }
            Ok(None) => self.begun += 1,
            Err(error) => {
                let kinds =
                    [ErrorKind::Full, ErrorKind::Closed, ErrorKind::LinkDown, ErrorKind::Denied];
                assert_expected(&error, &kinds);
                if error.kind() == ErrorKind::Full {
                    pass(&self.fabrics());
                }
            }
        }
    }

    fn keep_or_drop(&mut self, mut kept: Kept, harbour: u64) {
        match self.random.below(10) {
            0..3 => {}
            3..5 => {
                // Asked once, then dropped.
                self.poll(&mut kept);
            }
            _ => return self.kept.push_back((kept, harbour)),
        }
        self.report.dropped += 1;
    }

    fn send(&mut self, at: usize, name: u64) -> Result<Option<Kept>, Error> {
        let (direction, channel) =
            (self.random.below(2) as usize, self.random.below(CHANNELS as u64) as usize);
        let len = self.size();
        let how = self.random.below(4);
        let slot = &mut self.slots[at];
        let link = &slot.ends[direction];
        let lazy = u64::from(how > 1);
        let bytes = message(name, slot.next[direction][channel] * 2 + lazy, len);
        let channel_number = channel as u16;
        let buf = |bytes: &[u8]| {
            let mut buf = link.fabric().buffer(bytes.len())?;
            buf.copy_from_slice(bytes);
            Ok::<_, Error>(buf.freeze())
        };
        // Taken or not, the number is used up: what arrives must be in order, not without gaps.
        slot.next[direction][channel] += 1;
        match how {
            0 => link.post_bytes(channel_number, &bytes).map(|()| None),
            1 => link.post(channel_number, buf(&bytes)?).map(|()| None).map_err(|(_, error)| error),
            2 => Ok(Some(Kept::Sending(link.send(channel_number, buf(&bytes)?)))),
            _ => {
                let parts = bytes.chunks(len / 3 + 1).map(buf).collect::<Result<_, _>>()?;
                Ok(Some(Kept::Sending(link.send_parts(channel_number, parts))))
            }
        }
    }

    fn read(&mut self, at: usize, region: u64, token: &GrantToken) -> Result<Option<Kept>, Error> {
        let len = self.size().min(REGION);
        let offset = self.random.below((REGION - len) as u64 / 8 + 1) as usize * 8;
        let mut buf = self.caller.buffer(len)?;
        buf.fill(0xcc);
        let reading = self.slots[at].ends[0].rdma_read(token, offset as u64, buf)?;
        Ok(Some(Kept::Reading(reading, region, offset)))
    }

    fn read_cell(&mut self, at: usize, token: &GrantToken) -> Result<Option<Kept>, Error> {
        let offset = self.random.below((REGION / CELL) as u64) * CELL as u64;
        let reading = self.slots[at].ends[0].rdma_read(token, offset, self.caller.buffer(CELL)?)?;
        Ok(Some(Kept::ReadingCell(reading)))
    }

    fn write(&mut self, at: usize, name: u64, token: &GrantToken) -> Result<Option<Kept>, Error> {
        let offset = self.random.below((REGION / CELL) as u64) * CELL as u64;
        let notice = self.one_in(3);
        let link = &self.slots[at].ends[0];
        let mut buf = self.caller.buffer(CELL)?;
        buf.copy_from_slice(&cell(name));
        let writing = if notice {
            link.rdma_write_imm(token, offset, buf, name as u32)?
        } else {
            link.rdma_write(token, offset, buf)?
        };
        Ok(Some(Kept::Writing(writing)))
    }

    /// Takes some of what came, and looks at it.
    fn receive(&mut self, at: usize) {
        for direction in [0, 1] {
            for _ in 0..self.random.below(6) {
                let slot = &mut self.slots[at];
                match slot.ends[1 - direction].try_recv() {
                    Ok(Some(message)) if message.notice().is_some() => assert!(message.is_empty()),
                    Ok(Some(message)) => {
                        self.report.received += 1;
                        let Some(number) = check(&message.to_vec()) else { continue };
                        let last = &mut slot.last[direction][usize::from(message.channel())];
                        if number % 2 == 0 {
                            let before = last.replace(number);
                            assert!(Some(number) > before, "{number} came after {before:?}");
                        } else {
                            let new = slot.came.insert((direction, message.channel(), number));
                            assert!(new, "{number} came twice");
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        assert_expected(
                            &error,
                            &[ErrorKind::Closed, ErrorKind::LinkDown, ErrorKind::Denied],
                        );
                        break;
                    }
                }
            }
        }
    }

    /// Breaks something, once in a while.
    fn disturb(&mut self, at: usize) {
        let harbour = self.slots[at].harbour;
        match self.random.below(1000) {
            0..4 => self.slots[at].ends[0].abort(),
            4..8 => self.slots[at].ends[1].abort(),
            8..10 => drop(self.slots.swap_remove(at)),
            10..12 => {
                let end = self.random.below(2) as usize;
                let ending = self.slots[at].ends[end].close();
                self.keep_or_drop(Kept::Ending(ending), harbour);
            }
            12..30 => {
                let Some(Granted { readable, cells, .. }) = self.slots[at].granted.take() else {
                    return;
                };
                self.report.revoked += 2;
                self.keep_or_drop(Kept::Revoking(readable.revoke()), harbour);
                self.keep_or_drop(Kept::Revoking(cells.revoke()), harbour);
            }
            // Without a word to the peer, whose link may break by it.
            30 => self.slots[at].granted = None,
            _ => {}
        }
    }

    /// A harbour goes with everything in it, and another takes its place.
    fn lose_a_harbour(&mut self) {
        let at = self.random.below(2) as usize;
        let lost = self.harbours[at].serial;
        self.pools.push(self.harbours[at].pool());
        for slot in &self.slots {
            if slot.harbour == lost && self.random.below(2) == 0 {
                slot.ends[1].abort();
            }
        }
        self.slots.retain(|slot| slot.harbour != lost);
        self.kept.retain(|(_, harbour)| *harbour != lost);
        self.report.harbours += 1;
        let serial = self.report.harbours;
        self.harbours[at] = Harbour::new(self.fixture, &self.config, serial);
    }

    fn look_at_one(&mut self) {
        if self.kept.is_empty() {
            return;
        }
        let at = self.random.below(self.kept.len() as u64) as usize;
        let Some((mut kept, harbour)) = self.kept.swap_remove_back(at) else { return };
        if self.one_in(8) {
            self.report.dropped += 1;
        } else if !self.poll(&mut kept) {
            self.kept.push_back((kept, harbour));
        }
    }

    /// Asks a future; whether it is over. What came of it must be right.
    fn poll(&mut self, kept: &mut Kept) -> bool {
        let result = match kept {
            Kept::Sending(future) => once(future),
            Kept::Writing(future) => once(future),
            Kept::Ending(future) => once(future),
            Kept::Reading(future, name, offset) => once(future).map(|read| {
                let buf = read.map_err(Error::from)?;
                assert!(
                    buf[..] == pattern_from(*name, *offset, buf.len()),
                    "others' bytes in region {name:#x}"
                );
                Ok(())
            }),
            Kept::ReadingCell(future) => once(future).map(|read| {
                check_cell(&read.map_err(Error::from)?);
                Ok(())
            }),
            Kept::Revoking(future) => once(future).map(|revoked| {
                // Nobody may read this any more.
                revoked.map(|mut buf| buf.fill(0xdd))
            }),
        };
        match &result {
            None => return false,
            Some(Ok(())) => self.report.finished += 1,
            Some(Err(error)) => {
                let kinds =
                    [ErrorKind::Closed, ErrorKind::LinkDown, ErrorKind::Denied, ErrorKind::Timeout];
                assert_expected(error, &kinds);
                self.report.failed += 1;
            }
        }
        true
    }

    /// The storm is over: every future that is kept is ready in time, every link closes, and
    /// everything is back.
    pub(super) fn end(mut self) -> String {
        self.connecting.clear();
        for (mut kept, _) in std::mem::take(&mut self.kept) {
            let deadline = Instant::now() + PATIENCE;
            while !self.poll(&mut kept) {
                assert!(Instant::now() < deadline, "a future is never ready");
                pass(&self.fabrics());
                for at in 0..self.slots.len() {
                    self.receive(at);
                }
            }
        }
        self.slots.clear();
        self.called.clear();
        let Self { caller, harbours, mut pools, report, .. } = self;
        pools.push(caller.pool().clone());
        pools.extend(harbours.iter().map(Harbour::pool));
        let [one, other] = harbours.map(|harbour| harbour.fabric);
        let fabrics = [caller, one, other];
        let driven: Vec<&Fabric> = fabrics.iter().collect();
        until(&driven, "no link is left", || {
            fabrics.iter().all(|fabric| fabric.stats().links == 0)
        });
        for fabric in &fabrics {
            let stats = fabric.stats();
            assert_eq!((stats.in_flight, stats.memory.exposed_regions), (0, 0));
        }
        drop(driven);
        drop(fabrics);
        pools.iter().for_each(assert_unused);
        let Report { received, finished, failed, dropped, links, harbours, revoked } = report;
        assert!(received > 0 && finished > 0 && dropped > 0 && links > 0);
        format!(
            "{links} links to {harbours} peers: {received} messages received, {finished} futures finished, {failed} failed, \
             {dropped} dropped, {revoked} grants revoked"
        )
    }
}

fn assert_expected(error: &Error, kinds: &[ErrorKind]) {
    assert!(kinds.contains(&error.kind()), "{error:?}");
    // A flushed request is told why, unless the peer, whose request failed, has not said so in
    // time.
    let said = error.to_string();
    assert!(!said.contains("flush") || said.contains("nobody says why"), "{said}");
}
