//! Finds causes on the local side, for `rank.rs`.

use ferrite_verbs::{GidType, PortState};

use super::counters::Meaning;
use super::facts::{Facts, HEADERS};
use super::snapshot::PortView;
use super::{Cause, Likelihood, cause};

/// Adds the causes on the local side.
pub(super) fn own_side(found: &mut Vec<Cause>, facts: &Facts) {
    let Some(now) = &facts.now else { return };
    let (device, then) = (&now.device, facts.then.as_ref());
    if let PortView::Gone(why) = &now.port {
        let remedy = "use another device or TCP; `rdma link` lists the devices".into();
        found.push(cause(
            Likelihood::Certain,
            format!("the device {device} is gone"),
            why,
            Some(remedy),
        ));
        return;
    }
    if let Some(before) = then.and_then(|then| then.instance)
        && now.instance != Some(before)
    {
        let (what, evidence) = match now.instance {
            Some(_) => (
                "was removed and created again",
                "it is not the device that the link was opened on",
            ),
            None => ("is being removed", "sysfs no longer shows it"),
        };
        let remedy = "close all objects of the device, and open it again when it is back".into();
        found.push(cause(
            Likelihood::Certain,
            format!("the device {device} {what}"),
            evidence,
            Some(remedy),
        ));
        return;
    }
    port_down(found, facts);
    address_lost(found, facts);
    if let (Some(PortView::Seen { mtu_bytes: before, .. }), PortView::Seen { mtu_bytes, .. }) =
        (then.map(|then| &then.port), &now.port)
    {
        let netdev = facts.netdev().filter(|netdev| netdev.mtu_bytes > 0 && !facts.is_infiniband());
        let too_small = netdev.filter(|netdev| netdev.mtu_bytes < before + HEADERS);
        if mtu_bytes < before || too_small.is_some() {
            let of_netdev =
                netdev.map(|netdev| format!(", {} allows {}", netdev.name, netdev.mtu_bytes));
            found.push(cause(
                Likelihood::Likely,
                "the MTU of this host was reduced below the size of the link's packets".to_owned(),
                format!(
                    "packets carry up to {before} bytes; the port now allows {mtu_bytes}{}",
                    of_netdev.unwrap_or_default()
                ),
                Some("restore the interface's MTU, or reconnect".into()),
            ));
        }
    }
    port_flapped(found, facts);
    if let Some(unsent) = facts.increased(Meaning::Unsent) {
        found.push(cause(
            likelihood_by_age(facts),
            format!("this host cannot send packets to {}", facts.peer_name()),
            format!("{unsent} {}", facts.period()),
            Some(format!(
                "find out what rejects them: ip route get {}, nft list ruleset",
                facts.peer_name()
            )),
        ));
    }
}

/// Adds causes for a local port or interface that is down now.
fn port_down(found: &mut Vec<Cause>, facts: &Facts) {
    let Some(now) = &facts.now else { return };
    let (device, number) = (&now.device, now.number);
    let state = match &now.port {
        PortView::Seen { state, .. } => Some(*state),
        _ => None,
    };
    let of_port =
        state.map(|state| format!("port {number} of {device} is {state}")).unwrap_or_default();
    match facts.netdev().filter(|netdev| !netdev.is_usable() && !facts.is_infiniband()) {
        Some(netdev) if !netdev.up => found.push(cause(
            Likelihood::Certain,
            format!("the local interface {} is down", netdev.name),
            format!("{} is {}, {of_port}", netdev.name, netdev.operstate),
            Some(format!("ip link set {} up", netdev.name)),
        )),
        Some(netdev) => found.push(cause(
            Likelihood::Certain,
            format!("the local interface {} has no carrier", netdev.name),
            format!("{} is {}, {of_port}", netdev.name, netdev.operstate),
            Some("check cable, transceiver and switch port".into()),
        )),
        None if state.is_some_and(|state| state != PortState::ACTIVE) => {
            let remedy = if facts.is_infiniband() {
                "check cable and switch; a port that stays initialising has no subnet manager"
            } else {
                "bring its interface up (`rdma link` lists it), or check cable and switch"
            };
            found.push(cause(
                Likelihood::Certain,
                "the local port is not active",
                of_port,
                Some(remedy.into()),
            ));
        }
        None => {}
    }
}

/// Returns the likelihood of a cause that only a counter indicates.
fn likelihood_by_age(facts: &Facts) -> Likelihood {
    if facts.is_recent() { Likelihood::Likely } else { Likelihood::Possible }
}

/// Adds causes for a local port that was down and is up again.
fn port_flapped(found: &mut Vec<Cause>, facts: &Facts) {
    let counted = facts.increased(Meaning::LinkDown).map(|increase| increase.to_string());
    let losses = facts.netdev_increase(|netdev| netdev.carrier_losses).filter(|losses| *losses > 0);
    let losses = losses.map(|losses| format!("carrier lost {losses} times"));
    let Some(evidence) = counted.or(losses) else { return };
    found.push(cause(
        likelihood_by_age(facts),
        "the local port went down and came back".to_owned(),
        format!("{evidence} {}", facts.period()),
        Some("reconnect; if it happens again, check cable, transceiver and switch port".into()),
    ));
}

/// Adds causes for a local address that the port no longer has.
fn address_lost(found: &mut Vec<Cause>, facts: &Facts) {
    let (Some(now), Some(local)) = (&facts.now, facts.local) else { return };
    let Some(addresses) = &now.addresses else { return };
    // On InfiniBand and iWARP, the table has no IP addresses.
    let has_ips =
        addresses.is_empty() || addresses.iter().any(|own| own.kind != GidType::INFINIBAND);
    if facts.is_infiniband() || !has_ips || local.is_unspecified() || now.address(local).is_some() {
        return;
    }
    let was_there = facts.then.as_ref().is_some_and(|then| then.address(local).is_some());
    let mut there: Vec<String> = addresses.iter().map(|address| address.ip.to_string()).collect();
    there.dedup();
    found.push(cause(
        if was_there { Likelihood::Certain } else { Likelihood::Likely },
        format!(
            "{local} is {} an address of {}",
            if was_there { "no longer" } else { "not" },
            now.device
        ),
        format!("its addresses: {}", there.join(", ")),
        Some(match facts.netdev() {
            Some(netdev) => {
                format!("ip addr add {local}/… dev {}, or use another address", netdev.name)
            }
            None => "restore the interface's address, or use another one".into(),
        }),
    ));
}
