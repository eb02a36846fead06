//! How links end: cleanly, unexpectedly, and never too early.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ErrorKind};
use futures_util::join;

use super::pair::{End, Pair, buffer, clear, drive, failed, filled, pass, pattern, run_for, until};
use super::{Fixture, KIB};

/// Returns settings with short timeouts, for tests of what happens when they expire.
fn short_timeouts() -> Config {
    Config {
        keepalive: Duration::from_millis(200),
        peer_timeout: Duration::from_millis(300),
        close_timeout: Duration::from_millis(300),
        ..Config::default()
    }
}

/// Receives until the link is closed, and returns the messages.
async fn drain(end: &End) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    loop {
        match end.link.recv().await {
            Ok(message) => messages.push(message.to_vec()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
                return messages;
            }
        }
    }
}

/// Posts numbered messages, more than a window, with a large one among them.
fn post_some(end: &End, count: u64) {
    for number in 0..count {
        let len = if number == count / 2 { 200 * KIB } else { 100 };
        end.link.post_bytes(0, &pattern(number, len)).expect("room in the queue");
    }
}

fn assert_all(messages: &[Vec<u8>], count: u64) {
    assert_eq!(messages.len() as u64, count);
    for (number, message) in (0..).zip(messages) {
        let len = if number == count / 2 { 200 * KIB } else { 100 };
        assert!(*message == pattern(number, len), "message {number} is missing or was changed");
    }
}

/// Whichever side closes, everything that both sides sent before arrives.
pub(crate) fn closing_delivers_what_was_sent(fixture: &Fixture) {
    for closer in 0..3 {
        let pair = Pair::new(fixture);
        post_some(&pair.a, 300);
        post_some(&pair.b, 200);
        let closed = async {
            if closer != 1 {
                pair.a.link.close().await.expect("closed cleanly");
            }
            if closer != 0 {
                pair.b.link.close().await.expect("closed cleanly");
            }
        };
        let (at_a, at_b, ()) = pair.drive(async { join!(drain(&pair.a), drain(&pair.b), closed) });
        assert_all(&at_a, 200);
        assert_all(&at_b, 300);
        // The side that did not close sees the end, too.
        let (a, b) = pair.drive(async { join!(pair.a.link.ended(), pair.b.link.ended()) });
        assert!(a.is_ok() && b.is_ok(), "{a:?} {b:?}");
        let error = failed(pair.a.link.post_bytes(0, b"late"), "closed");
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert_eq!(failed(pair.b.link.try_recv(), "closed").kind(), ErrorKind::Closed);
        assert_eq!(failed(pair.drive(pair.b.link.recv()), "closed").kind(), ErrorKind::Closed);
        assert_eq!(pair.a.fabric.stats().failed_links + pair.b.fabric.stats().failed_links, 0);
        pair.clear();
    }
}

/// With a slow receiver, everything is delivered before the link ends. Messages that the
/// application has not taken by then can still be received.
pub(crate) fn closing_waits_for_a_slow_receiver(fixture: &Fixture) {
    let config = Config { window: 8, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    post_some(&pair.a, 100);
    let ending = pair.a.link.close();
    let receive = async {
        let mut messages = Vec::new();
        while messages.len() < 95 {
            messages.push(pair.b.link.recv().await.expect("a message").to_vec());
            let end = Instant::now() + Duration::from_millis(1);
            std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                if Instant::now() < end {
                    std::task::Poll::Pending
                } else {
                    std::task::Poll::Ready(())
                }
            })
            .await;
        }
        messages
    };
    let (ended, mut messages) = pair.drive(async { join!(ending, receive) });
    ended.expect("closed cleanly");
    pair.drive(pair.b.link.ended()).expect("closed cleanly");
    messages.extend(pair.drive(drain(&pair.b)));
    assert_all(&messages, 100);
    pair.clear();
}

/// Dropping the last handle closes the link, and everything sent before arrives.
pub(crate) fn dropping_closes(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    post_some(&pair.a, 150);
    let Pair { a, b, listener } = pair;
    let clone = a.link.clone();
    drop(a.link);
    run_for(&[&a.fabric, &b.fabric], Duration::from_millis(20));
    assert!(b.link.failure().is_none(), "the link must stay up while a handle is left");
    drop(clone);
    let messages = drive(&[&a.fabric, &b.fabric], drain(&b));
    assert_all(&messages, 150);
    drive(&[&a.fabric, &b.fabric], b.link.ended()).expect("closed cleanly");
    drop((b.link, listener));
    clear([a.fabric, b.fabric]);
}

/// The resources of a link are released when it ends, without delay.
pub(crate) fn closed_links_are_released(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    for round in 0..5 {
        let [a, b] = pair.another(fixture);
        a.post_bytes(0, b"hello").expect("room in the queue");
        assert_eq!(pair.drive(b.recv()).expect("a message").to_vec(), b"hello");
        let begun = Instant::now();
        pair.drive(a.close()).expect("closed cleanly");
        pair.until("the link is gone", || {
            pair.a.fabric.stats().links == 1 && pair.b.fabric.stats().links == 1
        });
        assert!(begun.elapsed() < Duration::from_secs(4), "round {round}: {:?}", begun.elapsed());
    }
    pair.end();
}

/// A new link does not inherit timeouts of the link before it.
pub(crate) fn new_links_do_not_inherit_timeouts(fixture: &Fixture) {
    let mut pair = Pair::with(fixture, &short_timeouts());
    for _ in 0..3 {
        let [a, b] = pair.another(fixture);
        drop(b);
        pair.drive(a.close()).expect("closed cleanly");
        pair.until("the link is gone", || pair.a.fabric.stats().links == 1);
        let [a, b] = pair.another(fixture);
        pair.run_for(Duration::from_millis(400));
        for link in [&a, &b] {
            assert!(link.failure().is_none(), "{:?}", link.failure());
        }
    }
    pair.end();
}

/// Neither a revocation nor the answer to it ends a link.
pub(crate) fn revocation_does_not_end_the_link(fixture: &Fixture) {
    let pair = Pair::with(fixture, &short_timeouts());
    let buf = buffer(&pair.b.fabric, &[1; 100]);
    let region = pair.b.link.register_memory(buf, Rights::READ).expect("a region");
    let _token = region.grant(&pair.b.link);
    pair.drive(region.revoke()).expect("revoked");
    pair.run_for(Duration::from_millis(500));
    for link in [&pair.a.link, &pair.b.link] {
        assert!(link.failure().is_none(), "{:?}", link.failure());
    }
    pair.end();
}

/// A fabric that was not driven for a while still gets its full time to close.
pub(crate) fn closing_after_a_pause(fixture: &Fixture) {
    let config = Config { close_timeout: Duration::from_millis(300), ..Config::default() };
    let pair = Pair::with(fixture, &config);
    std::thread::sleep(Duration::from_millis(400));
    let ended = pair.drive(pair.a.link.close());
    ended.expect("closed cleanly");
    pair.clear();
}

/// A peer that receives nothing cannot keep a closing link open forever.
pub(crate) fn closing_has_a_deadline(fixture: &Fixture) {
    let config =
        Config { window: 4, close_timeout: Duration::from_millis(300), ..Config::default() };
    let pair = Pair::with(fixture, &config);
    post_some(&pair.a, 100);
    let begun = Instant::now();
    drop(pair.a.link.close()); // closing twice is allowed
    let error = failed(pair.drive(pair.a.link.close()), "the peer receives nothing");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    let error = failed(pair.drive(pair.b.link.ended()), "the link was cut");
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    pair.clear();
}

/// An abort fails the pending operations of its own side with `Closed`. At the peer, the link ends
/// with `LinkDown`.
pub(crate) fn abort_fails_pending_operations(fixture: &Fixture) {
    let pair = Pair::with(fixture, &Config { window: 4, ..Config::default() });
    let sending: Vec<_> =
        (0..10).map(|_| pair.a.link.send(0, filled(&pair.a.fabric, &[1; 20_000]))).collect();
    let ending = pair.b.link.ended();
    pair.run_for(Duration::from_millis(5));
    let waiting = async {
        join!(
            futures_util::future::join_all(sending),
            pair.a.link.recv(),
            pair.a.link.ended(),
            ending,
            async {
                for _ in 0..3 {
                    pair.b.link.recv().await.expect("first messages");
                }
                pair.a.link.abort();
            }
        )
    };
    let (sent, received, ended, peer, ()) = pair.drive(waiting);
    assert!(sent.iter().any(Result::is_err));
    for error in sent.into_iter().filter_map(Result::err).chain(received.err()) {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
    ended.expect("an abort is no failure on its own side");
    let error = failed(peer, "the link was cut");
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    pair.clear();
}

/// A message that arrived only in part is not delivered.
pub(crate) fn partial_messages_are_not_delivered(fixture: &Fixture) {
    let slow = Config { poll_batch: 1, ..Config::default() };
    for passes in 1..14 {
        let pair = Pair::of(fixture, &Config::default(), &slow);
        let bytes = pattern(5, 40 * 8 * KIB);
        pair.a.link.post_bytes(0, &bytes).expect("room in the queue");
        let before = pair.b.link.stats().recv_bytes;
        until(&[&pair.a.fabric], "something was sent", || pair.a.link.stats().send_ops > 0);
        for _ in 0..passes {
            pass(&[&pair.b.fabric]);
        }
        let taken = pair.b.link.stats().recv_bytes - before;
        pair.b.link.abort();
        pair.run_for(Duration::from_millis(20));
        let whole =
            std::iter::from_fn(|| pair.b.link.try_recv().ok().flatten()).collect::<Vec<_>>();
        for message in whole {
            assert!(
                message.to_vec() == bytes,
                "a message of {} bytes is incomplete, {taken} bytes received",
                message.len()
            );
        }
        pair.clear();
    }
}

/// The peer's fabric is dropped with its link and its listener. It announces the close, but does
/// not wait for the answer.
pub(crate) fn dropping_the_peers_fabric_ends_the_link(fixture: &Fixture) {
    let Pair { a, b, listener } = Pair::with(fixture, &Config { window: 2, ..Config::default() });
    let sending =
        (0..5).map(|_| a.link.send(0, filled(&a.fabric, &[1; 20_000]))).collect::<Vec<_>>();
    let begun = Instant::now();
    let (sent, received, ended) = drive(&[&a.fabric], async {
        let dropped = async { drop((b, listener)) };
        let (sent, received, ended, ()) =
            join!(futures_util::future::join_all(sending), a.link.recv(), a.link.ended(), dropped);
        (sent, received, ended)
    });
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let expected = [ErrorKind::LinkDown, ErrorKind::Closed];
    for error in sent.into_iter().filter_map(Result::err).chain(received.err()).chain(ended.err()) {
        assert!(expected.contains(&error.kind()), "{error:?}");
    }
    drop(a.link);
    clear([a.fabric]);
}

/// Pending futures fail when their own fabric is dropped.
pub(crate) fn dropping_the_fabric_fails_pending_futures(fixture: &Fixture) {
    let pair = Pair::with(fixture, &Config { window: 2, ..Config::default() });
    let mut sending: Vec<_> =
        (0..5).map(|_| pair.a.link.send(0, filled(&pair.a.fabric, &[1; 20_000]))).collect();
    for future in &mut sending {
        assert!(super::pair::poll_once(future).is_none(), "the peer receives nothing");
    }
    let ending = pair.a.link.ended();
    let Pair { a, b, listener } = pair;
    let pool = a.fabric.pool().clone();
    drop((a, listener));
    let (sent, ended) =
        drive(&[&b.fabric], async { join!(futures_util::future::join_all(sending), ending) });
    for error in sent.into_iter().map(|sent| failed(sent, "the fabric is gone")) {
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    }
    drop(ended);
    super::pair::assert_unused(&pool);
    drop(pool);
    drop(b.link);
    clear([b.fabric]);
}

/// The peer's fabric is not driven, as if its process were stopped. The peer's device or kernel
/// still answers, but the process does not.
pub(crate) fn detects_a_stalled_peer(fixture: &Fixture) {
    let pair = Pair::with(fixture, &short_timeouts());
    let begun = Instant::now();
    let error = failed(drive(&[&pair.a.fabric], pair.a.link.recv()), "the peer is stopped");
    let after = begun.elapsed();
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error}");
    // The detection takes at least half of the keepalive interval, then the whole `peer_timeout`.
    assert!(after >= Duration::from_millis(390), "{after:?}");
    assert!(after < Duration::from_secs(3), "{after:?}");
    pair.clear();
}

pub(crate) fn idle_links_stay_up(fixture: &Fixture) {
    let config = Config { keepalive: Duration::from_millis(50), ..short_timeouts() };
    let mut pair = Pair::with(fixture, &config);
    let links = [pair.another(fixture), pair.another(fixture)];
    pair.run_for(Duration::from_millis(1200));
    for link in links.iter().flatten().chain([&pair.a.link, &pair.b.link]) {
        assert!(link.failure().is_none(), "{:?}", link.failure());
        let asked = link.stats().controls_sent;
        assert!((2..=60).contains(&asked), "{asked} control messages in 1.2 s, expected 2 to 60");
    }
    drop(links);
    pair.end();
}
