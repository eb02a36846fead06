//! One-sided operations: what a grant allows, nothing else, and nothing after it was taken back.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, ErrorKind, Region};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{End, Pair, buffer, failed, filled, once, pattern};
use super::{Fixture, KIB, MIB};

/// A region of `owner`'s with these bytes, and the grant for the peer.
fn region(owner: &End, bytes: &[u8], rights: Rights) -> (Region, GrantToken) {
    let region =
        owner.link.register_memory(buffer(&owner.fabric, bytes), rights).expect("a region");
    let token = region.grant(&owner.link);
    // As it travels.
    (region, GrantToken::decode(&token.encode()).expect("a grant"))
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    assert!(region.read(0, &mut bytes), "it is live");
    bytes
}

/// A message each way: the link is up.
fn assert_up(pair: &Pair) {
    for (from, to) in pair.directions() {
        from.link.post_bytes(0, b"still here").expect("room");
        assert_eq!(pair.receive(to).to_vec(), b"still here");
    }
}

pub(crate) fn reads(fixture: &Fixture) {
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
        // Many at once, more than the devices take.
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
        assert!(contents(&region) == bytes, "reading changes nothing");
    }
    pair.end();
}

pub(crate) fn writes(fixture: &Fixture) {
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
            assert!(contents(&region) == expected, "{len} bytes at {offset}, and nothing else");
        }
        assert!(region.write(3, b"own"), "the owner may write, too");
        expected[3..6].copy_from_slice(b"own");
        assert!(contents(&region) == expected);
    }
    pair.end();
}

/// A notice comes when the bytes are there, in its order among messages.
pub(crate) fn notices(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (from, to) = (&pair.a, &pair.b);
    let (region, token) = region(to, &[0; 4096], Rights::READ_WRITE);
    for round in 0..20_u32 {
        // Any 32 bits, those of our own frames among them.
        let imm = round.wrapping_mul(0x9e37_79b9) ^ 0xC000_0000;
        let bytes = pattern(round.into(), 4096);
        let writing = from
            .link
            .rdma_write_imm(&token, 0, filled(&from.fabric, &bytes), imm)
            .expect("allowed");
        from.link.post_bytes(1, &round.to_le_bytes()).expect("room");
        let notice = pair.receive(to);
        assert_eq!((notice.notice(), notice.len()), (Some(imm), 0));
        assert!(contents(&region) == bytes, "the bytes of notice {round} are there");
        assert_eq!(pair.receive(to).to_vec(), round.to_le_bytes());
        pair.drive(writing).expect("written");
    }
    // More than the window at once: they need credit, and wait for it.
    let writing: Vec<_> = (0..300)
        .map(|imm| {
            from.link.rdma_write_imm(&token, 0, filled(&from.fabric, b"x"), imm).expect("room")
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

/// What the grant does not cover is refused on this side, with the buffer, and the link lives.
pub(crate) fn bounds_and_rights(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let End { fabric, link } = &pair.a;
    let (readable, read_token) = region(&pair.b, &[1; 1000], Rights::READ);
    let (writable, write_token) = region(&pair.b, &[2; 1000], Rights::WRITE);
    for (offset, len) in [(0, 1001), (1000, 1), (1001, 0), (u64::MAX, 1), (u64::MAX - 5, 100)] {
        let buf = fabric.buffer(len).expect("memory");
        let failed_read = link.rdma_read(&read_token, offset, buf).expect_err("outside");
        assert_eq!(failed_read.error.kind(), ErrorKind::Denied, "{}", failed_read.error);
        assert_eq!(failed_read.buf.map(|buf| buf.len()), Some(len));
        let error =
            failed(link.rdma_write(&write_token, offset, filled(fabric, &vec![0; len])), "outside");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }
    let error = link
        .rdma_read(&write_token, 0, fabric.buffer(1).expect("memory"))
        .expect_err("no right")
        .error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = failed(link.rdma_write(&read_token, 0, filled(fabric, b"x")), "no right");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = failed(link.rdma_write_imm(&read_token, 0, filled(fabric, b"x"), 1), "no right");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let foreign = pair.b.fabric.buffer(10).expect("memory");
    let failed_read = link.rdma_read(&read_token, 0, foreign).expect_err("of another pool");
    assert_eq!(
        (failed_read.error.kind(), failed_read.buf.map(|buf| buf.len())),
        (ErrorKind::Misuse, Some(10))
    );
    let error =
        failed(link.rdma_write(&write_token, 0, filled(&pair.b.fabric, b"x")), "of another pool");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert_up(&pair);
    assert!(contents(&readable) == [1; 1000] && contents(&writable) == [2; 1000]);
    drop((readable, writable));
    pair.end();
}

/// The buffer comes back when it cannot be registered.
pub(crate) fn cannot_be_registered(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let own = pair.a.fabric.buffer(100).expect("memory");
    let (own, error) =
        pair.a.fabric.register_memory("nic9", own, Rights::READ).expect_err("no such device");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    let (own, error) =
        pair.b.link.register_memory(own, Rights::READ).expect_err("of another fabric");
    assert_eq!((error.kind(), own.len()), (ErrorKind::Misuse, 100), "{error}");
    let empty = pair.a.fabric.buffer(0).expect("memory");
    let (_, error) =
        pair.a.link.register_memory(empty, Rights::READ).expect_err("nothing to reach");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    drop(own);
    pair.end();
}

/// A peer that takes more than it was given loses its link, by the device; others do not notice.
pub(crate) fn forged_grants(fixture: &Fixture) {
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
        let writing = a.rdma_write(&forged, offset, buf).expect("this side cannot know");
        let (written, sent) =
            pair.drive(async { join!(writing, a.send(0, filled(&pair.a.fabric, &[1; 300]))) });
        let error = failed(written, "the device refuses");
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!error.to_string().contains("flushed"), "{error}");
        drop(sent); // before or after it
        let error = failed(pair.drive(b.ended()), "it is broken on the owner's side, too");
        assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
        assert!(!error.to_string().contains("flushed"), "{error}");
    }
    assert!(contents(&region) == pattern(1, 1000), "not one byte was written");
    assert_up(&pair);
    drop(region);
    pair.end();
}

/// Taken back while nobody uses it: the next use is denied on the peer's side, and the link lives.
pub(crate) fn revoke_idle(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (region, token) = region(&pair.b, &pattern(1, 1000), Rights::READ_WRITE);
    let other_region = pair
        .b
        .link
        .register_memory(buffer(&pair.b.fabric, &[9; 10]), Rights::READ)
        .expect("one more");
    let other_token = other_region.grant(&pair.b.link);
    let buf = pair.drive(region.revoke()).expect("revoked");
    assert!(buf[..] == pattern(1, 1000), "the buffer as it was");
    let failed_read = pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(10).expect("memory"));
    let error = failed_read.expect_err("revoked").error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = failed(pair.a.link.rdma_write(&token, 0, filled(&pair.a.fabric, b"x")), "revoked");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let reading = pair.a.link.rdma_read(&other_token, 0, pair.a.fabric.buffer(10).expect("memory"));
    assert_eq!(
        pair.drive(reading.expect("allowed")).expect("read")[..],
        [9; 10],
        "others are as they were"
    );
    assert_up(&pair);
    drop((buf, other_region));
    pair.end();
}

/// Many at once, more than a peer may be asked before it has answered.
pub(crate) fn revoke_many(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let count = 3000 / fixture.slower;
    let regions: Vec<_> = (0..count).map(|_| region(&pair.b, &[1; 10], Rights::READ).0).collect();
    let revoked = pair.drive(join_all(regions.into_iter().map(Region::revoke)));
    assert!(revoked.iter().all(Result::is_ok));
    drop(revoked);
    assert_up(&pair);
    pair.end();
}

/// Taken back while the peer reads and writes without pause: it finishes or is denied, the link
/// lives, and not one byte is read or written when the owner has its buffer again.
pub(crate) fn revoke_under_fire(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let rounds = 40 / fixture.slower.min(10) as u64;
    let (old, new) = (pattern(1, 64 * KIB), pattern(2, 64 * KIB));
    let mut denied_rounds = 0;
    for round in 0..rounds {
        let (region, token) = region(&pair.b, &old, Rights::READ_WRITE);
        let (link, fabric) = (&pair.a.link, &pair.a.fabric);
        // Of a grant of its own: what it does after the revocation must be denied.
        let fire = |write: bool| async move {
            let mut done = 0_u64;
            loop {
                let outcome = if write {
                    // The same bytes: they are seen only if they come too late.
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
                                    "bytes of after the revocation"
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
            assert!(buf[..] == old, "the peer wrote the same");
            buf.copy_from_slice(&new);
            for _ in 0..20 {
                yield_once().await;
            }
            assert!(buf[..] == new, "nobody writes it any more");
        };
        let (reads, more_reads, writes, ()) =
            pair.drive(async { join!(fire(false), fire(false), fire(true), revoke) });
        denied_rounds += u64::from(reads + more_reads + writes > 0);
        assert!(link.failure().is_none() && pair.b.link.failure().is_none(), "the link lives");
    }
    assert!(denied_rounds > 0, "nothing was under way in any round");
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

/// A grant that goes on to be used, as a peer would that does not listen: its link is lost, no
/// other.
pub(crate) fn ignored_revocation(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [a, b] = pair.another(fixture);
    let (region, _) = region(&pair.b, &pattern(1, 1000), Rights::READ);
    // By another number its own side does not know what is revoked.
    let token = region.grant(&b);
    let token = GrantToken { grant: token.grant + 1000, ..token };
    let reading = a
        .rdma_read(&token, 0, pair.a.fabric.buffer(1000).expect("memory"))
        .expect("keys know no numbers");
    assert!(pair.drive(reading).expect("read")[..] == pattern(1, 1000));
    let mut buf = pair.drive(region.revoke()).expect("revoked");
    buf.fill(0xee);
    let reading =
        a.rdma_read(&token, 0, pair.a.fabric.buffer(1000).expect("memory")).expect("not told");
    let failed_read = pair.drive(reading).expect_err("the key is dead");
    assert_eq!(failed_read.error.kind(), ErrorKind::Denied, "{}", failed_read.error);
    let left = failed_read.buf.expect("its buffer comes back");
    assert!(!left.windows(4).any(|bytes| bytes == [0xee; 4]), "bytes of after the revocation");
    drop(left);
    assert!(a.failure().is_some(), "it is lost");
    drop((a, b));
    assert_up(&pair);
    drop(buf);
    pair.end();
}

/// A peer that does not answer does not keep the owner's memory for ever.
pub(crate) fn revoke_has_a_deadline(fixture: &Fixture) {
    let config = Config { peer_timeout: Duration::from_millis(300), ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let (region, token) = region(&pair.b, &[1; 100], Rights::READ);
    let begun = Instant::now();
    // Only the owner is driven.
    let buf = super::pair::drive(&[&pair.b.fabric], region.revoke()).expect("revoked");
    assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    // The peer hears of it at last, and the link lives.
    pair.run_for(Duration::from_millis(50));
    assert!(pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory")).is_err());
    assert_up(&pair);
    drop(buf);
    pair.end();
}

/// A grant with an end.
pub(crate) fn expires(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (region, token) = region(&pair.b, &[1; 100], Rights::READ);
    let begun = Instant::now();
    let region = region.expires_in(Duration::from_millis(100));
    assert!(region.is_live());
    let reading = pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory"));
    pair.drive(reading.expect("not yet")).expect("read");
    pair.until("it has expired", || !region.is_live());
    assert!(begun.elapsed() >= Duration::from_millis(99), "{:?}", begun.elapsed());
    pair.until("the peer knows", || {
        pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory")).is_err()
    });
    pair.until("the buffer is back", || !region.read(0, &mut [0]));
    assert_eq!(pair.drive(region.revoke()).expect("the buffer")[..], [1; 100]);
    assert_up(&pair);
    pair.end();
}

/// Dropped, the key is dead at once; its buffer is free when the device has let go.
pub(crate) fn dropped_region(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [a, b] = pair.another(fixture);
    let (region, token) = region(&pair.b, &[1; 100], Rights::READ);
    drop(region);
    assert_eq!(pair.b.fabric.stats().memory.exposed_regions, 0);
    pair.until("its buffer is free", || pair.b.fabric.stats().memory.send.in_use_bytes == 0);
    let reading =
        a.rdma_read(&token, 0, pair.a.fabric.buffer(100).expect("memory")).expect("not told");
    let error = pair.drive(reading).expect_err("the key is dead").error;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    drop((a, b));

    // So is one whose revocation nobody waits for.
    let (region, _) = self::region(&pair.b, &[1; 100], Rights::READ);
    drop(region.revoke());
    pair.until("it is gone", || pair.b.fabric.stats().memory.exposed_regions == 0);
    assert_up(&pair);
    pair.end();
}

/// Revoked when the link that had the grant is going down, or has gone.
pub(crate) fn revoke_without_a_link(fixture: &Fixture) {
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
                pair.drive(a.close()).expect("in good order");
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

/// Futures that nobody waits for: the operations go on, and their memory comes back.
pub(crate) fn forgotten_operations(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let (region, token) = region(&pair.b, &[0; 100 * KIB], Rights::READ_WRITE);
    for number in 0..100 {
        let buf = pair.a.fabric.buffer(1000).expect("memory");
        let mut reading = pair.a.link.rdma_read(&token, number * 1000, buf).expect("allowed");
        if number % 2 == 0 {
            drop(once(&mut reading));
        }
        drop(reading);
        let bytes = filled(&pair.a.fabric, &[7; 1000]);
        drop(pair.a.link.rdma_write(&token, number * 1000, bytes).expect("allowed"));
    }
    let expected = [vec![7; 100_000], vec![0; 2400]].concat();
    pair.until("all is written", || contents(&region) == expected);
    pair.until("the memory is back", || pair.a.fabric.stats().memory.send.in_use_bytes == 0);
    drop(region);
    pair.end();
}

/// The peer reads what it may not: on the owner's side, too, requests under way are told what
/// happened and not what followed from it.
pub(crate) fn owner_with_requests_under_way(fixture: &Fixture) {
    let config =
        Config { recv_queue_depth: 16, window: 30, send_queue_depth: 20, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let (from, to) = (&pair.a, &pair.b);
    let (region, mut token) = region(to, &[1; 100], Rights::READ);
    // They wait for receives of the reader's, which is not driven.
    let mut sending: Vec<_> =
        (0..40).map(|_| to.link.send(0, filled(&to.fabric, &[1; 1000]))).collect();
    for future in &mut sending {
        once(future);
    }
    token.rkey ^= 0x00ff_00ff;
    let buf = from.fabric.buffer(10).expect("memory");
    let reading = from.link.rdma_read(&token, 0, buf).expect("it cannot know");
    let error = super::pair::drive(&[&from.fabric], reading).expect_err("refused").error;
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
