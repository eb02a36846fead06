//! The state as text or JSON, for scripts.

use std::fmt::Write as _;

use serde::Serialize;

use super::app::App;
use super::draw::{age, bytes, count};
use super::snapshot::{Rates, Snapshot};
use crate::output;

#[derive(Serialize)]
struct Report<'a> {
    format: u32,
    address: &'a str,
    #[serde(flatten)]
    snapshot: &'a Snapshot,
    #[serde(flatten)]
    rates: &'a Rates,
}

/// Prints the state, if there is one.
pub(super) fn print(app: &App, json: bool) -> anyhow::Result<()> {
    let Some(snapshot) = &app.snapshot else { return Ok(()) };
    let report = Report { format: 1, address: &app.address, snapshot, rates: &app.rates };
    output::print(&report, json, |_| text(app, snapshot))
}

fn text(app: &App, snapshot: &Snapshot) -> String {
    let mut out = format!("{}  {}\n{}\n", app.address, snapshot.program, snapshot.status);
    let _ = writeln!(
        out,
        "commands/s: {} in-process, {} proxied; bytes/s: {} in, {} out",
        count(app.rates.total("called")),
        count(app.rates.total("proxied")),
        bytes(app.rates.total("in_bytes")),
        bytes(app.rates.total("out_bytes"))
    );
    for (name, value) in &snapshot.memory {
        let _ = writeln!(out, "pinned memory, {name}: {}", bytes(*value));
    }
    for (cause, number) in &snapshot.fallbacks {
        let _ = writeln!(out, "fallbacks to TCP, {cause}: {number}");
    }
    for (name, number) in &snapshot.devices {
        let _ = writeln!(out, "device counter, {name}: {number}");
    }
    for row in &snapshot.latency {
        let figures = row.percentiles.iter().map(|(name, us)| format!("{name} {us:.2} µs"));
        let _ = writeln!(out, "latency, {}: {}", row.name, figures.collect::<Vec<_>>().join(", "));
    }
    // An engine may not track latencies. An admin port always has them after the first operation.
    if snapshot.latency.is_empty() && snapshot.sessions.is_some() {
        let _ = writeln!(out, "latency: not reported; see CONFIG GET latency-track*");
    }
    for (transport, number) in &snapshot.transports {
        let _ = writeln!(out, "sessions, {transport}: {number}");
    }
    if snapshot.sessions.is_some() {
        let _ = writeln!(
            out,
            "\n{:>8} {:<24}{:<14}{:<14}{:<6}{:>10}{:>12}{:>12}{:>12}",
            "id", "client", "user", "transport", "path", "age", "in/s", "out/s", "held"
        );
    }
    for session in app.sessions() {
        let (in_rate, out_rate) = app.rates.session(session.id);
        let _ = writeln!(
            out,
            "{:>8} {:<24}{:<14}{:<14}{:<6}{:>10}{:>12}{:>12}{:>12}",
            session.id,
            session.address,
            session.user,
            session.transport,
            session.path,
            age(session.age_s),
            bytes(in_rate),
            bytes(out_rate),
            bytes(session.held_bytes)
        );
    }
    out
}
