//! `ferrite relay`: carries TCP clients over RDMA. It is the counterpart of `ferrite gateway`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Args;
use ferrite_config::{Values, table};
use ferrite_fabric::{Fabric, LogLimit, Rdma};
use ferrite_metrics::{AdminServer, listen_hint};
use ferrite_session::{
    Connector, SessionTransport, enable_tcp_keepalive, fabric_config, open_fabric, pump,
};
use serde::Serialize;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};

use crate::admin::{self, RelayAdmin, RelayCounters, relay_server_answers};
use crate::engine_probe::wait_for;
use crate::settings::{Flags, RelayProgram, WrongSettings};
use crate::{address, output, start};

/// Carry TCP clients of this host over RDMA to a server
///
/// For clients that cannot be changed, in any language. At the other end is the Ferrite module,
/// `ferrite gateway`, or Valkey's own RDMA listener. Bytes are carried unchanged, so every command
/// works: MULTI, SUBSCRIBE, BLPOP, MONITOR.
///
/// Everybody who can reach the relay's address can use the engine as if from this host. Keep the
/// relay on loopback, or set a password in the engine.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// Configuration file (ferrite.toml); flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a line of JSON when the relay listens and when it ends
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    flags: Flags<RelayProgram>,
}

/// How long the server may take to answer at start. Both transports may be tried in this time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client that is refused may take to close the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The settings, with the addresses parsed.
struct Setup<'a> {
    options: &'a Options,
    values: Values,
    to: SocketAddr,
    listen: SocketAddr,
    local: Option<SocketAddr>,
    json: bool,
}

const HELP: &str = "\
Examples:
  ferrite relay --to 10.0.0.1        clients connect to 127.0.0.1:6379
  ferrite relay --to 10.0.0.1:6380 --listen 127.0.0.1:7000 --rdma require

At start the relay asks the server for an answer. If none comes, it warns with the reason and tries
again every second. If the relay cannot connect to the server, the client gets an error (-ERR …) and
is disconnected; the cause is on stderr. The relay ends on SIGTERM and SIGINT, with exit code 0. On
SIGHUP it reads its settings again and applies those that can change; the log names the others.

JSON lines: {event: listening, address, to, rdma, admin?}, {event: ended, sessions {rdma, tcp},
  failed, to_server_bytes, to_client_bytes}. Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let values = start::values(&options.flags, options.config.as_deref())?;
    let wrong = |name: &'static str| move |why: String| anyhow::anyhow!("--{name}: {why}");
    let Some(to) = values.text(&table::TO) else {
        return Err(WrongSettings("--to is missing; give the address of the server".into()).into());
    };
    let listen = values.text(&table::RELAY_LISTEN).unwrap_or_default();
    let local = values.text(&table::LOCAL).map(address::parse::<0>).transpose();
    let setup = Setup {
        options,
        to: address::parse::<{ table::CLIENT_PORT }>(to).map_err(wrong("to"))?,
        listen: address::parse::<{ table::ENGINE_PORT }>(listen).map_err(wrong("listen"))?,
        local: local.map_err(wrong("local"))?,
        json: options.json,
        values,
    };
    start::block_on(serve(&setup))
}

async fn serve(setup: &Setup<'_>) -> anyhow::Result<()> {
    let config = fabric_config(&setup.values);
    let rdma = config.rdma;
    let fabric = open_fabric(&setup.values, &config, || Fabric::system().command_threads())?;
    tokio::spawn(fabric.drive());
    let mut connector = Connector::new(&fabric).rdma(rdma);
    if let Some(local) = setup.local {
        connector = connector.local(local);
    }
    let listener = TcpListener::bind(setup.listen).await.map_err(|error| {
        anyhow::anyhow!("cannot listen on {}: {error}{}", setup.listen, listen_hint(&error))
    })?;
    let counters = Arc::new(RelayCounters::default());
    let admin = admin::start(&setup.values, || {
        let (connector, counters) = (connector.clone(), Arc::clone(&counters));
        Arc::new(RelayAdmin { fabric: fabric.clone(), connector, to: setup.to, counters })
    })?;
    let (flags, file) = (&setup.options.flags, setup.options.config.as_deref());
    let (mut signals, reload) = start::handle_signals(&setup.values, flags, file)?;
    let admin_address = admin.as_ref().map(AdminServer::address);
    report_listening(setup, rdma, listener.local_addr()?, admin_address);
    let (probed, to) = (connector.clone(), setup.to);
    let ask = move || {
        let connector = probed.clone();
        async move { relay_server_answers(&connector, to).await }
    };
    tokio::spawn(wait_for(format!("the server at {to}"), PROBE_TIMEOUT, ask));
    let reloading =
        reload.run(|values| fabric.set_busy_poll_us(fabric_config(values).busy_poll_us));
    let mut reloading = std::pin::pin!(reloading);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    let (connector, counters) = (connector.clone(), Arc::clone(&counters));
                    tokio::spawn(relay_client(client, connector, setup.to, counters));
                }
                // Either there are too many open files, or the client has disconnected. Waits a
                // moment, then accepts the next client.
                Err(error) => {
                    static LINES: LogLimit = LogLimit::new();
                    if let Some(others) = LINES.pass() {
                        tracing::warn!(%error, "cannot accept a client{others}");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            // The relay exits at once, so there is no second signal to wait for.
            () = signals.next() => break,
            never = &mut reloading => match never {},
        }
    }
    report_ended(setup.json, &counters);
    Ok(())
}

/// Sends an error to a client, then reads until the client closes the connection. If the relay
/// closed the connection while unread input was left, the kernel would reset it, and the client
/// might not receive the error.
async fn refuse(client: &mut TcpStream, error: &[u8]) -> std::io::Result<()> {
    client.write_all(error).await?;
    client.shutdown().await?;
    tokio::io::copy(client, &mut tokio::io::sink()).await.map(drop)
}

async fn relay_client(
    mut client: TcpStream,
    connector: Connector,
    to: SocketAddr,
    counters: Arc<RelayCounters>,
) {
    let _ = client.set_nodelay(true);
    enable_tcp_keepalive(&client);
    let mut session = match connector.connect(to).await {
        Ok(session) => session,
        Err(error) => {
            counters.failed.fetch_add(1, Ordering::Relaxed);
            static LINES: LogLimit = LogLimit::new();
            if let Some(others) = LINES.pass() {
                tracing::warn!(server = %to, %error, "cannot connect to the server{others}");
            }
            // The server's address and the system's error go to the log only.
            let error = b"-ERR Ferrite relay: cannot connect to the server\r\n";
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, refuse(&mut client, error)).await;
            return;
        }
    };
    match session.transport() {
        SessionTransport::FerriteRdma | SessionTransport::ValkeyRdma => &counters.rdma,
        _ => &counters.tcp,
    }
    .fetch_add(1, Ordering::Relaxed);
    // A lost connection on either side is not worth a log line.
    let _ = pump(&mut client, &mut session, &counters.moved).await;
}

#[derive(Serialize)]
struct Listening {
    event: &'static str,
    address: SocketAddr,
    to: SocketAddr,
    rdma: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    admin: Option<SocketAddr>,
}

fn report_listening(setup: &Setup<'_>, rdma: Rdma, address: SocketAddr, admin: Option<SocketAddr>) {
    let Setup { to, json, .. } = setup;
    if *json {
        let rdma = rdma.to_string();
        let line = Listening { event: "listening", address, to: *to, rdma, admin };
        output::print_event(&line);
    } else {
        tracing::info!("relay listening on {address}, server {to} (RDMA: {rdma})");
        admin::report(admin);
    }
}

#[derive(Serialize)]
struct Ended {
    event: &'static str,
    sessions: Sessions,
    failed: u64,
    to_server_bytes: u64,
    to_client_bytes: u64,
}

#[derive(Serialize)]
struct Sessions {
    rdma: u64,
    tcp: u64,
}

fn report_ended(json: bool, counters: &RelayCounters) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (rdma, tcp, failed) =
        (count(&counters.rdma), count(&counters.tcp), count(&counters.failed));
    let (to_server_bytes, to_client_bytes) = counters.moved.both();
    if json {
        let line = Ended {
            event: "ended",
            sessions: Sessions { rdma, tcp },
            failed,
            to_server_bytes,
            to_client_bytes,
        };
        output::print_event(&line);
    } else {
        tracing::info!(
            "relay ended: sessions over RDMA {rdma}, over TCP {tcp}, failed {failed}, \
             bytes to the server {to_server_bytes}, to clients {to_client_bytes}"
        );
    }
}
