//! `ferrite bench stream`: latency and bandwidth of byte streams, as software that knows TCP sees
//! them.
//!
//! | file | part |
//! |---|---|
//! | `play.rs` | the test itself, over any stream: both sides |
//! | `client.rs` `server.rs` | the two ends over RDMA |
//! | `tcp.rs` | the two ends over TCP: ours and tokio's |
//! | `report.rs` | what is printed |
//!
//! The test is that of `rstream` (rdmacm-utils), so that the two can be held against each other.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use clap::{Args, ValueEnum};
use ferrite_fabric::{Config, Fabric};
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::fabric::{self, Measure, SIZE_MAX};
use crate::{address, size};

mod client;
mod play;
mod report;
mod server;
mod tcp;

/// Where the server listens unless it is told otherwise.
const DEFAULT_PORT: u16 = 7473;

/// Measure latency and bandwidth of byte streams
///
/// On one host, `ferrite bench stream --listen ADDRESS` serves clients, one after the other; on the
/// other, `ferrite bench stream ADDRESS` runs the measurements and prints them.
///
/// Latency is half of a round: a write there and one back. Bandwidth is that of many writes there,
/// then as many back, until the last byte has been read.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The server's address: IP (IPv6 in brackets) or name, with :PORT unless it is 7473
    #[arg(value_name = "PEER", value_parser = address::parse::<DEFAULT_PORT>, required_unless_present = "listen")]
    peer: Option<SocketAddr>,
    /// Be the server: wait for clients at this address (with :PORT unless it is 7473)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>, conflicts_with = "peer")]
    listen: Option<SocketAddr>,
    /// Serve one client, then end
    #[arg(long, conflicts_with = "peer")]
    once: bool,
    /// What carries the stream; the same on both sides
    #[arg(long, value_enum, default_value_t = Over::Rdma)]
    over: Over,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>, conflicts_with = "listen")]
    local: Option<SocketAddr>,
    /// What is measured [default: both]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "listen", hide_default_value = true,
          default_values_t = [Measure::Latency, Measure::Bandwidth])]
    measure: Vec<Measure>,
    /// Sizes of a write, such as 64,8K,1M; up to 2M [default: 64 for latency, 64K,1M for bandwidth]
    #[arg(long, value_name = "SIZES", value_parser = size::parse, value_delimiter = ',', conflicts_with = "listen")]
    size: Vec<u32>,
    /// Rounds, for latency
    #[arg(long, value_name = "COUNT", default_value_t = 1000, conflicts_with = "listen",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    rounds: u64,
    /// Bytes each way, for bandwidth, in whole writes
    #[arg(long, value_name = "MIB", default_value_t = 64, conflicts_with = "listen",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    mib: u64,
    /// How long both sides look for completions before they sleep [default: 50, as programs have it
    /// by themselves]
    #[arg(long, value_name = "MICROSECONDS", conflicts_with = "listen")]
    busy_poll_us: Option<u32>,
    /// Largest frame that this side takes, 8K unless said
    ///
    /// For client and server alike. Larger ones make large writes cheaper and pin more memory for
    /// each receive; 8K, 64K and 2M waste none of it.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    recv_buffer_size: Option<u32>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What carries a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Over {
    /// Ours over RDMA, on a thread that drives the fabric while it waits.
    Rdma,
    /// Ours over TCP, under tokio.
    Tcp,
    /// Tokio's own TCP stream, to compare with.
    Tokio,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
            Self::Tokio => "tokio",
        })
    }
}

const HELP: &str = "\
Examples:
  ferrite bench stream --listen 10.0.0.1               on the first host
  ferrite bench stream 10.0.0.1 --local 10.0.0.2       on the second: everything
  ferrite bench stream 10.0.0.1 --over tcp             the same over TCP; --over tokio: without Ferrite

JSON fields of the client, stable within a value of `format`:
  format (1), role (client), over, busy_poll_us, results[], for RDMA: device, driver?, software, mtu_bytes, local, peer
  results[]: measure, size_bytes, rounds, transfers, seconds, us_per_transfer, mib_per_s,
    for latency: latency_us {min, p50, p90, p99, p99_9, max, mean} of half a round
The server prints a line per client: for RDMA peer, device, tests.
Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match (options.listen, options.peer, options.over) {
        (Some(listen), _, Over::Rdma) => server::run(options, listen),
        (Some(listen), _, over) => tcp::listen(options, over, listen),
        (None, Some(peer), Over::Rdma) => client::run(options, peer),
        (None, Some(peer), over) => tcp::connect(options, over, peer),
        (None, None, _) => anyhow::bail!("give a server's address, or --listen"),
    }
}

/// A fabric with the fabric's own settings but for what `options` say, on the device that has
/// `local`; on all if none has.
fn fabric(verbs: &Verbs, local: Option<IpAddr>, options: &Options) -> anyhow::Result<Fabric> {
    let default = Config::default();
    let recv_buffer_size = options.recv_buffer_size.unwrap_or(default.recv_buffer_size);
    let builder =
        Fabric::builder(verbs).config(Config { busy_poll_us: 0, recv_buffer_size, ..default });
    let builder = match local.map(|local| fabric::device_of(verbs, local)).transpose()?.flatten() {
        Some(device) => builder.device(device),
        None => builder,
    };
    Ok(builder.build()?)
}
