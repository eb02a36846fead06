//! One-sided operations: a peer can do what a grant allows, and nothing else.

use std::time::Duration;

use ferrite_fabric::wire::{Features, GrantToken, Hello, Rights};
use ferrite_fabric::{Config, Error, ErrorKind, Region};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{End, Pair, buffer, clear, drive, failed, filled, pattern, poll_once};
use super::verbs_peer::VerbsPeer;
use super::{Fixture, KIB, MIB};
use ferrite_testkit::handshake::HELLO;
use ferrite_verbs::Status;

/// Registers a region of `owner` with these bytes, and grants it to the peer.
pub(crate) fn region(owner: &End, bytes: &[u8], rights: Rights) -> (Region, GrantToken) {
    let region =
        owner.link.register_memory(buffer(&owner.fabric, bytes), rights).expect("a region");
    let token = region.grant(&owner.link);
    // Encodes and decodes the token, as on its way to the peer.
    (region, GrantToken::decode(&token.encode()).expect("a grant"))
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    assert!(region.read(0, &mut bytes), "the region is live");
    bytes
}

/// Checks that the link is up, with a message each way.
pub(crate) fn assert_up(pair: &Pair) {
    for (from, to) in pair.directions() {
        from.link.post_bytes(0, b"still here").expect("room in the queue");
        assert_eq!(pair.receive(to).to_vec(), b"still here");
    }
}

pub(crate) fn read_returns_granted_bytes(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    for (from, to) in pair.directions() {
        let bytes = pattern(1, 2 * MIB);
        let (region, token) = region(to, &bytes, Rights::READ);
        assert_eq!(
            (region.len(), region.device(), region.is_live()),
            (2 * MIB, to.link.device().as_deref(), true)
        );
        for (offset, len) in [
            (0, 0),
            (0, 1),
            (1, 7),
            (4095, 2),
            (8 * KIB, 64 * KIB),
            (2 * MIB - 1, 1),
            (2 * MIB, 0),
            (0, 2 * MIB),
        ] {
            let buf = from.fabric.buffer(len).expect("memory");
            let reading = from.link.rdma_read(&token, offset as u64, buf).expect("allowed");
            let buf = pair.drive(reading).expect("read");
            assert!(
                buf[..] == bytes[offset..offset + len],
                "wrong bytes in the read of {len} bytes at {offset}"
            );
        }
        // Starts more reads than the devices accept at a time.
        let reading = (0..200).map(|number| {
            let buf = from.fabric.buffer(1000).expect("memory");
            from.link.rdma_read(&token, number * 1000, buf).expect("allowed")
        });
        for (number, read) in pair.drive(join_all(reading)).into_iter().enumerate() {
            assert!(
                read.expect("read")[..] == bytes[number * 1000..(number + 1) * 1000],
                "wrong bytes in read {number}"
            );
        }
        assert_eq!(from.link.stats().read_ops, 208);
        assert!(contents(&region) == bytes, "reads must not change the region");
    }
    pair.end();
}

pub(crate) fn write_changes_only_its_range(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    for (from, to) in pair.directions() {
        let mut expected = pattern(2, MIB);
        let (region, token) = region(to, &expected, Rights::WRITE);
        for (seed, (offset, len)) in (0..).zip([
            (0, 1),
            (5, 0),
            (7, 100),
            (8191, 2),
            (8 * KIB, 64 * KIB),
            (MIB - 1, 1),
            (MIB, 0),
        ]) {
            let bytes = pattern(100 + seed, len);
            let writing = from.link.rdma_write(&token, offset as u64, filled(&from.fabric, &bytes));
            pair.drive(writing.expect("allowed")).expect("written");
            expected[offset..offset + len].copy_from_slice(&bytes);
            assert!(contents(&region) == expected, "only {len} bytes at {offset} may change");
        }
        assert!(region.write(3, b"own"), "the owner can write its region");
        expected[3..6].copy_from_slice(b"own");
        assert!(contents(&region) == expected);
    }
    pair.end();
}

/// A notice arrives after the written bytes, in order with the messages around it.
pub(crate) fn notices_keep_their_order(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (from, to) = (&pair.a, &pair.b);
    let (region, token) = region(to, &[0; 4096], Rights::READ_WRITE);
    for round in 0..20_u32 {
        // Any 32 bits are allowed, even those that look like the immediate data of a frame.
        let imm = round.wrapping_mul(0x9e37_79b9) ^ 0xC000_0000;
        let bytes = pattern(round.into(), 4096);
        let writing = from
            .link
            .rdma_write_imm(&token, 0, filled(&from.fabric, &bytes), imm)
            .expect("allowed");
        from.link.post_bytes(1, &round.to_le_bytes()).expect("room in the queue");
        let notice = pair.receive(to);
        assert_eq!((notice.notice(), notice.len()), (Some(imm), 0));
        assert!(contents(&region) == bytes, "the bytes of notice {round} are missing");
        assert_eq!(pair.receive(to).to_vec(), round.to_le_bytes());
        pair.drive(writing).expect("written");
    }
    // These are more writes than the window allows, so some wait for credit.
    let writing: Vec<_> = (0..300)
        .map(|imm| {
            from.link
                .rdma_write_imm(&token, 0, filled(&from.fabric, b"x"), imm)
                .expect("room in the queue")
        })
        .collect();
    let receive = async {
        for imm in 0..300 {
            assert_eq!(to.link.recv().await.expect("a notice").notice(), Some(imm));
        }
    };
    let (written, ()) = pair.drive(async { join!(join_all(writing), receive) });
    written.into_iter().for_each(|written| written.expect("written"));
    drop(region);
    pair.end();
}

/// Operations that the grant does not cover are denied locally. The buffer is returned, and the
/// link stays up.
pub(crate) fn denies_what_the_grant_does_not_cover(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let End { fabric, link } = &pair.a;
    let (readable, read_token) = region(&pair.b, &[1; 1000], Rights::READ);
    let (writable, write_token) = region(&pair.b, &[2; 1000], Rights::WRITE);
    for (offset, len) in [(0, 1001), (1000, 1), (1001, 0), (u64::MAX, 1), (u64::MAX - 5, 100)] {
        let buf = fabric.buffer(len).expect("memory");
        let failed_read = link.rdma_read(&read_token, offset, buf).expect_err("outside the region");
        assert_eq!(failed_read.error.kind(), ErrorKind::Denied, "{}", failed_read.error);
        assert_eq!(failed_read.buf.map(|buf| buf.len()), Some(len));
        let error = failed(
            link.rdma_write(&write_token, offset, filled(fabric, &vec![0; len])),
            "outside the region",
        );
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }
    let error = link
        .rdma_read(&write_token, 0, fabric.buffer(1).expect("memory"))
        .expect_err("no right to read")
        .error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = failed(link.rdma_write(&read_token, 0, filled(fabric, b"x")), "no right to write");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error =
        failed(link.rdma_write_imm(&read_token, 0, filled(fabric, b"x"), 1), "no right to write");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let foreign = pair.b.fabric.buffer(10).expect("memory");
    let failed_read = link.rdma_read(&read_token, 0, foreign).expect_err("buffer of another pool");
    assert_eq!(
        (failed_read.error.kind(), failed_read.buf.map(|buf| buf.len())),
        (ErrorKind::Misuse, Some(10))
    );
    let error = failed(
        link.rdma_write(&write_token, 0, filled(&pair.b.fabric, b"x")),
        "buffer of another pool",
    );
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert_up(&pair);
    assert!(contents(&readable) == [1; 1000] && contents(&writable) == [2; 1000]);
    drop((readable, writable));
    pair.end();
}

/// When a buffer cannot be registered, it is returned.
pub(crate) fn failed_registration_returns_the_buffer(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let own = pair.a.fabric.buffer(100).expect("memory");
    let (own, error) =
        pair.a.fabric.register_memory("nic9", own, Rights::READ).expect_err("no such device");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    let (own, error) =
        pair.b.link.register_memory(own, Rights::READ).expect_err("buffer of another fabric");
    assert_eq!((error.kind(), own.len()), (ErrorKind::Misuse, 100), "{error}");
    let empty = pair.a.fabric.buffer(0).expect("memory");
    let (_, error) = pair.a.link.register_memory(empty, Rights::READ).expect_err("empty buffer");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    drop(own);
    pair.end();
}

/// The device ends the link of a peer that accesses more than it was granted. Other links are not
/// affected.
pub(crate) fn forged_grants_end_the_link(fixture: &Fixture) {
    type Forge = fn(GrantToken) -> GrantToken;
    let config = Config { access_back_off: Duration::ZERO, ..Config::default() };
    let mut pair = Pair::with(fixture, &config);
    let (region, _) = region(&pair.b, &pattern(1, 1000), Rights::READ);
    let forgeries: [Forge; 4] = [
        |token| GrantToken { rights: Rights::WRITE, ..token },
        |token| GrantToken { rkey: token.rkey ^ 0x00ff_00ff, rights: Rights::WRITE, ..token },
        |token| GrantToken { addr: token.addr + 1000, rights: Rights::READ_WRITE, ..token },
        |token| GrantToken { len: token.len + (1 << 20), rights: Rights::READ_WRITE, ..token },
    ];
    for (at, forge) in forgeries.into_iter().enumerate() {
        let [a, b] = pair.another(fixture);
        let forged = forge(region.grant(&b));
        let offset = if at == 3 { 900 } else { 0 };
        let buf = filled(&pair.a.fabric, &[0xee; 500]);
        let writing =
            a.rdma_write(&forged, offset, buf).expect("queued: only the peer knows its keys");
        let (written, sent) =
            pair.drive(async { join!(writing, a.send(0, filled(&pair.a.fabric, &[1; 300]))) });
        let error = failed(written, "the device must refuse");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!error.to_string().contains("flushed"), "{error}");
        drop(sent); // it may succeed or fail
        let error = failed(pair.drive(b.ended()), "the owner's end must fail too");
        assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
        assert!(!error.to_string().contains("flushed"), "{error}");
    }
    assert!(contents(&region) == pattern(1, 1000), "the region was written");
    assert_up(&pair);
    drop(region);
    pair.end();
}

/// A link uses only the features that both hellos have.
pub(crate) fn features_that_the_peer_lacks_are_not_used(fixture: &Fixture) {
    let host = &fixture.hosts[0];
    for (features, has_grants) in [(Features::WRITE_IMM, false), (Features::ONE_SIDED, true)] {
        let config = Config { access_back_off: Duration::ZERO, ..Config::default() };
        let fabric = fixture.fabric(host, &config);
        let mut listener = fabric.listen(host.any_port()).expect("listen");
        let (to, hello) = (listener.local_addr(), Hello { features, ..HELLO });
        let peer = VerbsPeer::connect(fixture, to, &hello.encode(), &[&fabric]);
        let (mut peer, _) = peer.expect("a link");
        let link = drive(&[&fabric], listener.accept()).expect("a link");
        let (bytes, rights) = (pattern(1, 1000), Rights::READ_WRITE);
        let region = link.register_memory(buffer(&fabric, &bytes), rights).expect("a region");
        let token = region.grant(&link);
        let writing = link.rdma_write_imm(&token, 0, filled(&fabric, b"x"), 7);
        let error = failed(writing, "a notice");
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        if !has_grants {
            let reading = link.rdma_read(&token, 0, fabric.buffer(8).expect("memory"));
            let error = failed(reading.map_err(Error::from), "a read");
            assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
            assert_ne!(peer.read(&token, &[&fabric]).0, Status::SUCCESS);
        } else {
            assert_eq!(peer.read(&token, &[&fabric]), (Status::SUCCESS, bytes));
            peer.write_imm(&token, 7, &[&fabric]);
            let error = failed(drive(&[&fabric], link.ended()), "a notice of the peer");
            assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        }
        drop((peer, region, link, listener));
        clear([fabric]);
    }
}

/// Operations whose futures are dropped still complete, and their memory is returned.
pub(crate) fn dropped_operations_complete(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (region, token) = region(&pair.b, &[0; 100 * KIB], Rights::READ_WRITE);
    for number in 0..100 {
        let buf = pair.a.fabric.buffer(1000).expect("memory");
        let mut reading = pair.a.link.rdma_read(&token, number * 1000, buf).expect("allowed");
        if number % 2 == 0 {
            drop(poll_once(&mut reading));
        }
        drop(reading);
        let bytes = filled(&pair.a.fabric, &[7; 1000]);
        drop(pair.a.link.rdma_write(&token, number * 1000, bytes).expect("allowed"));
    }
    let expected = [vec![7; 100_000], vec![0; 2400]].concat();
    pair.until("all bytes are written", || contents(&region) == expected);
    pair.until("the memory is returned", || pair.a.fabric.stats().memory.send.in_use_bytes == 0);
    drop(region);
    pair.end();
}

/// The peer reads memory without a grant. The owner's pending requests report that cause, and not
/// that they were flushed.
pub(crate) fn owner_reports_the_first_cause(fixture: &Fixture) {
    let config =
        Config { recv_queue_depth: 16, window: 30, send_queue_depth: 20, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let (from, to) = (&pair.a, &pair.b);
    let (region, mut token) = region(to, &[1; 100], Rights::READ);
    // The sends wait for receives of the peer, which is not driven.
    let mut sending: Vec<_> =
        (0..40).map(|_| to.link.send(0, filled(&to.fabric, &[1; 1000]))).collect();
    for future in &mut sending {
        poll_once(future);
    }
    token.rkey ^= 0x00ff_00ff;
    let buf = from.fabric.buffer(10).expect("memory");
    let reading =
        from.link.rdma_read(&token, 0, buf).expect("queued: only the owner knows its keys");
    let error =
        super::pair::drive(&[&from.fabric], reading).expect_err("the device must refuse").error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let (sent, ended) = pair.drive(async { join!(join_all(sending), to.link.ended()) });
    let errors: Vec<_> = sent.into_iter().filter_map(Result::err).chain(ended.err()).collect();
    assert!(errors.len() > 10, "only {} requests failed", errors.len());
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
        assert!(!error.to_string().contains("flush"), "{error}");
    }
    drop(region);
    pair.clear();
}
