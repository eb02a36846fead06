//! Tests the ranking with a table of cases. `tests/gather.rs` tests how facts are gathered.

mod gather;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::{GidType, LinkLayer, PortState, Status};

use super::counters::{Counters, Meaning};
use super::facts::Facts;
use super::rank::rank;
use super::snapshot::{Address, Netdev, PortView, Snapshot};
use super::surroundings::{LocalPeer, Neighbour, Route};
use super::{Failure, Likelihood};
use Likelihood::{Certain, Likely, Possible};

const RETRY: Failure = Failure::Completion(Status::RETRY_EXCEEDED);
const FLUSHED: Failure = Failure::Completion(Status::FLUSHED);
const RNR: Failure = Failure::Completion(Status::RNR_RETRY_EXCEEDED);
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 254);

/// A link on a healthy port, to which a case adds a fault.
struct Scenario {
    then: Option<Snapshot>,
    now: Snapshot,
    route: Route,
    neighbour: Neighbour,
    local_peer: Option<LocalPeer>,
    /// The increases of counters since `then`.
    increases: Vec<(Meaning, &'static str, u64)>,
}

impl Scenario {
    fn new() -> Self {
        let start = Instant::now();
        let now = Snapshot {
            taken: start + Duration::from_secs(3),
            cost: Duration::ZERO,
            device: "rxe2".into(),
            guid: 2,
            number: 1,
            instance: Some(1),
            soft: true,
            port: PortView::Seen {
                state: PortState::ACTIVE,
                link_layer: LinkLayer::ETHERNET,
                mtu_bytes: 4096,
            },
            addresses: Some(vec![Address {
                ip: LOCAL,
                kind: GidType::ROCE_V2,
                netdev: Some("h2".into()),
            }]),
            netdevs: vec![netdev("h2")],
            counters: Counters::default(),
        };
        let then = Snapshot { taken: start, ..now.clone() };
        let increases = vec![(Meaning::Sent, "sent_pkts", 8), (Meaning::Received, "rcvd_pkts", 0)];
        let (route, neighbour) = (Route::Own { gateway: None }, Neighbour::Known);
        Self { then: Some(then), now, route, neighbour, local_peer: None, increases }
    }

    fn facts(mut self) -> Facts {
        let zero: Vec<_> =
            self.increases.iter().map(|&(meaning, name, _)| (meaning, name, 1000)).collect();
        let increased: Vec<_> =
            self.increases.iter().map(|&(meaning, name, by)| (meaning, name, 1000 + by)).collect();
        self.now.counters = Counters::of(&increased);
        if let Some(then) = &mut self.then {
            then.counters = Counters::of(&zero);
        }
        Facts {
            local: Some(LOCAL),
            peer: Some(PEER),
            now: Some(Arc::new(self.now)),
            then: self.then.map(Arc::new),
            route: self.route,
            neighbour: self.neighbour,
            local_peer: self.local_peer,
        }
    }

    fn port(&mut self, new: PortState) {
        if let PortView::Seen { state, .. } = &mut self.now.port {
            *state = new;
        }
    }

    fn increase(&mut self, meaning: Meaning, name: &'static str, by: u64) {
        self.increases.retain(|(other, ..)| *other != meaning);
        self.increases.push((meaning, name, by));
    }
}

fn netdev(name: &str) -> Netdev {
    Netdev {
        name: name.into(),
        up: true,
        carrier: Some(true),
        operstate: "up".into(),
        mtu_bytes: 9000,
        carrier_losses: Some(1),
        frames_received: Some(10),
    }
}

fn local_peer(up: bool, accepts_local: bool) -> LocalPeer {
    let operstate = if up { "up" } else { "down" };
    let netdev = Netdev { up, carrier: None, operstate: operstate.into(), ..netdev("h1") };
    LocalPeer { device: "rxe1".into(), netdev: Some(netdev), accepts_local: Some(accepts_local) }
}

/// A case: the failure, the fault, and the best cause. The best cause has a likelihood, and words
/// of its description, evidence and remedy.
type Case = (Failure, fn(&mut Scenario), Likelihood, [&'static str; 3]);

const CASES: &[Case] = &[
    // The local side.
    (
        RETRY,
        |scenario| scenario.now.port = PortView::Gone("ibv_query_port: no such device".into()),
        Certain,
        ["rxe2 is gone", "no such device", "rdma link"],
    ),
    (
        FLUSHED,
        |scenario| scenario.now.instance = None,
        Certain,
        ["rxe2 is being removed", "sysfs", "open it again"],
    ),
    (
        FLUSHED,
        |scenario| scenario.now.instance = Some(7),
        Certain,
        ["created again", "not the device", "open it again"],
    ),
    (
        FLUSHED,
        |scenario| {
            scenario.port(PortState::DOWN);
            scenario.now.netdevs[0] =
                Netdev { up: false, carrier: None, operstate: "down".into(), ..netdev("h2") };
            scenario.route = Route::Missing;
        },
        Certain,
        ["local interface h2 is down", "h2 is down, port 1 of rxe2 is down", "ip link set h2 up"],
    ),
    (
        Failure::NoKeepalive,
        |scenario| {
            let operstate = "lowerlayerdown".into();
            scenario.now.netdevs[0] = Netdev { carrier: Some(false), operstate, ..netdev("h2") };
        },
        Certain,
        ["h2 has no carrier", "lowerlayerdown", "cable"],
    ),
    (
        RETRY,
        |scenario| {
            scenario.now.netdevs.clear();
            scenario.now.port = PortView::Seen {
                state: PortState::INIT,
                link_layer: LinkLayer::INFINIBAND,
                mtu_bytes: 4096,
            };
        },
        Certain,
        ["local port is not active", "port 1 of rxe2 is initialising", "subnet manager"],
    ),
    (
        RETRY,
        |scenario| scenario.now.addresses = Some(vec![]),
        Certain,
        ["10.0.0.2 is no longer an address of rxe2", "its addresses", "ip addr add"],
    ),
    (
        Failure::ConnectTimeout,
        |scenario| {
            scenario.then = None;
            scenario.now.addresses = Some(vec![]);
        },
        Likely,
        ["10.0.0.2 is not an address of rxe2", "", "another address"],
    ),
    (
        RETRY,
        |scenario| scenario.now.netdevs[0].mtu_bytes = 1500,
        Likely,
        [
            "MTU of this host was reduced",
            "packets carry up to 4096 bytes; the port now allows 4096, h2 allows 1500",
            "restore",
        ],
    ),
    (
        FLUSHED,
        |scenario| scenario.increase(Meaning::LinkDown, "link_downed", 1),
        Likely,
        ["went down and came back", "link_downed +1 in 3.0 s", "cable"],
    ),
    (
        RETRY,
        |scenario| scenario.now.netdevs[0].carrier_losses = Some(3),
        Likely,
        ["went down and came back", "carrier lost 2 times", "cable"],
    ),
    (
        RETRY,
        |scenario| scenario.increase(Meaning::Unsent, "send_err", 5),
        Likely,
        ["cannot send packets to 10.0.0.1", "send_err +5", "ip route get"],
    ),
    // The path and the peer.
    (
        RETRY,
        |scenario| scenario.route = Route::Missing,
        Likely,
        ["no route to 10.0.0.1", "main", "dev h2"],
    ),
    (
        Failure::ConnectTimeout,
        |scenario| scenario.route = Route::Other { netdev: "eth0".into() },
        Likely,
        ["do not leave by h2", "by eth0", "ip route add"],
    ),
    (
        Failure::ConnectTimeout,
        |scenario| {
            scenario.route = Route::Own { gateway: Some(GATEWAY) };
            scenario.now.addresses.iter_mut().flatten().for_each(|own| own.kind = GidType::ROCE_V1);
        },
        Likely,
        ["RoCE v1 is not routed", "through 10.0.0.254", "RoCE v2"],
    ),
    (
        RETRY,
        |scenario| scenario.neighbour = Neighbour::Silent,
        Likely,
        [
            "host 10.0.0.1 is down, cut off",
            "10.0.0.1 does not answer ARP on h2",
            "ping -I h2 10.0.0.1",
        ],
    ),
    (
        RETRY,
        |scenario| {
            scenario.neighbour = Neighbour::Silent;
            scenario.route = Route::Own { gateway: Some(GATEWAY) };
        },
        Likely,
        [
            "gateway 10.0.0.254 does not answer",
            "10.0.0.254 does not answer ARP",
            "ping -I h2 10.0.0.254",
        ],
    ),
    (
        RETRY,
        |scenario| scenario.local_peer = Some(local_peer(false, true)),
        Certain,
        [
            "peer's interface h1 is down",
            "10.0.0.1 is an address of this host, on rxe1",
            "ip link set h1 up",
        ],
    ),
    (
        Failure::ConnectTimeout,
        |scenario| scenario.local_peer = Some(local_peer(true, false)),
        Likely,
        ["drops packets from its own", "accept_local 0", "net.ipv4.conf.h1.accept_local=1"],
    ),
    (
        RETRY,
        |scenario| {
            scenario.increase(Meaning::Received, "rcvd_pkts", 1000);
            scenario.increase(Meaning::Lost, "out_of_sequence", 10);
            scenario.increase(Meaning::Congested, "rp_cnp_handled", 4);
        },
        Likely,
        [
            "lost on the way",
            "out_of_sequence +10, rp_cnp_handled +4, 1000 packets received in 3.0 s",
            "PFC",
        ],
    ),
    (
        RETRY,
        |scenario| {
            scenario.increase(Meaning::Received, "rcvd_pkts", 1000);
            scenario.increase(Meaning::Damaged, "symbol_error", 500);
        },
        Likely,
        ["arrive damaged", "symbol_error +500", "ethtool -m h2"],
    ),
    // No response, and no other evidence.
    (
        RETRY,
        |scenario| scenario.increase(Meaning::TimedOut, "completer_retry_err", 7),
        Likely,
        [
            "nothing arrives here, from 10.0.0.1 or anybody else",
            "transport retry exceeded; in 3.0 s rxe2 sent 8 packets and received none; \
             completer_retry_err +7; h2 received 0 frames; the local port is active and h2 \
             has carrier",
            "ping -I h2 10.0.0.1",
        ],
    ),
    (
        RETRY,
        |scenario| scenario.now.netdevs[0].frames_received = Some(30),
        Likely,
        ["10.0.0.1 does not answer", "received none; h2 received 20 frames", "rdma link"],
    ),
    (
        RETRY,
        |scenario| scenario.increase(Meaning::Received, "rcvd_pkts", 90),
        Likely,
        ["10.0.0.1 does not answer", "sent 8 packets and received 90", "rdma link"],
    ),
    (
        RETRY,
        |scenario| {
            scenario.then = None;
            scenario.now.netdevs.clear();
            scenario.now.addresses = None;
            scenario.now.port = PortView::Unknown;
            (scenario.route, scenario.neighbour) = (Route::Unknown, Neighbour::Unknown);
        },
        Likely,
        ["10.0.0.1 does not answer", "transport retry exceeded", "on 10.0.0.1: rdma link"],
    ),
    (
        Failure::ConnectTimeout,
        |scenario| scenario.then = None,
        Likely,
        ["host 10.0.0.1 is known, but does not answer RDMA", "in the ARP table", "rdma link"],
    ),
    (
        Failure::ConnectTimeout,
        |scenario| {
            scenario.then = None;
            scenario.route = Route::Own { gateway: Some(GATEWAY) };
        },
        Likely,
        ["10.0.0.1 does not answer: its host", "in the ARP table", "rdma link"],
    ),
    (
        RETRY,
        |scenario| {
            // On iWARP, the table contains only the card's address.
            let ip = "fe80::1".parse().expect("an address");
            scenario.now.addresses =
                Some(vec![Address { ip, kind: GidType::INFINIBAND, netdev: None }]);
            scenario.then = None;
        },
        Likely,
        [
            "10.0.0.1 does not answer",
            "transport retry exceeded; the local port is active",
            "ping -I h2",
        ],
    ),
    // The peer's process.
    (
        Failure::NoKeepalive,
        |_| {},
        Likely,
        ["process at 10.0.0.1 is stopped, stuck", "its device acknowledges", "state T"],
    ),
    (
        Failure::NoKeepalive,
        |scenario| scenario.increase(Meaning::PeerNotReady, "rnr_nak_retry_err", 6),
        Likely,
        ["has no receives posted", "rnr_nak_retry_err +6 in 3.0 s", "state T"],
    ),
    (RNR, |_| {}, Likely, ["has no receives posted", "receiver not ready", "on 10.0.0.1"]),
    // The status of the completion.
    (FLUSHED, |_| {}, Likely, ["this side stopped the queue pair", "the local port is active", ""]),
    (
        Failure::Completion(Status::LOCAL_QP_OPERATION),
        |scenario| scenario.then = None,
        Likely,
        ["the device refused the request", "status 2", ""],
    ),
    (
        Failure::Completion(Status::REMOTE_ACCESS),
        |_| {},
        Likely,
        ["10.0.0.1 has revoked the grant", "remote access error (status 10)", "new grant"],
    ),
    (
        Failure::Completion(Status::REMOTE_INVALID_REQUEST),
        |_| {},
        Likely,
        ["longer than the receive", "status 9", "largest message"],
    ),
    (
        Failure::Completion(Status::LOCAL_PROTECTION),
        |_| {},
        Likely,
        ["a bug on this side", "", "report"],
    ),
    (Failure::Completion(Status::FATAL), |_| {}, Certain, ["device failed", "fatal", "dmesg"]),
    (
        Failure::Completion(Status::BAD_RESPONSE),
        |_| {},
        Possible,
        ["unexpected response", "bad response", ""],
    ),
];

#[test]
fn ranks_measured_causes_first() {
    for (at, (failure, worsen, likelihood, words)) in CASES.iter().enumerate() {
        let mut scenario = Scenario::new();
        worsen(&mut scenario);
        let causes = rank(*failure, &scenario.facts());
        let best =
            causes.first().unwrap_or_else(|| panic!("case {at}: at least one cause must be found"));
        let texts = [&best.what, &best.evidence, best.remedy.as_ref().unwrap_or(&String::new())]
            .map(String::clone);
        for (text, words) in texts.iter().zip(words) {
            assert!(
                text.contains(words),
                "case {at}: {words:?} is missing in {text:?}\nof {causes:#?}"
            );
        }
        assert_eq!(best.likelihood, *likelihood, "case {at}: {causes:#?}");
        assert!(
            causes.len() <= 5 && causes.is_sorted_by(|a, b| a.likelihood >= b.likelihood),
            "case {at}: expected at most five causes, the most likely first: {causes:#?}"
        );
        let guess = causes.iter().any(|cause| cause.likelihood < Certain);
        assert!(
            best.likelihood < Certain || !guess,
            "case {at}: a certain cause must exclude guesses: {causes:#?}"
        );
    }
}

#[test]
fn lists_guesses_last() {
    let causes = rank(RETRY, &Scenario::new().facts());
    let likely = causes.iter().filter(|cause| cause.likelihood == Likely).count();
    let guesses: Vec<&str> = causes[likely..].iter().map(|cause| cause.what.as_str()).collect();
    assert_eq!(likely, 1, "{causes:#?}");
    assert_eq!(
        guesses,
        [
            "the process at 10.0.0.1 ended, or closed its queue pair",
            "a firewall drops RoCE v2",
            "a switch on the way or the peer has a smaller MTU",
        ]
    );
    assert!(rank(Failure::Completion(Status::SUCCESS), &Scenario::new().facts()).is_empty());
}

/// A port that went down a week ago is not the likely cause of a failure now.
#[test]
fn old_changes_are_only_possible_causes() {
    let old = || {
        let mut scenario = Scenario::new();
        scenario.increase(Meaning::LinkDown, "link_downed", 1);
        scenario.increase(Meaning::Unsent, "send_err", 1);
        scenario.increase(Meaning::PeerNotReady, "rcvd_rnr_err", 1);
        scenario.now.taken += Duration::from_secs(7 * 86_400);
        scenario.facts()
    };
    let causes = rank(RETRY, &old());
    assert!(causes[0].what.starts_with("nothing arrives here"), "{causes:#?}");
    for what in
        ["the local port went down and came back", "this host cannot send packets to 10.0.0.1"]
    {
        let cause = causes.iter().find(|cause| cause.what == what).expect("old changes are listed");
        assert_eq!(cause.likelihood, Possible);
        assert!(cause.evidence.ends_with("+1 in 10080 min"), "{cause}");
    }
    let causes = rank(Failure::NoKeepalive, &old());
    assert!(causes[0].what.contains("stopped, stuck, or starved"), "{causes:#?}");
}

#[test]
fn displays_a_cause_as_one_line() {
    let mut scenario = Scenario::new();
    scenario.local_peer = Some(local_peer(false, true));
    assert_eq!(
        rank(RETRY, &scenario.facts())[0].to_string(),
        "certain: the peer's interface h1 is down (10.0.0.1 is an address of this host, on rxe1; \
         h1 is down); to do: ip link set h1 up, or check its cable"
    );
}
