//! `ferrite agent`: carries the connections of unchanged programs and engines between hosts.

mod host_setup;
mod rules;
mod transparent;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use ferrite_config::ports::PortSet;
use ferrite_config::{Policy, Values, peer, table};
use ferrite_fabric::rustls::crypto::ring;
use ferrite_fabric::rustls::pki_types::ServerName;
use ferrite_fabric::wire::Program;
use ferrite_fabric::{Config, Fabric, ListenOptions, Listener, Rdma};
use ferrite_metrics::AdminServer;
use ferrite_session::agent::{Agent, AgentConfig, AgentPeer, AgentStats, AgentTls, Transparent};
use ferrite_session::{fabric_config, open_fabric};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use tokio::sync::oneshot;

use crate::admin::{self, AgentAdmin};
use crate::reload::Reload;
use crate::settings::{self, AgentProgram, Flags, WrongSettings};
use crate::signals::Signals;
use crate::{address, log, output};

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
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// Configuration file (ferrite.toml); flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print a line of JSON when the agent listens and when it ends
    #[arg(long)]
    pub(crate) json: bool,
    /// Print the commands that prepare a host for --mode transparent, and exit
    #[arg(long)]
    print_setup: bool,
    #[command(flatten)]
    flags: Flags<AgentProgram>,
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

/// The settings, with the addresses parsed.
struct Setup<'a> {
    options: &'a Options,
    values: Values,
    config: AgentConfig,
    listen: Vec<SocketAddr>,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    if options.print_setup {
        output::write_line(host_setup::commands().trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let values = options.flags.values(options.config.as_deref())?;
    log::install(&values);
    settings::warn_of_unknown_variables();
    let listen = match values.text(&table::AGENT_LISTEN) {
        Some(text) => address::parse_all::<{ table::AGENT_PORT }>(text)
            .map_err(|why| anyhow::anyhow!("--listen: {why}"))?,
        None => Vec::new(),
    };
    let config = agent_config(&values, &listen)?;
    config.check().map_err(WrongSettings)?;
    check_authentication(&values, &config, &listen)?;
    let setup = Setup { options, values, config, listen };
    raise_descriptor_limit();
    // One thread is enough, because sessions only copy bytes, and it avoids wake-ups between
    // threads.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(setup))
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

fn agent_config(values: &Values, listen: &[SocketAddr]) -> anyhow::Result<AgentConfig> {
    let mut config = match values.text(&table::AGENT_MODE) {
        Some("transparent") => transparent::config(values, listen)?,
        _ => alias_config(values)?,
    };
    let ports = |setting| PortSet::parse(values.list(setting)).unwrap_or_default();
    config.ports = ports(&table::PORTS);
    config.deliver = match values.is_given(&table::DELIVER) {
        true => ports(&table::DELIVER),
        false => config.ports.clone(),
    };
    // Peers recognise this host by the address that it connects from.
    let local = listen.first().filter(|address| !address.ip().is_unspecified());
    config.local = local.map(|address| SocketAddr::new(address.ip(), 0));
    config.own = listen.to_vec();
    let admin = values.text(&table::ADMIN_LISTEN);
    let admin = admin.and_then(|text| text.parse::<SocketAddr>().ok());
    config.own.extend(admin);
    config.tls = tls(values)?;
    reconfigure(&mut config, values);
    Ok(config)
}

fn alias_config(values: &Values) -> anyhow::Result<AgentConfig> {
    let Some(alias) = values.text(&table::ALIAS).and_then(peer::alias) else {
        let why = "--alias is missing; give this host a loopback address, such as 127.1.0.1";
        return Err(WrongSettings(why.into()).into());
    };
    let peers = values.list(&table::PEERS).iter().map(|word| {
        let Some((alias, at)) = peer::split(word) else {
            let why = format!("--peer {word}: with `mode alias`, a peer is ALIAS=HOST:PORT");
            return Err(WrongSettings(why).into());
        };
        let address = address::parse::<{ table::AGENT_PORT }>(at);
        let address = address.map_err(|why| anyhow::anyhow!("--peer {word}: {why}"))?;
        let peer = AgentPeer::new(alias, address);
        let host = ferrite_config::address::split(at).map_or(at, |(host, _)| host);
        // A certificate cannot have the name of an address with an interface (`fe80::1%eth0`). Such
        // a peer has only the name that `AgentPeer::new` gives it.
        Ok(match ServerName::try_from(host.to_owned()) {
            Ok(name) => AgentPeer { name, ..peer },
            Err(_) => peer,
        })
    });
    let mut config = AgentConfig::new(alias);
    config.peers = peers.collect::<anyhow::Result<_>>()?;
    Ok(config)
}

/// Reads the certificates and the key, if the settings name them.
fn tls(values: &Values) -> anyhow::Result<Option<AgentTls>> {
    let files = [&table::AGENT_CERTIFICATE, &table::AGENT_KEY, &table::AGENT_CA];
    let [Some(certificate), Some(key), Some(ca)] = files.map(|file| values.text(file)) else {
        return match files.iter().find(|file| values.text(file).is_none()) {
            Some(missing) if files.iter().any(|file| values.text(file).is_some()) => {
                let why = format!(
                    "--{} is missing; TLS between agents needs --tls-cert-file, --tls-key-file \
                     and --tls-ca-cert-file",
                    missing.name
                );
                Err(WrongSettings(why).into())
            }
            _ => Ok(None),
        };
    };
    let provider = Arc::new(ring::default_provider());
    let tls = AgentTls::read(certificate.as_ref(), key.as_ref(), ca.as_ref(), &provider);
    Ok(Some(tls.map_err(|error| WrongSettings(format!("cannot use TLS: {error}")))?))
}

/// Applies the settings that can change while the agent runs.
fn reconfigure(config: &mut AgentConfig, values: &Values) {
    config.protected_mode = values.switch(&table::AGENT_PROTECTED_MODE);
    config.drain_timeout = values.time(&table::AGENT_DRAIN);
    config.direct = match values.text(&table::DIRECT) {
        Some(given) => given == "allow",
        None => config.transparent.is_some() && values.policy() != Ok(Policy::Require),
    };
}

/// Without TLS, refuses addresses other than loopback, unless the user has accepted the risk.
fn check_authentication(
    values: &Values,
    config: &AgentConfig,
    listen: &[SocketAddr],
) -> Result<(), WrongSettings> {
    if config.tls.is_some() {
        if values.switch(&table::ALLOW_UNAUTHENTICATED_PEERS) {
            let why = "allow-unauthenticated-peers yes contradicts tls-cert-file, with which all \
                       peers are authenticated; remove one of the two settings";
            return Err(WrongSettings(why.into()));
        }
        return Ok(());
    }
    let outside = |ip: IpAddr| !ip.is_loopback();
    let peers = config.peers.iter().map(|peer| peer.address);
    let Some(address) = listen.iter().copied().chain(peers).find(|at| outside(at.ip())) else {
        return Ok(());
    };
    if !values.switch(&table::ALLOW_UNAUTHENTICATED_PEERS) {
        return Err(WrongSettings(format!(
            "{address} is not a loopback address, and there is no TLS: any host that takes the \
             address of a peer can reach the engines' ports. Set tls-cert-file, tls-key-file and \
             tls-ca-cert-file or, if only trusted hosts are in this network, start with \
             --allow-unauthenticated-peers yes"
        )));
    }
    Ok(())
}

async fn serve(setup: Setup<'_>) -> anyhow::Result<ExitCode> {
    let Setup { options, values, config, listen } = &setup;
    let fabric_config = Config {
        program: Program::AGENT,
        // Short, because all connections to a host hang while its link is dead. There are few
        // links, so the keepalives cost little.
        keepalive: KEEPALIVE,
        peer_timeout: PEER_TIMEOUT,
        ..fabric_config(values)
    };
    let rdma = fabric_config.rdma;
    // If `rdma-device` names no devices, the fabric opens only those that have one of these
    // addresses.
    let served: Vec<_> =
        listen.iter().copied().filter(|address| !address.ip().is_loopback()).collect();
    let begin = || {
        let builder =
            served.iter().copied().fold(Fabric::system(), ferrite_fabric::Builder::serving);
        builder.command_threads()
    };
    let fabric = open_fabric(values, &fabric_config, begin)?;
    tokio::spawn(fabric.drive());
    let agent = Agent::new(fabric.clone(), config.clone()).map_err(WrongSettings)?;
    let programs = agent.listen().map_err(|(address, error)| cannot_listen(address, &error))?;
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
    let mut redirecting = transparent::redirect(&agent, &programs, config).await?;
    // Installs the signal handlers before it reports that the agent runs: without a handler, a
    // SIGHUP would end the agent.
    let read = || options.flags.values(options.config.as_deref());
    let (mut signals, reload) = (Signals::new()?, Reload::new(values, read)?);
    let admin = admin::start(values, || {
        Arc::new(AgentAdmin { fabric: fabric.clone(), agent: handle.clone() })
    })?;
    report_listening(&setup, &listeners, admin.as_ref().map(AdminServer::address));
    warn_of_clear_text(values, config, rdma);
    let (stop, stop_requested) = oneshot::channel::<()>();
    let serving = agent.serve(programs, listeners, async {
        let _ = stop_requested.await; // dropping `stop` is the request
    });
    let second_signal = async {
        tokio::select! {
            () = async { signals.next().await; } => {}
            never = transparent::keep(&mut redirecting) => match never {},
        }
        tracing::info!("signal received, accepting nothing new; a second one resets connections");
        transparent::stop(&mut redirecting).await;
        drop((stop, admin)); // the port is then free for another agent
        signals.next().await;
    };
    let reloading = reload.run(|values| {
        fabric.set_busy_poll_us(ferrite_session::fabric_config(values).busy_poll_us);
        handle.reconfigure(|config| reconfigure(config, values));
    });
    let forced = tokio::select! {
        served = serving => served.map(|()| false)?,
        () = second_signal => true, // drops the future of `serve`, which resets all connections
        never = reloading => match never {},
    };
    if forced {
        tracing::warn!("second signal received, resetting all connections now");
    }
    report_ended(options.json, &handle.stats());
    Ok(if forced { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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

fn warn_of_clear_text(values: &Values, config: &AgentConfig, rdma: Rdma) {
    if config.tls.is_some() && rdma != Rdma::Forbid {
        tracing::warn!(
            "agents authenticate each other, but data over RDMA is not encrypted: anyone who can \
             capture packets in the network can read it. With rdma forbid, all data is encrypted"
        );
    }
    if values.switch(&table::ALLOW_UNAUTHENTICATED_PEERS) {
        tracing::warn!(
            "agents do not authenticate each other and encrypt nothing \
             (allow-unauthenticated-peers yes): any host with the address of a peer can connect to \
             the engines"
        );
    }
}

#[derive(Serialize)]
struct Listening<'a> {
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    addresses: &'a [SocketAddr],
    mode: &'a str,
    alias: IpAddr,
    peers: &'a [String],
    ports: String,
    rdma: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    admin: Option<SocketAddr>,
}

fn report_listening(setup: &Setup<'_>, listeners: &[Listener], admin: Option<SocketAddr>) {
    let Setup { options, values, config, .. } = setup;
    let addresses: Vec<_> = listeners.iter().map(Listener::local_addr).collect();
    let peers: Vec<_> = match &config.transparent {
        Some(Transparent { networks, .. }) => networks.iter().map(ToString::to_string).collect(),
        None => {
            let peers = config.peers.iter();
            peers.map(|AgentPeer { alias, address, .. }| format!("{alias}={address}")).collect()
        }
    };
    let mode = values.text(&table::AGENT_MODE).unwrap_or_default();
    let direct = if config.direct { "allow" } else { "refuse" };
    let rdma = values.policy().map_or("prefer", Policy::name);
    if options.json {
        output::print_event(&Listening {
            event: "listening",
            address: addresses.first().copied(),
            addresses: &addresses,
            mode,
            alias: config.alias.into(),
            peers: &peers,
            ports: config.ports.to_string(),
            rdma,
            admin,
        });
        return;
    }
    let at: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let at = if at.is_empty() { "no address".into() } else { at.join(", ") };
    tracing::info!(
        "agent of {} listening for agents on {at}, peers {}, ports {} (mode {mode}, RDMA: {rdma}, \
         direct: {direct})",
        config.alias,
        if peers.is_empty() { "none".into() } else { peers.join(", ") },
        config.ports
    );
    admin::report(admin);
}

#[derive(Serialize)]
struct Ended {
    event: &'static str,
    streams: Streams,
    refused: u64,
    without_link: u64,
    direct: u64,
    to_peer_bytes: u64,
    from_peer_bytes: u64,
}

#[derive(Serialize)]
struct Streams {
    opened: u64,
    accepted: u64,
}

fn report_ended(json: bool, stats: &AgentStats) {
    let AgentStats { peers, without_link, direct, .. } = stats;
    let opened = peers.iter().flat_map(|peer| peer.opened).sum();
    let accepted = peers.iter().flat_map(|peer| peer.accepted).sum();
    let refused: u64 = stats.refused.iter().map(|(_, count)| count).sum();
    let to_peer_bytes = peers.iter().map(|peer| peer.bytes_to_peer).sum();
    let from_peer_bytes = peers.iter().map(|peer| peer.bytes_from_peer).sum();
    if json {
        output::print_event(&Ended {
            event: "ended",
            streams: Streams { opened, accepted },
            refused,
            without_link: *without_link,
            direct: *direct,
            to_peer_bytes,
            from_peer_bytes,
        });
        return;
    }
    tracing::info!(
        "agent ended: streams opened {opened}, accepted {accepted}, refused {refused}, \
         without a link {without_link}, direct {direct}, bytes to peers {to_peer_bytes}, \
         from peers {from_peer_bytes}"
    );
}
