//! The ranking, over a table of cases; how facts are gathered is tested in `tests/gather.rs`.

mod gather;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::{GidType, LinkLayer, PortState, Status};

use super::counters::{Counters, Meaning};
use super::facts::Facts;
use super::rank::rank;
use super::snapshot::{Address, Netdev, PortView, Snapshot};
use super::surroundings::{Neighbour, Route, Twin};
use super::{Failure, Likelihood};
use Likelihood::{Certain, Likely, Possible};

const RETRY: Failure = Failure::Completion(Status::RETRY_EXCEEDED);
const FLUSHED: Failure = Failure::Completion(Status::FLUSHED);
const RNR: Failure = Failure::Completion(Status::RNR_RETRY_EXCEEDED);
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 254);

/// A link over a healthy port, to be made worse.
struct Made {
    then: Option<Snapshot>,
    now: Snapshot,
    route: Route,
    neighbour: Neighbour,
    twin: Option<Twin>,
    /// How far counters went since `then`.
    moved: Vec<(Meaning, &'static str, u64)>,
}

impl Made {
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
        let moved = vec![(Meaning::Sent, "sent_pkts", 8), (Meaning::Received, "rcvd_pkts", 0)];
        let (route, neighbour) = (Route::Own { gateway: None }, Neighbour::Known);
        Self { then: Some(then), now, route, neighbour, twin: None, moved }
    }

    fn facts(mut self) -> Facts {
        let zero: Vec<_> =
            self.moved.iter().map(|&(meaning, name, _)| (meaning, name, 1000)).collect();
        let moved: Vec<_> =
            self.moved.iter().map(|&(meaning, name, by)| (meaning, name, 1000 + by)).collect();
        self.now.counters = Counters::of(&moved);
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
            twin: self.twin,
        }
    }

    fn port(&mut self, new: PortState) {
        if let PortView::Seen { state, .. } = &mut self.now.port {
            *state = new;
        }
    }

    fn moves(&mut self, meaning: Meaning, name: &'static str, by: u64) {
        self.moved.retain(|(other, ..)| *other != meaning);
        self.moved.push((meaning, name, by));
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

fn twin(up: bool, accepts_local: bool) -> Twin {
    let operstate = if up { "up" } else { "down" };
    let netdev = Netdev { up, carrier: None, operstate: operstate.into(), ..netdev("h1") };
    Twin { device: "rxe1".into(), netdev: Some(netdev), accepts_local: Some(accepts_local) }
}

/// Failure, what makes it worse, and the best cause: likelihood, and words of what, evidence and
/// remedy.
type Case = (Failure, fn(&mut Made), Likelihood, [&'static str; 3]);

const CASES: &[Case] = &[
    // The own side.
    (
        RETRY,
        |made| made.now.port = PortView::Gone("ibv_query_port: no such device".into()),
        Certain,
        ["rxe2 is gone", "no such device", "rdma link"],
    ),
    (
        FLUSHED,
        |made| made.now.instance = None,
        Certain,
        ["rxe2 is being removed", "sysfs", "open it again"],
    ),
    (
        FLUSHED,
        |made| made.now.instance = Some(7),
        Certain,
        ["made again", "another one", "open it again"],
    ),
    (
        FLUSHED,
        |made| {
            made.port(PortState::DOWN);
            made.now.netdevs[0] =
                Netdev { up: false, carrier: None, operstate: "down".into(), ..netdev("h2") };
            made.route = Route::Missing;
        },
        Certain,
        ["own interface h2 is down", "h2 is down, port 1 of rxe2 is down", "ip link set h2 up"],
    ),
    (
        Failure::NoKeepalive,
        |made| {
            let operstate = "lowerlayerdown".into();
            made.now.netdevs[0] = Netdev { carrier: Some(false), operstate, ..netdev("h2") };
        },
        Certain,
        ["h2 has no carrier", "lowerlayerdown", "cable"],
    ),
    (
        RETRY,
        |made| {
            made.now.netdevs.clear();
            made.now.port = PortView::Seen {
                state: PortState::INIT,
                link_layer: LinkLayer::INFINIBAND,
                mtu_bytes: 4096,
            };
        },
        Certain,
        ["own port is not active", "port 1 of rxe2 is initialising", "subnet manager"],
    ),
    (
        RETRY,
        |made| made.now.addresses = Some(vec![]),
        Certain,
        ["10.0.0.2 is no longer an address of rxe2", "its addresses", "ip addr add"],
    ),
    (
        Failure::ConnectTimeout,
        |made| {
            made.then = None;
            made.now.addresses = Some(vec![]);
        },
        Likely,
        ["10.0.0.2 is not an address of rxe2", "", "another address"],
    ),
    (
        RETRY,
        |made| made.now.netdevs[0].mtu_bytes = 1500,
        Likely,
        [
            "own MTU was made smaller",
            "packets of 4096 bytes, port now 4096; h2 carries 1500",
            "MTU back",
        ],
    ),
    (
        FLUSHED,
        |made| made.moves(Meaning::LinkDown, "link_downed", 1),
        Likely,
        ["went down, and came back", "link_downed +1 in 3.0 s", "cable"],
    ),
    (
        RETRY,
        |made| made.now.netdevs[0].carrier_losses = Some(3),
        Likely,
        ["went down, and came back", "carrier lost 2 times", "cable"],
    ),
    (
        RETRY,
        |made| made.moves(Meaning::Unsent, "send_err", 5),
        Likely,
        ["cannot send packets to 10.0.0.1", "send_err +5", "ip route get"],
    ),
    // The way and the peer.
    (RETRY, |made| made.route = Route::Missing, Likely, ["no route to 10.0.0.1", "main", "dev h2"]),
    (
        Failure::ConnectTimeout,
        |made| made.route = Route::Other { netdev: "eth0".into() },
        Likely,
        ["do not leave by h2", "by eth0", "ip route add"],
    ),
    (
        Failure::ConnectTimeout,
        |made| {
            made.route = Route::Own { gateway: Some(GATEWAY) };
            made.now.addresses.iter_mut().flatten().for_each(|own| own.kind = GidType::ROCE_V1);
        },
        Likely,
        ["RoCE v1 is not routed", "through 10.0.0.254", "RoCE v2"],
    ),
    (
        RETRY,
        |made| made.neighbour = Neighbour::Silent,
        Likely,
        [
            "host 10.0.0.1 is down, cut off",
            "10.0.0.1 does not answer ARP on h2",
            "ping -I h2 10.0.0.1",
        ],
    ),
    (
        RETRY,
        |made| {
            made.neighbour = Neighbour::Silent;
            made.route = Route::Own { gateway: Some(GATEWAY) };
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
        |made| made.twin = Some(twin(false, true)),
        Certain,
        [
            "peer's interface h1 is down",
            "10.0.0.1 is an address of this host, on rxe1",
            "ip link set h1 up",
        ],
    ),
    (
        Failure::ConnectTimeout,
        |made| made.twin = Some(twin(true, false)),
        Likely,
        ["drops packets from its own", "accept_local 0", "net.ipv4.conf.h1.accept_local=1"],
    ),
    (
        RETRY,
        |made| {
            made.moves(Meaning::Received, "rcvd_pkts", 1000);
            made.moves(Meaning::Lost, "out_of_sequence", 10);
            made.moves(Meaning::Congested, "rp_cnp_handled", 4);
        },
        Likely,
        [
            "lost on the way",
            "out_of_sequence +10, rp_cnp_handled +4 of 1000 packets in 3.0 s",
            "PFC",
        ],
    ),
    (
        RETRY,
        |made| {
            made.moves(Meaning::Received, "rcvd_pkts", 1000);
            made.moves(Meaning::Damaged, "symbol_error", 500);
        },
        Likely,
        ["arrive damaged", "symbol_error +500", "ethtool -m h2"],
    ),
    // Silence, and nothing else.
    (
        RETRY,
        |made| made.moves(Meaning::TimedOut, "completer_retry_err", 7),
        Likely,
        [
            "nothing arrives here, from 10.0.0.1 or anybody else",
            "transport retry exceeded; in 3.0 s rxe2 sent 8 packets and received none; completer_retry_err +7; \
             h2 received 0 frames; the own port is active and h2 has carrier",
            "ping -I h2 10.0.0.1",
        ],
    ),
    (
        RETRY,
        |made| made.now.netdevs[0].frames_received = Some(30),
        Likely,
        ["10.0.0.1 does not answer", "received none; h2 received 20 frames", "rdma link"],
    ),
    (
        RETRY,
        |made| made.moves(Meaning::Received, "rcvd_pkts", 90),
        Likely,
        ["10.0.0.1 does not answer", "sent 8 packets and received 90", "rdma link"],
    ),
    (
        RETRY,
        |made| {
            made.then = None;
            made.now.netdevs.clear();
            made.now.addresses = None;
            made.now.port = PortView::Unknown;
            (made.route, made.neighbour) = (Route::Unknown, Neighbour::Unknown);
        },
        Likely,
        ["10.0.0.1 does not answer", "transport retry exceeded", "on 10.0.0.1: rdma link"],
    ),
    (
        Failure::ConnectTimeout,
        |made| made.then = None,
        Likely,
        ["host 10.0.0.1 is known, but does not answer RDMA", "in the ARP table", "rdma link"],
    ),
    (
        Failure::ConnectTimeout,
        |made| {
            made.then = None;
            made.route = Route::Own { gateway: Some(GATEWAY) };
        },
        Likely,
        ["10.0.0.1 does not answer: its host", "in the ARP table", "rdma link"],
    ),
    (
        RETRY,
        |made| {
            // iWARP: the table has the card's address only.
            let ip = "fe80::1".parse().expect("an address");
            made.now.addresses =
                Some(vec![Address { ip, kind: GidType::INFINIBAND, netdev: None }]);
            made.then = None;
        },
        Likely,
        [
            "10.0.0.1 does not answer",
            "transport retry exceeded; the own port is active",
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
        |made| made.moves(Meaning::PeerNotReady, "rnr_nak_retry_err", 6),
        Likely,
        ["posts no receives", "rnr_nak_retry_err +6 in 3.0 s", "state T"],
    ),
    (RNR, |_| {}, Likely, ["posts no receives", "receiver not ready", "on 10.0.0.1"]),
    // What the status says.
    (FLUSHED, |_| {}, Likely, ["this side stopped the queue pair", "the own port is active", ""]),
    (
        Failure::Completion(Status::LOCAL_QP_OPERATION),
        |made| made.then = None,
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
    (Failure::Completion(Status::FATAL), |_| {}, Certain, ["own device failed", "fatal", "dmesg"]),
    (
        Failure::Completion(Status::BAD_RESPONSE),
        |_| {},
        Possible,
        ["broke the protocol", "bad response", ""],
    ),
];

#[test]
fn the_best_cause_is_the_measured_one() {
    for (at, (failure, worsen, likelihood, words)) in CASES.iter().enumerate() {
        let mut made = Made::new();
        worsen(&mut made);
        let causes = rank(*failure, &made.facts());
        let best = causes.first().unwrap_or_else(|| panic!("case {at}: no cause"));
        let texts = [&best.what, &best.evidence, best.remedy.as_ref().unwrap_or(&String::new())]
            .map(String::clone);
        for (text, words) in texts.iter().zip(words) {
            assert!(
                text.contains(words),
                "case {at}: {words:?} is not in {text:?}\nof {causes:#?}"
            );
        }
        assert_eq!(best.likelihood, *likelihood, "case {at}: {causes:#?}");
        assert!(
            causes.len() <= 5 && causes.is_sorted_by(|a, b| a.likelihood >= b.likelihood),
            "case {at}"
        );
        let guess = causes.iter().any(|cause| cause.likelihood < Certain);
        assert!(
            best.likelihood < Certain || !guess,
            "case {at}: a guess beside a certainty: {causes:#?}"
        );
    }
}

#[test]
fn guesses_are_named_and_stay_last() {
    let causes = rank(RETRY, &Made::new().facts());
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
    assert!(rank(Failure::Completion(Status::SUCCESS), &Made::new().facts()).is_empty());
}

/// A port that flapped a week ago is not why the link failed now.
#[test]
fn old_news_is_only_possible() {
    let old = || {
        let mut made = Made::new();
        made.moves(Meaning::LinkDown, "link_downed", 1);
        made.moves(Meaning::Unsent, "send_err", 1);
        made.moves(Meaning::PeerNotReady, "rcvd_rnr_err", 1);
        made.now.taken += Duration::from_secs(7 * 86_400);
        made.facts()
    };
    let causes = rank(RETRY, &old());
    assert!(causes[0].what.starts_with("nothing arrives here"), "{causes:#?}");
    for what in
        ["the own port went down, and came back", "this host cannot send packets to 10.0.0.1"]
    {
        let cause = causes.iter().find(|cause| cause.what == what).expect("still there");
        assert_eq!(cause.likelihood, Possible);
        assert!(cause.evidence.ends_with("+1 in 10080 min"), "{cause}");
    }
    let causes = rank(Failure::NoKeepalive, &old());
    assert!(causes[0].what.contains("stopped, stuck, or starved"), "{causes:#?}");
}

#[test]
fn a_cause_is_one_line() {
    let mut made = Made::new();
    made.twin = Some(twin(false, true));
    assert_eq!(
        rank(RETRY, &made.facts())[0].to_string(),
        "certain: the peer's interface h1 is down (10.0.0.1 is an address of this host, on rxe1; h1 is down); \
         to do: ip link set h1 up, or check its cable"
    );
}
