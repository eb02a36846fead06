//! The result, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::dial::TransportInfo;
use super::measure::{Measured, Series};
use super::{Options, origin};
use crate::exit::Failure;
use crate::latency::{Latency, RoundTrips, two_decimals};
use crate::output;

/// The share of late requests above which the report says that the rate is too high. A smaller
/// share can come from a few pauses of the machine.
const LATE_SHARE: f64 = 0.01;

/// The result of one test over one transport.
#[derive(Debug, Serialize)]
struct Row {
    test: String,
    transport: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// Whether the test ran to its end.
    complete: bool,
    #[serde(serialize_with = "two_decimals")]
    seconds: f64,
    requests: u64,
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
    #[serde(serialize_with = "two_decimals")]
    requests_per_s: f64,
    latency_us: Latency,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "optional_two_decimals")]
    server_cpu_us_per_request: Option<f64>,
    #[serde(skip_serializing_if = "is_zero")]
    late: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[expect(clippy::ref_option, reason = "serde requires this signature")]
fn optional_two_decimals<S: serde::Serializer>(
    figure: &Option<f64>,
    to: S,
) -> Result<S::Ok, S::Error> {
    two_decimals(&figure.unwrap_or(0.0), to)
}

impl Row {
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 requests")]
    fn new(Series { test, run, server_cpu_us, is_complete }: &Series) -> Self {
        let info = run.transport_info.as_ref();
        Self {
            test: test.clone(),
            transport: info.map_or_else(|| "nothing".into(), |info| info.transport.clone()),
            device: info.and_then(|info| info.device.clone()),
            complete: *is_complete,
            seconds: run.seconds,
            requests: run.requests,
            errors: run.errors,
            first_error: run.first_error.clone(),
            requests_per_s: run.requests as f64 / run.seconds.max(1e-9),
            latency_us: Latency::of(
                &RoundTrips { ticks: run.latency.clone(), us_per_tick: 1e-3 },
                1.0,
            ),
            // The time includes the warm-up, so it is divided by all requests.
            server_cpu_us_per_request: server_cpu_us.map(|us| us / run.all_requests.max(1) as f64),
            late: run.late,
        }
    }
}

/// Figures of one transport divided by those of another.
#[derive(Debug, Serialize)]
struct Ratio {
    test: String,
    transport: String,
    to: String,
    #[serde(serialize_with = "two_decimals")]
    requests_per_s: f64,
    #[serde(serialize_with = "two_decimals")]
    p50: f64,
    #[serde(serialize_with = "two_decimals")]
    p99: f64,
}

impl Ratio {
    fn new(row: &Row, to: &Row) -> Self {
        let by = |figure: fn(&Row) -> f64| figure(row) / figure(to).max(1e-9);
        Self {
            test: row.test.clone(),
            transport: row.transport.clone(),
            to: to.transport.clone(),
            requests_per_s: by(|row| row.requests_per_s),
            p50: by(|row| row.latency_us.p50),
            p99: by(|row| row.latency_us.p99),
        }
    }
}

/// The result of a benchmark.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    format: u32,
    version: &'static str,
    date: &'static str,
    command_line: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    transport: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fallback: Option<String>,
    /// Whether a device is emulated in software.
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ratios: Vec<Ratio>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
}

impl<'a> Report<'a> {
    pub(super) fn new(options: &Options, key_prefix: &'a str, measured: &Measured) -> Self {
        let mut infos = measured.series.iter().filter_map(|one| one.run.transport_info.as_ref());
        let software = infos.clone().any(|info| info.software);
        let info = infos.next().filter(|_| options.compare.is_empty());
        let none = TransportInfo {
            transport: "nothing".into(),
            device: None,
            software: false,
            fallback: None,
            observer: None,
        };
        let TransportInfo { transport, device, fallback, .. } = info.unwrap_or(&none).clone();
        let results: Vec<Row> = measured.series.iter().map(Row::new).collect();
        let pairs = results.windows(2).filter(|pair| {
            !options.compare.is_empty() && pair[0].test == pair[1].test && pair[1].complete
        });
        Self {
            format: 1,
            version: origin::version(),
            date: origin::date(),
            command_line: origin::command_line(),
            transport: options.compare.is_empty().then_some(transport),
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
            ratios: pairs.map(|pair| Ratio::new(&pair[1], &pair[0])).collect(),
            results,
            error: measured.failure.as_ref().map(Failure::from_error),
        }
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        output::print(self, json, Self::text)
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Describes the load in one line.
    pub(super) fn title(&self) -> String {
        let over = match (&self.transport, self.results.as_slice()) {
            (Some(transport), _) => transport.clone(),
            (None, [first, second, ..]) => format!("{} and {}", first.transport, second.transport),
            (None, rows) => rows.first().map_or_else(String::new, |row| row.transport.clone()),
        };
        let mut devices: Vec<_> =
            self.results.iter().filter_map(|row| row.device.clone()).collect();
        devices.dedup();
        let device = devices.first().map_or(String::new(), |device| format!(" on {device}"));
        let rate = self.rate_per_s.map_or(String::new(), |rate| format!(", {rate} requests/s"));
        format!(
            "over {over}{device}: {} connections, pipeline {}, {} bytes, {} keys{rate}",
            self.connections, self.pipeline, self.size_bytes, self.keys
        )
    }

    fn text(&self) -> String {
        let mut out = self.title() + "\n";
        if let Some(fallback) = &self.fallback {
            let _ = writeln!(out, "note: {fallback}");
        }
        out.push('\n');
        self.table(&mut out);
        if !self.ratios.is_empty() {
            out.push('\n');
        }
        for Ratio { test, transport, to, requests_per_s, p50, p99 } in &self.ratios {
            let _ = writeln!(
                out,
                "{test}: {transport} has {requests_per_s:.2} times the requests/s of {to}, \
                 {p50:.2} times its p50, {p99:.2} times its p99"
            );
        }
        if self.software {
            let _ = writeln!(
                out,
                "\nSoftware device: compare results of one run only; they say nothing about hardware"
            );
        }
        out
    }

    fn table(&self, out: &mut String) {
        let width =
            |cells: &dyn Fn(&Row) -> usize| self.results.iter().map(cells).max().unwrap_or(0);
        let test_width = width(&|row| row.test.chars().count()).max(4) + 2;
        let transport_width = match self.transport {
            Some(_) => 0, // the title names the transport
            None => width(&|row| row.transport.chars().count()).max(9) + 2,
        };
        let has_cpu = self.results.iter().any(|row| row.server_cpu_us_per_request.is_some());
        let transport = |text: &str| match transport_width {
            0 => String::new(),
            width => format!("{text:<width$}"),
        };
        let cpu = |text: String| if has_cpu { format!("{text:>10}") } else { String::new() };
        let _ = writeln!(
            out,
            "{:<test_width$}{}{:>12}{:>11}{:>11}{:>11}{:>12}{}{:>8}",
            "test",
            transport("transport"),
            "requests/s",
            "p50 µs",
            "p99 µs",
            "p99.9 µs",
            "max µs",
            cpu("CPU µs".into()),
            "errors"
        );
        for row in &self.results {
            let Latency { p50, p99, p99_9, max, .. } = &row.latency_us;
            let us =
                row.server_cpu_us_per_request.map_or("–".to_owned(), |us| format!("{us:.2}"));
            let _ = writeln!(
                out,
                "{:<test_width$}{}{:>12.2}{p50:>11.2}{p99:>11.2}{p99_9:>11.2}{max:>12.2}{}{:>8}",
                row.test,
                transport(&row.transport),
                row.requests_per_s,
                cpu(us),
                row.errors
            );
            notes(row, out);
        }
    }
}

/// Writes notes below a row: partial result, first error, too many late requests.
fn notes(row: &Row, out: &mut String) {
    if !row.complete {
        let _ = writeln!(out, "      partial result: ended after {:.2} s", row.seconds);
    }
    if let Some(error) = &row.first_error {
        let _ = writeln!(out, "      first error: {error}");
    }
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 requests")]
    let late = row.late as f64 / row.requests.max(1) as f64;
    if late > LATE_SHARE {
        let _ = writeln!(
            out,
            "      {:.2} % of the requests were sent later than due: the rate is too high",
            late * 100.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(test: &str, transport: &str, late: u64) -> Row {
        let latency_us = Latency {
            min: 1.0,
            p50: 20.0,
            p90: 30.0,
            p99: 40.005,
            p99_9: 50.0,
            max: 60.0,
            mean: 21.0,
        };
        Row {
            test: test.into(),
            transport: transport.into(),
            device: None,
            complete: true,
            seconds: 5.0,
            requests: 10_000,
            errors: 0,
            first_error: None,
            requests_per_s: 579_338.239_000_000_1,
            latency_us,
            server_cpu_us_per_request: None,
            late,
        }
    }

    fn report(results: Vec<Row>, is_comparison: bool) -> Report<'static> {
        Report {
            format: 1,
            version: "0",
            date: "today",
            command_line: "ferrite".into(),
            transport: (!is_comparison).then(|| "TCP".into()),
            device: None,
            fallback: None,
            software: false,
            connections: 10,
            threads: 1,
            pipeline: 1,
            keys: 100,
            key_prefix: "k",
            zipf: None,
            size_bytes: 64,
            rate_per_s: None,
            ratios: match &results[..] {
                [first, second] if is_comparison => vec![Ratio::new(second, first)],
                _ => Vec::new(),
            },
            results,
            error: None,
        }
    }

    #[test]
    fn a_few_late_requests_are_tolerated() {
        assert!(!report(vec![row("get", "TCP", 25)], false).text().contains("later than due"));
        let text = report(vec![row("get", "TCP", 250)], false).text();
        assert!(text.contains("2.50 % of the requests were sent later than due"), "{text}");
    }

    #[test]
    fn cpu_column_only_with_figures() {
        let mut with_cpu = row("get", "TCP", 0);
        assert!(!report(vec![row("get", "TCP", 0)], false).text().contains("CPU"));
        with_cpu.server_cpu_us_per_request = Some(1.23456);
        let report = report(vec![with_cpu, row("set", "TCP", 0)], false);
        let text = report.text();
        assert!(text.contains("CPU µs") && text.contains("      1.23 "), "{text}");
        assert!(report.json().expect("JSON").contains("\"server_cpu_us_per_request\": 1.23"));
    }

    #[test]
    fn compares_transports() {
        let mut rdma = row("get", "RDMA (Ferrite)", 0);
        (rdma.requests_per_s, rdma.latency_us.p50) = (1_158_676.478, 10.0);
        let report = report(vec![row("get", "TCP", 0), rdma], true);
        let expected = "\
over TCP and RDMA (Ferrite): 10 connections, pipeline 1, 64 bytes, 100 keys

test  transport         requests/s     p50 µs     p99 µs   p99.9 µs      max µs  errors
get   TCP                579338.24      20.00      40.01      50.00       60.00       0
get   RDMA (Ferrite)    1158676.48      10.00      40.01      50.00       60.00       0

get: RDMA (Ferrite) has 2.00 times the requests/s of TCP, 0.50 times its p50, 1.00 times its p99
";
        assert_eq!(report.text(), expected);
        assert!(report.json().expect("JSON").contains("\"requests_per_s\": 579338.24"));
    }

    #[test]
    fn partial_results_are_marked() {
        let partial = Row { complete: false, ..row("get", "TCP", 0) };
        let text = report(vec![partial], false).text();
        assert!(text.contains("partial result: ended after 5.00 s"), "{text}");
    }
}
