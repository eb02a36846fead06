//! Connections on the fake provider: the connection manager, silent peers, and broken connections.

use std::time::{Duration, Instant};

use ferrite_testkit::Random;
use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::fake::Objects;
use ferrite_verbs::{
    Access, CmEventKind, ConnectParams, ErrorKind, Gid, Path, PeerAddress, QueuePairAttributes,
    RejectReason, SendRequest, State, Status, WorkCompletion,
};

use crate::suite::TIMEOUT;
use crate::suite::pair::{Mode, Pair, PairConfig, Parts, params};
use crate::{EIO, EMFILE, ENOSYS, ETIMEDOUT, NOW, cm_events, fails, world, write_64};

#[test]
fn every_call_of_the_connection_manager_can_fail() {
    let (world, fixture) = world();
    let [host, peer] = &fixture.hosts;
    let (config, io) = (PairConfig::default(), ErrorKind::DeviceGone);
    let channel = fixture.verbs.open_event_channel().expect("channel");
    fails(&world, "rdma_create_id", EMFILE, ErrorKind::FileDescriptors, || channel.create_id());
    let listener = channel.create_id().expect("identifier");
    fails(&world, "rdma_set_option", ENOSYS, ErrorKind::System, || listener.set_tos(1));
    fails(&world, "rdma_bind_addr", EIO, ErrorKind::NoRoute, || listener.bind(host.any_port()));
    listener.bind(host.any_port()).expect("bind");
    fails(&world, "rdma_listen", EIO, io, || listener.listen(4));
    listener.listen(4).expect("listen");
    let target = listener.local_addr().expect("address");
    let id = channel.create_id().expect("identifier");
    fails(&world, "rdma_resolve_addr", EIO, ErrorKind::NoRoute, || {
        id.resolve_address(None, target, TIMEOUT)
    });
    let id = cm::resolve(&fixture.verbs, Some(peer.any_port()), target, TIMEOUT).expect("resolve");
    let params = ConnectParams { qp_num: 0x99, reads_out: 2, reads_in: 3, ..params(&config) };
    fails(&world, "rdma_connect", EIO, io, || id.connect(&params));
    id.connect(&params).expect("connect");
    fails(&world, "rdma_get_cm_event", EIO, io, || channel.next_event());
    let request =
        channel.next_event().expect("events").expect("a request").request.expect("a request");
    assert_eq!((request.reads_in_wanted, request.reads_out_max, request.qp_num), (2, 3, 0x99));
    fails(&world, "rdma_init_qp_attr", EIO, io, || request.id.queue_pair_attributes(State::INIT));
    fails(&world, "rdma_accept", EIO, io, || request.id.accept(&params));
    fails(&world, "rdma_reject", EIO, io, || request.id.reject(&[]));
    request.id.accept(&params).expect("accept");
    let response = id.channel().next_event().expect("events").expect("an answer");
    assert_eq!((response.kind, response.private_data.len()), (CmEventKind::CONNECT_RESPONSE, 196));
    fails(&world, "rdma_establish", EIO, io, || id.establish());
    id.establish().expect("establish");
    fails(&world, "rdma_disconnect", EIO, io, || id.disconnect());
    assert_eq!(listener.disconnect().map_err(|error| error.kind()), Err(ErrorKind::Misuse));
}

#[test]
fn black_hole() {
    let (world, fixture) = world();
    let pair = Pair::new(&fixture);
    let [to, from] = &pair.ends;
    // This send waits for a receive, and fails when the black hole begins.
    from.post(SendRequest::send(9, &[from.region.sge(0..8)]));
    world.black_hole("fake1", "fake2");
    let failed = from.reap(Mode::Poll).ok().expect_err("the send must fail");
    assert_eq!((failed.status, failed.wr_id), (Status::RETRY_EXCEEDED, 9));
    assert_eq!(write_64(from, to), Status::FLUSHED);
    // The peer does not answer the handshake, so the caller's deadline ends it.
    let listener = Listener::bind(&fixture.verbs, fixture.hosts[0].any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("address");
    let id = cm::resolve(&fixture.verbs, Some(fixture.hosts[1].any_port()), target, TIMEOUT)
        .expect("resolve");
    let parts = Parts::new(&fixture, &fixture.hosts[1], &PairConfig::default());
    let (start, deadline) = (Instant::now(), Duration::from_millis(50));
    let error =
        cm::connect(&id, &parts.qp, Access::LOCAL, &params(&PairConfig::default()), deadline);
    assert_eq!(error.expect_err("the peer does not answer").kind(), ErrorKind::Timeout);
    assert!(start.elapsed() >= deadline);
    assert!(listener.next_request(NOW).expect("events").is_none());
    // The disconnect does not reach the peer.
    from.id.disconnect().expect("disconnect");
    let event = from.id.channel().next_event().expect("events").expect("an event");
    assert_eq!((event.kind, event.status), (CmEventKind::DISCONNECTED, -ETIMEDOUT));
    assert_eq!(cm_events(to), []);
    world.heal("fake1", "fake2");
    let second_pair = Pair::new(&fixture);
    assert_eq!(write_64(&second_pair.ends[0], &second_pair.ends[1]), Status::SUCCESS);
}

/// Without RDMA CM, one side may send before its peer is ready. The request waits until the peer is
/// ready. Without an ack timeout, a request also waits until a black hole ends.
#[test]
fn requests_without_a_timeout_wait_for_the_peer() {
    let (world, fixture) = world();
    let parts = [0, 1].map(|at| Parts::new(&fixture, &fixture.hosts[at], &PairConfig::default()));
    let path = Path { ack_timeout: 0, ..Default::default() };
    let bring_up = |at: usize| {
        let std::net::IpAddr::V4(ip) = fixture.hosts[1 - at].ip else {
            panic!("the hosts have IPv4 addresses")
        };
        let (qp_num, gid) = (parts[1 - at].qp.number(), Gid(ip.to_ipv6_mapped().octets()));
        let peer = PeerAddress { qp_num, psn: 0, gid, lid: 0 };
        parts[at]
            .qp
            .modify(&QueuePairAttributes::init(1, PairConfig::default().access))
            .expect("INIT");
        parts[at].qp.modify(&QueuePairAttributes::connect_to(&peer, 1, 1, &path, 1)).expect("RTR");
        parts[at].qp.modify(&QueuePairAttributes::ready_to_send(0, &path, 1)).expect("RTS");
    };
    let [from, to] = &parts;
    let done = || from.cq.poll(&mut [WorkCompletion::default()]).expect("poll");
    let piece = [from.region.sge(0..64)];
    let request = SendRequest::write(1, &piece, to.region.remote(0..64)).signaled();
    bring_up(0);
    from.qp.post_send(&[request]).expect("post");
    assert_eq!(done(), 0, "the peer is not ready");
    bring_up(1);
    assert_eq!(done(), 1);
    world.black_hole("fake1", "fake2");
    from.qp.post_send(&[request]).expect("post");
    assert_eq!(done(), 0);
    world.heal("fake1", "fake2");
    assert_eq!(done(), 1);
    let unknown_peer = PeerAddress { qp_num: 1, psn: 0, gid: Gid([0x20; 16]), lid: 0 };
    let lost = Parts::new(&fixture, &fixture.hosts[0], &PairConfig::default());
    lost.qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("INIT");
    let error = lost
        .qp
        .modify(&QueuePairAttributes::connect_to(&unknown_peer, 1, 1, &path, 1))
        .expect_err("no device has the address");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
}

/// If one side gives up during a handshake, its peer gets a rejection.
#[test]
fn abandoned_handshake_is_reported_to_the_other_side() {
    let (world, fixture) = world();
    let [host, peer] = &fixture.hosts;
    let everywhere = "0.0.0.0:0".parse().expect("an address");
    let listener = Listener::bind(&fixture.verbs, everywhere, 1).expect("listen");
    assert_eq!(listener.id().device(), None);
    let port = listener.id().local_addr().expect("address").port();
    let target = std::net::SocketAddr::new(host.ip, port);
    let params = params(&PairConfig::default());
    let ask = || {
        // Without a source address, the fake uses the device that does not have the target address.
        let id = cm::resolve(&fixture.verbs, None, target, TIMEOUT).expect("resolve");
        assert_eq!(id.local_addr().map(|addr| addr.ip()), Some(peer.ip));
        id.connect(&params).expect("connect");
        id
    };
    let answer = |id: &ferrite_verbs::CmId| {
        id.channel().next_event().expect("events").map(|event| (event.kind, event.reject_reason()))
    };
    let refused = Some((CmEventKind::REJECTED, Some(RejectReason::BY_APPLICATION)));
    let (first, second) = (ask(), ask());
    assert_eq!(
        (answer(&first), answer(&second)),
        (None, refused),
        "the backlog has room for one request"
    );
    // If the connecting side gives up, the holder of the request gets an event, and can no longer
    // accept the request.
    let request = listener.next_request(NOW).expect("events").expect("a request");
    drop(first);
    let event = listener.id().channel().next_event().expect("events").expect("an event");
    assert_eq!((event.kind, event.status, event.id), (CmEventKind::REJECTED, 4, request.id.key()));
    assert_eq!(request.id.accept(&params).map_err(|error| error.kind()), Err(ErrorKind::Misuse));
    // Dropping the listener rejects a request that was not fetched.
    let third = ask();
    drop(listener);
    assert_eq!(answer(&third), refused);
    drop((request, second, third));
    assert_eq!(world.objects(), Objects::default());
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

/// The test creates connections, uses them at random, breaks some, and drops their objects in
/// random order. Nothing may be left.
#[test]
fn a_thousand_connections_leave_nothing() {
    let (world, fixture) = world();
    let (mut random, fds) = (Random::new(0x5eed), open_fds());
    let config = PairConfig { region_bytes: 4096, ..Default::default() };
    for number in 0..1000 {
        let config =
            PairConfig { srq_receives: (random.below(2) == 0).then_some(8), ..config.clone() };
        let pair = Pair::with(&fixture, &config);
        let [to, from] = &pair.ends;
        for _ in 0..random.below(4) {
            from.receive_into(1, 0..64);
            to.post(SendRequest::send(2, &[to.region.sge(0..64)]));
        }
        match random.below(6) {
            0 => drop(world.break_queue_pair(to.qp.number())),
            1 => from.id.disconnect().expect("disconnect"),
            2 => to.qp.stop().expect("stop"),
            3 => world.black_hole("fake1", "fake2"),
            4 => assert_eq!(write_64(to, from), Status::SUCCESS, "connection {number}"),
            _ => {}
        }
        let mut pieces = pair.into_pieces();
        random.shuffle(&mut pieces);
        drop(pieces);
        world.heal("fake1", "fake2");
        assert_eq!(world.objects(), Objects::default(), "connection {number}");
    }
    assert_eq!(open_fds(), fds);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
