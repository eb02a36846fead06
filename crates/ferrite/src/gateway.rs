//! `ferrite gateway`: an RDMA listener in front of an engine that serves sockets only.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use ferrite_config::{Setting, Values, table};
use ferrite_fabric::wire::Program;
use ferrite_fabric::{Builder, Config, Fabric, ListenOptions, Listener, Rdma};
use ferrite_metrics::AdminServer;
use ferrite_session::{
    EngineAddress, Gateway, GatewayConfig, GatewayStats, fabric_config, open_fabric, valkey_config,
};
use futures_util::future::try_join_all;
use serde::Serialize;

use crate::admin::{self, GatewayAdmin};
use crate::engine_probe::wait_for_engine;
use crate::settings::{Flags, GatewayProgram, WrongSettings};
use crate::{address, output, start};

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
    /// Print a line of JSON when the gateway listens and when it ends
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

The gateway pins 36 MiB for each RDMA device, and from --rx-size to --rx-size-max for each client of
Valkey Over RDMA. Set LimitMEMLOCK=infinity in its systemd unit.

If the engine does not answer at start, the gateway warns with the reason and tries again every
second. Clients get an error until it answers.

On SIGTERM and SIGINT the gateway accepts no new clients, delivers outstanding replies and exits
with code 0. A client that is in the middle of sending a command delays the exit until it has sent
nothing for 1 s. The exit takes at most the time of --drain. A second signal closes all sessions at
once; the exit code is then 1. On SIGHUP the gateway reads its settings again and applies those that
can change (takes_effect in `ferrite config --program gateway --json`); the log names the others.

JSON lines: {event: listening, address, addresses[], engine, devices[], rdma, admin?},
  {event: ended, sessions {valkey, ferrite, tcp}, refused, engine_failures, to_engine_bytes, to_client_bytes}.
  Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let values = start::values(&options.flags, options.config.as_deref())?;
    let setup = Setup {
        options,
        json: options.json,
        listen: address::parse_all::<{ table::CLIENT_PORT }>(text(&values, &table::LISTEN))
            .map_err(|why| anyhow::anyhow!("--listen: {why}"))?,
        engine: text(&values, &table::ENGINE)
            .parse()
            .map_err(|why| WrongSettings(format!("--engine: {why}")))?,
        values,
    };
    start::block_on(serve(&setup))
}

/// The settings, with the addresses parsed.
struct Setup<'a> {
    options: &'a Options,
    values: Values,
    listen: Vec<SocketAddr>,
    engine: EngineAddress,
    json: bool,
}

fn text<'a>(values: &'a Values, setting: &Setting) -> &'a str {
    values.text(setting).unwrap_or_default()
}

async fn serve(setup: &Setup<'_>) -> anyhow::Result<ExitCode> {
    let values = &setup.values;
    let config = Config { program: Program::GATEWAY, ..fabric_config(values) };
    let rdma = config.rdma;
    // If `rdma-device` names no devices, the fabric opens only those that have one of these
    // addresses.
    let served: Vec<_> =
        setup.listen.iter().copied().filter(|address| !address.ip().is_loopback()).collect();
    let begin = || {
        let builder = served.iter().copied().fold(Fabric::system(), Builder::serving);
        builder.command_threads()
    };
    let fabric = open_fabric(values, &config, begin)?;
    tokio::spawn(fabric.drive());
    let listeners = setup.listen.iter().map(|at| listen(&fabric, *at, rdma, values));
    let listeners = listeners.collect::<anyhow::Result<Vec<_>>>()?;
    let mut config = GatewayConfig::new(setup.engine.clone());
    reconfigure(&mut config, values);
    let gateway = Gateway::new(config);
    let (flags, file) = (&setup.options.flags, setup.options.config.as_deref());
    let (mut signals, reload) = start::handle_signals(values, flags, file)?;
    let (stop, stop_requested) = tokio::sync::watch::channel(());
    let admin = admin::start(values, || {
        Arc::new(GatewayAdmin { fabric: fabric.clone(), gateway: gateway.clone() })
    })?;
    let admin_address = admin.as_ref().map(AdminServer::address);
    report_listening(setup, rdma, (&fabric, &listeners), admin_address);
    tokio::spawn(wait_for_engine(setup.engine.clone()));
    let serving = listeners.into_iter().map(|listener| {
        let mut stop_requested = stop_requested.clone();
        // `changed` fails when `stop` is dropped, which is the request to stop.
        gateway.serve(listener, async move { while stop_requested.changed().await.is_ok() {} })
    });
    let second_signal = async {
        signals.next().await;
        drop(stop);
        signals.next().await;
    };
    let reloading = reload.run(|values| {
        fabric.set_busy_poll_us(fabric_config(values).busy_poll_us);
        gateway.reconfigure(|config| reconfigure(config, values));
    });
    let forced = tokio::select! {
        served = try_join_all(serving) => served.map(|_| false)?,
        () = second_signal => true, // drops the futures of `serve`, which closes all sessions
        never = reloading => match never {},
    };
    if forced {
        tracing::warn!("second signal received, closing all sessions now");
    }
    report_ended(setup.json, gateway.stats());
    Ok(if forced { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Applies the settings that can change while the gateway runs.
fn reconfigure(config: &mut GatewayConfig, values: &Values) {
    config.max_clients = values.number(&table::MAX_CLIENTS);
    config.protected_mode = values.switch(&table::PROTECTED_MODE);
    config.drain_timeout = values.time(&table::DRAIN);
    config.valkey = valkey_config(values);
}

fn listen(
    fabric: &Fabric,
    at: SocketAddr,
    rdma: Rdma,
    values: &Values,
) -> anyhow::Result<Listener> {
    let options = ListenOptions::new().rdma(rdma).accept_foreign_peers();
    // Another listener may use the same port with IPv4.
    let options = if at.is_ipv6() { options.one_family() } else { options };
    let listener = fabric.listen_with(at, &options);
    let listener = listener.with_context(|| format!("cannot listen on {at}"))?;
    // If `rdma-device` names devices and the address belongs to another device, this is an error,
    // not a reason to listen over TCP only.
    let other = listener.absence().filter(|error| error.is_other_device());
    if let Some(error) = other.filter(|_| values.is_given(&table::RDMA_DEVICE)) {
        return Err(error.clone()).with_context(|| format!("cannot listen on {at}"));
    }
    Ok(listener)
}

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    address: SocketAddr,
    addresses: &'a [SocketAddr],
    engine: String,
    devices: &'a [&'a str],
    rdma: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    admin: Option<SocketAddr>,
}

fn report_listening(
    setup: &Setup<'_>,
    rdma: Rdma,
    (fabric, listeners): (&Fabric, &[Listener]),
    admin: Option<SocketAddr>,
) {
    let addresses: Vec<_> = listeners.iter().map(Listener::local_addr).collect();
    // Listeners without RDMA, for example on loopback addresses, do not use the open devices.
    let has_rdma = listeners.iter().any(|listener| listener.absence().is_none());
    let devices = if has_rdma { fabric.devices() } else { Vec::new() };
    if setup.json {
        let line = Listening {
            event: "listening",
            address: addresses[0],
            addresses: &addresses,
            engine: setup.engine.to_string(),
            devices: &devices,
            rdma: rdma.to_string(),
            admin,
        };
        output::print_event(&line);
        return;
    }
    let over = match (devices.is_empty(), rdma) {
        (true, _) => "TCP only".to_owned(),
        (false, Rdma::Require) => format!("RDMA on {}", devices.join(", ")),
        (false, _) => format!("RDMA on {}, and TCP", devices.join(", ")),
    };
    let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let addresses = addresses.join(", ");
    tracing::info!("gateway listening on {addresses} ({over}), engine {}", setup.engine);
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
        output::print_event(&line);
        return;
    }
    tracing::info!(
        "gateway ended: sessions {} (Valkey {valkey}, Ferrite {ferrite}, TCP {tcp}), \
         refused {refused}, engine connection failures {engine_failures}, \
         bytes to the engine {to_engine_bytes}, to clients {to_client_bytes}",
        valkey + ferrite + tcp
    );
}
