//! The `ferrite` command. Each subcommand has a module; a few modules are shared by several
//! subcommands (addresses, choices, percentiles).
//!
//! Most subcommands return a failure as an error. `exit.rs` turns it into a message and an exit
//! code.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stderr,
    reason = "a command prints its results on stdout and everything else on stderr"
)]

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use ferrite_config::{exit_code, manuals};

mod address;
mod admin;
mod agent;
mod bench;
mod choice;
mod config;
mod devices;
mod engine_client;
mod engine_probe;
mod exit;
mod gateway;
mod latency;
mod log;
mod output;
mod pingpong;
mod redirection_state;
mod relay;
mod reload;
mod seconds;
mod server;
mod settings;
mod signals;
mod size;
mod top;

/// RDMA for Redis and Valkey: server, gateway, diagnostics and benchmarks.
///
/// Runs on every host. A command loads rdma-core when it needs it. On a host without RDMA it
/// reports what is missing and how to fix it.
#[derive(Parser)]
#[command(name = "ferrite", version, max_term_width = 100, after_help = exit_code::help())]
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
    Agent(agent::Options),
    Server(server::Options),
    Top(top::Options),
    Config(config::Options),
}

fn main() -> ExitCode {
    if let Some(directory) = manuals::requested(std::env::args_os()) {
        let written = manuals::write(Cli::command(), &directory).map(|()| ExitCode::SUCCESS);
        return written.unwrap_or_else(|error| exit::report(&error.into(), false));
    }
    if let Some(options) = server::ExecOptions::requested(std::env::args_os()) {
        return server::exec(&options).unwrap_or_else(|error| exit::report(&error, false));
    }
    let cli = Cli::try_parse_from(with_json_last(std::env::args_os().collect()))
        .unwrap_or_else(|error| exit_with_usage_error(&error));
    if let Command::Bench(options) = &cli.command
        && let Some(why) = options.contradiction()
    {
        Cli::command().error(ErrorKind::ArgumentConflict, why).exit();
    }
    let done = |()| ExitCode::SUCCESS;
    let (outcome, json) = match cli.command {
        Command::Devices(options) => (devices::run(&options).map(done), options.json),
        Command::Pingpong(options) => (pingpong::run(&options).map(done), options.json),
        Command::Bench(options) => (bench::run(&options), options.json()),
        Command::Gateway(options) => (gateway::run(&options), options.json),
        Command::Relay(options) => (relay::run(&options).map(done), options.json),
        Command::Agent(options) => (agent::run(&options), options.json()),
        Command::Server(options) => (server::run(&options), options.json),
        Command::Top(options) => (top::run(&options).map(done), options.json),
        Command::Config(options) => (config::run(&options), options.json()),
    };
    outcome.unwrap_or_else(|error| exit::report(&error, json))
}

/// Prints the error and exits. clap also returns `--help` and `--version` this way; they exit with
/// code 0.
fn exit_with_usage_error(error: &clap::Error) -> ! {
    if error.kind() == ErrorKind::DisplayVersion {
        let version = ferrite_config::build!("ferrite").describe(&ferrite_verbs::rdma_core());
        match output::write(&version) {
            Ok(()) => std::process::exit(0),
            Err(error) => {
                exit::report(&error.into(), false);
                std::process::exit(exit_code::FAILURE.into());
            }
        }
    }
    error.exit()
}

/// Moves `--json` after the commands, where clap expects it: `ferrite --json config check FILE`.
fn with_json_last(mut words: Vec<OsString>) -> Vec<OsString> {
    let is_misplaced = match words.get(1..) {
        Some([first, _, ..]) if first == "--json" => Some(1),
        Some([first, second, third, ..]) if first == "config" && second == "--json" => {
            (third == "check").then_some(2)
        }
        _ => None,
    };
    if let Some(at) = is_misplaced {
        let json = words.remove(at);
        // Words after `--` are not options of ferrite.
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        words.insert(end, json);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_json_behind_the_commands() {
        let moved = |text: &str| {
            let words = text.split(' ').map(OsString::from).collect();
            let words = with_json_last(words).into_iter();
            words.map(|word| word.into_string().expect("text")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(moved("ferrite --json config check x"), "ferrite config check x --json");
        assert_eq!(moved("ferrite config --json check x"), "ferrite config check x --json");
        assert_eq!(moved("ferrite --json config -- a 1"), "ferrite config --json -- a 1");
        for unchanged in ["ferrite", "ferrite --json", "ferrite config --json", "ferrite bench kv"]
        {
            assert_eq!(moved(unchanged), unchanged);
        }
        let cli = Cli::try_parse_from(with_json_last(
            ["ferrite", "--json", "config", "check", "x"].map(OsString::from).to_vec(),
        ));
        assert!(cli.is_ok_and(|cli| matches!(cli.command, Command::Config(_))));
    }
}
