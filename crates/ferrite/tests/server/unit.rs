//! `ferrite server` with an agent on a host in a network namespace.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use ferrite_testkit::netns::Hosts;
use ferrite_testkit::resp::Client;
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{TIMEOUT, TempDir};
use serde_json::Value;

use super::harness::{Server, Setup, connect, directory};
use crate::agent::harness::{PASSWORD, sum};
use crate::metrics::harness::Admin;

/// The admin port of each agent.
const ADMIN: &str = "127.0.0.1:9471";
/// The engines' password and that of their primaries.
const AUTH: &str = "requirepass = \"secret\"\nmasterauth = \"secret\"";

/// An engine with module and agent on a host.
pub(crate) struct Unit<'a> {
    pub(crate) server: Server,
    /// The event `ready`.
    event: Value,
    pub(crate) host: usize,
    pub(crate) hosts: &'a Hosts,
    _directory: TempDir,
}

impl<'a> Unit<'a> {
    /// Starts an engine at port 7001 and an agent. `network` and `sections` have further lines of
    /// the section for the network, and of those of the engine and after it.
    pub(crate) fn start(hosts: &'a Hosts, host: usize, network: &str, sections: &str) -> Self {
        let directory = directory();
        let setup = Setup {
            server: &format!("agent_admin_listen = \"{ADMIN}\""),
            network: &format!("port = 7001\n{network}"),
            engine: &format!("{AUTH}\n{sections}"),
        };
        let mut server = hosts.within(host, || Server::start_with_agent(&directory, &setup));
        let event = server.event("ready");
        Self { server, event, host, hosts, _directory: directory }
    }

    pub(crate) fn engine(&self) -> u32 {
        u32::try_from(self.event["pid"].as_u64().expect("an id")).expect("an id")
    }

    /// Returns a client at the engine's Unix socket.
    pub(crate) fn client(&self) -> Client {
        let mut client = connect(&self.event);
        client.ok(&["AUTH", PASSWORD]);
        client
    }

    pub(crate) fn ready(&self) -> (u16, String) {
        self.hosts.within(self.host, || Admin(ADMIN.into()).get("/ready"))
    }

    pub(crate) fn counter(&self, name: &str, part: &str) -> f64 {
        let samples = self.hosts.within(self.host, || Admin(ADMIN.into()).scrape());
        sum(&samples, name, part)
    }

    pub(crate) fn wait_until_ready(&self) {
        until_or(TIMEOUT, "the unit is ready", || self.ready().0 == 200, || self.server.log());
    }

    pub(crate) fn wait_for_replica(&self) {
        let mut client = self.client();
        let is_up = || client.text(&["INFO", "replication"]).contains("master_link_status:up");
        until_or(TIMEOUT, "a replica", is_up, || self.server.log());
    }
}
