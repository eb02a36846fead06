//! Sends, writes and reads. The tests of single operations run in both directions, with polling and
//! with events.

use std::time::Duration;

use ferrite_verbs::{Opcode, Operation, RecvRequest, SendRequest, Status};

use super::Fixture;
use super::pair::{Mode, Pair, pattern};

const SIZES: [usize; 4] = [1, 64, 4096, 100_000];

/// Runs `exchange(pair, from, to, mode, size, seed)` for every direction, mode and size; `from` and
/// `to` are indices of ends.
fn for_all_modes(fixture: &Fixture, exchange: impl Fn(&mut Pair, usize, usize, Mode, usize, u8)) {
    let mut pair = Pair::new(fixture);
    let mut seed = 0;
    for mode in [Mode::Poll, Mode::Event] {
        for (from, to) in [(0, 1), (1, 0)] {
            for size in SIZES {
                seed += 1;
                exchange(&mut pair, from, to, mode, size, seed);
            }
        }
    }
}

fn two_sided(fixture: &Fixture, imm: Option<u32>) {
    for_all_modes(fixture, |pair, from, to, mode, size, seed| {
        let bytes = pattern(seed, size);
        pair.ends[from].region.write(0, &bytes);
        pair.ends[to].receive_into(7, 0..size);
        let operation = imm.map_or(Operation::Send, Operation::SendImm);
        let end = &pair.ends[from];
        end.post(SendRequest::new(8, operation, &[end.region.sge(0..size)]).signaled());
        let sent = end.reap(mode);
        assert_eq!(
            (sent.status(), sent.wr_id(), sent.opcode()),
            (Status::SUCCESS, 8, Opcode::SEND)
        );
        assert_eq!(sent.qp_num(), end.qp.number());
        let got = pair.ends[to].reap(mode);
        assert_eq!((got.status(), got.wr_id(), got.opcode()), (Status::SUCCESS, 7, Opcode::RECV));
        assert_eq!((got.byte_len() as usize, got.imm()), (size, imm));
        assert_eq!(pair.ends[to].region.to_vec(0, size), bytes);
    });
}

pub(crate) fn send(fixture: &Fixture) {
    two_sided(fixture, None);
}

pub(crate) fn send_with_immediate(fixture: &Fixture) {
    two_sided(fixture, Some(0x0102_0304));
}

pub(crate) fn write(fixture: &Fixture) {
    for_all_modes(fixture, |pair, from, to, mode, size, seed| {
        let bytes = pattern(seed, size);
        pair.ends[from].region.write(0, &bytes);
        let target = pair.ends[to].region.remote(100..100 + size);
        let end = &pair.ends[from];
        end.post(SendRequest::write(1, &[end.region.sge(0..size)], target).signaled());
        let done = end.reap(mode);
        assert_eq!((done.status(), done.opcode()), (Status::SUCCESS, Opcode::WRITE));
        assert_eq!(pair.ends[to].region.to_vec(100, size), bytes);
        assert_eq!(pair.ends[to].region.load(100), bytes[0]);
    });
}

pub(crate) fn write_with_immediate(fixture: &Fixture) {
    for_all_modes(fixture, |pair, from, to, mode, size, seed| {
        let bytes = pattern(seed, size);
        pair.ends[from].region.write(0, &bytes);
        // The receive that the write consumes needs no memory, because the writer names the target.
        pair.ends[to].qp.post_recv(&[RecvRequest::new(5, &[])]).expect("post");
        let target = pair.ends[to].region.remote(0..size);
        let end = &pair.ends[from];
        let operation = Operation::WriteImm(target, 0xfe00_0000 | u32::from(seed));
        end.post(SendRequest::new(6, operation, &[end.region.sge(0..size)]).signaled());
        assert_eq!(end.reap(mode).status(), Status::SUCCESS);
        let got = pair.ends[to].reap(mode);
        assert_eq!(
            (got.status(), got.wr_id(), got.opcode()),
            (Status::SUCCESS, 5, Opcode::RECV_WRITE_IMM)
        );
        assert_eq!(
            (got.byte_len() as usize, got.imm()),
            (size, Some(0xfe00_0000 | u32::from(seed)))
        );
        assert_eq!(pair.ends[to].region.to_vec(0, size), bytes);
    });
}

pub(crate) fn read(fixture: &Fixture) {
    for_all_modes(fixture, |pair, from, to, mode, size, seed| {
        let bytes = pattern(seed, size);
        pair.ends[to].region.write(10, &bytes);
        let source = pair.ends[to].region.remote(10..10 + size);
        let end = &pair.ends[from];
        end.post(SendRequest::read(1, &[end.region.sge(0..size)], source).signaled());
        let done = end.reap(mode);
        assert_eq!((done.status(), done.opcode()), (Status::SUCCESS, Opcode::READ));
        assert_eq!(end.region.to_vec(0, size), bytes);
    });
}

pub(crate) fn inline_data_is_copied_at_once(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    for (from, to, mode) in [(0, 1, Mode::Poll), (1, 0, Mode::Event)] {
        let bytes = pattern(9, 100);
        pair.ends[to].receive_into(1, 0..200);
        let end = &mut pair.ends[from];
        end.region.write(0, &bytes);
        end.post(SendRequest::send(2, &[end.region.sge(0..100)]).signaled().inline());
        end.region.write(0, &[0xff; 100]);
        assert_eq!(end.reap(mode).status(), Status::SUCCESS);
        assert_eq!(pair.ends[to].reap(mode).byte_len(), 100);
        assert_eq!(pair.ends[to].region.to_vec(0, 100), bytes);
        // A write can carry inline data as well.
        let target = pair.ends[to].region.remote(1000..1100);
        let end = &pair.ends[from];
        end.post(SendRequest::write(3, &[end.region.sge(0..100)], target).signaled().inline());
        assert_eq!(end.reap(mode).status(), Status::SUCCESS);
        assert_eq!(pair.ends[to].region.to_vec(1000, 100), [0xff; 100]);
    }
}

pub(crate) fn scatter_and_gather(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let whole = [pattern(1, 10), pattern(2, 20), pattern(3, 30)].concat();
    for (from, to, mode) in [(0, 1, Mode::Poll), (1, 0, Mode::Event)] {
        let end = &mut pair.ends[from];
        for (at, len) in [(1, 10), (2, 20), (3, 30)] {
            end.region.write(usize::from(at) * 1000, &pattern(at, len));
        }
        let (from, to) = (&pair.ends[from], &pair.ends[to]);
        let places = [to.region.sge(500..515), to.region.sge(5000..5100)];
        to.qp.post_recv(&[RecvRequest::new(1, &places)]).expect("post");
        let pieces =
            [from.region.sge(1000..1010), from.region.sge(2000..2020), from.region.sge(3000..3030)];
        from.post(SendRequest::send(2, &pieces).signaled());
        assert_eq!(from.reap(mode).status(), Status::SUCCESS);
        assert_eq!(to.reap(mode).byte_len(), 60);
        assert_eq!([to.region.to_vec(500, 15), to.region.to_vec(5000, 45)].concat(), whole);
        // A read scatters the data that it returns.
        let places = [from.region.sge(9000..9005), from.region.sge(9500..9505)];
        from.post(SendRequest::read(3, &places, to.region.remote(500..510)).signaled());
        assert_eq!(from.reap(mode).status(), Status::SUCCESS);
        assert_eq!(
            [from.region.to_vec(9000, 5), from.region.to_vec(9500, 5)].concat(),
            whole[..10]
        );
    }
}

pub(crate) fn unsignaled_sends_give_no_completion(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [to, from] = &pair.ends;
    for wr_id in 0..4 {
        to.receive_into(wr_id, 0..64);
    }
    let piece = [from.region.sge(0..8)];
    let requests = [0, 1, 2, 3].map(|wr_id| SendRequest::send(wr_id, &piece));
    from.qp.post_send(&requests[..3]).expect("post");
    from.post(requests[3].signaled());
    assert_eq!(from.reap(Mode::Poll).wr_id(), 3);
    assert!(
        from.reap_within(Mode::Poll, Duration::from_millis(50)).is_none(),
        "only the signaled send may complete"
    );
    for wr_id in 0..4 {
        assert_eq!(to.reap(Mode::Poll).wr_id(), wr_id);
    }
}

/// The test posts more requests than go to the device in one call.
pub(crate) fn posts_more_requests_than_one_chain(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [to, from] = &mut pair.ends;
    let count = 40;
    let places: Vec<_> = (0..count).map(|at| [to.region.sge(at * 64..at * 64 + 64)]).collect();
    let receives: Vec<_> =
        places.iter().zip(0..).map(|(place, wr_id)| RecvRequest::new(wr_id, place)).collect();
    to.qp.post_recv(&receives).expect("post");
    for at in 0..count {
        from.region.write(at * 64, &pattern(at as u8, 64));
    }
    let pieces: Vec<_> = (0..count).map(|at| [from.region.sge(at * 64..at * 64 + 64)]).collect();
    let sends: Vec<_> = pieces
        .iter()
        .zip(0..)
        .map(|(piece, wr_id)| SendRequest::send(wr_id, piece).signaled())
        .collect();
    from.qp.post_send(&sends).expect("post");
    for wr_id in 0..count as u64 {
        let (sent, got) = (from.reap(Mode::Event), to.reap(Mode::Event));
        assert_eq!((sent.status(), sent.wr_id()), (Status::SUCCESS, wr_id));
        assert_eq!((got.status(), got.wr_id()), (Status::SUCCESS, wr_id));
    }
    for at in 0..count {
        assert_eq!(to.region.to_vec(at * 64, 64), pattern(at as u8, 64));
    }
}

pub(crate) fn transfers_an_empty_message(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    for (from, to) in pair.directions() {
        to.qp.post_recv(&[RecvRequest::new(1, &[])]).expect("post");
        from.post(SendRequest::send(2, &[]).signaled());
        assert_eq!(from.reap(Mode::Poll).status(), Status::SUCCESS);
        assert_eq!(
            (to.reap(Mode::Poll).status(), from.reap_within(Mode::Poll, Duration::ZERO).is_none()),
            (Status::SUCCESS, true)
        );
    }
}

pub(crate) fn only_solicited_messages_raise_an_event(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let [to, from] = &pair.ends;
    to.receive_into(1, 0..64);
    to.receive_into(2, 0..64);
    to.cq.request_notify(true).expect("arm");
    let piece = [from.region.sge(0..8)];
    from.post(SendRequest::send(1, &piece).signaled());
    assert_eq!(from.reap(Mode::Poll).status(), Status::SUCCESS);
    assert_eq!(
        to.channel.wait(Duration::from_millis(100)).expect("wait"),
        None,
        "a message that is not solicited must raise no event"
    );
    from.post(SendRequest::send(2, &piece).signaled().solicited());
    assert_eq!(from.reap(Mode::Poll).status(), Status::SUCCESS);
    assert_eq!(to.channel.wait(super::TIMEOUT).expect("wait"), Some(to.cq.key()));
    assert_eq!([to.reap(Mode::Poll).wr_id(), to.reap(Mode::Poll).wr_id()], [1, 2]);
}

/// The send carries the data that the read before it returns.
pub(crate) fn fenced_send_waits_for_the_read(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let bytes = pattern(77, 3000);
    pair.ends[0].region.write(0, &bytes);
    let [to, from] = &mut pair.ends;
    to.receive_into(1, 10_000..13_000);
    let local = [from.region.sge(0..3000)];
    let requests = [
        SendRequest::read(1, &local, to.region.remote(0..3000)),
        SendRequest::send(2, &local).fenced().signaled(),
    ];
    from.qp.post_send(&requests).expect("post");
    assert_eq!((from.reap(Mode::Poll).wr_id(), to.reap(Mode::Poll).byte_len()), (2, 3000));
    assert_eq!(to.region.to_vec(10_000, 3000), bytes);
}
