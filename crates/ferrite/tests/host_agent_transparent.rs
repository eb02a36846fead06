//! `ferrite agent --mode transparent` with real engines on hosts in network namespaces, over TCP.
//! The engines have no settings for their addresses. The tests need root, for the namespaces; the
//! agents have two capabilities. They also need nft, of Debian's package nftables.

mod agent {
    pub(crate) mod cluster;
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use agent::harness::{Group, NETWORK_ADMIN, PASSWORD, sum};
use agent::{cluster, wire};
use ferrite_testkit::directory::TempDir;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{KillOnDrop, exit_within, signal};
use ferrite_testkit::resp::Client;
use ferrite_testkit::{Engine, TIMEOUT, until};

const TCP: &[&str] = &["--rdma", "forbid"];
const AUTH: [&str; 4] = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];

/// Starts hosts; `None` if this process may not create namespaces.
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn hosts(count: usize) -> Option<Hosts> {
    Hosts::start(count)
        .inspect_err(|why| eprintln!("SKIPPED: this test needs network namespaces: {why}"))
        .ok()
}

/// Starts hosts with agents; `None` if this process may not create namespaces.
fn group(count: usize, options: &[&str]) -> Option<Group> {
    Some(Group::start_transparent(hosts(count)?, count, &[TCP, options].concat()))
}

fn is_reset(socket: &mut TcpStream) -> bool {
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

fn direct(group: &Group, host: usize) -> f64 {
    sum(&group.scrape(host), "agent_direct_connections_total", "")
}

/// Returns whether a host has rules of an agent.
fn has_rules(hosts: &Hosts, host: usize) -> bool {
    wire::nft(hosts, host, "list ruleset").contains("redirect to")
}

/// Returns a client of an engine's own socket.
fn operator(engine: &Engine) -> Client {
    let mut client = engine.client();
    client.ok(&["AUTH", PASSWORD]);
    client
}

fn field(engine: &Engine, name: &str) -> String {
    let info = operator(engine).text(&["INFO"]);
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name} in {info}")).trim().to_owned()
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
    let Some(hosts) = hosts(3) else { return };
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
    let Some(hosts) = hosts(3) else { return };
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

/// Kills the agent of a replica's host. The rules end with it.
#[test]
#[expect(clippy::print_stderr, reason = "shows how long the rules have stayed")]
fn connections_are_direct_after_an_agent_was_killed() {
    let Some(mut group) = group(2, &[]) else { return };
    let primary = group.start_engine(1, 7001, &AUTH);
    let of = [&AUTH[..], &["--replicaof", "10.77.0.1", "7001"]].concat();
    let replica = group.start_engine(2, 7001, &of);
    until(TIMEOUT, "a replica", || field(&replica, "master_link_status") == "up");
    assert!(field(&primary, "slave0").starts_with("ip=10.77.0.2,port=7001,state="));
    group.assert_only_links(true);
    let number = |name| field(&primary, name).parse::<u32>().expect("a number");
    let syncs = || (number("sync_full"), number("sync_partial_ok"));
    let is_connected = || field(&replica, "master_link_status") == "up";
    assert_eq!(syncs(), (1, 0));
    let mut times = Vec::new();
    for _ in 1..=3 {
        let mut waits = group.connect(2, 1, 7001);
        let (_, resumed) = syncs();
        let begun = Instant::now();
        signal("KILL", group.agent(2).process.0.id());
        until(TIMEOUT, "no rules", || !has_rules(&group.hosts, 2));
        times.push(begun.elapsed().as_millis());
        assert!(is_reset(&mut waits), "expected a reset, not the end of the stream");
        assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
        // The replica resumes where it was interrupted, over a direct connection.
        let has_resumed = |before: u32| syncs().1 > before && is_connected();
        until(TIMEOUT, "a partial resynchronisation", || has_resumed(resumed));
        let (_, resumed) = syncs();
        let packets = || wire::packets(&group.hosts, 2).0;
        assert!(packets() > 0, "direct connections are counted");
        // A new agent redirects new connections, and leaves the direct one alone.
        group.agents[1] = group.start_agent(2, 2);
        group.wait_for_links();
        let mut client = operator(&primary);
        client.ok(&["SET", "key", "value"]);
        assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1");
        assert_eq!(syncs(), (1, resumed));
        let opened = || sum(&group.scrape(2), "agent_streams_opened_total{", "by=\"local\"");
        assert!(opened() == 0.0);
        assert_eq!(group.client(2, 1, 7001).ask(&["PING"]), "+PONG");
        assert!(opened() == 1.0);
        // Ends the direct connection of the replica. The next one goes through the new agent.
        assert_eq!(operator(&replica).ask(&["CLIENT", "KILL", "TYPE", "master"]), ":1");
        until(TIMEOUT, "a partial resynchronisation", || has_resumed(resumed));
        assert!(opened() == 2.0);
    }
    eprintln!("rules were gone after {times:?} ms");
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
    let Some(hosts) = hosts(1) else { return };
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
        "ip rule add fwmark 0xfe1 lookup 4065",
        "ip route replace local default dev lo table 4065",
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
    let Some(hosts) = hosts(1) else { return };
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

/// A Sentinel on a host. It has no settings for its addresses.
struct Sentinel {
    _process: KillOnDrop,
    _directory: TempDir,
}

impl Sentinel {
    fn start(group: &Group, host: usize) -> Self {
        let directory = TempDir::new("sentinel");
        let lines = format!(
            "port 26379\ndir {}\nlogfile {}\nsentinel monitor group 10.77.0.1 7001 2\n\
             sentinel auth-pass group {PASSWORD}\nsentinel down-after-milliseconds group 3000\n\
             sentinel failover-timeout group 20000\n",
            directory.path().display(),
            directory.join("log").display()
        );
        let file = directory.file("sentinel.conf", lines);
        let start = || -> Child {
            let mut command = Command::new("redis-server");
            command.arg(&file).arg("--sentinel").spawn().expect("a sentinel")
        };
        Self { _process: KillOnDrop(group.hosts.within(host, start)), _directory: directory }
    }
}

fn sentinel(group: &Group, from: usize, to: usize) -> Client {
    let address = group.address(to);
    group.hosts.within(from, || Client::to_tcp((address.as_str(), 26379)))
}

#[test]
fn sentinels_replace_a_lost_primary() {
    let Some(group) = group(3, &[]) else { return };
    let mut primary = group.start_engine(1, 7001, &AUTH);
    let of = [&AUTH[..], &["--replicaof", "10.77.0.1", "7001"]].concat();
    let replicas = [2, 3].map(|host| group.start_engine(host, 7001, &of));
    for replica in &replicas {
        until(TIMEOUT, "a replica", || field(replica, "master_link_status") == "up");
    }
    let _sentinels = [1, 2, 3].map(|host| Sentinel::start(&group, host));
    for host in 1..=3 {
        until(TIMEOUT, "a sentinel", || {
            group.hosts.within(host, || TcpStream::connect("127.0.0.1:26379").is_ok())
        });
        until(TIMEOUT, "a sentinel that knows all others", || {
            let text = sentinel(&group, host % 3 + 1, host).text(&["INFO", "sentinel"]);
            text.contains("status=ok,address=10.77.0.1:7001,slaves=2,sentinels=3")
        });
    }
    let mut client = group.client(2, 1, 7001);
    client.ok(&["SET", "key", "value"]);
    assert_eq!(client.ask(&["WAIT", "2", "30000"]), ":2");
    primary.kill();
    let asked = ["SENTINEL", "get-master-addr-by-name", "group"];
    let mut new = None;
    for host in 1..=3 {
        until(TIMEOUT, "another primary", || {
            let mut client = sentinel(&group, host % 3 + 1, host);
            client.send(&[asked.map(String::from).to_vec()]);
            let reply = client.replies(1).remove(0);
            let reply = String::from_utf8_lossy(&reply).into_owned();
            new = [2, 3].into_iter().find(|host| reply.contains(&group.address(*host)));
            new.is_some()
        });
    }
    let new = new.expect("a host");
    let other = &replicas[usize::from(new == 2)];
    until(TIMEOUT, "a replica of the new primary", || {
        field(other, "role") == "slave"
            && field(other, "master_host") == group.address(new)
            && field(other, "master_link_status") == "up"
    });
    let mut client = group.client(1, new, 7001);
    assert_eq!(client.text(&["GET", "key"]), "value");
    client.ok(&["SET", "key", "another"]);
    assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1");
    (1..=3).for_each(|host| wire::assert_only_links(&group.hosts, host));
    (1..=3).for_each(|host| assert!(direct(&group, host) == 0.0));
}
