//! Events for scripts: one line of JSON on stdout for each.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use super::plan::Plan;
use super::ready::Report;

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
}

/// Prints the result of `--check`: the command and the configuration.
pub(super) fn check(json: bool, plan: &Plan, version: &str) {
    let Plan { engine: program, module, socket: unix_socket, .. } = plan;
    let (module, configuration) = (module.as_deref(), plan.redacted_lines());
    if json {
        print(true, &Check { program, version, module, unix_socket, configuration });
        return;
    }
    println!("engine   {} ({version})", program.display());
    match module {
        Some(module) => println!("module   {}", module.display()),
        None => println!("module   none (RDMA is disabled)"),
    }
    println!("command  {} -", program.display());
    println!("with this on its standard input:");
    for line in &configuration {
        println!("  {line}");
    }
}

fn print(json: bool, line: &impl Serialize) {
    use std::io::Write as _;
    if json && let Ok(text) = serde_json::to_string(line) {
        // A closed stdout must not stop the engine.
        let _ = writeln!(std::io::stdout(), "{text}");
    }
}
