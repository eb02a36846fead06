//! Finds another agent of this host whose rules redirect the same connections. The kernel would
//! give all of them to the agent that has started last.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ferrite_config::ports::PortSet;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::host_setup::find_program;
use super::redirection::{Redirection, TIMEOUT, process_of, redirect_port};

/// How long the rules of an agent that was killed may stay.
const ENDING: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(50);
const REMEDY: &str = "stop that agent, or give the two agents different ports";

/// The rules of another agent.
#[derive(Debug, PartialEq, Eq)]
struct Other {
    /// The number that the kernel gave to the table. Later tables have higher numbers.
    number: u64,
    networks: Vec<RangeInclusive<Ipv4Addr>>,
    ports: PortSet,
}

/// Checks, before this agent sets its rules, that no other agent redirects the same connections.
///
/// # Errors
/// Names the process of the other agent.
pub(super) async fn check(redirection: &Redirection) -> anyhow::Result<()> {
    let deadline = Instant::now() + ENDING;
    while let Some((_, why)) = others(redirection).await?.into_iter().next() {
        if Instant::now() >= deadline {
            bail!("{why}; {REMEDY}");
        }
        sleep(PAUSE).await;
    }
    Ok(())
}

/// Checks, after this agent has set its rules, that no other agent had set such rules before. If
/// two agents start at the same moment, [`check`] of both finds nothing. The kernel adds one table
/// after the other, and numbers them, so exactly one of the two agents then finds an earlier table.
///
/// # Errors
/// Names the process of the other agent.
pub(super) async fn check_order(redirection: &Redirection) -> anyhow::Result<()> {
    let own = list(Redirection::table()).await.context("cannot list the agent's own rules")?;
    let own = number(&own).unwrap_or(u64::MAX);
    let others = others(redirection).await?;
    match others.into_iter().find(|(number, _)| *number < own) {
        Some((_, why)) => bail!("{why}; {REMEDY}"),
        None => Ok(()),
    }
}

/// Returns the other agents that redirect the same connections: the numbers of their tables, and
/// descriptions.
async fn others(redirection: &Redirection) -> anyhow::Result<Vec<(u64, String)>> {
    let tables = nft(&["list", "tables", "ip"]).await?;
    let names = tables.lines().filter_map(|line| line.trim().strip_prefix("table ip "));
    let own = Redirection::table();
    let mut found = Vec::new();
    for name in names.filter(|name| process_of(name).is_some() && *name != own) {
        // Without a table of this name, the agent has just ended.
        let Ok(text) = list(name).await else { continue };
        let Some(other) = Other::parse(&text) else { continue };
        if let Some(port) = other.common_port(redirection) {
            let process = process(name, own);
            let why =
                format!("{process} already redirects connections to port {port} (table {name})");
            found.push((other.number, why));
        }
    }
    Ok(found)
}

/// Returns a table as nft lists it, with its number.
async fn list(table: &str) -> anyhow::Result<String> {
    nft(&["-a", "-n", "list", "table", "ip", table]).await
}

/// Returns the number of a table, as nft lists it.
fn number(table: &str) -> Option<u64> {
    let (_, rest) = table.lines().next()?.split_once("# handle ")?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns the process that a table is named after.
fn process(table: &str, own: &str) -> String {
    match (process_of(table), process_of(own)) {
        (Some((pid, its)), Some((_, own))) if its == own => format!("the agent of process {pid}"),
        (Some((pid, _)), _) => format!("the agent of process {pid} of another container"),
        (None, _) => "another agent".into(),
    }
}

impl Other {
    /// Parses a table as nft lists it. Returns `None` if its last rule is not an agent's: an agent
    /// that ends has removed its rule.
    fn parse(table: &str) -> Option<Self> {
        let elements = |set: &str| -> Option<Vec<String>> {
            let (_, set) = table.split_once(&format!("set {set} {{"))?;
            let (_, elements) = set.split_once("elements = {")?;
            let (elements, _) = elements.split_once('}')?;
            Some(elements.split(',').map(|element| element.trim().to_owned()).collect())
        };
        // Another program may have a table with such a name and such sets.
        let (_, chain) = table.split_once("chain out {")?;
        let (chain, _) = chain.split_once("\n\t}")?;
        redirect_port(chain.lines().next_back()?)?;
        let networks = elements("peers")?.iter().map(|text| addresses(text)).collect::<Option<_>>();
        let (networks, ports) = (networks?, PortSet::parse(elements("ports")?)?);
        // Without a number, the table counts as the earlier one: both agents give way.
        Some(Self { number: number(table).unwrap_or(0), networks, ports })
    }

    /// Returns a port to which both agents redirect connections to the same address.
    fn common_port(&self, Redirection { networks, ports, .. }: &Redirection) -> Option<u16> {
        let own: Vec<_> = networks.iter().filter_map(|own| addresses(&own.to_string())).collect();
        let is_common = |other: &RangeInclusive<Ipv4Addr>| {
            own.iter().any(|own| own.start() <= other.end() && other.start() <= own.end())
        };
        let has_common = self.networks.iter().any(is_common);
        ports.iter().find(|port| has_common && self.ports.contains(*port))
    }
}

/// Parses an address, a network or a range of addresses.
fn addresses(text: &str) -> Option<RangeInclusive<Ipv4Addr>> {
    if let Some((first, last)) = text.split_once('-') {
        return Some(first.parse().ok()?..=last.parse().ok()?);
    }
    let (first, prefix) = text.split_once('/').unwrap_or((text, "32"));
    let (first, prefix): (Ipv4Addr, u32) = (first.parse().ok()?, prefix.parse().ok()?);
    let rest = u32::MAX.checked_shr(prefix).unwrap_or(0);
    Some(first..=Ipv4Addr::from_bits(first.to_bits() | rest))
}

/// Runs nft. Returns what it prints.
async fn nft(words: &[&str]) -> anyhow::Result<String> {
    let program = find_program("nft").context("cannot find nft, of the package nftables")?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(TIMEOUT, command.output()).await;
    let late = || format!("nft {}: no answer in {TIMEOUT:?}", words.join(" "));
    let output = output.with_context(late)?.context("cannot run nft")?;
    let error = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "nft {}: {}", words.join(" "), error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use ferrite_config::peer::network;

    use super::*;

    const TABLE: &str = "table ip ferrite_17_4026531836 { # handle 21 progname nft\n\
        \tflags owner\n\tset peers { # handle 2\n\t\ttype ipv4_addr\n\t\tflags interval\n\t\tauto-merge\n\
        \t\telements = { 10.77.0.1-10.77.0.3, 10.78.0.0/16,\n\t\t\t     10.79.0.1 }\n\t}\n\
        \tset ports {\n\t\ttype inet_service\n\t\tflags interval\n\
        \t\telements = { 7001-7002, 26379 }\n\t}\n\
        \tchain out {\n\t\ttype nat hook output priority dstnat; policy accept;\n\
        \t\tmeta mark & 0x0000107e { 0x00001062, 0x00001064 } return # handle 5\n\
        \t\tip daddr @peers tcp dport @ports tcp flags 0x2 / 0x1,0x2,0x4,0x10 redirect to :1002 # handle 6\n\
        \t}\n}\n";

    fn redirection(networks: &str, ports: &str) -> Redirection {
        let networks = networks.split(',').map(|text| network(text).expect("a network")).collect();
        Redirection { networks, ports: PortSet::parse([ports]).expect("ports"), to: 1002 }
    }

    #[test]
    fn agents_may_have_the_same_ports_or_the_same_hosts_but_not_both() {
        let other = Other::parse(TABLE).expect("a table that redirects");
        for (networks, ports, expected) in [
            ("10.77.0.2", "7000-7010", Some(7001)),
            ("10.0.0.0/8", "26379", Some(26379)),
            ("10.78.9.0/24", "7002", Some(7002)),
            ("10.79.0.1", "7002", Some(7002)),
            ("10.77.0.4,10.79.0.2", "7001", None),
            ("10.77.0.2", "7003-26378", None),
        ] {
            let common = other.common_port(&redirection(networks, ports));
            assert_eq!(common, expected, "{networks} {ports}");
        }
    }

    #[test]
    fn tables_have_numbers() {
        assert_eq!(Other::parse(TABLE).expect("a table that redirects").number, 21);
        let without = TABLE.replace("# handle 21", "#");
        assert_eq!(Other::parse(&without).expect("a table that redirects").number, 0);
    }

    #[test]
    fn agent_that_ends_redirects_nothing() {
        let (begin, _) = TABLE.split_once("\t\tip daddr").expect("a rule");
        let drained = format!("{begin}\t\tct state new return\n\t}}\n}}\n");
        assert_eq!(Other::parse(&drained), None);
    }

    #[test]
    fn tables_of_other_programs_are_not_those_of_agents() {
        let (begin, _) = TABLE.split_once("\tchain out").expect("a chain");
        let hook = "type nat hook output priority dstnat; policy accept;";
        for chains in [
            "\tchain pre {\n\t\ttype nat hook prerouting priority dstnat; policy accept;\n\
             \t\ttcp dport 80 redirect to :8080\n\t}\n"
                .to_owned(),
            format!("\tchain out {{\n\t\t{hook}\n\t\ttcp dport @ports redirect to :1002\n\t}}\n"),
        ] {
            assert_eq!(Other::parse(&format!("{begin}{chains}}}\n")), None, "{chains}");
        }
    }

    #[test]
    fn table_names_the_process_of_its_agent() {
        assert_eq!(process("ferrite_17_40", "ferrite_18_40"), "the agent of process 17");
        let text = process("ferrite_17_41", "ferrite_18_40");
        assert_eq!(text, "the agent of process 17 of another container");
    }
}
