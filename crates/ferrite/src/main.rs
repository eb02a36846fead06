//! The `ferrite` command: one file per subcommand, and a few that several share (addresses,
//! choices, percentiles).
//!
//! A command returns what went wrong as an error; this file alone turns it into words and an exit
//! code.
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
mod server;
mod signals;
mod size;

/// RDMA for Redis, Valkey and blobs: tools for the fabric.
///
/// Works on every host: rdma-core is loaded when a command needs it, and a host without RDMA is
/// told what is missing and what to do.
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
    Server(server::Options),
    #[command(hide = true)]
    ServerExec(server::ExecOptions),
}

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| wrong_usage(&error));
    let done = |()| ExitCode::SUCCESS;
    let (outcome, json) = match cli.command {
        Command::Devices(options) => (devices::run(&options).map(done), options.json),
        Command::Pingpong(options) => (pingpong::run(&options).map(done), options.json),
        Command::Bench(options) => (bench::run(&options).map(done), options.json()),
        Command::Gateway(options) => (gateway::run(&options), options.json),
        Command::Relay(options) => (relay::run(&options).map(done), options.json),
        Command::Server(options) => (server::run(&options), options.json),
        Command::ServerExec(options) => (server::exec(&options), false),
    };
    outcome.unwrap_or_else(|error| exit::report(&error, json))
}

/// Help too comes by this way, and is no failure.
fn wrong_usage(error: &clap::Error) -> ! {
    // The server's code for it is another: 2 may be the engine's.
    if error.use_stderr() && std::env::args_os().nth(1).is_some_and(|command| command == "server") {
        let _ = error.print();
        std::process::exit(server::USAGE.into());
    }
    error.exit()
}
