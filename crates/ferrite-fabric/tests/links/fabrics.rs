//! Fabrics with extreme or invalid settings, many links or little memory, their statistics, and how
//! they are dropped.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{Config, ErrorKind, Link};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{Pair, drive, failed, filled, open_link, pass, pattern, until};
use super::{Fixture, KIB, MIB};

/// Sends `count` messages of mixed sizes on every link, both ways at once, and checks that all
/// arrive.
fn exchange(pair: &Pair, links: &[[Link; 2]], count: u64) {
    let len = |number: u64| (number as usize * 2741) % (20 * KIB);
    let one = |from: &Link, to: &Link| {
        let (from, to) = (from.clone(), to.clone());
        async move {
            let send = async {
                for number in 0..count {
                    let buf = filled(from.fabric(), &pattern(number, len(number)));
                    from.send((number % 3) as u16, buf).await.expect("acknowledged");
                }
            };
            let receive = async {
                for _ in 0..count {
                    let message = to.recv().await.expect("a message");
                    let number = (0..count)
                        .find(|number| len(*number) == message.len())
                        .expect("a sent length");
                    assert!(
                        message.to_vec() == pattern(number, message.len()),
                        "message {number} is missing or was changed"
                    );
                }
            };
            join!(send, receive);
        }
    };
    pair.drive(join_all(links.iter().flat_map(|[a, b]| [one(a, b), one(b, a)])));
    for fabric in [&pair.a.fabric, &pair.b.fabric] {
        let stats = fabric.stats();
        assert_eq!((stats.failed_links, stats.totals.completion_errors), (0, 0));
        assert_eq!(stats.totals.stale_completions + stats.unknown_receives, 0);
    }
}

/// Small queues with many links: no queue overruns, and every message is delivered.
pub(crate) fn small_queues(fixture: &Fixture) {
    let config = Config {
        cq_size: 32,
        recv_queue_depth: 16,
        send_queue_depth: 16,
        poll_batch: 1,
        window: 4,
        ..Config::default()
    };
    let mut pair = Pair::with(fixture, &config);
    let links: Vec<_> =
        (0..40 / fixture.work_divisor.min(8)).map(|_| pair.another(fixture)).collect();
    exchange(&pair, &links, 12);
    drop(links);
    pair.end();
}

/// Nothing is sent inline, neither messages nor control frames.
pub(crate) fn works_without_inline_sends(fixture: &Fixture) {
    let config = Config { inline_threshold: 0, window: 4, ..Config::default() };
    let mut pair = Pair::with(fixture, &config);
    let links = [pair.another(fixture), pair.another(fixture)];
    exchange(&pair, &links, 40 / fixture.work_divisor.min(4) as u64);
    pair.a.link.post_bytes(0, b"").expect("room in the queue");
    pair.a.link.post_bytes(0, b"x").expect("room in the queue");
    assert_eq!((pair.receive(&pair.b).len(), pair.receive(&pair.b).len()), (0, 1));
    drop(links);
    pair.end();
}

/// An inline threshold above the device's limit: the fabric uses the device's limit.
pub(crate) fn caps_the_inline_threshold(fixture: &Fixture) {
    let config = Config { inline_threshold: 100_000, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    for len in [0, 1, 63, 64, 65, 511, 512, 513, 8 * KIB, 100_000] {
        let bytes = pattern(len as u64, len);
        pair.a.link.post_bytes(0, &bytes).expect("room in the queue");
        assert!(pair.receive(&pair.b).to_vec() == bytes, "a message of {len} bytes was changed");
    }
    pair.end();
}

/// Invalid settings are reported when the fabric is built.
pub(crate) fn rejects_invalid_settings(fixture: &Fixture) {
    let good = Config::default;
    for (config, word) in [
        (Config { recv_buffer_size: 100, ..good() }, "recv_buffer_size"),
        (Config { recv_buffer_size: 4 << 20, ..good() }, "recv_buffer_size"),
        (Config { window: 1, ..good() }, "window"),
        (Config { window: 40_000, ..good() }, "window"),
        (Config { channels: 0, ..good() }, "channels"),
        (Config { channels: 20_000, ..good() }, "channels"),
        (Config { max_message_bytes: 100, ..good() }, "max_message_bytes"),
        (Config { poll_batch: 0, ..good() }, "poll_batch"),
        (Config { max_half_open: 0, ..good() }, "max_half_open"),
        (Config { send_queue_messages: 0, ..good() }, "send_queue_messages"),
        (
            Config { memory: PoolConfig { receive_reserve: 0, ..PoolConfig::default() }, ..good() },
            "receive_reserve",
        ),
    ] {
        let built = fixture.builder().device(&fixture.hosts[0].device).config(config).build();
        let error = failed(built, word);
        assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let error = failed(fixture.builder().device("nic9").build(), "no such device");
    assert!(
        error.to_string().contains(&fixture.hosts[0].device),
        "the error must list the devices: {error}"
    );
}

/// The cost of a message does not depend on the number of idle links.
pub(crate) fn idle_links_cost_nothing(fixture: &Fixture) {
    const ROUNDS: u32 = 300;
    let mut pair = Pair::new(fixture);
    let measure = |pair: &Pair| {
        // CPU time, and the best of several measurements: other programs run on this machine, too.
        let times = (0..9).map(|_| {
            let begun = thread_cpu_time();
            for _ in 0..ROUNDS {
                pair.a.link.post_bytes(0, &[1; 64]).expect("room in the queue");
                while pair.b.link.try_recv().expect("link is up").is_none() {
                    pass(&[&pair.a.fabric, &pair.b.fabric]);
                }
            }
            thread_cpu_time() - begun
        });
        times.min().expect("several measurements")
    };
    let alone = measure(&pair);
    let idle: Vec<_> =
        (0..1000 / fixture.work_divisor.min(10)).map(|_| pair.another(fixture)).collect();
    let among_many = measure(&pair);
    assert!(
        among_many < alone * 2 + Duration::from_millis(1),
        "{ROUNDS} messages take {alone:?} with one link, {among_many:?} with {}",
        idle.len()
    );
    // Closes them one by one: closing many at once is another test.
    for [a, _b] in idle {
        pair.drive(a.close()).expect("closed cleanly");
    }
    pair.end();
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.try_into().expect("CPU time is not negative")
}

/// The application keeps received messages until there is no memory for more. Peers wait, and
/// continue when the application releases the messages.
pub(crate) fn receive_memory_runs_out(fixture: &Fixture) {
    let memory =
        PoolConfig { receive_reserve: 2 << 20, memory_pool_max: 64 << 20, ..PoolConfig::default() };
    let config = Config { memory, recv_queue_depth: 64, ..Config::default() };
    let pair = Pair::of(fixture, &Config::default(), &config);
    let mut kept = Vec::new();
    let mut sent = 0_u64;
    let mut last = Instant::now();
    // There is memory for 256 receives. It is used up when nothing more arrives for a while.
    while kept.len() < 256 {
        while sent < 600 && pair.a.link.post_bytes(0, &pattern(sent, 300)).is_ok() {
            sent += 1;
        }
        pass(&[&pair.a.fabric, &pair.b.fabric]);
        if let Some(message) = pair.b.link.try_recv().expect("link is up") {
            kept.push(message);
            last = Instant::now();
        } else if last.elapsed() > Duration::from_secs(2) {
            break;
        }
    }
    assert!(
        (200..=256).contains(&kept.len()),
        "{} messages in 2 MiB, expected about 256",
        kept.len()
    );
    assert!(pair.b.link.failure().is_none() && pair.a.link.failure().is_none());
    while sent < 600 {
        pair.drive(pair.a.link.room()).expect("link is up");
        sent += u64::from(pair.a.link.post_bytes(0, &pattern(sent, 300)).is_ok());
        if pair.a.link.stats().send_ops + 1000 < sent {
            break;
        }
    }
    let mut received = kept.len() as u64;
    for (number, message) in (0..).zip(kept.drain(..)) {
        assert!(
            message.to_vec() == pattern(number, 300),
            "message {number} is missing or was changed"
        );
    }
    while received < sent {
        assert!(
            pair.receive(&pair.b).to_vec() == pattern(received, 300),
            "message {received} is missing or was changed"
        );
        received += 1;
    }
    pair.end();
}

/// A message larger than the peer's receive memory is rejected at once: it could never arrive.
pub(crate) fn rejects_messages_larger_than_the_receive_memory(fixture: &Fixture) {
    let memory =
        PoolConfig { receive_reserve: 2 << 20, memory_pool_max: 64 << 20, ..PoolConfig::default() };
    let config = Config { memory, recv_queue_depth: 64, ..Config::default() };
    let pair = Pair::of(fixture, &Config::default(), &config);
    let error = failed(pair.drive(pair.a.link.send_bytes(0, &vec![1; 4 * MIB])), "too large");
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    // The largest message that the peer accepts arrives, on several links at once.
    let most = pair.a.link.peer_hello().max_message_bytes as usize;
    assert!((8 * KIB..2 * MIB).contains(&most), "{most}");
    let mut pair = pair;
    let links = [pair.another(fixture), pair.another(fixture), pair.another(fixture)];
    let one = |[a, b]: &[Link; 2]| {
        let (a, b) = (a.clone(), b.clone());
        async move {
            let bytes = pattern(1, a.peer_hello().max_message_bytes as usize);
            let (sent, received) = join!(a.send_bytes(0, &bytes), b.recv());
            sent.expect("acknowledged");
            assert!(received.expect("a message").to_vec() == bytes, "content differs");
        }
    };
    pair.drive(join_all(links.iter().map(one)));
    drop(links);
    pair.end();
}

/// When the send memory is used up, sends fail. They work again once memory is returned.
pub(crate) fn send_memory_runs_out(fixture: &Fixture) {
    let memory =
        PoolConfig { memory_pool_max: 8 << 20, receive_reserve: 6 << 20, ..PoolConfig::default() };
    let config = Config { memory, inline_threshold: 0, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    let mut kept = Vec::new();
    let error = loop {
        match pair.a.fabric.buffer(64 * KIB) {
            Ok(buf) => kept.push(buf),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert_eq!(kept.len(), 32);
    assert_eq!(failed(pair.a.link.post_bytes(0, b"x"), "no memory").kind(), ErrorKind::Full);
    assert_eq!(
        failed(pair.drive(pair.a.link.send_bytes(0, b"x")), "no memory").kind(),
        ErrorKind::Full
    );
    // Receiving works without send memory. Control frames wait until there is send memory.
    for number in 0..200_u32 {
        pair.b.link.post_bytes(0, &number.to_le_bytes()).expect("room in the queue");
    }
    for _ in 0..30 {
        pair.receive(&pair.a);
    }
    kept.clear();
    for _ in 30..200 {
        pair.receive(&pair.a);
    }
    pair.a.link.post_bytes(0, b"x").expect("memory");
    assert_eq!(pair.receive(&pair.b).to_vec(), b"x");
    pair.end();
}

pub(crate) fn statistics_add_up(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [a, b] = pair.another(fixture);
    for number in 0..10 {
        a.post_bytes(0, &pattern(number, 1000)).expect("room in the queue");
        drop(pair.drive(b.recv()).expect("a message"));
    }
    let before = pair.b.fabric.stats();
    assert_eq!(
        (before.links, before.accepted, before.totals.recv_ops, before.totals.recv_bytes),
        (2, 2, 10, 10_000)
    );
    pair.until("all messages are acknowledged", || a.stats().send_ops == 10);
    assert_eq!(pair.a.fabric.stats().totals.send_bytes, 10_000);
    pair.drive(a.close()).expect("closed cleanly");
    pair.until("the link is gone", || {
        pair.a.fabric.stats().links == 1 && pair.b.fabric.stats().links == 1
    });
    let after = pair.b.fabric.stats();
    assert_eq!(
        (after.totals.recv_ops, after.totals.recv_bytes),
        (10, 10_000),
        "totals must include links that are gone"
    );
    assert_eq!((after.failed_links, after.refused, after.foreign_peers), (0, 0, 0));
    assert!(after.passes > 0 && after.completions >= 10 && after.receives_posted > 0);
    drop((a, b));
    pair.end();
}

/// Fabrics are created and dropped with links in every state.
pub(crate) fn drops_fabrics_in_every_state(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    for round in 0..30 / fixture.work_divisor.min(10) {
        let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
        let mut listener = b.listen(host.any_port()).expect("listen");
        let [there, here] = open_link(&a, peer, &b, &mut listener);
        there.post_bytes(0, &[1; 30_000]).expect("room in the queue");
        let sending = here.send(0, filled(&b, &[2; 30_000]));
        match round % 5 {
            0 => drop((a, b)),
            1 => drop((there, here)),
            2 => there.abort(),
            3 => drop(drive(&[&a, &b], here.close())),
            _ => until(&[&a, &b], "part of the message arrived", || here.stats().recv_bytes > 0),
        }
        drop((sending, listener));
    }
}
