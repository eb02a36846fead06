//! `ferrite agent --mode transparent` on hosts whose firewall, limits or programs get in its way.
//! The hosts are network namespaces, and the links use TCP. The tests need root and nft.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use agent::harness::{
    EngineProgram, Group, NETWORK_ADMIN, PASSWORD, accept_all, is_carried, strings, sum,
};
use agent::wire;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{is_alive, signal};
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TIMEOUT, TempDir, until};
use metrics::harness::Running;

const AUTH: [&str; 4] = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
/// All hosts of the network are peers.
const NETWORK: &[&str] = &["--rdma", "forbid", "--peer", "10.77.0.0/24"];

fn is_reset(socket: &mut TcpStream) -> bool {
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Returns how many connections of local programs an agent has reset for a cause.
fn refused(group: &Group, host: usize, cause: &str) -> f64 {
    let name = format!("agent_connections_refused_total{{cause=\"{cause}\"");
    sum(&group.scrape(host), &name, "")
}

fn direct(group: &Group, host: usize) -> f64 {
    sum(&group.scrape(host), "agent_direct_connections_total", "")
}

/// Returns how many descriptors an agent has open.
fn descriptors(group: &Group, host: usize) -> usize {
    let path = format!("/proc/{}/fd", group.agent(host).process.0.id());
    std::fs::read_dir(path).expect("descriptors").count()
}

/// A rule of the host's firewall replaces the marks of packets by those of their connections.
#[test]
fn direct_connections_that_come_back_are_refused() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let group = Group::start_transparent(hosts, 1, NETWORK);
    let _engine = group.start_engine(2, 7001, &AUTH);
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
    assert!(direct(&group, 1) == 1.0);
    let before = descriptors(&group, 1);
    let rule = "add table ip marks; \
                add chain ip marks out { type route hook output priority mangle; }; \
                add rule ip marks out meta mark set ct mark";
    wire::nft(&group.hosts, 1, rule);
    for count in 1..=20 {
        assert!(is_reset(&mut group.connect(1, 2, 7001)), "connection {count}");
    }
    assert_eq!((refused(&group, 1, "loop"), direct(&group, 1)), (20.0, 21.0));
    assert!(descriptors(&group, 1) <= before + 5, "{before} {}", descriptors(&group, 1));
    wire::nft(&group.hosts, 1, "delete table ip marks");
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
}

#[test]
fn direct_connections_leave_descriptors_for_links_bus_and_admin_port() {
    let Some(hosts) = Hosts::start_or_skip(3) else { return };
    let limited = [&["prlimit", "--nofile=300:300"], NETWORK_ADMIN].concat();
    let group =
        Group::start_transparent_as(hosts, 2, NETWORK, strings(&limited), EngineProgram::redis());
    for (host, port) in [(3, 7001), (3, 17001), (2, 7001), (2, 17001)] {
        accept_all(&group.hosts, host, ("0.0.0.0", port));
    }
    let mut open: Vec<_> = (0..300).map(|_| group.connect(1, 3, 7001)).collect();
    let carried = open.iter_mut().filter_map(|socket| is_carried(socket).then_some(())).count();
    assert!((30..150).contains(&carried), "{carried} connections");
    assert_eq!(refused(&group, 1, "descriptors"), (300 - carried) as f64);
    assert_eq!(group.get(1, "/ready").0, 200);
    for (host, port) in [(2, 17001), (3, 17001), (2, 7001)] {
        assert!(is_carried(&mut group.connect(1, host, port)), "{host}:{port}");
    }
    // Connections over links do not use up the descriptors of the bus, either.
    let mut streams: Vec<_> = (0..300).map(|_| group.connect(1, 2, 7001)).collect();
    let carried = streams.iter_mut().filter_map(|socket| is_carried(socket).then_some(())).count();
    assert!((30..200).contains(&carried), "{carried} connections");
    assert_eq!(group.get(1, "/ready").0, 200);
    for host in [2, 3] {
        assert!(is_carried(&mut group.connect(1, host, 17001)), "the bus of host {host}");
    }
    drop((open, streams));
    until(TIMEOUT, "descriptors", || is_carried(&mut group.connect(1, 3, 7001)));
}

/// Returns the process that owns the rules of an agent.
fn owner_of_rules(group: &Group, host: usize) -> Option<u32> {
    let agent = group.agent(host).process.0.id();
    let path = format!("/proc/{agent}/task/{agent}/children");
    let children = fs::read_to_string(path).expect("children");
    let mut children = children.split_whitespace().map(|pid| pid.parse().expect("a number"));
    let name = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm"));
    children.find(|pid| name(*pid).is_ok_and(|name| name.trim() == "nft"))
}

/// A directory whose programs come first in the PATH of an agent.
struct Programs(TempDir);

impl Programs {
    fn new() -> Self {
        Self(TempDir::new("programs"))
    }

    /// Adds a program that runs these commands of a shell, and then the program of this name.
    fn add(&self, name: &str, commands: &str) {
        let text = format!(
            "#!/bin/sh\n{commands}\n\
             PATH=$PATH:/usr/sbin:/sbin; PATH=${{PATH#*:}}; exec {name} \"$@\"\n"
        );
        let program = self.0.file(name, text);
        fs::set_permissions(program, fs::Permissions::from_mode(0o755)).expect("permissions");
    }

    /// Adds a program that fails while there is a file, which this returns.
    fn add_breakable(&self, name: &str) -> PathBuf {
        let broken = self.0.join("broken");
        let file = broken.display();
        let fail = format!("if [ -e {file} ]; then echo 'this {name} is broken' >&2; exit 1; fi");
        self.add(name, &fail);
        broken
    }

    /// Returns the words before the command line of an agent, which uses the programs.
    fn user(&self) -> Vec<String> {
        let path = format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", self.0.path().display());
        strings(&[NETWORK_ADMIN, &["env", &path]].concat())
    }
}

#[test]
fn agent_is_not_ready_while_the_rules_cannot_be_set() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let programs = Programs::new();
    let broken = programs.add_breakable("nft");
    let group =
        Group::start_transparent_as(hosts, 1, NETWORK, programs.user(), EngineProgram::redis());
    assert_eq!(group.get(1, "/ready").0, 200);
    fs::write(&broken, "").expect("written");
    signal("KILL", owner_of_rules(&group, 1).expect("nft"));
    until(TIMEOUT, "an agent that is not ready", || {
        let (status, body) = group.get(1, "/ready");
        assert!(status == 200 || body.contains("not redirected"), "{status} {body}");
        status == 503 && body.contains("this nft is broken")
    });
    // Another agent may redirect the connections meanwhile, and the first one then must not.
    let second = start_second(&group, &second_options("7001", "10.77.0.0/24"));
    fs::remove_file(&broken).expect("removed");
    let expected = format!("process {} already redirects", second.process.0.id());
    until(TIMEOUT, "an agent that gives way", || {
        let (status, body) = group.get(1, "/ready");
        assert_eq!(status, 503, "{body}");
        body.contains(&expected)
    });
    drop(second);
    until(TIMEOUT, "an agent that is ready", || group.get(1, "/ready").0 == 200);
    assert!(wire::nft(&group.hosts, 1, "list ruleset").contains("redirect to"));
}

/// Runs `ip` on host 1. Returns what it prints.
fn ip(hosts: &Hosts, words: &[&str]) -> String {
    let output = hosts.within(1, || Command::new("ip").args(words).output().expect("ip"));
    assert!(output.status.success(), "ip {words:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn settings_of_the_host_that_somebody_removes_are_made_again() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let programs = Programs::new();
    let broken = programs.add_breakable("ip");
    let group =
        Group::start_transparent_as(hosts, 1, NETWORK, programs.user(), EngineProgram::redis());
    fs::write(&broken, "").expect("written");
    ip(&group.hosts, &["rule", "del", "fwmark", "0x1062/0x107e"]);
    until(TIMEOUT, "an agent that is not ready", || {
        let (status, body) = group.get(1, "/ready");
        let is_named = body.contains("cannot be delivered") && body.contains("this ip is broken");
        assert!(status == 200 || is_named, "{status} {body}");
        status == 503
    });
    fs::remove_file(&broken).expect("removed");
    until(TIMEOUT, "an agent that is ready", || group.get(1, "/ready").0 == 200);
    assert!(ip(&group.hosts, &["rule"]).contains("fwmark 0x1062"));
    let setting = "/proc/sys/net/ipv4/tcp_fwmark_accept";
    group.hosts.within(1, || fs::write(setting, "0").expect("written"));
    ip(&group.hosts, &["route", "flush", "table", "4194"]);
    until(TIMEOUT, "the route and the setting", || {
        let all = ip(&group.hosts, &["route", "show", "table", "all"]);
        let value = group.hosts.within(1, || fs::read_to_string(setting).expect("a setting"));
        all.lines().any(|line| line.contains("table 4194")) && value.trim() == "1"
    });
    assert_eq!(group.get(1, "/ready").0, 200);
}

/// A program such as wg-quick adds routing rules that come before the agent's. The agent moves its
/// rule to the front, and leaves no old ones behind.
#[test]
fn routing_rule_of_the_agent_is_moved_to_the_front() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let group = Group::start_transparent(hosts, 1, NETWORK);
    ip(&group.hosts, &["route", "add", "default", "dev", "eth0", "table", "51820"]);
    let mark = ["mark", "0x1062"];
    for round in 1..=3 {
        ip(&group.hosts, &["rule", "add", "not", "fwmark", "0xca6c", "table", "51820"]);
        let get = || ip(&group.hosts, &[&["route", "get", "10.77.0.2"], &mark[..]].concat());
        assert!(!get().starts_with("local "), "round {round}");
        until(TIMEOUT, "a repair", || get().starts_with("local "));
        let rules = ip(&group.hosts, &["rule"]);
        assert_eq!(rules.matches("fwmark 0x1062").count(), 1, "round {round}: {rules}");
    }
}

/// Programs such as kube-proxy, Calico and Cilium set bits of the mark of every packet.
#[test]
fn other_programs_may_set_their_bits_in_the_marks_of_packets() {
    let Some(hosts) = Hosts::start_or_skip(3) else { return };
    let rule = "add table ip marks; \
                add chain ip marks out { type route hook output priority mangle; }; \
                add rule ip marks out meta mark set meta mark | 0xffffef81";
    (1..=2).for_each(|host| drop(wire::nft(&hosts, host, rule)));
    let group = Group::start_transparent(hosts, 2, NETWORK);
    let _engines = [2, 3].map(|host| group.start_engine(host, 7001, &AUTH));
    for host in [2, 3] {
        assert_eq!(group.client(1, host, 7001).ask(&["PING"]), "+PONG", "host {host}");
    }
    assert_eq!((refused(&group, 1, "loop"), direct(&group, 1)), (0.0, 1.0));
}

/// Other programs have tables whose names begin as those of agents, and sets of the same names.
#[test]
fn tables_of_other_programs_are_not_taken_for_those_of_agents() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    for (table, chain, hook) in
        [("ferrite_fw", "pre", "prerouting"), ("ferrite_1_2", "out", "output")]
    {
        let text = format!(
            "add table ip {table}; add set ip {table} peers {{ type ipv4_addr; flags interval; \
             elements = {{ 10.77.0.0/24 }}; }}; add set ip {table} ports {{ type inet_service; \
             flags interval; elements = {{ 7000-7009 }}; }}; \
             add chain ip {table} {chain} {{ type nat hook {hook} priority -100; }}; \
             add rule ip {table} {chain} ip daddr 10.99.0.1 tcp dport @ports redirect to :8080"
        );
        wire::nft(&hosts, 1, &text);
    }
    let group = Group::start_transparent(hosts, 1, NETWORK);
    assert_eq!(group.get(1, "/ready").0, 200);
}

/// Returns the options of a second agent of host 1.
fn second_options(ports: &'static str, peers: &'static str) -> Vec<&'static str> {
    let listen = ["--mode", "transparent", "--listen", "10.77.0.1:7471", "--rdma", "forbid"];
    let more = ["--allow-unauthenticated-peers", "yes", "--ports", ports, "--peer", peers];
    [listen, more].concat()
}

/// Starts a second agent on host 1, and waits until it redirects connections.
fn start_second(group: &Group, options: &[&str]) -> Running {
    group.hosts.within(1, || {
        let agent = Running::command(&[&["agent"], options].concat());
        let mut command = Command::new(NETWORK_ADMIN[0]);
        command.args(&NETWORK_ADMIN[1..]).arg(agent.get_program()).args(agent.get_args());
        Running::spawn(&mut command)
    })
}

/// Runs a second agent on host 1, which must fail to start.
fn fails_to_start(hosts: &Hosts, user: &[String], options: &[&str]) -> String {
    let Output { status, stderr, .. } = hosts.within(1, || {
        let mut command = Command::new("timeout");
        command.arg("20").args(user).arg(env!("CARGO_BIN_EXE_ferrite")).arg("agent");
        command.args(options).output().expect("ferrite starts")
    });
    let error = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(1), "{options:?}: {error}");
    error
}

#[test]
fn second_agent_does_not_take_the_connections_of_the_first() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let mut group = Group::start_transparent(hosts, 1, NETWORK);
    let first = format!("process {} already redirects", group.agent(1).process.0.id());
    for (ports, peers) in [("7002-7003", "10.77.0.2"), ("6379,26379", "10.0.0.0/8")] {
        let options = second_options(ports, peers);
        let error = fails_to_start(&group.hosts, &strings(NETWORK_ADMIN), &options);
        assert!(error.contains(&first), "{ports} {peers}: {error}");
    }
    for (ports, peers) in [("7003-7009", "10.77.0.0/24"), ("7001", "10.78.0.0/16")] {
        drop(start_second(&group, &second_options(ports, peers)));
    }
    // The rules of an agent that was killed stay for a moment.
    signal("KILL", group.agents.remove(0).process.0.id());
    let second = start_second(&group, &second_options("7001", "10.77.0.0/24"));
    let _engine = group.start_engine(2, 7001, &AUTH);
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
    group.agents.push(second);
    assert!(direct(&group, 1) == 1.0);
}

/// Of two agents that start at the same moment, neither sees the rules of the other before it sets
/// its own. Here nft hides the rules of the first agent from the second one until then.
#[test]
fn agent_that_has_set_its_rules_later_gives_way() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let group = Group::start_transparent(hosts, 1, NETWORK);
    let programs = Programs::new();
    chown(programs.0.path(), Some(65_534), Some(65_534)).expect("another owner");
    let marker = programs.0.join("rules");
    let hide = format!(
        "case \"$1 $2\" in '-i ') : > {0} ;; 'list tables') [ -e {0} ] || exit 0 ;; esac",
        marker.display()
    );
    programs.add("nft", &hide);
    let options = second_options("7001", "10.77.0.0/24");
    let error = fails_to_start(&group.hosts, &programs.user(), &options);
    let first = format!("process {} already redirects", group.agent(1).process.0.id());
    assert!(marker.exists() && error.contains(&first), "{error}");
    let _engine = group.start_engine(2, 7001, &AUTH);
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
    assert!(direct(&group, 1) == 1.0, "the first agent has the connection");
}

/// An address that moves between hosts is in the list of peers, and this host has it now.
#[test]
fn other_addresses_of_this_host_may_be_in_the_list_of_peers() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    ip(&hosts, &["addr", "add", "10.77.0.100/32", "dev", "eth0"]);
    let options = [&["--peer", "10.77.0.100"], NETWORK].concat();
    let group = Group::start_transparent(hosts, 1, &options);
    assert_eq!(group.get(1, "/ready").0, 200, "no link to this host is needed");
    let _engines = [1, 2].map(|host| group.start_engine(host, 7001, &AUTH));
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
    assert!(direct(&group, 1) == 1.0);
    let mut own = group.hosts.within(1, || Client::to_tcp(("10.77.0.100", 7001)));
    own.ok(&["AUTH", PASSWORD]);
    assert!(direct(&group, 1) == 1.0, "not redirected");
}

#[test]
fn agent_writes_nothing_into_its_home() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let home = TempDir::new("home");
    chown(home.path(), Some(65_534), Some(65_534)).expect("another owner");
    let path = home.path().display().to_string();
    let variable = format!("HOME={path}");
    let user = [NETWORK_ADMIN, &["env", "-C", &path, &variable]].concat();
    let mut group =
        Group::start_transparent_as(hosts, 1, NETWORK, strings(&user), EngineProgram::redis());
    let nft = owner_of_rules(&group, 1).expect("nft");
    drop(group.agents.remove(0));
    until(TIMEOUT, "the end of nft", || !is_alive(nft));
    let files: Vec<_> = fs::read_dir(home.path()).expect("a directory").flatten().collect();
    assert!(files.is_empty(), "{files:?}");
}

/// Drops all packets between the hosts, until [`reconnect`].
fn disconnect(group: &Group) {
    for host in 1..=group.hosts.count() {
        // Drops packets that arrive, because the kernel reports those that it may not send.
        let rule = "add table ip cut; \
                    add chain ip cut in { type filter hook input priority 0; }; \
                    add rule ip cut in iifname eth0 drop";
        wire::nft(&group.hosts, host, rule);
    }
}

fn reconnect(group: &Group) {
    for host in 1..=group.hosts.count() {
        wire::nft(&group.hosts, host, "delete table ip cut");
    }
}

fn is_answered(mut program: &TcpStream) -> bool {
    program.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0)
}

/// Starts two hosts with agents, an engine on the second, and a program of the first that uses it.
fn start_with_program(hosts: Hosts) -> (Group, Engine, TcpStream) {
    let group = Group::start_transparent(hosts, 2, NETWORK);
    let engine = group.start_engine(2, 7001, &AUTH);
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"PING\r\n").expect("sent");
    assert!(is_answered(&program));
    (group, engine, program)
}

/// The network is interrupted for longer than an agent may be silent that can be reached.
#[test]
fn connections_survive_an_interruption_of_the_network() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let (group, _engine, mut program) = start_with_program(hosts);
    disconnect(&group);
    program.write_all(b"PING\r\n").expect("sent");
    std::thread::sleep(Duration::from_secs(5));
    reconnect(&group);
    assert!(is_answered(&program), "the connection was reset");
    assert!(direct(&group, 1) == 0.0);
    for host in [1, 2] {
        assert!(sum(&group.scrape(host), "agent_links_lost_total", "") == 0.0, "host {host}");
    }
}

/// A host that is gone is noticed before engines would notice it (`cluster-node-timeout`).
#[test]
fn connections_to_a_host_that_is_gone_are_reset() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let (group, _engine, mut program) = start_with_program(hosts);
    disconnect(&group);
    let begun = Instant::now();
    assert!(is_reset(&mut program));
    // After 13 to 15 s, or later on a busy machine.
    assert!((8..25).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}
