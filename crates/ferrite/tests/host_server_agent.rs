//! `ferrite server` with an agent: engines, modules and agents on hosts in network namespaces, over
//! TCP. The engines are Debian's Redis. The tests need root, for the namespaces, and nft.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}
mod server {
    pub(crate) mod harness;
    pub(crate) mod unit;
}

use std::fs::Permissions;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use agent::harness::PASSWORD;
use agent::wire;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{is_alive, signal};
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{TIMEOUT, TempDir, free_port};
use server::harness::{Server, Setup, directory};
use server::unit::Unit;

/// Starts an engine at port 7001 and an agent with these keys for replication and the cluster.
/// `agent` and `engine` have further lines of their sections.
fn start<'a>(hosts: &'a Hosts, host: usize, keys: &str, agent: &str, engine: &str) -> Unit<'a> {
    let sections = format!(
        "{engine}\n{keys}\n[agent]\nmode = \"transparent\"\nlisten = \"{}\"\n\
         peers = [\"10.77.0.1\", \"10.77.0.2\"]\nports = [\"7001-7002\", \"17001-17002\"]\n\
         allow_unauthenticated_peers = true\n{agent}\n",
        hosts.ip(host)
    );
    Unit::start(hosts, host, "", &sections)
}

/// Waits until the processes that the server had started are gone, and the rules with them. A
/// killed process needs a moment for that.
fn assert_nothing_left(unit: &Unit<'_>, children: &[u32]) {
    for child in children {
        until_or(TIMEOUT, "no orphans", || !is_alive(*child), || format!("{child} is left"));
    }
    let rules = || wire::nft(unit.hosts, unit.host, "list ruleset");
    until_or(TIMEOUT, "no rules", || !rules().contains("redirect to"), rules);
}

/// Returns all processes that the server has started: the engine, and the owner of the rules.
fn children(unit: &Unit<'_>) -> Vec<u32> {
    let tasks = format!("/proc/{}/task", unit.server.id());
    let tasks = Path::new(&tasks).read_dir().expect("a process").flatten();
    let read = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    let ids = tasks.filter_map(|task| read(task).ok());
    let ids: Vec<_> = ids.map(|ids| ids.trim().to_owned()).collect();
    ids.join(" ").split_whitespace().map(|id| id.parse().expect("an id")).collect()
}

/// Starts hosts and counts the packets between them; `None` if this process may not do that.
fn hosts(count: usize) -> Option<Hosts> {
    let hosts = Hosts::start_or_skip(count)?;
    (1..=count).for_each(|host| wire::count(&hosts, host));
    Some(hosts)
}

/// Asserts that each text is in the log, after the one before.
#[track_caller]
fn assert_in_order(log: &str, texts: &[&str]) {
    let mut rest = log;
    for text in texts {
        rest = rest.split_once(text).unwrap_or_else(|| panic!("no {text:?} in order: {log}")).1;
    }
}

#[test]
fn replication_goes_over_the_agents_and_a_signal_ends_all_parts_in_order() {
    let Some(hosts) = hosts(2) else { return };
    let keys = "[replication]\ntransport = \"auto\"\n[cluster]\ntransport = \"auto\"\n\
                [cluster.rdma]\ngossip_rdma = true\nmigration_rdma = true";
    let mut primary = start(&hosts, 1, keys, "", "");
    // Its first connection already goes over the agent.
    let replica = start(&hosts, 2, keys, "", "replicaof = \"10.77.0.1 7001\"");
    [&primary, &replica].iter().for_each(|unit| unit.wait_until_ready());
    replica.wait_for_replica();
    let mut client = primary.client();
    client.ok(&["SET", "key", "value"]);
    assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1");
    assert!(client.text(&["INFO", "replication"]).contains("slave0:ip=10.77.0.2,port=7001,"));
    [1, 2].into_iter().for_each(|host| wire::assert_only_links(&hosts, host, true));
    assert!(replica.counter("agent_streams_opened_total{", "by=\"local\"") >= 1.0);
    assert!(primary.counter("agent_streams_opened_total{", "by=\"peer\"") >= 1.0);
    assert!(replica.counter("agent_direct_connections_total", "") == 0.0);

    // The unit is ready only while its engine answers.
    signal("STOP", replica.engine());
    until_or(TIMEOUT, "not ready", || replica.ready().0 == 503, || replica.server.log());
    signal("CONT", replica.engine());
    replica.wait_until_ready();

    client.ok(&["SET", "last", "word"]);
    let started = children(&primary);
    assert_eq!(started.len(), 3, "the engine, the owner of the rules, its relay: {started:?}");
    primary.server.signal("TERM");
    assert_eq!(primary.server.event("ended")["code"], 0);
    assert_eq!(primary.server.end().0, Some(0));
    assert_nothing_left(&primary, &started);
    assert_eq!(replica.client().text(&["GET", "last"]), "word");
    assert_in_order(
        &primary.server.log(),
        &[
            " INFO agent: listening for agents on 10.77.0.1:7470; alias 10.77.0.1, peers",
            " INFO ready: Redis",
            " INFO SIGTERM received",
            "Redis is now ready to exit, bye bye...",
            " INFO agent: accepting nothing new",
            " INFO agent: agent ended: ",
            " INFO the engine exited with code 0",
        ],
    );
    // The other unit goes on, and names what is missing.
    until_or(TIMEOUT, "no link", || replica.ready().0 == 503, || replica.server.log());
    let (_, why) = replica.ready();
    assert!(why.contains("no link to 10.77.0.1:7470"), "{why}");
}

#[test]
fn replication_with_transport_tcp_passes_the_agents_by() {
    let Some(hosts) = hosts(2) else { return };
    let keys = "[replication]\ntransport = \"tcp\"";
    let primary = start(&hosts, 1, keys, "", "");
    let replica = start(&hosts, 2, keys, "", "replicaof = \"10.77.0.1 7001\"");
    [&primary, &replica].iter().for_each(|unit| unit.wait_until_ready());
    replica.wait_for_replica();
    let (engines, links) = wire::packets(&hosts, 1);
    assert!(engines > 0 && links > 0, "engines {engines}, links {links}");
    assert!(replica.counter("agent_streams_opened_total{", "") == 0.0);
    // The cluster bus still goes over the agents.
    let bus = hosts.within(1, || TcpListener::bind("10.77.0.1:17001")).expect("listen");
    let _node = hosts.within(2, || TcpStream::connect("10.77.0.1:17001")).expect("accepted");
    let _accepted = bus.accept().expect("the bus");
    let bus = || replica.counter("agent_streams_opened_total{", "class=\"bus\"");
    until_or(TIMEOUT, "a stream of the bus", || bus() == 1.0, || replica.server.log());
    let log = replica.server.log();
    assert!(log.contains("ports 17001-17002, not ports 7001-7002 (mode transparent"), "{log}");
}

/// A connection is open that would let the agent drain for long.
#[test]
fn killed_engine_ends_the_unit_at_once_with_a_cause() {
    let Some(hosts) = hosts(2) else { return };
    let other = start(&hosts, 1, "", "", "");
    let mut unit = start(&hosts, 2, "", "drain = \"1h\"", "");
    [&other, &unit].iter().for_each(|unit| unit.wait_until_ready());
    let mut client = hosts.within(2, || Client::to_tcp("10.77.0.1:7001"));
    client.ok(&["AUTH", PASSWORD]);
    let started = children(&unit);
    let begun = Instant::now();
    signal("KILL", unit.engine());
    assert_eq!(unit.server.event("ended")["code"], 137);
    let (code, _) = unit.server.end();
    assert_eq!(code, Some(137));
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let log = unit.server.log();
    assert!(log.contains("agent: resetting all connections now"), "{log}");
    assert!(log.contains("the engine was killed by signal 9"), "{log}");
    assert_nothing_left(&unit, &started);
    // The other unit sees the loss, and its engine still serves its clients.
    assert_eq!(other.client().ask(&["PING"]), "+PONG");
}

/// The agent waits for `ip`, which does not answer.
#[test]
fn signal_ends_a_unit_whose_agent_is_starting() {
    let Some(hosts) = hosts(1) else { return };
    let (directory, programs) = (directory(), TempDir::new("programs"));
    let (ip, began) = (programs.path().join("ip"), programs.path().join("began"));
    let script = format!("#!/bin/sh\n: > {}\nexec sleep 15\n", began.display());
    std::fs::write(&ip, script).expect("a script");
    std::fs::set_permissions(&ip, Permissions::from_mode(0o755)).expect("a program");
    let path = format!("{}:{}", programs.path().display(), std::env::var("PATH").expect("a path"));
    let sections = "[agent]\nmode = \"transparent\"\nlisten = \"10.77.0.1\"\n\
                    peers = [\"10.77.0.2\"]\nports = [\"7001\"]\n\
                    allow_unauthenticated_peers = true\n";
    let setup = Setup { server: "agent = true", network: "port = 7001", engine: sections };
    let with_path = |command: &mut Command| {
        command.env("PATH", &path);
    };
    let start = || {
        let _ = std::fs::remove_file(&began);
        let server = hosts.within(1, || Server::start_with(&directory, &setup, with_path));
        until_or(TIMEOUT, "the agent runs ip", || began.exists(), || server.log());
        server
    };
    for name in ["TERM", "INT"] {
        let mut server = start();
        let signalled = Instant::now();
        server.signal(name);
        let (code, _) = server.end();
        let log = server.log();
        assert!(code == Some(0) && log.contains("received, shutting down"), "{code:?} {log}");
        assert!(signalled.elapsed() < Duration::from_secs(4), "{:?}", signalled.elapsed());
    }
    // Without a signal, the agent gives up.
    let mut server = start();
    let (code, _) = server.end();
    let log = server.log();
    assert!(code == Some(1) && log.contains("no answer in 5s"), "{code:?} {log}");
}

/// Runs a unit that must fail before its engine starts. Returns the exit code and the log.
fn fails_to_start(server: &str, sections: &str) -> (Option<i32>, String) {
    fails_to_start_with(&[], server, sections)
}

fn fails_to_start_with(flags: &[&str], server: &str, sections: &str) -> (Option<i32>, String) {
    let directory = directory();
    let setup = Setup { server, engine: sections, network: "bind = \"127.1.0.1\"" };
    let add_flags = |command: &mut Command| {
        command.args(flags);
    };
    let mut server = Server::start_with(&directory, &setup, add_flags);
    let (code, _) = server.end();
    let log = server.log();
    assert!(!log.contains("oO0OoO0OoO0Oo"), "an engine was started: {log}");
    (code, log)
}

#[test]
fn agent_that_cannot_start_fails_the_server_with_its_cause() {
    let port = free_port();
    let _taken = TcpListener::bind(("127.1.0.2", port)).expect("a free port");
    let agent = format!(
        "[agent]\nalias = \"127.1.0.1\"\nports = [\"{port}\"]\npeers = [\"127.1.0.2=127.0.0.2\"]\n"
    );
    let (code, log) = fails_to_start("agent = true", &agent);
    let expected = format!("agent: cannot listen on 127.1.0.2:{port}: Address already in use");
    assert!(code == Some(1) && log.contains(&expected), "{code:?} {log}");
}

#[test]
fn transport_rdma_is_refused_with_what_is_missing() {
    let keys = "[replication]\ntransport = \"rdma\"\n[cluster]\ntransport = \"rdma\"\n";
    let (code, log) = fails_to_start("", keys);
    assert_eq!(code, Some(2), "{log}");
    let needs = "\"rdma\" needs an agent with peers: set agent.alias, agent.peers, agent.ports";
    for key in ["replication.transport", "cluster.transport"] {
        assert!(log.contains(&format!("{key}: {needs}")), "{log}");
    }
    if Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut it| it.next().is_some()) {
        return; // this host has a device
    }
    let agent = "[agent]\nalias = \"127.1.0.1\"\nports = [\"6379\", \"16379\"]\n\
                 peers = [\"127.1.0.2=127.0.0.2\"]\n";
    for flags in [&[][..], &["--check"]] {
        let (code, log) = fails_to_start_with(flags, "", &format!("{keys}{agent}"));
        assert_eq!(code, Some(69), "{flags:?} {log}");
        assert!(log.contains("RDMA is unavailable") && log.contains(" missing: agent: "), "{log}");
    }
}
