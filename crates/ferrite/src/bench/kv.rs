//! `ferrite bench kv`: load for any server that speaks RESP, over RDMA, TCP or a Unix socket.
//!
//! | file | part |
//! |---|---|
//! | `keys.rs` | the distribution of keys: uniform or Zipf |
//! | `key_space.rs` | the names of a run's keys |
//! | `interrupt.rs` | signals |
//! | `load.rs` | the connections, in a closed loop or at a rate |
//! | `cpu.rs` | CPU time of the server's process |
//! | `plot.rs` | latencies as an SVG |
//! | `report.rs` | the result |
//!
//! Each thread has a runtime and a fabric of its own, and a share of the connections. It parses a
//! reply only far enough to find its end, and to see whether it is an error.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use ferrite_fabric::Rdma;
use serde::Serialize;

use crate::choice::name;
use crate::{address, seconds, size};

mod cpu;
mod interrupt;
mod key_space;
mod keys;
mod load;
mod plot;
mod report;

use interrupt::Interrupt;
use key_space::KeySpace;

const DEFAULT_PORT: u16 = 6379;
/// The largest value that Redis accepts by default.
const VALUE_MAX: u32 = 512 << 20;

/// Measure a Redis, Valkey or other RESP server under load
///
/// Sends GET and SET over RDMA (ferrite.so, a Ferrite gateway, or Valkey's own listener), TCP or a
/// Unix socket. Writes keys `ferrite-bench:RANDOM:NUMBER` to database 0, also for a test that only
/// reads, and removes them at the end. RANDOM differs in each run. By default each connection sends
/// the next request when the last one is answered (a closed loop). With --rate, requests are due at
/// fixed times, whether or not earlier ones were answered. Latency then counts from the time when a
/// request was due, so a stall of the server shows in every request that it delays (no coordinated
/// omission).
///
/// With pipelines, the latency of a request is that of its whole batch.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The server's address: IP (IPv6 in brackets) or name, and :PORT (default 6379)
    #[arg(value_name = "SERVER", value_parser = address::parse::<DEFAULT_PORT>,
          required_unless_present = "unix")]
    server: Option<SocketAddr>,
    /// The server's Unix socket, instead of an address
    #[arg(long, value_name = "PATH", conflicts_with_all = ["server", "rdma", "local"])]
    unix: Option<PathBuf>,
    /// Whether connections may, must or must not use RDMA: prefer, require or forbid
    #[arg(long, value_name = "POLICY", default_value = "prefer")]
    rdma: Rdma,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>)]
    local: Option<SocketAddr>,
    /// Tests to run, separated by commas [default: set,get]
    #[arg(long, value_enum, value_delimiter = ',', hide_default_value = true,
          default_values_t = [Test::Set, Test::Get])]
    test: Vec<Test>,
    /// Percentage of GETs in a mixed test
    #[arg(long, value_name = "PERCENT", default_value_t = 90,
          value_parser = clap::value_parser!(u8).range(0..=100))]
    gets: u8,
    /// Size of a value in bytes, such as 64 or 16kb; up to 512mb
    #[arg(long, value_name = "SIZE",
          value_parser = |text: &str| size::parse_up_to(text, VALUE_MAX), default_value = "64")]
    size: u32,
    /// Requests in flight on each connection
    #[arg(long, value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pipeline: u32,
    /// Number of connections
    #[arg(long, value_name = "COUNT", default_value_t = 10,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// Number of client threads
    #[arg(long, value_name = "COUNT", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Number of different keys
    #[arg(long, value_name = "COUNT", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// Leave the keys in the server at the end
    #[arg(long)]
    keep_keys: bool,
    /// Choose keys by Zipf's law with this exponent, such as 0.99 [default: uniform]
    #[arg(long, value_name = "EXPONENT", value_parser = parse_exponent)]
    zipf: Option<f64>,
    /// Requests per second of all connections together, due at fixed times (an open loop)
    #[arg(long, value_name = "REQUESTS",
          value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    rate: Option<u64>,
    /// Measured time of each test, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| seconds::parse(text, 0.1),
          default_value = "5")]
    seconds: Duration,
    /// Time before the measured time, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| seconds::parse(text, 0.0),
          default_value = "1")]
    warmup: Duration,
    /// Password for AUTH; safer in the environment variable REDISCLI_AUTH, which other users cannot
    /// see
    #[arg(long, value_name = "PASSWORD")]
    auth: Option<String>,
    /// Process id of a server on this host, to measure its CPU time per request
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Microseconds to busy-poll for completions before sleeping, with RDMA
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    busy_poll_us: u32,
    /// Write a plot of the latencies of all tests by percentile to this file (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite bench kv 10.0.0.1:6380 --rdma require --pipeline 16           RDMA
  ferrite bench kv 127.0.0.1 --rdma forbid --size 16kb --connections 50  TCP
  ferrite bench kv --unix /run/redis/redis.sock --server-pid 4711       CPU time per request
  ferrite bench kv 10.0.0.1:6380 --test mixed --zipf 0.99 --rate 20000  fixed rate (open loop)
  ferrite bench kv 10.0.0.1:6380 --plot latency.svg                     percentiles as SVG

SIGINT (Ctrl-C) and SIGTERM end the test and remove the keys; a second signal leaves them. To remove
the keys of a run that was killed:
  ferrite-cli --scan --pattern 'ferrite-bench:*' | xargs -r ferrite-cli DEL

JSON fields: format (1), transport, device?, fallback?, connections, threads, pipeline, keys,
  key_prefix, zipf?, size_bytes, rate_per_s?, results[]: test, seconds, requests, errors, first_error?, requests_per_s,
  latency_us {min, p50, p90, p99, p99_9, max, mean}, server_cpu_us_per_request?,
  late? (open loop: requests that were sent later than they were due)
Failures print {error: {kind, missing?, message, remedy?}}.";

/// The requests of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Test {
    /// Write values
    Set,
    /// Read values, after writing every key once
    Get,
    /// GET and SET, in the ratio of --gets
    Mixed,
}

impl Options {
    /// Returns what is wrong with options that are right by themselves.
    pub(super) fn contradiction(&self) -> Option<&'static str> {
        (self.threads > self.connections)
            .then_some("--threads must not be larger than --connections")
    }
}

fn parse_exponent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(exponent) if exponent > 0.0 && exponent <= 10.0 => Ok(exponent),
        _ => Err("expected a number above 0, up to 10".into()),
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let cannot_write = |file: &PathBuf| format!("cannot write {}", file.display());
    let plot = match &options.plot {
        Some(file) => Some(plot::PlotFile::open(file).with_context(|| cannot_write(file))?),
        None => None,
    };
    let interrupt = Interrupt::new().context("cannot handle signals")?;
    let key_space = Arc::new(KeySpace::new());
    let measured = measure(options, &key_space, &interrupt);
    if key_space.is_written()
        && !options.keep_keys
        && let Err(error) = load::remove(options, &key_space)
    {
        let prefix = key_space.prefix();
        eprintln!("ferrite: cannot remove the keys {prefix}*, which stay in the server: {error:#}");
    }
    let Measured { results, lines, transport_info } = measured?;
    if let (Some(plot), Some(file)) = (plot, &options.plot) {
        let svg =
            plot::svg("Latency by percentile", &subtitle(options, transport_info.as_ref()), &lines);
        plot.write(&svg).with_context(|| cannot_write(file))?;
    }
    report::print(options, key_space.prefix(), transport_info, results)
}

/// The results of all tests.
struct Measured {
    results: Vec<report::Row>,
    lines: Vec<plot::Line>,
    transport_info: Option<load::TransportInfo>,
}

fn measure(
    options: &Options,
    key_space: &Arc<KeySpace>,
    interrupt: &Interrupt,
) -> anyhow::Result<Measured> {
    let (mut results, mut lines) = (Vec::new(), Vec::new());
    let mut transport_info = None;
    if options.test.iter().any(|test| *test != Test::Set) {
        load::fill(options, key_space, interrupt)
            .context("cannot write the keys that the test reads")?;
    }
    for test in &options.test {
        let before = options.server_pid.map(cpu::used).transpose()?;
        let run = load::run(options, *test, key_space, interrupt)?;
        let used = match (before, options.server_pid) {
            // The time includes the warm-up, so it is divided by all requests.
            (Some(before), Some(pid)) => {
                Some((cpu::used(pid)? - before) / run.all_requests.max(1) as f64)
            }
            _ => None,
        };
        transport_info = transport_info.or_else(|| run.transport_info.clone());
        lines.push(plot::Line::new(name(test), &run.latency));
        results.push(report::Row::new(*test, &run, used));
    }
    Ok(Measured { results, lines, transport_info })
}

fn subtitle(options: &Options, transport_info: Option<&load::TransportInfo>) -> String {
    let over = transport_info.map_or("nothing", |transport_info| &transport_info.transport);
    let rate = options.rate.map_or("closed loop".to_owned(), |rate| format!("{rate} requests/s"));
    format!(
        "over {over}: {} connections, pipeline {}, values of {} bytes, {rate}",
        options.connections, options.pipeline, options.size
    )
}
