//! An hour without a word, which takes a second: sessions take the time from tokio's clock, and the
//! test moves that. Devices, and the fabrics that drive them, go by the real one.
//!
//! An hour is more keepalives than a client of Valkey's has receives (1,024): who does not take
//! them is lost after 51 minutes.

use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use ferrite_session::{ValkeyConfig, ValkeyStream};
use ferrite_verbs::Verbs;
use tokio::io::{AsyncRead as _, AsyncReadExt as _, AsyncWriteExt as _, ReadBuf};
use tokio::runtime::Builder;

use super::gateway::{Served, open};
use super::streams::{carry, pair};
use super::{Redis, Scene, run_on};

const HOUR: Duration = Duration::from_secs(3600);
/// As often as servers send keepalives, and a tick of tokio's clock.
const STEP: Duration = Duration::from_millis(3001);
/// In real time.
const SOON: Duration = Duration::from_secs(20);

/// A clock can be stopped only where there is one thread.
async fn on_one_thread(scene: Scene, test: impl AsyncFnOnce(Scene) + Send + 'static) {
    let running = tokio::task::spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build();
        run_on(&runtime.expect("a runtime"), scene, test);
    });
    running.await.expect("no panic");
}

/// Lets an hour pass for all sessions. Nothing is said to these, and they are looked after: each
/// keepalive must have come before the next is due. How many came.
async fn an_hour_passes<const N: usize>(mut idle: [&mut ValkeyStream; N], hears: usize) -> u64 {
    let first = idle[hears].stats().messages_received;
    let mut steps = 0;
    tokio::time::pause();
    while steps * STEP < HOUR {
        tokio::time::advance(STEP).await;
        steps += 1;
        let begun = Instant::now();
        // Never at rest: the clock would go on by itself.
        while idle[hears].stats().messages_received < first + u64::from(steps) {
            assert!(begun.elapsed() < SOON, "no keepalive after {:?}", steps * STEP);
            std::future::poll_fn(|cx| {
                for stream in &mut idle {
                    let mut bytes = [0];
                    let polled =
                        Pin::new(&mut **stream).poll_read(cx, &mut ReadBuf::new(&mut bytes));
                    assert!(polled.is_pending(), "after {:?}: {polled:?}", steps * STEP);
                }
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
        }
    }
    tokio::time::resume();
    idle[hears].stats().messages_received - first
}

/// Both ends are there afterwards.
pub(crate) async fn an_hour(scene: Scene) {
    on_one_thread(scene, async |scene: Scene| {
        let (mut client, mut server, _engines) = pair(&scene, &ValkeyConfig::default()).await;
        carry(&mut client, &mut server, 1000).await;
        let (before, written) = (server.stats().keepalives_sent, client.raw().stats().write_ops);
        let heard = an_hour_passes([&mut client, &mut server], 0).await;
        assert_eq!(client.raw().stats().write_ops, written, "who hears its peer does not ask");
        let stats = server.stats();
        assert_eq!((heard, stats.keepalives_sent - before), (1200, 1200), "{stats:?}");
        assert_eq!(stats.keepalives_skipped, 0, "{stats:?}");
        carry(&mut client, &mut server, 200_000).await;
        carry(&mut server, &mut client, 200_000).await;
    })
    .await;
}

/// A client waits, and `vanish` makes its server unreachable without a word. Nothing that it has
/// asked for is under way: it hears of it all the same.
pub(crate) fn gone_without_a_word<T>(verbs: Verbs, vanish: impl FnOnce() -> T) {
    let runtime = Builder::new_current_thread().enable_all().build();
    run_on(&runtime.expect("a runtime"), Scene { verbs, slower: 1 }, async |scene| {
        missed(scene, vanish).await;
    });
}

async fn missed<T>(scene: Scene, vanish: impl FnOnce() -> T) {
    let (mut client, mut server, _engines) = pair(&scene, &ValkeyConfig::default()).await;
    carry(&mut client, &mut server, 1000).await;
    let _vanished = vanish();
    tokio::time::pause();
    let begun = Instant::now();
    let error = loop {
        // Never at rest: the clock would go on by itself.
        tokio::time::advance(STEP).await;
        let mut bytes = [0];
        let polled = std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut client).poll_read(cx, &mut ReadBuf::new(&mut bytes)))
        });
        match polled.await {
            Poll::Ready(result) => break result.expect_err("nothing came"),
            Poll::Pending => assert!(begun.elapsed() < SOON, "it waits for ever"),
        }
        std::thread::sleep(Duration::from_millis(1));
        tokio::task::yield_now().await;
    };
    tokio::time::resume();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
}

/// A client waits for an element that comes an hour later.
pub(crate) async fn an_hour_before_the_gateway(scene: Scene) {
    on_one_thread(scene, async |scene: Scene| {
        let redis = Redis::start("hour", &[]).await;
        let served = Served::start(&scene, open(&redis));
        let mut waiting = served.call(&scene).await;
        waiting.write_all(b"PING\r\nBLPOP list 0\r\n").await.expect("to write");
        waiting.read_exact(&mut [0; 7]).await.expect("an answer");
        let heard = an_hour_passes([&mut waiting], 0).await;
        assert_eq!(heard, 1200);
        let mut other = served.call(&scene).await;
        other.write_all(b"RPUSH list late\r\n").await.expect("to write");
        let expected = b"*2\r\n$4\r\nlist\r\n$4\r\nlate\r\n";
        let mut said = vec![0; expected.len()];
        waiting.read_exact(&mut said).await.expect("an answer");
        assert_eq!(said, expected);
        assert_eq!(served.gateway.stats().sessions, 2);
        drop((waiting, other));
        served.end().await;
    })
    .await;
}
