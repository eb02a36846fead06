//! Events for scripts: one line of JSON on stdout for each.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use super::plan::Plan;
use super::ready::Report;
use crate::agent::Setup;
use crate::output;

#[derive(Serialize)]
struct Ready<'a> {
    event: &'static str,
    pid: i32,
    program: &'a Path,
    module: Option<&'a Path>,
    unix_socket: &'a Path,
    #[serde(flatten)]
    report: &'a Report,
}

pub(super) fn ready(json: bool, plan: &Plan, pid: i32, report: &Report) {
    let Plan { engine: program, module, socket: unix_socket, .. } = plan;
    let line =
        Ready { event: "ready", pid, program, module: module.as_deref(), unix_socket, report };
    print(json, &line);
}

#[derive(Serialize)]
struct Restarting {
    event: &'static str,
    code: u8,
    restart: u32,
    delay_seconds: f64,
}

/// Prints the event before a restart. `code` is the exit code that `ferrite server` would have
/// without restarts.
pub(super) fn restarting(json: bool, code: u8, restart: u32, delay: Duration) {
    print(
        json,
        &Restarting { event: "restarting", code, restart, delay_seconds: delay.as_secs_f64() },
    );
}

#[derive(Serialize)]
struct Ended {
    event: &'static str,
    code: u8,
}

pub(super) fn ended(json: bool, code: u8) {
    print(json, &Ended { event: "ended", code });
}

#[derive(Serialize)]
struct Check<'a> {
    program: &'a Path,
    version: &'a str,
    module: Option<&'a Path>,
    unix_socket: &'a Path,
    configuration: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
}

/// Prints the result of `--check`: the command and the configuration.
pub(super) fn check(
    json: bool,
    plan: &Plan,
    version: &str,
    agent: Option<&Setup>,
) -> anyhow::Result<()> {
    let Plan { engine: program, module, socket: unix_socket, .. } = plan;
    let (module, configuration) = (module.as_deref(), plan.redacted_lines());
    let agent = agent.map(Setup::describe);
    let check = Check { program, version, module, unix_socket, configuration, agent };
    if json {
        return Ok(output::write(&format!("{}\n", serde_json::to_string(&check)?))?);
    }
    output::print(&check, false, |check| {
        let (program, lines) = (program.display(), check.configuration.iter());
        let module = match module {
            Some(module) => module.display().to_string(),
            None => "none (RDMA is disabled)".into(),
        };
        let agent = check.agent.as_ref().map(|agent| format!("agent    {agent}\n"));
        let agent = agent.unwrap_or_default();
        let lines: String = lines.map(|line| format!("  {line}\n")).collect();
        format!(
            "engine   {program} ({version})\nmodule   {module}\n{agent}command  {program} -\n\
             with this on its standard input:\n{lines}"
        )
    })
}

fn print(json: bool, line: &impl Serialize) {
    if json {
        output::print_event(line);
    }
}
