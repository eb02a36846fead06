//! How links end: in good order, by surprise, and not before their time.

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{Config, ErrorKind};
use futures_util::join;

use super::pair::{End, Pair, buffer, clear, drive, failed, filled, pass, pattern, run_for, until};
use super::{Fixture, KIB};

/// Short waits, for tests of what happens when they are over.
fn impatient() -> Config {
    Config {
        keepalive: Duration::from_millis(200),
        peer_timeout: Duration::from_millis(300),
        close_timeout: Duration::from_millis(300),
        ..Config::default()
    }
}

/// What a link gets until it is closed.
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

/// Numbered messages, more than a window, a large one among them.
fn post_some(end: &End, count: u64) {
    for number in 0..count {
        let len = if number == count / 2 { 200 * KIB } else { 100 };
        end.link.post_bytes(0, &pattern(number, len)).expect("room");
    }
}

fn assert_all(messages: &[Vec<u8>], count: u64) {
    assert_eq!(messages.len() as u64, count);
    for (number, message) in (0..).zip(messages) {
        let len = if number == count / 2 { 200 * KIB } else { 100 };
        assert!(*message == pattern(number, len), "message {number}");
    }
}

/// Whoever closes: what both sides had sent before arrives.
pub(crate) fn closing_delivers_what_was_sent(fixture: &Fixture) {
    for closer in 0..3 {
        let pair = Pair::new(fixture);
        post_some(&pair.a, 300);
        post_some(&pair.b, 200);
        let closed = async {
            if closer != 1 {
                pair.a.link.close().await.expect("in good order");
            }
            if closer != 0 {
                pair.b.link.close().await.expect("in good order");
            }
        };
        let (at_a, at_b, ()) = pair.drive(async { join!(drain(&pair.a), drain(&pair.b), closed) });
        assert_all(&at_a, 200);
        assert_all(&at_b, 300);
        // Whoever did not close hears that it is over, too.
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

/// A receiver that takes its time: all is delivered before the end, and what lies there after it.
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
    ended.expect("in good order");
    pair.drive(pair.b.link.ended()).expect("in good order");
    messages.extend(pair.drive(drain(&pair.b)));
    assert_all(&messages, 100);
    pair.clear();
}

/// Dropping the last handle closes; what was sent arrives.
pub(crate) fn dropping_closes(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    post_some(&pair.a, 150);
    let Pair { a, b, listener } = pair;
    let clone = a.link.clone();
    drop(a.link);
    run_for(&[&a.fabric, &b.fabric], Duration::from_millis(20));
    assert!(b.link.failure().is_none(), "one handle is left");
    drop(clone);
    let messages = drive(&[&a.fabric, &b.fabric], drain(&b));
    assert_all(&messages, 150);
    drive(&[&a.fabric, &b.fabric], b.link.ended()).expect("in good order");
    drop((b.link, listener));
    clear([a.fabric, b.fabric]);
}

/// What a link had is given back when it ends, not some time later.
pub(crate) fn closed_links_are_gone(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    for round in 0..5 {
        let [a, b] = pair.another(fixture);
        a.post_bytes(0, b"hello").expect("room");
        assert_eq!(pair.drive(b.recv()).expect("a message").to_vec(), b"hello");
        let begun = Instant::now();
        pair.drive(a.close()).expect("in good order");
        pair.until("the link is gone", || {
            pair.a.fabric.stats().links == 1 && pair.b.fabric.stats().links == 1
        });
        assert!(begun.elapsed() < Duration::from_secs(4), "round {round}: {:?}", begun.elapsed());
    }
    pair.end();
}

/// The next link must not pay for the time of the one before it.
pub(crate) fn successors_live_their_own_time(fixture: &Fixture) {
    let mut pair = Pair::with(fixture, &impatient());
    for _ in 0..3 {
        let [a, b] = pair.another(fixture);
        drop(b);
        pair.drive(a.close()).expect("in good order");
        pair.until("the link is gone", || pair.a.fabric.stats().links == 1);
        let [a, b] = pair.another(fixture);
        pair.run_for(Duration::from_millis(400));
        for link in [&a, &b] {
            assert!(link.failure().is_none(), "{:?}", link.failure());
        }
    }
    pair.end();
}

/// Neither revoking memory nor an answer to it ends a link.
pub(crate) fn revocation_is_no_farewell(fixture: &Fixture) {
    let pair = Pair::with(fixture, &impatient());
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

/// A fabric that was not driven for a while has no less time to close.
pub(crate) fn closing_after_a_pause(fixture: &Fixture) {
    let config = Config { close_timeout: Duration::from_millis(300), ..Config::default() };
    let pair = Pair::with(fixture, &config);
    std::thread::sleep(Duration::from_millis(400));
    let ended = pair.drive(pair.a.link.close());
    ended.expect("in good order");
    pair.clear();
}

/// A peer that takes nothing does not keep a closing link for ever.
pub(crate) fn closing_has_a_deadline(fixture: &Fixture) {
    let config =
        Config { window: 4, close_timeout: Duration::from_millis(300), ..Config::default() };
    let pair = Pair::with(fixture, &config);
    post_some(&pair.a, 100);
    let begun = Instant::now();
    drop(pair.a.link.close()); // to close twice is to close
    let error = failed(pair.drive(pair.a.link.close()), "the peer takes nothing");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(290), "{:?}", begun.elapsed());
    let error = failed(pair.drive(pair.b.link.ended()), "cut");
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    pair.clear();
}

/// Ending it now: whoever waits hears it, on both sides.
pub(crate) fn abort_ends_everything(fixture: &Fixture) {
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
                    pair.b.link.recv().await.expect("the first messages");
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
    ended.expect("the own wish is no failure");
    let error = failed(peer, "cut");
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    pair.clear();
}

/// A message of which only the beginning or only the end arrived is none.
pub(crate) fn half_a_message_is_none(fixture: &Fixture) {
    let slow = Config { poll_batch: 1, ..Config::default() };
    for passes in 1..14 {
        let pair = Pair::of(fixture, &Config::default(), &slow);
        let bytes = pattern(5, 40 * 8 * KIB);
        pair.a.link.post_bytes(0, &bytes).expect("room");
        let before = pair.b.link.stats().recv_bytes;
        until(&[&pair.a.fabric], "something is on its way", || pair.a.link.stats().send_ops > 0);
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
                "{} bytes as a message, {taken} before",
                message.len()
            );
        }
        pair.clear();
    }
}

/// The peer's fabric is dropped with everything on it: it said farewell, and did not wait for the
/// answer.
pub(crate) fn dropped_fabric(fixture: &Fixture) {
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

/// Our own fabric goes: what waited is told.
pub(crate) fn futures_outlive_their_fabric(fixture: &Fixture) {
    let pair = Pair::with(fixture, &Config { window: 2, ..Config::default() });
    let mut sending: Vec<_> =
        (0..5).map(|_| pair.a.link.send(0, filled(&pair.a.fabric, &[1; 20_000]))).collect();
    for future in &mut sending {
        assert!(super::pair::once(future).is_none(), "the peer takes nothing");
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

/// A peer whose process has stopped: its device answers, it does not.
pub(crate) fn stalled_peer(fixture: &Fixture) {
    let pair = Pair::with(fixture, &impatient());
    let begun = Instant::now();
    let error = failed(drive(&[&pair.a.fabric], pair.a.link.recv()), "the peer sleeps");
    let after = begun.elapsed();
    assert_eq!(error.kind(), ErrorKind::PeerStalled, "{error}");
    // Half of the keepalive at least, then the whole peer_timeout.
    assert!(after >= Duration::from_millis(390), "{after:?}");
    assert!(after < Duration::from_secs(3), "{after:?}");
    pair.clear();
}

/// Nothing to say is no reason to part.
pub(crate) fn idle_links_stay(fixture: &Fixture) {
    let config = Config { keepalive: Duration::from_millis(50), ..impatient() };
    let mut pair = Pair::with(fixture, &config);
    let links = [pair.another(fixture), pair.another(fixture)];
    pair.run_for(Duration::from_millis(1200));
    for link in links.iter().flatten().chain([&pair.a.link, &pair.b.link]) {
        assert!(link.failure().is_none(), "{:?}", link.failure());
        let asked = link.stats().controls_sent;
        assert!((2..=60).contains(&asked), "{asked} questions and answers in 1.2 s");
    }
    drop(links);
    pair.end();
}
