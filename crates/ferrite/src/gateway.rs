//! `ferrite gateway`: an RDMA listener in front of an engine that serves sockets only.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use ferrite_config::{Setting, Values, table};
use ferrite_fabric::{Fabric, ListenOptions, Listener, Rdma};
use ferrite_metrics::AdminServer;
use ferrite_session::{
    EngineAddress, Gateway, GatewayConfig, GatewayStats, fabric_config, open_fabric, valkey_config,
};
use serde::Serialize;

use crate::address;
use crate::admin::{self, GatewayAdmin};
use crate::engine_probe::wait_for_engine;
use crate::settings::{Flags, GatewayProgram};
use crate::signals::Signals;

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
    /// Configuration file (ferrite.toml); flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a line of JSON when it listens and when it ends
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    flags: Flags<GatewayProgram>,
}

const HELP: &str = "\
Examples:
  ferrite gateway --listen 10.0.0.1 --engine unix:/run/redis/redis.sock   clients use port 6380
  valkey-cli --rdma -h 10.0.0.1 -p 6380 PING                              from another host
  ferrite gateway --engine 127.0.0.1:6379 --rx-size 2mb --rdma require     large values; no TCP

The gateway pins 36 MiB for each RDMA device, and --rx-size for each client of Valkey Over RDMA.
Set LimitMEMLOCK=infinity in its systemd unit.

If the engine does not answer at start, the gateway warns with the reason and tries again every
second. Clients get an error until it answers.

On SIGTERM and SIGINT it accepts no new clients, delivers outstanding replies and exits with code 0.
A client in the middle of a command delays that while it keeps sending, and for 1 s afterwards.
A second signal stops it at once, with exit code 1.

JSON lines: {event: listening, address, engine, devices[], rdma, admin?}, {event: ended, sessions
  {valkey, ferrite, tcp}, refused, engine_failures, to_engine_bytes, to_client_bytes}.
  Failures print {error: {kind, missing?, message, remedy?}}.";

/// Prints the libraries' warnings on stderr, and with `verbose` also what they do.
pub(crate) fn log_to_stderr(verbose: bool) {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_max_level(if verbose { tracing::Level::INFO } else { tracing::Level::WARN })
        .without_time()
        .with_target(false)
        .init();
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let values = options.flags.values(options.config.as_deref())?;
    log_to_stderr(values.switch(&table::TRACE_VERBOSE));
    let setup = Setup {
        json: options.json,
        listen: address::parse::<{ table::CLIENT_PORT }>(text(&values, &table::LISTEN))
            .map_err(|why| anyhow::anyhow!("--listen: {why}"))?,
        engine: text(&values, &table::ENGINE)
            .parse()
            .map_err(|why| anyhow::anyhow!("--engine: {why}"))?,
        values,
    };
    // One thread: sessions only copy bytes, and need no wake-ups across threads this way.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(&setup))
}

/// The settings, with the addresses parsed.
struct Setup {
    values: Values,
    listen: SocketAddr,
    engine: EngineAddress,
    json: bool,
}

fn text<'a>(values: &'a Values, setting: &Setting) -> &'a str {
    values.text(setting).unwrap_or_default()
}

async fn serve(setup: &Setup) -> anyhow::Result<ExitCode> {
    let values = &setup.values;
    let config = fabric_config(values);
    let rdma = config.rdma;
    let fabric = open_fabric(values, &config, || Fabric::system().command_threads())?;
    tokio::spawn(fabric.drive());
    let listener = fabric
        .listen_with(setup.listen, &ListenOptions::new().rdma(rdma).accept_foreign_peers())
        .with_context(|| format!("cannot listen on {}", setup.listen))?;
    let gateway = Gateway::new(GatewayConfig {
        max_clients: values.number(&table::MAX_CLIENTS),
        protected_mode: values.switch(&table::PROTECTED_MODE),
        drain_timeout: values.time(&table::DRAIN),
        valkey: valkey_config(values),
        ..GatewayConfig::new(setup.engine.clone())
    });
    let admin = admin::start(values, || {
        Arc::new(GatewayAdmin { fabric: fabric.clone(), gateway: gateway.clone() })
    })?;
    let mut signals = Signals::new()?;
    let (stop, stop_requested) = tokio::sync::oneshot::channel::<()>();
    let admin_address = admin.as_ref().map(AdminServer::address);
    report_listening(setup, rdma, (&fabric, &listener), admin_address);
    let engine = setup.engine.clone();
    tokio::spawn(async move { wait_for_engine(&engine).await });
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
    report_ended(setup.json, gateway.stats());
    Ok(if forced { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    address: SocketAddr,
    engine: String,
    devices: &'a [&'a str],
    rdma: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    admin: Option<SocketAddr>,
}

fn report_listening(
    setup: &Setup,
    rdma: Rdma,
    (fabric, listener): (&Fabric, &Listener),
    admin: Option<SocketAddr>,
) {
    let address = listener.local_addr();
    // A listener without RDMA, for example on a loopback address, does not use the open devices.
    let devices = if listener.absence().is_none() { fabric.devices() } else { Vec::new() };
    if setup.json {
        let line = Listening {
            event: "listening",
            address,
            engine: setup.engine.to_string(),
            devices: &devices,
            rdma: rdma.to_string(),
            admin,
        };
        println!("{}", serde_json::to_string(&line).expect("plain values"));
        return;
    }
    let over = match (devices.is_empty(), rdma) {
        (true, _) => "TCP only".to_owned(),
        (false, Rdma::Require) => format!("RDMA on {}", devices.join(", ")),
        (false, _) => format!("RDMA on {}, and TCP", devices.join(", ")),
    };
    eprintln!("ferrite: gateway listening on {address} ({over}), engine {}", setup.engine);
    admin::report(admin);
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

fn report_ended(json: bool, stats: GatewayStats) {
    let GatewayStats {
        valkey_sessions: valkey,
        ferrite_sessions: ferrite,
        refused,
        engine_failures,
        ..
    } = stats;
    let GatewayStats { tcp_sessions: tcp, to_engine_bytes, to_client_bytes, .. } = stats;
    if json {
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
