//! `ferrite gateway`: an RDMA listener in front of an engine that serves sockets only.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use ferrite_fabric::{Config, Fabric, ListenOptions, Listener, Rdma};
use ferrite_session::{
    EngineAddress, Gateway, GatewayConfig, GatewayStats, ValkeyConfig, server_config,
};
use serde::Serialize;

use crate::signals::Signals;
use crate::{address, seconds, size};

/// The engine's default port plus one.
const DEFAULT_PORT: u16 = 6380;
const WINDOW_MIN: u32 = 4 << 10;
const WINDOW_MAX: u32 = size::MAX;

/// Accept RDMA clients for an unmodified engine: Redis, Valkey, KeyDB, Dragonfly, Garnet
///
/// Listens for clients of Valkey Over RDMA (valkey-cli --rdma, valkey-benchmark --rdma, libvalkey)
/// and for Ferrite peers. Opens a connection of its own to the engine's Unix or TCP socket for each
/// session. The engine sees an ordinary client, so every command works: MULTI, SUBSCRIBE, BLPOP,
/// MONITOR.
///
/// Ferrite peers and all other clients may also connect over TCP to the same port (unless --rdma
/// require).
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// Address to listen on: IP (IPv6 in brackets) or name, and :PORT (default 6380)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>,
          default_value = "0.0.0.0")]
    listen: SocketAddr,
    /// The engine's socket: unix:/PATH or HOST:PORT
    #[arg(long, value_name = "SOCKET", default_value = "127.0.0.1:6379")]
    engine: EngineAddress,
    /// Whether clients may, must or must not use RDMA: prefer, require or forbid
    #[arg(long, value_name = "POLICY", default_value = "prefer")]
    rdma: Rdma,
    /// First receive window of each Valkey Over RDMA client, 4K to 2M; pinned while the client is
    /// connected
    ///
    /// The window is the memory that the client writes to. Valkey's own listener uses 1M. 64K, 512K
    /// and 2M waste no memory.
    #[arg(long, value_name = "SIZE", value_parser = parse_window, default_value = "64K")]
    rx_size: u32,
    /// Largest receive window, for clients that send large values; smaller if there are many
    /// clients
    #[arg(long, value_name = "SIZE", value_parser = parse_window, default_value = "2M")]
    rx_size_max: u32,
    /// Maximum number of sessions; further clients are rejected
    #[arg(long, value_name = "COUNT", value_parser = parse_max_clients, default_value_t = 10_000)]
    max_clients: usize,
    /// Reject clients of other hosts, and all over RDMA, while the engine asks for no password
    ///
    /// To the engine, clients of the gateway seem to come from this host, and its own protected
    /// mode accepts those.
    #[arg(long, value_name = "YES_OR_NO", value_enum, default_value_t = YesNo::Yes)]
    protected_mode: YesNo,
    /// Serve Valkey Over RDMA clients on devices that cannot isolate their memory
    ///
    /// On a device without memory windows of type 2, a client that finds out another client's key
    /// can write commands in its name.
    #[arg(long, value_name = "YES_OR_NO", value_enum, default_value_t = YesNo::No)]
    rdma_shared_windows: YesNo,
    /// Microseconds to busy-poll for completions before sleeping: less latency for more CPU
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    busy_poll_us: u32,
    /// Seconds for sessions to receive outstanding replies after SIGTERM or SIGINT
    #[arg(long, value_name = "SECONDS", value_parser = |text: &str| seconds::parse(text, 0.1),
          default_value = "5")]
    drain: Duration,
    /// Print a line of JSON when it listens and when it ends
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite gateway --listen 10.0.0.1 --engine unix:/run/redis/redis.sock   clients use port 6380
  valkey-cli --rdma -h 10.0.0.1 -p 6380 PING                              from another host
  ferrite gateway --engine 127.0.0.1:6379 --rx-size 2M --rdma require     large values; no TCP

The gateway pins 36 MiB for each RDMA device, and --rx-size for each client of Valkey Over RDMA.
Set LimitMEMLOCK=infinity in its systemd unit.

On SIGTERM and SIGINT it accepts no new clients, delivers outstanding replies and exits with code 0.
A client in the middle of a command delays that while it keeps sending, and for 1 s afterwards.
A second signal stops it at once, with exit code 1.

JSON lines: {event: listening, address, engine, devices[], rdma}, {event: ended, sessions {valkey,
  ferrite, tcp}, refused, engine_failures, to_engine_bytes, to_client_bytes}.
  Failures print {error: {kind, missing?, message, remedy?}}.";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum YesNo {
    Yes,
    No,
}

fn parse_window(text: &str) -> Result<u32, String> {
    match size::parse(text)? {
        bytes @ WINDOW_MIN..=WINDOW_MAX => Ok(bytes),
        _ => Err("expected a size from 4K to 2M".into()),
    }
}

fn parse_max_clients(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..) => Ok(count),
        _ => Err("expected a number from 1".into()),
    }
}

/// Prints the libraries' warnings on stderr.
pub(crate) fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_max_level(tracing::Level::WARN)
        .without_time()
        .with_target(false)
        .init();
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    log_to_stderr();
    // One thread: sessions only copy bytes, and need no wake-ups across threads this way.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(options))
}

async fn serve(options: &Options) -> anyhow::Result<ExitCode> {
    let config = Config {
        busy_poll_us: options.busy_poll_us,
        shared_windows: options.rdma_shared_windows == YesNo::Yes,
        // More than max_clients, so that rejected clients can receive the reason.
        max_connections: options.max_clients.saturating_add(64),
        ..server_config()
    };
    let fabric = Fabric::system().rdma(options.rdma).config(config).command_threads().build()?;
    tokio::spawn(fabric.drive());
    let listener = fabric
        .listen_with(
            options.listen,
            &ListenOptions::new().rdma(options.rdma).accept_foreign_peers(),
        )
        .with_context(|| format!("cannot listen on {}", options.listen))?;
    let gateway = Gateway::new(GatewayConfig {
        max_clients: options.max_clients,
        protected_mode: options.protected_mode == YesNo::Yes,
        drain_timeout: options.drain,
        valkey: ValkeyConfig {
            window_bytes: options.rx_size,
            window_max_bytes: options.rx_size_max,
            ..ValkeyConfig::default()
        },
        ..GatewayConfig::new(options.engine.clone())
    });
    let mut signals = Signals::new()?;
    let (stop, stop_requested) = tokio::sync::oneshot::channel::<()>();
    report_listening(options, &fabric, &listener);
    let stop_when_requested = async { drop(stop_requested.await) };
    let second_signal = async {
        signals.next().await;
        drop(stop);
        signals.next().await;
    };
    let forced = tokio::select! {
        served = gateway.serve(listener, stop_when_requested) => served.map(|()| false)?,
        () = second_signal => true, // dropping `serve` closes all sessions
    };
    if forced {
        eprintln!("ferrite: second signal received, closing all sessions now");
    }
    report_ended(options, gateway.stats());
    Ok(if forced { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    address: SocketAddr,
    engine: String,
    devices: &'a [&'a str],
    rdma: String,
}

fn report_listening(options: &Options, fabric: &Fabric, listener: &Listener) {
    let address = listener.local_addr();
    // A listener without RDMA, for example on a loopback address, does not use the open devices.
    let devices = if listener.absence().is_none() { fabric.devices() } else { Vec::new() };
    if options.json {
        let line = Listening {
            event: "listening",
            address,
            engine: options.engine.to_string(),
            devices: &devices,
            rdma: options.rdma.to_string(),
        };
        println!("{}", serde_json::to_string(&line).expect("plain values"));
        return;
    }
    let over = match (devices.is_empty(), options.rdma) {
        (true, _) => "TCP only".to_owned(),
        (false, Rdma::Require) => format!("RDMA on {}", devices.join(", ")),
        (false, _) => format!("RDMA on {}, and TCP", devices.join(", ")),
    };
    eprintln!("ferrite: gateway listening on {address} ({over}), engine {}", options.engine);
}

#[derive(Serialize)]
struct Ended {
    event: &'static str,
    sessions: Sessions,
    refused: u64,
    engine_failures: u64,
    to_engine_bytes: u64,
    to_client_bytes: u64,
}

#[derive(Serialize)]
struct Sessions {
    valkey: u64,
    ferrite: u64,
    tcp: u64,
}

fn report_ended(options: &Options, stats: GatewayStats) {
    let GatewayStats {
        valkey_sessions: valkey,
        ferrite_sessions: ferrite,
        refused,
        engine_failures,
        ..
    } = stats;
    let GatewayStats { tcp_sessions: tcp, to_engine_bytes, to_client_bytes, .. } = stats;
    if options.json {
        let sessions = Sessions { valkey, ferrite, tcp };
        let line = Ended {
            event: "ended",
            sessions,
            refused,
            engine_failures,
            to_engine_bytes,
            to_client_bytes,
        };
        println!("{}", serde_json::to_string(&line).expect("plain values"));
        return;
    }
    eprintln!(
        "ferrite: gateway ended: sessions {} (Valkey {valkey}, Ferrite {ferrite}, TCP {tcp}), \
         refused {refused}, engine connection failures {engine_failures}, \
         bytes to the engine {to_engine_bytes}, to clients {to_client_bytes}",
        valkey + ferrite + tcp
    );
}
