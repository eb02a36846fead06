//! From what was measured to what is likely: no file is read and nothing is asked here.
//!
//! Certain is only what a measurement shows and what by itself explains the failure. Likely is what
//! a measurement points at, or what the failure itself usually means. Possible is what nothing
//! speaks against.

use std::cmp::Reverse;

use ferrite_verbs::{GidType, LinkLayer, PortState, Status};

use super::counters::Meaning;
use super::facts::Facts;
use super::own_side::own_side;
use super::snapshot::PortView;
use super::surroundings::{Neighbour, Route, Twin};
use super::{Cause, Failure, Likelihood};

/// The least that RoCE v2 adds to a packet's payload: IPv4, UDP, BTH, RETH, ICRC.
pub(super) const HEADERS: u32 = 20 + 8 + 12 + 16 + 4;
const CAUSES_MAX: usize = 5;

/// The causes of a failure, the best first.
pub(super) fn rank(failure: Failure, facts: &Facts) -> Vec<Cause> {
    let mut found = Vec::new();
    match failure {
        Failure::ConnectTimeout => silence(&mut found, failure, facts),
        Failure::NoKeepalive => {
            own_side(&mut found, facts);
            stuck(&mut found, failure, facts);
        }
        // Met no receive there, or nobody.
        Failure::NoAcknowledgement if facts.did_move(Meaning::PeerNotReady).is_some() => {
            stuck(&mut found, failure, facts);
        }
        Failure::NoAcknowledgement => silence(&mut found, failure, facts),
        Failure::Completion(status) => match status {
            Status::SUCCESS => {}
            Status::RETRY_EXCEEDED | Status::RESPONSE_TIMEOUT => {
                silence(&mut found, failure, facts)
            }
            Status::RNR_RETRY_EXCEEDED => stuck(&mut found, failure, facts),
            Status::FLUSHED | Status::LOCAL_QP_OPERATION | Status::GENERAL => {
                own_side(&mut found, facts);
                found.extend(by_status(status, facts));
            }
            _ => found.extend(by_status(status, facts)),
        },
    }
    // Sorting is stable: of equals, the one found first stays first.
    found.sort_by_key(|cause| Reverse(cause.likelihood));
    if found.first().is_some_and(|best| best.likelihood == Likelihood::Certain) {
        // What is certain leaves no room for guesses.
        found.retain(|cause| cause.likelihood == Likelihood::Certain);
    }
    found.truncate(CAUSES_MAX);
    found
}

/// Whether [`rank`] wants to know how the port is. A device that has failed for good is not asked:
/// it may take a minute to answer.
pub(super) fn wants_facts(failure: Failure) -> bool {
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

/// A cause, from its parts.
pub(super) fn cause(
    likelihood: Likelihood,
    what: impl Into<String>,
    evidence: impl Into<String>,
    remedy: Option<String>,
) -> Cause {
    Cause { likelihood, what: what.into(), evidence: evidence.into(), remedy }
}

/// Nothing came back from the peer.
fn silence(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    own_side(found, facts);
    same_host(found, facts);
    no_way(found, failure, facts);
    wear(found, facts);
    no_answer(found, failure, facts);
    if facts.now.is_some() && !facts.is_infiniband() && facts.twin.is_none() {
        guesses(found, failure, facts);
    }
}

/// The peer's address is one of this host.
fn same_host(found: &mut Vec<Cause>, facts: &Facts) {
    let Some(Twin { device, netdev, accepts_local }) = &facts.twin else { return };
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
            Some("check that this address is meant".into()),
        )),
    }
}

/// There is no way to the peer, or the next host on it does not answer.
fn no_way(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    // While the own interface is down, its routes are gone too.
    let Some(netdev) = facts.netdev().filter(|netdev| netdev.is_usable()) else { return };
    let (name, peer) = (&netdev.name, facts.peer_name());
    let gateway = match &facts.route {
        Route::Missing => {
            found.push(cause(
                Likelihood::Likely,
                format!("no route to {peer}"),
                "the main routing table has none that fits",
                Some(format!("ip route get {peer}; ip route add {peer} dev {name}")),
            ));
            return;
        }
        Route::Other { netdev: other } => {
            // An established link did without; and other routing tables are not seen.
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
                "the own address is of type RoCE v1, and the way to {peer} is through {gateway}"
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

/// What the wire does to packets.
fn wear(found: &mut Vec<Cause>, facts: &Facts) {
    let received = facts.moved(Meaning::Received).map_or(0, |moved| moved.by);
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
            "check PFC or ECN on every switch of the path, and the class of this traffic"
                .to_owned(),
        ),
    ];
    for (meanings, what, remedy) in rows {
        let worst = meanings
            .iter()
            .filter_map(|meaning| facts.did_move(*meaning))
            .max_by_key(|moved| moved.by);
        let Some(worst) = worst else { continue };
        // One in a hundred is more than any healthy fabric loses.
        let many = received > 0 && worst.by >= received.div_ceil(100);
        let congested = facts.did_move(Meaning::Congested).map(|moved| format!(", {moved}"));
        found.push(cause(
            if many { Likelihood::Likely } else { Likelihood::Possible },
            what,
            format!(
                "{worst}{} of {received} packets {}",
                congested.unwrap_or_default(),
                facts.within()
            ),
            Some(remedy),
        ));
    }
}

/// The peer does not answer, for whatever reason: what remains when nothing better was found.
fn no_answer(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    let peer = facts.peer_name();
    let mut evidence = Vec::new();
    if let Failure::Completion(status) = failure {
        evidence.push(status.to_string());
    }
    let sent = facts.moved(Meaning::Sent);
    let received = facts.moved(Meaning::Received);
    let deaf =
        sent.is_some_and(|sent| sent.by > 0) && received.is_some_and(|received| received.by == 0);
    if let (Some(now), Some(sent), Some(received)) = (&facts.now, sent, received) {
        let within = facts.within();
        evidence.push(format!(
            "{within} {} sent {} packets and received {}",
            now.device,
            sent.by,
            if deaf { "none".to_owned() } else { received.by.to_string() },
        ));
    }
    evidence.extend(facts.did_move(Meaning::TimedOut).map(|moved| moved.to_string()));
    let frames = facts.netdev_moved(|netdev| netdev.frames_received);
    if let (true, Some(frames), Some(netdev)) = (deaf, frames, facts.netdev()) {
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
        // Not one frame of any kind: that is not one peer's doing, unless it is the only one.
        _ if deaf && frames == Some(0) => format!(
            "nothing arrives here, from {peer} or anybody else: the path is cut at the own switch port or beyond, \
             or {peer} is down and nobody else sends"
        ),
        Failure::ConnectTimeout if facts.knows_peer() => format!(
            "the host {peer} is known, but does not answer RDMA packets: no RDMA device has that address, or its \
             process hangs"
        ),
        _ => format!(
            "{peer} does not answer: its host, port or process is gone, or the path to it drops packets"
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

/// That the own side is well, if that was seen.
fn healthy(facts: &Facts) -> Option<String> {
    let now = facts.now.as_ref()?;
    let PortView::Seen { state: PortState::ACTIVE, .. } = now.port else { return None };
    match facts.netdev() {
        Some(netdev) if netdev.carrier == Some(true) => {
            Some(format!("the own port is active and {} has carrier", netdev.name))
        }
        _ => Some("the own port is active".into()),
    }
}

/// What no measurement from this side can show.
fn guesses(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    let Some(now) = &facts.now else { return };
    let peer = facts.peer_name();
    if failure != Failure::ConnectTimeout {
        found.push(cause(
            Likelihood::Possible,
            format!("the process at {peer} ended, or closed its queue pair"),
            "a device that has no such queue pair does not answer",
            Some(format!("look at its log on {peer}, and connect again")),
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
            "not measured: it is UDP to port 4791, which filters for TCP do not let pass",
            Some(format!("let UDP port 4791 pass on {peer} and on the way to it")),
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

/// The peer's process does not do its part.
fn stuck(found: &mut Vec<Cause>, failure: Failure, facts: &Facts) {
    let evidence = match failure {
        Failure::Completion(status) => status.to_string(),
        Failure::NoAcknowledgement => "what was sent is not taken".into(),
        _ => "its device acknowledges, and nothing above it answers".into(),
    };
    let peer = facts.peer_name();
    let counted =
        |meaning| facts.did_move(meaning).map(|moved| format!("{moved} {}", facts.within()));
    let not_ready = counted(Meaning::PeerNotReady);
    let what = if (not_ready.is_some() && facts.is_recent()) || failure != Failure::NoKeepalive {
        format!(
            "the process at {peer} posts no receives: it is stuck, stopped, or slower than its credits promise"
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
            Some("look for what keeps this process from reaping completions".into()),
        ));
    }
}

/// What the status itself says.
fn by_status(status: Status, facts: &Facts) -> Vec<Cause> {
    let peer = facts.peer_name();
    let rows: Vec<(Likelihood, String, Option<&str>)> = match status {
        Status::FLUSHED => vec![
            (
                Likelihood::Likely,
                "this side stopped the queue pair, or its device did after an error of its own"
                    .into(),
                Some("dmesg may say more"),
            ),
            (
                Likelihood::Possible,
                format!("{peer} ended the connection, and this side followed"),
                Some("its log says why"),
            ),
        ],
        Status::REMOTE_ACCESS => vec![
            (
                Likelihood::Likely,
                format!("{peer} has revoked the grant, or it expired"),
                Some("ask for a new grant; do not use the old key again"),
            ),
            (
                Likelihood::Possible,
                "the access went outside the granted range, or was of a kind not granted".into(),
                Some("a bug on this side: compare address, length and rights with the grant"),
            ),
        ],
        Status::REMOTE_INVALID_REQUEST => vec![
            (
                Likelihood::Likely,
                format!("the message is longer than the receive it met at {peer}"),
                Some("both sides must agree on the largest message"),
            ),
            (
                Likelihood::Possible,
                format!("{peer} does not allow the operation, or not so many reads at once"),
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
            "the own device failed".into(),
            Some("dmesg says why; reset it (devlink dev reload), or use another device"),
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
