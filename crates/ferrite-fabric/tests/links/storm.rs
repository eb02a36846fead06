//! A storm: operations of all kinds whose futures are dropped at any moment, on links that break at any moment, to peers
//! that go at any moment. Whatever arrives whole is what was sent, and in the end everything is back.
//!
//! Each message, each region and each cell of a region has bytes that follow from its name. If a buffer were freed or used
//! again while a device has it, bytes of one would turn up in another.
//!
//! A run is printed with its seed: `FERRITE_SEED` replays it, `FERRITE_STORM` says how many operations. In the lab there
//! are fewer by default; all of them: `cargo xtask lab-test storm --runner "env FERRITE_STORM=100000"`.
#![expect(clippy::print_stdout, reason = "the seed, and how long it took")]

mod harbour;
mod scene;

use std::time::Instant;

use super::random::Random;
use super::{Fixture, pair};
use scene::Scene;

/// Operations of a run.
const OPERATIONS: u64 = 100_000;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

pub(crate) fn cancel_storm(fixture: &Fixture) {
    let seed = number("FERRITE_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |now| now.as_nanos() as u64 & 0xffff_ffff)
    });
    let operations = number("FERRITE_STORM").unwrap_or(OPERATIONS / fixture.storm_part);
    println!("FERRITE_SEED={seed} FERRITE_STORM={operations}");
    let begun = Instant::now();
    let mut scene = Scene::new(fixture, Random::new(seed), operations);
    while scene.begun < operations {
        scene.step();
    }
    let report = scene.end();
    println!("{report} in {:.1?}", begun.elapsed());
}

/// What the header of a message says: who it is.
const HEADER: usize = 16;

/// A message by its name: the name, its number on its channel, and bytes that follow from the name. One that is too short
/// for that has bytes that follow from its length.
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

/// The number of a message that must be wholly itself; `None` if it is too short to have one.
fn check(bytes: &[u8]) -> Option<u64> {
    let field = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let (name, number) = (field(0).filter(|_| bytes.len() >= HEADER), field(8));
    let expected = message(name.unwrap_or_default(), number.unwrap_or_default(), bytes.len());
    assert!(bytes == expected, "a message of {} bytes, said to be {name:x?}, has others' bytes", bytes.len());
    name.and(number)
}
