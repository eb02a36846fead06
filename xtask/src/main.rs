//! What developers and CI run besides cargo itself: `cargo xtask COMMAND`, one file per command.
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
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

/// What developers and CI run besides cargo itself.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check what the compiler does not: layers, where `unsafe` stands, file rules.
    Tidy,
    /// Build the tests that need an RDMA device and run them in the lab's guest.
    LabTest(lab_test::Options),
    /// Run the one suite of links over the fake provider, RDMA, TCP and TLS, and print the counts
    /// of each.
    Conformance,
    /// Build Valkey from its Debian source package and run its programs against Ferrite in the
    /// lab's guest.
    Interop(lab_test::Options),
    /// Give every decoder of what peers send any bytes, for a while (needs a C++ compiler).
    Fuzz(fuzz::Options),
    /// Count the instructions that a message costs, and compare with what is recorded (needs
    /// valgrind).
    Instructions(instructions::Options),
    /// Go through every order in which threads can meet at the engine's mailbox and a link's
    /// tickets.
    Loom(loom::Options),
    /// Run tests of memory and links under Miri (needs a nightly toolchain that has it).
    Miri(miri::Options),
    /// Generate ferrite-verbs' bindings from the rdma-core headers (maintainers; needs bindgen and
    /// clang).
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
        Command::Bindings => bindings::run(&root).map(|()| ExitCode::SUCCESS),
    });
    done.unwrap_or_else(|error| {
        eprintln!("error: {error:#}"); // without the backtrace that `Result` from main prints
        ExitCode::FAILURE
    })
}

/// The directory above this crate, wherever cargo was called.
fn workspace_root() -> anyhow::Result<PathBuf> {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").context("call this as `cargo xtask`")?;
    let parent = Path::new(&here).parent();
    Ok(parent.context("xtask has no parent directory")?.to_path_buf())
}
