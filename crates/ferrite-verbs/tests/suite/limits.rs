//! More than there is: every limit answers with a typed error that names it.

use std::time::Instant;

use ferrite_verbs::{
    Access, AsyncEventKind, ErrorKind, QueuePairConfig, SendRequest, Status, Subject,
    WorkCompletion,
};

use super::pair::{Mode, Pair, PairConfig, Parts};
use super::{Fixture, PATIENCE};

pub(crate) fn queue_full_is_back_pressure(fixture: &Fixture) {
    let config = PairConfig { max_send_wr: 8, cq_depth: 1024, ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let [_, from] = &pair.ends;
    // No receives are posted, so nothing leaves the queue.
    let piece = [from.region.sge(0..8)];
    let mut posted = 0;
    let error = loop {
        match from.qp.post_send(&[SendRequest::send(posted, &piece).signaled()]) {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
        assert!(posted < 1000, "the queue never fills");
    };
    assert!(posted >= 8, "at least what was asked fits, {posted} did");
    assert_eq!((error.error.kind(), error.posted), (ErrorKind::QueueFull, 0), "{error}");
    // Room for all of them appears at the peer, and the queue drains.
    for wr_id in 0..posted {
        pair.ends[0].receive_into(wr_id, 0..64);
    }
    for wr_id in 0..posted {
        let done = from.reap(Mode::Poll);
        assert_eq!((done.status(), done.wr_id()), (Status::SUCCESS, wr_id));
    }
    from.post(SendRequest::send(7, &piece));
}

pub(crate) fn more_than_the_device_has(fixture: &Fixture) {
    let parts = Parts::new(fixture, &fixture.hosts[0], &PairConfig::default());
    let limits = parts.context.limits().expect("limits");
    let says = |error: ferrite_verbs::Error, what: &str| {
        assert_eq!(error.kind(), ErrorKind::DeviceLimit, "{error}");
        assert!(error.to_string().contains(what), "{error}");
    };
    let deep = parts.context.create_completion_queue(limits.max_cqe + 1, None, 0);
    says(deep.expect_err("too deep"), "the device allows");
    let base = QueuePairConfig::new(&parts.cq);
    let wide = QueuePairConfig { max_send_sge: limits.max_sge + 1, ..base.clone() };
    says(parts.domain.create_queue_pair(&wide).expect_err("too wide"), "max_send_sge");
    let wide = QueuePairConfig { max_recv_sge: limits.max_sge + 1, ..base.clone() };
    says(parts.domain.create_queue_pair(&wide).expect_err("too wide"), "max_recv_sge");
    let long = QueuePairConfig { max_send_wr: limits.max_qp_wr + 1, ..base.clone() };
    says(parts.domain.create_queue_pair(&long).expect_err("too long"), "max_send_wr");
    let inline = QueuePairConfig { max_inline: 1 << 20, ..base };
    says(parts.domain.create_queue_pair(&inline).expect_err("too much inline"), "inline");
    let srq = parts.domain.create_shared_receive_queue(limits.max_srq_wr + 1, 1);
    says(srq.expect_err("too long"), "max_wr");
    let srq = parts.domain.create_shared_receive_queue(16, limits.max_srq_sge + 1);
    says(srq.expect_err("too wide"), "max_sge");
}

pub(crate) fn inline_too_long(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [_, from] = &pair.ends;
    let len = from.qp.capacity().max_inline as usize + 1;
    let error = from.qp.post_send(&[SendRequest::send(1, &[from.region.sge(0..len)]).inline()]);
    assert_eq!(error.expect_err("too long").error.kind(), ErrorKind::Misuse);
    let many = vec![from.region.sge(0..1); 40];
    let error = from.qp.post_send(&[SendRequest::send(1, &many)]).expect_err("too many pieces");
    assert_eq!(error.error.kind(), ErrorKind::DeviceLimit, "{error}");
}

pub(crate) fn posted_in_the_wrong_state(fixture: &Fixture) {
    let parts = Parts::new(fixture, &fixture.hosts[0], &PairConfig::default());
    let error = parts
        .qp
        .post_send(&[SendRequest::send(1, &[parts.region.sge(0..8)])])
        .expect_err("not connected");
    assert_eq!(error.error.kind(), ErrorKind::Misuse, "{error}");
    // Soft-RoCE has put the request into its queue before the kernel refuses it, and names none:
    // then it counts as posted.
    assert!(error.posted <= 1, "{error}");
}

/// Completions that nobody reaps: the device says so by an async event, and only by that.
pub(crate) fn overrun_is_reported(fixture: &Fixture) {
    let config = PairConfig { cq_depth: 4, max_send_wr: 64, ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let [to, from] = &pair.ends;
    let piece = [from.region.sge(0..8)];
    let count = u64::from(from.cq.depth()) + 8;
    for wr_id in 0..count {
        from.post(SendRequest::write(wr_id, &piece, to.region.remote(0..8)).signaled());
    }
    let deadline = Instant::now() + PATIENCE;
    let event = loop {
        assert!(Instant::now() < deadline, "no event");
        if let Some(event) = from.context.wait_async_event(PATIENCE).expect("events")
            && event.kind == AsyncEventKind::CQ_ERROR
        {
            break event;
        }
    };
    assert_eq!(event.subject, Subject::CompletionQueue(from.cq.key()));
    let mut out = [WorkCompletion::default(); 128];
    // What is left in a broken queue depends on the device; taking it must not hang or panic.
    let left = from.cq.poll(&mut out).unwrap_or(0) as u64;
    assert!(left < count, "completions are lost, {left} of {count} are left");
}

pub(crate) fn empty_region(fixture: &Fixture) {
    let parts = Parts::new(fixture, &fixture.hosts[0], &PairConfig::default());
    let error = parts.domain.allocate(0, Access::LOCAL).expect_err("nothing to register");
    assert_eq!(error.kind(), ErrorKind::Misuse);
}
