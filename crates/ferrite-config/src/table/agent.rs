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
    &AGENT_CERTIFICATE,
    &AGENT_KEY,
    &AGENT_CA,
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
    Kind::Choice(&["alias", "transparent"]),
    "alias",
    "How programs of this host reach the agent. `alias`: by loopback addresses. `transparent`: \
     the kernel passes their connections to the addresses in `peers` to the agent, so engines and \
     clients need no configuration. `transparent` needs the capabilities CAP_NET_ADMIN and \
     CAP_NET_RAW, and the programs nft and ip.",
)
.of(AGENT);

/// The alias of this host.
pub static ALIAS: Setting = setting(
    "alias",
    "agent.alias",
    Kind::Text(alias),
    "",
    "The alias of this host: an address in 127.0.0.0/8, by which all hosts of the group know this \
     host. The engines of this host bind to this address. Required with `mode alias`, and only \
     there.",
)
.of(AGENT);

/// The other hosts.
pub static PEERS: Setting = setting(
    "peer",
    "agent.peers",
    Kind::List(is_peer),
    "",
    "The other hosts of the group. With `mode alias`, each is `ALIAS=HOST:PORT`: its alias, and \
     the address of its agent (port 7470 by default). Names are resolved when the agent starts, \
     and again while there is no link to the host. With `mode transparent`, each is an IPv4 \
     address, or a network such as 10.0.0.0/16 whose hosts may have agents; all these agents must \
     listen on the same port as the agent of this host. With TLS, the certificate of a host must \
     have `HOST`, or its address, in its subjectAltName.",
)
.of(AGENT);

/// The ports of engines on other hosts.
pub static PORTS: Setting = setting(
    "ports",
    "agent.ports",
    Kind::List(is_range),
    "",
    "Ports and ranges of ports that the agent carries connections to: with `mode alias`, it \
     listens on these ports at the aliases of its peers; with `mode transparent`, the kernel \
     redirects the connections. A cluster needs the engines' ports and, 10,000 higher, those of \
     the cluster bus. Required if there are peers.",
)
.of(AGENT);

/// The addresses for links of other agents.
pub static AGENT_LISTEN: Setting = setting(
    "listen",
    "agent.listen",
    Kind::Text(addresses),
    "",
    "Addresses to listen on for the agents of other hosts, separated by commas, each with an \
     optional port (7470 by default). The agent connects from the first address, unless that is \
     0.0.0.0. Unset: the agent only connects to other agents. `mode transparent` needs an address \
     here, by which the other hosts know this host.",
)
.of(AGENT);

/// The certificate of the agent.
pub static AGENT_CERTIFICATE: Setting = setting(
    "tls-cert-file",
    "agent.tls_cert_file",
    Kind::Text(path),
    "",
    "The certificate of this agent with its chain, in PEM. With this setting, `tls-key-file` and \
     `tls-ca-cert-file`, agents authenticate each other by TLS, and each pair of hosts needs one \
     link instead of two. Links begin over TCP with TLS. Payload over RDMA is not encrypted; \
     `rdma forbid` together with `direct refuse` encrypts everything.",
)
.of(AGENT);

/// The private key of the agent.
pub static AGENT_KEY: Setting = setting(
    "tls-key-file",
    "agent.tls_key_file",
    Kind::Text(path),
    "",
    "The private key of `tls-cert-file`, in PEM. Only the user of the agent should be able to read \
     it.",
)
.of(AGENT);

/// The certificate of the CA of all agents.
pub static AGENT_CA: Setting = setting(
    "tls-ca-cert-file",
    "agent.tls_ca_cert_file",
    Kind::Text(path),
    "",
    "The certificate of the CA that has issued the certificates of all agents, in PEM. The agent \
     accepts every host with a certificate of this CA and the name of a peer.",
)
.of(AGENT);

/// Whether agents of other hosts are accepted although they are not authenticated.
pub static ALLOW_UNAUTHENTICATED_PEERS: Setting = setting(
    "allow-unauthenticated-peers",
    "agent.allow_unauthenticated_peers",
    Kind::Switch,
    "no",
    "Without TLS, agents do not authenticate each other: a peer is recognised by its address \
     alone, and nothing is encrypted. `yes`: use peers and listen addresses outside of \
     127.0.0.0/8 nevertheless. `no`: the agent does not start with such addresses unless it has \
     TLS.",
)
.of(AGENT);

/// The ports of this host that peers may reach.
pub static DELIVER: Setting = setting(
    "deliver",
    "agent.deliver",
    Kind::List(is_range),
    "",
    "Ports and ranges of ports of this host that peers may connect to. Unset: `ports`.",
)
.of(AGENT);

/// What happens without a link.
pub static DIRECT: Setting = setting(
    "direct",
    "agent.direct",
    Kind::Choice(&["allow", "refuse"]),
    "",
    "What happens to a connection while there is no link to its host. `refuse`: the agent resets \
     it. `allow`: the agent connects by TCP to the host's own address and the same port; the \
     engine must also listen there. `rdma require` allows only `refuse`. Unset: `allow` with `mode \
     transparent`, unless RDMA is required, and otherwise `refuse`.",
)
.of(AGENT);

/// Whether peers may reach engines that require no password.
pub static AGENT_PROTECTED_MODE: Setting = setting(
    "protected-mode",
    "agent.protected_mode",
    Kind::Switch,
    "yes",
    "While an engine requires no password, refuse the connections of peers to it. The engine's \
     own protected mode may accept them as local connections, because they arrive from loopback \
     addresses. `mode transparent` ignores this setting, because the engine then sees the address \
     of the peer's program.",
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
    "How long connections may continue after SIGTERM or SIGINT before the agent resets them.",
)
.of(AGENT)
.takes_effect(TakesEffect::AtOnce);

fn alias(text: &str) -> Result<(), &'static str> {
    let expected = "an address in 127.0.0.0/8 other than 127.0.0.1: 127.1.0.1";
    peer::alias(text).map(drop).ok_or(expected)
}

fn path(text: &str) -> Result<(), &'static str> {
    if text.is_empty() || text == "\0" { Err("the path of a file") } else { Ok(()) }
}

fn is_peer(word: &str) -> Result<(), &'static str> {
    let expected = "peers separated by commas, each an alias and an address, \
                    127.1.0.2=192.0.2.2:7470, or with `mode transparent` an IPv4 address or a \
                    network, 192.0.2.0/24";
    let is_valid = peer::split(word).is_some() || peer::network(word).is_some();
    if is_valid { Ok(()) } else { Err(expected) }
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
