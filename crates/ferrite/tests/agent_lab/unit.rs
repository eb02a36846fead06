//! `ferrite server --agent` with `replication.transport = "rdma"`.

use ferrite_testkit::netns::Hosts;
use ferrite_testkit::{TIMEOUT, until};

use super::faults::{tcp_packets, watch};
use super::size::megabytes;
use crate::agent::harness::alias;
use crate::hosts;
use crate::server::unit::Unit;

/// Starts a unit. `engine` has further lines of the engine's section.
fn start<'a>(hosts: &'a Hosts, host: usize, engine: &str) -> Unit<'a> {
    let (own, other) = (alias(host), 3 - host);
    let network = format!("bind = \"{own}\"\nrdma_device = \"{}\"", hosts.device(host));
    let sections = format!(
        "bind-source-addr = \"{own}\"\nenable-debug-command = \"local\"\n\
         repl-diskless-sync-delay = 0\nrdbcompression = \"no\"\n{engine}\n\
         [replication]\ntransport = \"rdma\"\n\
         [agent]\nalias = \"{own}\"\nlisten = \"{}\"\npeers = [\"{}={}\"]\n\
         ports = [\"7001\", \"17001\"]\nallow_unauthenticated_peers = true\n",
        hosts.ip(host),
        alias(other),
        hosts.ip(other),
    );
    Unit::start(hosts, host, &network, &sections)
}

#[test]
fn replication_with_transport_rdma_sends_no_tcp_packet_to_another_host() {
    let Some(hosts) = hosts(2) else { return };
    watch(&hosts);
    let megabytes = megabytes(8);
    let primary = start(&hosts, 1, "");
    let keys = (megabytes * 100).to_string();
    primary.client().ok(&["DEBUG", "POPULATE", &keys, "key", "10000"]);
    let replica = start(&hosts, 2, "replicaof = \"127.1.0.1 7001\"");
    [&primary, &replica].iter().for_each(|unit| unit.wait_until_ready());
    replica.wait_for_replica();
    let mut client = primary.client();
    client.ok(&["SET", "key", "value"]);
    assert_eq!(client.ask(&["WAIT", "1", "30000"]), ":1");
    assert_eq!(client.ask(&["DEBUG", "DIGEST"]), replica.client().ask(&["DEBUG", "DIGEST"]));
    // The replica is known by its alias: its connection came through the agents.
    assert!(client.text(&["INFO", "replication"]).contains("slave0:ip=127.1.0.2,port=7001,"));
    assert!(replica.counter("agent_streams_opened_total{", "by=\"local\"") >= 1.0);
    assert!(primary.counter("agent_streams_opened_total{", "by=\"peer\"") >= 1.0);
    let bytes = primary.counter("agent_bytes_total{", "direction=\"to_peer\"");
    assert!(bytes >= (megabytes * 1_000_000) as f64, "{bytes} bytes in the links");
    for unit in [&primary, &replica] {
        assert!(unit.counter("agent_links{", "transport=\"rdma\"") == 2.0);
        assert!(unit.counter("agent_links{", "") == 2.0);
        assert!(unit.counter("agent_direct_connections_total", "") == 0.0);
    }
    assert_eq!(tcp_packets(&hosts), (0, 0), "TCP packets between the hosts");
    // Shows that packets are counted: one connection attempt past the agents.
    let dial = || std::net::TcpStream::connect((hosts.ip(1).as_str(), 7001));
    assert!(hosts.within(2, dial).is_err(), "the engine listens at its alias only");
    until(TIMEOUT, "a counted packet", || tcp_packets(&hosts).0 >= 2);
}
