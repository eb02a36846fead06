//! The suite on the fake provider, and tests of faults that the fake provider imitates.
#![cfg(feature = "fake")]

mod suite;
mod fake_verbs {
    mod connections;
}

use std::time::Duration;

use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use ferrite_verbs::{
    Absence, Access, AsyncEventKind, CmEventKind, Error, ErrorKind, Operation, QueuePairAttributes,
    QueuePairConfig, RecvRequest, SendRequest, State, Status, Subject, WorkCompletion,
};
use suite::pair::{End, Mode, Pair, PairConfig};
use suite::{Fixture, Host, run_suite};

/// Creates a world with two hosts, `fake1` and `fake2`.
fn world() -> (World, Fixture) {
    let world = World::new();
    let hosts = [Host::new("fake1", "10.0.0.1"), Host::new("fake2", "10.0.0.2")];
    for host in &hosts {
        world.add_device(DeviceSpec::new(&host.device, host.ip));
    }
    let verbs = world.verbs();
    (world, Fixture { verbs, hosts })
}

fn fixture() -> Fixture {
    world().1
}

run_suite!(crate::fixture);

const NOW: Duration = Duration::ZERO;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EACCES: i32 = 13;
const ENODEV: i32 = 19;
const EMFILE: i32 = 24;
const ENOSYS: i32 = 38;
const ETIMEDOUT: i32 = 110;

fn write_64(from: &End, to: &End) -> Status {
    from.post(SendRequest::write(1, &[from.region.sge(0..64)], to.region.remote(0..64)).signaled());
    from.reap(Mode::Poll).status()
}

/// Returns the pending async events of an end.
fn async_events(end: &End) -> Vec<(AsyncEventKind, Subject)> {
    std::iter::from_fn(|| end.context.next_async_event().expect("events"))
        .map(|event| (event.kind, event.subject))
        .collect()
}

/// Returns the pending CM events of an end.
fn cm_events(end: &End) -> Vec<CmEventKind> {
    std::iter::from_fn(|| end.id.channel().next_event().expect("events"))
        .map(|event| event.kind)
        .collect()
}

/// Injects `errno` into `call`, and expects that `run` fails in `call` with an error of kind
/// `kind`.
fn fails<T>(
    world: &World,
    call: &'static str,
    errno: i32,
    kind: ErrorKind,
    run: impl FnOnce() -> Result<T, Error>,
) {
    world.fail_next(call, errno);
    let error = run().err().unwrap_or_else(|| panic!("{call} did not fail"));
    assert_eq!((error.kind(), error.raw_os_error()), (kind, Some(errno)), "{call}: {error}");
    assert_eq!(error.call(), call);
}

#[test]
fn every_creating_call_can_fail() {
    let (world, fixture) = world();
    let device = fixture.verbs.device("fake1").expect("device");
    fails(&world, "ibv_open_device", EACCES, ErrorKind::Permission, || device.open());
    let context = device.open().expect("open");
    fails(&world, "ibv_query_device", EIO, ErrorKind::DeviceGone, || context.limits());
    fails(&world, "ibv_query_port", EIO, ErrorKind::DeviceGone, || context.port(1));
    fails(&world, "ibv_query_gid_table", EIO, ErrorKind::DeviceGone, || context.gids());
    fails(&world, "ibv_alloc_pd", ENOMEM, ErrorKind::OutOfMemory, || {
        context.allocate_protection_domain()
    });
    let domain = context.allocate_protection_domain().expect("domain");
    fails(&world, "ibv_reg_mr", EAGAIN, ErrorKind::CgroupLimit, || {
        domain.allocate(4096, Access::LOCAL)
    });
    let ordering = Access::LOCAL | Access::RELAXED_ORDERING;
    fails(&world, "ibv_reg_mr", EAGAIN, ErrorKind::CgroupLimit, || domain.allocate(4096, ordering));
    domain.allocate(4096, ordering).expect("relaxed ordering is optional");
    fails(&world, "ibv_create_comp_channel", EMFILE, ErrorKind::FileDescriptors, || {
        context.create_completion_channel()
    });
    fails(&world, "ibv_create_cq", ENOMEM, ErrorKind::OutOfMemory, || {
        context.create_completion_queue(4, None, 0)
    });
    let cq = context.create_completion_queue(4, None, 0).expect("queue");
    fails(&world, "ibv_create_srq", ENOMEM, ErrorKind::OutOfMemory, || {
        domain.create_shared_receive_queue(4, 1)
    });
    let srq = domain.create_shared_receive_queue(4, 1).expect("shared queue");
    fails(&world, "ibv_modify_srq", EIO, ErrorKind::DeviceGone, || srq.arm_limit(1));
    fails(&world, "ibv_query_srq", EIO, ErrorKind::DeviceGone, || srq.armed_limit());
    let config = QueuePairConfig::new(&cq);
    fails(&world, "ibv_create_qp", EAGAIN, ErrorKind::CgroupLimit, || {
        domain.create_queue_pair(&config)
    });
    world.fail_next("ibv_create_qp", EAGAIN);
    let error = domain.create_queue_pair(&config).expect_err("the injected failure");
    assert!(error.to_string().contains("rdma.max), or the device is busy"), "{error}");
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("try again")), "{error}");
    let qp = domain.create_queue_pair(&config).expect("queue pair");
    fails(&world, "ibv_modify_qp", EAGAIN, ErrorKind::System, || {
        qp.modify(&QueuePairAttributes::init(1, Access::LOCAL))
    });
    fails(&world, "ibv_modify_qp", ETIMEDOUT, ErrorKind::Timeout, || {
        qp.modify(&QueuePairAttributes::init(1, Access::LOCAL))
    });
    fails(&world, "ibv_query_qp", EIO, ErrorKind::DeviceGone, || qp.state());
    fails(&world, "ibv_req_notify_cq", EIO, ErrorKind::DeviceGone, || cq.request_notify(false));
    world.fail_next("ibv_poll_cq", EIO);
    let error = cq.poll(&mut [WorkCompletion::default()]).expect_err("injected failure");
    assert_eq!((error.kind(), error.call()), (ErrorKind::System, "ibv_poll_cq"));
    fails(&world, "ibv_get_async_event", EIO, ErrorKind::DeviceGone, || context.next_async_event());
    drop((config, qp, srq, cq, domain, context, device));
    assert_eq!(world.objects(), Objects::default());
}

#[test]
fn reports_why_rdma_is_unavailable() {
    let (world, fixture) = world();
    world.fail_next("ibv_get_device_list", ENOSYS);
    let error = fixture.verbs.devices().expect_err("no kernel support");
    assert!(matches!(error.absence(), Some(Absence::NoKernel { .. })), "{error}");
    world.fail_next("rdma_create_event_channel", ENODEV);
    let error = fixture.verbs.open_event_channel().expect_err("no connection manager");
    assert!(matches!(error.absence(), Some(Absence::NoCm { .. })), "{error}");
    let error = World::new().verbs().devices().expect_err("no device");
    assert_eq!(error.absence(), Some(&Absence::NoDevice));
}

#[test]
fn failed_post_reports_how_many_were_posted() {
    let (world, fixture) = world();
    let pair = Pair::new(&fixture);
    let [to, from] = &pair.ends;
    let piece = [from.region.sge(0..8)];
    world.fail_next("ibv_post_send", ENOMEM);
    let error = from.qp.post_send(&[SendRequest::send(1, &piece)]).expect_err("injected failure");
    assert_eq!((error.posted, error.error.kind()), (0, ErrorKind::QueueFull));
    world.fail_next("ibv_post_recv", ENOMEM);
    let error = to.qp.post_recv(&[RecvRequest::new(1, &[])]).expect_err("injected failure");
    assert_eq!((error.posted, error.error.kind()), (0, ErrorKind::QueueFull));
    // The second request of the chain has too many pieces.
    let wide = [piece[0]; 5];
    let remote = to.region.remote(0..64);
    let chain = [
        SendRequest::write(1, &piece, remote).signaled(),
        SendRequest::write(2, &wide, remote),
        SendRequest::write(3, &piece, remote),
    ];
    let error = from.qp.post_send(&chain).expect_err("the second request has too many pieces");
    assert_eq!((error.posted, error.error.kind()), (1, ErrorKind::Misuse));
    assert_eq!(from.reap(Mode::Poll).wr_id(), 1);
}

/// A polled completion frees the entry of its own request and those of earlier unsignaled ones.
#[test]
fn unsignaled_sends_keep_their_queue_entries() {
    let pair = Pair::with(&fixture(), &PairConfig { max_send_wr: 4, ..Default::default() });
    let [to, from] = &pair.ends;
    let piece = [from.region.sge(0..8)];
    let write = |wr_id| SendRequest::write(wr_id, &piece, to.region.remote(0..8));
    for _ in 0..3 {
        from.qp.post_send(&[write(1), write(2), write(3), write(4).signaled()]).expect("four fit");
        let error = from
            .qp
            .post_send(&[write(5)])
            .expect_err("the queue is full until the completion is reaped");
        assert_eq!(error.error.kind(), ErrorKind::QueueFull);
        assert_eq!(from.reap(Mode::Poll).wr_id(), 4);
    }
    from.qp.post_send(&[write(1), write(2), write(3), write(4)]).expect("four fit");
    assert!(from.qp.post_send(&[write(5)]).is_err(), "nothing was signaled, so no entry is freed");
    from.qp.stop().expect("stop");
    assert!(from.reap_within(Mode::Poll, NOW).is_none(), "writes that succeeded are not flushed");
}

#[test]
fn peer_port_goes_down_and_comes_back() {
    let (world, fixture) = world();
    let pair = Pair::new(&fixture);
    let [to, from] = &pair.ends;
    assert_eq!(write_64(from, to), Status::SUCCESS);
    world.device_down("fake1");
    assert_eq!(write_64(from, to), Status::RETRY_EXCEEDED);
    assert_eq!(from.qp.state().expect("state"), State::ERROR);
    assert_eq!(async_events(to), [(AsyncEventKind::PORT_ERROR, Subject::Port(1))]);
    let absence = to.context.active_port().expect_err("the port is down");
    assert!(matches!(absence.absence(), Some(Absence::PortDown { .. })), "{absence}");
    world.device_up("fake1");
    assert_eq!(async_events(to), [(AsyncEventKind::PORT_ACTIVE, Subject::Port(1))]);
    assert_eq!(async_events(from), []);
    let second_pair = Pair::new(&fixture);
    assert_eq!(write_64(&second_pair.ends[1], &second_pair.ends[0]), Status::SUCCESS);
}

#[test]
fn own_port_down_fails_requests() {
    let (world, fixture) = world();
    let pair = Pair::new(&fixture);
    let [to, from] = &pair.ends;
    world.device_down("fake2");
    assert_eq!(write_64(from, to), Status::LOCAL_QP_OPERATION);
    assert_eq!(write_64(from, to), Status::FLUSHED);
    let listener = Listener::bind(&fixture.verbs, fixture.hosts[0].any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("address");
    let error = cm::resolve(&fixture.verbs, Some(fixture.hosts[1].any_port()), target, NOW)
        .expect_err("the port is down");
    assert_eq!(error.kind(), ErrorKind::NoRoute, "{error}");
}

#[test]
fn device_removal_is_reported() {
    let (world, fixture) = world();
    let pair = Pair::new(&fixture);
    let [to, from] = &pair.ends;
    from.receive_into(1, 0..64);
    world.remove_device("fake2");
    assert_eq!(async_events(from), [(AsyncEventKind::DEVICE_FATAL, Subject::Device)]);
    assert_eq!(cm_events(from), [CmEventKind::DEVICE_REMOVAL]);
    assert_eq!(cm_events(to), [CmEventKind::DISCONNECTED]);
    assert_eq!(from.reap(Mode::Poll).status(), Status::FLUSHED);
    for error in [
        from.context.create_completion_queue(16, None, 0).expect_err("the device is gone"),
        from.context.allocate_protection_domain().expect_err("the device is gone"),
        from.domain.allocate(64, Access::LOCAL).expect_err("the device is gone"),
        from.context.limits().expect_err("the device is gone"),
        from.qp.state().expect_err("the device is gone"),
    ] {
        assert_eq!(error.kind(), ErrorKind::DeviceGone, "{error}");
    }
    assert_eq!(write_64(to, from), Status::RETRY_EXCEEDED);
    assert_eq!(fixture.verbs.devices().expect("the other device").len(), 1);
    drop(pair);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

#[test]
fn broken_queue_pair_is_flushed_in_order() {
    let (world, fixture) = world();
    let pair = Pair::new(&fixture);
    let [to, from] = &pair.ends;
    let piece = [from.region.sge(0..8)];
    for wr_id in 1..=3 {
        from.post(SendRequest::send(wr_id, &piece));
        from.receive_into(10 + wr_id, 0..8);
    }
    from.cq.request_notify(true).expect("arm");
    assert!(world.break_queue_pair(from.qp.number()));
    assert!(!world.break_queue_pair(0xdead));
    assert_eq!(
        async_events(from),
        [(AsyncEventKind::QP_FATAL, Subject::QueuePair(from.qp.number()))]
    );
    assert_eq!(
        from.channel.next_event().expect("events"),
        Some(from.cq.key()),
        "a failed completion must wake a waiter for solicited completions"
    );
    let flushed: Vec<_> =
        std::iter::from_fn(|| from.reap_within(Mode::Poll, Duration::from_millis(1)))
            .map(|wc| (wc.wr_id(), wc.status()))
            .collect();
    assert_eq!(flushed, [1, 2, 3, 11, 12, 13].map(|wr_id| (wr_id, Status::FLUSHED)));
    assert_eq!(write_64(to, from), Status::RETRY_EXCEEDED);
}

#[test]
fn responder_gets_an_event_for_a_refused_access() {
    let config = PairConfig {
        srq_receives: Some(8),
        region_access: Access::REMOTE_READ,
        ..Default::default()
    };
    let pair = Pair::with(&fixture(), &config);
    let [to, from] = &pair.ends;
    assert_eq!(write_64(from, to), Status::REMOTE_ACCESS);
    assert_eq!(to.qp.state().expect("state"), State::ERROR);
    let qp = Subject::QueuePair(to.qp.number());
    assert_eq!(
        async_events(to),
        [(AsyncEventKind::QP_ACCESS_ERROR, qp), (AsyncEventKind::LAST_RECEIVE, qp)]
    );
    // A write with immediate data fails if no receive is posted.
    let pair = Pair::with(&fixture(), &PairConfig { rnr_retries: 0, ..Default::default() });
    let [to, from] = &pair.ends;
    let operation = Operation::WriteImm(to.region.remote(0..8), 7);
    from.post(SendRequest::new(1, operation, &[from.region.sge(0..8)]));
    assert_eq!(from.reap(Mode::Poll).status(), Status::RNR_RETRY_EXCEEDED);
}

#[test]
fn worlds_are_isolated_and_outlive_their_handles() {
    let ((here, fixture), there) = (world(), World::new());
    there.add_device(DeviceSpec::new("fake3", "10.0.0.3".parse().expect("an address")));
    let target = Host::new("fake3", "10.0.0.3").any_port();
    let error =
        cm::resolve(&fixture.verbs, None, target, NOW).expect_err("the peer is in another world");
    assert_eq!(error.kind(), ErrorKind::NoRoute, "{error}");
    let pair = Pair::new(&fixture);
    drop((here, there, fixture));
    assert_eq!(write_64(&pair.ends[0], &pair.ends[1]), Status::SUCCESS);
    pair.ends[0].id.disconnect().expect("disconnect");
    assert_eq!(cm_events(&pair.ends[1]), [CmEventKind::DISCONNECTED]);
}
