//! `ferrite agent`: which connections it carries, to whom, and what it delivers.

use std::time::Duration;

use super::setting;
use crate::kind::Kind;
use crate::setting::{Program, Setting, TakesEffect};
use crate::time::Unit;
use crate::{address, peer, ports};

pub(super) const SETTINGS: &[&Setting] = &[
    &AGENT_MODE,
    &ALIAS,
    &PEERS,
    &PORTS,
    &AGENT_LISTEN,
    &ALLOW_UNAUTHENTICATED_PEERS,
    &DELIVER,
    &DIRECT,
    &AGENT_PROTECTED_MODE,
    &AGENT_DRAIN,
];

const AGENT: &[Program] = &[Program::Agent];

/// How local programs reach the agent.
pub static AGENT_MODE: Setting = setting(
    "mode",
    "agent.mode",
    Kind::Choice(&["alias"]),
    "alias",
    "How programs of this host reach the agent: `alias` is by loopback addresses; there is no \
     other mode yet.",
)
.of(AGENT);

/// The alias of this host.
pub static ALIAS: Setting = setting(
    "alias",
    "agent.alias",
    Kind::Text(alias),
    "",
    "The alias of this host: an address in 127.0.0.0/8, which all hosts of the group know it by. \
     The engines of this host bind it. Required.",
)
.of(AGENT);

/// The other hosts.
pub static PEERS: Setting = setting(
    "peer",
    "agent.peers",
    Kind::List(is_peer),
    "",
    "The other hosts of the group, each as `ALIAS=HOST:PORT`: its alias, and the address of its \
     agent (port 7470 by default). Names are resolved when the agent starts.",
)
.of(AGENT);

/// The ports of engines on other hosts.
pub static PORTS: Setting = setting(
    "ports",
    "agent.ports",
    Kind::List(is_range),
    "",
    "Ports and ranges of ports that the agent listens on at the aliases of its peers. A cluster \
     needs the engines' ports and, 10,000 higher, those of the cluster bus. Required if there are \
     peers.",
)
.of(AGENT);

/// The addresses for links of other agents.
pub static AGENT_LISTEN: Setting = setting(
    "listen",
    "agent.listen",
    Kind::Text(addresses),
    "",
    "Addresses to listen on for the agents of other hosts, separated by commas, each with an \
     optional port (7470 by default). The agent connects from the first one, unless that is \
     0.0.0.0. Unset: it only connects to them.",
)
.of(AGENT);

/// Whether agents of other hosts are accepted although they are not authenticated.
pub static ALLOW_UNAUTHENTICATED_PEERS: Setting = setting(
    "allow-unauthenticated-peers",
    "agent.allow_unauthenticated_peers",
    Kind::Switch,
    "no",
    "Agents do not authenticate each other yet: a peer is recognised by its address alone, and \
     nothing is encrypted. `yes`: use peers and listen addresses outside of 127.0.0.0/8 \
     nevertheless. `no`: the agent does not start with them.",
)
.of(AGENT);

/// The ports of this host that peers may reach.
pub static DELIVER: Setting = setting(
    "deliver",
    "agent.deliver",
    Kind::List(is_range),
    "",
    "Ports and ranges of ports of this host's alias that peers may connect to. Unset: `ports`.",
)
.of(AGENT);

/// What happens without a link.
pub static DIRECT: Setting = setting(
    "direct",
    "agent.direct",
    Kind::Choice(&["allow", "refuse"]),
    "refuse",
    "What happens to a connection while there is no link to its host. `refuse`: it is reset. \
     `allow`: it goes by TCP to the host's own address and the same port, where the engine must \
     listen, too. `rdma require` allows only `refuse`.",
)
.of(AGENT);

/// Whether peers may reach engines that require no password.
pub static AGENT_PROTECTED_MODE: Setting = setting(
    "protected-mode",
    "agent.protected_mode",
    Kind::Switch,
    "yes",
    "While an engine requires no password, refuse the connections of peers to it. The engine's own \
     protected mode may take them for local ones, because they arrive from loopback addresses.",
)
.of(AGENT)
.takes_effect(TakesEffect::ForNewClients);

/// How long the agent waits for its streams when it shuts down.
pub static AGENT_DRAIN: Setting = setting(
    "drain",
    "agent.drain",
    Kind::Time {
        bare: Some(Unit::Seconds),
        min: Duration::from_millis(100),
        max: Duration::from_secs(86_400),
    },
    "30s",
    "How long connections may go on after SIGTERM or SIGINT. Then they are reset.",
)
.of(AGENT)
.takes_effect(TakesEffect::AtOnce);

fn alias(text: &str) -> Result<(), &'static str> {
    let expected = "an address in 127.0.0.0/8 other than 127.0.0.1: 127.1.0.1";
    peer::alias(text).map(drop).ok_or(expected)
}

fn is_peer(word: &str) -> Result<(), &'static str> {
    let expected = "peers separated by commas, each an alias and an address: \
                    127.1.0.2=192.0.2.2:7470";
    peer::split(word).map(drop).ok_or(expected)
}

fn is_range(word: &str) -> Result<(), &'static str> {
    ports::range(word)
        .map(drop)
        .ok_or("ports and ranges separated by commas: 7000-7009,17000-17009")
}

fn addresses(text: &str) -> Result<(), &'static str> {
    let mut words = address::words(text).peekable();
    let is_valid = words.peek().is_some() && words.all(|word| address::split(word).is_some());
    let expected = "addresses or names separated by commas, each with an optional port: 192.0.2.1 \
                    or [::]:7470";
    if is_valid { Ok(()) } else { Err(expected) }
}
