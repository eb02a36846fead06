//! A simulator: runs two multiplexers against each other in virtual time, with an adversary between
//! them.
//!
//! ```text
//!   programs ─► Mux ─► wire (three channels, frames in turn) ─► Mux ─► programs
//!
//!   adversary: delays, divides messages into pieces, stops the link while its path moves, stalls
//!              and never reads, resets and half-closes streams, opens too many, sends GOAWAY,
//!              changes bytes, sends hostile records
//! ```
//!
//! A seed determines a run. With honest peers the simulator checks that
//! - the bytes of each stream arrive in order and once, and all of them before its FIN;
//! - what a multiplexer keeps stays within its limits;
//! - while a stream waits for its turn, the others of its class have at most twice as many turns as
//!   there are streams;
//! - small messages of the class *bus* are fast while others send all they can;
//! - honest peers do not violate the protocol;
//! - every stream ends at both sides, and is reported once.
//!
//! With a hostile peer it checks that memory stays bounded, and that each violation ends the link
//! with its error.
//!
//! `cargo xtask simulate --only mux --seeds N` runs many seeds. `FERRITE_SEED=N` repeats one seed
//! and prints its events.

#![expect(clippy::print_stderr, clippy::print_stdout, reason = "prints the events of a run")]

mod hostile;
mod program;
mod side;
mod wire;

use ferrite_testkit::Random;

use super::{Config, Side as Role};
use program::Programs;
use side::Side;
use wire::{Clock, Wire};

/// Number of actions in a run before the adversary stops.
const ACTIONS: usize = 700;
/// Number of actions, without the adversary, within which every stream must end.
const SETTLING: usize = 60_000;

/// With a `bulk_bytes_per_second` below this, the small messages whose latency is measured would
/// move their stream from the class *bus* to *bulk*.
const PROBE_BULK_BYTES: u64 = 60 << 10;

/// A violation of a rule.
#[derive(Debug)]
struct Violation(String);

/// Returns a violation, which fails the run.
fn violation<T>(what: impl Into<String>) -> Result<T, Violation> {
    Err(Violation(what.into()))
}

/// Returns whether an event with this probability in percent happens.
fn chance(random: &mut Random, percent: u64) -> bool {
    random.below(100) < percent
}

/// Counts of what happened in a run, or in several.
#[derive(Debug, Default, Clone, Copy)]
struct Summary {
    streams: u64,
    bytes: u64,
    finished: u64,
    resets: u64,
    refused: u64,
    out_of_memory: u64,
    class_changes: u64,
    moves: u64,
    go_aways: u64,
    violations: u64,
}

impl Summary {
    fn add(&mut self, other: &Self) {
        self.streams += other.streams;
        self.bytes += other.bytes;
        self.finished += other.finished;
        self.resets += other.resets;
        self.refused += other.refused;
        self.out_of_memory += other.out_of_memory;
        self.class_changes += other.class_changes;
        self.moves += other.moves;
        self.go_aways += other.go_aways;
        self.violations += other.violations;
    }
}

struct Simulation {
    random: Random,
    clock: Clock,
    sides: [Side; 2],
    /// The wire from each side.
    wires: [Wire; 2],
    programs: Programs,
    is_shown: bool,
    moves: u64,
}

/// Returns the limits of a run. They are small, so that runs reach them.
fn config(random: &mut Random) -> Config {
    let window = [64, 1000, 4096, 64 << 10][random.index(4)];
    let max_streams = 4 + random.index(60);
    Config {
        window,
        turn_bytes: [100, 1 << 10, 16 << 10][random.index(3)],
        message_bytes: [200, 4 << 10, 64 << 10][random.index(3)],
        max_in_flight: 1 + random.below(4) as u32,
        max_streams,
        bus_streams: random.index(max_streams),
        opens_per_second: [5, 50, 1000][random.index(3)],
        max_refused: 16_384,
        max_held_bytes: [u64::from(window) * 3, 1 << 20][random.index(2)],
        bulk_bytes_per_second: [5 << 10, PROBE_BULK_BYTES, 1 << 20][random.index(3)],
    }
}

/// Runs a seed.
fn run(seed: u64, is_shown: bool) -> Result<Summary, Violation> {
    let mut random = Random::new(seed);
    if chance(&mut random, 25) {
        return hostile::run(&mut random, is_shown);
    }
    let first = config(&mut random);
    let second = if chance(&mut random, 50) { first.clone() } else { config(&mut random) };
    let second = Config { window: first.window, ..second };
    if is_shown {
        eprintln!("caller {first:?}\ncalled {second:?}");
    }
    let checks_turns = chance(&mut random, 30);
    let clock = Clock::new();
    let wire = Wire::new(&mut random);
    let mut simulation = Simulation {
        sides: [
            Side::new(Role::Caller, first, checks_turns),
            Side::new(Role::Called, second, checks_turns),
        ],
        wires: [wire.clone(), wire],
        programs: Programs::new(&mut random),
        clock,
        random,
        is_shown,
        moves: 0,
    };
    for _ in 0..ACTIONS {
        simulation.act()?;
    }
    simulation.programs.is_calm = true;
    for _ in 0..SETTLING {
        if simulation.is_over() {
            return simulation.end();
        }
        simulation.act()?;
    }
    let states = simulation.sides.iter().map(Side::describe).collect::<Vec<_>>();
    violation(format!("streams do not end: {}", states.join("; ")))
}

impl Simulation {
    fn is_over(&self) -> bool {
        self.sides.iter().all(Side::is_idle) && self.wires.iter().all(Wire::is_empty)
    }

    fn show(&self, what: impl FnOnce() -> String) {
        if self.is_shown {
            eprintln!("{:>9} µs  {}", self.clock.micros(), what());
        }
    }

    /// Lets a little time pass, delivers what has arrived, and lets the programs act.
    fn act(&mut self) -> Result<(), Violation> {
        self.clock.advance(&mut self.random);
        if !self.programs.is_calm && self.random.below(150) == 0 {
            self.move_path();
        }
        for at in 0..2 {
            self.wires[at].advance(&self.clock);
            self.sides[at].on_sent(&mut self.wires[at], &self.clock);
            let to = &mut self.sides[1 - at];
            while let Some((channel, message)) = self.wires[at].arrived(&self.clock) {
                to.receive(channel, &message, &mut self.programs, &mut self.random, &self.clock)?;
            }
        }
        for at in 0..2 {
            let side = &mut self.sides[at];
            if let Some(what) = side.act(&mut self.programs, &mut self.random, &self.clock)? {
                self.show(|| format!("side {at}: {what}"));
            }
            let side = &mut self.sides[at];
            side.pump(&mut self.wires[at], &mut self.programs, &mut self.random, &self.clock)?;
            if self.random.below(8) == 0 {
                side.check()?;
            }
        }
        Ok(())
    }

    /// Stops both wires, as if the link moved to another path. The multiplexers notice nothing else
    /// of such a move.
    fn move_path(&mut self) {
        let micros = self.random.below(300_000);
        self.wires.iter_mut().for_each(|wire| wire.block(&self.clock, micros));
        self.programs.block(&self.clock, micros);
        self.moves += 1;
        self.show(|| format!("the path moves, for {micros} µs"));
    }

    /// Checks how the run ended.
    fn end(self) -> Result<Summary, Violation> {
        let mut summary = self.programs.finish()?;
        summary.moves = self.moves;
        for side in &self.sides {
            side.check_end()?;
            let stats = side.mux.stats();
            summary.refused += stats.refused;
            summary.out_of_memory += stats.out_of_memory;
            summary.class_changes += stats.class_changes;
            summary.go_aways += u64::from(side.mux.is_peer_going_away());
        }
        Ok(summary)
    }
}

fn run_seeds(seeds: impl Iterator<Item = u64>, is_shown: bool) -> Summary {
    let mut all = Summary::default();
    for seed in seeds {
        match run(seed, is_shown) {
            Ok(summary) => all.add(&summary),
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
    fn streams_are_carried_whatever_happens_between_them() {
        let all = run_seeds(0..if cfg!(miri) { 2 } else { 40 }, false);
        if cfg!(miri) {
            return;
        }
        let counts = [
            all.streams,
            all.finished,
            all.resets,
            all.refused,
            all.out_of_memory,
            all.class_changes,
            all.moves,
            all.go_aways,
            all.violations,
        ];
        assert!(
            counts.into_iter().all(|count| count > 0),
            "some kind of event never happened: {all:?}"
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
        let mut all = Summary::default();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|at| {
                    let seeds = (first + at..first + count).step_by(threads as usize);
                    scope.spawn(move || run_seeds(seeds, false))
                })
                .collect();
            for worker in workers {
                all.add(&worker.join().expect("no violation"));
            }
        });
        println!(
            "{count} seeds from {first}: {} streams, {} MB, {} path moves, {} class changes, {} \
             violations by hostile peers, each detected; no violation of a rule",
            all.streams,
            all.bytes >> 20,
            all.moves,
            all.class_changes,
            all.violations
        );
    }
}
