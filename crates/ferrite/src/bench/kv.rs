//! `ferrite bench kv`: load for any server that speaks RESP, over RDMA, TCP or a Unix socket.
//!
//! | file | part |
//! |---|---|
//! | `keys.rs` | the distribution of keys: uniform or Zipf |
//! | `key_space.rs` | the names of a run's keys |
//! | `command.rs` | the requests: GET and SET, or commands of the user |
//! | `measure.rs` | the order of tests, transports and turns |
//! | `load.rs` | runs the threads of a turn; writes keys before the tests and removes them after |
//! | `cluster.rs` | the primaries of a cluster |
//! | `dial.rs` `connection.rs` | one connection, in a closed loop or at a rate |
//! | `run.rs` | the results of connections |
//! | `interrupt.rs` | signals |
//! | `cpu.rs` | CPU time of the server's process |
//! | `report.rs` `plot.rs` | the result as text, JSON and SVG |
//! | `file.rs` `origin.rs` | files for results; date, version and command line in them |
//!
//! Each thread has its own runtime and fabric, and a share of the connections. A thread parses a
//! reply only far enough to find its end and to see whether it is an error.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use ferrite_config::number;
use ferrite_fabric::Rdma;
use serde::Serialize;

use super::progress::Progress;
use crate::{address, exit, seconds, size};

mod cluster;
mod command;
mod connection;
mod cpu;
mod dial;
mod file;
mod interrupt;
mod key_space;
mod keys;
mod load;
mod measure;
mod origin;
mod plot;
mod primaries;
mod report;
mod run;

use command::{Requests, Template};
use file::ResultFile;
use interrupt::Interrupt;
use key_space::KeySpace;
use measure::Measured;
use report::Report;

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
    /// Divide connections and keys among the primaries of the cluster that the server belongs to;
    /// over RDMA where a node has the module
    #[arg(long, conflicts_with_all = ["unix", "server_pid"])]
    cluster: bool,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>)]
    local: Option<SocketAddr>,
    /// Measure these transports in turns and compare them: tcp,rdma
    #[arg(long, value_name = "TRANSPORTS", value_enum, value_delimiter = ',',
          conflicts_with_all = ["rdma", "unix"])]
    compare: Vec<Transport>,
    /// With --compare: number of turns of each transport; --seconds is divided among them
    #[arg(long, value_name = "COUNT", default_value_t = 3, requires = "compare",
          value_parser = number::<u32>(1, 1000))]
    turns: u32,
    /// Tests to run, separated by commas [default: set,get; none with --command]
    #[arg(long, value_enum, value_delimiter = ',')]
    test: Vec<Test>,
    /// Measure this command, too; repeatable. __key__ stands for a key of the run, __data__ for a
    /// value, __rand_int__ for a number below --keys
    #[arg(long, value_name = "COMMAND", value_parser = Template::parse)]
    command: Vec<Template>,
    /// Percentage of GETs in a mixed test
    #[arg(long, value_name = "PERCENT", default_value_t = 90,
          value_parser = number::<u8>(0, 100))]
    gets: u8,
    /// Size of a value in bytes, such as 64 or 16kb; up to 512mb
    #[arg(long, value_name = "SIZE",
          value_parser = |text: &str| size::parse_up_to(text, VALUE_MAX), default_value = "64")]
    size: u32,
    /// Requests in flight on each connection
    #[arg(long, value_name = "COUNT", default_value_t = 1,
          value_parser = number::<u32>(1, 10_000))]
    pipeline: u32,
    /// Number of connections
    #[arg(long, value_name = "COUNT", default_value_t = 10,
          value_parser = number::<u32>(1, 10_000))]
    connections: u32,
    /// Number of client threads
    #[arg(long, value_name = "COUNT", default_value_t = 1,
          value_parser = number::<u32>(1, 256))]
    threads: u32,
    /// Number of different keys
    #[arg(long, value_name = "COUNT", default_value_t = 10_000,
          value_parser = number::<u32>(1, 10_000_000))]
    keys: u32,
    /// Leave the keys in the server at the end
    #[arg(long)]
    keep_keys: bool,
    /// Choose keys by Zipf's law with this exponent, such as 0.99 [default: uniform]
    #[arg(long, value_name = "EXPONENT", value_parser = parse_exponent)]
    zipf: Option<f64>,
    /// Requests per second of all connections together, due at fixed times (an open loop)
    #[arg(long, value_name = "REQUESTS",
          value_parser = number::<u64>(1, 100_000_000))]
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
    /// User for AUTH [default: default]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Process id of a server on this host, to measure its CPU time per request
    #[arg(long, value_name = "PID", value_parser = number::<u32>(1, u32::MAX))]
    server_pid: Option<u32>,
    /// Microseconds to busy-poll for completions before sleeping, with RDMA
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50,
          value_parser = number::<u32>(0, u32::MAX))]
    busy_poll_us: u32,
    /// Write an SVG plot of latency by percentile, with all tests, to this file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Also write the result as JSON to this file, after each test
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
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
  ferrite bench kv 10.0.0.1:6380 --compare tcp,rdma --plot both.svg     both in one picture
  ferrite bench kv 10.0.0.1:6380 --cluster --connections 30              all primaries of a cluster
  ferrite bench kv 127.0.0.1 --command 'LPUSH __key__ __data__' --command 'LLEN __key__'

A terminal shows the progress. If the server fails or a signal arrives, the results so far are
printed and saved, and the exit code is 1.

Keys are written first only for `--test get` and `--test mixed`; a command of --command creates its
keys itself. Every __key__ is chosen anew. At the end the keys that __key__ stood for are removed,
other keys are not.

--cluster asks the server for the slots and for the RDMA endpoints of the nodes (FERRITE ENDPOINTS).
Each connection uses keys of one primary. A slot that moves during a test causes errors (MOVED).

SIGINT (Ctrl-C) and SIGTERM end the test and remove the keys; a second signal leaves them. To remove
the keys of a run that was killed:
  ferrite-cli --scan --pattern 'ferrite-bench:*' | xargs -r ferrite-cli DEL

JSON fields: format (1), version, date, command_line, transport? (without --compare), device?,
  fallback?, connections, threads, pipeline, keys, key_prefix, zipf?, size_bytes, rate_per_s?,
  results[]: test, transport, device?, complete, seconds, requests, errors, first_error?,
  requests_per_s, latency_us {min, p50, p90, p99, p99_9, max, mean}, server_cpu_us_per_request?,
  late? (open loop: requests that were sent later than they were due),
  ratios?[] (--compare: the second transport divided by the first): test, transport, to,
  requests_per_s, p50, p99, error? {kind, missing?, message, remedy?} (after partial results).
Failures without results print {error: {kind, missing?, message, remedy?}}.";

/// A built-in test.
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

/// A transport of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Transport {
    Tcp,
    Rdma,
}

impl Options {
    /// Returns the message for an error that clap does not find, such as two options that
    /// contradict each other.
    pub(super) fn contradiction(&self) -> Option<&'static str> {
        if self.threads > self.connections {
            return Some("--threads must not be larger than --connections");
        }
        if self.user.is_some() && self.password().is_none() {
            return Some("--user needs a password: REDISCLI_AUTH or --auth");
        }
        let is_repeated = self.compare.windows(2).any(|pair| pair[0] == pair[1]);
        if self.compare.len() == 1 || self.compare.len() > 2 || is_repeated {
            return Some("--compare needs two different transports: tcp,rdma");
        }
        None
    }

    fn password(&self) -> Option<String> {
        self.auth.clone().or_else(|| std::env::var("REDISCLI_AUTH").ok())
    }

    /// Returns the arguments of AUTH; none if there is no password.
    fn credentials(&self) -> Vec<String> {
        let Some(password) = self.password() else { return Vec::new() };
        self.user.iter().cloned().chain([password]).collect()
    }

    /// Returns the RDMA policy of each transport to measure.
    fn policies(&self) -> Vec<Rdma> {
        let policy = |transport: &Transport| match transport {
            Transport::Tcp => Rdma::Forbid,
            Transport::Rdma => Rdma::Require,
        };
        if self.compare.is_empty() {
            return vec![self.rdma];
        }
        self.compare.iter().map(policy).collect()
    }

    /// Returns the tests to run, in order.
    fn requests(&self) -> Vec<Arc<Requests>> {
        let built_in = match (&self.test[..], &self.command[..]) {
            ([], []) => &[Test::Set, Test::Get],
            (tests, _) => tests,
        };
        let built_in = built_in.iter().map(|test| Requests::Test(*test));
        let commands = self.command.iter().cloned().map(Requests::Command);
        built_in.chain(commands).map(Arc::new).collect()
    }
}

fn parse_exponent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(exponent) if exponent > 0.0 && exponent <= 10.0 => Ok(exponent),
        _ => Err("expected a number above 0, up to 10".into()),
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let open = |path: &Option<PathBuf>| path.as_deref().map(ResultFile::open).transpose();
    let (mut plot, mut saved) = (open(&options.plot)?, open(&options.save)?);
    let progress = Progress::new(
        measure::length(options),
        "{bar:20} {percent:>3} %  {msg}  {elapsed} of about {duration}",
    );
    let interrupt = Interrupt::new(progress.clone()).context("cannot handle signals")?;
    let key_space = Arc::new(KeySpace::new());
    let save = |measured: &Measured| match &mut saved {
        Some(file) => file.write(&Report::new(options, key_space.prefix(), measured).json()?),
        None => Ok(()),
    };
    let measured = measure::run(options, &key_space, &interrupt, &progress, save);
    if key_space.is_written() && !options.keep_keys {
        progress.step("removing the keys");
        if let Err(error) = load::remove(options, options.policies()[0], &key_space) {
            let prefix = key_space.prefix();
            progress.print_above(&format!(
                "ferrite: cannot remove the keys {prefix}*, which stay in the server: {error:#}"
            ));
        }
    }
    progress.finish();
    let mut measured = measured?;
    if let Some(failure) = measured.failure_without_results() {
        return Err(failure);
    }
    let report = Report::new(options, key_space.prefix(), &measured);
    if let Some(file) = &mut saved {
        file.write(&report.json()?)?;
    }
    if let Some(file) = &mut plot {
        file.write(&plot::svg(&report.title(), &measured.lines(), &origin::lines()))?;
    }
    report.print(options.json)?;
    Ok(measured.failure.map_or(ExitCode::SUCCESS, |failure| exit::report(&failure, false)))
}
