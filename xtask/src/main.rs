//! Tools for developers and CI: `cargo xtask COMMAND`, one file per command.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line tool")]

mod bindings;
mod conformance;
mod fuzz;
mod instructions;
mod interop;
mod lab_test;
mod loom;
mod miri;
mod package;
mod sample;
mod simulate;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

/// Tools for developers and CI
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check rules that the compiler does not check: layers, use of `unsafe`, file rules
    Tidy,
    /// Build the tests that need an RDMA device and run them in the lab's guest
    LabTest(lab_test::Options),
    /// Run the suite of link tests over the fake provider, RDMA, TCP and TLS, and print the counts
    Conformance,
    /// Build Valkey from its Debian source package and run its programs against Ferrite in the
    /// lab's guest
    Interop(lab_test::Options),
    /// Fuzz all decoders of data from peers (needs a C++ compiler)
    Fuzz(fuzz::Options),
    /// Count the instructions per message and compare them with the recorded figures (needs
    /// valgrind)
    Instructions(instructions::Options),
    /// Explore the thread interleavings of the fabric's mailbox and of a link's pending requests,
    /// up to a number of preemptions
    Loom(loom::Options),
    /// Run tests of memory and links under Miri (needs a nightly toolchain with Miri)
    Miri(miri::Options),
    /// Build the packages of a release: deb, rpm, SBOM (needs cargo-deb, cargo-generate-rpm and
    /// cargo-cyclonedx)
    Package(package::Options),
    /// Run the protocols in their simulators: two peers, virtual time, an adversary between them
    Simulate(simulate::Options),
    /// Print comments and user-visible strings at random, for a person to judge how they read
    Sample(sample::Options),
    /// Generate the bindings of ferrite-verbs from the rdma-core headers (for maintainers; needs
    /// bindgen and clang)
    Bindings,
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let done = workspace_root().and_then(|root| match command {
        Command::Tidy => tidy::run(&root),
        Command::LabTest(options) => lab_test::run(&root, &options, &lab_test::Suite::Own),
        Command::Conformance => conformance::run(&root),
        Command::Interop(options) => interop::run(&root, &options),
        Command::Fuzz(options) => fuzz::run(&root, &options),
        Command::Instructions(options) => instructions::run(&root, &options),
        Command::Loom(options) => loom::run(&root, &options),
        Command::Miri(options) => miri::run(&root, &options),
        Command::Package(options) => package::run(&root, &options),
        Command::Simulate(options) => simulate::run(&root, &options),
        Command::Sample(options) => sample::run(&root, &options),
        Command::Bindings => bindings::run(&root).map(|()| ExitCode::SUCCESS),
    });
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}"); // a `Result` from main would print a backtrace too
        ExitCode::FAILURE
    })
}

/// Returns the parent directory of this crate, independent of the working directory.
fn workspace_root() -> anyhow::Result<PathBuf> {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .context("CARGO_MANIFEST_DIR is not set: run this as `cargo xtask`")?;
    let parent = Path::new(&here).parent();
    Ok(parent.context("xtask has no parent directory")?.to_path_buf())
}
