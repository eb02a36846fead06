//! Counts the packets between hosts: those of engines, and those of links.
#![allow(dead_code, reason = "no test binary uses all of it")]

use std::process::Command;

use ferrite_testkit::netns::Hosts;

use super::harness::PORTS_OF_ALL;

/// Runs nft on a host. Returns what it prints.
#[track_caller]
pub(crate) fn nft(hosts: &Hosts, host: usize, command: &str) -> String {
    let output = hosts.within(host, || Command::new("nft").arg(command).output());
    let output = output.expect("nft, of Debian's package nftables");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Begins to count the packets of a host.
pub(crate) fn count(hosts: &Hosts, host: usize) {
    let ports = PORTS_OF_ALL.replace(',', ", ");
    let mut text = "add table inet wire; add counter inet wire engines; \
                    add counter inet wire links; add counter inet wire roce; "
        .to_owned();
    for (chain, side) in [("prerouting", "iifname"), ("postrouting", "oifname")] {
        text +=
            &format!("add chain inet wire {chain} {{ type filter hook {chain} priority 0; }}; ");
        text +=
            &format!("add rule inet wire {chain} {side} eth0 udp dport 4791 counter name roce; ");
        for (counter, ports) in [("engines", ports.as_str()), ("links", "7470")] {
            for end in ["sport", "dport"] {
                text += &format!(
                    "add rule inet wire {chain} {side} eth0 tcp {end} {{ {ports} }} counter name \
                     {counter}; "
                );
            }
        }
    }
    nft(hosts, host, &text);
}

/// Returns the number of packets with an engine's port, and that of links over TCP, at the
/// interface of a host.
pub(crate) fn packets(hosts: &Hosts, host: usize) -> (u64, u64) {
    (counter(hosts, host, "engines"), counter(hosts, host, "links"))
}

fn counter(hosts: &Hosts, host: usize, name: &str) -> u64 {
    let text = nft(hosts, host, &format!("list counter inet wire {name}"));
    let mut words = text.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// Asserts that packets of links have passed the interface of a host, over TCP or over RDMA alone,
/// and no packet of an engine.
#[track_caller]
pub(crate) fn assert_only_links(hosts: &Hosts, host: usize, over_tcp: bool) {
    let ((engines, tcp), roce) = (packets(hosts, host), counter(hosts, host, "roce"));
    let (used, unused) = if over_tcp { (tcp, roce) } else { (roce, tcp) };
    assert!(
        engines == 0 && used > 0 && unused == 0,
        "host {host}: engines {engines}, links over TCP {tcp}, over RDMA {roce}"
    );
}

/// Returns whether a host has rules of an agent.
pub(crate) fn has_rules(hosts: &Hosts, host: usize) -> bool {
    nft(hosts, host, "list ruleset").contains("redirect to")
}
