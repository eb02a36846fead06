//! Inputs for `--runs`: mutations of the committed inputs, the same in each run.
//!
//! libFuzzer's own mutations depend on its observations, so they differ from run to run even with a
//! fixed seed: addresses are random, and some targets have threads.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

/// The largest number of mutations of one input.
const MUTATIONS_MAX: u64 = 8;
/// About the largest number of bytes that a mutation removes, repeats or inserts at random. A
/// mutation that continues with the end of another input has no limit.
const CHUNK_MAX: usize = 32;
/// Byte values at which decoders often change their behaviour.
const EDGE_VALUES: [u8; 8] = [0, 1, 0x0A, 0x0D, b'0', 0x7F, 0x80, 0xFF];

/// Replaces the folder `inputs` by `count` mutations of the files in the folder `seeds`.
pub(super) fn write(inputs: &Path, seeds: &Path, count: u32) -> anyhow::Result<()> {
    let seeds = read(seeds)?;
    if inputs.exists() {
        fs::remove_dir_all(inputs)
            .with_context(|| format!("cannot remove {}", inputs.display()))?;
    }
    fs::create_dir_all(inputs).with_context(|| format!("cannot create {}", inputs.display()))?;
    for (number, input) in mutations(&seeds, count).enumerate() {
        let path = inputs.join(format!("{number:06}"));
        fs::write(&path, input).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Returns the files' contents in the order of their names.
fn read(folder: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("no folder {}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    paths.sort();
    ensure!(!paths.is_empty(), "{} has no inputs", folder.display());
    let content = |path| fs::read(path).context("cannot read an input");
    paths.iter().map(content).collect()
}

fn mutations(seeds: &[Vec<u8>], count: u32) -> impl Iterator<Item = Vec<u8>> {
    let mut random = Random(1);
    (0..count as usize).map(move |number| {
        let mut input = seeds[number % seeds.len()].clone();
        for _ in 0..=random.below(MUTATIONS_MAX) {
            mutate(&mut input, seeds, &mut random);
        }
        input
    })
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.index(input.len() + 1);
    let end = (at + 1 + random.index(CHUNK_MAX)).min(input.len());
    match random.below(6) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = EDGE_VALUES[random.index(EDGE_VALUES.len())],
        2 => drop(input.drain(at..end)),
        3 => {
            let chunk = input[at..end].to_vec();
            let to = random.index(input.len() + 1);
            input.splice(to..to, chunk);
        }
        4 => {
            let other = &seeds[random.index(seeds.len())];
            input.truncate(at);
            input.extend_from_slice(&other[random.index(other.len() + 1)..]);
        }
        _ => {
            let bytes: Vec<u8> = (at..=end).map(|_| random.below(256) as u8).collect();
            input.splice(at..at, bytes);
        }
    }
}

/// SplitMix64: small, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn index(&mut self, limit: usize) -> usize {
        self.below(limit as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutations_are_the_same_in_each_run_and_differ_from_each_other() {
        let seeds = [b"hello".to_vec(), b"*1\r\n$4\r\nPING\r\n".to_vec(), Vec::new()];
        let inputs: Vec<_> = mutations(&seeds, 1000).collect();
        assert!(mutations(&seeds, 1000).eq(inputs.iter().cloned()));
        let mut distinct = inputs.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > 800, "only {} of 1000 mutations differ", distinct.len());
    }
}
