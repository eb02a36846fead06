//! Tests of sessions that are idle for an hour, and of a server that vanishes. They take about a
//! second: sessions use tokio's clock, which the tests advance. Devices, and the fabrics that drive
//! them, use the real clock.
//!
//! In an hour, a server sends more keepalives than Valkey's client has receives (1,024). A client
//! that does not process them is lost after 51 minutes.

use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use ferrite_session::{ValkeyConfig, ValkeyStream};
use ferrite_testkit::Engine;
use ferrite_verbs::Verbs;
use tokio::io::{AsyncRead as _, AsyncReadExt as _, AsyncWriteExt as _, ReadBuf};
use tokio::runtime::Builder;

use super::gateway::{TestServer, unprotected};
use super::streams::{carry, pair};
use super::{Harness, run_on};

const HOUR: Duration = Duration::from_secs(3600);
/// The interval of a server's keepalives, plus one tick of tokio's clock.
const STEP: Duration = Duration::from_millis(3001);
/// The time limit of each step, in real time.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs a test on a runtime with one thread. Only there can tokio's clock be paused.
async fn on_one_thread(harness: Harness, test: impl AsyncFnOnce(Harness) + Send + 'static) {
    let running = tokio::task::spawn_blocking(move || {
        let runtime = Builder::new_current_thread().enable_all().build();
        run_on(&runtime.expect("build the runtime"), harness, test);
    });
    running.await.expect("the test does not panic");
}

/// Lets an hour pass for all sessions, polls the idle streams, and returns how many keepalives the
/// stream `receiver` has received. Each keepalive must have arrived before the next is due.
async fn let_an_hour_pass<const N: usize>(
    mut idle: [&mut ValkeyStream; N],
    receiver: usize,
) -> u64 {
    let first = idle[receiver].stats().messages_received;
    let mut steps = 0;
    tokio::time::pause();
    while steps * STEP < HOUR {
        tokio::time::advance(STEP).await;
        steps += 1;
        let begun = Instant::now();
        // This loop never waits, because a paused clock advances by itself when all tasks wait.
        while idle[receiver].stats().messages_received < first + u64::from(steps) {
            assert!(begun.elapsed() < STEP_TIMEOUT, "no keepalive after {:?}", steps * STEP);
            std::future::poll_fn(|cx| {
                for stream in &mut idle {
                    let mut bytes = [0];
                    let polled =
                        Pin::new(&mut **stream).poll_read(cx, &mut ReadBuf::new(&mut bytes));
                    assert!(
                        polled.is_pending(),
                        "the idle stream returned after {:?}: {polled:?}",
                        steps * STEP
                    );
                }
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
        }
    }
    tokio::time::resume();
    idle[receiver].stats().messages_received - first
}

/// After an hour both ends still exchange data.
pub(crate) async fn survives_an_idle_hour(harness: Harness) {
    on_one_thread(harness, async |harness: Harness| {
        let (mut client, mut server, _fabrics) = pair(&harness, &ValkeyConfig::default()).await;
        carry(&mut client, &mut server, 1000).await;
        let (before, written) = (server.stats().keepalives_sent, client.raw().stats().write_ops);
        let received = let_an_hour_pass([&mut client, &mut server], 0).await;
        assert_eq!(client.raw().stats().write_ops, written, "keepalives make probes unnecessary");
        let stats = server.stats();
        assert_eq!((received, stats.keepalives_sent - before), (1200, 1200), "{stats:?}");
        assert_eq!(stats.keepalives_skipped, 0, "{stats:?}");
        carry(&mut client, &mut server, 200_000).await;
        carry(&mut server, &mut client, 200_000).await;
    })
    .await;
}

/// `vanish` makes the server unreachable without a disconnect. The client notices, although it has
/// no request in flight.
pub(crate) fn detects_a_server_that_vanished<T>(verbs: Verbs, vanish: impl FnOnce() -> T) {
    let runtime = Builder::new_current_thread().enable_all().build();
    run_on(&runtime.expect("build the runtime"), Harness { verbs, slowdown: 1 }, async |harness| {
        wait_for_failure(harness, vanish).await;
    });
}

async fn wait_for_failure<T>(harness: Harness, vanish: impl FnOnce() -> T) {
    let (mut client, mut server, _fabrics) = pair(&harness, &ValkeyConfig::default()).await;
    carry(&mut client, &mut server, 1000).await;
    let _vanished = vanish();
    tokio::time::pause();
    let begun = Instant::now();
    let error = loop {
        // This loop never waits, because a paused clock advances by itself when all tasks wait.
        tokio::time::advance(STEP).await;
        let mut bytes = [0];
        let polled = std::future::poll_fn(|cx| {
            Poll::Ready(Pin::new(&mut client).poll_read(cx, &mut ReadBuf::new(&mut bytes)))
        });
        match polled.await {
            Poll::Ready(result) => break result.expect_err("the connection has failed"),
            Poll::Pending => assert!(begun.elapsed() < STEP_TIMEOUT, "no failure was detected"),
        }
        std::thread::sleep(Duration::from_millis(1));
        tokio::task::yield_now().await;
    };
    tokio::time::resume();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
}

/// A client is blocked in BLPOP, and the element arrives an hour later.
pub(crate) async fn serves_a_client_blocked_for_an_hour(harness: Harness) {
    on_one_thread(harness, async |harness: Harness| {
        let redis = Engine::redis(&[]);
        let server = TestServer::start(&harness, unprotected(&redis));
        let mut blocked = server.connect(&harness).await;
        blocked.write_all(b"PING\r\nBLPOP list 0\r\n").await.expect("write");
        blocked.read_exact(&mut [0; 7]).await.expect("read the reply");
        let received = let_an_hour_pass([&mut blocked], 0).await;
        assert_eq!(received, 1200);
        let mut other = server.connect(&harness).await;
        other.write_all(b"RPUSH list late\r\n").await.expect("write");
        let expected = b"*2\r\n$4\r\nlist\r\n$4\r\nlate\r\n";
        let mut reply = vec![0; expected.len()];
        blocked.read_exact(&mut reply).await.expect("read the reply");
        assert_eq!(reply, expected);
        assert_eq!(server.gateway.stats().sessions, 2);
        drop((blocked, other));
        server.end().await;
    })
    .await;
}
