//! Derives likely causes from measurements, without I/O.
//!
//! A cause is certain only if a measurement shows it and it explains the failure by itself. It is
//! likely if a measurement indicates it, or if failures of this kind usually mean it. It is
//! possible if nothing contradicts it.

use std::cmp::Reverse;

use ferrite_verbs::{GidType, LinkLayer, PortState, Status};

use super::counters::Meaning;
use super::facts::{Facts, HEADERS};
use super::own_side::own_side;
use super::snapshot::PortView;
use super::surroundings::{LocalPeer, Neighbour, Route};
use super::{Cause, Failure, Likelihood, cause};

const CAUSES_MAX: usize = 5;

/// Returns the causes of a failure, the most likely first.
pub(super) fn rank(failure: Failure, facts: &Facts) -> Vec<Cause> {
    let mut found = Vec::new();
    match failure {
        Failure::ConnectTimeout => no_response(&mut found, failure, facts),
        Failure::NoKeepalive => {
            own_side(&mut found, facts);
            stalled_peer(&mut found, failure, facts);
        }
        // Probably this peer reported that it had no receive posted, so it is reachable.
        Failure::NoAcknowledgement if facts.increased(Meaning::PeerNotReady).is_some() => {
            stalled_peer(&mut found, failure, facts);
        }
        Failure::NoAcknowledgement => no_response(&mut found, failure, facts),
        Failure::Completion(status) => match status {
            Status::SUCCESS => {}
            Status::RETRY_EXCEEDED | Status::RESPONSE_TIMEOUT => {
                no_response(&mut found, failure, facts);
            }
            Status::RNR_RETRY_EXCEEDED => stalled_peer(&mut found, failure, facts),
            Status::FLUSHED | Status::LOCAL_QP_OPERATION | Status::GENERAL => {
                own_side(&mut found, facts);
                found.extend(by_status(status, facts));
            }
            _ => found.extend(by_status(status, facts)),
        },
    }
    // The sort is stable, so equally likely causes keep their order.
    found.sort_by_key(|cause| Reverse(cause.likelihood));
    if found.first().is_some_and(|best| best.likelihood == Likelihood::Certain) {
        // If a cause is certain, guesses are not needed.
        found.retain(|cause| cause.likelihood == Likelihood::Certain);
    }
    found.truncate(CAUSES_MAX);
    found
}

/// Returns whether [`rank`] needs the state of the port. A device that failed for good is not
/// queried, because the answer may take a minute.
pub(super) fn needs_facts(failure: Failure) -> bool {
    match failure {
        Failure::ConnectTimeout | Failure::NoKeepalive | Failure::NoAcknowledgement => true,
        Failure::Completion(status) => [
            Status::RETRY_EXCEEDED,
            Status::RESPONSE_TIMEOUT,
            Status::RNR_RETRY_EXCEEDED,
            Status::FLUSHED,
            Status::LOCAL_QP_OPERATION,
            Status::GENERAL,
        ]
        .contains(&status),
    }
}

/// Adds the causes of a peer that does not respond at all.
fn no_response(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    own_side(found, facts);
    same_host(found, facts);
    no_path(found, failure, facts);
    packet_loss(found, facts);
    unanswered(found, failure, facts);
    if facts.now.is_some() && !facts.is_infiniband() && facts.local_peer.is_none() {
        unmeasured_causes(found, failure, facts);
    }
}

/// Adds causes for a peer whose address belongs to this host.
fn same_host(found: &mut Vec<Cause>, facts: &Facts) {
    let Some(LocalPeer { device, netdev, accepts_local }) = &facts.local_peer else { return };
    let peer = facts.peer_name();
    let soft = facts.now.as_ref().is_some_and(|now| now.soft);
    match netdev {
        Some(netdev) if !netdev.is_usable() => found.push(cause(
            Likelihood::Certain,
            format!("the peer's interface {} is down", netdev.name),
            format!(
                "{peer} is an address of this host, on {device}; {} is {}",
                netdev.name, netdev.operstate
            ),
            Some(format!("ip link set {} up, or check its cable", netdev.name)),
        )),
        Some(netdev) if soft && *accepts_local == Some(false) => found.push(cause(
            Likelihood::Likely,
            "this host drops packets from its own addresses".to_owned(),
            format!("{peer} is an address of this host, and {} has accept_local 0", netdev.name),
            Some(format!("sysctl net.ipv4.conf.{}.accept_local=1", netdev.name)),
        )),
        _ => found.push(cause(
            Likelihood::Possible,
            "the path loops within this host".to_owned(),
            format!("{peer} is an address of {device} on this host"),
            Some("check whether this is the intended address".into()),
        )),
    }
}

/// Adds causes for a missing path to the peer, or for a next host on the path that does not answer.
fn no_path(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    // While the local interface is down, its routes are missing too.
    let Some(netdev) = facts.netdev().filter(|netdev| netdev.is_usable()) else { return };
    let (name, peer) = (&netdev.name, facts.peer_name());
    let gateway = match &facts.route {
        Route::Missing => {
            found.push(cause(
                Likelihood::Likely,
                format!("no route to {peer}"),
                "the main routing table has no matching route",
                Some(format!("ip route get {peer}; ip route add {peer} dev {name}")),
            ));
            return;
        }
        Route::Other { netdev: other } => {
            // An established link has worked although this table has no route through its
            // interface. Perhaps another routing table, which is not visible here, has such a
            // route.
            let connecting = failure == Failure::ConnectTimeout;
            found.push(cause(
                if connecting { Likelihood::Likely } else { Likelihood::Possible },
                format!("packets to {peer} do not leave by {name}"),
                format!("the main routing table sends them by {other}"),
                Some(format!("ip route add {peer} dev {name}, or use the device of {other}")),
            ));
            return;
        }
        Route::Own { gateway } => *gateway,
        Route::Unknown => None,
    };
    let only_v1 = facts.now.as_ref().zip(facts.local).and_then(|(now, local)| now.address(local));
    if let Some(gateway) = gateway
        && only_v1.is_some_and(|address| address.kind == GidType::ROCE_V1)
    {
        found.push(cause(
            Likelihood::Likely,
            format!("RoCE v1 is not routed, and {peer} is in another network"),
            format!(
                "the local address is of type RoCE v1, and the path to {peer} goes through \
                 {gateway}"
            ),
            Some("use RoCE v2: cma_roce_mode -d DEVICE -m 2, or another device".into()),
        ));
    }
    if facts.neighbour == Neighbour::Silent {
        let (what, who) = match gateway {
            Some(gateway) => {
                (format!("the gateway {gateway} does not answer"), gateway.to_string())
            }
            None => (format!("the host {peer} is down, cut off, or has lost its address"), peer),
        };
        found.push(cause(
            Likelihood::Likely,
            what,
            format!("{who} does not answer ARP on {name}"),
            Some(format!("ping -I {name} {who}; on that host: ip -br addr")),
        ));
    }
}

/// Adds causes for packets that are damaged or lost on the wire.
fn packet_loss(found: &mut Vec<Cause>, facts: &Facts) {
    let known = facts.increase(Meaning::Received).map(|increase| increase.by);
    let received = known.unwrap_or(0);
    let packets = known.map_or_else(String::new, |known| format!(", {known} packets received"));
    let netdev = facts.netdev().map_or("INTERFACE", |netdev| netdev.name.as_str());
    let rows = [
        (
            [Meaning::Damaged, Meaning::Damaged],
            "packets arrive damaged",
            format!("check cable and transceiver: ethtool -m {netdev}, ethtool -S {netdev}"),
        ),
        (
            [Meaning::Lost, Meaning::Discarded],
            "packets are lost on the way: congestion without flow control",
            "check PFC or ECN on every switch of the path, and the traffic class of RDMA packets"
                .to_owned(),
        ),
    ];
    for (meanings, what, remedy) in rows {
        let worst = meanings
            .iter()
            .filter_map(|meaning| facts.increased(*meaning))
            .max_by_key(|increase| increase.by);
        let Some(worst) = worst else { continue };
        // One percent is more than any healthy fabric loses.
        let many = received > 0 && worst.by >= received.div_ceil(100);
        let congested = facts.increased(Meaning::Congested).map(|increase| format!(", {increase}"));
        found.push(cause(
            if many { Likelihood::Likely } else { Likelihood::Possible },
            what,
            format!("{worst}{}{packets} {}", congested.unwrap_or_default(), facts.period()),
            Some(remedy),
        ));
    }
}

/// Adds the general cause that the peer does not answer. It is likely if no other likely cause was
/// found, and otherwise possible.
fn unanswered(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    let peer = facts.peer_name();
    let mut evidence = Vec::new();
    if let Failure::Completion(status) = failure {
        evidence.push(status.to_string());
    }
    let sent = facts.increase(Meaning::Sent);
    let received = facts.increase(Meaning::Received);
    let receives_nothing =
        sent.is_some_and(|sent| sent.by > 0) && received.is_some_and(|received| received.by == 0);
    if let (Some(now), Some(sent), Some(received)) = (&facts.now, sent, received) {
        let period = facts.period();
        evidence.push(format!(
            "{period} {} sent {} packets and received {}",
            now.device,
            sent.by,
            if receives_nothing { "none".to_owned() } else { received.by.to_string() },
        ));
    }
    evidence.extend(facts.increased(Meaning::TimedOut).map(|increase| increase.to_string()));
    let frames = facts.netdev_increase(|netdev| netdev.frames_received);
    if let (true, Some(frames), Some(netdev)) = (receives_nothing, frames, facts.netdev()) {
        evidence.push(format!("{} received {frames} frames", netdev.name));
    }
    evidence.extend(healthy(facts));
    evidence.extend(
        match facts.neighbour {
            Neighbour::Known => Some("the next host on the way is in the ARP table"),
            _ => None,
        }
        .map(str::to_owned),
    );
    let what = match failure {
        // Not a single frame of any kind arrived. One peer cannot cause that, unless no other host
        // sends to this host.
        _ if receives_nothing && frames == Some(0) => format!(
            "nothing arrives here, from {peer} or anybody else: the path is interrupted at the \
             switch port of this host or beyond, or {peer} is down and nobody else sends"
        ),
        Failure::ConnectTimeout if facts.knows_peer() => format!(
            "the host {peer} is known, but does not answer RDMA packets: no RDMA device has that \
             address, or its process hangs"
        ),
        _ => format!(
            "{peer} does not answer: its host, port or process is gone, or the path to it drops \
             packets"
        ),
    };
    let explained = found.iter().any(|cause| cause.likelihood >= Likelihood::Likely);
    found.push(cause(
        if explained { Likelihood::Possible } else { Likelihood::Likely },
        what,
        if evidence.is_empty() { "no answer in time".into() } else { evidence.join("; ") },
        Some(match facts.netdev() {
            Some(netdev) => {
                format!("ping -I {} {peer}; on {peer}: rdma link, ip -br addr", netdev.name)
            }
            None => format!("on {peer}: rdma link, ip -br addr"),
        }),
    ));
}

/// Returns evidence that the local side is healthy, if that was measured.
fn healthy(facts: &Facts) -> Option<String> {
    let now = facts.now.as_ref()?;
    let PortView::Seen { state: PortState::ACTIVE, .. } = now.port else { return None };
    match facts.netdev() {
        Some(netdev) if netdev.carrier == Some(true) => {
            Some(format!("the local port is active and {} has carrier", netdev.name))
        }
        _ => Some("the local port is active".into()),
    }
}

/// Adds causes that this side cannot measure.
fn unmeasured_causes(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    let Some(now) = &facts.now else { return };
    let peer = facts.peer_name();
    if failure != Failure::ConnectTimeout {
        found.push(cause(
            Likelihood::Possible,
            format!("the process at {peer} ended, or closed its queue pair"),
            "a device that has no such queue pair does not answer",
            Some(format!("check its log on {peer}, and reconnect")),
        ));
    }
    let mut addresses = now.addresses.iter().flatten();
    let v2 = match facts.local.and_then(|local| now.address(local)) {
        Some(own) => own.kind == GidType::ROCE_V2,
        None => addresses.any(|any| any.kind == GidType::ROCE_V2),
    };
    if v2 {
        found.push(cause(
            Likelihood::Possible,
            "a firewall drops RoCE v2",
            "not measured: RoCE v2 is UDP to port 4791, which rules for TCP do not cover",
            Some(format!("allow UDP port 4791 on {peer} and on the path to it")),
        ));
    }
    if let (PortView::Seen { mtu_bytes, link_layer: LinkLayer::ETHERNET, .. }, Some(netdev)) =
        (&now.port, facts.netdev())
        && *mtu_bytes > 1024
        && failure != Failure::ConnectTimeout
    {
        found.push(cause(
            Likelihood::Possible,
            "a switch on the way or the peer has a smaller MTU",
            format!(
                "packets carry up to {mtu_bytes} bytes, {} allows {}",
                netdev.name, netdev.mtu_bytes
            ),
            Some(format!("ping -M do -s {} {peer}", mtu_bytes + HEADERS)),
        ));
    }
}

/// Adds the causes of a peer whose process does not respond.
fn stalled_peer(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    let evidence = match failure {
        Failure::Completion(status) => status.to_string(),
        Failure::NoAcknowledgement => "the peer does not receive what was sent".into(),
        _ => "its device acknowledges, but its process does not answer".into(),
    };
    let peer = facts.peer_name();
    let counted =
        |meaning| facts.increased(meaning).map(|increase| format!("{increase} {}", facts.period()));
    let not_ready = counted(Meaning::PeerNotReady);
    let what = if (not_ready.is_some() && facts.is_recent()) || failure != Failure::NoKeepalive {
        format!(
            "the process at {peer} has no receives posted: it is stuck, stopped, or posts them too \
             slowly"
        )
    } else {
        format!("the process at {peer} is stopped, stuck, or starved of CPU time")
    };
    found.push(cause(
        Likelihood::Likely,
        what,
        [evidence].into_iter().chain(not_ready).collect::<Vec<_>>().join("; "),
        Some(format!("on {peer}: is the process stopped (state T), blocked (D), or at 100 % CPU?")),
    ));
    if let Some(own) = counted(Meaning::OwnNotReady) {
        found.push(cause(
            Likelihood::Possible,
            "this side had no receives posted when its peers sent",
            own,
            Some("find out what keeps this process from polling completions".into()),
        ));
    }
}

/// Returns the causes that the status itself indicates.
fn by_status(status: Status, facts: &Facts) -> Vec<Cause> {
    let peer = facts.peer_name();
    let rows: Vec<(Likelihood, String, Option<&str>)> = match status {
        Status::FLUSHED => vec![
            (
                Likelihood::Likely,
                "this side stopped the queue pair, or the local device did after an error".into(),
                Some("check dmesg"),
            ),
            (
                Likelihood::Possible,
                format!("{peer} closed the connection, and this side followed"),
                Some("check its log"),
            ),
        ],
        Status::REMOTE_ACCESS => vec![
            (
                Likelihood::Likely,
                format!("{peer} has revoked the grant, or it expired"),
                Some("request a new grant; do not use the old key again"),
            ),
            (
                Likelihood::Possible,
                "the access exceeded the granted range, or the grant has no right for it".into(),
                Some("a bug on this side: compare address, length and rights with the grant"),
            ),
        ],
        Status::REMOTE_INVALID_REQUEST => vec![
            (
                Likelihood::Likely,
                format!("the message is longer than the receive posted at {peer}"),
                Some("both sides must agree on the largest message"),
            ),
            (
                Likelihood::Possible,
                format!("{peer} does not allow the operation, or allows fewer reads at once"),
                None,
            ),
        ],
        Status::LOCAL_PROTECTION | Status::LOCAL_LENGTH | Status::LOCAL_ACCESS => vec![(
            Likelihood::Likely,
            format!("a bug on this side: {}", status.likely_cause()),
            Some("report it, with the log"),
        )],
        Status::FATAL => vec![(
            Likelihood::Certain,
            "the local device failed".into(),
            Some("check dmesg; reset it (devlink dev reload), or use another device"),
        )],
        Status::LOCAL_QP_OPERATION => vec![(
            Likelihood::Likely,
            "the device refused the request: it is malformed, or the port was down for a moment"
                .into(),
            None,
        )],
        other => vec![(Likelihood::Possible, other.likely_cause().into(), None)],
    };
    let mut evidence = format!("{status} (status {})", status.code());
    if let Some(healthy) = healthy(facts) {
        evidence = format!("{evidence}; {healthy}");
    }
    rows.into_iter()
        .map(|(likelihood, what, remedy)| {
            cause(likelihood, what, evidence.clone(), remedy.map(str::to_owned))
        })
        .collect()
}
