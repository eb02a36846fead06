//! `ferrite-cli`: redis-cli's features, over RDMA where available.
//!
//! ```text
//!   options ─► Settings, Mode              the command line, checked once
//!   dial    ─► Connection, TransportInfo   connects over RDMA, TCP or a Unix socket
//!   server     reconnects; tracks the database, the transaction and CLIENT REPLY
//!   cluster    follows redirects to other nodes
//!   issue      runs a command ─► format ─► stdout
//!   prompt     commands from a terminal: history, completion, hints
//!   lines      commands from stdin, one per line
//!   pipe · latency · stat · scan · big_keys: the other modes, one file each
//! ```
#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use ferrite_config::manuals;

use crate::big_keys::Measure;
use crate::command_source::CommandSource;
use crate::dial::Dialer;
use crate::docs::Docs;
use crate::options::{Action, Options};
use crate::server::Server;
use crate::settings::{Mode, Settings};

mod big_keys;
mod cluster;
mod command_source;
mod connection;
mod dial;
mod docs;
mod exit;
mod format;
mod issue;
mod latency;
mod lines;
mod options;
mod output;
mod pipe;
mod progress;
mod prompt;
mod replying;
mod scan;
mod server;
mod settings;
mod stat;
mod terminal;
mod unsupported;

fn main() -> ExitCode {
    if let Some(directory) = manuals::requested(std::env::args_os()) {
        return match manuals::write(Options::command(), &directory) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => exit::report(&error.into()),
        };
    }
    // People who want help type `-h` alone, although it is the option for the host.
    let is_only_h = std::env::args_os().skip(1).eq(["-h"]);
    let options = if is_only_h {
        Options::parse_from(["ferrite-cli", "--help"])
    } else {
        Options::try_parse().unwrap_or_else(|error| unsupported::exit(&error))
    };
    let outcome = options.into_action().and_then(|action| match action {
        Action::Version => {
            let build = ferrite_config::build!("ferrite-cli");
            output::write(build.describe(&ferrite_fabric::rdma_core()).as_bytes())
        }
        Action::Run(settings, mode) => run(*settings, mode),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn run(settings: Settings, mode: Mode) -> anyhow::Result<()> {
    // One thread is enough for one command at a time.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let dialer = Dialer::new(&settings, matches!(mode, Mode::Prompt));
    let mut server = Server::new(settings, dialer);
    let outcome = match mode {
        Mode::Prompt if std::io::stdin().is_terminal() => prompt::run(&runtime, &mut server),
        Mode::Prompt => lines::run(&runtime, &mut server),
        mode => runtime.block_on(run_unattended(&mut server, mode)),
    };
    let outcome = outcome.and_then(|()| runtime.block_on(server.confirm_unanswered()));
    // A task may still be blocked reading stdin. Does not wait for this task.
    runtime.shutdown_background();
    outcome
}

/// Runs all modes except the prompt.
async fn run_unattended(server: &mut Server, mode: Mode) -> anyhow::Result<()> {
    let connected = server.connect().await;
    if let Mode::Command(words) = mode {
        issue::report_refusal(connected)?;
        report_transport(server);
        if matches!(words[0].to_ascii_lowercase().as_slice(), b"help" | b"?") {
            return output::write_own(
                Docs::fetch(server)
                    .await
                    .help(&words[1..], std::io::stdout().is_terminal())
                    .as_bytes(),
            );
        }
        let repeat = server.settings.repeat;
        return issue::run(server, &words, repeat, CommandSource::CommandLine).await;
    }
    connected?;
    report_transport(server);
    match mode {
        Mode::Pipe { reply_timeout } => pipe::run(server, reply_timeout).await,
        Mode::Latency { history } => latency::run(server, history).await,
        Mode::Stat => stat::run(server).await,
        Mode::Scan(scan) => scan::run(server, &scan).await,
        Mode::BigKeys(scan) => big_keys::run(server, &scan, Measure::Elements).await,
        Mode::MemoryKeys(scan, samples) => {
            big_keys::run(server, &scan, Measure::Memory(samples)).await
        }
        Mode::Prompt | Mode::Command(_) => Ok(()), // handled elsewhere
    }
}

/// Prints the transport of the connection on stderr with `--verbose`. Also prints it if `--rdma` or
/// the URI sets the RDMA policy and the connection has fallen back to TCP. In other cases,
/// [`Server::connect`] warns of a fallback if stderr is a terminal or a password is set.
fn report_transport(server: &Server) {
    let Some(transport_info) = server.transport_info() else { return };
    let is_fallback = transport_info.is_fallback && server.settings.is_rdma_explicit;
    if server.settings.verbose || is_fallback {
        output::write_stderr(&transport_info.description);
    }
}
