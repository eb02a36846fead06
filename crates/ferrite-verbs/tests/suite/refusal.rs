//! Requests that the device refuses. Each completes with a typed status, and then the queue pair is
//! in the state ERROR.

use ferrite_verbs::{Access, RecvRequest, RemoteSlice, SendRequest, State, Status};

use super::Fixture;
use super::pair::{End, Mode, Pair, PairConfig};

/// Writes or reads 64 bytes at `remote` and expects a refusal, in both directions.
fn expect_refusal(
    fixture: &Fixture,
    config: &PairConfig,
    read: bool,
    remote: impl Fn(&End) -> RemoteSlice,
) {
    for (from, to) in [(0, 1), (1, 0)] {
        let pair = Pair::with(fixture, config);
        let (from, to) = (&pair.ends[from], &pair.ends[to]);
        let local = [from.region.sge(0..64)];
        let remote = remote(to);
        let request = if read {
            SendRequest::read(1, &local, remote)
        } else {
            SendRequest::write(1, &local, remote)
        };
        from.post(request.signaled());
        let done = from.reap(Mode::Event);
        let error = done.ok().expect_err("a refusal");
        assert_eq!((error.status, error.wr_id), (Status::REMOTE_ACCESS, 1), "{error}");
        assert_eq!(error.qp_num, from.qp.number());
        assert!(error.to_string().contains("the key is wrong, or the peer's memory"), "{error}");
        // The completion may arrive before the queue pair's state changes.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while from.qp.state().expect("state") != State::ERROR {
            assert!(std::time::Instant::now() < deadline, "the queue pair does not fail");
            std::thread::yield_now();
        }
        // All later requests are flushed, so only the first error names the cause.
        from.post(SendRequest::send(2, &local).signaled());
        let flushed = from.reap(Mode::Event);
        assert_eq!((flushed.status(), flushed.wr_id()), (Status::FLUSHED, 2));
    }
}

pub(crate) fn refuses_a_wrong_key(fixture: &Fixture) {
    expect_refusal(fixture, &PairConfig::default(), false, |to| {
        let good = to.region.remote(0..64);
        RemoteSlice { rkey: good.rkey ^ 0x00ff_00ff, ..good }
    });
}

pub(crate) fn refuses_access_out_of_bounds(fixture: &Fixture) {
    expect_refusal(fixture, &PairConfig::default(), false, |to| {
        let last = to.region.remote(to.region.len() - 32..to.region.len());
        RemoteSlice { len: 64, ..last }
    });
}

pub(crate) fn refuses_a_deregistered_region(fixture: &Fixture) {
    expect_refusal(fixture, &PairConfig::default(), false, |to| {
        let short_lived = to.domain.allocate(4096, Access::REMOTE_WRITE).expect("region");
        short_lived.remote(0..64)
    });
}

pub(crate) fn refuses_writes_without_permission(fixture: &Fixture) {
    let config = PairConfig { region_access: Access::REMOTE_READ, ..Default::default() };
    expect_refusal(fixture, &config, false, |to| to.region.remote(0..64));
}

pub(crate) fn refuses_reads_without_permission(fixture: &Fixture) {
    let config = PairConfig { region_access: Access::REMOTE_WRITE, ..Default::default() };
    expect_refusal(fixture, &config, true, |to| to.region.remote(0..64));
}

/// The region allows the write, but the queue pair does not. Devices report different statuses for
/// this.
pub(crate) fn refuses_access_without_queue_pair_rights(fixture: &Fixture) {
    let config = PairConfig { access: Access::LOCAL, ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let [to, from] = &pair.ends;
    from.post(SendRequest::write(1, &[from.region.sge(0..64)], to.region.remote(0..64)).signaled());
    let status = from.reap(Mode::Event).status();
    assert!([Status::REMOTE_ACCESS, Status::REMOTE_INVALID_REQUEST].contains(&status), "{status}");
}

/// For a key of another protection domain, the specification gives "local protection error",
/// Soft-RoCE of Linux 6.1 "local queue pair error", and Soft-RoCE of Linux 7 "flushed".
pub(crate) fn refuses_a_local_key_of_another_domain(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [to, from] = &pair.ends;
    let other = from.context.allocate_protection_domain().expect("domain");
    let region = other.allocate(4096, Access::LOCAL).expect("region");
    to.receive_into(1, 0..64);
    from.post(SendRequest::send(1, &[region.sge(0..64)]).signaled());
    let status = from.reap(Mode::Poll).status();
    assert!(
        [Status::LOCAL_PROTECTION, Status::LOCAL_QP_OPERATION, Status::FLUSHED].contains(&status),
        "{status}"
    );
    assert_eq!(from.qp.state().expect("state"), State::ERROR);
}

/// The specification gives "remote invalid request" to the sender and "local length error" to the
/// receiver. Soft-RoCE of Linux 7 gives "remote operation error" to the sender and "local queue
/// pair error" to the receiver.
pub(crate) fn refuses_a_message_longer_than_the_receive(fixture: &Fixture) {
    for (from, to) in [(0, 1), (1, 0)] {
        let pair = Pair::new(fixture);
        let (from, to) = (&pair.ends[from], &pair.ends[to]);
        to.receive_into(1, 0..32);
        from.post(SendRequest::send(2, &[from.region.sge(0..64)]).signaled());
        let status = from.reap(Mode::Poll).status();
        assert!(
            [Status::REMOTE_INVALID_REQUEST, Status::REMOTE_OPERATION].contains(&status),
            "{status}"
        );
        let status = to.reap(Mode::Poll).status();
        assert!([Status::LOCAL_LENGTH, Status::LOCAL_QP_OPERATION].contains(&status), "{status}");
    }
}

pub(crate) fn fails_without_a_posted_receive(fixture: &Fixture) {
    let config = PairConfig { rnr_retries: 2, ..Default::default() };
    let pair = Pair::with(fixture, &config);
    let [_, from] = &pair.ends;
    from.post(SendRequest::send(2, &[from.region.sge(0..64)]).signaled());
    let error = from.reap(Mode::Event).ok().expect_err("no receive is posted");
    assert_eq!(error.status, Status::RNR_RETRY_EXCEEDED, "{error}");
}

pub(crate) fn stopping_flushes_receives(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [end, _] = &pair.ends;
    let place = [end.region.sge(0..64)];
    end.qp.post_recv(&[1, 2, 3].map(|wr_id| RecvRequest::new(wr_id, &place))).expect("post");
    end.qp.stop().expect("stop");
    for wr_id in 1..=3 {
        let flushed = end.reap(Mode::Event);
        assert_eq!((flushed.status(), flushed.wr_id()), (Status::FLUSHED, wr_id));
    }
}
