//! `ferrite agent rehome`: finds connections of other hosts that bypass the agents, and closes
//! them, so that their programs connect again and the agents carry them.
//!
//! The kernel knows which connections bypass the agents. If an agent delivers a connection to an
//! engine, both ends of the connection are sockets of the engine's host, because the agent is on
//! that host. If only the engine's end is there, the other end is a socket of another host.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
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
user needs the commands CLIENT LIST, CLUSTER NODES (for the count of the bus) and CLIENT KILL. Exit
code 1: an engine does not answer, or after --kill a replica has not come back within 10 s, or
connections bypass the agents again. Clients connect again when they need to, perhaps later than
this command looks: list the connections once more then.

Connections of the cluster bus are counted, but engines have no command that closes them. `ss -K`
does: ss -K dst 10.0.0.2 sport = :17001. It needs CAP_NET_ADMIN and a kernel with
CONFIG_INET_DIAG_DESTROY. It prints the connections that it has closed.

JSON: {engines[{engine, error?, direct[{id, address, kind (replica, client), name, age_s}], bus,
  closed, missing_replicas, direct_again}]}.";

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

#[derive(Debug, Default, Serialize)]
struct EngineReport {
    engine: String,
    /// Why the rest is not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
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
        self.error.is_none() && self.missing_replicas == 0 && self.direct_again == 0
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let is_peer = peers(&settings::read(Program::Agent, options.config.as_deref())?)?;
    let tcp = options.engines.iter().copied().map(EngineAt::Tcp);
    let unix = options.unix.iter().cloned().map(EngineAt::Unix);
    let engines = tcp.chain(unix).map(|at| {
        let mut report = EngineReport { engine: at.to_string(), ..EngineReport::default() };
        let client = EngineClient::new(at, options.login.credentials());
        let rehomed = Engine { client, is_peer: &is_peer }.rehome(options, &mut report);
        if let Err(error) = rehomed {
            let why = format!("{error:#}");
            eprintln!("ferrite: {}", output::escape_controls(&why)); // the other engines come next
            report.error = Some(why);
        }
        report
    });
    let report = Report { engines: engines.collect() };
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
    let (mut networks, mut named) = (Vec::new(), Vec::new());
    for word in words {
        if let Some(network) = peer::network(word) {
            networks.push(network);
        } else if let Some((_, at)) = peer::split(word) {
            let at = address::host_and_port::<{ table::AGENT_PORT }>(at);
            let (host, port) = at.map_err(|why| anyhow::anyhow!("peer {word}: {why}"))?;
            named.push((host.to_owned(), port));
        }
    }
    let found = address::resolve_all(named.clone());
    let addresses = found.into_iter().zip(named).filter_map(|(found, (host, _))| {
        let warn = |why: &String| {
            let why = output::escape_controls(why);
            eprintln!("ferrite: {why}; the connections of peer {host} are not in the list");
        };
        Some(found.inspect_err(warn).ok()?.ip())
    });
    let addresses: Vec<_> = addresses.collect();
    anyhow::ensure!(
        !(networks.is_empty() && addresses.is_empty()),
        "the address of no peer is known; see the lines above"
    );
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
    fn rehome(&mut self, options: &Options, report: &mut EngineReport) -> anyhow::Result<()> {
        let at = report.engine.clone();
        let cannot_list = || format!("cannot list the connections of {at}");
        let before = self.look(&["CLIENT", "LIST"]).with_context(cannot_list)?;
        report.bus = self.direct_buses(&before.ports)?;
        report.direct = before.direct;
        if !options.kill {
            return Ok(());
        }
        let is_meant = |direct: &&Direct| options.clients || direct.kind == Kind::Replica;
        for Direct { id, address, .. } in report.direct.iter().filter(is_meant) {
            let closed = self.client.text(&["CLIENT", "KILL", "ID", &id.to_string()]);
            let closed = closed.with_context(|| format!("cannot close {address} of {at}"))?;
            report.closed += usize::from(closed != "0"); // it may have ended by itself
        }
        // The list of all clients may keep the engine busy for long.
        let all = ["CLIENT", "LIST", "TYPE", "replica"];
        let list = if options.clients { &all[..2] } else { &all[..] };
        let deadline = Instant::now() + RETURN;
        while report.closed > 0 {
            let now = self.look(list).with_context(cannot_list)?;
            report.missing_replicas = before.replicas.saturating_sub(now.replicas);
            report.direct_again = now.direct.iter().filter(is_meant).count();
            if report.is_done() || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Compares the engine's list of clients with the kernel's list of sockets.
    fn look(&mut self, list: &[&str]) -> anyhow::Result<Look> {
        let mut look = || Look::new(&self.client.text(list)?, Sockets::read, self.is_peer);
        let first = look()?;
        if first.is_here || first.without_socket.is_empty() {
            return Ok(first);
        }
        // A connection may have ended between the two lists. Then it is in no further list.
        let second = look()?;
        let both = first.without_socket.intersection(&second.without_socket).next();
        if let Some((_, remote)) = both.filter(|_| !second.is_here) {
            anyhow::bail!(
                "the engine's connection from {remote} is not in this network namespace; run this \
                 on the engine's host, in a container with the host's network"
            );
        }
        Ok(second)
    }

    /// Returns the number of connections of the engine's cluster bus that bypass the agents.
    fn direct_buses(&mut self, ports: &BTreeSet<u16>) -> anyhow::Result<usize> {
        // An error says that the engine is no node of a cluster, or that the user may not ask.
        let nodes = self.client.text(&["CLUSTER", "NODES"]).unwrap_or_default();
        let by_offset = ports.iter().filter_map(|port| port.checked_add(BUS_OFFSET));
        let ports: BTreeSet<_> = by_offset.chain(bus_port(&nodes)).collect();
        let sockets = Sockets::read()?;
        let is_direct_bus = |(local, remote): &(SocketAddr, SocketAddr)| {
            ports.contains(&local.port())
                && (self.is_peer)(remote.ip())
                && sockets.is_direct(*local, *remote)
        };
        Ok(sockets.iter().filter(is_direct_bus).count())
    }
}

/// Returns the port of the cluster bus of the node that has sent this reply to CLUSTER NODES. Its
/// own line is `ID ADDRESS:PORT@BUS_PORT,NAME… myself,master …`.
fn bus_port(nodes: &str) -> Option<u16> {
    let own = nodes.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let own = own.into_iter().find(|words| words.get(2).is_some_and(|of| of.contains("myself")))?;
    own[1].split_once('@')?.1.split(',').next()?.parse().ok()
}

/// What an engine and the kernel say at one moment.
#[derive(Debug, Default)]
struct Look {
    direct: Vec<Direct>,
    /// The number of all connections of replicas, direct or not.
    replicas: usize,
    /// The ports at which the engine has clients.
    ports: BTreeSet<u16>,
    /// Whether this network namespace has at least one of the engine's connections from peers.
    is_here: bool,
    /// Connections from peers without a socket here: the client's id and its address. They have
    /// just ended, they use RDMA (Valkey Over RDMA), or the engine is in another namespace.
    without_socket: BTreeSet<(u64, SocketAddr)>,
}

impl Look {
    fn new(
        clients: &str,
        read_sockets: impl Fn() -> anyhow::Result<Sockets>,
        is_peer: impl Fn(IpAddr) -> bool,
    ) -> anyhow::Result<Self> {
        let (mut look, sockets) = (Self::default(), read_sockets()?);
        let mut locals = BTreeMap::new();
        for line in clients.lines() {
            let Some(EngineClientLine { local, direct }) = EngineClientLine::parse(line)? else {
                continue;
            };
            look.replicas += usize::from(direct.kind == Kind::Replica);
            look.ports.insert(local.port());
            let (id, remote) = (direct.id, direct.address);
            if !is_peer(remote.ip()) {
                continue;
            }
            if !sockets.has(local, remote) {
                look.without_socket.insert((id, remote));
                continue;
            }
            look.is_here = true;
            if sockets.is_direct(local, remote) {
                locals.insert(id, local);
                look.direct.push(direct);
            }
        }
        if !look.direct.is_empty() {
            // The kernel's list may lack a socket if others were closed while it was read.
            let again = read_sockets()?;
            look.direct.retain(|direct| again.is_direct(locals[&direct.id], direct.address));
        }
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
    ///
    /// # Errors
    /// The engine is so old that it does not send its own address.
    fn parse(line: &str) -> anyhow::Result<Option<Self>> {
        let field = |name: &str| {
            line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let address = |name: &str| {
            let address = field(name)?.parse::<SocketAddr>().ok()?;
            Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
        };
        let is_old = field("addr").is_some() && field("laddr").is_none();
        anyhow::ensure!(!is_old, "CLIENT LIST has no laddr; use Redis 7.0, Valkey 7.2 or later");
        let parse = || {
            let flags = field("flags").filter(|flags| !flags.contains('M'))?;
            let direct = Direct {
                id: field("id")?.parse().ok()?,
                address: address("addr")?,
                kind: if flags.contains('S') { Kind::Replica } else { Kind::Client },
                name: field("name")?.to_owned(),
                age_s: field("age")?.parse().ok()?,
            };
            Some(Self { local: address("laddr")?, direct })
        };
        Ok(parse())
    }
}

fn text(report: &Report, killed: bool) -> String {
    let mut out = String::new();
    for engine in &report.engines {
        let EngineReport { engine: at, error, direct, bus, .. } = engine;
        let EngineReport { closed, missing_replicas, direct_again, .. } = engine;
        if error.is_some() && direct.is_empty() {
            continue; // stderr has the error
        }
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
        let parse = |line: &str| EngineClientLine::parse(line).expect("laddr");
        let EngineClientLine { local, direct } = parse(line).expect("a client");
        assert_eq!(local, "10.0.0.1:7001".parse().expect("an address"));
        let address = "10.0.0.2:40000".parse().expect("an address");
        let name = "copy".to_owned();
        assert_eq!(direct, Direct { id: 7, address, kind: Kind::Replica, name, age_s: 12 });
        let primary = line.replace("flags=S", "flags=M");
        assert!(parse(&primary).is_none(), "the primary's host lists it");
        assert!(parse(&line.replace("10.0.0.2:40000", "/run/redis.sock:0")).is_none());
        let mapped = line.replace("10.0.0.", "[::ffff:10.0.0.").replace(":40000", "]:40000");
        let mapped = parse(&mapped.replace(":7001", "]:7001")).expect("a client");
        assert_eq!((mapped.local, mapped.direct.address), (local, address));
        let old = line.replace("laddr", "other");
        let error = EngineClientLine::parse(&old).err().expect("an old engine").to_string();
        assert!(error.contains("use Redis 7.0, Valkey 7.2"), "{error}");
    }

    #[test]
    fn finds_the_connections_that_bypass_the_agents() {
        let clients = "id=1 addr=10.0.0.2:40001 laddr=10.0.0.1:7001 name= age=12 flags=S\n\
                       id=2 addr=10.0.0.2:40002 laddr=10.0.0.1:7001 name= age=12 flags=S\n\
                       id=3 addr=10.0.0.2:40003 laddr=10.0.0.1:7001 name= age=12 flags=N\n\
                       id=4 addr=10.0.0.3:40004 laddr=10.0.0.1:7001 name= age=12 flags=N\n";
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let engine = at("10.0.0.1:7001");
        let pair = |port| (engine, SocketAddr::new(at("10.0.0.2:0").ip(), port));
        let direct = [pair(40001), pair(40002), (pair(40002).1, engine)];
        let is_peer = |ip: IpAddr| ip == pair(0).1.ip();
        let look = Look::new(clients, || Ok(direct.into_iter().collect()), is_peer);
        let look = look.expect("a list");
        assert_eq!(look.direct.iter().map(|direct| direct.id).collect::<Vec<_>>(), [1]);
        assert_eq!((look.replicas, look.is_here), (2, true));
        assert_eq!(look.without_socket, [(3, pair(40003).1)].into());
        // The first of two lists lacks the agent's socket.
        let reads = std::cell::Cell::new(0);
        let read = || {
            reads.set(reads.get() + 1);
            let delivered = [pair(40001), (pair(40001).1, engine)];
            Ok(delivered.into_iter().take(reads.get()).collect())
        };
        let look = Look::new(clients, read, is_peer).expect("a list");
        assert_eq!((look.direct.len(), reads.get()), (0, 2));
    }

    #[test]
    fn reads_the_port_of_the_bus() {
        let nodes = "a1 10.0.0.2:7001@17001 master - 0 0 2 connected 0-100\n\
                     b2 10.0.0.1:7001@27001,name myself,master - 0 0 1 connected 101-16383\n";
        assert_eq!(bus_port(nodes), Some(27001));
        assert_eq!(bus_port(""), None);
    }
}
