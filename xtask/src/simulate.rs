//! `cargo xtask simulate --seeds N`: runs the link protocol in the simulator
//! (`crates/ferrite-fabric/src/link/simulation.rs`), once for each seed.
//!
//! The simulator is a unit test of ferrite-fabric, because it drives the private core of a link. It
//! is built in release mode, and reads its parameters from environment variables.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::Args;

const TEST: &str = "link::simulation::tests::seeds";

#[derive(Args)]
pub(crate) struct Options {
    /// Number of seeds to run
    #[arg(long, default_value_t = 10_000, conflicts_with = "seed")]
    seeds: u64,
    /// First seed to run
    #[arg(long, default_value_t = 0, conflicts_with = "seed")]
    first: u64,
    /// Run only this seed, and print each event
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(root)
        .args(["test", "--quiet", "--locked", "--release", "--package", "ferrite-fabric", "--lib"])
        .args(["--all-features", "--", "--exact", TEST, "--ignored", "--nocapture"])
        .env("RUST_BACKTRACE", "0");
    match options.seed {
        Some(seed) => command.env("FERRITE_SEED", seed.to_string()),
        None => command
            .env_remove("FERRITE_SEED")
            .env("FERRITE_SEEDS", options.seeds.to_string())
            .env("FERRITE_FIRST_SEED", options.first.to_string()),
    };
    let started = Instant::now();
    if !command.status()?.success() {
        return Ok(ExitCode::FAILURE);
    }
    println!("simulate: {} s, build included", started.elapsed().as_secs());
    Ok(ExitCode::SUCCESS)
}
