//! `ferrite server`: runs an unmodified engine with our module, from one command and one file.

mod agent;
mod config;
mod error;
mod events;
mod find;
mod include;
mod launch;
mod log;
mod notify;
mod plan;
mod ready;
mod reload;
mod secret;
mod supervise;

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use ferrite_config::{Setting, exit_code, table};

pub(crate) use error::ServerError;
pub(crate) use launch::{ExecOptions, exec};

use config::Config;
use error::AgentStart;
use launch::PrivateDir;
use plan::Plan;
use supervise::Supervisor;

use crate::agent::check_rdma;
use crate::log as log_lines;
use crate::output::StdoutError;
use crate::settings;

/// How long `--version` of an engine may take. Usually it takes milliseconds.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// Run the installed Redis or Valkey with the Ferrite module loaded
///
/// Finds the engine and the module, generates the engine's configuration and starts the engine.
/// Reports when it is ready and on which address and transport it accepts clients. Passes the
/// engine's log on, notifies systemd, and shuts the engine down in an orderly way. Without --config
/// every setting has its default.
#[derive(Args)]
#[command(after_help = help())]
pub(crate) struct Options {
    /// Configuration file; the packages install /etc/ferrite/ferrite.toml, which has every key
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Also run an agent, with the settings in [agent] (see `ferrite agent --help`)
    #[arg(long)]
    agent: bool,
    /// Check the file, print the command and the engine's configuration, and exit
    #[arg(long)]
    check: bool,
    /// Print a line of JSON when the engine is ready, before a restart and at the end
    #[arg(long)]
    pub(crate) json: bool,
    /// Format of log lines: text or json (default text)
    #[arg(long, value_name = "CHOICE", value_parser = parser(&table::LOG))]
    log: Option<String>,
    /// Lowest level to log: error, warn, info, debug or trace (default info)
    #[arg(long, value_name = "CHOICE", value_parser = parser(&table::LOG_LEVEL))]
    log_level: Option<String>,
}

fn parser(setting: &'static Setting) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| setting.parse(text).map(|value| value.to_string())
}

/// Where the settings come from.
#[derive(Clone, Copy)]
struct Sources<'a>(&'a Options);

impl<'a> Sources<'a> {
    fn file(self) -> Option<&'a Path> {
        self.0.config.as_deref()
    }

    fn flags(self) -> impl Iterator<Item = (&'static Setting, &'a str)> {
        let flags = [(&table::LOG, &self.0.log), (&table::LOG_LEVEL, &self.0.log_level)];
        let flags = flags.map(|(setting, text)| (setting, text.as_deref()));
        let agent = (&table::SERVER_AGENT, self.0.agent.then_some("yes"));
        flags.into_iter().chain([agent]).filter_map(|(setting, text)| Some((setting, text?)))
    }
}

const HELP: &str = "\
Examples:
  ferrite server                                     the installed engine, RDMA on port 6380
  ferrite server --config /etc/ferrite/ferrite.toml --check
  ferrite-cli -h 192.0.2.1 -p 6380 PING              from another host
  ferrite server --config ferrite.toml --agent       with the agent of [agent]: replication and the
                                                     cluster bus over RDMA

Signals: SIGTERM and SIGINT stop the engine as SHUTDOWN does (it saves its data, and the exit code
  is 0); a second signal kills the engine.
  SIGHUP reads the file again and applies the settings that can change; the log names the others.
  If ferrite itself is killed, the engine gets SIGTERM. The agent ends after the engine, and lets
  connections end first if the exit code is 0. If the agent fails, the engine is stopped, too.

JSON lines: {event: ready, pid, program, module, unix_socket, engine, tcp_port, status, address,
  devices[], reason}, {event: restarting, code, restart, delay_seconds}, {event: ended, code}
  (if an engine has been ready).
  With --check: {program, version, module, unix_socket, configuration[], agent?}.
  Failures print {error: {kind, message}}.";

fn help() -> String {
    format!("{HELP}\n\n{}", exit_code::help())
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let code = try_run(options).map_err(|error| {
        let has_own_code =
            error.is::<ServerError>() || error.is::<StdoutError>() || error.is::<AgentStart>();
        if has_own_code { error } else { ServerError::internal(&error).into() }
    })?;
    Ok(ExitCode::from(code))
}

fn try_run(options: &Options) -> anyhow::Result<u8> {
    let sources = Sources(options);
    let config = Config::load(sources).map_err(ServerError::config)?;
    log_lines::install(config.values());
    settings::warn_of_unknown_variables();
    config.warn_of_readable_passwords(sources.file());
    let plan = Plan::new(&config)?;
    // A single thread, because the engine gets SIGTERM when the thread that started it ends.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if options.check {
        let version = runtime.block_on(version(&plan.engine))?;
        config.check_rdma()?;
        let agent = config.agent_setup(&plan.socket).map(|setup| setup()).transpose();
        let agent = agent.context(AgentStart)?;
        agent.as_ref().map_or(Ok(()), check_rdma).context(AgentStart)?;
        events::check(options.json, &plan, &version, agent.as_ref())?;
        return Ok(0);
    }
    let _directory = plan.runtime_dir.as_deref().map(PrivateDir::make).transpose()?;
    let status = runtime
        .block_on(async { Supervisor::new(config, sources, plan, options.json)?.run().await })?;
    let Some(status) = status else { return Ok(0) };
    let code = error::exit_code(status);
    tracing::info!("the engine {}", error::describe_exit(status));
    events::ended(options.json, code);
    Ok(code)
}

/// Returns the engine's name and version, as `--version` prints them.
async fn version(engine: &Path) -> Result<String, ServerError> {
    let mut command = tokio::process::Command::new(engine);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let failed =
        |why: String| ServerError::cannot_start(format!("{} --version: {why}", engine.display()));
    let output = tokio::time::timeout(VERSION_TIMEOUT, command.output()).await;
    let output = output
        .map_err(|_| failed("no answer".into()))?
        .map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.split_once(" sha=").map_or(text.trim(), |(name, _)| name) {
        "" => Err(failed(error::describe_exit(output.status))),
        name => Ok(name.into()),
    }
}
