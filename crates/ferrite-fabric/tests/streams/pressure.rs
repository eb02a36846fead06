//! Streams whose peer is slow, and memory that is short.

use std::time::Duration;

use ferrite_fabric::Config;
use ferrite_fabric::mem::{PoolConfig, Purpose};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{KIB, MIB, Pair, Random, Scene, pattern};

const SHORT: Duration = Duration::from_millis(50);

/// A reader that does not read stops the writer, and what both sides keep is bounded.
pub(crate) async fn slow_reader_stops_the_writer(scene: Scene) {
    let config = Config { send_queue_bytes: MIB as u64, ..Config::default() };
    let Pair { mut a, mut b, fabrics } = scene.pair_with(&config).await;
    let chunk = pattern(0, 64 * KIB);
    let mut written = 0;
    while let Ok(result) = timeout(4 * SHORT, a.write(&chunk[written % chunk.len()..])).await {
        written += result.expect("to write");
    }
    // The queue, the peer's window, and one message on its way. Over TCP the window: nothing is
    // queued.
    let most = if scene.is_tcp() { 64 * 64 * KIB } else { MIB + 64 * 8 * KIB + 128 * KIB };
    assert!((MIB..=most).contains(&written), "{written} bytes");
    let held = fabrics.of_caller().pool().stats().send.in_use_bytes;
    assert!(held <= 2 * MIB as u64, "{held} bytes of memory");
    drop(chunk);
    a.shutdown().await.expect("the end does not wait");
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("to read");
    assert_eq!(read.len(), written);
    drop((a, b));
    fabrics.clear().await;
}

fn two_mib_for_sends() -> Config {
    let memory =
        PoolConfig { memory_pool_max: 10 * MIB, receive_reserve: 8 * MIB, ..PoolConfig::default() };
    Config { memory, recv_queue_depth: 128, max_message_bytes: MIB as u64, ..Config::default() }
}

/// Less memory than the queue has room for: the writer waits for what is under way.
pub(crate) async fn memory_runs_out(scene: Scene) {
    let Pair { mut a, mut b, fabrics } = scene.pair_with(&two_mib_for_sends()).await;
    let total = (16 * MIB / scene.work_divisor).max(4 * MIB); // twice what there is
    let writing = tokio::spawn(async move {
        for at in (0..total).step_by(MIB / 8) {
            a.write_all(&pattern(at, (MIB / 8).min(total - at))).await.expect("to write");
        }
        a.shutdown().await.expect("the end");
        a
    });
    if !scene.is_tcp() {
        // Over TCP no memory is needed. Here, until there is next to none left: on an emulated
        // machine that takes a while.
        while fabrics.of_caller().pool().stats().send.in_use_bytes < 3 * MIB as u64 / 2 {
            tokio::time::sleep(SHORT / 10).await;
        }
    }
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("to read");
    assert!(read == pattern(0, total));
    drop((writing.await.expect("the writer"), b));
    fabrics.clear().await;
}

/// Somebody else has all memory: a stream that has nothing under way is slow then, and does not
/// fail.
pub(crate) async fn others_have_the_memory(scene: Scene) {
    let Pair { mut a, mut b, fabrics } = scene.pair_with(&two_mib_for_sends()).await;
    let pool = fabrics.of_caller().pool().clone();
    let mut taken = Vec::new();
    for size in [2 * MIB, 64 * KIB, 8 * KIB, KIB, 256] {
        while let Ok(buf) = pool.take_uncharged(size, Purpose::Send) {
            taken.push(buf);
        }
    }
    let bytes = pattern(0, 10 * KIB);
    let mut read = vec![0; bytes.len()];
    let (written, done) = futures_util::join!(a.write_all(&bytes), b.read_exact(&mut read));
    written.and(done).expect("it goes in crumbs");
    assert!(read == bytes);
    drop((taken, pool, a, b));
    fabrics.clear().await;
}

/// A peer that takes messages of 1 KiB only.
pub(crate) async fn small_messages_only(scene: Scene) {
    let config =
        Config { max_message_bytes: KIB as u64, recv_buffer_size: KIB as u32, ..Config::default() };
    let Pair { mut a, mut b, fabrics } = scene.pair_with(&config).await;
    let bytes = pattern(0, 100 * KIB);
    let mut read = vec![0; bytes.len()];
    let (written, done) = futures_util::join!(a.write_all(&bytes), b.read_exact(&mut read));
    written.and(done).expect("in small ones");
    assert!(read == bytes);
    drop((a, b));
    fabrics.clear().await;
}

/// Reads and writes that are given up at any time: nothing is lost, nothing comes twice.
pub(crate) async fn cancelled(scene: Scene) {
    let config = Config { send_queue_bytes: 128 << 10, ..Config::default() };
    let Pair { mut a, mut b, fabrics } = scene.pair_with(&config).await;
    let total = 4 * MIB / scene.work_divisor;
    let writing = tokio::spawn(async move {
        let (mut random, mut at, mut given_up) = (Random::new(5), 0, 0);
        while at < total {
            let bytes = pattern(at, random.length(100 * KIB).min(total - at));
            // Of a write that is dropped nothing was taken.
            match timeout(Duration::from_micros(random.below(300) as u64), a.write(&bytes)).await {
                Ok(written) => at += written.expect("to write"),
                Err(_) => given_up += 1,
            }
        }
        a.shutdown().await.expect("the end");
        (a, given_up)
    });
    let (mut random, mut at, mut given_up) = (Random::new(6), 0, 0);
    loop {
        let mut buf = vec![0; random.length(50 * KIB)];
        match timeout(Duration::from_micros(random.below(300) as u64), b.read(&mut buf)).await {
            Ok(Ok(0)) => break,
            Ok(read) => {
                let len = read.expect("to read");
                assert!(buf[..len] == pattern(at, len), "other bytes at {at}");
                at += len;
            }
            Err(_) => given_up += 1,
        }
    }
    assert_eq!(at, total);
    let (a, writes_given_up) = writing.await.expect("the writer");
    assert!(given_up + writes_given_up > 0, "nothing was cancelled");
    drop((a, b));
    fabrics.clear().await;
}
