//! Causes of failures on Soft-RoCE devices in the lab's guest (`cargo xtask lab-test diagnose`).
//!
//! The link is from 10.0.0.2 (rxe2 on h2) to 10.0.0.1 (rxe1 on h1). Tests that break the network do
//! so with an operator's tools, and restore it even if the test fails.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use ferrite_fabric::diagnose::{Baseline, Cause, Failure, Likelihood, Subject, causes};
use ferrite_testkit::lab::{OWN, PEER, TEST_TIMEOUT, fault, verbs};
use ferrite_verbs::{
    Access, CompletionQueue, Context, MemoryRegion, Path, PeerAddress, QueuePair,
    QueuePairAttributes, QueuePairConfig, SendRequest, Status, WorkCompletion, cm,
};

const HOSTS: [(&str, &str); 2] = [OWN, PEER];

fn at(host: u8) -> Option<SocketAddr> {
    Some((IpAddr::from(Ipv4Addr::new(10, 0, 0, host)), 0).into())
}

/// One end of a link.
struct End {
    context: Context,
    region: MemoryRegion,
    cq: CompletionQueue,
    qp: QueuePair,
}

impl End {
    fn new((device, _): (&str, &str)) -> Self {
        let context = verbs().device(device).and_then(|device| device.open()).expect("device");
        let domain = context.allocate_protection_domain().expect("domain");
        let region = domain.allocate(64, Access::LOCAL | Access::REMOTE_WRITE).expect("region");
        let cq = context.create_completion_queue(16, None, 0).expect("queue");
        let qp = domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
        Self { context, region, cq, qp }
    }

    fn address(&self, (_, ip): (&str, &str)) -> (PeerAddress, u8) {
        let gids = self.context.gids().expect("addresses");
        let entry =
            gids.iter().find(|entry| entry.gid.ip().to_string() == ip).expect("the host's address");
        (
            PeerAddress { qp_num: self.qp.number(), psn: 1, gid: entry.gid, lid: 0 },
            entry.index as u8,
        )
    }

    /// Posts a request and returns the status of its completion.
    fn run(&self, request: SendRequest<'_>) -> Status {
        self.qp.post_send(&[request.signaled()]).expect("post");
        let mut out = [WorkCompletion::default()];
        let deadline = Instant::now() + TEST_TIMEOUT;
        while self.cq.poll(&mut out).expect("poll") == 0 {
            assert!(Instant::now() < deadline, "no completion within the time limit");
            std::thread::yield_now();
        }
        out[0].status()
    }
}

/// A working link with its baseline, which tests then break.
struct Link {
    own: End,
    peer: End,
    baseline: Baseline,
}

impl Link {
    fn up() -> Self {
        let [own, peer] = HOSTS.map(End::new);
        // 7 retries would mean "forever" to Soft-RoCE.
        let mtu = own.context.port(1).expect("port").active_mtu;
        let path = Path { mtu, retries: 3, rnr_retries: 2, ..Path::default() };
        for (end, at, other, other_at) in
            [(&own, HOSTS[0], &peer, HOSTS[1]), (&peer, HOSTS[1], &own, HOSTS[0])]
        {
            let (target, index) = (other.address(other_at).0, end.address(at).1);
            end.qp.modify(&QueuePairAttributes::init(1, Access::REMOTE_WRITE)).expect("init");
            end.qp
                .modify(&QueuePairAttributes::connect_to(&target, 1, index, &path, 1))
                .expect("RTR");
            end.qp.modify(&QueuePairAttributes::ready_to_send(1, &path, 1)).expect("RTS");
        }
        let local = [own.region.sge(0..64)];
        assert_eq!(
            own.run(SendRequest::write(1, &local, peer.region.remote(0..64))),
            Status::SUCCESS
        );
        counters_settle();
        let baseline = Baseline::take(&own.context, 1);
        Self { own, peer, baseline }
    }

    /// Writes until a request fails.
    fn failure(&self) -> Failure {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let local = [self.own.region.sge(0..64)];
        while Instant::now() < deadline {
            match self.own.run(SendRequest::write(1, &local, self.peer.region.remote(0..64))) {
                Status::SUCCESS => {}
                status => return Failure::Completion(status),
            }
        }
        panic!("writes succeed in spite of the fault");
    }

    fn causes(&self, failure: Failure) -> Vec<Cause> {
        causes(&Subject {
            baseline: Some(&self.baseline),
            ..subject(&self.own.context, at(1), failure)
        })
    }
}

/// Waits until the kernel's counters are current. They may be 10 ms old.
fn counters_settle() {
    std::thread::sleep(Duration::from_millis(20));
}

fn subject(context: &Context, peer: Option<SocketAddr>, failure: Failure) -> Subject<'_> {
    Subject { context, port: 1, local: at(2), peer, baseline: None, failure }
}

#[track_caller]
fn check_best_cause(causes: &[Cause], likelihood: Likelihood, what: &[&str], evidence: &str) {
    let best = causes.first().expect("a cause");
    assert_eq!(best.likelihood, likelihood, "{causes:#?}");
    assert!(what.iter().any(|what| best.what.contains(what)), "{what:?}: {causes:#?}");
    assert!(best.evidence.contains(evidence), "{evidence:?}: {causes:#?}");
}

#[test]
fn peer_interface_down() {
    let link = Link::up();
    let _fault = fault("ip link set h1 down", "ip link set h1 up");
    let failure = link.failure();
    assert_eq!(failure, Failure::Completion(Status::RETRY_EXCEEDED));
    check_best_cause(
        &link.causes(failure),
        Likelihood::Certain,
        &["the peer's interface h1 is down"],
        "on rxe1",
    );
    // The interface of a peer on another host cannot be inspected: that peer is only silent.
    let remote =
        Subject { baseline: Some(&link.baseline), ..subject(&link.own.context, None, failure) };
    let silent =
        ["nothing arrives here, from the peer or anybody else", "the peer does not answer"];
    check_best_cause(&causes(&remote), Likelihood::Likely, &silent, "h2 has carrier");
}

#[test]
fn black_hole() {
    let link = Link::up();
    let _fault = fault("tc qdisc add dev p2 root netem loss 100%", "tc qdisc del dev p2 root");
    let failure = link.failure();
    assert_eq!(failure, Failure::Completion(Status::RETRY_EXCEEDED));
    // Frames of other protocols may or may not arrive, so either cause is right.
    let silent =
        ["nothing arrives here, from 10.0.0.1 or anybody else", "10.0.0.1 does not answer"];
    let causes = link.causes(failure);
    check_best_cause(
        &causes,
        Likelihood::Likely,
        &silent,
        "packets and received none; completer_retry_err +",
    );
    check_best_cause(
        &causes,
        Likelihood::Likely,
        &silent,
        "the next host on the way is in the ARP table",
    );
}

#[test]
fn own_interface_down() {
    let link = Link::up();
    let _fault = fault("ip link set h2 down", "ip link set h2 up");
    let failure = link.failure();
    check_best_cause(
        &link.causes(failure),
        Likelihood::Certain,
        &["the local interface h2 is down"],
        "rxe2 is down",
    );
}

#[test]
fn own_carrier_lost() {
    let link = Link::up();
    let _fault = fault("ip link set p2 down", "ip link set p2 up");
    let failure = link.failure();
    check_best_cause(
        &link.causes(failure),
        Likelihood::Certain,
        &["h2 has no carrier"],
        "h2 is lowerlayerdown",
    );
}

#[test]
fn own_address_removed() {
    let link = Link::up();
    let _fault = fault("ip addr del 10.0.0.2/24 dev h2", "ip addr add 10.0.0.2/24 dev h2");
    let failure = link.failure();
    let lost = ["10.0.0.2 is no longer an address of rxe2"];
    check_best_cause(&link.causes(failure), Likelihood::Certain, &lost, "its addresses: ");
}

#[test]
fn grant_revoked() {
    let link = Link::up();
    let granted =
        link.peer.qp.domain().allocate(64, Access::LOCAL | Access::REMOTE_WRITE).expect("region");
    let target = granted.remote(0..64);
    drop(granted);
    let status = link.own.run(SendRequest::write(1, &[link.own.region.sge(0..64)], target));
    assert_eq!(status, Status::REMOTE_ACCESS);
    let causes = link.causes(Failure::Completion(status));
    check_best_cause(
        &causes,
        Likelihood::Likely,
        &["10.0.0.1 has revoked the grant"],
        "remote access error",
    );
}

#[test]
fn peer_posts_no_receives() {
    let link = Link::up();
    let status = link.own.run(SendRequest::send(1, &[link.own.region.sge(0..64)]));
    assert_eq!(status, Status::RNR_RETRY_EXCEEDED);
    counters_settle();
    let causes = link.causes(Failure::Completion(status));
    check_best_cause(
        &causes,
        Likelihood::Likely,
        &["the process at 10.0.0.1 has no receives posted"],
        "rcvd_rnr_err +",
    );
}

#[test]
fn queue_pair_stopped_locally() {
    let link = Link::up();
    link.own.qp.stop().expect("stop the queue pair");
    let failure = link.failure();
    assert_eq!(failure, Failure::Completion(Status::FLUSHED));
    let causes = link.causes(failure);
    check_best_cause(
        &causes,
        Likelihood::Likely,
        &["this side stopped the queue pair"],
        "the local port is active",
    );
}

#[test]
fn no_host_has_the_address() {
    let context = End::new(HOSTS[0]).context;
    let peer = at(77).expect("an address");
    let outcome = cm::resolve(&verbs(), at(2), peer, Duration::from_secs(2));
    assert!(outcome.is_err(), "no host has the address");
    let causes = causes(&subject(&context, Some(peer), Failure::ConnectTimeout));
    let down = ["the host 10.0.0.77 is down, cut off, or has lost its address"];
    check_best_cause(&causes, Likelihood::Likely, &down, "10.0.0.77 does not answer ARP on h2");
}

/// When a port fails, all its links fail, and one thread has to diagnose them all.
#[test]
fn diagnoses_a_thousand_links_quickly() {
    let link = Link::up();
    let _fault = fault("ip link set h2 down", "ip link set h2 up");
    let failure = link.failure();
    let start = Instant::now();
    for _ in 0..1000 {
        check_best_cause(
            &link.causes(failure),
            Likelihood::Certain,
            &["the local interface h2 is down"],
            "",
        );
    }
    // Without shared results, the loop would take 3 s in the fastest guest. With shared results, it
    // takes 1 s even in an emulated guest.
    assert!(start.elapsed() < Duration::from_secs(3), "took {:?}", start.elapsed());
}
