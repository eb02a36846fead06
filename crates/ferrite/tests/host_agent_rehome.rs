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

use agent::harness::{Group, NOBODY, PASSWORD};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::signal;
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TIMEOUT, TempDir, until};
use serde_json::Value;

const TCP: &[&str] = &["--rdma", "forbid"];
const AUTH: [&str; 4] = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];

/// Starts hosts; `None` if this process may not create namespaces.
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn hosts(count: usize) -> Option<Hosts> {
    Hosts::start(count)
        .inspect_err(|why| eprintln!("SKIPPED: this test needs network namespaces: {why}"))
        .ok()
}

/// Runs `ferrite agent rehome` on a host, with a file that names the peers.
fn rehome(group: &Group, host: usize, peers: &str, words: &[&str]) -> Output {
    let directory = TempDir::new("rehome");
    let file = directory.file("ferrite.toml", format!("[agent]\npeers = [{peers}]\n"));
    group.hosts.within(host, || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["agent", "rehome", "--config"]).arg(&file).args(words);
        command.env("REDISCLI_AUTH", PASSWORD).output().expect("ferrite starts")
    })
}

/// Returns the JSON report on the only engine, and the exit code.
fn report(group: &Group, host: usize, peers: &str, words: &[&str]) -> (Value, Option<i32>) {
    let output = rehome(group, host, peers, &[words, &["--json"]].concat());
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (report["engines"][0].clone(), output.status.code())
}

fn operator(engine: &Engine) -> Client {
    let mut client = engine.client();
    client.ok(&["AUTH", PASSWORD]);
    client
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
    let Some(hosts) = hosts(2) else { return };
    let mut group = Group::start_transparent(hosts, 2, TCP);
    let _primary = group.start_engine(1, 7001, &AUTH);
    let of = [&AUTH[..], &["--replicaof", "10.77.0.1", "7001"]].concat();
    let replica = group.start_engine(2, 7001, &of);
    until(TIMEOUT, "a replica", || is_connected(&replica));
    let (found, code) = report(&group, 1, PEERS, &[ENGINE]);
    assert_eq!((found["direct"].clone(), code), (Value::Array(Vec::new()), Some(0)), "{found}");

    // While there is no agent on host 2, its connections are direct.
    signal("KILL", group.agent(2).process.0.id());
    until(TIMEOUT, "no rules", || {
        !agent::wire::nft(&group.hosts, 2, "list ruleset").contains("redirect to")
    });
    let mut program = group.connect(2, 1, 7001);
    assert!(answers(&mut program));
    until(TIMEOUT, "a direct replica", || {
        let (found, _) = report(&group, 1, PEERS, &[ENGINE]);
        found["direct"].as_array().is_some_and(|direct| direct.len() == 2)
    });
    group.agents[1] = group.start_agent(2, 2);
    group.wait_for_links();
    let text = rehome(&group, 1, PEERS, &[ENGINE]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("2 connections bypass the agents\n"), "{text}");
    assert!(text.contains("  replica 10.77.0.2:") && text.contains("  client 10.77.0."), "{text}");
    assert!(is_connected(&replica), "a list closes nothing");

    let (closed, code) = report(&group, 1, PEERS, &[ENGINE, "--kill"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(0)), "{closed}");
    until(TIMEOUT, "the replica", || is_connected(&replica));
    assert!(answers(&mut program), "--kill leaves clients alone");
    let (found, _) = report(&group, 1, PEERS, &[ENGINE]);
    let direct = found["direct"].as_array().expect("a list");
    assert!(direct.len() == 1 && direct[0]["kind"] == "client", "{found}");

    let (closed, code) = report(&group, 1, PEERS, &[ENGINE, "--kill", "--clients"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(0)), "{closed}");
    assert!(!answers(&mut program), "the client was closed");
    assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
    let (found, _) = report(&group, 1, PEERS, &[ENGINE]);
    assert!(found["direct"].as_array().is_some_and(Vec::is_empty), "{found}");
}

#[test]
fn replica_that_cannot_return_is_reported() {
    const PEERS: &str = "\"127.1.0.2=10.77.0.2\"";
    let Some(hosts) = hosts(2) else { return };
    let group = Group::start(hosts, 2, TCP, NOBODY);
    // This engine has the host's address, which the agents do not carry connections to.
    let options = [&AUTH[..], &["--bind", "10.77.0.1", "127.1.0.1"]].concat();
    let primary = group.start_engine(1, 7001, &options);
    let of = [&AUTH[..], &["--bind-source-addr", "10.77.0.2", "--replicaof", "10.77.0.1", "7001"]];
    let replica = group.start_engine(2, 7001, &of.concat());
    until(TIMEOUT, "a replica", || is_connected(&replica));
    let (closed, code) = report(&group, 1, PEERS, &["10.77.0.1:7001", "--kill"]);
    assert_eq!((closed["closed"].as_u64(), code), (Some(1), Some(1)), "{closed}");
    assert_eq!(closed["direct_again"], 1, "{closed}");
    // An engine by its Unix socket, and hosts that are no peers.
    let socket = primary.socket();
    let socket = socket.to_str().expect("a path");
    let (found, code) = report(&group, 1, "\"127.1.0.3=10.77.0.3\"", &["--unix", socket]);
    assert_eq!((found["direct"].clone(), code), (Value::Array(Vec::new()), Some(0)), "{found}");
    // Without a password, without peers.
    let failed = rehome(&group, 1, "", &["10.77.0.1:7001"]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status.code() == Some(2) && text.contains("no peers; name the"), "{text}");
    // In another network namespace, the sockets of the engine are not seen.
    let failed = rehome(&group, 2, PEERS, &["--unix", socket]);
    let text = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(failed.status.code() == Some(1), "{text}");
    assert!(text.contains("is not in this network namespace; run this on the"), "{text}");
}
