//! Hosts with an agent each, and programs on them.
#![allow(dead_code, reason = "no test binary uses all of it")]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use ferrite_testkit::ca::Issued;
use ferrite_testkit::engine::REDIS;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::as_nobody;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Ca, Engine, Start, TIMEOUT, TempDir, until};

use super::wire;
use crate::metrics::harness::Running;

/// The ports of engines and of their cluster bus.
pub(crate) const PORTS: &str = "7001-7002,17001-17002";
/// The ports of [`PORTS`], and the port of Sentinel.
pub(crate) const PORTS_OF_ALL: &str = "7001-7002,17001-17002,26379";
/// The password of all engines.
pub(crate) const PASSWORD: &str = "secret";
/// Starts a program without capabilities.
pub(crate) const WITHOUT_CAPABILITIES: &[&str] =
    &["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"];
/// Starts a program as a user without rights, who may lock memory.
pub(crate) const NOBODY: &[&str] = &[
    "prlimit",
    "--memlock=unlimited:unlimited",
    "setpriv",
    "--no-new-privs",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
];

/// Starts a program as a user whose only privileges are those that transparent mode needs.
pub(crate) const NETWORK_ADMIN: &[&str] = RDMA_NETWORK_ADMIN.split_at(2).1;
/// Starts a program as [`NETWORK_ADMIN`] does. The user may lock memory.
pub(crate) const RDMA_NETWORK_ADMIN: &[&str] = &[
    "prlimit",
    "--memlock=unlimited:unlimited",
    "setpriv",
    "--no-new-privs",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--bounding-set=-all,+net_admin,+net_raw",
    "--inh-caps=-all,+net_admin,+net_raw",
    "--ambient-caps=-all,+net_admin,+net_raw",
];

/// Returns the alias of a host.
pub(crate) fn alias(host: usize) -> String {
    format!("127.1.0.{host}")
}

/// The certificates of a group.
pub(crate) struct Certificates {
    pub(crate) ca: Ca,
    pub(crate) files: TempDir,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        Self { ca: Ca::new(), files: TempDir::new("agent-certificates") }
    }

    /// Returns the options of an agent that presents a certificate. `ca` is the authority that the
    /// agent trusts.
    pub(crate) fn options(&self, ca: &Ca, name: &str, issued: &Issued) -> Vec<String> {
        let files = ca.files(&self.files, name, issued);
        let flags = ["--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"];
        let pairs = flags.into_iter().zip(files);
        pairs.flat_map(|(flag, file)| [flag.into(), file.display().to_string()]).collect()
    }
}

/// The program of a group's engines, and the user who runs them.
pub(crate) struct EngineProgram {
    pub(crate) path: PathBuf,
    is_nobody: bool,
    _copy: Option<TempDir>,
}

impl EngineProgram {
    pub(crate) fn redis() -> Self {
        Self::of(Path::new(REDIS))
    }

    /// A program that the tests' user runs.
    pub(crate) fn of(program: &Path) -> Self {
        Self { path: program.into(), is_nobody: false, _copy: None }
    }

    /// A program that a user without rights runs.
    pub(crate) fn of_nobody(program: &Path) -> Self {
        if program == Path::new(REDIS) {
            return Self { is_nobody: true, ..Self::redis() };
        }
        // That user may not open the directories of others.
        let directory = TempDir::new("engines");
        let path = directory.join("server");
        std::fs::copy(program, &path).expect("a copy of the engine");
        Self { path, is_nobody: true, _copy: Some(directory) }
    }

    /// Runs code that starts the program.
    pub(crate) fn run<T: Send>(&self, start: impl FnOnce() -> T + Send) -> T {
        if self.is_nobody { as_nobody(start) } else { start() }
    }
}

/// Hosts with an agent each, numbered from 1.
pub(crate) struct Group {
    // Declared before `hosts`, so that the agents end before their hosts.
    pub(crate) agents: Vec<Running>,
    pub(crate) hosts: Hosts,
    options: Vec<String>,
    /// With TLS, agents authenticate each other and share one link.
    pub(crate) certificates: Option<Certificates>,
    /// The words before the command line of an agent, which run it as a user with few rights.
    user: Vec<String>,
    is_transparent: bool,
    pub(crate) engines: EngineProgram,
}

impl Group {
    /// Starts agents with these additional options, and waits until each has a link to every other.
    /// The words of `user` come before the command line of an agent.
    pub(crate) fn start(
        hosts: Hosts,
        count: usize,
        options: &[&str],
        user: &'static [&'static str],
    ) -> Self {
        Self::start_with(hosts, count, options, user, None)
    }

    /// Starts agents as [`Group::start`] does, with certificates of their addresses.
    pub(crate) fn start_with_tls(
        hosts: Hosts,
        count: usize,
        options: &[&str],
        user: &'static [&'static str],
    ) -> Self {
        Self::start_with(hosts, count, options, user, Some(Certificates::new()))
    }

    fn start_with(
        hosts: Hosts,
        count: usize,
        options: &[&str],
        user: &'static [&'static str],
        certificates: Option<Certificates>,
    ) -> Self {
        let (options, user) = (strings(options), strings(user));
        let (is_transparent, engines) = (false, EngineProgram::redis());
        Self { hosts, agents: Vec::new(), options, certificates, user, is_transparent, engines }
            .with_agents(count)
    }

    /// Starts agents in transparent mode, as `start` does. Packets between the hosts are counted.
    pub(crate) fn start_transparent(hosts: Hosts, count: usize, options: &[&str]) -> Self {
        let (user, engines) = (strings(NETWORK_ADMIN), EngineProgram::redis());
        Self::start_transparent_as(hosts, count, options, user, engines)
    }

    /// Starts agents in transparent mode, beside engines of this program. The words of `user` come
    /// before the command line of an agent.
    pub(crate) fn start_transparent_as(
        hosts: Hosts,
        count: usize,
        options: &[&str],
        user: Vec<String>,
        engines: EngineProgram,
    ) -> Self {
        let (options, certificates, is_transparent) = (strings(options), None, true);
        let group = Self {
            hosts,
            agents: Vec::new(),
            options,
            certificates,
            user,
            is_transparent,
            engines,
        };
        (1..=count).for_each(|host| wire::count(&group.hosts, host));
        group.with_agents(count)
    }

    fn with_agents(self, count: usize) -> Self {
        let mut group = self;
        for host in 1..=count {
            let agent = group.start_agent(host, count);
            group.agents.push(agent);
        }
        group.wait_for_links();
        group
    }

    /// Starts the agent of a host.
    pub(crate) fn start_agent(&self, host: usize, count: usize) -> Running {
        let authentication = match &self.certificates {
            Some(certificates) => {
                let issued = certificates.ca.issue(&[&self.hosts.ip(host)]);
                certificates.options(&certificates.ca, &format!("host{host}"), &issued)
            }
            None => ["--allow-unauthenticated-peers", "yes"].map(Into::into).into(),
        };
        self.start_agent_as(host, count, &authentication)
    }

    /// Starts the agent of a host with these options for authentication.
    pub(crate) fn start_agent_as(
        &self,
        host: usize,
        count: usize,
        authentication: &[String],
    ) -> Running {
        let mut words = vec!["agent".into(), "--listen".into(), self.hosts.ip(host)];
        if self.is_transparent {
            words.extend(["--mode", "transparent", "--ports", PORTS_OF_ALL].map(Into::into));
            // The list is the same on all hosts.
            let peers: Vec<_> = (1..=count).map(|peer| self.hosts.ip(peer)).collect();
            words.extend(["--peer".into(), peers.join(",")]);
        } else {
            words.extend(["--alias".into(), alias(host), "--ports".into(), PORTS.into()]);
            for peer in (1..=count).filter(|peer| *peer != host) {
                words.extend(["--peer".into(), format!("{}={}", alias(peer), self.hosts.ip(peer))]);
            }
        }
        words.extend_from_slice(authentication);
        for word in &self.options {
            words.push(word.replace("DEVICE", &self.hosts.device(host)));
        }
        self.hosts.within(host, || {
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            let agent = Running::command(&words);
            let mut command = Command::new(&self.user[0]);
            command.args(&self.user[1..]).arg(agent.get_program()).args(agent.get_args());
            Running::spawn(&mut command)
        })
    }

    /// Returns the number of links of a pair of hosts.
    fn links_per_pair(&self) -> usize {
        if self.certificates.is_some() { 1 } else { 2 }
    }

    /// Waits until there are all links of each pair, and no more.
    pub(crate) fn wait_for_links(&self) {
        for host in 1..=self.agents.len() {
            until(TIMEOUT, "a link to each peer", || self.get(host, "/ready").0 == 200);
        }
        for host in 1..=self.agents.len() {
            until(TIMEOUT, "the links of each pair", || {
                let samples = self.scrape(host);
                let peers = (1..=self.agents.len()).filter(|peer| *peer != host);
                let name = |peer| format!("peer=\"{}\"", self.address(peer));
                let mut links = peers.map(|peer| sum(&samples, "agent_links{", &name(peer)));
                let expected = self.links_per_pair() as f64;
                links.all(|links| (links - expected).abs() < f64::EPSILON)
            });
        }
    }

    /// Returns the address of a host's engines.
    pub(crate) fn address(&self, host: usize) -> String {
        if self.is_transparent { self.hosts.ip(host) } else { alias(host) }
    }

    pub(crate) fn agent(&self, host: usize) -> &Running {
        &self.agents[host - 1]
    }

    pub(crate) fn get(&self, host: usize, path: &str) -> (u16, String) {
        self.hosts.within(host, || self.agent(host).get(path))
    }

    pub(crate) fn scrape(&self, host: usize) -> BTreeMap<String, f64> {
        self.hosts.within(host, || self.agent(host).scrape())
    }

    /// Starts an engine on a host, at the host's alias. In transparent mode, the engine has no
    /// settings for its addresses.
    pub(crate) fn start_engine(&self, host: usize, port: u16, options: &[&str]) -> Engine {
        self.start_engine_of(&self.engines.path, host, port, options)
    }

    /// Starts an engine of this program, as [`Group::start_engine`] does.
    pub(crate) fn start_engine_of(
        &self,
        program: &Path,
        host: usize,
        port: u16,
        options: &[&str],
    ) -> Engine {
        let (alias, port) = (alias(host), port.to_string());
        let own = ["--port", &port, "--bind", &alias, "--bind-source-addr", &alias];
        let own = if self.is_transparent { &own[..2] } else { &own };
        let options = [own, options].concat();
        let start = Start { program, options: &options, module: None };
        self.hosts.within(host, || self.engines.run(|| Engine::start(&start)))
    }

    /// Connects a program of a host to an engine of any host.
    pub(crate) fn connect(&self, from: usize, to: usize, port: u16) -> TcpStream {
        let socket =
            self.hosts.within(from, || TcpStream::connect((self.address(to).as_str(), port)));
        let socket = socket.expect("the agent accepts connections");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        socket
    }

    /// Connects a client of a host to an engine of any host, and logs in.
    pub(crate) fn client(&self, from: usize, to: usize, port: u16) -> Client {
        let mut client =
            self.hosts.within(from, || Client::to_tcp((self.address(to).as_str(), port)));
        client.ok(&["AUTH", PASSWORD]);
        client
    }

    /// Runs redis-cli on a host. Returns what it prints.
    #[track_caller]
    pub(crate) fn redis_cli(&self, host: usize, words: &[&str]) -> String {
        let output = self.hosts.within(host, || {
            let mut command = Command::new("timeout");
            command.args(["240", "redis-cli", "--no-auth-warning", "-a", PASSWORD]);
            command.args(words).output().expect("redis-cli starts")
        });
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "redis-cli {words:?}: {text}");
        text
    }

    /// Asserts that the only TCP connections between the hosts are the links. `over_tcp` is false
    /// if the links use RDMA alone and have no TCP connection. With TLS, each link has one.
    #[track_caller]
    pub(crate) fn assert_only_links(&self, over_tcp: bool) {
        if self.is_transparent {
            return (1..=self.agents.len())
                .for_each(|host| wire::assert_only_links(&self.hosts, host, over_tcp));
        }
        for host in 1..=self.agents.len() {
            // Of this thread, not of the process: the thread is in the namespace.
            let read = || std::fs::read_to_string("/proc/thread-self/net/tcp").expect("sockets");
            let sockets = self.hosts.within(host, read);
            let mut peers = Vec::new();
            for socket in sockets.lines().skip(1) {
                let words: Vec<_> = socket.split_whitespace().collect();
                let (local, remote, state) = (words[1], words[2], words[3]);
                // Addresses are in the order of the machine: 0A4D0001 is shown as 01004D0A. 01 is
                // an established connection.
                let (ip, port) = remote.split_once(':').expect("an address");
                if state != "01" || !ip.ends_with("004D0A") {
                    continue;
                }
                let is_link = port == "1D2E" || local.ends_with(":1D2E"); // 7470
                assert!(is_link, "a connection beside the links: {socket}");
                peers.push(ip.to_owned());
            }
            let count = peers.len();
            peers.sort();
            peers.dedup();
            let expected = if over_tcp { self.agents.len() - 1 } else { 0 };
            let links = self.links_per_pair() * expected;
            assert_eq!((count, peers.len()), (links, expected), "host {host}: {sockets}");
        }
    }
}

/// Returns a client of an engine's own socket.
pub(crate) fn operator(engine: &Engine) -> Client {
    let mut client = engine.client();
    client.ok(&["AUTH", PASSWORD]);
    client
}

pub(crate) fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// Returns the sum of all samples whose series begins with `name` (without `ferrite_`) and contains
/// a text.
pub(crate) fn sum(samples: &BTreeMap<String, f64>, name: &str, part: &str) -> f64 {
    let is_meant = |series: &str| {
        let rest = series.strip_prefix("ferrite_").unwrap_or(series);
        rest.starts_with(name) && series.contains(part)
    };
    samples.iter().filter(|(series, _)| is_meant(series)).map(|(_, value)| value).sum()
}

/// Accepts connections to an address of a host. Closes each when its program does, as an engine
/// would: the other direction of a connection that is closed in one direction may stay open.
pub(crate) fn accept_all(hosts: &Hosts, host: usize, at: (&str, u16)) {
    let listener = hosts.within(host, || TcpListener::bind(at).expect("listen"));
    std::thread::spawn(move || {
        for mut socket in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let _ = socket.write_all(b"+PONG\r\n"); // the agent may have reset it
                let _ = std::io::copy(&mut socket, &mut std::io::sink());
            });
        }
    });
}

/// Returns whether [`accept_all`] has accepted a connection, which is not reset.
pub(crate) fn is_carried(socket: &mut TcpStream) -> bool {
    socket.read_exact(&mut [0; 7]).is_ok()
}
