//! How replication, the cluster bus and slot migration connect to other hosts: what the four keys
//! in `[replication]` and `[cluster]` mean together.
//!
//! An agent knows a connection by its port alone. The bus has ports of its own. Replication, slot
//! migration and clients share the engines' ports, so they go the same way.

use crate::ports::PortSet;
use crate::setting::{Program, Setting};
use crate::table;
use crate::values::{Policy, Values};

/// How connections to some ports of other hosts are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Over a link of the agent, if there is an agent.
    Auto,
    /// Over a link of the agent that uses RDMA.
    Rdma,
    /// Directly by TCP, not over a link.
    Tcp,
}

/// How connections to the ports of other hosts are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transports {
    /// Those to the ports of engines: replication, slot migration and clients.
    pub engines: Transport,
    /// Those to the ports of the cluster bus.
    pub bus: Transport,
}

/// What the settings distinguish.
#[derive(Clone, Copy)]
enum Kind {
    Replication,
    Migration,
    Gossip,
}

impl Kind {
    /// Returns how this kind connects, and the setting that says so.
    fn transport(self, values: &Values) -> (Transport, &'static Setting) {
        let word = |setting: &'static Setting| match values.text(setting) {
            Some("rdma") => (Transport::Rdma, setting),
            Some("tcp") => (Transport::Tcp, setting),
            _ => (Transport::Auto, setting),
        };
        let switch = match self {
            Self::Replication => return word(&table::REPLICATION_TRANSPORT),
            Self::Migration => &table::MIGRATION_RDMA,
            Self::Gossip => &table::GOSSIP_RDMA,
        };
        // A program without the setting has no value for it.
        match values.entry(switch).value.is_some() && !values.switch(switch) {
            true => (Transport::Tcp, switch),
            false => word(&table::CLUSTER_TRANSPORT),
        }
    }
}

impl Transports {
    /// Returns what the settings ask for.
    #[must_use]
    pub fn of(values: &Values) -> Self {
        let [replication, migration, bus] =
            [Kind::Replication, Kind::Migration, Kind::Gossip].map(|kind| kind.transport(values).0);
        let engines = match (replication, migration) {
            (Transport::Rdma, _) | (_, Transport::Rdma) => Transport::Rdma,
            (Transport::Tcp, _) | (_, Transport::Tcp) => Transport::Tcp,
            _ => Transport::Auto,
        };
        Self { engines, bus }
    }

    /// Returns whether links must use RDMA. A pair of hosts has one link for all connections.
    #[must_use]
    pub fn require_rdma(self) -> bool {
        [self.engines, self.bus].contains(&Transport::Rdma)
    }

    /// Returns those of the ports whose connections go over links.
    #[must_use]
    pub fn carried(self, ports: &PortSet) -> PortSet {
        ports.filter(|port| match ports.engine_of_bus(port) {
            Some(_) => self.bus != Transport::Tcp,
            None => self.engines != Transport::Tcp,
        })
    }
}

/// Returns the settings that ask for this transport, each once.
pub(crate) fn asking_for(values: &Values, transport: Transport) -> Vec<&'static Setting> {
    let kinds = [Kind::Replication, Kind::Migration, Kind::Gossip];
    let asked = kinds.map(|kind| kind.transport(values));
    let mut settings: Vec<&Setting> = Vec::new();
    for (_, setting) in asked.into_iter().filter(|(asked, _)| *asked == transport) {
        if !settings.iter().any(|known| std::ptr::eq(*known, setting)) {
            settings.push(setting);
        }
    }
    settings
}

/// Checks that the four settings fit together, and that the agent can do what they ask for.
pub(crate) fn check(values: &Values) -> Vec<(&'static Setting, String)> {
    let mut wrong = Vec::new();
    for switch in [&table::GOSSIP_RDMA, &table::MIGRATION_RDMA] {
        if values.is_given(switch)
            && values.switch(switch)
            && values.text(&table::CLUSTER_TRANSPORT) == Some("tcp")
        {
            let why = "contradicts cluster.transport = \"tcp\"; remove one";
            wrong.push((switch, why.to_owned()));
        }
    }
    let (replication, _) = Kind::Replication.transport(values);
    let (migration, by) = Kind::Migration.transport(values);
    if let (Transport::Rdma, Transport::Tcp) | (Transport::Tcp, Transport::Rdma) =
        (replication, migration)
    {
        let (name, other) = match replication {
            Transport::Rdma => ("rdma", by.key),
            _ => ("tcp", "cluster.transport"),
        };
        wrong.push((
            &table::REPLICATION_TRANSPORT,
            format!(
                "{name:?} contradicts {other}, by which slot migration uses the other transport: \
                 both use the engines' ports, so the agent cannot tell them apart. For the cluster \
                 bus alone there is cluster.rdma.gossip_rdma"
            ),
        ));
    }
    if values.own_policy() == Ok(Policy::Forbid) {
        for setting in asking_for(values, Transport::Rdma) {
            let why = "\"rdma\" contradicts `rdma forbid`; remove one";
            wrong.push((setting, why.to_owned()));
        }
    }
    if values.program() == Program::Agent && values.is_given(&table::PEERS) {
        wrong.extend(check_agent(values));
    }
    wrong
}

fn check_agent(values: &Values) -> Vec<(&'static Setting, String)> {
    let transports = Transports::of(values);
    let ports = PortSet::parse(values.list(&table::PORTS)).unwrap_or_default();
    let mut wrong = Vec::new();
    let direct = asking_for(values, Transport::Tcp);
    let is_alias = values.text(&table::AGENT_MODE) != Some("transparent");
    if is_alias {
        let why = "`tcp` needs `mode transparent`: with `mode alias`, all connections to other \
                   hosts go over links. Remove the key, or remove the ports from agent.ports";
        wrong.extend(direct.iter().map(|setting| (*setting, why.to_owned())));
    } else if !ports.is_empty() && transports.carried(&ports).is_empty() {
        let why = "leaves nothing for the agent: all of agent.ports would be connected to directly";
        wrong.extend(direct.iter().map(|setting| (*setting, why.to_owned())));
    }
    let has_bus = ports.iter().any(|port| ports.engine_of_bus(port).is_some());
    if transports.bus == Transport::Rdma && !has_bus {
        let (_, setting) = Kind::Gossip.transport(values);
        let why = "\"rdma\" needs the ports of the cluster bus in agent.ports: they are 10,000 \
                   above those of the engines";
        wrong.push((setting, why.to_owned()));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Program::{Agent, Server};
    use crate::values::Origin;

    const REPLICATION: &Setting = &table::REPLICATION_TRANSPORT;
    const CLUSTER: &Setting = &table::CLUSTER_TRANSPORT;
    const GOSSIP: &Setting = &table::GOSSIP_RDMA;
    const MIGRATION: &Setting = &table::MIGRATION_RDMA;
    const TRANSPARENT: [(&Setting, &str); 4] = [
        (&table::AGENT_MODE, "transparent"),
        (&table::PEERS, "192.0.2.0/24"),
        (&table::PORTS, "7000-7009,17000-17009"),
        (&table::AGENT_LISTEN, "192.0.2.1"),
    ];

    fn values(program: Program, given: &[(&Setting, &str)]) -> Values {
        let mut values = Values::new(program);
        for (setting, text) in given {
            values.set_text(setting, None, text, Origin::Flag).expect(text);
        }
        values
    }

    /// Returns the errors of an agent in transparent mode.
    fn wrong(given: &[(&Setting, &str)]) -> Vec<String> {
        let values = values(Agent, &[&TRANSPARENT[..], given].concat());
        let wrong = values.check().err().unwrap_or_default();
        wrong.into_iter().map(|(setting, why)| format!("{}: {why}", setting.key)).collect()
    }

    #[test]
    fn keys_of_replication_and_clusters_become_two_transports() {
        use Transport::{Auto, Rdma, Tcp};
        for (given, engines, bus) in [
            (&[][..], Auto, Auto),
            (&[(REPLICATION, "rdma")], Rdma, Auto),
            (&[(REPLICATION, "tcp")], Tcp, Auto),
            (&[(CLUSTER, "rdma")], Rdma, Rdma),
            (&[(CLUSTER, "tcp")], Tcp, Tcp),
            (&[(CLUSTER, "rdma"), (GOSSIP, "no")], Rdma, Tcp),
            (&[(CLUSTER, "rdma"), (MIGRATION, "no")], Tcp, Rdma),
            (&[(CLUSTER, "rdma"), (REPLICATION, "auto"), (GOSSIP, "yes")], Rdma, Rdma),
            (&[(GOSSIP, "no")], Auto, Tcp),
            (&[(MIGRATION, "no"), (REPLICATION, "auto")], Tcp, Auto),
            (&[(REPLICATION, "rdma"), (GOSSIP, "no")], Rdma, Tcp),
        ] {
            let found = Transports::of(&values(Agent, given));
            assert_eq!(found, Transports { engines, bus }, "{given:?}");
        }
        let gateway = Transports::of(&Values::new(Program::Gateway));
        assert_eq!(gateway, Transports { engines: Auto, bus: Auto });
    }

    #[test]
    fn transport_rdma_requires_rdma_of_the_agent_and_not_of_the_module() {
        let given = [(CLUSTER, "rdma"), (GOSSIP, "no")];
        assert_eq!(values(Agent, &given).policy(), Ok(Policy::Require));
        assert_eq!(values(Server, &given).policy(), Ok(Policy::Prefer));
        assert_eq!(values(Agent, &[(CLUSTER, "auto")]).policy(), Ok(Policy::Prefer));
    }

    #[test]
    fn ports_that_connect_directly_are_not_carried() {
        let ports = PortSet::parse(["7000-7001", "17000-17001", "26379"]).expect("ports");
        let carried = |given: &[(&Setting, &str)]| {
            Transports::of(&values(Agent, given)).carried(&ports).to_string()
        };
        assert_eq!(carried(&[]), "7000-7001,17000-17001,26379");
        assert_eq!(carried(&[(REPLICATION, "tcp")]), "17000-17001");
        assert_eq!(carried(&[(GOSSIP, "no")]), "7000-7001,26379");
        assert_eq!(carried(&[(CLUSTER, "tcp")]), "");
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_all_its_causes() {
        for (given, expected) in [
            (
                &[(CLUSTER, "tcp"), (GOSSIP, "yes"), (MIGRATION, "yes"), (REPLICATION, "rdma")][..],
                &[
                    "cluster.rdma.gossip_rdma: contradicts cluster.transport = \"tcp\"",
                    "cluster.rdma.migration_rdma: contradicts cluster.transport = \"tcp\"",
                    "replication.transport: \"rdma\" contradicts cluster.transport, by which slot",
                ][..],
            ),
            (
                &[(REPLICATION, "rdma"), (MIGRATION, "no")],
                &["replication.transport: \"rdma\" contradicts cluster.rdma.migration_rdma"],
            ),
            (
                &[(REPLICATION, "tcp"), (CLUSTER, "rdma")],
                &["replication.transport: \"tcp\" contradicts cluster.transport"],
            ),
            (
                &[(REPLICATION, "rdma"), (CLUSTER, "rdma"), (&table::RDMA, "forbid")],
                &[
                    "replication.transport: \"rdma\" contradicts `rdma forbid`",
                    "cluster.transport: \"rdma\" contradicts `rdma forbid`",
                ],
            ),
            (
                &[(REPLICATION, "rdma"), (&table::DIRECT, "allow")],
                &["agent.direct: `allow` is for connections over TCP"],
            ),
            (&[(CLUSTER, "tcp")], &["cluster.transport: leaves nothing for the agent"]),
        ] {
            let found = wrong(given);
            assert_eq!(found.len(), expected.len(), "{given:?}: {found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.starts_with(expected), "{found}");
            }
        }
    }

    #[test]
    fn agent_with_aliases_carries_all_connections() {
        let alias = [(&table::PEERS, "127.1.0.2=192.0.2.2"), (&table::PORTS, "7000")];
        let alias = |given: &[(&'static Setting, &str)]| {
            let errors = values(Agent, &[&alias[..], given].concat()).check().err();
            let errors = errors.unwrap_or_default().into_iter();
            errors.map(|(setting, why)| format!("{}: {why}", setting.key)).collect::<Vec<_>>()
        };
        let found = alias(&[(REPLICATION, "tcp"), (GOSSIP, "no")]);
        assert!(found[0].starts_with("replication.transport: `tcp` needs `mode transparent`"));
        assert!(found[1].starts_with("cluster.rdma.gossip_rdma: `tcp` needs `mode transparent`"));
        assert_eq!(found.len(), 2, "{found:?}");
        let found = alias(&[(CLUSTER, "rdma")]);
        assert!(found[0].starts_with("cluster.transport: \"rdma\" needs the ports of the cluster"));
    }
}
