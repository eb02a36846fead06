//! `ferrite agent --mode transparent` with real engines on hosts in network namespaces, over TCP.
//! The engines have no settings for their addresses. The tests need root, for the namespaces; the
//! agents have two capabilities. They also need nft, of Debian's package nftables.

mod agent {
    pub(crate) mod cluster;
    pub(crate) mod harness;
    pub(crate) mod killed;
    pub(crate) mod sentinels;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use agent::harness::{Group, NETWORK_ADMIN, sum};
use agent::killed::{AUTH, is_reset};
use agent::wire::has_rules;
use agent::{cluster, killed, sentinels, wire};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{exit_within, signal};
use ferrite_testkit::{TIMEOUT, until};

const TCP: &[&str] = &["--rdma", "forbid"];

/// Starts hosts with agents; `None` if this process may not create namespaces.
fn group(count: usize, options: &[&str]) -> Option<Group> {
    Some(Group::start_transparent(Hosts::start_or_skip(count)?, count, &[TCP, options].concat()))
}

fn direct(group: &Group, host: usize) -> f64 {
    sum(&group.scrape(host), "agent_direct_connections_total", "")
}

#[test]
fn cluster_of_three_hosts_works_without_settings_of_its_engines() {
    let Some(group) = group(3, &[]) else { return };
    cluster::works(&group, true);
}

#[test]
fn engine_sees_the_address_and_the_port_of_the_program() {
    let Some(group) = group(2, &[]) else { return };
    let engine = group.start_engine(2, 7001, &AUTH);
    let mut client = group.client(1, 2, 7001);
    let list = client.text(&["CLIENT", "LIST"]);
    let program = |line: &&str| line.contains(" cmd=client");
    let line = list.lines().find(program).expect("the client itself");
    assert!(line.contains(" addr=10.77.0.1:") && line.contains(" laddr=10.77.0.2:7001 "), "{line}");
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"AUTH secret\r\nPING\r\n").expect("sent");
    until(TIMEOUT, "both replies", || program.read(&mut [0; 64]).expect("a reply") > 0);
    let own = program.local_addr().expect("an address");
    assert_eq!(program.peer_addr().expect("an address").to_string(), "10.77.0.2:7001");
    let list = client.text(&["CLIENT", "LIST"]);
    assert!(list.contains(&format!(" addr={own} laddr=10.77.0.2:7001 ")), "{own}: {list}");
    group.assert_only_links(true);
    drop(engine);
    assert!(is_reset(&mut group.connect(1, 2, 7001)), "there is no engine");
    group.assert_only_links(true);
}

/// All hosts of the network are peers, but one has no agent.
#[test]
fn host_without_an_agent_is_reached_directly() {
    let Some(hosts) = Hosts::start_or_skip(3) else { return };
    let group = Group::start_transparent(hosts, 2, &[TCP, &["--peer", "10.77.0.0/24"]].concat());
    let engine = group.start_engine(3, 7001, &AUTH);
    let mut client = group.client(1, 3, 7001);
    assert_eq!(client.ask(&["PING"]), "+PONG");
    let list = client.text(&["CLIENT", "LIST"]);
    assert!(list.contains(" addr=10.77.0.1:") && list.contains(" laddr=10.77.0.3:7001 "), "{list}");
    assert!(direct(&group, 1) == 1.0);
    // Connections from the host without an agent are ordinary TCP connections.
    let _engine = group.start_engine(2, 7001, &AUTH);
    assert_eq!(group.client(3, 2, 7001).ask(&["PING"]), "+PONG");
    assert_eq!(group.get(1, "/ready").0, 200, "only hosts with an address of their own are needed");
    drop(engine);
}

#[test]
fn host_without_an_agent_is_not_reached_if_direct_connections_are_refused() {
    let Some(hosts) = Hosts::start_or_skip(3) else { return };
    let options = ["--peer", "10.77.0.0/24", "--direct", "refuse"];
    let group = Group::start_transparent(hosts, 2, &[TCP, &options].concat());
    let _engine = group.start_engine(3, 7001, &AUTH);
    assert!(is_reset(&mut group.connect(1, 3, 7001)));
    assert!(direct(&group, 1) == 0.0);
    group.assert_only_links(true);
}

/// The rules take effect before the agent accepts connections.
#[test]
fn starts_while_programs_connect() {
    let Some(mut group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &AUTH);
    let mut agents = std::mem::take(&mut group.agents);
    let (hosts, has_ended) = (&group.hosts, AtomicBool::new(false));
    let address = (hosts.ip(2), 7001);
    let dial = || {
        while !has_ended.load(Ordering::Relaxed) {
            drop(TcpStream::connect((address.0.as_str(), address.1)));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| hosts.within(1, dial));
        for _ in 0..3 {
            drop(agents.remove(0));
            agents.insert(0, group.start_agent(1, 2));
            until(TIMEOUT, "a link", || hosts.within(1, || agents[0].get("/ready").0 == 200));
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    group.agents = agents;
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
}

#[test]
#[expect(clippy::print_stderr, reason = "shows how long the rules have stayed")]
fn connections_are_direct_after_an_agent_was_killed() {
    let Some(mut group) = group(2, &[]) else { return };
    let times = killed::connections_are_direct(&mut group, 3, true);
    eprintln!("rules were gone after {times:.0?}");
}

#[test]
fn signal_ends_redirection_and_lets_connections_go_on() {
    let Some(mut group) = group(2, &[]) else { return };
    let _engine = group.start_engine(1, 7001, &AUTH);
    let mut client = group.client(2, 1, 7001);
    signal("TERM", group.agent(2).process.0.id());
    until(TIMEOUT, "no rules", || !has_rules(&group.hosts, 2));
    assert_eq!(client.ask(&["PING"]), "+PONG", "connections go on");
    assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG", "new ones are direct");
    let old = group.agents.pop().expect("an agent");
    let is_listening = || TcpStream::connect("10.77.0.2:7470").is_ok();
    until(TIMEOUT, "a free port", || !group.hosts.within(2, is_listening));
    let agent = group.start_agent(2, 2);
    group.agents.push(agent);
    until(TIMEOUT, "a link of the new agent", || group.get(2, "/ready").0 == 200);
    assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
    assert_eq!(client.ask(&["PING"]), "+PONG", "connections of the old agent go on");
    drop(client);
    let mut old = old;
    let status = exit_within(&mut old.process.0, TIMEOUT).expect("drained");
    assert_eq!(status.code(), Some(0));
    assert!(has_rules(&group.hosts, 2), "the rules of the new agent stay");
}

/// When the `nft` process that owns the rules is killed, the kernel removes the rules. The agent
/// sets them again.
#[test]
fn rules_are_set_again_if_their_owner_is_killed() {
    let Some(group) = group(2, &[]) else { return };
    let agent = group.agent(2).process.0.id();
    let owner = || {
        let path = format!("/proc/{agent}/task/{agent}/children");
        let children = std::fs::read_to_string(path).expect("children");
        let children = children.split_whitespace().map(|pid| pid.parse().expect("a number"));
        let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
        let mut owners = children.filter(|pid| name(pid).is_ok_and(|name| name.trim() == "nft"));
        owners.next()
    };
    let first = owner().expect("nft");
    signal("KILL", first);
    until(TIMEOUT, "another owner", || {
        owner().is_some_and(|now| now != first) && has_rules(&group.hosts, 2)
    });
    let _engine = group.start_engine(1, 7001, &AUTH);
    assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
    group.assert_only_links(true);
}

#[test]
fn connection_to_the_agents_own_listener_is_refused() {
    let Some(group) = group(2, &[]) else { return };
    let rules = wire::nft(&group.hosts, 1, "list ruleset");
    let (_, rest) = rules.split_once("redirect to :").expect("a rule");
    let port: u16 = rest.split_whitespace().next().expect("a port").parse().expect("a number");
    let socket = group.hosts.within(1, || TcpStream::connect(("127.0.0.1", port)));
    let mut socket = socket.expect("connected");
    socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    assert!(is_reset(&mut socket));
    let name = "agent_connections_refused_total{cause=\"loop\"";
    assert!(sum(&group.scrape(1), name, "") == 1.0);
}

/// Runs an agent on a host, which must fail to start.
fn fails_to_start(hosts: &Hosts, user: &[&str], words: &[&str]) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = hosts.within(1, || {
        let mut command = Command::new(user[0]);
        command.args(&user[1..]).arg(env!("CARGO_BIN_EXE_ferrite")).arg("agent").args(TCP);
        command.args(words).output().expect("ferrite starts")
    });
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

#[test]
fn wrong_settings_and_missing_privileges_are_explained() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let own = ["--mode", "transparent", "--listen", "10.77.0.1", "--ports", "7001"];
    let own = [&own[..], &["--allow-unauthenticated-peers", "yes"]].concat();
    let peer = ["--peer", "10.77.0.2"];
    let words = [&own[..], &peer].concat();
    for (more, expected) in [
        (&[][..], "--peer is missing"),
        (&["--peer", "127.1.0.2=10.77.0.2"], "a peer is an address"),
        (&["--peer", "10.77.0.2", "--alias", "127.1.0.1"], "--alias is for"),
        (&["--peer", "10.77.0.2", "--ports", "7470"], "the port of the agents"),
        (&["--peer", "10.77.0.2", "--listen", "0.0.0.0"], "needs the IPv4 address"),
    ] {
        let words: Vec<_> = match more.first() {
            Some(_) if more.contains(&"--listen") => own
                .iter()
                .copied()
                .filter(|word| !["--listen", "10.77.0.1"].contains(word))
                .collect(),
            _ => own.clone(),
        };
        let (code, error) = fails_to_start(&hosts, &["env"], &[&words[..], more].concat());
        assert!(code == Some(2) && error.contains(expected), "{more:?}: {code:?} {error}");
    }
    let none = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"];
    let (code, error) = fails_to_start(&hosts, &none, &words);
    assert!(code == Some(1) && error.contains("CAP_NET_ADMIN and CAP_NET_RAW"), "{code:?} {error}");
    // With this capability, the agent may mark sockets, but not prepare the host.
    let raw = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let caps = ["--inh-caps=-all,+net_raw", "--ambient-caps=-all,+net_raw"];
    let (code, error) = fails_to_start(&hosts, &[&raw[..], &caps].concat(), &words);
    assert!(code == Some(1) && error.contains("cannot set net.ipv4"), "{code:?} {error}");
    for command in [
        "sysctl -w net.ipv4.tcp_fwmark_accept=1",
        "sysctl -w net.ipv4.fwmark_reflect=1",
        "ip rule add fwmark 0x1062/0x107e lookup 4194",
        "ip route replace local default dev lo table 4194",
    ] {
        assert!(error.contains(command), "{command}: {error}");
        let words: Vec<_> = command.split(' ').collect();
        let run = || Command::new(words[0]).args(&words[1..]).output().expect("it starts");
        assert!(hosts.within(1, run).status.success(), "{command}");
    }
    // The host is prepared now, but the rules need another capability.
    let (code, error) = fails_to_start(&hosts, &[&raw[..], &caps].concat(), &words);
    assert!(code == Some(1) && error.contains("cannot redirect connections"), "{code:?} {error}");
    assert!(!has_rules(&hosts, 1));
}

#[test]
fn agent_does_not_start_if_rules_of_others_come_first() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let text = "add table ip other; add chain ip other out { type nat hook output priority -150; }; \
                add rule ip other out ip daddr 10.77.0.2 tcp dport 7001 redirect to :15001";
    wire::nft(&hosts, 1, text);
    let trap = hosts.within(1, || TcpListener::bind("127.0.0.1:15001")).expect("a free port");
    let words = ["--mode", "transparent", "--listen", "10.77.0.1", "--ports", "7001"];
    let words = [&words[..], &["--peer", "10.77.0.2", "--allow-unauthenticated-peers", "yes"]];
    let (code, error) = fails_to_start(&hosts, NETWORK_ADMIN, &words.concat());
    assert!(code == Some(1) && error.contains("do not redirect"), "{code:?} {error}");
    drop(trap);
}

#[test]
fn sentinels_replace_a_lost_primary() {
    let Some(group) = group(3, &[]) else { return };
    sentinels::replace_primaries(&group, true);
}
