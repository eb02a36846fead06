//! `ferrite bench fabric`: measures latency and bandwidth of links, as programs that use the fabric
//! see them.
//!
//! | file | part |
//! |---|---|
//! | `plan.rs` | turns options into cases and their order |
//! | `protocol.rs` | the control messages between the two sides |
//! | `side.rs` | the fabric and the links of one side |
//! | `latency.rs` `bandwidth.rs` | the measured loops, client and server |
//! | `idle.rs` | many idle links |
//! | `client.rs` `server.rs` | the two sides |
//! | `report.rs` | the result |
//!
//! Everything uses the public interface of ferrite-fabric, on one thread that drives the fabric
//! while it waits.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use ferrite_config::number;
use serde::{Deserialize, Serialize};

use crate::choice::{Mode, Op};
use crate::{address, seconds, size};

mod bandwidth;
mod client;
mod idle;
mod latency;
mod plan;
mod protocol;
mod report;
mod server;
mod side;

// `ferrite bench stream` uses these, too.
pub(super) use report::{PathInfo, size_text};
pub(super) use side::{device_of, name};

/// The server's default port.
const DEFAULT_PORT: u16 = 7472;
pub(super) const SIZE_MAX: u32 = crate::size::MAX;
/// The largest number of links that a client can ask of a server, without idle links.
const LINKS_MAX: u32 = 1024;
const IDLE_MAX: u32 = 15_000;

/// Measure latency and bandwidth of the fabric's links
///
/// On one host, `ferrite bench fabric --listen ADDRESS` serves one client after the other. On the
/// other host, `ferrite bench fabric ADDRESS` runs the measurements and prints them. The client
/// sends its options to the server, which needs none.
///
/// Latency is half the round trip for send and write, and the full round trip for read, as in
/// perftest's ib_send_lat, ib_write_lat and ib_read_lat. Bandwidth is measured with a window of
/// operations in flight: the acknowledged bytes, divided by the time from the first post to the
/// last acknowledgement. For send, the client then checks that the peer's program has received
/// every message.
#[derive(Args)]
#[command(
    after_help = HELP,
    override_usage = "ferrite bench fabric --listen ADDRESS [OPTIONS]   (on the first host)\n       \
                      ferrite bench fabric PEER [OPTIONS]"
)]
pub(crate) struct Options {
    /// The server's address: IP (IPv6 in brackets) or name, and :PORT (default 7472)
    #[arg(value_name = "PEER", value_parser = address::parse::<DEFAULT_PORT>,
          required_unless_present = "listen")]
    peer: Option<SocketAddr>,
    /// Run as the server on this address, with :PORT (default 7472)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>,
          conflicts_with = "peer")]
    listen: Option<SocketAddr>,
    /// Serve one client, then exit
    #[arg(long, conflicts_with = "peer")]
    once: bool,
    /// Connect from this local address, and so over its device
    ///
    /// Recommended on a host with several devices. Without it the routing table chooses: it may
    /// pick another device than you expect, or loop back inside the host if the server's address
    /// is local.
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>,
          conflicts_with = "listen")]
    local: Option<SocketAddr>,
    /// Operations to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "listen",
          hide_default_value = true, default_values_t = [Op::Send, Op::Write, Op::Read])]
    op: Vec<Op>,
    /// Quantities to measure, separated by commas [default: both]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "listen",
          hide_default_value = true, default_values_t = [Measure::Latency, Measure::Bandwidth])]
    measure: Vec<Measure>,
    /// Message sizes, such as 64,8kb,1mb; up to 2mb
    /// [default: 64 for latency, 64kb,1mb for bandwidth]
    #[arg(long, value_name = "SIZES", value_parser = size::parse, value_delimiter = ',',
          conflicts_with = "listen")]
    size: Vec<u32>,
    /// How both sides wait for completions
    ///
    /// A passive side (the target of reads, and of writes for bandwidth) sleeps in either mode. The
    /// latency of write is measured in poll mode only: a write completes nothing at its receiver.
    #[arg(long, value_enum, default_value_t = Mode::Poll, conflicts_with = "listen")]
    mode: Mode,
    /// Number of links; latency uses one after the other, bandwidth all at once
    #[arg(long, value_name = "COUNT", default_value_t = 1, conflicts_with = "listen",
          value_parser = number::<u32>(1, LINKS_MAX))]
    links: u32,
    /// Number of further links to open before measuring, all at once; they stay idle
    #[arg(long, value_name = "COUNT", default_value_t = 0, conflicts_with = "listen",
          value_parser = number::<u32>(0, IDLE_MAX))]
    idle: u32,
    /// Number of measured operations of each case [default: 1000 for latency]
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["listen", "seconds"],
          value_parser = number::<u64>(1, 1_000_000_000))]
    iters: Option<u64>,
    /// Measured time of each case, in seconds [default: 2 for bandwidth]
    #[arg(long, value_name = "SECONDS", conflicts_with = "listen",
          value_parser = |text: &str| seconds::parse(text, 0.01))]
    seconds: Option<Duration>,
    /// Number of operations before the measured ones [default: 100 for latency, a full window for
    /// bandwidth]
    #[arg(long, value_name = "COUNT", conflicts_with = "listen",
          value_parser = number::<u64>(1, 1_000_000_000))]
    warmup: Option<u64>,
    /// Operations in flight on each link for bandwidth; fewer if they exceed the bytes that a link
    /// can queue
    #[arg(long, value_name = "COUNT", default_value_t = 16, conflicts_with = "listen",
          value_parser = number::<u32>(1, 1024))]
    window: u32,
    /// Largest frame that this side receives [default: 8kb]; a larger message arrives in several
    /// frames
    ///
    /// For client and server. Larger frames make large sends cheaper and pin more memory for each
    /// receive. Sizes other than 256, 1kb, 8kb, 64kb, 512kb and 2mb leave a part of their memory
    /// block unused.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    recv_buffer_size: Option<u32>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite bench fabric --listen 10.0.0.1                             on the first host
  ferrite bench fabric 10.0.0.1 --local 10.0.0.2                     on the second: all cases
  ferrite bench fabric 10.0.0.1 --op read --size 4kb,64kb --seconds 5  reads of two sizes
  ferrite bench fabric 10.0.0.1 --links 10 --idle 2000 --op send     next to 2,000 idle links

JSON fields of the client (`name?` may be absent; `format` changes if others change):
  format (1), role (client), device, driver?, software, mtu_bytes, mode, links, local, peer,
  idle? {asked, open, seconds, pinned_bytes_per_link, kept, close_seconds, failures {…}},
  server {links, registered_bytes, receives_posted} (before the first case), results[], notes[],
  error? (if a case fails after others; results[] then has those so far)
  results[]: op, measure, size_bytes, seconds, client and server {passes, completions, sleeps},
    for latency: latency_of (half_round_trip or round_trip), iterations, warmup,
      latency_us {min, p50, p90, p99, p99_9, max, mean}
    for bandwidth: window, warmup, messages, bytes, mib_per_s, messages_per_s
The server prints a line per client: peer, device, links, idle, cases.
Failures print {error: {kind, missing?, message, remedy?}}.";

/// The quantity to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Measure {
    /// Duration of an operation, with one in flight at a time
    Latency,
    /// Throughput, with a window of operations in flight
    Bandwidth,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    match (options.listen, options.peer) {
        (Some(listen), _) => server::run(options, listen).map(|()| ExitCode::SUCCESS),
        (None, Some(peer)) => client::run(options, peer),
        (None, None) => anyhow::bail!("no address given: give the server's address, or --listen"),
    }
}
