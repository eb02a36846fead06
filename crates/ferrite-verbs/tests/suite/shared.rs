//! Objects that are shared: receive queues, channels, and parents kept alive by their children.

use std::collections::BTreeSet;
use std::time::Instant;

use ferrite_verbs::{
    Access, AsyncEventKind, QueuePairAttributes, QueuePairConfig, RecvRequest, SendRequest, State,
    Status, Subject,
};

use super::pair::{Mode, Pair, PairConfig, Parts, pattern};
use super::{Fixture, TIMEOUT};

pub(crate) fn shared_receive_queue_serves_two_queue_pairs(fixture: &Fixture) {
    for (from, to, mode) in [(1, 0, Mode::Poll), (0, 1, Mode::Event)] {
        let config = PairConfig { srq_receives: Some(32), ..Default::default() };
        let mut pair = Pair::with(fixture, &config);
        let to_end = &pair.ends[to];
        let srq = to_end.srq.clone().expect("a shared queue");
        assert!(to_end.qp.uses_srq());
        let refused = to_end
            .qp
            .post_recv(&[RecvRequest::new(1, &[])])
            .expect_err("the queue pair has a shared queue");
        assert_eq!(refused.error.kind(), ferrite_verbs::ErrorKind::Misuse);
        // A second queue pair uses the same shared queue, but is not connected.
        let second = QueuePairConfig { srq: Some(srq.clone()), ..QueuePairConfig::new(&to_end.cq) };
        let second = to_end.domain.create_queue_pair(&second).expect("queue pair");
        second.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("init");
        for wr_id in 0..8 {
            to_end.receive_into(wr_id, wr_id as usize * 64..wr_id as usize * 64 + 64);
        }
        for wr_id in 0..8_u8 {
            pair.ends[from].region.write(0, &pattern(wr_id, 64));
            let (from, to) = (&pair.ends[from], &pair.ends[to]);
            from.post(SendRequest::send(1, &[from.region.sge(0..64)]).signaled());
            assert_eq!(from.reap(mode).status(), Status::SUCCESS);
            let got = to.reap(mode);
            assert_eq!(
                (got.status(), got.wr_id(), got.qp_num()),
                (Status::SUCCESS, wr_id.into(), to.qp.number())
            );
            assert_eq!(to.region.to_vec(usize::from(wr_id) * 64, 64), pattern(wr_id, 64));
        }
        // The queue pair fails, but the shared queue stays usable.
        pair.ends[to].qp.stop().expect("stop");
        assert_eq!(pair.ends[to].qp.state().expect("state"), State::ERROR);
        srq.post_recv(&[RecvRequest::new(9, &[])]).expect("post");
    }
}

pub(crate) fn shared_receive_queue_limit_raises_an_event(fixture: &Fixture) {
    let config = PairConfig { srq_receives: Some(32), ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let [to, from] = &pair.ends;
    let srq = to.srq.as_ref().expect("a shared queue");
    for wr_id in 0..6 {
        to.receive_into(wr_id, 0..64);
    }
    srq.arm_limit(4).expect("arm");
    assert_eq!(srq.armed_limit().expect("query"), 4);
    let piece = [from.region.sge(0..8)];
    for _ in 0..4 {
        from.post(SendRequest::send(1, &piece).signaled());
        assert_eq!(from.reap(Mode::Poll).status(), Status::SUCCESS);
    }
    let deadline = Instant::now() + TIMEOUT;
    loop {
        assert!(Instant::now() < deadline, "the limit must raise an event");
        let event = to.context.wait_async_event(TIMEOUT).expect("events").expect("an event");
        if event.kind == AsyncEventKind::SRQ_LIMIT {
            assert_eq!(event.subject, Subject::SharedReceiveQueue);
            break;
        }
    }
    assert_eq!(srq.armed_limit().expect("query"), 0);
}

/// The bytes arrive even if only the sender's queue pair and completion queue are left.
pub(crate) fn children_keep_parents_alive(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [to, from] = pair.ends;
    let bytes = pattern(3, 64);
    let target = to.region.remote(0..64);
    to.receive_into(1, 0..64);
    let Parts { context, domain, channel, cq, mut region, qp, .. } = from.parts;
    region.write(0, &bytes);
    qp.post_send(&[SendRequest::send(1, &[region.sge(0..64)]).signaled()]).expect("post");
    // The sender's region, domain, channel and context are dropped while the send may be in flight.
    drop((region, domain, channel, context));
    let mut out = [ferrite_verbs::WorkCompletion::default()];
    let deadline = Instant::now() + TIMEOUT;
    while cq.poll(&mut out).expect("poll") == 0 {
        assert!(Instant::now() < deadline, "no completion");
        std::thread::yield_now();
    }
    assert_eq!(out[0].status(), Status::SUCCESS);
    assert_eq!(to.reap(Mode::Poll).status(), Status::SUCCESS);
    assert_eq!(to.region.to_vec(0, 64), bytes);
    drop(cq);
    assert_eq!(qp.state().expect("state"), State::READY_TO_SEND);
    drop(qp);
    assert_eq!(target.len, 64);
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}

pub(crate) fn one_channel_serves_many_queues(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    let parts = Parts::new(fixture, host, &PairConfig::default());
    let queues: Vec<_> = (0..3)
        .map(|vector| {
            parts.context.create_completion_queue(16, Some(&parts.channel), vector).expect("queue")
        })
        .collect();
    let qps: Vec<_> = queues
        .iter()
        .map(|cq| {
            cq.request_notify(false).expect("arm");
            let qp = parts.domain.create_queue_pair(&QueuePairConfig::new(cq)).expect("queue pair");
            qp.modify(&QueuePairAttributes::init(1, Access::LOCAL)).expect("init");
            qp.post_recv(&[RecvRequest::new(1, &[])]).expect("post");
            qp.stop().expect("stop");
            qp
        })
        .collect();
    let mut woken = BTreeSet::new();
    while woken.len() < queues.len() {
        woken.insert(parts.channel.wait(TIMEOUT).expect("wait").expect("an event"));
    }
    assert_eq!(woken, queues.iter().map(ferrite_verbs::CompletionQueue::key).collect());
    drop((queues, qps));
    assert_eq!(parts.channel.next_event().expect("events"), None);
}
