//! `cargo xtask simulate --seeds N`: runs the protocols in their simulators, once for each seed.
//!
//! ```text
//!   link   crates/ferrite-fabric/src/link/simulation.rs   links that change their path
//!   mux    crates/ferrite-proto/src/mux/simulation.rs     many streams over one link
//! ```
//!
//! The simulators are unit tests, because they drive private cores. They are built in release mode,
//! and read their parameters from environment variables.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::{Args, ValueEnum};

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Protocol {
    /// Links
    Link,
    /// The multiplexer
    Mux,
}

impl Protocol {
    fn name(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Mux => "mux",
        }
    }

    /// Returns the package and the test of the simulator.
    fn test(self) -> (&'static str, &'static str) {
        match self {
            Self::Link => ("ferrite-fabric", "link::simulation::tests::seeds"),
            Self::Mux => ("ferrite-proto", "mux::simulation::tests::seeds"),
        }
    }
}

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
    /// Run only this simulator [default: all]
    #[arg(long)]
    only: Option<Protocol>,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    for protocol in [Protocol::Link, Protocol::Mux] {
        if options.only.is_none_or(|only| only == protocol) && !simulate(root, options, protocol)? {
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs one simulator. Returns whether no rule was violated.
fn simulate(root: &Path, options: &Options, protocol: Protocol) -> anyhow::Result<bool> {
    let (package, test) = protocol.test();
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(root)
        .args(["test", "--quiet", "--locked", "--release", "--package", package, "--lib"])
        .args(["--all-features", "--", "--exact", test, "--ignored", "--nocapture"])
        .env("RUST_BACKTRACE", "0");
    match options.seed {
        Some(seed) => command.env("FERRITE_SEED", seed.to_string()),
        None => command
            .env_remove("FERRITE_SEED")
            .env("FERRITE_SEEDS", options.seeds.to_string())
            .env("FERRITE_FIRST_SEED", options.first.to_string()),
    };
    let started = Instant::now();
    let has_passed = command.status()?.success();
    if has_passed {
        let seconds = started.elapsed().as_secs();
        println!("simulate {}: {seconds} s, build included", protocol.name());
    }
    Ok(has_passed)
}
