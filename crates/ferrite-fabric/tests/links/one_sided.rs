//! One-sided operations: a peer can do what a grant allows, nothing else, and nothing after the
//! revocation.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, ErrorKind, Region};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{End, Pair, buffer, failed, filled, pattern, poll_once};
use super::{Fixture, KIB, MIB};

/// Registers a region of `owner` with these bytes, and grants it to the peer.
fn region(owner: &End, bytes: &[u8], rights: Rights) -> (Region, GrantToken) {
    let region =
        owner.link.register_memory(buffer(&owner.fabric, bytes), rights).expect("a region");
    let token = region.grant(&owner.link);
    // Encoded and decoded, as it travels.
    (region, GrantToken::decode(&token.encode()).expect("a grant"))
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    assert!(region.read(0, &mut bytes), "the region is live");
    bytes
}

/// Checks that the link is up, with a message each way.
fn assert_up(pair: &Pair) {
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
            assert!(buf[..] == bytes[offset..offset + len], "{len} bytes at {offset}");
        }
        // Many reads at once, more than the devices accept at a time.
        let reading = (0..200).map(|number| {
            let buf = from.fabric.buffer(1000).expect("memory");
            from.link.rdma_read(&token, number * 1000, buf).expect("allowed")
        });
        for (number, read) in pair.drive(join_all(reading)).into_iter().enumerate() {
            assert!(
                read.expect("read")[..] == bytes[number * 1000..(number + 1) * 1000],
                "read {number}"
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
        // Any 32 bits are allowed, also those that look like our own frames.
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
    // More writes than the window allows: they wait for credit.
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

/// What the grant does not cover is denied locally: the buffer is returned, and the link stays up.
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

/// A peer that accesses more than it was granted loses its link through the device. Other links are
/// not affected.
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

/// A grant that nobody uses is revoked: the peer's next use is denied on its side, and the link
/// stays up.
pub(crate) fn revokes_an_unused_grant(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (region, token) = region(&pair.b, &pattern(1, 1000), Rights::READ_WRITE);
    let other_region = pair
        .b
        .link
        .register_memory(buffer(&pair.b.fabric, &[9; 10]), Rights::READ)
        .expect("second region");
    let other_token = other_region.grant(&pair.b.link);
    let buf = pair.drive(region.revoke()).expect("revoked");
    assert!(buf[..] == pattern(1, 1000), "the buffer is unchanged");
    let failed_read = pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(10).expect("memory"));
    let error = failed_read.expect_err("revoked").error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = failed(pair.a.link.rdma_write(&token, 0, filled(&pair.a.fabric, b"x")), "revoked");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let reading = pair.a.link.rdma_read(&other_token, 0, pair.a.fabric.buffer(10).expect("memory"));
    assert_eq!(
        pair.drive(reading.expect("allowed")).expect("read")[..],
        [9; 10],
        "other grants still work"
    );
    assert_up(&pair);
    drop((buf, other_region));
    pair.end();
}

/// Revokes more grants at once than may be awaiting the peer's answer.
pub(crate) fn revokes_many_grants_at_once(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let count = 3000 / fixture.work_divisor;
    let regions: Vec<_> = (0..count).map(|_| region(&pair.b, &[1; 10], Rights::READ).0).collect();
    let revoked = pair.drive(join_all(regions.into_iter().map(Region::revoke)));
    assert!(revoked.iter().all(Result::is_ok));
    drop(revoked);
    assert_up(&pair);
    pair.end();
}

/// Revokes a grant while the peer reads and writes without pause. Each operation finishes or is
/// denied, and the link stays up. Once the owner has its buffer again, not one byte of it is read
/// or written.
pub(crate) fn revokes_during_reads_and_writes(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let rounds = 40 / fixture.work_divisor.min(10) as u64;
    let (old, new) = (pattern(1, 64 * KIB), pattern(2, 64 * KIB));
    let mut busy_rounds = 0;
    for round in 0..rounds {
        let (region, token) = region(&pair.b, &old, Rights::READ_WRITE);
        let (link, fabric) = (&pair.a.link, &pair.a.fabric);
        // Each task uses the grant until it is denied, which must happen after the revocation.
        let use_until_denied = |write: bool| async move {
            let mut done = 0_u64;
            loop {
                let outcome = if write {
                    // Writes the bytes that are there already, so that only a late write changes
                    // the buffer.
                    let buf = filled(fabric, &pattern(1, 64 * KIB));
                    match link.rdma_write(&token, 0, buf) {
                        Ok(writing) => writing.await,
                        Err(error) => Err(error),
                    }
                } else {
                    match link.rdma_read(&token, 0, fabric.buffer(64 * KIB).expect("memory")) {
                        Ok(reading) => {
                            reading.await.map_err(ferrite_fabric::Error::from).map(|buf| {
                                assert!(
                                    buf[..] == pattern(1, 64 * KIB),
                                    "read bytes from after the revocation"
                                );
                            })
                        }
                        Err(failed) => Err(failed.error),
                    }
                };
                match outcome {
                    Ok(()) => done += 1,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
                        return done;
                    }
                }
            }
        };
        let revoke = async {
            for _ in 0..round % 7 {
                yield_once().await;
            }
            let mut buf = region.revoke().await.expect("revoked");
            assert!(buf[..] == old, "the peer writes the same bytes");
            buf.copy_from_slice(&new);
            for _ in 0..20 {
                yield_once().await;
            }
            assert!(buf[..] == new, "the peer wrote after the revocation");
        };
        let (reads, more_reads, writes, ()) = pair.drive(async {
            join!(use_until_denied(false), use_until_denied(false), use_until_denied(true), revoke)
        });
        busy_rounds += u64::from(reads + more_reads + writes > 0);
        assert!(link.failure().is_none() && pair.b.link.failure().is_none(), "a link failed");
    }
    assert!(busy_rounds > 0, "no operation succeeded in any round");
    assert_up(&pair);
    pair.end();
}

async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if std::mem::replace(&mut yielded, true) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
}

/// A peer that keeps using a revoked grant loses its link, and no other link is affected.
pub(crate) fn use_after_revocation_ends_the_link(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [a, b] = pair.another(fixture);
    let (region, _) = region(&pair.b, &pattern(1, 1000), Rights::READ);
    // With another grant number, the peer's own side does not recognize the revocation.
    let token = region.grant(&b);
    let token = GrantToken { grant: token.grant + 1000, ..token };
    let reading = a
        .rdma_read(&token, 0, pair.a.fabric.buffer(1000).expect("memory"))
        .expect("queued: the key does not depend on the number");
    assert!(pair.drive(reading).expect("read")[..] == pattern(1, 1000));
    let mut buf = pair.drive(region.revoke()).expect("revoked");
    buf.fill(0xee);
    let reading = a
        .rdma_read(&token, 0, pair.a.fabric.buffer(1000).expect("memory"))
        .expect("queued: the revocation was not recognized");
    let failed_read = pair.drive(reading).expect_err("the key is invalid");
    assert_eq!(failed_read.error.kind(), ErrorKind::Denied, "{}", failed_read.error);
    let left = failed_read.buf.expect("buffer returned");
    assert!(
        !left.windows(4).any(|bytes| bytes == [0xee; 4]),
        "read bytes from after the revocation"
    );
    drop(left);
    assert!(a.failure().is_some(), "the link must fail");
    drop((a, b));
    assert_up(&pair);
    drop(buf);
    pair.end();
}

/// A peer that does not answer cannot keep the owner from its memory forever.
pub(crate) fn revocation_has_a_deadline(fixture: &Fixture) {
    let config = Config { peer_timeout: Duration::from_millis(300), ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let (region, token) = region(&pair.b, &[1; 100], Rights::READ);
    let begun = Instant::now();
    // Only the owner is driven.
    let buf = super::pair::drive(&[&pair.b.fabric], region.revoke()).expect("revoked");
    assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    // The peer learns of the revocation at last, and the link stays up.
    pair.run_for(Duration::from_millis(50));
    assert!(pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory")).is_err());
    assert_up(&pair);
    drop(buf);
    pair.end();
}

/// A grant with an expiry time.
pub(crate) fn grants_expire(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (region, token) = region(&pair.b, &[1; 100], Rights::READ);
    let begun = Instant::now();
    let region = region.expires_in(Duration::from_millis(100));
    assert!(region.is_live());
    let reading = pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory"));
    pair.drive(reading.expect("not expired yet")).expect("read");
    pair.until("the grant has expired", || !region.is_live());
    assert!(begun.elapsed() >= Duration::from_millis(99), "{:?}", begun.elapsed());
    pair.until("the peer knows that it expired", || {
        pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory")).is_err()
    });
    pair.until("the buffer is returned", || !region.read(0, &mut [0]));
    assert_eq!(pair.drive(region.revoke()).expect("buffer returned")[..], [1; 100]);
    assert_up(&pair);
    pair.end();
}

/// Dropping a region invalidates the key at once. Its buffer is free when the device has released
/// it.
pub(crate) fn dropping_a_region_revokes_it(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [a, b] = pair.another(fixture);
    let (region, token) = region(&pair.b, &[1; 100], Rights::READ);
    drop(region);
    assert_eq!(pair.b.fabric.stats().memory.exposed_regions, 0);
    pair.until("the buffer is free", || pair.b.fabric.stats().memory.send.in_use_bytes == 0);
    let reading = a
        .rdma_read(&token, 0, pair.a.fabric.buffer(100).expect("memory"))
        .expect("queued: the peer was not notified");
    let error = pair.drive(reading).expect_err("the key is invalid").error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    drop((a, b));

    // The same holds for a revocation whose future is dropped.
    let (region, _) = self::region(&pair.b, &[1; 100], Rights::READ);
    drop(region.revoke());
    pair.until("the region is gone", || pair.b.fabric.stats().memory.exposed_regions == 0);
    assert_up(&pair);
    pair.end();
}

/// Revokes a grant while its link is going down, or after it ended.
pub(crate) fn revokes_after_the_link_ended(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    for round in 0..3 {
        let [a, b] = pair.another(fixture);
        let region = pair
            .b
            .link
            .register_memory(buffer(&pair.b.fabric, &[1; 10]), Rights::READ)
            .expect("a region");
        let _token = region.grant(&b);
        match round {
            0 => a.abort(),
            1 => b.abort(),
            _ => {
                pair.drive(a.close()).expect("closed cleanly");
                drop((a, b));
            }
        }
        let begun = Instant::now();
        pair.drive(region.revoke()).expect("revoked");
        assert!(begun.elapsed() < Duration::from_secs(4), "round {round}: {:?}", begun.elapsed());
    }
    assert_up(&pair);
    pair.end();
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

/// The peer reads memory without a grant. The owner's pending requests report the first cause, not
/// flushed requests.
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
    assert!(errors.len() > 10, "{}", errors.len());
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
        assert!(!error.to_string().contains("flush"), "{error}");
    }
    drop(region);
    pair.clear();
}
