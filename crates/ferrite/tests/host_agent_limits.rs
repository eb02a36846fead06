//! `ferrite agent --mode transparent` while users of its host or of others flood it, while its host
//! lacks ports, and behind firewalls and addresses that change. The hosts are network namespaces,
//! and the links use TCP. The tests need root and nft.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use agent::harness::{EngineProgram, Group, NETWORK_ADMIN, strings};
use agent::wire;
use ferrite_session::agent::{DELIVERY_MARK, MARK_BITS};
use ferrite_testkit::netns::Hosts;
use ferrite_testkit::process::as_nobody;
use ferrite_testkit::{TIMEOUT, TempDir, until};
use rustix::net::{AddressFamily, SocketType, socket};

/// All hosts of the network are peers.
const NETWORK: &[&str] = &["--rdma", "forbid", "--peer", "10.77.0.0/24"];

/// Starts agents that may open this many files.
fn start_limited(hosts: Hosts, count: usize, files: &str) -> Group {
    let limit = format!("--nofile={files}:{files}");
    let user = [&["prlimit", &limit], NETWORK_ADMIN].concat();
    Group::start_transparent_as(hosts, count, NETWORK, strings(&user), EngineProgram::redis())
}

/// Returns how many descriptors an agent has open.
fn descriptors(group: &Group, host: usize) -> usize {
    let path = format!("/proc/{}/fd", group.agent(host).process.0.id());
    std::fs::read_dir(path).expect("descriptors").count()
}

/// Accepts connections to a port of a host.
fn accept_all(hosts: &Hosts, host: usize, port: u16) {
    let listener = hosts.within(host, || TcpListener::bind(("0.0.0.0", port)).expect("listen"));
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

/// Runs `ip` on a host.
fn ip(hosts: &Hosts, host: usize, words: &[&str]) -> String {
    let output = hosts.within(host, || Command::new("ip").args(words).output().expect("ip"));
    assert!(output.status.success(), "ip {words:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A user of host 1 opens more connections to the bus of host 2 than the agents have descriptors.
/// Others still get connections to every bus: users of host 1, and other hosts.
#[test]
fn flood_at_a_bus_leaves_places_for_others() {
    let Some(hosts) = Hosts::start_or_skip(4) else { return };
    let group = start_limited(hosts, 3, "200");
    for (host, port) in [(1, 17001), (2, 17001), (2, 17002), (4, 17001)] {
        accept_all(&group.hosts, host, port);
    }
    for target in [2, 4] {
        let at = (group.hosts.ip(target), 17001);
        let connect = |count| {
            group.hosts.within(1, || {
                as_nobody(|| {
                    let sockets = (0..count).map(|_| TcpStream::connect(&at).expect("the agent"));
                    sockets.collect::<Vec<_>>()
                })
            })
        };
        let mut flood = connect(250);
        let carried = flood.iter_mut().filter_map(|it| is_carried(it).then_some(())).count();
        assert!((30..170).contains(&carried), "{carried} connections to host {target}");
        for (from, to, port) in
            [(1, 2, 17001), (1, 2, 17002), (1, 4, 17001), (3, 2, 17001), (2, 1, 17001)]
        {
            let mut bus = group.connect(from, to, port);
            assert!(is_carried(&mut bus), "from {from} to {to}:{port}, flood at {target}");
        }
        for host in 1..=3 {
            assert_eq!(group.get(host, "/ready").0, 200, "host {host}");
        }
        drop(flood);
        until(TIMEOUT, "descriptors", || connect(20).iter_mut().all(is_carried));
    }
}

/// Two sources open connections to the agents' port and send nothing.
#[test]
fn silent_connections_leave_descriptors_for_links_and_programs() {
    let Some(hosts) = Hosts::start_or_skip(3) else { return };
    ip(&hosts, 3, &["addr", "add", "10.77.0.103/24", "dev", "eth0"]);
    let group = start_limited(hosts, 2, "300");
    accept_all(&group.hosts, 2, 7001);
    let before = descriptors(&group, 1);
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let silent: Vec<_> = (0..300)
        .flat_map(|_| ["10.77.0.3:0", "10.77.0.103:0"])
        .map(|from| {
            group.hosts.within(3, || {
                let socket = socket(AddressFamily::INET, SocketType::STREAM, None);
                let socket = socket.expect("a socket");
                let [from, to] = [from, "10.77.0.1:7470"].map(address);
                rustix::net::bind(&socket, &from).expect("bind");
                rustix::net::connect(&socket, &to).expect("a connection");
                socket
            })
        })
        .collect();
    until(TIMEOUT, "displaced connections", || descriptors(&group, 1) <= before + 20);
    assert!(is_carried(&mut group.connect(1, 2, 7001)));
    assert_eq!(group.get(1, "/ready").0, 200);
    drop(silent);
}

/// The firewall drops packets that the agent's own checks used to send: to ports that are in none
/// of the settings.
#[test]
fn firewall_may_admit_only_ports_of_the_settings() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let group = Group::start_transparent(hosts, 1, NETWORK);
    // Nothing listens at the ports, so the checks are refused.
    let marked = format!("meta mark and {MARK_BITS} == {DELIVERY_MARK}");
    let rules = format!(
        "add table ip fw; add counter ip fw refusals; \
         add chain ip fw in {{ type filter hook input priority 0; policy drop; }}; \
         add rule ip fw in {marked} tcp flags & rst == rst counter name refusals; \
         add rule ip fw in ct state established,related accept; \
         add rule ip fw in iif lo ip daddr 127.0.0.0/8 accept; \
         add rule ip fw in tcp dport {{ 7002, 7470 }} accept"
    );
    wire::nft(&group.hosts, 1, &rules);
    let refusals = || {
        let text = wire::nft(&group.hosts, 1, "list counter ip fw refusals");
        let mut words = text.split_whitespace().skip_while(|word| *word != "packets");
        words.nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or_else(|| panic!("{text}"))
    };
    until(TIMEOUT, "two checks", || {
        let (status, body) = group.get(1, "/ready");
        assert_eq!(status, 200, "{body}");
        refusals() >= 2
    });
}

/// All ports for new connections are in use, so the agent cannot check whether it could deliver.
#[test]
fn host_without_free_ports_may_be_ready() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let log = TempDir::new("log");
    let file = log.file("log", "");
    let write = format!("exec \"$@\" 2>{}", file.display());
    let user = strings(&[&["sh", "-c", &write, "sh"], NETWORK_ADMIN].concat());
    let group = Group::start_transparent_as(hosts, 1, NETWORK, user, EngineProgram::redis());
    let range = "/proc/sys/net/ipv4/ip_local_port_range";
    let taken: Vec<_> = group.hosts.within(1, || {
        std::fs::write(range, "40000 40015").expect("written");
        (40_000..=40_015)
            .map(|port| TcpListener::bind(("0.0.0.0", port)).expect("listen"))
            .collect()
    });
    until(TIMEOUT, "a check", || {
        let log = std::fs::read_to_string(&file).expect("a log");
        log.contains("cannot check that connections of other hosts are delivered")
    });
    drop(taken);
    let (status, body) = group.get(1, "/ready");
    assert_eq!(status, 200, "{body}");
}

/// The address that the checks have used moves to this host, and then somebody removes the routing
/// rule.
#[test]
fn checks_go_on_while_the_address_of_a_peer_is_on_this_host() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let group = Group::start_transparent(hosts, 1, NETWORK);
    ip(&group.hosts, 1, &["addr", "add", "10.77.0.2/32", "dev", "lo"]);
    let mark = format!("{DELIVERY_MARK:#x}/{MARK_BITS:#x}");
    ip(&group.hosts, 1, &["rule", "del", "fwmark", &mark]);
    until(TIMEOUT, "the routing rule", || ip(&group.hosts, 1, &["rule"]).contains(&mark));
}

/// An address in the list of peers moves between hosts while the agent runs.
#[test]
fn no_link_to_an_address_is_needed_while_this_host_has_it() {
    let Some(hosts) = Hosts::start_or_skip(1) else { return };
    let address = ["10.77.0.100/32", "dev", "eth0"];
    let change = |hosts: &Hosts, what| ip(hosts, 1, &[&["addr", what], &address[..]].concat());
    change(&hosts, "add");
    let options = [&["--peer", "10.77.0.100"], NETWORK].concat();
    let group = Group::start_transparent(hosts, 1, &options);
    for _ in 0..2 {
        assert_eq!(group.get(1, "/ready").0, 200);
        change(&group.hosts, "del");
        until(TIMEOUT, "an agent that is not ready", || {
            let (status, body) = group.get(1, "/ready");
            assert!(status == 200 || body.contains("no link to 10.77.0.100"), "{body}");
            status == 503
        });
        change(&group.hosts, "add");
        until(TIMEOUT, "an agent that is ready", || group.get(1, "/ready").0 == 200);
    }
}
