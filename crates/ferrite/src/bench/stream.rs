//! `ferrite bench stream`: measures latency and bandwidth of byte streams, as programs written for
//! TCP see them.
//!
//! | file | part |
//! |---|---|
//! | `exchange.rs` | the test itself, over any stream: both sides |
//! | `client.rs` `server.rs` | the two sides over RDMA |
//! | `tcp.rs` | the two sides over TCP: Ferrite's stream and tokio's |
//! | `report.rs` | the result |
//!
//! The test is the same as that of `rstream` (rdmacm-utils), so that the results can be compared.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use clap::{Args, ValueEnum};
use ferrite_config::number;
use ferrite_fabric::{Config, Fabric, Rdma};
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::fabric::{self, Measure, SIZE_MAX};
use crate::{address, size};

mod client;
mod exchange;
mod report;
mod server;
mod tcp;

/// The server's default port.
const DEFAULT_PORT: u16 = 7473;

/// Measure latency and bandwidth of byte streams
///
/// On one host, `ferrite bench stream --listen ADDRESS` serves one client after the other. On the
/// other host, `ferrite bench stream ADDRESS` runs the measurements and prints them.
///
/// Latency is half of a round: a write there and one back. Bandwidth is measured over many writes
/// there and as many back, until the last byte has been read.
#[derive(Args)]
#[command(
    after_help = HELP,
    override_usage = "ferrite bench stream --listen ADDRESS [OPTIONS]   (on the first host)\n       \
                      ferrite bench stream PEER [OPTIONS]"
)]
pub(crate) struct Options {
    /// The server's address: IP (IPv6 in brackets) or name, and :PORT (default 7473)
    #[arg(value_name = "PEER", value_parser = address::parse::<DEFAULT_PORT>,
          required_unless_present = "listen")]
    peer: Option<SocketAddr>,
    /// Run as the server on this address, with :PORT (default 7473)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>,
          conflicts_with = "peer")]
    listen: Option<SocketAddr>,
    /// Serve one client, then exit
    #[arg(long, conflicts_with = "peer")]
    once: bool,
    /// Transport of the stream; must be the same on both sides
    #[arg(long, value_enum, default_value_t = Over::Rdma)]
    over: Over,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>,
          conflicts_with = "listen")]
    local: Option<SocketAddr>,
    /// Quantities to measure, separated by commas [default: both]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "listen",
          hide_default_value = true, default_values_t = [Measure::Latency, Measure::Bandwidth])]
    measure: Vec<Measure>,
    /// Sizes of a write, such as 64,8kb,1mb; up to 2mb
    /// [default: 64 for latency, 64kb,1mb for bandwidth]
    #[arg(long, value_name = "SIZES", value_parser = size::parse, value_delimiter = ',',
          conflicts_with = "listen")]
    size: Vec<u32>,
    /// Number of rounds for latency
    #[arg(long, value_name = "COUNT", default_value_t = 1000, conflicts_with = "listen",
          value_parser = number::<u64>(1, 1_000_000_000))]
    rounds: u64,
    /// MiB in each direction for bandwidth, rounded down to whole writes
    #[arg(long, value_name = "MIB", default_value_t = 64, conflicts_with = "listen",
          value_parser = number::<u64>(1, 1_000_000))]
    mib: u64,
    /// Longest time in microseconds that both sides busy-poll before they sleep [default: 500, the
    /// fabric's own default]
    ///
    /// If answers arrive sooner, both sides poll for a shorter time. From 1000000 on, they always
    /// poll for the whole time.
    #[arg(long, value_name = "MICROSECONDS", conflicts_with = "listen",
          value_parser = number::<u32>(0, u32::MAX))]
    busy_poll_us: Option<u32>,
    /// Largest frame that this side receives [default: 8kb]
    ///
    /// For client and server. Larger frames make large writes cheaper and pin more memory for each
    /// receive. Sizes other than 256, 1kb, 8kb, 64kb, 512kb and 2mb leave a part of their memory
    /// block unused.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    recv_buffer_size: Option<u32>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The transport of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Over {
    /// Ferrite's stream over RDMA, on a thread that polls the device while it waits
    Rdma,
    /// Ferrite's stream over TCP, on tokio
    Tcp,
    /// Tokio's own TCP stream, for comparison
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
  ferrite bench stream 10.0.0.1 --local 10.0.0.2       on the second: all cases
  ferrite bench stream 10.0.0.1 --over tcp             the same over TCP
  ferrite bench stream 10.0.0.1 --over tokio           over TCP, without Ferrite

JSON fields of the client (`name?` may be absent; `format` changes if others change):
  format (1), role (client), over, busy_poll_us, results[],
    for RDMA: device, driver?, software, mtu_bytes, local, peer
  results[]: measure, size_bytes, rounds, transfers, seconds, us_per_transfer, mib_per_s,
    for latency: latency_us {min, p50, p90, p99, p99_9, max, mean} of half a round
For each client over RDMA, the server prints a line: peer, device, tests.
Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match (options.listen, options.peer, options.over) {
        (Some(listen), _, Over::Rdma) => server::run(options, listen),
        (Some(listen), _, over) => tcp::listen(options, over, listen),
        (None, Some(peer), Over::Rdma) => client::run(options, peer),
        (None, Some(peer), over) => tcp::connect(options, over, peer),
        (None, None, _) => {
            anyhow::bail!("no address given: give the server's address, or --listen")
        }
    }
}

/// Builds a fabric that sleeps while it waits, until the caller sets another time to busy-poll. It
/// uses the device with the address `local`, or all devices if `local` is `None` or no device has
/// this address.
fn fabric(verbs: &Verbs, local: Option<IpAddr>, options: &Options) -> anyhow::Result<Fabric> {
    let default = Config::default();
    let recv_buffer_size = options.recv_buffer_size.unwrap_or(default.recv_buffer_size);
    let builder =
        Fabric::builder(verbs).config(Config { busy_poll_us: 0, recv_buffer_size, ..default });
    let builder = match options.over {
        Over::Rdma => builder.rdma(Rdma::Require), // a fallback would measure something else
        _ => builder,
    };
    let builder = match local.map(|local| fabric::device_of(verbs, local)).transpose()?.flatten() {
        Some(device) => builder.device(device),
        None => builder,
    };
    Ok(builder.build()?)
}
