//! `ferrite server` that runs an engine and an agent as one unit: whether it does, and whether
//! the settings of both fit together.

use crate::peer;
use crate::ports::{BUS_OFFSET, PortSet};
use crate::setting::{Program, Setting};
use crate::table;
use crate::values::{Transport, Transports, Values, asking_for};

/// The settings of a unit.
#[derive(Debug, Clone, Copy)]
pub struct Unit<'a> {
    /// The values of `ferrite server`.
    pub server: &'a Values,
    /// The values of its agent.
    pub agent: &'a Values,
    /// Lines of the engine's own configuration: name and rest of the line.
    pub directives: &'a [(String, String)],
}

/// Returns whether the settings of `ferrite server` ask for an agent.
#[must_use]
pub fn has_agent(server: &Values) -> bool {
    server.switch(&table::SERVER_AGENT) || Transports::of(server).require_rdma()
}

/// Returns whether an environment variable sets something else in `ferrite server` than in
/// `ferrite agent`. In a unit, such a variable is the server's.
#[must_use]
pub fn is_of_server_alone(variable: &str) -> bool {
    let named = |setting: &&Setting| setting.variable() == variable;
    let of = |program: Program| program.settings().find(named);
    matches!((of(Program::Server), of(Program::Agent)), (Some(server), Some(agent))
        if !std::ptr::eq(server, agent))
}

impl Unit<'_> {
    /// Checks that the agent can do what the settings of the server ask for.
    ///
    /// # Errors
    /// Returns all errors, each with the setting that should change.
    pub fn check(&self) -> Result<(), Vec<(&'static Setting, String)>> {
        let asking = asking_for(self.server, Transport::Rdma);
        let is_refused =
            self.server.is_given(&table::SERVER_AGENT) && !self.server.switch(&table::SERVER_AGENT);
        let mut wrong: Vec<(&'static Setting, String)> = Vec::new();
        let mut add = |why: &str| match asking.is_empty() {
            true => wrong.push((&table::SERVER_AGENT, why.to_owned())),
            false => {
                let why = format!("\"rdma\" {why}");
                wrong.extend(asking.iter().map(|setting| (*setting, why.clone())));
            }
        };
        if is_refused {
            add("needs the agent, but server.agent is false; remove one");
        }
        let missing = self.missing();
        if !missing.is_empty() {
            add(&format!("needs an agent with peers: set {}", missing.join(", ")));
        } else if !asking.is_empty() {
            let port = self.replication_port();
            if let Some(port) = port.filter(|port| !self.ports(true).contains(*port)) {
                add(&format!(
                    "needs the engine's port {port} in agent.ports, or in agent.deliver: otherwise \
                     replicas of other hosts cannot reach it over links"
                ));
            }
            if let Some((host, port)) = self.primary()
                && !(self.is_peer(&host) && self.ports(false).contains(port))
            {
                add(&format!(
                    "needs the primary of replicaof, {host} {port}, in agent.peers and agent.ports"
                ));
            }
        }
        let bus_port = self.bus_port().filter(|_| missing.is_empty());
        if let Some(port) = bus_port.filter(|port| !self.ports(true).contains(*port)) {
            let why = format!(
                "\"rdma\" needs the port of the engine's cluster bus, {port}, in agent.ports, or \
                 in agent.deliver: otherwise nodes of other hosts cannot reach it over links"
            );
            wrong.push((&table::CLUSTER_TRANSPORT, why));
        }
        if let Some(alias) = self.alias()
            && self.binds_all()
            && self.port().is_some_and(|port| self.ports(false).contains(port))
        {
            let why = format!(
                "with `mode alias`, the engine must bind the alias of this host alone, because the \
                 agent listens at the same port of the other aliases: bind = \"{alias}\""
            );
            wrong.push((&table::BIND, why));
        }
        let admin = self.server.text(&table::AGENT_ADMIN_LISTEN).filter(|at| *at != "off");
        if admin.is_some() && admin == self.server.text(&table::ADMIN_LISTEN) {
            let why = "the module serves observability.admin_listen; the agent needs another port";
            wrong.push((&table::AGENT_ADMIN_LISTEN, why.into()));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Returns the keys that an agent with peers needs, and that are unset.
    fn missing(&self) -> Vec<&'static str> {
        let address = match self.alias_mode() {
            true => &table::ALIAS,
            false => &table::AGENT_LISTEN,
        };
        let needed = [address, &table::PEERS, &table::PORTS];
        let is_unset = |setting: &&Setting| self.agent.entry(setting).value.is_none();
        needed.into_iter().filter(is_unset).map(|setting| setting.key).collect()
    }

    fn alias_mode(&self) -> bool {
        self.agent.text(&table::AGENT_MODE) != Some("transparent")
    }

    fn alias(&self) -> Option<&str> {
        self.agent.text(&table::ALIAS).filter(|_| self.alias_mode())
    }

    /// Returns the ports that peers may reach, or else those that the agent carries.
    fn ports(&self, delivered: bool) -> PortSet {
        let deliver = self.agent.list(&table::DELIVER);
        let is_own = delivered && !deliver.is_empty();
        let words = if is_own { deliver } else { self.agent.list(&table::PORTS) };
        PortSet::parse(words).unwrap_or_default()
    }

    /// Returns the engine's port, if the file says which it is.
    fn port(&self) -> Option<u16> {
        let is_known =
            self.server.is_given(&table::PORT) || self.server.text(&table::ENGINE_CONFIG).is_none();
        let given = self.server.is_given(&table::PORT).then(|| self.server.number(&table::PORT));
        let port = given.unwrap_or(table::ENGINE_PORT);
        Some(port).filter(|port| is_known && *port > 0)
    }

    /// Returns the port of the engine for replication, if the file says which it is.
    fn replication_port(&self) -> Option<u16> {
        if self.is_on("tls-replication") { self.tls_port() } else { self.port() }
    }

    /// Returns the port of the engine's cluster bus, if it must be reached over RDMA and the file
    /// says which it is.
    fn bus_port(&self) -> Option<u16> {
        if Transports::of(self.server).bus != Transport::Rdma {
            return None;
        }
        if let Some(port) = self.port_of("cluster-port") {
            return Some(port);
        }
        // The engine's own file may set another one.
        let is_known = self.server.text(&table::ENGINE_CONFIG).is_none();
        let base = if self.is_on("tls-cluster") { self.tls_port() } else { self.port() };
        base.filter(|_| is_known)?.checked_add(BUS_OFFSET)
    }

    fn tls_port(&self) -> Option<u16> {
        self.port_of("tls-port")
    }

    /// Returns the port that a directive of the engine names.
    fn port_of(&self, directive: &str) -> Option<u16> {
        self.directive(directive)?.parse().ok().filter(|port| *port > 0)
    }

    fn is_on(&self, directive: &str) -> bool {
        self.directive(directive).is_some_and(|word| word.eq_ignore_ascii_case("yes"))
    }

    /// Returns the value of a directive of the engine. The last one counts.
    fn directive(&self, name: &str) -> Option<&str> {
        let (_, rest) =
            self.directives.iter().rfind(|(known, _)| known.eq_ignore_ascii_case(name))?;
        Some(rest.trim().trim_matches(['"', '\'']))
    }

    fn binds_all(&self) -> bool {
        let bind = self.server.list(&table::BIND);
        let is_default = bind.is_empty() && self.server.text(&table::ENGINE_CONFIG).is_none();
        is_default || bind.iter().any(|word| matches!(word.as_str(), "*" | "0.0.0.0"))
    }

    /// Returns the primary that the file names.
    fn primary(&self) -> Option<(String, u16)> {
        let is_primary =
            |name: &str| ["replicaof", "slaveof"].iter().any(|it| name.eq_ignore_ascii_case(it));
        let (_, rest) = self.directives.iter().rfind(|(name, _)| is_primary(name))?;
        let mut words = rest.split_whitespace().map(|word| word.trim_matches(['"', '\'']));
        let (host, port) = (words.next()?, words.next()?.parse().ok()?);
        Some((host.to_owned(), port))
    }

    /// Returns whether a host is a peer. A name may be one.
    fn is_peer(&self, host: &str) -> bool {
        let Ok(ip) = host.parse() else { return true };
        self.agent.list(&table::PEERS).iter().any(|word| match self.alias_mode() {
            true => peer::split(word).is_some_and(|(alias, _)| alias == ip),
            false => peer::network(word).is_some_and(|network| network.contains(ip)),
        })
    }
}
