//! `ferrite relay`: clients that know only TCP, carried over RDMA. The other half of `ferrite
//! gateway`.

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

/// Give any client RDMA: it speaks TCP to this host, and each of its connections goes over RDMA
/// from here
///
/// For clients that cannot be changed, in any language. At the other end is the Ferrite module,
/// `ferrite gateway`, or Valkey's own RDMA listener. Bytes are carried as they are, so that every
/// command works: MULTI, SUBSCRIBE, BLPOP, MONITOR.
///
/// Who can reach the address that it listens on can use the engine as if from this host: keep it on
/// loopback, or set a password in the engine.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// The server: IP (IPv6 in brackets) or name, with :PORT unless it is 6380
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<DEFAULT_PORT>)]
    to: SocketAddr,
    /// Where clients come in, over TCP: with :PORT unless it is 6379
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<LISTEN_PORT>, default_value = "127.0.0.1")]
    listen: SocketAddr,
    /// Whether RDMA may, must or must not carry them: prefer, require or forbid
    #[arg(long, value_name = "POLICY", default_value = "prefer")]
    rdma: Rdma,
    /// Connect from this local address, and so over its device
    #[arg(long, value_name = "ADDRESS", value_parser = address::parse::<0>)]
    local: Option<SocketAddr>,
    /// Busy-poll for completions for this long before sleeping: less latency for more CPU
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    busy_poll_us: u32,
    /// Print one line of JSON when it listens and one when it ends
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  ferrite relay --to 10.0.0.1        redis-cli and every other client at 127.0.0.1:6379
  ferrite relay --to 10.0.0.1:6380 --listen 127.0.0.1:7000 --rdma require

A client whose connection cannot be carried on gets an error (-ERR …) and is disconnected; the cause
is on stderr. The relay ends on SIGTERM and SIGINT, with exit code 0.

JSON lines: {event: listening, address, to, rdma}, {event: ended, sessions {rdma, tcp}, failed,
  to_server_bytes, to_client_bytes}. Failures print {error: {kind, missing?, message, remedy?}}.";

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    gateway::log_to_stderr();
    // One thread: a session is a task that copies, and what it waits for wakes it where it runs.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(options))
}

/// What it did.
#[derive(Default)]
struct Done {
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
    let listener = listening.with_context(|| format!("cannot listen on {}", options.listen))?;
    let mut signals = Signals::new()?;
    tell_listening(options, listener.local_addr()?);
    let done = Arc::new(Done::default());
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    tokio::spawn(carry(client, connector.clone(), options.to, Arc::clone(&done)));
                }
                // Too many files, or a client that has gone: others may have more luck.
                Err(error) => {
                    static LINES: LogLimit = LogLimit::new();
                    if let Some(others) = LINES.pass() {
                        tracing::warn!(%error, "a client could not be taken{others}");
                    }
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            },
            () = signals.next() => break, // nothing is waited for: a second one is not needed
        }
    }
    tell_ended(options, &done);
    Ok(())
}

async fn carry(mut client: TcpStream, connector: Connector, to: SocketAddr, done: Arc<Done>) {
    let _ = client.set_nodelay(true);
    let mut session = match connector.connect(to).await {
        Ok(session) => session,
        Err(error) => {
            done.failed.fetch_add(1, Ordering::Relaxed);
            static LINES: LogLimit = LogLimit::new();
            if let Some(others) = LINES.pass() {
                tracing::warn!(server = %to, %error, "cannot connect to the server{others}");
            }
            // Without the server's address and the system's error: those are for the log.
            let _ = client.write_all(b"-ERR Ferrite relay: cannot connect to the server\r\n").await;
            return;
        }
    };
    match session.transport() {
        SessionTransport::FerriteRdma | SessionTransport::ValkeyRdma => &done.rdma,
        _ => &done.tcp,
    }
    .fetch_add(1, Ordering::Relaxed);
    // A side that breaks off is no event.
    let _ = pump(&mut client, &mut session, &done.moved).await;
}

#[derive(Serialize)]
struct Listening {
    event: &'static str,
    address: SocketAddr,
    to: SocketAddr,
    rdma: String,
}

fn tell_listening(options: &Options, address: SocketAddr) {
    let Options { to, rdma, json, .. } = options;
    if *json {
        let line = Listening { event: "listening", address, to: *to, rdma: rdma.to_string() };
        println!("{}", serde_json::to_string(&line).expect("plain values"));
    } else {
        eprintln!("ferrite: relay at {address} to {to} (RDMA: {rdma})");
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

fn tell_ended(options: &Options, done: &Done) {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (rdma, tcp, failed) = (count(&done.rdma), count(&done.tcp), count(&done.failed));
    let (to_server_bytes, to_client_bytes) = done.moved.both();
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
            "ferrite: relay ended: sessions over RDMA {rdma}, over TCP {tcp}, failed {failed}, bytes to the server \
             {to_server_bytes}, to clients {to_client_bytes}"
        );
    }
}
