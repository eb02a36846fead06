//! `cargo xtask miri [--long]`: the tests of memory, slots and links that Miri can run.
//!
//! Miri comes with nightly compilers only; any that is installed and has it will do, and the pinned
//! one stays what it is. What to know of a run:
//!
//! - Target riscv64: where Miri cannot run the instruction by which a clock is read, a target that
//!   has none is taken. Its C characters are unsigned, as on ARM.
//! - The network card is the fake provider, which makes pointers of the addresses that it is given:
//!   hence the permissive provenance. Files and clocks are the host's.
//! - What Miri does not have is stepped around at `cfg!(miri)`: `timerfd`, `poll`, level-triggered
//!   `epoll`, limits. So who would sleep looks again at once, and deadlines pass only while
//!   somebody looks.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;

#[derive(Args)]
pub(crate) struct Options {
    /// More tests, and several orders of threads for each: about an hour.
    #[arg(long)]
    long: bool,
    /// How many orders of threads to try [default: 1, long 4].
    #[arg(long)]
    seeds: Option<u32>,
}

const TARGET: &str = "riscv64gc-unknown-linux-gnu";

/// Tests by target and filter.
const SHORT: &[(&str, &[&str])] = &[
    ("--lib", &["mem::", "fabric::", "link::"]),
    ("in_flight", &[]),
    ("drivers", &["two_threads_that_block", "one_that_blocks"]),
];
const LONG: &[(&str, &[&str])] = &[("pool", &[]), ("corpus", &[])];

/// The two models of who may have a reference to what.
const MODELS: [(&str, &str); 2] =
    [("stacked borrows", ""), ("tree borrows", "-Zmiri-tree-borrows")];

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let Some(toolchain) = toolchain()? else {
        bail!(
            "no Miri in any installed toolchain: rustup toolchain install nightly --component miri,rust-src"
        );
    };
    let seeds = options.seeds.unwrap_or(if options.long { 4 } else { 1 });
    let more = if options.long { LONG } else { &[] };
    let mut passed = true;
    for (test, filters) in SHORT.iter().chain(more) {
        for seed in 0..seeds {
            // Side by side: a run is one thread.
            let begun = Instant::now();
            let runs = MODELS.map(|(model, flag)| {
                let mut run =
                    command(root, &toolchain, test, filters, &format!("{flag} -Zmiri-seed={seed}"));
                (model, thread::spawn(move || (run.output(), begun.elapsed().as_secs())))
            });
            for (model, run) in runs {
                let (output, seconds) = run.join().expect("no panic");
                let output = output?;
                let said = String::from_utf8_lossy(&output.stdout);
                let ok = output.status.success();
                passed &= ok;
                let verdict = if ok { tests(&said) } else { "FAILED".into() };
                println!("{test:<10} {model:<16} seed {seed}  {seconds:>4} s  {verdict}");
                if !ok {
                    eprintln!("{said}{}", String::from_utf8_lossy(&output.stderr));
                }
            }
        }
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn command(root: &Path, toolchain: &str, test: &str, filters: &[&str], flags: &str) -> Command {
    let mut command = rustup(toolchain);
    command
        .current_dir(root)
        .args(["cargo", "miri", "test", "--quiet", "--locked", "--target", TARGET]);
    command.args([
        "--target-dir",
        "target/miri",
        "--package",
        "ferrite-fabric",
        "--features",
        "fuzzing",
    ]);
    match test {
        "--lib" => command.arg("--lib"),
        test => command.args(["--test", test]),
    };
    command.arg("--").args(filters).args(["--test-threads=1"]);
    command
        .env("MIRIFLAGS", format!("-Zmiri-disable-isolation -Zmiri-permissive-provenance {flags}"));
    command
}

/// `rustup run TOOLCHAIN …`, without what the cargo that runs us has set for its own.
fn rustup(toolchain: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", toolchain]);
    for variable in
        ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"]
    {
        command.env_remove(variable);
    }
    command
}

/// An installed toolchain that has Miri and the sources of the standard library, which it needs.
fn toolchain() -> anyhow::Result<Option<String>> {
    let list = Command::new("rustup")
        .args(["toolchain", "list"])
        .output()
        .context("cannot start rustup")?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let names = list.lines().filter_map(|line| line.split_whitespace().next());
    let has_miri = |name: &&str| {
        let installed = Command::new("rustup")
            .args(["component", "list", "--installed", "--toolchain", name])
            .output();
        let installed =
            installed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let installed = installed.unwrap_or_default();
        ["miri", "rust-src"].iter().all(|part| installed.lines().any(|line| line.starts_with(part)))
    };
    Ok(names.filter(|name| name.starts_with("nightly")).find(has_miri).map(Into::into))
}

/// How many tests passed, by the harness's last line.
fn tests(said: &str) -> String {
    let line = said.lines().rev().find_map(|line| line.strip_prefix("test result: ok. "));
    line.and_then(|line| line.split(';').next()).unwrap_or("passed").to_owned()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_last_line_says_how_many() {
        let said = "running 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored\n\n";
        assert_eq!(super::tests(said), "2 passed");
        assert_eq!(super::tests(""), "passed");
    }
}
