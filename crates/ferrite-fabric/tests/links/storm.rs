//! Storm tests: random operations whose futures are dropped at any moment, on links that break at
//! any moment, to peers that disappear at any moment. Every message that arrives is complete and
//! correct, and in the end all memory is returned.
//!
//! Each message, each region and each cell of a region has a number as its name, and bytes derived
//! from that name. If a buffer were freed or reused while a device has it, bytes of one name would
//! appear under another.
//!
//! Each run prints its seed. `FERRITE_SEED` replays a run as far as timing allows. `FERRITE_STORM`
//! sets the number of operations of the long storm; the default is 100,000, half of that in the lab
//! and over TLS, and a hundredth in an emulated lab. A short storm has a fiftieth of it. For the
//! lab: `cargo xtask lab-test storm --runner "env FERRITE_STORM=100000 FERRITE_SEED=1"`.
#![expect(clippy::print_stdout, reason = "prints the seed and the time that a run took")]

mod peer;
mod run;

use std::time::{Duration, Instant};

use ferrite_fabric::Config;

use super::{Fixture, pair};
use ferrite_testkit::Random;
use run::Storm;

/// Default number of operations in the long storm, before the division by `storm_divisor`.
const OPERATIONS: u64 = 100_000;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn seed() -> u64 {
    number("FERRITE_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.as_nanos() as u64 & 0xffff_ffff)
    })
}

fn operations(fixture: &Fixture) -> u64 {
    number("FERRITE_STORM").unwrap_or(OPERATIONS / fixture.storm_divisor)
}

fn run(fixture: &Fixture, random: Random, config: Config, operations: u64) {
    // A link that is dropped before its messages were received ends only after `close_timeout`. The
    // run waits for such links at its end, so the timeout is short.
    let config = Config { close_timeout: Duration::from_millis(500), ..config };
    let begun = Instant::now();
    let mut storm = Storm::new(fixture, random, config, operations);
    while storm.operations_begun < operations {
        storm.step();
    }
    let report = storm.end();
    println!("{report} in {:.1?}", begun.elapsed());
}

/// One long storm.
pub(crate) fn cancel_storm(fixture: &Fixture) {
    let (seed, operations) = (seed(), operations(fixture));
    println!("FERRITE_SEED={seed} FERRITE_STORM={operations}");
    let config =
        Config { window: 16, send_queue_messages: 64, recv_queue_depth: 16, ..Config::default() };
    run(fixture, Random::new(seed), config, operations);
}

/// Short storms, each with random settings: smallest, usual or largest.
pub(crate) fn storms_with_extreme_settings(fixture: &Fixture) {
    let (seed, operations) = (seed(), operations(fixture) / 50);
    println!("FERRITE_SEED={seed}");
    for storm in 0..6 {
        let mut random = Random::new(seed + storm);
        let mut one_of = |choices: &[u32]| choices[random.below(choices.len() as u64) as usize];
        let config = Config {
            window: one_of(&[2, 16, 64]) as u16,
            recv_buffer_size: one_of(&[256, 8 << 10, 64 << 10]),
            recv_queue_depth: one_of(&[16, 64, 512]),
            send_queue_depth: one_of(&[16, 128]),
            cq_size: one_of(&[32, 16_384]),
            poll_batch: one_of(&[1, 32]) as usize,
            inline_threshold: one_of(&[0, 220]),
            send_queue_messages: one_of(&[4, 64, 1024]) as usize,
            ..Config::default()
        };
        println!("{config:?}");
        run(fixture, random, config, operations);
    }
}

/// Size in bytes of a message's header: its name and its number.
const HEADER: usize = 16;

/// Returns the bytes of a message: its name, its number on its channel, and bytes derived from the
/// name. A message too short for a header has bytes derived from its length.
fn message(name: u64, number: u64, len: usize) -> Vec<u8> {
    if len < HEADER {
        return vec![len as u8 ^ 0x5a; len];
    }
    let mut bytes = Vec::with_capacity(len);
    bytes.extend(name.to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(pair::pattern(name, len - HEADER));
    bytes
}

/// Checks that a message is complete and correct, and returns its number, or `None` if it is too
/// short to have one.
fn check(bytes: &[u8]) -> Option<u64> {
    let field = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let (name, number) = (field(0).filter(|_| bytes.len() >= HEADER), field(8));
    let expected = message(name.unwrap_or_default(), number.unwrap_or_default(), bytes.len());
    assert!(
        bytes == expected,
        "a message of {} bytes with name {name:x?} has foreign bytes",
        bytes.len()
    );
    name.and(number)
}
