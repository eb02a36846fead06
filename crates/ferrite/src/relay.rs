//! `ferrite relay`: carries TCP clients over RDMA. It is the counterpart of `ferrite gateway`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use clap::Args;
use ferrite_fabric::{Config, Fabric, LogLimit, Rdma};
use ferrite_session::{Connector, Moved, SessionTransport, client_config, pump};
use serde::Serialize;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};

use crate::signals::Signals;
use crate::{address, gateway};

const DEFAULT_PORT: u16 = 6380;
const LISTEN_PORT: u16 = 6379;

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
    /// The server's address: IP (IPv6 in brackets) or name, and :PORT (default 6380)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>)]
    to: SocketAddr,
    /// Address to listen on over TCP, with :PORT (default 6379)
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<LISTEN_PORT>,
          default_value = "127.0.0.1")]
    listen: SocketAddr,
    /// Whether connections to the server may, must or must not use RDMA: prefer, require or forbid
    #[arg(long, value_name = "POLICY", default_value = "prefer")]
    rdma: Rdma,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>)]
    local: Option<SocketAddr>,
    /// Microseconds to busy-poll for completions before sleeping: less latency for more CPU
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    busy_poll_us: u32,
    /// Print a line of JSON when it listens and when it ends
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite relay --to 10.0.0.1        clients connect to 127.0.0.1:6379
  ferrite relay --to 10.0.0.1:6380 --listen 127.0.0.1:7000 --rdma require

If the relay cannot connect to the server, the client gets an error (-ERR …) and is disconnected;
the cause is on stderr. The relay ends on SIGTERM and SIGINT, with exit code 0.

JSON lines: {event: listening, address, to, rdma}, {event: ended, sessions {rdma, tcp}, failed,
  to_server_bytes, to_client_bytes}. Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    gateway::log_to_stderr();
    // One thread: sessions only copy bytes, and need no wake-ups across threads this way.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(options))
}

/// Counters of the relay's work.
#[derive(Default)]
struct Counters {
    rdma: AtomicU64,
    tcp: AtomicU64,
    failed: AtomicU64,
    moved: Moved,
}

async fn serve(options: &Options) -> anyhow::Result<()> {
    let config = Config { busy_poll_us: options.busy_poll_us, ..client_config() };
    let fabric = Fabric::system().rdma(options.rdma).config(config).command_threads().build()?;
    tokio::spawn(fabric.drive());
    let mut connector = Connector::new(&fabric).rdma(options.rdma);
    if let Some(local) = options.local {
        connector = connector.local(local);
    }
    let listening = TcpListener::bind(options.listen).await;
    let listener = match listening {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => anyhow::bail!(
            "cannot listen on {}: {error}; choose another port, or stop the program that has it \
             (`ss -ltnp` names it)",
            options.listen
        ),
        other => other.with_context(|| format!("cannot listen on {}", options.listen))?,
    };
    let mut signals = Signals::new()?;
    report_listening(options, listener.local_addr()?);
    let counters = Arc::new(Counters::default());
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    let (connector, counters) = (connector.clone(), Arc::clone(&counters));
                    tokio::spawn(relay_client(client, connector, options.to, counters));
                }
                // Too many open files, or the client has disconnected. Accepts the next one.
                Err(error) => {
                    static LINES: LogLimit = LogLimit::new();
                    if let Some(others) = LINES.pass() {
                        tracing::warn!(%error, "cannot accept a client{others}");
                    }
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            // It exits at once, so there is no second signal to wait for.
            () = signals.next() => break,
        }
    }
    report_ended(options, &counters);
    Ok(())
}

async fn relay_client(
    mut client: TcpStream,
    connector: Connector,
    to: SocketAddr,
    counters: Arc<Counters>,
) {
    let _ = client.set_nodelay(true);
    let mut session = match connector.connect(to).await {
        Ok(session) => session,
        Err(error) => {
            counters.failed.fetch_add(1, Ordering::Relaxed);
            static LINES: LogLimit = LogLimit::new();
            if let Some(others) = LINES.pass() {
                tracing::warn!(server = %to, %error, "cannot connect to the server{others}");
            }
            // The server's address and the system's error go to the log only.
            let _ = client.write_all(b"-ERR Ferrite relay: cannot connect to the server\r\n").await;
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
}

fn report_listening(options: &Options, address: SocketAddr) {
    let Options { to, rdma, json, .. } = options;
    if *json {
        let line = Listening { event: "listening", address, to: *to, rdma: rdma.to_string() };
        println!("{}", serde_json::to_string(&line).expect("plain values"));
    } else {
        eprintln!("ferrite: relay listening on {address}, server {to} (RDMA: {rdma})");
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

fn report_ended(options: &Options, counters: &Counters) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (rdma, tcp, failed) =
        (count(&counters.rdma), count(&counters.tcp), count(&counters.failed));
    let (to_server_bytes, to_client_bytes) = counters.moved.both();
    if options.json {
        let line = Ended {
            event: "ended",
            sessions: Sessions { rdma, tcp },
            failed,
            to_server_bytes,
            to_client_bytes,
        };
        println!("{}", serde_json::to_string(&line).expect("plain values"));
    } else {
        eprintln!(
            "ferrite: relay ended: sessions over RDMA {rdma}, over TCP {tcp}, failed {failed}, \
             bytes to the server {to_server_bytes}, to clients {to_client_bytes}"
        );
    }
}
