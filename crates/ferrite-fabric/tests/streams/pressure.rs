//! Streams with a slow peer or with little memory.

use std::time::Duration;

use ferrite_fabric::Config;
use ferrite_fabric::mem::{PoolConfig, Purpose};
use ferrite_testkit::Random;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{KIB, MIB, Pair, StreamFixture, length, pattern};

const SHORT: Duration = Duration::from_millis(50);

/// A reader that does not read stops the writer, and the memory on both sides is bounded.
pub(crate) async fn slow_reader_stops_the_writer(fixture: StreamFixture) {
    let config = Config { send_queue_bytes: MIB as u64, ..Config::default() };
    let Pair { mut a, mut b, fabrics } = fixture.pair_with(&config).await;
    let chunk = pattern(0, 64 * KIB);
    let mut written = 0;
    while let Ok(result) = timeout(4 * SHORT, a.write(&chunk[written % chunk.len()..])).await {
        written += result.expect("write");
    }
    // The limit is the queue, the peer's window, and one message in flight. Over TCP, it is only
    // the window, because nothing is queued.
    let most = if fixture.is_tcp() { 64 * 64 * KIB } else { MIB + 64 * 8 * KIB + 128 * KIB };
    assert!((MIB..=most).contains(&written), "{written} bytes were written");
    let held = fabrics.connecting_fabric().pool().stats().send.in_use_bytes;
    assert!(held <= 2 * MIB as u64, "{held} bytes of send memory are in use");
    drop(chunk);
    a.shutdown().await.expect("shutdown without waiting");
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("read");
    assert_eq!(read.len(), written);
    drop((a, b));
    fabrics.clear().await;
}

fn two_mib_of_send_memory() -> Config {
    let memory =
        PoolConfig { memory_pool_max: 10 * MIB, receive_reserve: 8 * MIB, ..PoolConfig::default() };
    Config { memory, recv_queue_depth: 128, max_message_bytes: MIB as u64, ..Config::default() }
}

/// With less memory than the queue has room for, the writer waits for messages in flight.
pub(crate) async fn writer_waits_for_memory(fixture: StreamFixture) {
    let Pair { mut a, mut b, fabrics } = fixture.pair_with(&two_mib_of_send_memory()).await;
    let total = (16 * MIB / fixture.work_divisor).max(4 * MIB); // at least twice the send memory
    let writing = tokio::spawn(async move {
        for at in (0..total).step_by(MIB / 8) {
            a.write_all(&pattern(at, (MIB / 8).min(total - at))).await.expect("write");
        }
        a.shutdown().await.expect("shutdown");
        a
    });
    if !fixture.is_tcp() {
        // Waits until there is almost no memory left, which takes a while on an emulated machine.
        // Over TCP no memory is needed.
        while fabrics.connecting_fabric().pool().stats().send.in_use_bytes < 3 * MIB as u64 / 2 {
            tokio::time::sleep(SHORT / 10).await;
        }
    }
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("read");
    assert!(read == pattern(0, total));
    drop((writing.await.expect("writer task"), b));
    fabrics.clear().await;
}

/// When all memory is taken, a stream with nothing in flight becomes slow but does not fail.
pub(crate) async fn works_without_free_memory(fixture: StreamFixture) {
    let Pair { mut a, mut b, fabrics } = fixture.pair_with(&two_mib_of_send_memory()).await;
    let pool = fabrics.connecting_fabric().pool().clone();
    let mut taken = Vec::new();
    for size in [2 * MIB, 64 * KIB, 8 * KIB, KIB, 256] {
        while let Ok(buf) = pool.take_uncharged(size, Purpose::Send) {
            taken.push(buf);
        }
    }
    let bytes = pattern(0, 10 * KIB);
    let mut read = vec![0; bytes.len()];
    let (written, done) = futures_util::join!(a.write_all(&bytes), b.read_exact(&mut read));
    written.and(done).expect("transferred in small pieces");
    assert!(read == bytes);
    drop((taken, pool, a, b));
    fabrics.clear().await;
}

/// The peer accepts only messages up to 1 KiB.
pub(crate) async fn peer_accepts_only_small_messages(fixture: StreamFixture) {
    let config =
        Config { max_message_bytes: KIB as u64, recv_buffer_size: KIB as u32, ..Config::default() };
    let Pair { mut a, mut b, fabrics } = fixture.pair_with(&config).await;
    let bytes = pattern(0, 100 * KIB);
    let mut read = vec![0; bytes.len()];
    let (written, done) = futures_util::join!(a.write_all(&bytes), b.read_exact(&mut read));
    written.and(done).expect("transferred in small messages");
    assert!(read == bytes);
    drop((a, b));
    fabrics.clear().await;
}

/// Reads and writes are cancelled at any time. No byte is lost or repeated.
pub(crate) async fn cancelling_loses_nothing(fixture: StreamFixture) {
    let config = Config { send_queue_bytes: 128 << 10, ..Config::default() };
    let Pair { mut a, mut b, fabrics } = fixture.pair_with(&config).await;
    let total = 4 * MIB / fixture.work_divisor;
    let writing = tokio::spawn(async move {
        let (mut random, mut at, mut cancelled) = (Random::new(5), 0, 0);
        while at < total {
            let bytes = pattern(at, length(&mut random, 100 * KIB).min(total - at));
            // A write that is dropped has not taken any bytes.
            match timeout(Duration::from_micros(random.below(300)), a.write(&bytes)).await {
                Ok(written) => at += written.expect("write"),
                Err(_) => cancelled += 1,
            }
        }
        a.shutdown().await.expect("shutdown");
        (a, cancelled)
    });
    let (mut random, mut at, mut cancelled) = (Random::new(6), 0, 0);
    loop {
        let mut buf = vec![0; length(&mut random, 50 * KIB)];
        match timeout(Duration::from_micros(random.below(300)), b.read(&mut buf)).await {
            Ok(Ok(0)) => break,
            Ok(read) => {
                let len = read.expect("read");
                assert!(buf[..len] == pattern(at, len), "wrong bytes at {at}");
                at += len;
            }
            Err(_) => cancelled += 1,
        }
    }
    assert_eq!(at, total);
    let (a, cancelled_writes) = writing.await.expect("writer task");
    assert!(cancelled + cancelled_writes > 0, "nothing was cancelled");
    drop((a, b));
    fabrics.clear().await;
}
