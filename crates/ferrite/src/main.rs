//! The `ferrite` command: one module per subcommand, and a few that several subcommands share
//! (addresses, choices, percentiles).
//!
//! A subcommand returns its failure as an error. Only this file turns it into a message and an exit
//! code.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command prints its results on stdout and everything else on stderr"
)]

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

mod address;
mod admin;
mod bench;
mod choice;
mod config;
mod devices;
mod engine_probe;
mod exit;
mod gateway;
mod latency;
mod output;
mod pingpong;
mod relay;
mod seconds;
mod server;
mod settings;
mod signals;
mod size;

/// RDMA for Redis and Valkey: server, gateway, diagnostics and benchmarks.
///
/// Runs on every host. A command loads rdma-core when it needs it. On a host without RDMA it
/// reports what is missing and how to fix it.
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
    Config(config::Options),
    #[command(hide = true)]
    ServerExec(server::ExecOptions),
}

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| exit_with_usage_error(&error));
    if let Command::Bench(options) = &cli.command
        && let Some(why) = options.contradiction()
    {
        Cli::command().error(clap::error::ErrorKind::ArgumentConflict, why).exit();
    }
    let done = |()| ExitCode::SUCCESS;
    let (outcome, json) = match cli.command {
        Command::Devices(options) => (devices::run(&options).map(done), options.json),
        Command::Pingpong(options) => (pingpong::run(&options).map(done), options.json),
        Command::Bench(options) => (bench::run(&options).map(done), options.json()),
        Command::Gateway(options) => (gateway::run(&options), options.json),
        Command::Relay(options) => (relay::run(&options).map(done), options.json),
        Command::Server(options) => (server::run(&options), options.json),
        Command::Config(options) => (config::run(&options), options.json()),
        Command::ServerExec(options) => (server::exec(&options), false),
    };
    outcome.unwrap_or_else(|error| exit::report(&error, json))
}

/// Prints the error and exits. clap also returns `--help` and `--version` this way; they exit with
/// code 0.
fn exit_with_usage_error(error: &clap::Error) -> ! {
    // `ferrite server` passes the engine's exit code on, and 2 may be one of these.
    if error.use_stderr() && std::env::args_os().nth(1).is_some_and(|command| command == "server") {
        let _ = error.print();
        std::process::exit(server::USAGE.into());
    }
    error.exit()
}
