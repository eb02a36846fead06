//! `ferrite agent`: carries the connections of unchanged programs and engines between hosts.

mod control;
mod host_setup;
mod other_agents;
mod redirection;
mod rehome;
mod report;
mod rules;
mod setup;
mod sockets;
mod transparent;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use ferrite_config::Values;
use ferrite_fabric::wire::Program;
use ferrite_fabric::{Config, Fabric, ListenOptions, Listener, Rdma};
use ferrite_metrics::AdminServer;
use ferrite_session::agent::Agent;
use ferrite_session::{fabric_config, open_fabric, rdma_policy};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::oneshot;

pub(crate) use control::{Control, Request};
pub(crate) use setup::Setup;

use control::SignalControl;
use setup::reconfigure;

use crate::admin::{self, AgentAdmin};
use crate::redirection_state::RedirectionState;
use crate::settings::{AgentProgram, Flags, WrongSettings};
use crate::{output, start};

/// Carry the connections of a group of hosts over a few RDMA or TCP links
///
/// One agent runs on each host of a Redis or Valkey cluster. It carries clients, replication and
/// the cluster bus. Neither engines nor clients are changed, and no privilege is needed. Each host
/// has a loopback address, its alias. Engines bind the alias of their host, and all programs use
/// the aliases. On each host the agent listens at the aliases of the other hosts.
///
/// With --mode transparent there are no aliases: if a program connects to a port of a peer, the
/// kernel redirects the connection to the agent, and engines see the addresses of the programs.
/// This mode needs CAP_NET_ADMIN and CAP_NET_RAW.
///
/// With --tls-cert-file, --tls-key-file and --tls-ca-cert-file, agents authenticate each other by
/// TLS. Without them, a peer is recognised by its address alone: use the agent only in a network
/// where nobody else can have these addresses. Without TLS, the agent accepts addresses other than
/// loopback only with --allow-unauthenticated-peers yes. RDMA is never encrypted.
#[derive(Args)]
#[command(after_help = HELP, args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Option<Action>,
    /// Configuration file (ferrite.toml); flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a line of JSON when the agent listens and when it ends
    #[arg(long)]
    json: bool,
    /// Print the commands that prepare a host for --mode transparent, and exit
    #[arg(long)]
    print_setup: bool,
    #[command(flatten)]
    flags: Flags<AgentProgram>,
}

#[derive(Subcommand)]
enum Action {
    Rehome(rehome::Options),
}

impl Options {
    /// Returns whether to print failures as JSON.
    pub(crate) fn json(&self) -> bool {
        match &self.action {
            Some(Action::Rehome(options)) => options.json,
            None => self.json,
        }
    }
}

const HELP: &str = "\
Example, on host 1 of three; the others have their own --alias, --listen and --peer:
  ferrite agent --alias 127.1.0.1 --listen 10.0.0.1 --ports 7000-7009,17000-17009 \\
    --peer 127.1.0.2=10.0.0.2 --peer 127.1.0.3=10.0.0.3 \\
    --tls-cert-file host1.crt --tls-key-file host1.key --tls-ca-cert-file ca.crt
  redis-server --bind 127.1.0.1 --bind-source-addr 127.1.0.1 --port 7001 --cluster-enabled yes \\
    --requirepass … --masterauth …
  redis-cli -a … --cluster create 127.1.0.1:7001 127.1.0.2:7001 127.1.0.3:7001

Without aliases, as root; the same on all hosts but for --listen and the certificate:
  ferrite agent --mode transparent --listen 10.0.0.1 --peer 10.0.0.1,10.0.0.2,10.0.0.3 \\
    --ports 7000-7009,17000-17009 \\
    --tls-cert-file host1.crt --tls-key-file host1.key --tls-ca-cert-file ca.crt

While there is no link to a host, connections to its alias are reset after 300 ms at most. The agent
tries to open the link again after 5 s, and after each further failure twice as long, up to 60 s. If
a link is lost, its connections are reset.

While an engine requires no password, connections of other hosts to it are refused. Set requirepass
and masterauth in the engines, or start the agent with --protected-mode no.

On SIGTERM and SIGINT the agent accepts nothing new, lets connections end and exits with code 0.
Connections that are still open after --drain are reset. A second signal resets all connections at
once; the exit code is then 1. On SIGHUP the agent reads its settings again and applies those that
can change.

JSON lines: {event: listening, address?, addresses[], mode, alias, peers[], ports, rdma,
  admin?},
  {event: ended, streams {opened, accepted}, refused, without_link, direct, to_peer_bytes,
  from_peer_bytes}. Failures print {error: {kind, missing?, message, remedy?}}.";

/// How long a peer may be silent, and how long it may then leave a probe unanswered.
const KEEPALIVE: Duration = Duration::from_secs(1);
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a peer may leave a probe over TCP unanswered while its kernel is silent, too. Programs
/// would keep direct connections meanwhile. TCP sends again 6.2 and 12.6 s after the first attempt,
/// so links survive interruptions of 6 s, and most of 12 s. With [`KEEPALIVE`], the time is less
/// than the 15 s after which engines by default regard a node as failed (`cluster-node-timeout`).
const TCP_SILENCE_TIMEOUT: Duration = Duration::from_secs(13);

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    if let Some(Action::Rehome(options)) = &options.action {
        return rehome::run(options);
    }
    if options.print_setup {
        output::write_line(host_setup::commands().trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let (flags, file) = (&options.flags, options.config.as_deref());
    let values = start::values(flags, file)?;
    let setup = Setup { json: options.json, ..Setup::new(values.clone())? };
    let begin = || {
        let (signals, reload) = start::handle_signals(&values, flags, file)?;
        Ok(SignalControl { signals, reload })
    };
    let is_drained = serve(setup, begin)?;
    Ok(if is_drained { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs an agent until it is asked to end. Calls `begin` when it listens; what that returns then
/// controls the agent. Returns whether the agent has drained.
pub(crate) fn serve<C: Control>(
    setup: Setup,
    begin: impl FnOnce() -> anyhow::Result<C>,
) -> anyhow::Result<bool> {
    raise_descriptor_limit();
    start::block_on(serve_in_runtime(setup, begin))
}

/// Raises the soft limit of open files to the hard limit: the agent has a socket for each peer and
/// port, and one for each connection.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// Returns how many more descriptors this process may open.
fn free_descriptors() -> Option<usize> {
    let limit = usize::try_from(getrlimit(Resource::Nofile).current?).ok()?;
    let open = std::fs::read_dir("/proc/self/fd").ok()?.count();
    Some(limit.saturating_sub(open))
}

/// If links must use RDMA, checks that the devices can be opened as the agent will open them.
///
/// # Errors
/// Fails if RDMA is unavailable on this host, or to this user.
pub(crate) fn check_rdma(setup: &Setup) -> anyhow::Result<()> {
    if rdma_policy(&setup.values) == Rdma::Require {
        open(setup)?;
    }
    Ok(())
}

fn open(setup: &Setup) -> anyhow::Result<Fabric> {
    let Setup { values, listen, .. } = setup;
    let config = Config {
        program: Program::AGENT,
        // Short, because all connections to a host hang while its agent hangs or its RDMA path is
        // lost. There are few links, so the keepalives cost little.
        keepalive: KEEPALIVE,
        peer_timeout: PEER_TIMEOUT,
        tcp_silence_timeout: Some(TCP_SILENCE_TIMEOUT),
        ..fabric_config(values)
    };
    // If `rdma-device` names no devices, the fabric opens only those that have one of these
    // addresses.
    let served: Vec<_> =
        listen.iter().copied().filter(|address| !address.ip().is_loopback()).collect();
    let open = || {
        let builder =
            served.iter().copied().fold(Fabric::system(), ferrite_fabric::Builder::serving);
        builder.command_threads()
    };
    Ok(open_fabric(values, &config, open)?)
}

async fn serve_in_runtime<C: Control>(
    mut setup: Setup,
    begin: impl FnOnce() -> anyhow::Result<C>,
) -> anyhow::Result<bool> {
    transparent::find_own_addresses(&mut setup.config).await?;
    let fabric = open(&setup)?;
    let Setup { values, config, listen, .. } = &setup;
    let rdma = rdma_policy(values);
    tokio::spawn(fabric.drive());
    let agent = Agent::new(fabric.clone(), config.clone()).map_err(WrongSettings)?;
    let mut programs = agent.listen().map_err(|(address, error)| cannot_listen(address, &error))?;
    let listeners = listen.iter().map(|at| {
        let options = ListenOptions::new().rdma(rdma);
        let options = match &config.tls {
            Some(tls) => tls.listen(options),
            None => options,
        };
        let options = if at.is_ipv6() { options.one_family() } else { options };
        fabric.listen_with(*at, &options).with_context(|| format!("cannot listen on {at}"))
    });
    let listeners = listeners.collect::<anyhow::Result<Vec<Listener>>>()?;
    let handle = agent.handle();
    let mut redirecting = transparent::redirect(&agent, &mut programs, config).await?;
    let redirection = Arc::new(RedirectionState::default());
    let admin = admin::start(values, || {
        let (fabric, agent, engine) = (fabric.clone(), handle.clone(), setup.engine.clone());
        Arc::new(AgentAdmin { fabric, agent, engine, redirection: Arc::clone(&redirection) })
    })?;
    let mut control = begin()?;
    if let Some(free) = free_descriptors() {
        handle.limit_descriptors(free);
    }
    report::listening(&setup, &listeners, admin.as_ref().map(AdminServer::address));
    report::warn_of_clear_text(values, config, rdma);
    let (stop, stop_requested) = oneshot::channel::<()>();
    let serving = agent.serve(programs, listeners, async {
        let _ = stop_requested.await; // dropping `stop` is the request
    });
    let apply = |values: &Values| {
        fabric.set_busy_poll_us(ferrite_session::fabric_config(values).busy_poll_us);
        handle.reconfigure(|config| reconfigure(config, values));
    };
    let forced_end = async {
        loop {
            tokio::select! {
                request = control.next() => match request {
                    Request::Reconfigure(values) => apply(&values),
                    Request::Drain => break,
                    Request::End => return,
                },
                never = transparent::keep(&mut redirecting, &handle, &redirection) => {
                    match never {}
                }
            }
        }
        tracing::info!("accepting nothing new; a second signal resets connections");
        transparent::stop(&mut redirecting).await;
        drop((stop, admin)); // the port is then free for another agent
        while let Request::Reconfigure(values) = control.next().await {
            apply(&values);
        }
    };
    let is_drained = tokio::select! {
        served = serving => served.map(|()| true)?,
        () = forced_end => false, // drops the future of `serve`, which resets all connections
    };
    if !is_drained {
        tracing::warn!("resetting all connections now");
    }
    report::ended(setup.json, &handle.stats());
    Ok(is_drained)
}

fn cannot_listen(address: SocketAddr, error: &std::io::Error) -> anyhow::Error {
    let hint = match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "; engines of this host must bind the alias of this host alone, not 0.0.0.0"
        }
        std::io::ErrorKind::PermissionDenied => "; ports below 1024 need a privilege",
        _ => "; name fewer ports, or raise the limit of open files (LimitNOFILE)",
    };
    anyhow::anyhow!("cannot listen on {address}: {error}{hint}")
}
