//! What is redirected, as the commands of nft that redirect it.

use std::sync::LazyLock;
use std::time::Duration;

use ferrite_config::peer::Network;
use ferrite_config::ports::PortSet;
use ferrite_session::agent::{DELIVERY_MARK, DIRECT_MARK};

/// The beginning of the names of all agents' tables.
pub(super) const TABLES: &str = "ferrite_";
/// How long nft may take for its answer.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// What is redirected, and where.
#[derive(Debug, Clone)]
pub(super) struct Redirection {
    pub(super) networks: Vec<Network>,
    pub(super) ports: PortSet,
    /// The port of 127.0.0.1 where the agent listens.
    pub(super) to: u16,
}

impl Redirection {
    /// Returns the name of the table: one for each process. Containers that share the network of
    /// the host often have the same process id, but never the same namespace of process ids.
    pub(super) fn table() -> &'static str {
        static NAME: LazyLock<String> = LazyLock::new(|| {
            let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
            let number = namespace.to_string_lossy().replace(|c: char| !c.is_ascii_digit(), "");
            format!("{TABLES}{}_{number}", std::process::id())
        });
        &NAME
    }

    /// Returns the last rule, as nft lists it.
    pub(super) fn last_rule(&self) -> String {
        let to = self.to;
        format!(
            "ip daddr @peers tcp dport @ports tcp flags & (fin | syn | rst | ack) == syn redirect \
             to :{to}"
        )
    }

    /// Returns the commands on one line, so that they take effect together.
    pub(super) fn commands(&self) -> String {
        let table = Self::table();
        let networks: Vec<_> = self.networks.iter().map(ToString::to_string).collect();
        let (networks, ports) = (networks.join(", "), self.ports.to_string().replace(',', ", "));
        let last = self.last_rule();
        // Only the first packet of a connection passes these rules. If it is redirected, the kernel
        // redirects the whole connection. Connections that are older than the rules stay direct.
        [
            format!("add table ip {table} {{ flags owner; }}"),
            format!(
                "add set ip {table} peers {{ type ipv4_addr; flags interval; auto-merge; \
                 elements = {{ {networks} }}; }}"
            ),
            format!(
                "add set ip {table} ports {{ type inet_service; flags interval; auto-merge; \
                 elements = {{ {ports} }}; }}"
            ),
            format!(
                "add chain ip {table} out {{ type nat hook output priority -100; policy accept; }}"
            ),
            format!(
                "add rule ip {table} out meta mark {{ {DELIVERY_MARK:#x}, {DIRECT_MARK:#x} }} return"
            ),
            format!("add rule ip {table} out fib daddr type local return"),
            format!("add rule ip {table} out {last}"),
        ]
        .join("; ")
    }
}
