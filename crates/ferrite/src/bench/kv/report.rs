//! The result, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::load::{Run, TransportInfo};
use super::{Options, Test};
use crate::choice::name;
use crate::latency::{Latency, RoundTrips};
use crate::output;

/// The result of one test.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    test: Test,
    seconds: f64,
    requests: u64,
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
    requests_per_s: f64,
    latency_us: Latency,
    #[serde(skip_serializing_if = "Option::is_none")]
    server_cpu_us_per_request: Option<f64>,
    #[serde(skip_serializing_if = "is_zero")]
    late: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Row {
    pub(super) fn new(test: Test, run: &Run, server_cpu_us_per_request: Option<f64>) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 requests")]
        let requests_per_s = run.requests as f64 / run.seconds.max(1e-9);
        Self {
            test,
            seconds: run.seconds,
            requests: run.requests,
            errors: run.errors,
            first_error: run.first_error.clone(),
            requests_per_s,
            latency_us: Latency::of(
                &RoundTrips { ticks: run.latency.clone(), us_per_tick: 1e-3 },
                1.0,
            ),
            server_cpu_us_per_request,
            late: run.late,
        }
    }
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    format: u32,
    transport: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fallback: Option<String>,
    /// Whether the device is emulated in software.
    #[serde(skip)]
    software: bool,
    connections: u32,
    threads: u32,
    pipeline: u32,
    keys: u32,
    key_prefix: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    zipf: Option<f64>,
    size_bytes: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_per_s: Option<u64>,
    results: Vec<Row>,
}

pub(super) fn print(
    options: &Options,
    key_prefix: &str,
    transport_info: Option<TransportInfo>,
    results: Vec<Row>,
) -> anyhow::Result<()> {
    let TransportInfo { transport, device, software, fallback } =
        transport_info.unwrap_or(TransportInfo {
            transport: "nothing".into(),
            device: None,
            software: false,
            fallback: None,
        });
    let report = Report {
        format: 1,
        transport,
        device,
        software,
        fallback,
        connections: options.connections,
        threads: options.threads,
        pipeline: options.pipeline,
        keys: options.keys,
        key_prefix,
        zipf: options.zipf,
        size_bytes: options.size,
        rate_per_s: options.rate,
        results,
    };
    output::print(&report, options.json, text)
}

fn text(report: &Report<'_>) -> String {
    let mut out = String::new();
    let device = report.device.as_ref().map_or(String::new(), |device| format!(" on {device}"));
    let _ = writeln!(
        out,
        "over {}{device}: {} connections, pipeline {}, {} bytes, {} keys",
        report.transport, report.connections, report.pipeline, report.size_bytes, report.keys
    );
    if let Some(fallback) = &report.fallback {
        let _ = writeln!(out, "note: {fallback}");
    }
    let _ = writeln!(
        out,
        "\n{:<6}{:>12}{:>10}{:>10}{:>10}{:>10}{:>10}{:>8}",
        "test", "requests/s", "p50 µs", "p99 µs", "p99.9 µs", "max µs", "CPU µs", "errors"
    );
    for row in &report.results {
        let cpu = row.server_cpu_us_per_request.map_or("–".to_owned(), |us| format!("{us:.1}"));
        let Latency { p50, p99, p99_9, max, .. } = &row.latency_us;
        let _ = writeln!(
            out,
            "{:<6}{:>12.0}{p50:>10.1}{p99:>10.1}{p99_9:>10.1}{max:>10.0}{cpu:>10}{:>8}",
            name(&row.test),
            row.requests_per_s,
            row.errors
        );
        if let Some(error) = &row.first_error {
            let _ = writeln!(out, "      first error: {error}");
        }
        if row.late > 0 {
            let _ = writeln!(
                out,
                "      {} of {} were sent later than due: the rate is too high",
                row.late, row.requests
            );
        }
    }
    if report.software {
        let _ = writeln!(
            out,
            "\nSoftware device: compare results of one run only; they say nothing about hardware"
        );
    }
    out
}
