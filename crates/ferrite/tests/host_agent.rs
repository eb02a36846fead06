//! `ferrite agent` with real engines on hosts in network namespaces, over TCP. The tests need root,
//! for the namespaces; the agents have no capability.

mod agent {
    pub(crate) mod cluster;
    pub(crate) mod harness;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;

use agent::cluster;
use agent::harness::{Group, PASSWORD, WITHOUT_CAPABILITIES, alias, sum};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{exit_within, signal};
use ferrite_testkit::{TIMEOUT, until};

const TCP: &[&str] = &["--rdma", "forbid"];

/// Starts hosts with agents; `None` if this process may not create namespaces.
#[expect(clippy::print_stderr, reason = "tells that the test is left out")]
fn group(count: usize, options: &[&str]) -> Option<Group> {
    let hosts = Hosts::start(count)
        .inspect_err(|why| eprintln!("SKIPPED: this test needs network namespaces: {why}"))
        .ok()?;
    Some(Group::start(hosts, count, &[TCP, options].concat(), WITHOUT_CAPABILITIES))
}

fn is_reset(socket: &mut TcpStream) -> bool {
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Connects a program of host 1 to host 2. Returns whether the engine there replies.
fn is_carried(group: &Group) -> bool {
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"PING\r\n").is_ok()
        && program.read(&mut [0; 64]).is_ok_and(|count| count > 0)
}

fn refused(group: &Group, host: usize, cause: &str) -> f64 {
    let name = format!("agent_opens_refused_total{{cause=\"{cause}\"");
    sum(&group.scrape(host), &name, "")
}

#[test]
fn cluster_of_three_hosts_works_over_tcp_links() {
    let Some(group) = group(3, &[]) else { return };
    cluster::works(&group, true);
}

#[test]
fn engine_sees_the_alias_and_the_port_of_the_program() {
    let Some(group) = group(2, &[]) else { return };
    let engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"AUTH secret\r\nCLIENT LIST\r\n").expect("sent");
    let mut reply = vec![0; 4096];
    let mut text = String::new();
    until(TIMEOUT, "the list of clients", || {
        let count = program.read(&mut reply).expect("a reply");
        text.push_str(&String::from_utf8_lossy(&reply[..count]));
        text.contains(" cmd=client")
    });
    let port = program.local_addr().expect("an address").port();
    assert!(text.contains(&format!(" addr=127.1.0.1:{port} ")), "{text}");
    assert!(text.contains(" laddr=127.1.0.2:7001 "), "{text}");
    assert!(sum(&group.scrape(2), "agent_source_ports_changed_total", "") == 0.0);
    drop(engine);
}

#[test]
fn half_closed_connection_gets_its_replies_and_a_refused_one_is_reset() {
    let Some(group) = group(2, &["--protected-mode", "no"]) else { return };
    let mut engine = group.start_engine(2, 7001, &["--protected-mode", "no"]);
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"PING\r\n").expect("sent");
    program.shutdown(std::net::Shutdown::Write).expect("the end");
    let mut text = String::new();
    program.read_to_string(&mut text).expect("the reply, and then the end");
    assert_eq!(text, "+PONG\r\n");
    let mut open = group.connect(1, 2, 7001);
    open.write_all(b"PING\r\n").expect("sent");
    open.read_exact(&mut [0; 7]).expect("a reply");
    engine.kill();
    // The kernel of the killed engine ends its connections in an orderly way.
    assert_eq!(open.read(&mut [0]).expect("the end"), 0);
    assert!(is_reset(&mut group.connect(1, 2, 7001)), "there is no engine");
    assert!(refused(&group, 2, "engine_refused") == 1.0);
}

#[test]
fn engine_without_a_password_is_refused_in_protected_mode() {
    let Some(group) = group(2, &[]) else { return };
    let engine = group.start_engine(2, 7001, &["--protected-mode", "no"]);
    assert!(is_reset(&mut group.connect(1, 2, 7001)));
    assert!(refused(&group, 2, "protected_mode") == 1.0);
    engine.client().ok(&["CONFIG", "SET", "requirepass", PASSWORD]);
    // The agent asks again after a second.
    until(TIMEOUT, "a connection", || is_carried(&group));
}

#[test]
fn lost_agent_resets_connections_and_comes_back() {
    let Some(mut group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let mut client = group.client(1, 2, 7001);
    assert_eq!(client.ask(&["PING"]), "+PONG");
    let mut waits = group.connect(1, 2, 7001);
    signal("KILL", group.agent(2).process.0.id());
    assert!(is_reset(&mut waits), "the link was lost");
    let name = "agent_connections_refused_total{cause=\"no_link\"";
    until(TIMEOUT, "a connection that is refused", || {
        assert!(is_reset(&mut group.connect(1, 2, 7001)));
        sum(&group.scrape(1), name, "") > 0.0
    });
    assert!(sum(&group.scrape(1), "agent_links_lost_total{", "") == 1.0);
    assert_eq!(group.get(1, "/ready").0, 503);
    // The new agent connects by itself, so nobody waits for the end of the pause.
    group.agents[1] = group.start_agent(2, 2);
    group.wait_for_links();
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
}

#[test]
fn first_signal_drains_and_the_second_ends_at_once() {
    let Some(mut group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let mut client = group.client(1, 2, 7001);
    signal("TERM", group.agent(2).process.0.id());
    until(TIMEOUT, "the first agent learns of it", || !is_carried(&group));
    assert_eq!(client.ask(&["PING"]), "+PONG", "connections go on");
    drop(client);
    let status = exit_within(&mut group.agents[1].process.0, TIMEOUT).expect("drained");
    assert_eq!(status.code(), Some(0));
    group.agents[1] = group.start_agent(2, 2);
    group.wait_for_links();
    let mut open = group.connect(1, 2, 7001);
    open.write_all(b"PING\r\n").expect("sent");
    assert!(open.read(&mut [0; 64]).expect("a reply") > 0);
    let id = group.agent(2).process.0.id();
    signal("TERM", id);
    until(TIMEOUT, "the first signal is handled", || !is_carried(&group));
    signal("TERM", id);
    assert!(is_reset(&mut open));
    let status = exit_within(&mut group.agents[1].process.0, TIMEOUT).expect("ended");
    assert_eq!(status.code(), Some(1));
}

#[test]
fn connections_without_a_link_go_directly_if_that_is_allowed() {
    let Some(mut group) = group(2, &["--direct", "allow"]) else { return };
    let mut lost = group.agents.pop().expect("an agent");
    lost.process.0.kill().expect("killed");
    // The engine must also listen on the host's own address.
    let ip = group.hosts.ip(2);
    let own = alias(2);
    let options = ["--requirepass", PASSWORD, "--bind", &own, &ip];
    let _engine = group.start_engine(2, 7001, &options);
    let mut client = group.client(1, 2, 7001);
    assert_eq!(client.ask(&["PING"]), "+PONG");
    assert!(sum(&group.scrape(1), "agent_direct_connections_total", "") == 1.0);
    let list = client.text(&["CLIENT", "LIST"]);
    assert!(list.contains(&format!(" addr={}:", group.hosts.ip(1))), "{list}");
}

/// Runs an agent that must not start. Returns its exit code and its error.
fn fails_to_start(words: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_ferrite"))
        .arg("agent")
        .args(TCP)
        .args(words)
        .output()
        .expect("ferrite starts");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn wrong_and_unsafe_settings_are_explained() {
    let own = ["--alias", "127.1.0.1", "--ports", "7001"];
    let peer = ["--peer", "127.1.0.2=192.0.2.2"];
    for (words, expected) in [
        (&[][..], "--alias is missing"),
        (&["--alias", "127.1.0.1", "--peer", "127.1.0.2=127.0.0.2"], "ports: none"),
        (&[&own[..], &peer].concat(), "start with --allow-unauthenticated-peers yes"),
        (&[&own[..], &["--listen", "0.0.0.0"]].concat(), "0.0.0.0:7470 is an address of a network"),
        (&["--alias", "10.0.0.1"], "an address in 127.0.0.0/8"),
        (&["--alias", "127.0.0.1"], "other than 127.0.0.1"),
        (&["--alias", "127.1.0.1", "--peer", "10.0.0.2"], "each an alias and an address"),
        (&["--alias", "127.1.0.1", "--ports", "9-1"], "ports and ranges"),
    ] {
        let (code, error) = fails_to_start(words);
        assert!(code == Some(2) && error.contains(expected), "{words:?}: {code:?} {error}");
    }
    let taken = std::net::TcpListener::bind("127.1.0.2:0").expect("listen");
    let port = taken.local_addr().expect("an address").port().to_string();
    let words = ["--alias", "127.1.0.1", "--ports", &port, "--peer", "127.1.0.2=127.0.0.2"];
    let (code, error) = fails_to_start(&words);
    assert!(code == Some(1) && error.contains("must bind the alias"), "{code:?} {error}");
}
