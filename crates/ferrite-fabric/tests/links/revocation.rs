//! Revocation of grants: after it, the peer cannot access the memory, whatever was in progress.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::{GrantToken, Rights};
use ferrite_fabric::{Config, ErrorKind, Region};
use futures_util::future::join_all;
use futures_util::join;

use super::one_sided::{assert_up, region};
use super::pair::{Pair, buffer, failed, filled, pattern};
use super::{Fixture, KIB};

/// The owner revokes a grant that nobody uses. The peer's own side denies its next use, and the
/// link stays up.
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
/// denied, and the link stays up. Once the owner has its buffer back, the peer neither reads nor
/// writes a byte of it.
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
            assert!(buf[..] == old, "the peer writes the same bytes, so nothing may change");
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
    // When the peer is driven again, it learns of the revocation, and the link stays up.
    pair.run_for(Duration::from_millis(50));
    assert!(pair.a.link.rdma_read(&token, 0, pair.a.fabric.buffer(1).expect("memory")).is_err());
    assert_up(&pair);
    drop(buf);
    pair.end();
}

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

/// Dropping a region invalidates its key at once. The buffer is free when the device has released
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

/// Revokes a grant while its link is going down, or after the link ended.
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
