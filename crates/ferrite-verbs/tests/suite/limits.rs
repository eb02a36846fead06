//! Requests beyond a limit, which give a typed error.

use std::time::Instant;

use ferrite_verbs::{
    Access, AsyncEventKind, ErrorKind, QueuePairConfig, SendRequest, Status, Subject,
    WorkCompletion,
};

use super::pair::{Mode, Pair, PairConfig, Parts};
use super::{Fixture, TIMEOUT};

pub(crate) fn full_queue_refuses_posts_until_it_drains(fixture: &Fixture) {
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
    assert!(posted >= 8, "only {posted} requests fit, fewer than configured");
    assert_eq!((error.error.kind(), error.posted), (ErrorKind::QueueFull, 0), "{error}");
    // When the peer posts receives, the queue drains.
    for wr_id in 0..posted {
        pair.ends[0].receive_into(wr_id, 0..64);
    }
    for wr_id in 0..posted {
        let done = from.reap(Mode::Poll);
        assert_eq!((done.status(), done.wr_id()), (Status::SUCCESS, wr_id));
    }
    from.post(SendRequest::send(7, &piece));
}

pub(crate) fn reports_exceeded_device_limits(fixture: &Fixture) {
    let parts = Parts::new(fixture, &fixture.hosts[0], &PairConfig::default());
    let limits = parts.context.limits().expect("limits");
    let expect_limit_error = |error: ferrite_verbs::Error, what: &str| {
        assert_eq!(error.kind(), ErrorKind::DeviceLimit, "{error}");
        assert!(error.to_string().contains(what), "{error}");
    };
    let deep = parts.context.create_completion_queue(limits.max_cqe + 1, None, 0);
    expect_limit_error(deep.expect_err("the queue is too deep"), "the device allows");
    let base = QueuePairConfig::new(&parts.cq);
    let wide = QueuePairConfig { max_send_sge: limits.max_sge + 1, ..base.clone() };
    expect_limit_error(
        parts.domain.create_queue_pair(&wide).expect_err("too many scatter/gather elements"),
        "max_send_sge",
    );
    let wide = QueuePairConfig { max_recv_sge: limits.max_sge + 1, ..base.clone() };
    expect_limit_error(
        parts.domain.create_queue_pair(&wide).expect_err("too many scatter/gather elements"),
        "max_recv_sge",
    );
    let long = QueuePairConfig { max_send_wr: limits.max_qp_wr + 1, ..base.clone() };
    expect_limit_error(
        parts.domain.create_queue_pair(&long).expect_err("the queue is too long"),
        "max_send_wr",
    );
    let inline = QueuePairConfig { max_inline: 1 << 20, ..base };
    expect_limit_error(
        parts.domain.create_queue_pair(&inline).expect_err("too many inline bytes"),
        "inline",
    );
    let srq = parts.domain.create_shared_receive_queue(limits.max_srq_wr + 1, 1);
    expect_limit_error(srq.expect_err("the queue is too long"), "max_wr");
    let srq = parts.domain.create_shared_receive_queue(16, limits.max_srq_sge + 1);
    expect_limit_error(srq.expect_err("too many scatter/gather elements"), "max_sge");
}

pub(crate) fn rejects_too_long_requests(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [_, from] = &pair.ends;
    let len = from.qp.capacity().max_inline as usize + 1;
    let error = from.qp.post_send(&[SendRequest::send(1, &[from.region.sge(0..len)]).inline()]);
    assert_eq!(error.expect_err("too many inline bytes").error.kind(), ErrorKind::Misuse);
    let many = vec![from.region.sge(0..1); 40];
    let error = from.qp.post_send(&[SendRequest::send(1, &many)]).expect_err("too many pieces");
    assert_eq!(error.error.kind(), ErrorKind::DeviceLimit, "{error}");
}

pub(crate) fn rejects_posts_in_the_wrong_state(fixture: &Fixture) {
    let parts = Parts::new(fixture, &fixture.hosts[0], &PairConfig::default());
    let error = parts
        .qp
        .post_send(&[SendRequest::send(1, &[parts.region.sge(0..8)])])
        .expect_err("the queue pair is not connected");
    assert_eq!(error.error.kind(), ErrorKind::Misuse, "{error}");
    // Soft-RoCE queues the request before the kernel refuses it, and does not name the refused
    // request. So the request counts as posted.
    assert!(error.posted <= 1, "{error}");
}

/// Unpolled completions overrun the queue. The device reports the overrun only by an async event.
pub(crate) fn reports_completion_queue_overrun(fixture: &Fixture) {
    let config = PairConfig { cq_depth: 4, max_send_wr: 64, ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let [to, from] = &pair.ends;
    let piece = [from.region.sge(0..8)];
    let count = u64::from(from.cq.depth()) + 8;
    for wr_id in 0..count {
        from.post(SendRequest::write(wr_id, &piece, to.region.remote(0..8)).signaled());
    }
    let deadline = Instant::now() + TIMEOUT;
    let event = loop {
        assert!(Instant::now() < deadline, "the device must report the overrun by an event");
        if let Some(event) = from.context.wait_async_event(TIMEOUT).expect("events")
            && event.kind == AsyncEventKind::CQ_ERROR
        {
            break event;
        }
    };
    assert_eq!(event.subject, Subject::CompletionQueue(from.cq.key()));
    let mut out = [WorkCompletion::default(); 128];
    // The device decides how many completions are left in a broken queue. Polling the queue must
    // not hang or panic.
    let left = from.cq.poll(&mut out).unwrap_or(0) as u64;
    assert!(left < count, "no completion was lost: {left} of {count} are left");
}

pub(crate) fn rejects_an_empty_region(fixture: &Fixture) {
    let parts = Parts::new(fixture, &fixture.hosts[0], &PairConfig::default());
    let error = parts.domain.allocate(0, Access::LOCAL).expect_err("nothing to register");
    assert_eq!(error.kind(), ErrorKind::Misuse);
}
