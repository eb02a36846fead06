//! `ferrite server --agent` with `replication.transport = "rdma"`.

use std::process::Command;

use ferrite_testkit::netns::Hosts;
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{TIMEOUT, TempDir, until};
use serde_json::Value;

use super::faults::{tcp_packets, watch};
use super::size::megabytes;
use crate::agent::harness::{PASSWORD, alias, sum};
use crate::hosts;
use crate::metrics::harness::Admin;
use crate::server::harness::{Server, Setup, connect, directory};

/// The admin port of each agent.
const ADMIN: &str = "127.0.0.1:9471";

/// An engine with module and agent on a host.
struct Unit<'a> {
    server: Server,
    /// The event `ready`.
    event: Value,
    host: usize,
    hosts: &'a Hosts,
    _directory: TempDir,
}

impl<'a> Unit<'a> {
    /// `engine` has further lines of the engine's section.
    fn start(hosts: &'a Hosts, host: usize, engine: &str) -> Self {
        let (directory, own, other) = (directory(), alias(host), 3 - host);
        let network =
            format!("port = 7001\nbind = \"{own}\"\nrdma_device = \"{}\"", hosts.device(host));
        let sections = format!(
            "bind-source-addr = \"{own}\"\nrequirepass = \"{PASSWORD}\"\n\
             masterauth = \"{PASSWORD}\"\nenable-debug-command = \"local\"\n\
             repl-diskless-sync-delay = 0\nrdbcompression = \"no\"\n{engine}\n\
             [replication]\ntransport = \"rdma\"\n\
             [agent]\nalias = \"{own}\"\nlisten = \"{}\"\npeers = [\"{}={}\"]\n\
             ports = [\"7001\", \"17001\"]\nallow_unauthenticated_peers = true\n",
            hosts.ip(host),
            alias(other),
            hosts.ip(other),
        );
        let setup = Setup {
            server: &format!("agent_admin_listen = \"{ADMIN}\""),
            network: &network,
            engine: &sections,
        };
        let agent = |command: &mut Command| {
            command.arg("--agent");
        };
        let mut server = hosts.within(host, || Server::start_with(&directory, &setup, agent));
        let event = server.event("ready");
        Self { server, event, host, hosts, _directory: directory }
    }

    /// Returns a client at the engine's Unix socket.
    fn client(&self) -> Client {
        let mut client = connect(&self.event);
        client.ok(&["AUTH", PASSWORD]);
        client
    }

    fn ready(&self) -> u16 {
        self.hosts.within(self.host, || Admin(ADMIN.into()).get("/ready")).0
    }

    fn counter(&self, name: &str, part: &str) -> f64 {
        sum(&self.hosts.within(self.host, || Admin(ADMIN.into()).scrape()), name, part)
    }
}

#[test]
fn replication_with_transport_rdma_sends_no_tcp_packet_to_another_host() {
    let Some(hosts) = hosts(2) else { return };
    watch(&hosts);
    let megabytes = megabytes(8);
    let primary = Unit::start(&hosts, 1, "");
    let keys = (megabytes * 100).to_string();
    primary.client().ok(&["DEBUG", "POPULATE", &keys, "key", "10000"]);
    let replica = Unit::start(&hosts, 2, "replicaof = \"127.1.0.1 7001\"");
    for unit in [&primary, &replica] {
        until_or(TIMEOUT, "the unit is ready", || unit.ready() == 200, || unit.server.log());
    }
    let mut client = replica.client();
    let is_up = || client.text(&["INFO", "replication"]).contains("master_link_status:up");
    until_or(TIMEOUT, "a replica", is_up, || replica.server.log());
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
