//! `cargo xtask miri [--long]`: runs the tests of memory, slots and links that Miri supports.
//!
//! Only nightly compilers include Miri. Any installed nightly with Miri will do. The pinned
//! compiler stays unchanged. Properties of a run:
//!
//! - The target is riscv64. On x86, the code reads the CPU's counter with an instruction that Miri
//!   cannot run. On riscv64 it reads the system's clock. C's `char` is unsigned there, as on ARM.
//! - The RDMA device is the fake provider, which turns addresses into pointers. That needs
//!   permissive provenance. Files and clocks are the host's.
//! - `cfg!(miri)` avoids what Miri lacks: `timerfd`, `poll`, level-triggered `epoll`, and resource
//!   limits. So a thread polls instead of sleeping, and only a thread that polls notices that a
//!   deadline has passed.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;

#[derive(Args)]
pub(crate) struct Options {
    /// Run more tests, each with several thread schedules: about an hour
    #[arg(long)]
    long: bool,
    /// Number of thread schedules to try [default: 1; 4 with --long]
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

/// The two aliasing models.
const MODELS: [(&str, &str); 2] =
    [("stacked borrows", ""), ("tree borrows", "-Zmiri-tree-borrows")];

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<ExitCode> {
    let Some(toolchain) = toolchain()? else {
        bail!(
            "no installed toolchain has Miri: \
             rustup toolchain install nightly --component miri,rust-src"
        );
    };
    let seeds = options.seeds.unwrap_or(if options.long { 4 } else { 1 });
    let more = if options.long { LONG } else { &[] };
    let mut passed = true;
    for (test, filters) in SHORT.iter().chain(more) {
        for seed in 0..seeds {
            // Runs both models in parallel, because Miri uses one CPU.
            let started = Instant::now();
            let runs = MODELS.map(|(model, flag)| {
                let mut run =
                    command(root, &toolchain, test, filters, &format!("{flag} -Zmiri-seed={seed}"));
                (model, thread::spawn(move || (run.output(), started.elapsed().as_secs())))
            });
            for (model, run) in runs {
                let (output, seconds) = run.join().expect("no panic");
                let output = output?;
                let stdout = String::from_utf8_lossy(&output.stdout);
                let ok = output.status.success();
                passed &= ok;
                let verdict = if ok { tests(&stdout) } else { "FAILED".into() };
                println!("{test:<10} {model:<16} seed {seed}  {seconds:>4} s  {verdict}");
                if !ok {
                    eprintln!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
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

/// Returns `rustup run TOOLCHAIN …`, without the variables that the cargo of this xtask has set.
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

/// Returns an installed toolchain with Miri and the sources of the standard library, which Miri
/// needs.
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

/// Returns how many tests passed, from the last line of the test harness.
fn tests(stdout: &str) -> String {
    let line = stdout.lines().rev().find_map(|line| line.strip_prefix("test result: ok. "));
    line.and_then(|line| line.split(';').next()).unwrap_or("passed").to_owned()
}

#[cfg(test)]
mod tests {
    #[test]
    fn reads_the_number_of_passed_tests() {
        let stdout = "running 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored\n\n";
        assert_eq!(super::tests(stdout), "2 passed");
        assert_eq!(super::tests(""), "passed");
    }
}
