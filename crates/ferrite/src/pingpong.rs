//! `ferrite pingpong`: measures the latency between two hosts with plain verbs, over RDMA CM.
//!
//! | file | part |
//! |---|---|
//! | `wire.rs` | the messages in the private data of the handshake |
//! | `endpoint.rs` | one queue pair, its memory and its completions |
//! | `rounds.rs` | the measured loops: send, write, read; client and server |
//! | `watch.rs` | the thread that notices a dead peer or a lack of progress |
//! | `client.rs` `server.rs` `report.rs` | the two sides, and the output |
//!
//! The loops read no clock except the measuring one, and have no timeout. A second thread watches
//! the connection. If the connection is stuck, this thread stops the queue pair, which wakes the
//! loop with a failed completion.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use ferrite_config::number;

use crate::choice::{Mode, Op};
use crate::{address, seconds};

mod client;
mod endpoint;
mod report;
mod rounds;
mod server;
mod watch;
mod wire;

pub(crate) use watch::ConnectionLost;

/// The server's default port.
const DEFAULT_PORT: u16 = 7471;

/// Measure the latency between two hosts over RDMA
///
/// On one host, `ferrite pingpong --listen ADDRESS` waits for a client. On the other, `ferrite
/// pingpong ADDRESS` runs the test and prints the result. The client sends its options to the
/// server, which needs none. RDMA CM makes the connection, so addresses are the IP addresses of
/// RDMA devices (`ferrite devices` lists them).
///
/// Every message carries its number, and both sides check it. The result is half the round trip for
/// send and write, and the full round trip for read, as in perftest's ib_send_lat, ib_write_lat
/// and ib_read_lat.
#[derive(Args)]
#[command(
    after_help = HELP,
    override_usage = "ferrite pingpong --listen ADDRESS [OPTIONS]   (on the first host)\n       \
                      ferrite pingpong SERVER [OPTIONS]"
)]
pub(crate) struct Options {
    /// The server's address: IP (IPv6 in brackets) or name, and :PORT (default 7471)
    #[arg(value_name = "SERVER", value_parser = address::parse::<DEFAULT_PORT>,
          required_unless_present = "listen")]
    server: Option<SocketAddr>,
    /// Run as the server on this address, with :PORT (default 7471); serve one client and exit
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>,
          conflicts_with = "server")]
    listen: Option<SocketAddr>,
    /// Serve one client after the other until stopped
    #[arg(long, conflicts_with = "server")]
    forever: bool,
    /// Connect from this local address, and so over its device
    ///
    /// Recommended on a host with several devices. Without it the routing table chooses: it may
    /// pick another device than you expect, or loop back inside the host if the server's address
    /// is local.
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>,
          conflicts_with = "listen")]
    bind: Option<SocketAddr>,
    /// Operation of each round
    #[arg(long, value_enum, default_value_t = Op::Send, conflicts_with = "listen")]
    op: Op,
    /// Message size in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64, conflicts_with = "listen",
          value_parser = number::<u32>(1, wire::SIZE_MAX))]
    size: u32,
    /// Number of measured rounds
    #[arg(long, value_name = "COUNT", default_value_t = 1000, conflicts_with = "listen",
          value_parser = number::<u64>(1, 1_000_000_000))]
    iters: u64,
    /// Number of rounds before the measured ones
    #[arg(long, value_name = "COUNT", default_value_t = 100, conflicts_with = "listen",
          value_parser = number::<u32>(1, u32::MAX))]
    warmup: u32,
    /// How both sides wait for completions (event does not work with write, which completes nothing
    /// at the receiver)
    #[arg(long, value_enum, default_value_t = Mode::Poll, conflicts_with = "listen")]
    mode: Mode,
    /// Send messages up to this size inline, inside the work request, if the device can
    #[arg(long, value_name = "BYTES", default_value_t = 220, conflicts_with = "listen",
          value_parser = number::<u32>(0, u32::MAX))]
    inline: u32,
    /// Give up after this many seconds without progress
    #[arg(long, value_name = "SECONDS", default_value = "10",
          value_parser = |text: &str| seconds::parse(text, 0.1))]
    timeout: Duration,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite pingpong --listen 10.0.0.1                       on the first host
  ferrite pingpong 10.0.0.1 --bind 10.0.0.2                on the second
  ferrite pingpong 10.0.0.1 --op read --size 4096 --json   another test with the same server

JSON fields of the client (`name?` may be absent; `format` changes if others change):
  format (1), role (client), op, mode, size_bytes, iterations, warmup, inline, local, peer,
  device, software, port, gid {index, address, type}, mtu_bytes, measure (half_round_trip or
  round_trip), latency_us {min, p50, p90, p99, p99_9, max, mean}, seconds
The server prints a line per client: peer, device, op, mode, size_bytes, rounds.
Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if options.op == Op::Write && options.mode == Mode::Event {
        let text = "--mode event cannot be used with --op write: a write completes nothing at its \
                    receiver, so there is no event to wait for. Use --mode poll, or --op send.\n";
        clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, text).exit();
    }
    match (options.listen, options.server) {
        (Some(listen), _) => server::run(options, listen),
        (None, Some(server)) => client::run(options, server),
        (None, None) => anyhow::bail!("no address given: give the server's address, or --listen"),
    }
}
