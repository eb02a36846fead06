//! Back-pressure: a peer that does not receive stops the sender, and no queue grows without bound.

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{Config, ErrorKind};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{Pair, failed, filled, pattern, poll_once};
use super::{Fixture, KIB};

/// The peer receives nothing. The window and the send queue fill up, and further posts fail.
/// Everything that was posted arrives in the end.
pub(crate) fn sender_stops_when_nobody_receives(fixture: &Fixture) {
    let config = Config { window: 16, send_queue_messages: 100, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let idle = pair.b.fabric.stats().memory.receive.in_use_bytes;
    let mut posted = 0_u64;
    let full = loop {
        let buf = filled(&pair.a.fabric, &pattern(posted, 1000));
        match pair.a.link.post(0, buf) {
            Ok(()) => posted += 1,
            Err((buf, error)) => {
                assert_eq!(error.kind(), ErrorKind::Full, "{error}");
                assert!(buf[..] == pattern(posted, 1000), "the buffer is returned unchanged");
                // Frames in flight may still make room.
                let before = pair.a.fabric.stats().totals.send_ops;
                pair.run_for(std::time::Duration::from_millis(20));
                if pair.a.fabric.stats().totals.send_ops == before {
                    break posted;
                }
            }
        }
        assert!(posted <= 1000, "the queue is unbounded");
    };
    assert_eq!(full, 16 + 100, "the peer's window plus the send queue");
    let held = pair.b.fabric.stats().memory.receive.in_use_bytes;
    assert!(held <= idle + 16 * 8192, "{held} bytes for a window of 16, {idle} when idle");
    assert_eq!(failed(pair.a.link.post_bytes(1, b"x"), "full").kind(), ErrorKind::Full);
    for number in 0..full {
        assert!(
            pair.receive(&pair.b).to_vec() == pattern(number, 1000),
            "message {number} is missing or was changed"
        );
    }
    pair.a.link.post_bytes(1, b"again").expect("room in the queue");
    assert_eq!(pair.receive(&pair.b).to_vec(), b"again");
    pair.end();
}

/// The send queue also has a limit in bytes. Large messages reach it before their number does.
pub(crate) fn queued_bytes_are_limited(fixture: &Fixture) {
    let config = Config { send_queue_bytes: 1 << 20, window: 4, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let bytes = pattern(3, 100 * KIB);
    let mut posted = 0;
    while pair.a.link.post(0, filled(&pair.a.fabric, &bytes)).is_ok() {
        posted += 1;
        assert!(posted < 20, "the queue is unbounded");
    }
    let under_way = u64::from(config.window) * fixture.segment_bytes(&config) / (100 << 10);
    assert!((8..=11 + under_way).contains(&posted), "{posted} messages of 100 KiB fit in 1 MiB");
    for _ in 0..posted {
        assert!(pair.receive(&pair.b).to_vec() == bytes, "content differs");
    }
    // A message larger than the limit is sent when nothing else is queued.
    let large = pattern(4, 1500 * KIB);
    let (sent, received) =
        pair.drive(async { join!(pair.a.link.send_bytes(0, &large), pair.b.link.recv()) });
    sent.expect("acknowledged");
    assert!(received.expect("a message").to_vec() == large, "content differs");
    pair.end();
}

/// Both sides send messages of several frames at once, with the smallest window.
pub(crate) fn window_of_two(fixture: &Fixture) {
    let pair = Pair::with(fixture, &Config { window: 2, ..Config::default() });
    assert_eq!((pair.a.link.peer_hello().window, pair.b.link.peer_hello().window), (2, 2));
    let count = 300 / fixture.work_divisor as u64;
    let len = |number: u64| (number as usize * 1709) % (50 * KIB);
    let one = |from, to| {
        let (from, to): (&super::pair::End, &super::pair::End) = (from, to);
        async move {
            let send = async {
                for number in 0..count {
                    let bytes = pattern(number, len(number));
                    from.link.send(0, filled(&from.fabric, &bytes)).await.expect("acknowledged");
                }
            };
            let receive = async {
                for number in 0..count {
                    let message = to.link.recv().await.expect("a message");
                    assert!(
                        message.to_vec() == pattern(number, len(number)),
                        "message {number} is missing or was changed"
                    );
                }
            };
            join!(send, receive);
        }
    };
    let [(a, b), _] = pair.directions();
    pair.drive(async { join!(one(a, b), one(b, a)) });
    pair.end();
}

/// With the smallest frames, a message of 64 KiB takes 256 frames.
pub(crate) fn smallest_segments(fixture: &Fixture) {
    let config = Config { recv_buffer_size: 256, window: 8, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    for len in [255, 256, 257, 64 * KIB] {
        let bytes = pattern(len as u64, len);
        for (from, to) in pair.directions() {
            let (sent, received) = pair.drive(async {
                join!(from.link.send(9, filled(&from.fabric, &bytes)), to.link.recv())
            });
            sent.expect("acknowledged");
            assert!(
                received.expect("a message").to_vec() == bytes,
                "a message of {len} bytes was changed"
            );
        }
    }
    pair.end();
}

/// There are more senders than places in the queue. Each waits for room, is woken, and sends.
pub(crate) fn senders_wait_for_room(fixture: &Fixture) {
    let config = Config { send_queue_messages: 4, window: 4, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let senders = 100 / fixture.work_divisor.min(4);
    let sending = (0..senders).map(|number| {
        let buf = filled(&pair.a.fabric, &pattern(number as u64, 500));
        pair.a.link.send((number % 8) as u16, buf)
    });
    let receiving = async {
        for _ in 0..senders {
            assert_eq!(pair.b.link.recv().await.expect("a message").len(), 500);
        }
    };
    let (sent, ()) = pair.drive(async { join!(join_all(sending), receiving) });
    sent.into_iter().for_each(|sent| sent.expect("acknowledged"));

    // A send that is dropped while it waits for room is never sent.
    let mut sending: Vec<_> =
        (0..20).map(|_| pair.a.link.send(0, filled(&pair.a.fabric, &[1; 500]))).collect();
    for future in &mut sending {
        poll_once(future);
    }
    drop(sending);
    let last = pair.a.link.send_bytes(0, b"last");
    let receive = async {
        let mut received = 0;
        while pair.b.link.recv().await.expect("a message").len() == 500 {
            received += 1;
        }
        received
    };
    let (sent, received) = pair.drive(async { join!(last, receive) });
    sent.expect("acknowledged");
    assert!((4..=8).contains(&received), "{received} of 20 sends had room, expected 4 to 8");
    pair.end();
}

/// There are fewer receives than the windows of all links allow. The device delays the senders, and
/// nothing is lost.
pub(crate) fn few_receives_lose_nothing(fixture: &Fixture) {
    let config = Config { recv_queue_depth: 16, ..Config::default() };
    let mut pair = Pair::with(fixture, &config);
    let mut links = vec![[pair.a.link.clone(), pair.b.link.clone()]];
    links.extend((0..7).map(|_| pair.another(fixture)));
    let count = 400 / fixture.work_divisor as u64;
    for number in 0..count {
        for [a, _] in &links {
            a.post_bytes(0, &pattern(number, 300)).expect("room in the queue");
        }
    }
    for number in 0..count {
        for [_, b] in &links {
            let message = pair.drive(b.recv()).expect("a message");
            assert!(
                message.to_vec() == pattern(number, 300),
                "message {number} is missing or was changed"
            );
        }
    }
    drop(links);
    pair.end();
}

/// Many small parts take many frames. The limit is the number of frames that the peer may have to
/// keep.
pub(crate) fn limits_the_number_of_parts(fixture: &Fixture) {
    let config = Config { max_message_bytes: 256 << 10, window: 16, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let most = pair.a.link.peer_hello().max_frames() as usize;
    assert_eq!(most, 2 * 32 + 16);
    let part = filled(&pair.a.fabric, b"bytes");
    let parts = |count| std::iter::repeat_n(part.clone(), count).collect::<Vec<_>>();
    let error = failed(pair.drive(pair.a.link.send_parts(0, parts(most + 1))), "too many frames");
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    // Messages with as many parts as allowed, on eight channels at once, wait for each other.
    let sending = (0..8).map(|channel| pair.a.link.send_parts(channel, parts(most)));
    let receiving = async {
        for _ in 0..8 {
            let message = pair.b.link.recv().await.expect("a message");
            assert_eq!((message.len(), message.pieces().count()), (5 * most, most));
        }
    };
    let (sent, ()) = pair.drive(async { join!(join_all(sending), receiving) });
    sent.into_iter().for_each(|sent| sent.expect("acknowledged"));
    drop(part);
    pair.end();
}

/// Both ends of many links send as much as they can and receive nothing. Neither fabric pins more
/// than its limit, nothing is lost, and the memory is unpinned afterwards.
pub(crate) fn pinned_memory_stays_within_its_limit(fixture: &Fixture) {
    const LIMIT: usize = 32 << 20;
    const LINKS: usize = 8; // their windows are 4 MiB each
    let memory =
        PoolConfig { memory_pool_max: LIMIT, receive_reserve: LIMIT / 2, ..PoolConfig::default() };
    let config =
        Config { memory, recv_buffer_size: 64 << 10, recv_queue_depth: 48, ..Config::default() };
    let mut pair = Pair::with(fixture, &config);
    let pinned = |pair: &Pair| {
        [&pair.a, &pair.b].map(|end| {
            let memory = end.fabric.stats().memory;
            assert!(memory.registered_bytes <= LIMIT as u64, "{memory:?}");
            memory.registered_bytes
        })
    };
    let links: Vec<_> = (0..LINKS).map(|_| pair.another(fixture)).collect();
    let bytes = pattern(5, 60 * KIB);
    let mut posted = [[0_usize; 2]; LINKS];
    let mut is_moving = true;
    while is_moving {
        is_moving = false;
        for (links, posted) in links.iter().zip(&mut posted) {
            for (number, end) in [&pair.a, &pair.b].into_iter().enumerate() {
                let Ok(mut buf) = end.fabric.buffer(bytes.len()) else { continue };
                buf.copy_from_slice(&bytes);
                let is_sent = links[number].post(0, buf.freeze()).is_ok();
                posted[number] += usize::from(is_sent);
                is_moving |= is_sent;
            }
        }
        // The loop ends when nothing has been sent for a while.
        pair.run_for(std::time::Duration::from_millis(if is_moving { 1 } else { 50 }));
        pinned(&pair);
    }
    let most = pinned(&pair);
    assert!(
        most.iter().all(|bytes| *bytes >= LIMIT as u64 * 3 / 4),
        "only {most:?} of {LIMIT} bytes are pinned for {posted:?} messages"
    );
    for (links, posted) in links.iter().zip(posted) {
        for (link, posted) in [(&links[1], posted[0]), (&links[0], posted[1])] {
            for _ in 0..posted {
                assert!(
                    pair.drive(link.recv()).expect("a message").to_vec() == bytes,
                    "content differs"
                );
                pinned(&pair);
            }
        }
    }
    drop(links);
    // What stays pinned: the initial memory, one step for the posted receives, and one spare step
    // for each purpose. Posted receives stay where they are until they are used.
    let rest = (config.memory.memory_pool_initial + 3 * config.memory.memory_pool_increase) as u64;
    pair.until("the memory is unpinned", || {
        for (from, to) in pair.directions() {
            from.link.post_bytes(0, b"a word").expect("room in the queue");
            assert_eq!(pair.receive(to).to_vec(), b"a word");
        }
        pinned(&pair).iter().all(|now| *now <= rest)
    });
    pair.end();
}
