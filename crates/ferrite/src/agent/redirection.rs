//! What is redirected, as the commands of nft that redirect it.

use std::sync::LazyLock;
use std::time::Duration;

use ferrite_config::peer::Network;
use ferrite_config::ports::PortSet;
use ferrite_session::agent::{DELIVERY_MARK, DIRECT_MARK, MARK_BITS};

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

    /// Returns the commands on one line, so that they take effect together.
    pub(super) fn commands(&self) -> String {
        let table = Self::table();
        let networks: Vec<_> = self.networks.iter().map(ToString::to_string).collect();
        let (networks, ports) = (networks.join(", "), self.ports.to_string().replace(',', ", "));
        let to = self.to;
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
                "add rule ip {table} out meta mark & {MARK_BITS:#x} \
                 {{ {DELIVERY_MARK:#x}, {DIRECT_MARK:#x} }} return"
            ),
            format!("add rule ip {table} out fib daddr type local return"),
            format!(
                "add rule ip {table} out ip daddr @peers tcp dport @ports \
                 tcp flags & (fin | syn | rst | ack) == syn redirect to :{to}"
            ),
        ]
        .join("; ")
    }
}

/// Returns the process and the namespace of process ids that a table of an agent is named after.
/// Returns `None` for tables of other programs.
pub(super) fn process_of(table: &str) -> Option<(u32, &str)> {
    let (pid, namespace) = table.strip_prefix(TABLES)?.split_once('_')?;
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let pid = pid.parse().ok().filter(|_| is_number(pid))?;
    is_number(namespace).then_some((pid, namespace)) // empty without /proc
}

/// Returns the port to which a rule redirects connections, if it is the last rule of an agent's
/// chain as nft lists it.
pub(super) fn redirect_port(listed: &str) -> Option<u16> {
    // Spaces and brackets differ between versions of nft. With `-a`, nft adds the rule's number.
    let (rule, _) = listed.split_once('#').unwrap_or((listed, ""));
    let rule = rule.replace(|c: char| c.is_whitespace() || "()".contains(c), "");
    let rest = rule.strip_prefix("ipdaddr@peerstcpdport@portstcpflags")?;
    let (flags, port) = rest.split_once("redirectto:")?;
    // Some versions write `tcp flags syn / fin,syn,rst,ack`. With `-n`, the flags are numbers.
    let names = [("fin", "0x1"), ("syn", "0x2"), ("rst", "0x4"), ("ack", "0x10")];
    let flags = names.iter().fold(flags.to_owned(), |flags, (name, bit)| flags.replace(name, bit));
    let forms = ["&0x1|0x2|0x4|0x10==0x2", "0x2/0x1,0x2,0x4,0x10", "&0x17==0x2", "0x2/0x17"];
    forms.contains(&flags.as_str()).then(|| port.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_is_found_as_each_version_of_nft_lists_it() {
        let begin = "\t\tip daddr @peers tcp dport @ports tcp flags";
        for (listed, port) in [
            (format!("{begin} & (fin | syn | rst | ack) == syn redirect to :15001"), Some(15_001)),
            (format!("{begin} syn / fin,syn,rst,ack redirect to :15002"), Some(15_002)),
            (format!("{begin} syn / fin,syn,rst,ack redirect to :1002 # handle 6"), Some(1002)),
            (format!("{begin} 0x2 / 0x1,0x2,0x4,0x10 redirect to :1002 # handle 6"), Some(1002)),
            (format!("{begin} & 0x17 == 0x2 redirect to :1002"), Some(1002)),
            (format!("{begin} & (fin | syn | rst | ack) == 0x2 redirect to :1002-1003"), None),
            (format!("{begin} fin / fin,syn,rst,ack redirect to :1002"), None),
            ("\t\ttcp dport @ports redirect to :1002".into(), None),
            (format!("nft> add rule ip x out {begin} syn / fin,syn,rst,ack redirect to :1"), None),
        ] {
            assert_eq!(redirect_port(&listed), port, "{listed}");
        }
    }

    #[test]
    fn only_tables_of_agents_have_a_process() {
        assert_eq!(process_of("ferrite_17_4026531836"), Some((17, "4026531836")));
        assert_eq!(process_of(Redirection::table()).expect("a process").0, std::process::id());
        for other in ["ferrite_fw", "ferrite_fw_1", "ferrite_1_fw", "ferrite_1", "ferrite__1"] {
            assert_eq!(process_of(other), None, "{other}");
        }
    }
}
