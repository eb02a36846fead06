//! `ferrite agent rehome`: finds connections of other hosts that bypass the agents, and closes them,
//! so that their programs connect again and the agents carry them.
//!
//! The kernel knows which connections bypass the agents. If an agent delivers a connection to an
//! engine, both ends of the connection are sockets of the engine's host, because the agent is on
//! that host. If only the engine's end is there, the other end is a socket of another host.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use ferrite_config::{Program, Values, peer, table};
use serde::Serialize;

use super::sockets::Sockets;
use crate::engine_client::{DEFAULT_PORT, EngineAt, EngineClient, Login};
use crate::settings::{self, WrongSettings};
use crate::{address, output};

/// How long replicas may take to connect again. A replica tries once a second.
const RETURN: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// The cluster bus of an engine has the engine's port plus this number.
const BUS_OFFSET: u16 = 10_000;

/// List the connections of other hosts that bypass the agents, or close them with --kill
///
/// A connection that was opened while an agent or a link was missing goes directly by TCP until it
/// is closed, also after the agent has come back. Run this on the engine's host. It asks the
/// engines for their clients, and the kernel which of them come directly from another host of the
/// group. It closes nothing without --kill, and then only the connections of replicas, which
/// connect again within a second or two and resume with a partial resynchronisation.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct Options {
    /// Engines of this host: ADDRESS:PORT (default port 6379)
    #[arg(value_name = "ENGINE", value_parser = address::parse::<DEFAULT_PORT>,
          required_unless_present = "unix")]
    engines: Vec<SocketAddr>,
    /// An engine's Unix socket; may be given several times
    #[arg(long, value_name = "PATH")]
    unix: Vec<PathBuf>,
    /// The agent's configuration file (ferrite.toml), which names the peers
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    login: Login,
    /// Close the connections of replicas that are listed (CLIENT KILL)
    #[arg(long)]
    kill: bool,
    /// With --kill: close the connections of clients, too; their current commands fail
    #[arg(long, requires = "kill")]
    clients: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const HELP: &str = "\
Examples:
  REDISCLI_AUTH=… ferrite agent rehome --config ferrite.toml 127.1.0.1:7001 127.1.0.1:7002
  REDISCLI_AUTH=… ferrite agent rehome --config ferrite.toml 127.1.0.1:7001 --kill

Before --kill, look at /ready of the agents: without a link, programs connect directly again. The
user needs the commands CLIENT LIST and CLIENT KILL. Exit code 1: after --kill, a replica has not
come back within 10 s, or connections bypass the agents again.

Connections of the cluster bus are counted, but engines have no command that closes them. `ss -K`
does: ss -K dst 10.0.0.2 sport = :17001.

JSON: {engines[{engine, direct[{id, address, kind (replica, client), name, age_s}], bus, closed,
  missing_replicas, direct_again}]}.";

/// A connection that bypasses the agents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Direct {
    id: u64,
    address: SocketAddr,
    kind: Kind,
    name: String,
    age_s: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Replica,
    Client,
}

#[derive(Debug, Serialize)]
struct Report {
    engines: Vec<EngineReport>,
}

#[derive(Debug, Serialize)]
struct EngineReport {
    engine: String,
    direct: Vec<Direct>,
    /// Connections of the cluster bus that bypass the agents.
    bus: usize,
    closed: usize,
    /// Replicas whose connection was closed, and which have not connected again.
    missing_replicas: usize,
    /// Connections that bypass the agents after others were closed.
    direct_again: usize,
}

impl EngineReport {
    fn is_done(&self) -> bool {
        self.missing_replicas == 0 && self.direct_again == 0
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let is_peer = peers(&settings::read(Program::Agent, options.config.as_deref())?)?;
    let tcp = options.engines.iter().copied().map(EngineAt::Tcp);
    let unix = options.unix.iter().cloned().map(EngineAt::Unix);
    let engines = tcp.chain(unix).map(|at| {
        let client = EngineClient::new(at, options.login.credentials());
        Engine { client, is_peer: &is_peer }.rehome(options)
    });
    let report = Report { engines: engines.collect::<anyhow::Result<_>>()? };
    output::print(&report, options.json, |report| text(report, options.kill))?;
    let is_done = report.engines.iter().all(EngineReport::is_done);
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns which addresses belong to hosts of the group, by the agent's settings.
fn peers(values: &Values) -> anyhow::Result<impl Fn(IpAddr) -> bool + use<>> {
    let words = values.list(&table::PEERS);
    if words.is_empty() {
        let why = "no peers; name the agent's configuration file with --config";
        return Err(WrongSettings(why.into()).into());
    }
    let (mut networks, mut addresses) = (Vec::new(), Vec::new());
    for word in words {
        if let Some(network) = peer::network(word) {
            networks.push(network);
        } else if let Some((_, at)) = peer::split(word) {
            let at = address::parse::<{ table::AGENT_PORT }>(at);
            addresses.push(at.map_err(|why| anyhow::anyhow!("peer {word}: {why}"))?.ip());
        }
    }
    Ok(move |ip| match ip {
        IpAddr::V4(v4) => addresses.contains(&ip) || networks.iter().any(|net| net.contains(v4)),
        IpAddr::V6(_) => addresses.contains(&ip),
    })
}

/// An engine of this host.
struct Engine<'a, P> {
    client: EngineClient,
    is_peer: &'a P,
}

impl<P: Fn(IpAddr) -> bool> Engine<'_, P> {
    /// Lists the connections that bypass the agents. Closes them if the options say so.
    fn rehome(&mut self, options: &Options) -> anyhow::Result<EngineReport> {
        let before = self.look()?;
        let mut report = EngineReport {
            engine: self.client.address().to_string(),
            direct: before.direct,
            bus: before.bus,
            closed: 0,
            missing_replicas: 0,
            direct_again: 0,
        };
        if !options.kill {
            return Ok(report);
        }
        let is_meant = |direct: &&Direct| options.clients || direct.kind == Kind::Replica;
        for direct in report.direct.iter().filter(is_meant) {
            let closed = self.client.text(&["CLIENT", "KILL", "ID", &direct.id.to_string()])?;
            report.closed += usize::from(closed != "0"); // it may have ended by itself
        }
        let deadline = Instant::now() + RETURN;
        loop {
            let now = self.look()?;
            report.missing_replicas = before.replicas.saturating_sub(now.replicas);
            report.direct_again = now.direct.iter().filter(is_meant).count();
            if report.closed == 0 || report.is_done() || Instant::now() > deadline {
                return Ok(report);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn look(&mut self) -> anyhow::Result<Look> {
        let clients = self.client.text(&["CLIENT", "LIST"])?;
        Look::new(&clients, &Sockets::read()?, self.is_peer)
    }
}

/// What an engine and the kernel say at one moment.
#[derive(Debug)]
struct Look {
    direct: Vec<Direct>,
    /// All connections of replicas, direct or not.
    replicas: usize,
    bus: usize,
}

impl Look {
    fn new(
        clients: &str,
        sockets: &Sockets,
        is_peer: impl Fn(IpAddr) -> bool,
    ) -> anyhow::Result<Self> {
        let mut look = Self { direct: Vec::new(), replicas: 0, bus: 0 };
        let mut ports = Vec::new();
        for client in clients.lines().filter_map(EngineClientLine::parse) {
            look.replicas += usize::from(client.direct.kind == Kind::Replica);
            let (local, remote) = (client.local, client.direct.address);
            ports.push(local.port());
            if !is_peer(remote.ip()) || sockets.has(remote, local) {
                continue;
            }
            anyhow::ensure!(
                sockets.has(local, remote),
                "the engine's connection from {remote} is not in this network namespace; run this \
                 on the engine's host, in a container with the host's network"
            );
            look.direct.push(client.direct);
        }
        let is_bus = |local: SocketAddr| {
            local.port().checked_sub(BUS_OFFSET).is_some_and(|port| ports.contains(&port))
        };
        let bus = sockets.iter().filter(|(local, remote)| {
            is_bus(*local) && is_peer(remote.ip()) && !sockets.has(*remote, *local)
        });
        look.bus = bus.count();
        Ok(look)
    }
}

/// A line of CLIENT LIST.
struct EngineClientLine {
    local: SocketAddr,
    direct: Direct,
}

impl EngineClientLine {
    /// Parses a line. Returns `None` for Unix sockets, and for a replica's connection to its
    /// primary: the primary's host lists that one.
    fn parse(line: &str) -> Option<Self> {
        let field = |name: &str| {
            line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let flags = field("flags")?;
        if flags.contains('M') {
            return None;
        }
        let direct = Direct {
            id: field("id")?.parse().ok()?,
            address: field("addr")?.parse().ok()?,
            kind: if flags.contains('S') { Kind::Replica } else { Kind::Client },
            name: field("name")?.to_owned(),
            age_s: field("age")?.parse().ok()?,
        };
        Some(Self { local: field("laddr")?.parse().ok()?, direct })
    }
}

fn text(report: &Report, killed: bool) -> String {
    let mut out = String::new();
    for engine in &report.engines {
        let EngineReport { engine: at, direct, bus, closed, missing_replicas, direct_again } =
            engine;
        let count = match direct.len() {
            0 => "no connection bypasses".to_owned(),
            1 => "1 connection bypasses".to_owned(),
            many => format!("{many} connections bypass"),
        };
        let _ = writeln!(out, "{at}: {count} the agents");
        for Direct { id, address, kind, name, age_s } in direct {
            let kind = match kind {
                Kind::Replica => "replica",
                Kind::Client => "client",
            };
            let named = if name.is_empty() { String::new() } else { format!(", {name}") };
            let _ = writeln!(out, "  {kind} {address}, id {id}, open for {age_s} s{named}");
        }
        if *bus > 0 {
            let _ = writeln!(out, "  {bus} of the cluster bus; `ss -K` closes them");
        }
        if !killed {
            continue;
        }
        let _ = writeln!(out, "  closed: {closed}");
        if *missing_replicas > 0 {
            let _ = writeln!(out, "  replicas that have not come back: {missing_replicas}");
        }
        if *direct_again > 0 {
            let _ = writeln!(
                out,
                "  bypass the agents again: {direct_again}; /ready of the agents of both hosts says why"
            );
        }
    }
    let replica = |direct: &Direct| direct.kind == Kind::Replica;
    if !killed && report.engines.iter().any(|engine| engine.direct.iter().any(replica)) {
        out +=
            "--kill closes the connections of replicas, --kill --clients those of clients, too\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_engines_list() {
        let line = "id=7 addr=10.0.0.2:40000 laddr=10.0.0.1:7001 fd=9 name=copy age=12 idle=0 \
                    flags=S db=0 cmd=replconf user=default";
        let EngineClientLine { local, direct } = EngineClientLine::parse(line).expect("a client");
        assert_eq!(local, "10.0.0.1:7001".parse().expect("an address"));
        let address = "10.0.0.2:40000".parse().expect("an address");
        let name = "copy".to_owned();
        assert_eq!(direct, Direct { id: 7, address, kind: Kind::Replica, name, age_s: 12 });
        let primary = line.replace("flags=S", "flags=M");
        assert!(EngineClientLine::parse(&primary).is_none(), "the primary's host lists it");
        let unix = line.replace("10.0.0.2:40000", "/run/redis.sock:0");
        assert!(EngineClientLine::parse(&unix).is_none());
    }

    #[test]
    fn an_engine_in_another_namespace_is_an_error() {
        let clients = "id=7 addr=10.0.0.2:40000 laddr=10.0.0.1:7001 name= age=12 flags=N\n";
        let error = Look::new(clients, &Sockets::default(), |_| true).expect_err("no sockets");
        assert!(error.to_string().contains("10.0.0.2:40000 is not in this network"), "{error}");
        let look = Look::new(clients, &Sockets::default(), |_| false).expect("no peers");
        assert_eq!((look.direct.len(), look.replicas, look.bus), (0, 0, 0));
    }
}
