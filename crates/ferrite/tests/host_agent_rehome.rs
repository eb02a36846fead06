//! `ferrite agent rehome` with real engines on hosts in network namespaces: finds and closes the
//! connections that bypass the agents. The tests need root, for the namespaces.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use agent::harness::{Group, PASSWORD, WITHOUT_CAPABILITIES, operator};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::signal;
use ferrite_testkit::{Engine, Start, TIMEOUT, TempDir, until};
use serde_json::Value;

const TCP: &[&str] = &["--rdma", "forbid"];
const AUTH: [&str; 4] = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];

/// Runs `ferrite agent rehome` on a host, with a file that names the peers.
fn rehome(hosts: &Hosts, host: usize, peers: &str, words: &[&str]) -> Output {
    let directory = TempDir::new("rehome");
    let file = directory.file("ferrite.toml", format!("[agent]\npeers = [{peers}]\n"));
    hosts.within(host, || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["agent", "rehome", "--config"]).arg(&file).args(words);
        command.env("REDISCLI_AUTH", PASSWORD).output().expect("ferrite starts")
    })
}

/// Returns the JSON reports on the engines, and the exit code.
fn reports(hosts: &Hosts, host: usize, peers: &str, words: &[&str]) -> (Vec<Value>, Option<i32>) {
    let output = rehome(hosts, host, peers, &[words, &["--json"]].concat());
    let mut report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let Value::Array(engines) = report["engines"].take() else { panic!("{report}") };
    (engines, output.status.code())
}

/// Returns the JSON report on the only engine, and the exit code.
fn report(hosts: &Hosts, host: usize, peers: &str, words: &[&str]) -> (Value, Option<i32>) {
    let (mut engines, code) = reports(hosts, host, peers, words);
    (engines.remove(0), code)
}

fn is_connected(replica: &Engine) -> bool {
    operator(replica).text(&["INFO", "replication"]).contains("master_link_status:up")
}

/// Logs in. Returns whether the engine answers.
fn answers(program: &mut TcpStream) -> bool {
    let sent = program.write_all(format!("AUTH {PASSWORD}\r\n").as_bytes());
    sent.is_ok() && program.read_exact(&mut [0; 5]).is_ok()
}

#[test]
fn replica_that_bypasses_the_agents_comes_back_to_them() {
    const PEERS: &str = "\"10.77.0.1\", \"10.77.0.2\"";
    const ENGINE: &str = "10.77.0.1:7001";
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let mut group = Group::start_transparent(hosts, 2, TCP);
    let _primary = group.start_engine(1, 7001, &AUTH);
    let of = [&AUTH[..], &["--replicaof", "10.77.0.1", "7001"]].concat();
    let replica = group.start_engine(2, 7001, &of);
    until(TIMEOUT, "a replica", || is_connected(&replica));
    let (found, code) = report(&group.hosts, 1, PEERS, &[ENGINE]);
    assert_eq!((found["direct"].clone(), code), (Value::Array(Vec::new()), Some(0)), "{found}");

    // While there is no agent on host 2, its connections are direct.
    signal("KILL", group.agent(2).process.0.id());
    until(TIMEOUT, "no rules", || {
        !agent::wire::nft(&group.hosts, 2, "list ruleset").contains("redirect to")
    });
    let mut program = group.connect(2, 1, 7001);
    assert!(answers(&mut program));
    until(TIMEOUT, "a direct replica", || {
        let (found, _) = report(&group.hosts, 1, PEERS, &[ENGINE]);
        found["direct"].as_array().is_some_and(|direct| direct.len() == 2)
    });
    group.agents[1] = group.start_agent(2, 2);
    group.wait_for_links();
    let text = rehome(&group.hosts, 1, PEERS, &[ENGINE]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("2 connections bypass the agents\n"), "{text}");
    assert!(text.contains("  replica 10.77.0.2:") && text.contains("  client 10.77.0."), "{text}");
    assert!(is_connected(&replica), "a list closes nothing");

    let (closed, code) = report(&group.hosts, 1, PEERS, &[ENGINE, "--kill"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(0)), "{closed}");
    until(TIMEOUT, "the replica", || is_connected(&replica));
    assert!(answers(&mut program), "--kill leaves clients alone");
    let (found, _) = report(&group.hosts, 1, PEERS, &[ENGINE]);
    let direct = found["direct"].as_array().expect("a list");
    assert!(direct.len() == 1 && direct[0]["kind"] == "client", "{found}");

    let (closed, code) = report(&group.hosts, 1, PEERS, &[ENGINE, "--kill", "--clients"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(0)), "{closed}");
    assert!(!answers(&mut program), "the client was closed");
    assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
    let (found, _) = report(&group.hosts, 1, PEERS, &[ENGINE]);
    assert!(found["direct"].as_array().is_some_and(Vec::is_empty), "{found}");
}

#[test]
fn replica_that_cannot_return_is_reported() {
    const PEERS: &str = "\"127.1.0.2=10.77.0.2\"";
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let group = Group::start(hosts, 2, TCP, WITHOUT_CAPABILITIES);
    // This engine has the host's address, which the agents do not carry connections to.
    let options = [&AUTH[..], &["--bind", "10.77.0.1", "127.1.0.1"]].concat();
    let primary = group.start_engine(1, 7001, &options);
    let of = [&AUTH[..], &["--bind-source-addr", "10.77.0.2", "--replicaof", "10.77.0.1", "7001"]];
    let replica = group.start_engine(2, 7001, &of.concat());
    until(TIMEOUT, "a replica", || is_connected(&replica));
    let (closed, code) = report(&group.hosts, 1, PEERS, &["10.77.0.1:7001", "--kill"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(1)), "{closed}");
    assert_eq!(closed["direct_again"], 1, "{closed}");
    // An engine by its Unix socket, and hosts that are no peers.
    let socket = primary.socket();
    let socket = socket.to_str().expect("a path");
    let (found, code) = report(&group.hosts, 1, "\"127.1.0.3=10.77.0.3\"", &["--unix", socket]);
    assert_eq!((found["direct"].clone(), code), (Value::Array(Vec::new()), Some(0)), "{found}");
    // Without a password, without peers.
    let failed = rehome(&group.hosts, 1, "", &["10.77.0.1:7001"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status.code() == Some(2) && text.contains("no peers; name the"), "{text}");
    // In another network namespace, the sockets of the engine are not seen.
    let failed = rehome(&group.hosts, 2, PEERS, &["--unix", socket]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status.code() == Some(1), "{text}");
    assert!(text.contains("is not in this network namespace; run this on the"), "{text}");
}

/// Starts an engine at port 7001 of host 1, without agents.
fn engine(hosts: &Hosts, options: &[&str]) -> Engine {
    let options = [&["--port", "7001"], &AUTH[..], options].concat();
    hosts.within(1, || Engine::start(&Start::redis(&options)))
}

#[test]
fn an_engine_that_fails_does_not_hide_the_others() {
    const PEERS: &str = "\"10.77.0.2\"";
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let users = "--user lister on nopass +client|list";
    let options = [&["--bind", "10.77.0.1"], &users.split(' ').collect::<Vec<_>>()[..]].concat();
    let _engine = engine(&hosts, &options);
    let mut program = hosts.within(2, || TcpStream::connect("10.77.0.1:7001")).expect("connected");
    assert!(answers(&mut program));
    let words = ["10.77.0.1:7002", "10.77.0.1:7001"];
    let output = rehome(&hosts, 1, PEERS, &words);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("cannot list the connections of 10.77.0.1:7002: cannot connect"),
        "{text}"
    );
    let (found, code) = reports(&hosts, 1, PEERS, &words);
    assert!(code == Some(1) && found[0]["error"].as_str().is_some_and(|why| text.contains(why)));
    assert_eq!(found[1]["direct"].as_array().map(Vec::len), Some(1), "{found:?}");
    assert!(found[1]["error"].is_null(), "{found:?}");
    // A user who may not close connections.
    let words = ["10.77.0.1:7001", "--user", "lister", "--kill", "--clients"];
    let (found, code) = report(&hosts, 1, PEERS, &words);
    assert_eq!((found["direct"].as_array().map(Vec::len), code), (Some(1), Some(1)), "{found}");
    let why = found["error"].as_str().expect("an error");
    assert!(why.contains("cannot close 10.77.0.2:") && why.contains("NOPERM"), "{why}");
    assert!(why.contains("; allow it (ACL SETUSER)"), "{why}");
    assert!(answers(&mut program));
}

#[test]
fn names_a_command_that_the_engine_lacks() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let _engine = engine(&hosts, &["--bind", "10.77.0.1", "--rename-command", "CLIENT", "other"]);
    let (found, code) = report(&hosts, 1, "\"10.77.0.2\"", &["10.77.0.1:7001"]);
    let why = found["error"].as_str().expect("an error");
    assert!(code == Some(1) && why.contains("the engine has no command CLIENT; its"), "{why}");
}

#[test]
fn peer_whose_name_has_no_address_is_left_out() {
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let _engine = engine(&hosts, &["--bind", "10.77.0.1"]);
    let program = hosts.within(2, || TcpStream::connect("10.77.0.1:7001"));
    assert!(answers(&mut program.expect("connected")));
    let _program = hosts.within(2, || TcpStream::connect("10.77.0.1:7001")).expect("connected");
    let unknown = "\"127.1.0.3=no-such-host.invalid\"";
    let peers = format!("{unknown}, \"127.1.0.2=10.77.0.2\"");
    let Output { status, stdout, stderr } = rehome(&hosts, 1, &peers, &["10.77.0.1:7001"]);
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success() && stdout.contains("1 connection bypasses"), "{stdout} {stderr}");
    let warning = "the connections of peer no-such-host.invalid are not in the list";
    assert!(stderr.contains("no-such-host.invalid: ") && stderr.contains(warning), "{stderr}");
    let failed = rehome(&hosts, 1, unknown, &["10.77.0.1:7001"]);
    let stderr = String::from_utf8_lossy(&failed.stderr);
    assert!(!failed.status.success() && stderr.contains("the address of no peer"), "{stderr}");
}

#[test]
fn finds_connections_over_ipv6_and_those_of_a_bus_at_any_port() {
    const PEERS: &str = "\"127.1.0.2=[fd77::2]\"";
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    for host in 1..=2 {
        let address = format!("fd77::{host}/64");
        let words = ["-6", "address", "add", &address, "dev", "eth0", "nodad"];
        let added = hosts.within(host, || Command::new("ip").args(words).status());
        assert!(added.expect("ip").success());
    }
    let cluster = ["--cluster-enabled", "yes", "--cluster-port", "27001"];
    let engine = engine(&hosts, &[&["--bind", "fd77::1"], &cluster[..]].concat());
    let connect = |port| hosts.within(2, || TcpStream::connect(("fd77::1", port)));
    let (mut program, _bus) = (connect(7001).expect("connected"), connect(27001).expect("a bus"));
    assert!(answers(&mut program));
    let socket = engine.socket();
    for words in [&["[fd77::1]:7001"][..], &["--unix", socket.to_str().expect("a path")]] {
        let (found, _) = report(&hosts, 1, PEERS, words);
        assert_eq!(found["direct"].as_array().map(Vec::len), Some(1), "{found}");
        assert_eq!((&found["bus"], found["error"].is_null()), (&1.into(), true), "{found}");
    }
    let (closed, code) = report(&hosts, 1, PEERS, &["[fd77::1]:7001", "--kill", "--clients"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(0)), "{closed}");
    assert!(!answers(&mut program), "the client was closed");
}

/// Programs of the other host connect and disconnect all the time, so some of the engine's clients
/// have no socket any more when the sockets are listed.
#[test]
fn connections_that_end_meanwhile_are_no_error() {
    const PROGRAMS: usize = 4;
    const LOOKS: usize = 20;
    let Some(hosts) = Hosts::start_or_skip(2) else { return };
    let _engine = engine(&hosts, &["--bind", "10.77.0.1"]);
    let has_ended = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        for _ in 0..PROGRAMS {
            scope.spawn(|| {
                hosts.within(2, || {
                    while !has_ended.load(Ordering::Relaxed) {
                        let mut program = TcpStream::connect("10.77.0.1:7001").expect("connected");
                        assert!(answers(&mut program));
                    }
                });
            });
        }
        let look = |_| rehome(&hosts, 1, "\"10.77.0.2\"", &["10.77.0.1:7001"]);
        let found: Vec<_> = (0..LOOKS).map(look).collect();
        has_ended.store(true, Ordering::Relaxed);
        found
    });
    for output in found {
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}
