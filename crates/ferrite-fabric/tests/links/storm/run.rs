//! A storm run: one connecting fabric, two peers, and links between them that come and go.

use std::collections::{HashSet, VecDeque};
use std::time::Instant;

use ferrite_fabric::mem::Pool;
use ferrite_fabric::wire::GrantToken;
use ferrite_fabric::{
    Config, Connecting, Ending, Error, ErrorKind, Fabric, Link, Reading, Revoking, Sending, Writing,
};

use super::peer::{CELL, Granted, Peer, REGION, cell, check_cell};
use super::{check, message};
use crate::links::pair::{assert_unused, connect, pass, pattern_from, poll_once, until};
use crate::links::{Fixture, KIB, TEST_TIMEOUT};
use ferrite_testkit::Random;

const LINKS: usize = 6;
const CHANNELS: usize = 4;
/// Maximum number of futures that are kept.
const KEPT: usize = 150;

/// How a connect fails when its peer is dropped meanwhile.
const PEER_LOST: [ErrorKind; 4] =
    [ErrorKind::Refused, ErrorKind::Timeout, ErrorKind::Unreachable, ErrorKind::LinkDown];

/// A link with both ends: `ends[0]` connected, `ends[1]` accepted.
struct Slot {
    ends: [Link; 2],
    peer: u64,
    granted: Option<Granted>,
    /// By direction and channel: the number of the next message, and the number of the last posted
    /// message that arrived.
    next: [[u64; CHANNELS]; 2],
    last: [[Option<u64>; CHANNELS]; 2],
    /// Messages that were sent through a future and have arrived. A future sends its message when
    /// it is polled, so these messages arrive in no particular order.
    seen: HashSet<(usize, u16, u64)>,
}

/// A future that is kept for a while, with what is needed to check its result.
enum Kept {
    Sending(Sending),
    Writing(Writing),
    /// A read of the region with this name, from this offset.
    Reading(Reading, u64, usize),
    ReadingCell(Reading),
    Revoking(Revoking),
    Ending(Ending),
}

pub(super) struct Storm<'f> {
    fixture: &'f Fixture,
    random: Random,
    config: Config,
    operations: u64,
    connecting_fabric: Fabric,
    peers: [Peer; 2],
    slots: Vec<Slot>,
    connecting: Vec<(Connecting, u64)>,
    connected: Vec<(Link, u64)>,
    kept: VecDeque<(Kept, u64)>,
    /// Pools of fabrics that were dropped: all memory must come back to them.
    pools: Vec<Pool>,
    names: u64,
    pub(super) operations_begun: u64,
    report: Report,
}

#[derive(Default)]
struct Report {
    received: u64,
    finished: u64,
    failed: u64,
    dropped: u64,
    links: u64,
    peers: u64,
    revoked: u64,
}

impl<'f> Storm<'f> {
    pub(super) fn new(
        fixture: &'f Fixture,
        random: Random,
        config: Config,
        operations: u64,
    ) -> Self {
        let connecting_fabric = fixture.fabric(&fixture.hosts[1], &config);
        let peers = [1, 2].map(|serial| Peer::new(fixture, &config, serial));
        Self {
            fixture,
            random,
            config,
            operations,
            connecting_fabric,
            peers,
            slots: Vec::new(),
            connecting: Vec::new(),
            connected: Vec::new(),
            kept: VecDeque::new(),
            pools: Vec::new(),
            names: 0,
            operations_begun: 0,
            report: Report { peers: 2, ..Report::default() },
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
        [&self.connecting_fabric, &self.peers[0].fabric, &self.peers[1].fabric]
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
            self.replace_a_peer();
        }
        if self.one_in(2) {
            pass(&self.fabrics());
        }
        for _ in 0..self.random.below(4) {
            self.poll_one();
        }
        while self.kept.len() > KEPT {
            let (kept, _) = self.kept.pop_front().expect("kept is not empty");
            drop(kept);
            self.report.dropped += 1;
        }
    }

    /// Removes failed links. Starts a connect if there are too few links, counting those that are
    /// still connecting. Matches the two ends of new links.
    fn replace_links(&mut self) {
        self.slots.retain(|slot| slot.ends.iter().all(|end| end.failure().is_none()));
        let peers = [0, 1].map(|at: usize| self.peers[at].serial);
        self.connected.retain(|(link, peer)| link.failure().is_none() && peers.contains(peer));
        if self.slots.len() + self.connecting.len() + self.connected.len() < LINKS {
            let at = self.random.below(2) as usize;
            let connecting =
                connect(&self.connecting_fabric, &self.fixture.hosts[1], &self.peers[at].listener);
            self.connecting.push((connecting, peers[at]));
        }
        if self.connecting.is_empty() && self.connected.is_empty() {
            return;
        }
        let mut waiting = Vec::new();
        for (mut connecting, peer) in std::mem::take(&mut self.connecting) {
            match poll_once(&mut connecting) {
                _ if self.random.below(500) == 0 => drop(connecting),
                None => waiting.push((connecting, peer)),
                Some(Ok(link)) => self.connected.push((link, peer)),
                // The peer was dropped.
                Some(Err(error)) => assert_expected(&error, &PEER_LOST),
            }
        }
        self.connecting = waiting;
        for peer in &mut self.peers {
            peer.accept();
            for here in std::mem::take(&mut peer.unmatched) {
                let same = |(there, _): &(Link, u64)| there.local_addr() == here.peer_addr();
                let Some(at) = self.connected.iter().position(same) else {
                    peer.unmatched.push(here);
                    continue;
                };
                let (there, _) = self.connected.swap_remove(at);
                self.report.links += 1;
                self.slots.push(Slot {
                    ends: [there, here],
                    peer: peer.serial,
                    granted: None,
                    next: [[0; CHANNELS]; 2],
                    last: [[None; CHANNELS]; 2],
                    seen: HashSet::new(),
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
        let peer = self.slots[at].peer;
        match begun {
            Ok(Some(kept)) => {
                self.operations_begun += 1;
                self.keep_or_drop(kept, peer);
            }
            Ok(None) => self.operations_begun += 1,
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

    fn keep_or_drop(&mut self, mut kept: Kept, peer: u64) {
        match self.random.below(10) {
            0..3 => {}
            3..5 => {
                // The future is polled once, then dropped.
                self.poll(&mut kept);
            }
            _ => return self.kept.push_back((kept, peer)),
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
        // The number is used up whether or not the message is accepted: received numbers must
        // increase, but may have gaps.
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
        let mut buf = self.connecting_fabric.buffer(len)?;
        buf.fill(0xcc);
        let reading = self.slots[at].ends[0].rdma_read(token, offset as u64, buf)?;
        Ok(Some(Kept::Reading(reading, region, offset)))
    }

    fn read_cell(&mut self, at: usize, token: &GrantToken) -> Result<Option<Kept>, Error> {
        let offset = self.random.below((REGION / CELL) as u64) * CELL as u64;
        let reading = self.slots[at].ends[0].rdma_read(
            token,
            offset,
            self.connecting_fabric.buffer(CELL)?,
        )?;
        Ok(Some(Kept::ReadingCell(reading)))
    }

    fn write(&mut self, at: usize, name: u64, token: &GrantToken) -> Result<Option<Kept>, Error> {
        let offset = self.random.below((REGION / CELL) as u64) * CELL as u64;
        let notice = self.one_in(3);
        let link = &self.slots[at].ends[0];
        let mut buf = self.connecting_fabric.buffer(CELL)?;
        buf.copy_from_slice(&cell(name));
        let writing = if notice {
            link.rdma_write_imm(token, offset, buf, name as u32)?
        } else {
            link.rdma_write(token, offset, buf)?
        };
        Ok(Some(Kept::Writing(writing)))
    }

    /// Takes and checks some of the received messages.
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
                            assert!(
                                Some(number) > before,
                                "message {number} arrived after {before:?}"
                            );
                        } else {
                            let new = slot.seen.insert((direction, message.channel(), number));
                            assert!(new, "message {number} arrived twice");
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

    /// Breaks something once in a while.
    fn disturb(&mut self, at: usize) {
        let peer = self.slots[at].peer;
        match self.random.below(1000) {
            0..4 => self.slots[at].ends[0].abort(),
            4..8 => self.slots[at].ends[1].abort(),
            8..10 => drop(self.slots.swap_remove(at)),
            10..12 => {
                let end = self.random.below(2) as usize;
                let ending = self.slots[at].ends[end].close();
                self.keep_or_drop(Kept::Ending(ending), peer);
            }
            12..30 => {
                let Some(Granted { readable, cells, .. }) = self.slots[at].granted.take() else {
                    return;
                };
                self.report.revoked += 2;
                self.keep_or_drop(Kept::Revoking(readable.revoke()), peer);
                self.keep_or_drop(Kept::Revoking(cells.revoke()), peer);
            }
            // A drop does not notify the peer, so its link may break.
            30 => self.slots[at].granted = None,
            _ => {}
        }
    }

    /// Drops a peer with everything in it and puts a new one in its place.
    fn replace_a_peer(&mut self) {
        let at = self.random.below(2) as usize;
        let lost = self.peers[at].serial;
        self.pools.push(self.peers[at].pool());
        for slot in &self.slots {
            if slot.peer == lost && self.random.below(2) == 0 {
                slot.ends[1].abort();
            }
        }
        self.slots.retain(|slot| slot.peer != lost);
        self.kept.retain(|(_, peer)| *peer != lost);
        self.report.peers += 1;
        let serial = self.report.peers;
        self.peers[at] = Peer::new(self.fixture, &self.config, serial);
    }

    fn poll_one(&mut self) {
        if self.kept.is_empty() {
            return;
        }
        let at = self.random.below(self.kept.len() as u64) as usize;
        let Some((mut kept, peer)) = self.kept.swap_remove_back(at) else { return };
        if self.one_in(8) {
            self.report.dropped += 1;
        } else if !self.poll(&mut kept) {
            self.kept.push_back((kept, peer));
        }
    }

    /// Polls a future and checks its result. Returns true if it is done.
    fn poll(&mut self, kept: &mut Kept) -> bool {
        let result = match kept {
            Kept::Sending(future) => poll_once(future),
            Kept::Writing(future) => poll_once(future),
            Kept::Ending(future) => poll_once(future),
            Kept::Reading(future, name, offset) => poll_once(future).map(|read| {
                let buf = read.map_err(Error::from)?;
                assert!(
                    buf[..] == pattern_from(*name, *offset, buf.len()),
                    "foreign bytes in region {name:#x}"
                );
                Ok(())
            }),
            Kept::ReadingCell(future) => poll_once(future).map(|read| {
                check_cell(&read.map_err(Error::from)?);
                Ok(())
            }),
            Kept::Revoking(future) => poll_once(future).map(|revoked| {
                // No peer may read the new bytes.
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

    /// Ends the storm: every kept future must be ready in time, every link must close, and all
    /// memory must be returned.
    pub(super) fn end(mut self) -> String {
        self.connecting.clear();
        for (mut kept, _) in std::mem::take(&mut self.kept) {
            let deadline = Instant::now() + TEST_TIMEOUT;
            while !self.poll(&mut kept) {
                assert!(Instant::now() < deadline, "a future was not ready in time");
                pass(&self.fabrics());
                for at in 0..self.slots.len() {
                    self.receive(at);
                }
            }
        }
        self.slots.clear();
        self.connected.clear();
        let Self { connecting_fabric, peers, mut pools, report, .. } = self;
        pools.push(connecting_fabric.pool().clone());
        pools.extend(peers.iter().map(Peer::pool));
        let [one, other] = peers.map(|peer| peer.fabric);
        let fabrics = [connecting_fabric, one, other];
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
        let Report { received, finished, failed, dropped, links, peers, revoked } = report;
        assert!(received > 0 && finished > 0 && dropped > 0 && links > 0);
        format!(
            "{links} links to {peers} peers: {received} messages received, {finished} futures \
             finished, {failed} failed, \
             {dropped} dropped, {revoked} grants revoked"
        )
    }
}

fn assert_expected(error: &Error, kinds: &[ErrorKind]) {
    assert!(kinds.contains(&error.kind()), "{error:?}");
    // A flushed request reports the first cause. But if a request of the peer failed, the peer may
    // not have reported that cause in time.
    let text = error.to_string();
    assert!(!text.contains("flush") || text.contains("no cause reported"), "{text}");
}
