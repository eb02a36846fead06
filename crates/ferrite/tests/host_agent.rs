//! `ferrite agent` with real engines on hosts in network namespaces, over TCP. The tests need root,
//! for the namespaces; the agents have no capability.

mod agent {
    pub(crate) mod cluster;
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent::cluster;
use agent::harness::{Certificates, Group, PASSWORD, WITHOUT_CAPABILITIES, alias, sum};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::{KillOnDrop, exit_within, signal};
use ferrite_testkit::{Ca, TIMEOUT, until};
use metrics::harness::Running;
use rustix::net;

const TCP: &[&str] = &["--rdma", "forbid"];

/// Starts hosts with agents; `None` if this process may not create namespaces.
fn group(count: usize, options: &[&str]) -> Option<Group> {
    let hosts = Hosts::start_or_skip(count)?;
    Some(Group::start(hosts, count, &[TCP, options].concat(), WITHOUT_CAPABILITIES))
}

/// Starts hosts whose agents authenticate each other.
fn group_with_tls(count: usize, options: &[&str]) -> Option<Group> {
    let hosts = Hosts::start_or_skip(count)?;
    let options = [TCP, options].concat();
    Some(Group::start_with_tls(hosts, count, &options, WITHOUT_CAPABILITIES))
}

fn is_reset(socket: &mut TcpStream) -> bool {
    matches!(socket.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Sends a PING. Keeps a client that gets a reply, and returns whether it is one.
fn is_served(clients: &mut Vec<TcpStream>, mut client: TcpStream) -> bool {
    let ping = client.write_all(b"PING\r\n").and_then(|()| client.read_exact(&mut [0; 7]));
    let Err(error) = ping else {
        clients.push(client);
        return true;
    };
    let resets = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    assert!(resets.contains(&error.kind()), "neither a reply nor a reset: {error}");
    false
}

/// Connects a program of host 1 to host 2. Returns whether the engine there replies.
fn is_carried(group: &Group) -> bool {
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"PING\r\n").is_ok()
        && program.read(&mut [0; 64]).is_ok_and(|count| count > 0)
}

/// Connects from a port of 127.0.0.1.
fn connect_from_port(port: u16, to: SocketAddr) -> TcpStream {
    let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None);
    let socket = socket.expect("a socket");
    net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], port))).expect("a free port");
    net::connect(&socket, &to).expect("connected");
    let socket = TcpStream::from(socket);
    socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    socket
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
fn cluster_of_three_hosts_works_over_one_tls_link_for_each_pair() {
    let Some(group) = group_with_tls(3, &[]) else { return };
    cluster::works(&group, true);
    for host in 1..=3 {
        let samples = group.scrape(host);
        assert!(sum(&samples, "agent_links{", "transport=\"tls\"") == 2.0, "{samples:?}");
        assert!(sum(&samples, "agent_links_refused_total{", "") == 0.0, "{samples:?}");
    }
}

/// The agent of host 2 comes back with certificates that are not its own, and then with its own.
#[test]
fn agent_with_a_wrong_certificate_is_refused_by_both_sides() {
    let Some(mut group) = group_with_tls(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let other_ca = Ca::new();
    let (ip, other_ip) = (group.hosts.ip(2), group.hosts.ip(1));
    let certificates = group.certificates.as_ref().expect("certificates");
    let ca = &certificates.ca;
    let cases = [
        (certificates.options(ca, "other", &ca.issue(&[&other_ip])), "certificate", "tAltName"),
        (certificates.options(ca, "strange", &other_ca.issue(&[&ip])), "tls", "of the same CA"),
        (["--allow-unauthenticated-peers", "yes"].map(Into::into).into(), "tls", "not use TLS"),
    ];
    for (options, cause, expected) in cases {
        drop(group.agents.pop());
        let name = format!("agent_links_refused_total{{cause=\"{cause}\"");
        let before = sum(&group.scrape(1), &name, "");
        let agent = group.start_agent_as(2, 2, &options);
        group.agents.push(agent);
        // The agent of host 1 refuses the link that the agent of host 2 opens, and counts it.
        until(TIMEOUT, cause, || sum(&group.scrape(1), &name, "") > before);
        // The agent of host 1 does not open a link either, and says why.
        until(TIMEOUT, expected, || {
            let (status, why) = group.get(1, "/ready");
            assert_eq!(status, 503, "{why}");
            why.contains(expected)
        });
        assert!(is_reset(&mut group.connect(1, 2, 7001)), "no link");
    }
    drop(group.agents.pop());
    let agent = group.start_agent(2, 2);
    group.agents.push(agent);
    group.wait_for_links();
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
}

#[test]
fn lost_agent_with_tls_comes_back_with_one_link() {
    let Some(mut group) = group_with_tls(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
    signal("KILL", group.agent(2).process.0.id());
    until(TIMEOUT, "the loss", || sum(&group.scrape(1), "agent_links_lost_total{", "") == 1.0);
    group.agents[1] = group.start_agent(2, 2);
    group.wait_for_links();
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
}

/// The clients of host 1 use all streams that they may have to host 2. The cluster bus of host 1
/// still gets new streams, because some are reserved for it.
#[test]
fn clients_that_use_all_streams_do_not_block_the_bus() {
    const CLIENTS: usize = 4096 - 256;
    let Some(group) = group_with_tls(2, &["--protected-mode", "no"]) else { return };
    raise_descriptor_limit();
    let options = ["--protected-mode", "no", "--maxclients", "5000"];
    let _engine = group.start_engine(2, 7001, &options);
    let bus = group.hosts.within(2, || std::net::TcpListener::bind((alias(2).as_str(), 17001)));
    let bus = bus.expect("listen");
    let mut clients = Vec::new();
    while clients.len() < CLIENTS {
        // Opens fewer streams than the agent allows, which is 1,000 a second.
        for _ in 0..80 {
            let mut client = group.connect(1, 2, 7001);
            client.write_all(b"PING\r\n").expect("sent");
            clients.push(client);
        }
        for client in clients.iter_mut().rev().take(80) {
            client.read_exact(&mut [0; 7]).expect("a reply");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // Both agents may have opened a link at the same time. Then a few streams may be on the link
    // that ends, and the other link has room for as many more.
    while is_served(&mut clients, group.connect(1, 2, 7001)) {
        assert!(clients.len() < 4500, "there is no limit");
        std::thread::sleep(Duration::from_millis(2));
    }
    let limit = "agent_connections_refused_total{cause=\"limit\"";
    assert!(sum(&group.scrape(1), limit, "") > 0.0);
    for _ in 0..10 {
        let mut node = group.connect(1, 2, 17001);
        node.write_all(b"RCmb").expect("sent");
        let (mut engine, _) = bus.accept().expect("accept");
        let mut received = [0; 4];
        engine.read_exact(&mut received).expect("received");
        assert_eq!(&received, b"RCmb");
    }
}

fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    setrlimit(Resource::Nofile, raised).expect("more descriptors");
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
    // After a second, the agent asks the engine again whether it requires a password.
    until(TIMEOUT, "a connection", || is_carried(&group));
}

/// An engine without a password listens at the port that is the cluster bus of another engine.
#[test]
fn open_engine_at_the_port_of_a_bus_is_refused_in_protected_mode() {
    let Some(group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let engine = group.start_engine(2, 17001, &["--protected-mode", "no"]);
    let mut program = group.connect(1, 2, 17001);
    assert!(is_reset(&mut program));
    assert!(refused(&group, 2, "protected_mode") == 1.0);
    engine.client().ok(&["CONFIG", "SET", "requirepass", PASSWORD]);
    until(TIMEOUT, "a connection", || {
        let mut program = group.connect(1, 2, 17001);
        program.write_all(b"PING\r\n").is_ok() && program.read(&mut [0; 64]).is_ok()
    });
}

#[test]
fn program_with_a_privileged_port_gets_another_one() {
    let Some(group) = group(2, &[]) else { return };
    let engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let address = format!("{}:7001", alias(2)).parse().expect("an address");
    let mut program = group.hosts.within(1, || connect_from_port(1000, address));
    program.write_all(b"PING\r\n").expect("sent");
    assert!(program.read(&mut [0; 64]).expect("a reply") > 0);
    assert!(sum(&group.scrape(2), "agent_source_ports_changed_total", "") == 1.0);
    drop(engine);
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
    assert!(sum(&group.scrape(1), "agent_links_lost_total{", "") == 2.0);
    assert_eq!(group.get(1, "/ready").0, 503);
    // The new agent connects by itself, so nobody waits for the end of the pause.
    group.agents[1] = group.start_agent(2, 2);
    group.wait_for_links();
    assert_eq!(group.client(1, 2, 7001).ask(&["PING"]), "+PONG");
}

/// The kernel still acknowledges packets for a stopped process. Only the missing answer of the
/// process itself shows that the agent is silent.
#[test]
fn silent_agent_is_noticed_within_seconds() {
    let Some(group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let mut client = group.client(1, 2, 7001);
    assert_eq!(client.ask(&["PING"]), "+PONG");
    let mut waits = group.connect(1, 2, 7001);
    signal("STOP", group.agent(2).process.0.id());
    let begun = Instant::now();
    assert!(is_reset(&mut waits), "the link was lost");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}

#[test]
fn killed_agent_resets_the_programs_of_its_own_host() {
    let Some(group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let mut program = group.connect(1, 2, 7001);
    program.write_all(b"PING\r\n").expect("sent");
    assert!(program.read(&mut [0; 64]).expect("a reply") > 0);
    signal("KILL", group.agent(1).process.0.id());
    assert!(is_reset(&mut program), "expected a reset, not the end of the stream");
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

/// A new agent takes over while the old one still has connections. Both have the same admin port.
#[test]
fn new_agent_starts_while_the_old_one_drains() {
    let Some(mut group) = group(2, &[]) else { return };
    let _engine = group.start_engine(2, 7001, &["--requirepass", PASSWORD]);
    let mut client = group.client(1, 2, 7001);
    let old = group.agents.pop().expect("an agent");
    signal("TERM", old.process.0.id());
    until(TIMEOUT, "the first agent learns of it", || !is_carried(&group));
    let address = old.admin.0.clone();
    group.hosts.within(2, || std::net::TcpListener::bind(&address)).expect("a free admin port");
    let agent = group.start_agent(2, 2);
    group.agents.push(agent);
    until(TIMEOUT, "a connection through the new agent", || is_carried(&group));
    assert_eq!(client.ask(&["PING"]), "+PONG", "connections go on");
    drop(client);
}

/// The agent listens at more ports than its soft limit of descriptors allows.
#[test]
fn limit_of_open_files_is_raised() {
    let words = ["agent", "--alias", "127.1.0.1", "--ports", "20000-20299"];
    let agent = Running::command(&[&words[..], TCP, &["--peer", "127.1.77.2=127.0.0.2"]].concat());
    let mut command = Command::new("prlimit");
    command.args(["--nofile=128:4096"]).arg(agent.get_program()).args(agent.get_args());
    let mut process = KillOnDrop(command.stdout(Stdio::piped()).spawn().expect("prlimit starts"));
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert!(line.contains("\"listening\""), "{line}");
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
    let allow = ["--allow-unauthenticated-peers", "yes"];
    let certificates = Certificates::new();
    let issued = certificates.ca.issue(&["192.0.2.1"]);
    let tls = certificates.options(&certificates.ca, "own", &issued);
    let tls: Vec<_> = tls.iter().map(String::as_str).collect();
    for (words, expected) in [
        (&[][..], "--alias is missing"),
        (&["--alias", "127.1.0.1", "--peer", "127.1.0.2=127.0.0.2"], "ports: none"),
        (&[&own[..], &peer].concat(), "start with --allow-unauthenticated-peers yes"),
        (&[&own[..], &["--listen", "0.0.0.0"]].concat(), "0.0.0.0:7470 is not a loopback address"),
        (&[&own[..], &peer, &["--tls-key-file", "k"]].concat(), "--tls-cert-file is missing"),
        (&[&own[..], &tls, &allow].concat(), "contradicts tls-cert-file"),
        (&["--alias", "10.0.0.1"], "an address in 127.0.0.0/8"),
        (&["--alias", "127.0.0.1"], "other than 127.0.0.1"),
        (
            &["--alias", "127.1.0.1", "--peer", "10.0.0.2"],
            "with `mode alias`, a peer is ALIAS=HOST:PORT",
        ),
        (&["--alias", "127.1.0.1", "--ports", "9-1"], "ports and ranges"),
    ] {
        let (code, error) = fails_to_start(words);
        assert!(code == Some(2) && error.contains(expected), "{words:?}: {code:?} {error}");
    }
    let files =
        ["--tls-cert-file", "/nonexistent", "--tls-key-file", "k", "--tls-ca-cert-file", "c"];
    let (code, error) = fails_to_start(&[&own[..], &files].concat());
    let expected = "cannot use TLS: cannot read the certificate c: No such file";
    assert!(code == Some(2) && error.contains(expected), "{code:?} {error}");
    let taken = std::net::TcpListener::bind("127.1.0.2:0").expect("listen");
    let port = taken.local_addr().expect("an address").port().to_string();
    let words = ["--alias", "127.1.0.1", "--ports", &port, "--peer", "127.1.0.2=127.0.0.2"];
    let (code, error) = fails_to_start(&words);
    assert!(code == Some(1) && error.contains("must bind the alias"), "{code:?} {error}");
}
