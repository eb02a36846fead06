//! `ferrite server`: a stock engine with our module in it, by one command and one file.

mod config;
mod ending;
mod find;
mod launch;
mod log;
mod notify;
mod plan;
mod ready;
mod secret;
mod supervise;
mod tell;

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use clap::Args;

pub(crate) use ending::{Ending, USAGE};
pub(crate) use launch::{ExecOptions, exec};

use config::Config;
use launch::PrivateDir;
use plan::Plan;
use supervise::Supervisor;

/// `--version` of an engine is a matter of milliseconds.
const VERSION_PATIENCE: Duration = Duration::from_secs(10);

/// Run a Redis or Valkey with RDMA: the engine you have, with our module in it
///
/// Finds the engine and the module, writes the engine's configuration, starts it, says when it is
/// ready and over what clients can come, passes its log on, tells systemd, and ends it in good
/// order. Without --config everything has its default.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The file that says how (packaging/ferrite.toml shows every key)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print what would be run, and end
    #[arg(long)]
    check: bool,
    /// Print one line of JSON when it is ready, when the engine is restarted and when it ends
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite server                                     what is installed; RDMA at port 6380
  ferrite server --config /etc/ferrite.toml --check  is the file right, what does it come to?
  ferrite-cli -h 192.0.2.1 -p 6380 PING              from another host

Signals: SIGTERM and SIGINT end the engine as SHUTDOWN does (it saves); a second one kills it.
  SIGHUP changes nothing. If ferrite itself is killed, the engine gets SIGTERM.

Exit codes: the engine's own (0 after SIGTERM, and after SHUTDOWN by a client);
  128 + N if signal N killed it; 64 wrong usage or file; 69 no RDMA where it is required;
  70 a failure of ferrite's own; 71 engine or module missing, or the engine does not come up.

JSON lines: {event: ready, pid, program, module, unix_socket, engine, tcp_port, status, address,
  devices[], reason}, {event: restarting, code, restart, delay_seconds}, {event: ended, code}.
  With --check: {program, version, module, unix_socket, configuration[], without_effect[]}.
  Failures print {error: {kind, message}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let code = try_run(options).map_err(|error| match error.is::<Ending>() {
        true => error,
        false => Ending::internal(&error).into(),
    })?;
    Ok(ExitCode::from(code))
}

fn try_run(options: &Options) -> anyhow::Result<u8> {
    let config = match &options.config {
        Some(file) => Config::read(file).map_err(Ending::config)?,
        None => Config::default(),
    };
    let file =
        options.config.as_deref().map(|file| format!("{}:", file.display())).unwrap_or_default();
    for what in &config.without_effect {
        log::warning(&format!("{file}{what}"));
    }
    let plan = Plan::new(&config)?;
    // One thread: the engine ends with the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if options.check {
        let version = runtime.block_on(version(&plan.engine))?;
        tell::check(options.json, &plan, &version, &config.without_effect);
        return Ok(0);
    }
    let _directory = plan.runtime_dir.as_deref().map(PrivateDir::make).transpose()?;
    let status =
        runtime.block_on(async { Supervisor::new(&config, &plan, options.json)?.run().await })?;
    let code = ending::code(status);
    log::notice(&format!("the engine has ended {}", ending::how(status)));
    tell::ended(options.json, code);
    Ok(code)
}

/// What the engine says it is.
async fn version(engine: &Path) -> Result<String, Ending> {
    let mut command = tokio::process::Command::new(engine);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let wrong =
        |why: String| Ending::cannot_start(format!("{} --version: {why}", engine.display()));
    let output = tokio::time::timeout(VERSION_PATIENCE, command.output()).await;
    let output =
        output.map_err(|_| wrong("no answer".into()))?.map_err(|error| wrong(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.split_once(" sha=").map_or(said.trim(), |(name, _)| name) {
        "" => Err(wrong(ending::how(output.status))),
        name => Ok(name.into()),
    }
}
