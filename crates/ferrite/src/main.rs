//! The `ferrite` command: one file per subcommand, and a few that several share (addresses, choices, percentiles).
//!
//! A command returns what went wrong as an error; this file alone turns it into words and an exit code.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command talks to people: results on stdout, everything else on stderr"
)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod address;
mod bench;
mod choice;
mod devices;
mod exit;
mod gateway;
mod latency;
mod output;
mod pingpong;
mod relay;
mod seconds;
mod size;

/// RDMA for Redis, Valkey and blobs: tools for the fabric.
///
/// Works on every host: rdma-core is loaded when a command needs it, and a host without RDMA is told what is
/// missing and what to do.
#[derive(Parser)]
#[command(name = "ferrite", version, max_term_width = 100, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Devices(devices::Options),
    Pingpong(pingpong::Options),
    Bench(bench::Options),
    Gateway(gateway::Options),
    Relay(relay::Options),
}

fn main() -> ExitCode {
    let (outcome, json) = match Cli::parse().command {
        Command::Devices(options) => (devices::run(&options), options.json),
        Command::Pingpong(options) => (pingpong::run(&options), options.json),
        Command::Bench(options) => (bench::run(&options), options.json()),
        Command::Gateway(options) => (gateway::run(&options), options.json),
        Command::Relay(options) => (relay::run(&options), options.json),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error, json),
    }
}
