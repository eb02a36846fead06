//! `cargo xtask loom [--long]`: the tests that go through every order of a few threads.
//!
//! They are unit tests of ferrite-fabric whose names begin with `loom_`, built with `--cfg loom`,
//! which puts loom's locks and flags in the place of the real ones
//! (`crates/ferrite-fabric/src/sync.rs`). Without the feature `tokio`: to that crate the setting
//! means something else. Every order is every order with so many preemptions; two find most of what
//! there is to find, and each more takes about twenty times as long.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Args;

#[derive(Args)]
pub(crate) struct Options {
    /// Four preemptions, up to half a minute for each exploration: about ten minutes in all.
    #[arg(long)]
    long: bool,
    /// How often a thread may be interrupted where it could go on [default: 2, long 4].
    #[arg(long)]
    preemptions: Option<u32>,
    /// Only tests with this in their name.
    filter: Option<String>,
}

const LONG_PREEMPTIONS: u32 = 4;
const LONG_SECONDS: u32 = 30;

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let preemptions =
        options.preemptions.unwrap_or(if options.long { LONG_PREEMPTIONS } else { 2 });
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(root)
        .args(["test", "--quiet", "--locked", "--release", "--package", "ferrite-fabric", "--lib"])
        .args(["--no-default-features", "--target-dir", "target/loom", "--"])
        .args(["loom_", "--nocapture", "--test-threads=1"])
        .args(&options.filter)
        .env("CARGO_ENCODED_RUSTFLAGS", "--cfg\x1Floom")
        .env("LOOM_MAX_PREEMPTIONS", preemptions.to_string());
    if options.long {
        command.env("LOOM_MAX_DURATION", LONG_SECONDS.to_string());
    }
    let begun = Instant::now();
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    for (what, executions, all) in explored(&said) {
        println!("{what:<34} {executions:>10} executions{}", if all { "" } else { ", not all" });
    }
    if !output.status.success() {
        eprintln!("{said}{}", String::from_utf8_lossy(&output.stderr));
        return Ok(ExitCode::FAILURE);
    }
    let total: u64 = explored(&said).iter().map(|(_, executions, _)| executions).sum();
    anyhow::ensure!(total > 0, "no test has run");
    println!(
        "loom: {total} executions, {preemptions} preemptions, {} s",
        begun.elapsed().as_secs()
    );
    Ok(ExitCode::SUCCESS)
}

/// What was explored, how many executions that were, and whether they were all there are. An
/// exploration that is made several times, with different settings, is one line.
fn explored(said: &str) -> Vec<(&str, u64, bool)> {
    let mut found: Vec<(&str, u64, bool)> = Vec::new();
    for line in said.lines() {
        let Some((what, rest)) = line.strip_prefix("loom: ").and_then(|line| line.split_once(": "))
        else {
            continue;
        };
        let Some((executions, end)) = rest.split_once(" executions") else { continue };
        let executions = executions.parse().unwrap_or(0);
        match found.iter_mut().find(|(known, ..)| *known == what) {
            Some((_, sum, all)) => {
                *sum += executions;
                *all &= end.is_empty();
            }
            None => found.push((what, executions, end.is_empty())),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explorations_are_summed_up() {
        let said = "running 3 tests\n\nloom: a: 10 executions\n\nloom: b: 1 executions\ntest x ... ok\n\
                    loom: a: 5 executions, not all\n";
        assert_eq!(explored(said), [("a", 15, false), ("b", 1, true)]);
        assert_eq!(explored("loom: a\n"), []);
    }
}
