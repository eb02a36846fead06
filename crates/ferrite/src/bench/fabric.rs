//! `ferrite bench fabric`: latency and bandwidth of links, as programs that use the fabric see
//! them.
//!
//! | file | part |
//! |---|---|
//! | `plan.rs` | from options to cases: what is measured, in which order |
//! | `talk.rs` | what the two sides say to each other |
//! | `ends.rs` | what both sides have: an engine and the links between them |
//! | `latency.rs` `bandwidth.rs` | the measured loops, client and server |
//! | `idle.rs` | many links that do nothing |
//! | `client.rs` `server.rs` | the two ends |
//! | `report.rs` `progress.rs` | what is printed, at the end and meanwhile |
//!
//! Everything goes through the public interface of ferrite-fabric, on one thread that drives the
//! engine while it waits.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::choice::{Mode, Op};
use crate::{address, seconds, size};

mod bandwidth;
mod client;
mod ends;
mod idle;
mod latency;
mod plan;
mod progress;
mod report;
mod server;
mod talk;

// What the other benches use too.
pub(super) use ends::{device_of, name};
pub(super) use report::{Way, size_text};

/// Where the server listens unless it is told otherwise.
const DEFAULT_PORT: u16 = 7472;
pub(super) const SIZE_MAX: u32 = crate::size::MAX;
/// More links than anybody measures over; bounds what a client can ask of a server.
const LINKS_MAX: u32 = 1024;
const IDLE_MAX: u32 = 15_000;

/// Measure latency and bandwidth of the fabric's links
///
/// On one host, `ferrite bench fabric --listen ADDRESS` serves clients, one after the other; on the
/// other, `ferrite bench fabric ADDRESS` runs the measurements and prints them. The client's
/// options travel with it: the server needs none.
///
/// Latency is half the round trip for send and write, and the full round trip for read, as
/// perftest's ib_send_lat, ib_write_lat and ib_read_lat define it. Bandwidth is what the peer's
/// device has acknowledged, divided by the time from the first post to the last acknowledgement,
/// with a window of operations in flight. For send, the peer's program has taken every message.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The server's address: IP (IPv6 in brackets) or name, with :PORT unless it is 7472
    #[arg(value_name = "PEER", value_parser = address::parse::<DEFAULT_PORT>, required_unless_present = "listen")]
    peer: Option<SocketAddr>,
    /// Be the server: wait for clients at this address (with :PORT unless it is 7472)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>, conflicts_with = "peer")]
    listen: Option<SocketAddr>,
    /// Serve one client, then end
    #[arg(long, conflicts_with = "peer")]
    once: bool,
    /// Connect from this local address, and so over its device
    ///
    /// Worth giving on a host with several: otherwise the routing table chooses, which may pick
    /// another device than you think, or loop back inside the host if the server's address is local
    /// as well.
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>, conflicts_with = "listen")]
    local: Option<SocketAddr>,
    /// What crosses the wire; several with commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "listen", hide_default_value = true,
          default_values_t = [Op::Send, Op::Write, Op::Read])]
    op: Vec<Op>,
    /// What is measured of it [default: both]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "listen", hide_default_value = true,
          default_values_t = [Measure::Latency, Measure::Bandwidth])]
    measure: Vec<Measure>,
    /// Message sizes, such as 64,8K,1M; up to 2M [default: 64 for latency, 64K,1M for bandwidth]
    #[arg(long, value_name = "SIZES", value_parser = size::parse, value_delimiter = ',', conflicts_with = "listen")]
    size: Vec<u32>,
    /// How both sides wait for completions
    ///
    /// A side that takes no part (the target of reads and of the writes that measure bandwidth)
    /// sleeps in either mode. The latency of write is measured by poll only: a write completes
    /// nothing at its receiver.
    #[arg(long, value_enum, default_value_t = Mode::Poll, conflicts_with = "listen")]
    mode: Mode,
    /// Links to the server; latency goes from one to the next, bandwidth over all at once
    #[arg(long, value_name = "COUNT", default_value_t = 1, conflicts_with = "listen",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(LINKS_MAX)))]
    links: u32,
    /// Before measuring, open this many further links, all at the same time, and leave them idle
    #[arg(long, value_name = "COUNT", default_value_t = 0, conflicts_with = "listen",
          value_parser = clap::value_parser!(u32).range(0..=i64::from(IDLE_MAX)))]
    idle: u32,
    /// Measured operations of each case [default: 1000 for latency]
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["listen", "seconds"],
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    iters: Option<u64>,
    /// Measured time of each case [default: 2 for bandwidth]
    #[arg(long, value_name = "SECONDS", conflicts_with = "listen",
          value_parser = |text: &str| seconds::parse(text, 0.01))]
    seconds: Option<Duration>,
    /// Operations before the measured ones [default: 100 for latency, a full window for bandwidth]
    #[arg(long, value_name = "COUNT", conflicts_with = "listen",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    warmup: Option<u64>,
    /// Operations in flight on each link for bandwidth; fewer where a link's queue has no room for
    /// so many bytes
    #[arg(long, value_name = "COUNT", default_value_t = 16, conflicts_with = "listen",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    window: u32,
    /// Largest frame that this side takes, 8K unless said: a larger message comes in several
    ///
    /// For client and server alike. Larger ones make large sends cheaper and pin more memory for
    /// each receive; 8K, 64K and 2M waste none of it.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    recv_buffer_size: Option<u32>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite bench fabric --listen 10.0.0.1                             on the first host
  ferrite bench fabric 10.0.0.1 --local 10.0.0.2                     on the second: everything
  ferrite bench fabric 10.0.0.1 --op read --size 4K,64K --seconds 5  reads, two sizes
  ferrite bench fabric 10.0.0.1 --links 10 --idle 2000 --op send     with 2,000 idle links beside

JSON fields of the client, stable within a value of `format`:
  format (1), role (client), device, driver?, software, mtu_bytes, mode, links, local, peer,
  idle? {asked, open, seconds, pinned_bytes_per_link, kept, close_seconds, failures {…}},
  server {links, registered_bytes, receives_posted} (before the first case), results[], notes[]
  results[]: op, measure, size_bytes, seconds, client and server {passes, completions, sleeps},
    for latency: latency_of (half_round_trip or round_trip), iterations, warmup,
      latency_us {min, p50, p90, p99, p99_9, max, mean}
    for bandwidth: window, warmup, messages, bytes, mib_per_s, messages_per_s
The server prints a line per client: peer, device, links, idle, cases.
Failures print {error: {kind, missing?, message, remedy?}}.";

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Measure {
    /// How long one takes, one at a time.
    Latency,
    /// How many get through, a window at a time.
    Bandwidth,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match (options.listen, options.peer) {
        (Some(listen), _) => server::run(options, listen),
        (None, Some(peer)) => client::run(options, peer),
        (None, None) => anyhow::bail!("give a server's address, or --listen"),
    }
}
