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
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::{Command, Output};

use agent::harness::{Group, NETWORK_ADMIN, PASSWORD, strings, sum};
use agent::wire;
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{is_alive, signal};
use ferrite_testkit::resp::Client;
use ferrite_testkit::{TIMEOUT, TempDir, until};
use metrics::harness::Running;

const AUTH: [&str; 4] = ["--requirepass", PASSWORD, "--masterauth", PASSWORD];
/// All hosts of the network are peers.
const NETWORK: &[&str] = &["--rdma", "forbid", "--peer", "10.77.0.0/24"];

/// Starts hosts; `None` if this process may not create namespaces.
#[expect(clippy::print_stderr, reason = "reports that the test is skipped")]
fn hosts(count: usize) -> Option<Hosts> {
    Hosts::start(count)
        .inspect_err(|why| eprintln!("SKIPPED: this test needs network namespaces: {why}"))
        .ok()
}

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
    let Some(hosts) = hosts(2) else { return };
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

/// Accepts connections to an address of a host. Closes each when its program does, as an engine
/// would: the other direction of a connection that is closed in one direction may stay open.
fn accept_all(hosts: &Hosts, host: usize, at: (&str, u16)) {
    let listener = hosts.within(host, || TcpListener::bind(at).expect("listen"));
    std::thread::spawn(move || {
        for mut socket in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let _ = socket.write_all(b"+PONG\r\n"); // the agent may have reset it
                let _ = io::copy(&mut socket, &mut io::sink());
            });
        }
    });
}

/// Returns whether [`accept_all`] has accepted a connection, which is not reset.
fn is_carried(socket: &mut TcpStream) -> bool {
    socket.read_exact(&mut [0; 7]).is_ok()
}

#[test]
fn direct_connections_leave_descriptors_for_links_bus_and_admin_port() {
    let Some(hosts) = hosts(3) else { return };
    let limited = [&["prlimit", "--nofile=300:300"], NETWORK_ADMIN].concat();
    let group = Group::start_transparent_as(hosts, 2, NETWORK, None, strings(&limited));
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

#[test]
fn agent_is_not_ready_while_the_rules_cannot_be_set() {
    let Some(hosts) = hosts(1) else { return };
    let programs = TempDir::new("programs");
    let broken = programs.join("broken");
    let text = format!(
        "#!/bin/sh\nif [ -e {} ]; then echo 'this nft is broken' >&2; exit 1; fi\n\
         PATH=$PATH:/usr/sbin:/sbin; PATH=${{PATH#*:}}; exec nft \"$@\"\n",
        broken.display()
    );
    let nft = programs.file("nft", text);
    fs::set_permissions(nft, fs::Permissions::from_mode(0o755)).expect("permissions");
    let path = format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", programs.path().display());
    let user = [NETWORK_ADMIN, &["env", &path]].concat();
    let group = Group::start_transparent_as(hosts, 1, NETWORK, None, strings(&user));
    assert_eq!(group.get(1, "/ready").0, 200);
    fs::write(&broken, "").expect("written");
    signal("KILL", owner_of_rules(&group, 1).expect("nft"));
    until(TIMEOUT, "an agent that is not ready", || {
        let (status, body) = group.get(1, "/ready");
        assert!(status == 200 || body.contains("not redirected"), "{status} {body}");
        status == 503 && body.contains("this nft is broken")
    });
    fs::remove_file(&broken).expect("removed");
    until(TIMEOUT, "an agent that is ready", || group.get(1, "/ready").0 == 200);
    assert!(wire::nft(&group.hosts, 1, "list ruleset").contains("redirect to"));
}

/// Runs an agent on host 1, which must fail to start.
fn fails_to_start(hosts: &Hosts, words: &[&str]) -> String {
    let Output { status, stderr, .. } = hosts.within(1, || {
        let mut command = Command::new("timeout");
        command.arg("20").args(NETWORK_ADMIN).arg(env!("CARGO_BIN_EXE_ferrite")).arg("agent");
        command.args(words).output().expect("ferrite starts")
    });
    let error = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(1), "{words:?}: {error}");
    error
}

#[test]
fn second_agent_does_not_take_the_connections_of_the_first() {
    let Some(hosts) = hosts(2) else { return };
    let mut group = Group::start_transparent(hosts, 1, NETWORK);
    let first = group.agent(1).process.0.id().to_string();
    let words = |ports: &'static str, peers: &'static str| {
        let listen = ["--mode", "transparent", "--listen", "10.77.0.1:7471", "--rdma", "forbid"];
        let more = ["--allow-unauthenticated-peers", "yes", "--ports", ports, "--peer", peers];
        [&listen[..], &more].concat()
    };
    for (ports, peers) in [("7002-7003", "10.77.0.2"), ("6379,26379", "10.0.0.0/8")] {
        let error = fails_to_start(&group.hosts, &words(ports, peers));
        assert!(error.contains(&format!("process {first}")), "{ports} {peers}: {error}");
    }
    let start = |group: &Group, words: &[&str]| {
        group.hosts.within(1, || {
            let agent = Running::command(&[&["agent"], words].concat());
            let mut command = Command::new(NETWORK_ADMIN[0]);
            command.args(&NETWORK_ADMIN[1..]).arg(agent.get_program()).args(agent.get_args());
            Running::spawn(&mut command)
        })
    };
    for (ports, peers) in [("7003-7009", "10.77.0.0/24"), ("7001", "10.78.0.0/16")] {
        drop(start(&group, &words(ports, peers)));
    }
    // The rules of an agent that was killed stay for a moment.
    signal("KILL", group.agents.remove(0).process.0.id());
    let second = start(&group, &words("7001", "10.77.0.0/24"));
    let _engine = group.start_engine(2, 7001, &AUTH);
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
    group.agents.push(second);
    assert!(direct(&group, 1) == 1.0);
}

/// An address that moves between hosts is in the list of peers, and this host has it now.
#[test]
fn other_addresses_of_this_host_may_be_in_the_list_of_peers() {
    let Some(hosts) = hosts(2) else { return };
    let add = ["addr", "add", "10.77.0.100/32", "dev", "eth0"];
    let added = hosts.within(1, || Command::new("ip").args(add).status());
    assert!(added.expect("ip").success());
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
    let Some(hosts) = hosts(1) else { return };
    let home = TempDir::new("home");
    chown(home.path(), Some(65_534), Some(65_534)).expect("another owner");
    let path = home.path().display().to_string();
    let variable = format!("HOME={path}");
    let user = [NETWORK_ADMIN, &["env", "-C", &path, &variable]].concat();
    let mut group = Group::start_transparent_as(hosts, 1, NETWORK, None, strings(&user));
    let nft = owner_of_rules(&group, 1).expect("nft");
    drop(group.agents.remove(0));
    until(TIMEOUT, "the end of nft", || !is_alive(nft));
    let files: Vec<_> = fs::read_dir(home.path()).expect("a directory").flatten().collect();
    assert!(files.is_empty(), "{files:?}");
}

/// The agent starts without the address of a peer, and looks for it again.
#[test]
fn name_of_a_peer_may_be_unknown_at_the_start() {
    let Some(hosts) = hosts(2) else { return };
    let names = TempDir::new("names");
    let file = names.file("hosts", "127.0.0.1 localhost\n");
    // No server of names answers in the namespace, which the agent notices at once.
    let servers = names.file("resolv.conf", "nameserver 127.0.0.1\n");
    let mount = format!(
        "mount --bind {} /etc/hosts && mount --bind {} /etc/resolv.conf && exec \"$0\" \"$@\"",
        file.display(),
        servers.display()
    );
    let start = |host: usize, peer: &str| {
        let (listen, alias) = (hosts.ip(host), format!("127.1.0.{host}"));
        let words = ["agent", "--alias", &alias, "--listen", &listen, "--peer", peer];
        let more = ["--ports", "7001", "--rdma", "forbid", "--allow-unauthenticated-peers", "yes"];
        // `accept_all` knows no passwords.
        let more = [&more[..], &["--protected-mode", "no"]].concat();
        let agent = Running::command(&[&words[..], &more].concat());
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &mount]).arg(agent.get_program()).args(agent.get_args());
        hosts.within(host, || Running::spawn(&mut command))
    };
    let agents = [start(1, "127.1.0.2=host2.test"), start(2, "127.1.0.1=10.77.0.1")];
    let ready = || hosts.within(1, || agents[0].get("/ready"));
    until(TIMEOUT, "an unknown name", || {
        let (status, body) = ready();
        assert_eq!(status, 503, "{body}");
        body.contains("127.1.0.2 (host2.test:7470)") && body.contains("cannot resolve host2.test")
    });
    fs::write(&file, "10.77.0.2 host2.test\n").expect("written");
    // Links of the peer are accepted, too, now that its address is known.
    until(TIMEOUT, "links", || {
        ready().0 == 200 && hosts.within(2, || agents[1].get("/ready").0 == 200)
    });
    accept_all(&hosts, 2, ("127.1.0.2", 7001));
    let mut program = hosts.within(1, || TcpStream::connect(("127.1.0.2", 7001)).expect("agent"));
    program.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    assert!(is_carried(&mut program));
    drop(agents);
}
