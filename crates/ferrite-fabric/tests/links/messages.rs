//! Messages of every size arrive unchanged, and in order within their channel.

use ferrite_fabric::{Config, ErrorKind, Link, Message};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{End, Pair, failed, filled, pattern, poll_once};
use super::{Fixture, KIB, MIB};

/// Sends messages of sizes around every boundary (empty, inline, one frame, several frames, a whole
/// buffer) with `post_bytes`, `post` and `send`.
pub(crate) fn every_size_arrives(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let config = pair.a.fabric.config();
    let (inline, segment) = (config.inline_threshold as usize, config.recv_buffer_size as usize);
    let sizes = [
        0,
        1,
        63,
        inline - 1,
        inline,
        inline + 1,
        segment - 1,
        segment,
        segment + 1,
        3 * segment,
        64 * KIB,
        2 * MIB - 1,
        2 * MIB,
    ];
    for (seed, len) in sizes.into_iter().enumerate() {
        let bytes = pattern(seed as u64, len);
        for (from, to) in pair.directions() {
            from.link.post_bytes(1, &bytes).expect("room in the queue");
            from.link.post(2, filled(&from.fabric, &bytes)).expect("room in the queue");
            let (sent, received) = pair.drive(async {
                join!(from.link.send(3, filled(&from.fabric, &bytes)), async {
                    let mut received = Vec::new();
                    while received.len() < 3 {
                        received.push(to.link.recv().await.expect("a message"));
                    }
                    received
                })
            });
            sent.expect("acknowledged");
            let mut channels: Vec<u16> = received.iter().map(Message::channel).collect();
            channels.sort_unstable();
            assert_eq!(channels, [1, 2, 3]);
            for message in received {
                assert_eq!((message.len(), message.notice()), (len, None));
                assert_eq!(message.is_empty(), len == 0);
                assert!(message.to_vec() == bytes, "content differs, {len} bytes");
                assert!(message.into_bytes() == bytes, "content in one piece differs, {len} bytes");
            }
        }
    }
    pair.end();
}

/// Sends a message larger than a buffer, and one in parts of various sizes, including empty parts.
pub(crate) fn messages_larger_than_a_buffer(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let len = 20 * MIB / fixture.work_divisor;
    let bytes = pattern(7, len);
    let (sent, received) =
        pair.drive(async { join!(pair.a.link.send_bytes(0, &bytes), pair.b.link.recv()) });
    sent.expect("acknowledged");
    assert!(received.expect("a message").to_vec() == bytes, "content differs");

    let cuts = [0, 0, 1, 100, 8 * KIB, 100 * KIB, 100 * KIB, MIB];
    let mut parts: Vec<_> =
        cuts.windows(2).map(|cut| filled(&pair.b.fabric, &bytes[cut[0]..cut[1]])).collect();
    parts.push(filled(&pair.b.fabric, &[]));
    let (sent, received) =
        pair.drive(async { join!(pair.b.link.send_parts(5, parts), pair.a.link.recv()) });
    sent.expect("acknowledged");
    let received = received.expect("a message");
    assert_eq!(received.channel(), 5);
    assert!(received.to_vec() == bytes[..MIB], "content differs");
    drop(received);
    pair.end();
}

/// One side posts until there is no room, waits, and continues. The other side receives at its own
/// pace. There are more messages than a 16-bit frame counter can count.
pub(crate) fn many_in_order(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let count = 70_000 / fixture.work_divisor as u64;
    let (mut sent, mut received) = (0_u64, 0_u64);
    while received < count {
        while sent < count {
            let len = 8 + (sent % 300) as usize;
            match pair.a.link.post_bytes(0, &pattern_of(sent, len)) {
                Ok(()) => sent += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                    break;
                }
            }
        }
        let message = pair.receive(&pair.b);
        assert!(
            message.to_vec() == pattern_of(received, 8 + (received % 300) as usize),
            "message {received} is missing or was changed"
        );
        received += 1;
    }
    let stats = (pair.a.link.stats(), pair.b.link.stats());
    assert_eq!(stats.1.recv_ops, count);
    assert_eq!(
        stats.0.completion_errors + stats.0.stale_completions + stats.1.stale_completions,
        0
    );
    pair.end();
}

/// Returns bytes that begin with their number.
fn pattern_of(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend(pattern(number, len - 8));
    bytes
}

/// Sends messages of many sizes on four channels at once.
pub(crate) fn channels_keep_their_order(fixture: &Fixture) {
    let pair = Pair::with(fixture, &Config { channels: 4, ..Config::default() });
    let each = 60 / fixture.work_divisor.min(3) as u64;
    let len = |channel: u16, number: u64| {
        8 + (number as usize * 2917 + usize::from(channel) * 977) % (30 * KIB)
    };
    let send = async |link: &Link, channel: u16| {
        for number in 0..each {
            let bytes = pattern_of(number, len(channel, number));
            link.send(channel, filled(link.fabric(), &bytes)).await.expect("acknowledged");
        }
    };
    let link = &pair.a.link;
    let receive = async {
        let mut next = [0; 4];
        while next != [each; 4] {
            let message = pair.b.link.recv().await.expect("a message");
            let number = &mut next[usize::from(message.channel())];
            let expected = pattern_of(*number, len(message.channel(), *number));
            assert!(
                message.to_vec() == expected,
                "message {number} of channel {} is missing or was changed",
                message.channel()
            );
            *number += 1;
        }
    };
    pair.drive(async {
        join!(send(link, 0), send(link, 1), send(link, 2), send(link, 3), receive)
    });
    pair.end();
}

/// A large message does not hold up small ones on another channel.
pub(crate) fn large_messages_do_not_delay_small_ones(fixture: &Fixture) {
    const SMALL: u64 = 64;
    let config = Config { send_queue_bytes: 64 << 20, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let large = pattern(1, 32 * MIB / fixture.work_divisor);
    pair.a.link.post_bytes(1, &large).expect("an empty queue accepts any message");
    for number in 0..SMALL {
        pair.a.link.post_bytes(2, &pattern_of(number, 64)).expect("room in the queue");
    }
    // Frames that the device already has go first. Then the channels take turns, one frame each.
    let frames = config.send_queue_depth + u32::from(config.window) + SMALL as u32;
    let ahead = u64::from(frames) * fixture.segment_bytes(&config);
    for number in 0..SMALL {
        let message = pair.receive(&pair.b);
        assert_eq!(message.channel(), 2, "the large message arrived before small message {number}");
        assert!(
            message.to_vec() == pattern_of(number, 64),
            "message {number} is missing or was changed"
        );
        let received = pair.b.link.stats().recv_bytes;
        assert!(received < ahead, "{received} bytes arrived before small message {number}");
    }
    let message = pair.receive(&pair.b);
    assert!(message.channel() == 1 && message.to_vec() == large, "content differs");
    drop(message);
    pair.end();
}

/// A large message fills the queue up to the default limit on bytes. Small sends wait for room, and
/// still arrive before the large message.
pub(crate) fn small_messages_overtake_a_full_queue(fixture: &Fixture) {
    const SMALL: usize = 64;
    let pair = Pair::new(fixture);
    let large = pattern(1, 32 * MIB / fixture.work_divisor);
    let link = &pair.a.link;
    let small = (0..SMALL).map(|_| link.send(2, filled(link.fabric(), &[2; 64])));
    let receive = async {
        let mut channels = Vec::new();
        while channels.len() <= SMALL {
            channels.push(pair.b.link.recv().await.expect("a message").channel());
        }
        channels
    };
    let (sent, small, channels) =
        pair.drive(async { join!(link.send_bytes(1, &large), join_all(small), receive) });
    sent.expect("acknowledged");
    small.into_iter().for_each(|sent| sent.expect("acknowledged"));
    assert_eq!(
        channels.iter().position(|channel| *channel == 1),
        Some(SMALL),
        "small messages must arrive first"
    );
    pair.end();
}

/// Invalid calls fail at once and harm nothing.
pub(crate) fn rejects_invalid_calls(fixture: &Fixture) {
    let config = Config { max_message_bytes: 64 << 10, channels: 3, ..Config::default() };
    let pair = Pair::of(fixture, &Config::default(), &config);
    let End { fabric, link } = &pair.a;
    assert_eq!((link.peer_hello().channels, link.peer_hello().max_message_bytes), (3, 64 << 10));
    let (buf, error) = link.post(0, filled(fabric, &[1; 64 * KIB + 1])).expect_err("too large");
    assert_eq!((error.kind(), buf.len()), (ErrorKind::TooLarge, 64 * KIB + 1), "{error}");
    assert_eq!(
        failed(link.post_bytes(0, &[1; 64 * KIB + 1]), "too large").kind(),
        ErrorKind::TooLarge
    );
    let parts = vec![buf.clone(), buf.clone()];
    assert_eq!(
        failed(pair.drive(link.send_parts(0, parts)), "too large").kind(),
        ErrorKind::TooLarge
    );
    drop(buf);

    let buf = filled(fabric, &[1; 100]);
    let (buf, error) = link.post(3, buf).expect_err("unknown channel");
    assert_eq!((error.kind(), buf.len()), (ErrorKind::Misuse, 100), "{error}");
    assert_eq!(
        failed(link.post_bytes(u16::MAX, b"x"), "unknown channel").kind(),
        ErrorKind::Misuse
    );
    assert_eq!(
        failed(pair.drive(link.send(3, buf.clone())), "unknown channel").kind(),
        ErrorKind::Misuse
    );

    let (buf, error) = pair.b.link.post(0, buf).expect_err("buffer of another pool");
    assert_eq!((error.kind(), buf.len()), (ErrorKind::Misuse, 100), "{error}");
    let error = failed(pair.drive(pair.b.link.send(0, buf.clone())), "buffer of another pool");
    assert_eq!(error.kind(), ErrorKind::Misuse);

    link.post(2, buf).expect("valid message");
    assert_eq!(pair.receive(&pair.b).len(), 100);
    pair.end();
}

/// A future that is polled again after it was ready returns an error.
pub(crate) fn polling_after_completion_is_an_error(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let mut sending = pair.a.link.send(0, filled(&pair.a.fabric, b"hello"));
    pair.drive(&mut sending).expect("acknowledged");
    assert_eq!(
        failed(poll_once(&mut sending).expect("ready"), "already completed").kind(),
        ErrorKind::Misuse
    );
    let mut sending = pair.a.link.send(9999, filled(&pair.a.fabric, b"hello"));
    assert!(poll_once(&mut sending).is_some_and(|sent| sent.is_err()));
    assert_eq!(
        failed(poll_once(&mut sending).expect("ready"), "already completed").kind(),
        ErrorKind::Misuse
    );
    drop((sending, pair.receive(&pair.b)));
    pair.end();
}

/// Received messages belong to the application, even after the fabric is dropped.
pub(crate) fn messages_outlive_their_fabric(fixture: &Fixture) {
    let pair = Pair::new(fixture);
    let bytes = pattern(1, 20 * KIB);
    pair.a.link.post_bytes(0, &bytes).expect("room in the queue");
    pair.a.link.post_bytes(0, &bytes[..100]).expect("room in the queue");
    let (long, short) = (pair.receive(&pair.b), pair.receive(&pair.b).into_bytes());
    drop(pair);
    assert!(long.to_vec() == bytes && short == bytes[..100], "content differs");
}
