//! `cargo xtask loom [--long]`: runs the tests that explore all interleavings of a few threads.
//!
//! These tests are unit tests of ferrite-fabric whose names begin with `loom_`. They are built with
//! `--cfg loom`, which replaces locks and flags by loom's (`crates/ferrite-fabric/src/sync.rs`).
//! They are built without the feature `tokio`, because the crate tokio changes with `--cfg loom`,
//! too. An exploration is complete up to a number of preemptions. Two preemptions find most
//! bugs. Each further one takes about twenty times as long.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Args;

#[derive(Args)]
pub(crate) struct Options {
    /// Explore up to four preemptions, for at most 30 s in each test: about ten minutes in all
    #[arg(long)]
    long: bool,
    /// Number of times that a running thread may be preempted [default: 2; 4 with --long]
    #[arg(long)]
    preemptions: Option<u32>,
    /// Run only tests whose name contains this
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
    let started = Instant::now();
    let output = command.output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    for (what, executions, all) in explored(&stdout) {
        println!("{what:<34} {executions:>10} executions{}", if all { "" } else { ", not all" });
    }
    if !output.status.success() {
        eprintln!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
        return Ok(ExitCode::FAILURE);
    }
    let total: u64 = explored(&stdout).iter().map(|(_, executions, _)| executions).sum();
    anyhow::ensure!(total > 0, "no tests ran");
    println!(
        "loom: {total} executions, {preemptions} preemptions, {} s",
        started.elapsed().as_secs()
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns each exploration with its name, its number of executions, and whether it was complete.
/// Sums up explorations of the same name, which have different settings.
fn explored(stdout: &str) -> Vec<(&str, u64, bool)> {
    let mut found: Vec<(&str, u64, bool)> = Vec::new();
    for line in stdout.lines() {
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
    fn sums_up_explorations_of_the_same_name() {
        let stdout = "running 3 tests\n\nloom: a: 10 executions\n\nloom: b: 1 executions\n\
                      test x ... ok\nloom: a: 5 executions, not all\n";
        assert_eq!(explored(stdout), [("a", 15, false), ("b", 1, true)]);
        assert_eq!(explored("loom: a\n"), []);
    }
}
