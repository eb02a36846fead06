//! A simulator: runs two link cores against each other in virtual time, with an adversary between
//! them.
//!
//! ```text
//!   application ─► core ─► wires (RDMA paths and TCP connections) ─► core ─► application
//!
//!   adversary: delays, cuts paths, refuses posts, exhausts pools, stalls readers, withdraws
//!              upgrades, lets time pass
//! ```
//!
//! A seed determines a run. The simulator checks that
//! - messages arrive in order and at most once, and all of them if the link closes in good order;
//! - the immediate data of a write arrives after its bytes;
//! - no read or write reaches memory that was released;
//! - honest peers do not violate the protocol;
//! - every operation is answered, and every link ends.
//!
//! `cargo xtask simulate --seeds N` runs many seeds. `FERRITE_SEED=N` repeats one seed and prints
//! its events.

#![expect(clippy::print_stderr, clippy::print_stdout, reason = "shows a run to whoever repeats it")]

mod application;
mod connection;
mod side;
mod upgrade;
mod wire;
mod work;

use std::time::{Duration, Instant};

use application::Application;
use side::Side;
use wire::Wires;

use super::core::ActiveTransport;
use crate::error::{Error, ErrorKind};
use crate::mem::Pool;

/// Number of actions in a run before the adversary stops.
const ACTIONS: usize = 1500;
/// Number of actions, without the adversary, within which every revocation must be answered. A
/// closing link must end within as many, with every operation answered.
const SETTLING: usize = 60_000;

/// A violation of a rule.
#[derive(Debug)]
pub(crate) struct Violation(String);

/// Fails a run.
fn violation<T>(what: impl Into<String>) -> Result<T, Violation> {
    Err(Violation(what.into()))
}

/// Random numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

struct Simulation {
    random: Random,
    now: Instant,
    sides: [Side; 2],
    wires: Wires,
    is_shown: bool,
    /// Whether the adversary has stopped.
    is_calm: bool,
    /// The sides that close on their own. Any other side closes when its peer has closed.
    closers: [bool; 2],
    /// How often `service` has detached a lost path.
    losses: usize,
    /// How often a side has upgraded to RDMA.
    upgrades: usize,
    /// How often a caller has probed its path.
    probes: usize,
}

/// The result of a run.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Summary {
    messages: usize,
    losses: usize,
    upgrades: usize,
    probes: usize,
    is_in_order: bool,
}

/// Runs a seed.
fn run(seed: u64, pool: &Pool, is_shown: bool) -> Result<Summary, Violation> {
    let mut random = Random(seed.wrapping_mul(0xd134_2543_de82_ef95));
    let now = Instant::now();
    let mut wires = Wires::default();
    let begins_on_rdma = random.chance(60);
    let has_connection = !begins_on_rdma || random.chance(50);
    let sides = side::pair(&mut random, &mut wires, pool, now, (begins_on_rdma, has_connection));
    let closers = [[true, false], [false, true], [true, true]][random.below(3)];
    // In some runs the adversary stays active while the link closes.
    let close_at = if random.chance(40) { ACTIONS - random.below(300) } else { ACTIONS };
    let mut simulation = Simulation {
        random,
        now,
        sides,
        wires,
        is_shown,
        is_calm: false,
        closers,
        losses: 0,
        upgrades: 0,
        probes: 0,
    };
    simulation.sides.iter_mut().for_each(|side| side.is_shown = is_shown);
    for action in 0..ACTIONS {
        if action == close_at {
            simulation.close()?;
        }
        simulation.act()?;
        if simulation.is_over() {
            break;
        }
    }
    simulation.is_calm = true;
    if close_at == ACTIONS {
        simulation.act_until("a revocation is not answered", Simulation::is_settled)?;
        simulation.close()?;
    }
    simulation.act_until("the link does not end", Simulation::is_over)?;
    simulation.end()
}

impl Simulation {
    fn is_over(&self) -> bool {
        self.sides.iter().all(|side| side.core.failure().is_some() && side.application.is_idle())
    }

    /// Returns whether every revocation was answered, or its link has ended.
    fn is_settled(&self) -> bool {
        self.sides.iter().all(|side| {
            let Application { is_revoked, is_released, .. } = side.application;
            side.core.failure().is_some() || !is_revoked || is_released
        })
    }

    /// Runs the simulation until a condition holds. Fails if that takes more than [`SETTLING`]
    /// actions.
    fn act_until(&mut self, otherwise: &str, is_so: fn(&Self) -> bool) -> Result<(), Violation> {
        for _ in 0..SETTLING {
            if is_so(self) {
                return Ok(());
            }
            self.act()?;
        }
        let states = self.sides.iter().map(Side::describe).collect::<Vec<_>>();
        violation(format!("{otherwise}: {}", states.join("; ")))
    }

    /// Closes the link. The adversary may cut the path while closing frames are under way.
    fn close(&mut self) -> Result<(), Violation> {
        self.show(|| format!("closing, by {:?}", self.closers));
        let closers = self.closers;
        for side in (0..2).filter(|side| closers[*side]) {
            self.sides[side].close();
            for _ in 0..self.random.below(20) {
                self.pump(side)?;
                self.reap(1 - side, 4)?;
            }
        }
        if !self.is_calm && self.random.chance(70) {
            self.cut()?;
        }
        Ok(())
    }

    fn show(&self, what: impl FnOnce() -> String) {
        if self.is_shown {
            eprintln!("{}", what());
        }
    }

    /// Runs one random action.
    fn act(&mut self) -> Result<(), Violation> {
        let side = self.random.below(2);
        let action = self.random.below(100);
        match action {
            0..12 => self.application(side)?,
            12..30 => self.receive(side)?,
            30..45 => self.pump(side)?,
            45..60 => self.deliver_packet(side)?,
            60..70 => self.reap(side, 1 + action % 4)?,
            70..82 => self.deliver_tcp(side)?,
            82..86 => self.service(side)?,
            86..88 => self.pass_time(side)?,
            88..92 => self.upgrade(side)?,
            92..93 if !self.is_calm => self.cut()?,
            93..96 => self.notice_failure(side)?,
            96..98 if !self.is_calm => self.fail_alone(side)?,
            98..99 if !self.is_calm => self.sides[side].revoke(&mut self.random),
            99.. if !self.is_calm && self.random.chance(2) => self.break_connection()?,
            _ => self.service(side)?,
        }
        Ok(())
    }

    fn application(&mut self, side: usize) -> Result<(), Violation> {
        if self.is_calm {
            return Ok(());
        }
        let [one, other] = &mut self.sides;
        let (own, peer) = if side == 0 { (one, other) } else { (other, one) };
        own.offer_work(&mut peer.application, &mut self.random)
    }

    fn receive(&mut self, side: usize) -> Result<(), Violation> {
        // The adversary lets readers stall.
        if !self.is_calm && self.random.chance(30) {
            return Ok(());
        }
        for _ in 0..=self.random.below(4) {
            self.sides[side].take_message()?;
        }
        self.sides[side].poll_operations()
    }

    /// Sends everything that may be sent.
    fn pump(&mut self, side: usize) -> Result<(), Violation> {
        let refuses = !self.is_calm && self.random.chance(1);
        let is_dry = !self.is_calm && self.random.chance(10);
        self.sides[side].pump(&mut self.wires, side, (refuses, is_dry))
    }

    /// Delivers the next packet and the next acknowledgement on a random path to the device of a
    /// side. The device acknowledges the packet.
    fn deliver_packet(&mut self, side: usize) -> Result<(), Violation> {
        let Some(wire) = self.wires.pick_rdma(&mut self.random) else { return Ok(()) };
        let [one, other] = &mut self.sides;
        let to = if side == 0 { one } else { other };
        to.on_packet(&mut self.wires, wire, side)
    }

    /// Lets a side process its completions.
    fn reap(&mut self, side: usize, most: usize) -> Result<(), Violation> {
        self.sides[side].reap(most, self.now)?;
        self.pump(side)
    }

    fn deliver_tcp(&mut self, side: usize) -> Result<(), Violation> {
        let was = self.sides[side].core.transport();
        self.sides[side].on_tcp(&mut self.wires, side, self.now)?;
        if was != ActiveTransport::Rdma
            && self.sides[side].core.transport() == ActiveTransport::Rdma
        {
            self.show(|| format!("side {side} is on RDMA"));
        }
        self.pump(side)
    }

    /// Runs the driver of a side: detaches lost paths, takes steps, reconnects, closes after the
    /// peer, and notices the end of the link.
    fn service(&mut self, side: usize) -> Result<(), Violation> {
        if self.sides[side].core.is_to_be_detached() {
            self.sides[side].detach(self.now)?;
            self.losses += 1;
            self.show(|| format!("side {side} has detached its path"));
        }
        let accepts = self.is_calm || self.random.chance(85);
        let upgraded = self.sides[side].take_steps(&mut self.wires, accepts);
        self.upgrades += usize::from(upgraded);
        if side == 0 {
            self.dial()?;
        }
        if self.sides[side].core.peer_has_closed() {
            self.sides[side].close();
        }
        self.hear_of_the_end(side);
        if self.sides[side].core.failure().is_some() {
            self.sides[side].tear_down();
        }
        self.pump(side)
    }

    /// Tells a side that its peer is down, after it has received everything from the peer.
    fn hear_of_the_end(&mut self, side: usize) {
        let (own, peer) = (&self.sides[side], &self.sides[1 - side]);
        if peer.core.failure().is_none()
            || own.core.failure().is_some()
            || own.has_unread(&mut self.wires, side)
        {
            return;
        }
        let own = &mut self.sides[side];
        if own.tcp.is_some() {
            own.hang_up();
        } else {
            own.disconnected();
        }
    }

    /// Lets the caller reconnect a link that has neither a path nor a connection.
    fn dial(&mut self) -> Result<(), Violation> {
        let [caller, called] = &mut self.sides;
        let is_wanted = caller.core.lost().is_some_and(|lost| lost.is_detached)
            && caller.tcp.is_none()
            && caller.core.failure().is_none();
        if !is_wanted {
            return Ok(());
        }
        if called.tcp.is_some() || !called.core.lose_for_peer() {
            caller.not_known();
            return Ok(());
        }
        if called.core.is_to_be_detached() {
            called.detach(self.now)?;
        }
        let received = [&*caller, &*called].map(|side| side.core.credits.received());
        let wire = self.wires.connect();
        caller.resume_over(wire, received[1])?;
        called.resume_over(wire, received[0])?;
        self.show(|| "the caller has dialled again".into());
        Ok(())
    }

    fn pass_time(&mut self, side: usize) -> Result<(), Violation> {
        let most = if self.is_calm { 20 } else { 400 };
        // A driver starts its timer right after the traffic.
        self.probes += usize::from(self.sides[side].probe(self.now));
        self.now += Duration::from_millis(self.random.below(most) as u64);
        self.sides[side].on_timer(self.now)?;
        self.probes += usize::from(self.sides[side].probe(self.now));
        self.pump(side)
    }

    /// Lets the caller start an upgrade to RDMA, or either side withdraw from one.
    fn upgrade(&mut self, side: usize) -> Result<(), Violation> {
        let withdraws = !self.is_calm && self.random.chance(15);
        let is_gone = !self.is_calm && self.random.chance(3);
        let own = &mut self.sides[side];
        if own.next.is_some() && (is_gone || withdraws && !own.core.has_switched()) {
            own.withdraw();
        } else if side == 0 && !self.is_calm {
            own.offer(&mut self.wires);
        }
        self.pump(side)
    }

    /// Cuts an RDMA path for both sides. The path may belong to an unfinished upgrade.
    fn cut(&mut self) -> Result<(), Violation> {
        if let Some(wire) = self.wires.pick_rdma(&mut self.random) {
            self.wires.cut(wire);
            self.show(|| format!("path {wire} is cut"));
        }
        Ok(())
    }

    /// Lets a side find out that its path is cut.
    fn notice_failure(&mut self, side: usize) -> Result<(), Violation> {
        self.sides[side].notice_cut(&self.wires);
        Ok(())
    }

    /// Breaks the path of one side without telling the other.
    fn fail_alone(&mut self, side: usize) -> Result<(), Violation> {
        if self.random.chance(20) && self.sides[side].core.transport() == ActiveTransport::Rdma {
            self.sides[side].fail(Error::new(ErrorKind::LinkDown, "retries exceeded"));
            self.show(|| format!("side {side} loses its path"));
        }
        Ok(())
    }

    /// Breaks the TCP connection, which ends the link.
    fn break_connection(&mut self) -> Result<(), Violation> {
        if self.sides.iter().all(|side| side.tcp.is_some()) {
            self.show(|| "the connection breaks".into());
            self.sides.iter_mut().for_each(Side::hang_up);
        }
        Ok(())
    }

    /// Checks how the run ended.
    fn end(mut self) -> Result<Summary, Violation> {
        let mut messages = 0;
        let is_in_order = self.sides.iter().all(Side::ended_in_order);
        for side in 0..2 {
            while self.sides[side].take_message()? {}
            self.sides[side].poll_operations()?;
            messages += self.sides[side].application.finish(is_in_order)?;
        }
        let Self { losses, upgrades, probes, .. } = self;
        Ok(Summary { messages, losses, upgrades, probes, is_in_order })
    }
}

/// Plain memory that all runs of a thread share.
fn pool() -> Pool {
    Pool::builder(&[]).build().expect("memory")
}

fn run_seeds(seeds: impl Iterator<Item = u64>, is_shown: bool) -> Summary {
    let pool = pool();
    let mut all = Summary::default();
    for seed in seeds {
        match run(seed, &pool, is_shown) {
            Ok(summary) => {
                all.messages += summary.messages;
                all.losses += summary.losses;
                all.upgrades += summary.upgrades;
                all.probes += summary.probes;
                all.is_in_order |= summary.is_in_order;
            }
            Err(Violation(what)) => panic!("seed {seed}: {what}; FERRITE_SEED={seed} repeats it"),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(name: &str) -> Option<u64> {
        std::env::var(name).ok().map(|text| text.parse().expect("a number"))
    }

    /// Runs the first seeds, in every test run.
    #[test]
    fn honest_peers_agree_whatever_happens_between_them() {
        let all = run_seeds(0..if cfg!(miri) { 2 } else { 2000 }, false);
        assert!(all.messages > 100 && all.is_in_order, "{all:?}");
        assert!(
            cfg!(miri) || (all.losses > 100 && all.upgrades > 50 && all.probes > 50),
            "too few lost paths, upgrades or probes happened: {all:?}"
        );
    }

    /// The test behind `cargo xtask simulate`. Runs `FERRITE_SEEDS` seeds from `FERRITE_FIRST_SEED`
    /// on, or `FERRITE_SEED` alone.
    #[test]
    #[ignore = "for cargo xtask simulate"]
    fn seeds() {
        if let Some(seed) = number("FERRITE_SEED") {
            eprintln!("{:?}", run_seeds(seed..=seed, true));
            return;
        }
        let first = number("FERRITE_FIRST_SEED").unwrap_or(0);
        let count = number("FERRITE_SEEDS").unwrap_or(1000);
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
        let all = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|at| {
                    let seeds = (first + at..first + count).step_by(threads as usize);
                    scope.spawn(move || run_seeds(seeds, false))
                })
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().expect("no seed leads to a violation"))
                .collect::<Vec<_>>()
        });
        let sum = |of: fn(&Summary) -> usize| all.iter().map(of).sum::<usize>();
        println!(
            "{count} seeds from {first}: {} messages, {} paths lost, {} upgrades, {} probes, no \
             violation",
            sum(|it| it.messages),
            sum(|it| it.losses),
            sum(|it| it.upgrades),
            sum(|it| it.probes)
        );
    }
}
