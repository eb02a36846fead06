//! Connecting and disconnecting: the handshake with its private data, rejections and settings.

use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::{
    Access, CmEventKind, ConnectParams, ErrorKind, GidType, Path, PeerAddress, QueuePairAttributes,
    RejectReason, SendRequest, State, Status,
};

use super::pair::{Mode, Pair, PairConfig, Parts, params, pattern};
use super::{Fixture, Host, TIMEOUT};

const ACCESS: Access = Access::LOCAL;

pub(crate) fn exchanges_private_data(fixture: &Fixture) {
    let config = PairConfig::default();
    let [host, peer] = &fixture.hosts;
    let listener = Listener::bind(&fixture.verbs, host.any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("an address");
    assert_eq!(listener.id().device(), Some((host.device.clone(), 1)));
    let (asked, answered) =
        (pattern(1, cm::REQUEST_PRIVATE_DATA_MAX), pattern(2, cm::ACCEPT_PRIVATE_DATA_MAX));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let event =
                listener.id().channel().wait_event(TIMEOUT).expect("events").expect("a request");
            assert_eq!((event.kind, event.id), (CmEventKind::CONNECT_REQUEST, listener.id().key()));
            let request = event.request.expect("a request");
            assert_eq!(request.private_data, asked);
            assert_eq!((request.reads_in_wanted, request.reads_out_max), (3, 5));
            assert_eq!(request.id.peer_addr().map(|addr| addr.ip()), Some(peer.ip));
            let parts = Parts::new(fixture, host, &config);
            let params = ConnectParams { private_data: &answered, ..params(&config) };
            cm::accept(&request, &parts.qp, ACCESS, &params, TIMEOUT).expect("accept");
            let disconnected =
                listener.id().channel().wait_event(TIMEOUT).expect("events").expect("an event");
            assert_eq!(
                (disconnected.kind, disconnected.id),
                (CmEventKind::DISCONNECTED, request.id.key())
            );
        });
        let id =
            cm::resolve(&fixture.verbs, Some(peer.any_port()), target, TIMEOUT).expect("resolve");
        assert_eq!(id.device(), Some((peer.device.clone(), 1)));
        assert_eq!(id.local_addr().map(|addr| addr.ip()), Some(peer.ip));
        let parts = Parts::new(fixture, peer, &config);
        let params = ConnectParams { private_data: &asked, ..params(&config) };
        let data = cm::connect(&id, &parts.qp, ACCESS, &params, TIMEOUT).expect("connect");
        assert_eq!(data, answered);
        assert_eq!(parts.qp.state().expect("state"), State::READY_TO_SEND);
        id.disconnect().expect("disconnect");
    });
}

/// Runs `answer` on the passive side and returns the error of the connect.
fn connect_against(
    fixture: &Fixture,
    answer: impl FnOnce(ferrite_verbs::ConnectionRequest) + Send,
) -> ferrite_verbs::Error {
    let config = PairConfig::default();
    let [host, peer] = &fixture.hosts;
    let listener = Listener::bind(&fixture.verbs, host.any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("an address");
    std::thread::scope(|scope| {
        scope.spawn(|| answer(listener.next_request(TIMEOUT).expect("events").expect("a request")));
        let id =
            cm::resolve(&fixture.verbs, Some(peer.any_port()), target, TIMEOUT).expect("resolve");
        let parts = Parts::new(fixture, peer, &config);
        cm::connect(&id, &parts.qp, ACCESS, &params(&config), TIMEOUT).expect_err("a rejection")
    })
}

pub(crate) fn rejection_carries_private_data(fixture: &Fixture) {
    let why = b"maxclients reached";
    let error = connect_against(fixture, |request| request.id.reject(why).expect("reject"));
    assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
    let rejection = error.rejection().expect("a rejection");
    assert_eq!(rejection.reason, RejectReason::BY_APPLICATION);
    assert!(rejection.private_data.starts_with(why), "{:?}", rejection.private_data);
}

pub(crate) fn dropping_a_request_rejects_it(fixture: &Fixture) {
    let error = connect_against(fixture, drop);
    assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
}

pub(crate) fn connect_without_a_listener_is_rejected(fixture: &Fixture) {
    let config = PairConfig::default();
    let [host, peer] = &fixture.hosts;
    // Use a port that a listener has just released, so that nothing listens on it.
    let listener = Listener::bind(&fixture.verbs, host.any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("an address");
    drop(listener);
    let id = cm::resolve(&fixture.verbs, Some(peer.any_port()), target, TIMEOUT).expect("resolve");
    let parts = Parts::new(fixture, peer, &config);
    let error =
        cm::connect(&id, &parts.qp, ACCESS, &params(&config), TIMEOUT).expect_err("a rejection");
    assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
    assert!(error.to_string().contains("no program listens"), "{error}");
}

pub(crate) fn disconnect_reaches_both_sides(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    for end in &pair.ends {
        end.receive_into(3, 0..64);
    }
    pair.ends[1].id.disconnect().expect("disconnect");
    for end in &pair.ends {
        let event = end.id.channel().wait_event(TIMEOUT).expect("events").expect("an event");
        assert_eq!((event.kind, event.id), (CmEventKind::DISCONNECTED, end.id.key()));
        // On `ends[0]`, this call confirms the disconnect. On `ends[1]`, which requested it, the
        // connection has already ended, and the call may fail.
        let _ = end.id.disconnect();
        end.qp.stop().expect("stop");
        assert_eq!(end.reap(Mode::Poll).status(), Status::FLUSHED);
        assert_eq!(end.qp.state().expect("state"), State::ERROR);
    }
}

pub(crate) fn settings_apply_to_the_queue_pair(fixture: &Fixture) {
    let config = PairConfig { ack_timeout: 17, retries: 5, rnr_retries: 3, ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let path = pair.ends[1].qp.path().expect("path");
    assert_eq!((path.ack_timeout, path.retries, path.rnr_timer), (17, 5, 12), "{path:?}");
    assert!(path.mtu.bytes() >= 1024, "{path:?}");
    // In the handshake, each side announces how often its peer resends if no receive is posted.
    assert_eq!(pair.ends[0].qp.path().expect("path").rnr_retries, 3);
    let id = fixture
        .verbs
        .open_event_channel()
        .and_then(|channel| channel.create_id())
        .expect("identifier");
    id.set_tos(0x68).expect("tos");
    id.set_reuse_address().expect("reuse");
}

pub(crate) fn rejects_a_port_in_use(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    let listener = Listener::bind(&fixture.verbs, host.any_port(), 4).expect("listen");
    let taken = listener.id().local_addr().expect("an address");
    let error = Listener::bind(&fixture.verbs, taken, 4).expect_err("the port is taken");
    assert_eq!(error.kind(), ErrorKind::AddressInUse, "{error}");
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
}

pub(crate) fn rejects_an_address_of_another_host(fixture: &Fixture) {
    let elsewhere = Host::new("none", "192.0.2.1").any_port();
    let error =
        Listener::bind(&fixture.verbs, elsewhere, 4).expect_err("another host has the address");
    assert_eq!(error.kind(), ErrorKind::NoRoute, "{error}");
}

pub(crate) fn rejects_too_long_private_data(fixture: &Fixture) {
    let id = fixture
        .verbs
        .open_event_channel()
        .and_then(|channel| channel.create_id())
        .expect("identifier");
    let data = [0; cm::REQUEST_PRIVATE_DATA_MAX + 1];
    let params = ConnectParams { private_data: &data, ..params(&PairConfig::default()) };
    let error = id.connect(&params).expect_err("the private data is too long");
    assert_eq!(error.kind(), ErrorKind::Misuse);
    assert!(error.to_string().contains("57 bytes of private data, but only 56 fit"), "{error}");
}

/// The queue pairs are connected with exchanged addresses, without RDMA CM.
pub(crate) fn connects_without_cm(fixture: &Fixture) {
    let config = PairConfig::default();
    let mut sides: Vec<_> =
        fixture.hosts.iter().map(|host| (host, Parts::new(fixture, host, &config))).collect();
    let addresses: Vec<_> = sides
        .iter()
        .map(|(host, parts)| {
            let gids = parts.context.gids().expect("addresses");
            let mine = gids
                .iter()
                .find(|entry| entry.gid.ip() == host.ip && entry.kind == GidType::ROCE_V2);
            let mine = mine.expect("the host's address as RoCE v2");
            let psn = 1000 + parts.qp.number();
            (
                PeerAddress { qp_num: parts.qp.number(), psn, gid: mine.gid, lid: 0 },
                mine.index as u8,
            )
        })
        .collect();
    for (at, (_, parts)) in sides.iter().enumerate() {
        let (own, gid_index) = addresses[at];
        let (peer, _) = addresses[1 - at];
        let path =
            Path { mtu: parts.context.port(1).expect("port").active_mtu, ..Default::default() };
        parts.qp.modify(&QueuePairAttributes::init(1, config.access)).expect("init");
        parts
            .qp
            .modify(&QueuePairAttributes::connect_to(&peer, 1, gid_index, &path, 4))
            .expect("RTR");
        parts.qp.modify(&QueuePairAttributes::ready_to_send(own.psn, &path, 4)).expect("RTS");
        assert_eq!(parts.qp.state().expect("state"), State::READY_TO_SEND);
    }
    let bytes = pattern(5, 5000);
    sides[0].1.region.write(0, &bytes);
    let (from, to) = (&sides[0].1, &sides[1].1);
    let target = to.region.remote(0..5000);
    from.qp
        .post_send(&[SendRequest::write(1, &[from.region.sge(0..5000)], target).signaled()])
        .expect("post");
    let mut out = [ferrite_verbs::WorkCompletion::default()];
    assert_eq!(from.cq.wait(&mut out, TIMEOUT).expect("wait"), 1);
    assert_eq!(out[0].status(), Status::SUCCESS);
    assert_eq!(to.region.to_vec(0, 5000), bytes);
}
