//! `ferrite-cli`: what redis-cli does, over RDMA where there is some.
//!
//! ```text
//!   options ─► Settings, Mode            what was typed, checked once
//!   dial    ─► Connection, TransportInfo       RDMA, TCP or a Unix socket, and words for it
//!   server     a connection that comes back; database, transaction, and what is replied to
//!   issue      a command and its replies ─► format ─► stdout
//!   prompt     people: history, completion, hints · lines: commands from a file
//!   pipe · latency · stat · scan · big_keys: the other modes, one file each
//! ```
#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;

use crate::big_keys::Measure;
use crate::dial::Dialer;
use crate::docs::Docs;
use crate::issue::Giver;
use crate::options::{Asked, Options};
use crate::server::Server;
use crate::settings::{Mode, Settings};

mod big_keys;
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
mod prompt;
mod replying;
mod scan;
mod server;
mod settings;
mod split;
mod stat;
mod terminal;
mod uri;

fn main() -> ExitCode {
    // `-h` alone is what people type who want help, also where it means the host.
    let is_cry_for_help = std::env::args_os().skip(1).eq(["-h"]);
    let options = if is_cry_for_help {
        Options::parse_from(["ferrite-cli", "--help"])
    } else {
        Options::parse()
    };
    let outcome = options.check().and_then(|asked| match asked {
        Asked::Version => {
            output::write(format!("ferrite-cli {}\n", env!("CARGO_PKG_VERSION")).as_bytes())
        }
        Asked::Run(settings, mode) => run(*settings, mode),
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn run(settings: Settings, mode: Mode) -> anyhow::Result<()> {
    // One thread: one command at a time.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let dialer = Dialer::new(&settings, matches!(mode, Mode::Prompt));
    let mut server = Server::new(settings, dialer);
    let outcome = match mode {
        Mode::Prompt if std::io::stdin().is_terminal() => prompt::run(&runtime, &mut server),
        Mode::Prompt => lines::run(&runtime, &mut server),
        mode => runtime.block_on(unattended(&mut server, mode)),
    };
    let outcome = outcome.and_then(|()| runtime.block_on(server.settle()));
    // Somebody may still wait for stdin, which would never end.
    runtime.shutdown_background();
    outcome
}

/// Everything that needs nobody at a terminal.
async fn unattended(server: &mut Server, mode: Mode) -> anyhow::Result<()> {
    let connected = server.connect().await;
    if let Mode::Command(words) = mode {
        issue::tell_refusal(connected)?;
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
        return issue::run(server, &words, repeat, Giver::CommandLine).await;
    }
    connected?;
    report_transport(server);
    match mode {
        Mode::Pipe { patience } => pipe::run(server, patience).await,
        Mode::Latency { history } => latency::run(server, history).await,
        Mode::Stat => stat::run(server).await,
        Mode::Scan(scan) => scan::run(server, &scan).await,
        Mode::BigKeys(scan) => big_keys::run(server, &scan, Measure::Elements).await,
        Mode::MemoryKeys(scan, samples) => {
            big_keys::run(server, &scan, Measure::Memory(samples)).await
        }
        Mode::Prompt | Mode::Command(_) => Ok(()), // above
    }
}

/// What carries the connection, on stderr: if that was asked for, or if RDMA was and it became TCP.
fn report_transport(server: &Server) {
    let Some(transport_info) = server.transport_info() else { return };
    if server.settings.verbose || (transport_info.is_fallback && server.settings.is_rdma_asked_for)
    {
        output::tell(&transport_info.words);
    }
}
