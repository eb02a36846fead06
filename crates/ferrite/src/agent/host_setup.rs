//! What transparent mode needs of the host: two settings of the kernel, a routing rule and a route.
//! The agent connects to an engine from the address of another host. With this setup, the engine's
//! answers stay on this host. The agent makes the setup, or prints the commands for it.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use ferrite_config::peer::{self, Network};
use ferrite_session::agent::{DELIVERY_MARK, MARK_BITS};
use tokio::process::Command;
use tokio::time::timeout;

/// The settings of the kernel. With the first, a socket that an engine accepts gets the mark of the
/// packet that opened the connection. With the second, a reset that no socket sends gets the mark
/// of the packet that it answers.
const SYSCTLS: [&str; 2] = ["net.ipv4.tcp_fwmark_accept", "net.ipv4.fwmark_reflect"];
/// The number of the routing table: that of the mark, because small numbers are often in use.
const TABLE: u32 = DELIVERY_MARK;
/// How many routing rules to delete at most before a new one is added. Usually there is one.
const RULES_MAX: usize = 100;
/// How long `ip` may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the commands that prepare a host.
pub(crate) fn commands() -> String {
    let mut text = String::new();
    for name in SYSCTLS {
        let _ = writeln!(text, "sysctl -w {name}=1"); // writing to a String cannot fail
    }
    for words in [rule("add"), route()] {
        let _ = writeln!(text, "ip {}", words.join(" "));
    }
    text
}

/// Returns the words that add the routing rule, or delete it. The kernel puts a rule without a
/// priority before all others but the first, which is for addresses of this host.
fn rule(action: &str) -> Vec<String> {
    let (mark, table) = (format!("{DELIVERY_MARK:#x}/{MARK_BITS:#x}"), TABLE.to_string());
    ["rule", action, "fwmark", &mark, "lookup", &table].map(Into::into).into()
}

fn route() -> Vec<String> {
    let table = TABLE.to_string();
    ["route", "replace", "local", "default", "dev", "lo", "table", &table].map(Into::into).into()
}

/// Makes the parts of the setup that are missing. `peer` is the address of any other host.
pub(crate) async fn prepare(peer: Option<Ipv4Addr>) -> anyhow::Result<()> {
    let prepare = async {
        SYSCTLS.into_iter().try_for_each(set)?;
        match peer {
            Some(peer) => add_route(peer).await,
            None => Ok(()),
        }
    };
    prepare.await.with_context(|| {
        format!("this host is not prepared for `mode transparent`; run as root:\n{}", commands())
    })
}

/// Returns a setting of the kernel that is not as it should be, if it can be read.
pub(super) fn wrong_setting() -> Option<&'static str> {
    let is_wrong =
        |name: &&str| std::fs::read_to_string(path_of(name)).is_ok_and(|value| value.trim() != "1");
    SYSCTLS.into_iter().find(is_wrong)
}

fn path_of(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name.replace('.', "/"))
}

fn set(name: &str) -> anyhow::Result<()> {
    let path = path_of(name);
    let value = std::fs::read_to_string(&path).with_context(|| format!("cannot read {name}"))?;
    if value.trim() == "1" {
        return Ok(());
    }
    std::fs::write(&path, "1").with_context(|| format!("cannot set {name}"))?;
    tracing::info!("set {name} to 1");
    Ok(())
}

async fn add_route(peer: Ipv4Addr) -> anyhow::Result<()> {
    if is_routed_here(peer).await? {
        return Ok(());
    }
    run(&route()).await?;
    if !is_routed_here(peer).await? {
        // The rule is missing, or others have come before it. Adding it moves it to the front, but
        // leaves the old one: the kernel refuses only a rule with the same priority.
        delete_rules().await?;
        run(&rule("add")).await?;
    }
    anyhow::ensure!(is_routed_here(peer).await?, "another routing rule comes first; see `ip rule`");
    Ok(())
}

/// Deletes all routing rules like the agent's own.
async fn delete_rules() -> anyhow::Result<()> {
    let words = rule("del");
    // Each time deletes one rule, and fails if there is none.
    for _ in 0..RULES_MAX {
        if !ip(&words).await?.status.success() {
            break;
        }
    }
    Ok(())
}

/// Runs `ip` with words that change something.
async fn run(words: &[String]) -> anyhow::Result<()> {
    let output = ip(words).await?;
    let error = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "ip {}: {}", words.join(" "), error.trim());
    tracing::info!("ran ip {}", words.join(" "));
    Ok(())
}

/// Returns whether packets to a peer stay on this host if they have the mark.
async fn is_routed_here(peer: Ipv4Addr) -> anyhow::Result<bool> {
    let words = ["route", "get", &peer.to_string(), "mark", &format!("{DELIVERY_MARK:#x}")];
    let output = ip(&words.map(String::from)).await?;
    // Without any route, `ip` fails.
    Ok(output.status.success() && output.stdout.starts_with(b"local "))
}

/// Returns the addresses of this host, without loopback.
pub(super) async fn own_addresses() -> anyhow::Result<Vec<Network>> {
    let words = ["-4", "route", "show", "table", "local", "type", "local"];
    let output = ip(&words.map(String::from)).await?;
    let error = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "ip {}: {}", words.join(" "), error.trim());
    Ok(addresses_of_routes(&String::from_utf8_lossy(&output.stdout)))
}

fn addresses_of_routes(routes: &str) -> Vec<Network> {
    let words = routes.lines().filter_map(|line| {
        let mut words = line.split_whitespace().filter(|word| *word != "local");
        words.next()
    });
    words.filter_map(peer::network).collect() // loopback is not a network of peers
}

async fn ip(words: &[String]) -> anyhow::Result<Output> {
    let program = find_program("ip").context("cannot find ip, of the package iproute2")?;
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(TIMEOUT, command.output()).await;
    let late = || format!("ip {}: no answer in {TIMEOUT:?}", words.join(" "));
    output.with_context(late)?.context("cannot run ip")
}

/// Finds a program in PATH, or in the directories of administrators' programs, which the PATH of
/// other users often lacks.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    let directories = std::env::split_paths(&paths).chain(more);
    directories.map(|directory| directory.join(name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_the_guide() {
        let guide = include_str!("../../../../docs/book/src/guide/agent.md");
        assert!(guide.contains(&commands()), "{}", commands());
    }

    #[test]
    fn addresses_of_this_host_are_its_local_routes() {
        let routes = "local 10.77.0.1 dev eth0 proto kernel scope host src 10.77.0.1 \n\
                      local 10.80.0.0/24 dev lo scope host \n\
                      local 127.0.0.0/8 dev lo proto kernel scope host src 127.0.0.1 \n\
                      10.77.0.9 dev eth0 proto kernel scope host src 10.77.0.1 \n";
        let addresses = addresses_of_routes(routes);
        let texts: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.77.0.1", "10.80.0.0/24", "10.77.0.9"]);
    }
}
