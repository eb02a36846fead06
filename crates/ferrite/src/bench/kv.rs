//! `ferrite bench kv`: load for any server that speaks RESP, over RDMA, TCP or a Unix socket.
//!
//! | file | part |
//! |---|---|
//! | `keys.rs` | which key comes next: uniform or Zipf |
//! | `load.rs` | connections that ask, in a closed loop or at a rate |
//! | `cpu.rs` | what the server's process used |
//! | `plot.rs` | latencies as a picture |
//! | `report.rs` | what is printed |
//!
//! Each thread has a runtime and an engine of its own; connections are spread over them. A reply is
//! not looked into, but for whether it is an error: where it ends is all that is needed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use ferrite_fabric::Rdma;
use serde::Serialize;

use crate::choice::name;
use crate::{address, seconds, size};

mod cpu;
mod keys;
mod load;
mod plot;
mod report;

const DEFAULT_PORT: u16 = 6379;
/// The most that Redis takes unless told otherwise.
const VALUE_MAX: u32 = 512 << 20;

/// Load a Redis, Valkey or anything else that speaks RESP, and measure it
///
/// GET and SET of keys `key:NUMBER`, over RDMA (ferrite.so, a Ferrite gateway, or Valkey's own
/// listener), TCP or a Unix socket. By default each connection asks as fast as it is answered (a
/// closed loop). With --rate requests are due at fixed times, whether or not earlier ones were
/// answered in time, and latency counts from when a request was due: a server that stalls is not
/// spared what it held up (no coordinated omission).
///
/// With pipelines, the latency of a request is that of the batch it was in.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The server: IP (IPv6 in brackets) or name, with :PORT unless it is 6379
    #[arg(value_name = "SERVER", value_parser = address::parse::<DEFAULT_PORT>, required_unless_present = "unix")]
    server: Option<SocketAddr>,
    /// The server's Unix socket instead
    #[arg(long, value_name = "PATH", conflicts_with_all = ["server", "rdma", "local"])]
    unix: Option<PathBuf>,
    /// Whether RDMA may, must or must not carry it: prefer, require or forbid
    #[arg(long, value_name = "POLICY", default_value = "prefer")]
    rdma: Rdma,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>)]
    local: Option<SocketAddr>,
    /// What is asked; mixed is GET and SET by --gets
    #[arg(long, value_enum, value_delimiter = ',', hide_default_value = true, default_values_t = [Test::Set, Test::Get])]
    test: Vec<Test>,
    /// GETs among 100 requests of a mixed test
    #[arg(long, value_name = "PERCENT", default_value_t = 90, value_parser = clap::value_parser!(u8).range(0..=100))]
    gets: u8,
    /// Bytes of a value, such as 64 or 16K; up to 512M
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| size::parse_up_to(text, VALUE_MAX), default_value = "64")]
    size: u32,
    /// Requests that a connection has under way at a time
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pipeline: u32,
    /// Connections
    #[arg(long, value_name = "COUNT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// Threads that ask
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Different keys
    #[arg(long, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// Some keys are asked for more often: by Zipf's law with this exponent, such as 0.99
    #[arg(long, value_name = "EXPONENT", value_parser = parse_exponent)]
    zipf: Option<f64>,
    /// Requests per second of all connections together, due at fixed times (an open loop)
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    rate: Option<u64>,
    /// Measured time of each test
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| seconds::parse(text, 0.1), default_value = "5")]
    seconds: Duration,
    /// Time before it that is not measured
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| seconds::parse(text, 0.0), default_value = "1")]
    warmup: Duration,
    /// A password, for AUTH; better in the environment variable REDISCLI_AUTH, where others do not
    /// see it
    #[arg(long, value_name = "PASSWORD")]
    auth: Option<String>,
    /// The server's process, if it is on this host: CPU time per request is measured too
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Look for completions this long before sleeping, on RDMA
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    busy_poll_us: u32,
    /// Draw the latencies of all tests by percentile, to this file (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite bench kv 10.0.0.1:6380 --rdma require --pipeline 16           ferrite.so, a gateway, or Valkey's listener
  ferrite bench kv 127.0.0.1 --rdma forbid --size 16K --connections 50  TCP
  ferrite bench kv --unix /run/redis/redis.sock --server-pid 4711       and what a request costs the server
  ferrite bench kv 10.0.0.1:6380 --test mixed --zipf 0.99 --rate 20000  a rate, and honest percentiles
  ferrite bench kv 10.0.0.1:6380 --plot latency.svg                     percentiles as a picture

JSON fields: format (1), transport, device?, fallback?, connections, threads, pipeline, keys, zipf?, size_bytes, rate_per_s?, results[]:
  test, seconds, requests, errors, first_error?, requests_per_s, latency_us {min, p50, p90, p99, p99_9, max, mean}, server_cpu_us_per_request?, late?
  (open loop: requests that were sent later than they were due)
Failures print {error: {kind, missing?, message, remedy?}}.";

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Test {
    /// Values are written.
    Set,
    /// Values are read; every key is written before.
    Get,
    /// Both.
    Mixed,
}

fn parse_exponent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(exponent) if exponent > 0.0 && exponent <= 10.0 => Ok(exponent),
        _ => Err("a number above 0, up to 10".into()),
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    ensure!(options.threads <= options.connections, "more threads than connections");
    let (mut results, mut lines) = (Vec::new(), Vec::new());
    let mut transport_info = None;
    if options.test.iter().any(|test| *test != Test::Set) {
        load::fill(options).context("writing the keys that will be read")?;
    }
    for test in &options.test {
        let before = options.server_pid.map(cpu::used).transpose()?;
        let run = load::run(options, *test)?;
        let used = match (before, options.server_pid) {
            // The warm-up's share is taken off by its part of the requests.
            (Some(before), Some(pid)) => {
                Some((cpu::used(pid)? - before) / run.all_requests.max(1) as f64)
            }
            _ => None,
        };
        transport_info = transport_info.or_else(|| run.transport_info.clone());
        lines.push(plot::Line::new(name(test), &run.latency));
        results.push(report::Row::new(*test, &run, used));
    }
    if let Some(file) = &options.plot {
        let picture = plot::svg(
            "Latency by percentile",
            &what_was_measured(options, transport_info.as_ref()),
            &lines,
        );
        std::fs::write(file, picture)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    report::print(options, transport_info, results)
}

fn what_was_measured(options: &Options, transport_info: Option<&load::TransportInfo>) -> String {
    let over = transport_info.map_or("nothing", |transport_info| &transport_info.transport);
    let rate =
        options.rate.map_or("as fast as answered".to_owned(), |rate| format!("{rate} requests/s"));
    format!(
        "over {over}: {} connections, pipeline {}, values of {} bytes, {rate}",
        options.connections, options.pipeline, options.size
    )
}
