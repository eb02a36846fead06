//! `ferrite agent --mode transparent` on hosts whose firewall, limits or programs get in its way.
//! The hosts are network namespaces, and the links use TCP. The tests need root and nft.

mod agent {
    pub(crate) mod harness;
    pub(crate) mod wire;
}
mod metrics {
    pub(crate) mod harness;
}

use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;

use agent::harness::{Group, PASSWORD, sum};
use agent::wire;
use ferrite_testkit::netns::Hosts;

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
