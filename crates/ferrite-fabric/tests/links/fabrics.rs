//! Fabrics at the edge of their settings: small queues, many links, little memory.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::PoolConfig;
use ferrite_fabric::{Config, ErrorKind, Link};
use futures_util::future::join_all;
use futures_util::join;

use super::pair::{Pair, drive, failed, filled, meet, pass, pattern, until};
use super::{Fixture, KIB, MIB};

/// Sends `count` messages of mixed sizes on every link, both ways at once; all arrive.
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
                        .expect("its length");
                    assert!(message.to_vec() == pattern(number, message.len()), "message {number}");
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

/// Completions, requests and receives for a few, links for many: none overruns, all is delivered.
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
    let links: Vec<_> = (0..40 / fixture.slower.min(8)).map(|_| pair.another(fixture)).collect();
    exchange(&pair, &links, 12);
    drop(links);
    pair.end();
}

/// Nothing goes inline: neither messages nor control frames.
pub(crate) fn nothing_inline(fixture: &Fixture) {
    let config = Config { inline_threshold: 0, window: 4, ..Config::default() };
    let mut pair = Pair::with(fixture, &config);
    let links = [pair.another(fixture), pair.another(fixture)];
    exchange(&pair, &links, 40 / fixture.slower.min(4) as u64);
    pair.a.link.post_bytes(0, b"").expect("room");
    pair.a.link.post_bytes(0, b"x").expect("room");
    assert_eq!((pair.receive(&pair.b).len(), pair.receive(&pair.b).len()), (0, 1));
    drop(links);
    pair.end();
}

/// More inline than the device takes: it takes less.
pub(crate) fn too_much_inline(fixture: &Fixture) {
    let config = Config { inline_threshold: 100_000, ..Config::default() };
    let pair = Pair::with(fixture, &config);
    for len in [0, 1, 63, 64, 65, 511, 512, 513, 8 * KIB, 100_000] {
        let bytes = pattern(len as u64, len);
        pair.a.link.post_bytes(0, &bytes).expect("room");
        assert!(pair.receive(&pair.b).to_vec() == bytes, "{len} bytes");
    }
    pair.end();
}

/// Settings that cannot be are said when the fabric is made.
pub(crate) fn impossible_settings(fixture: &Fixture) {
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
    assert!(error.to_string().contains(&fixture.hosts[0].device), "says which there are: {error}");
}

/// What a message costs does not depend on links that have nothing to say.
pub(crate) fn idle_links_cost_nothing(fixture: &Fixture) {
    const ROUNDS: u32 = 300;
    let mut pair = Pair::new(fixture);
    let measure = |pair: &Pair| {
        // CPU time, and the best of several: others run on this machine, too.
        let times = (0..9).map(|_| {
            let begun = thread_cpu_time();
            for _ in 0..ROUNDS {
                pair.a.link.post_bytes(0, &[1; 64]).expect("room");
                while pair.b.link.try_recv().expect("it is up").is_none() {
                    pass(&[&pair.a.fabric, &pair.b.fabric]);
                }
            }
            thread_cpu_time() - begun
        });
        times.min().expect("several")
    };
    let alone = measure(&pair);
    let idle: Vec<_> = (0..1000 / fixture.slower.min(10)).map(|_| pair.another(fixture)).collect();
    let among_many = measure(&pair);
    assert!(
        among_many < alone * 2 + Duration::from_millis(1),
        "{ROUNDS} messages take {alone:?} with one link, {among_many:?} with {}",
        idle.len()
    );
    // One by one: a thousand farewells at once are another test.
    for [a, _b] in idle {
        pair.drive(a.close()).expect("in good order");
    }
    pair.end();
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.try_into().expect("it is not negative")
}

/// The application keeps what it received until there is no memory for more: peers wait, and go on
/// when it lets go.
pub(crate) fn receive_memory_runs_out(fixture: &Fixture) {
    let memory =
        PoolConfig { receive_reserve: 2 << 20, memory_pool_max: 64 << 20, ..PoolConfig::default() };
    let config = Config { memory, recv_queue_depth: 64, ..Config::default() };
    let pair = Pair::of(fixture, &Config::default(), &config);
    let mut kept = Vec::new();
    let mut sent = 0_u64;
    let begun = Instant::now();
    // 256 receives in all.
    while kept.len() < 256 {
        while sent < 600 && pair.a.link.post_bytes(0, &pattern(sent, 300)).is_ok() {
            sent += 1;
        }
        pass(&[&pair.a.fabric, &pair.b.fabric]);
        kept.extend(pair.b.link.try_recv().expect("it is up"));
        if begun.elapsed() > Duration::from_secs(2) {
            break;
        }
    }
    assert!((200..=256).contains(&kept.len()), "{} messages in 2 MiB", kept.len());
    assert!(pair.b.link.failure().is_none() && pair.a.link.failure().is_none());
    while sent < 600 {
        pair.drive(pair.a.link.room()).expect("it is up");
        sent += u64::from(pair.a.link.post_bytes(0, &pattern(sent, 300)).is_ok());
        if pair.a.link.stats().send_ops + 1000 < sent {
            break;
        }
    }
    let mut received = kept.len() as u64;
    for (number, message) in (0..).zip(kept.drain(..)) {
        assert!(message.to_vec() == pattern(number, 300), "message {number}");
    }
    while received < sent {
        assert!(pair.receive(&pair.b).to_vec() == pattern(received, 300), "message {received}");
        received += 1;
    }
    pair.end();
}

/// A message that is larger than the peer's memory for receives is refused at once: it could never
/// arrive.
pub(crate) fn message_larger_than_the_memory(fixture: &Fixture) {
    let memory =
        PoolConfig { receive_reserve: 2 << 20, memory_pool_max: 64 << 20, ..PoolConfig::default() };
    let config = Config { memory, recv_queue_depth: 64, ..Config::default() };
    let pair = Pair::of(fixture, &Config::default(), &config);
    let error = failed(pair.drive(pair.a.link.send_bytes(0, &vec![1; 4 * MIB])), "too large");
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    // The largest that the peer says it takes arrives, on several links at once.
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
            assert!(received.expect("a message").to_vec() == bytes, "another content");
        }
    };
    pair.drive(join_all(links.iter().map(one)));
    drop(links);
    pair.end();
}

/// Sends have nothing left: said, and over when something has come back.
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
    // Not even the answer to a farewell has memory; it goes when there is some.
    for number in 0..200_u32 {
        pair.b.link.post_bytes(0, &number.to_le_bytes()).expect("room");
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

/// What the statistics say adds up.
pub(crate) fn statistics(fixture: &Fixture) {
    let mut pair = Pair::new(fixture);
    let [a, b] = pair.another(fixture);
    for number in 0..10 {
        a.post_bytes(0, &pattern(number, 1000)).expect("room");
        drop(pair.drive(b.recv()).expect("a message"));
    }
    let before = pair.b.fabric.stats();
    assert_eq!(
        (before.links, before.accepted, before.totals.recv_ops, before.totals.recv_bytes),
        (2, 2, 10, 10_000)
    );
    pair.until("all is acknowledged", || a.stats().send_ops == 10);
    assert_eq!(pair.a.fabric.stats().totals.send_bytes, 10_000);
    pair.drive(a.close()).expect("in good order");
    pair.until("it is gone", || {
        pair.a.fabric.stats().links == 1 && pair.b.fabric.stats().links == 1
    });
    let after = pair.b.fabric.stats();
    assert_eq!(
        (after.totals.recv_ops, after.totals.recv_bytes),
        (10, 10_000),
        "those that are gone are counted"
    );
    assert_eq!((after.failed_links, after.refused, after.foreign_peers), (0, 0, 0));
    assert!(after.passes > 0 && after.completions >= 10 && after.receives_posted > 0);
    drop((a, b));
    pair.end();
}

/// Fabrics come and go, with links in every state.
pub(crate) fn many_lives(fixture: &Fixture) {
    let [host, peer] = &fixture.hosts;
    for life in 0..30 / fixture.slower.min(10) {
        let [a, b] = [peer, host].map(|host| fixture.fabric(host, &Config::default()));
        let mut listener = b.listen(host.any_port()).expect("listen");
        let [there, here] = meet(&a, peer, &b, &mut listener);
        there.post_bytes(0, &[1; 30_000]).expect("room");
        let sending = here.send(0, filled(&b, &[2; 30_000]));
        match life % 5 {
            0 => drop((a, b)),
            1 => drop((there, here)),
            2 => there.abort(),
            3 => drop(drive(&[&a, &b], here.close())),
            _ => until(&[&a, &b], "half way", || here.stats().recv_bytes > 0),
        }
        drop((sending, listener));
    }
}
