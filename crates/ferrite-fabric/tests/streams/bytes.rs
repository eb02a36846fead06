//! The reader gets the bytes that were written, however they are split.

use std::future::poll_fn;
use std::io::{ErrorKind, IoSlice};

use ferrite_testkit::Random;
use ferrite_testkit::wait::until_async;
use tokio::io::{AsyncReadExt as _, AsyncWrite as _, AsyncWriteExt as _};

use super::{KIB, MIB, Pair, StreamFixture, length, pattern};

pub(crate) async fn every_size_arrives(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    let sizes = [1, 2, 63, 64, 219, 220, 221, 256, 257, 4096, 8 * KIB - 1, 8 * KIB, 8 * KIB + 1];
    let large = [64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, 5 * MIB + 3]
        .map(|size| size / fixture.work_divisor);
    for size in sizes.into_iter().chain(large) {
        let bytes = pattern(size, size);
        let (mut there, mut back) = (vec![0; size], vec![0; size]);
        let Pair { a, b, .. } = &mut pair;
        let (written, read) = futures_util::join!(a.write_all(&bytes), b.read_exact(&mut there));
        written.and(read).expect("transferred");
        let (written, read) = futures_util::join!(b.write_all(&there), a.read_exact(&mut back));
        written.and(read).expect("transferred back");
        assert!(back == bytes, "the echo of {size} bytes differs");
    }
    pair.end().await;
}

/// Writes and reads pieces of random sizes, and compares them byte by byte.
pub(crate) async fn random_sizes(fixture: StreamFixture) {
    for seed in 1..=4 {
        let total = 4 * MIB / fixture.work_divisor;
        let Pair { mut a, mut b, fabrics } = fixture.pair().await;
        let writing = tokio::spawn(async move {
            let (mut random, mut at) = (Random::new(seed), 0);
            while at < total {
                let len = length(&mut random, 200 * KIB).min(total - at);
                a.write_all(&pattern(at, len)).await.expect("write");
                at += len;
            }
            a.shutdown().await.expect("shutdown");
            a
        });
        let (mut random, mut at) = (Random::new(seed + 100), 0);
        loop {
            let mut buf = vec![0; length(&mut random, 100 * KIB)];
            let len = b.read(&mut buf).await.expect("read");
            assert!(buf[..len] == pattern(at, len), "seed {seed}: wrong bytes at {at}");
            at += len;
            if len == 0 {
                break;
            }
        }
        assert_eq!(at, total, "seed {seed}: all bytes must arrive");
        drop((writing.await.expect("writer task"), b));
        fabrics.clear().await;
    }
}

/// Alternately writes buffers of the fabric's pool and plain bytes.
pub(crate) async fn writes_pool_buffers(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    let total = 2 * MIB / fixture.work_divisor;
    let Pair { a, b, fabrics } = &mut pair;
    let writing = async {
        let (mut random, mut at) = (Random::new(7), 0);
        while at < total {
            let len = length(&mut random, 200 * KIB).min(total - at);
            let mut buf = fabrics.connecting_fabric().buffer(len).expect("a buffer");
            buf.copy_from_slice(&pattern(at, len));
            let mut rest = buf.freeze();
            while !rest.is_empty() {
                let sent = poll_fn(|cx| a.poll_write_buf(cx, &rest)).await.expect("write");
                rest = rest.slice(sent..);
            }
            at += len;
            a.write_all(&pattern(at, 10)).await.expect("write");
            at += 10;
        }
        a.shutdown().await.expect("shutdown");
        at
    };
    let mut read = Vec::new();
    let (written, count) = futures_util::join!(writing, b.read_to_end(&mut read));
    assert_eq!(count.expect("read"), written);
    assert!(read == pattern(0, written));
    let buf = fabrics.connecting_fabric().buffer(1).expect("a buffer").freeze();
    let late = poll_fn(|cx| pair.a.poll_write_buf(cx, &buf)).await;
    assert_eq!(
        late.map_err(|error| error.kind()),
        Err(ErrorKind::BrokenPipe),
        "the stream was shut down"
    );
    drop(buf);
    pair.end().await;
}

pub(crate) async fn vectored_writes(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    assert!(pair.a.is_write_vectored());
    for parts in [
        &[3, 0, 5][..],
        &[100, 100, 20],
        &[200, 57],
        &[8 * KIB, 1, 60 * KIB],
        &[40 * KIB, 40 * KIB],
    ] {
        let total: usize = parts.iter().sum();
        let bytes = pattern(0, total);
        let mut rest = &bytes[..];
        let slices: Vec<_> = parts
            .iter()
            .map(|len| {
                let (part, after) = rest.split_at(*len);
                rest = after;
                IoSlice::new(part)
            })
            .collect();
        let written = pair.a.write_vectored(&slices).await.expect("write");
        let most = if fixture.is_tcp() { total } else { 64 * KIB };
        assert_eq!(written, total.min(most), "all at once, up to the size of a buffer");
        let mut read = vec![0; written];
        pair.b.read_exact(&mut read).await.expect("read");
        assert!(read == bytes[..written], "wrong bytes after a write of {parts:?}");
    }
    pair.end().await;
}

pub(crate) async fn reads_without_copying(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    let bytes = pattern(0, 100 * KIB);
    pair.a.write_all(&bytes).await.expect("write");
    pair.a.shutdown().await.expect("shutdown");
    let mut first = [0; 10];
    pair.b.read_exact(&mut first).await.expect("read");
    let (mut read, mut pieces) = (first.to_vec(), 0);
    let frame = if fixture.is_tcp() { 64 * KIB } else { 8 * KIB };
    loop {
        let piece = pair.b.read_bytes().await.expect("read");
        if piece.is_empty() {
            break;
        }
        assert!(piece.len() <= frame, "a piece must be a frame");
        read.extend_from_slice(&piece);
        pieces += 1;
    }
    assert!(read == bytes, "content differs");
    assert_eq!(pieces, bytes.len().div_ceil(frame));
    pair.end().await;
}

pub(crate) async fn empty_reads_and_writes(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    assert_eq!(pair.a.write(&[]).await.expect("empty write"), 0);
    assert_eq!(
        pair.a.write_vectored(&[IoSlice::new(&[]), IoSlice::new(&[])]).await.expect("empty write"),
        0
    );
    assert_eq!(pair.b.read(&mut []).await.expect("empty read"), 0);
    pair.a.flush().await.expect("flush");
    pair.a.write_all(b"x").await.expect("write");
    assert_eq!(pair.b.read_u8().await.expect("a byte, not the end"), b'x');
    pair.end().await;
}

pub(crate) async fn ignores_messages_on_other_channels(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    pair.a.link().post_bytes(7, b"aside").expect("room in the queue");
    pair.a.write_all(b"in the stream").await.expect("write");
    pair.a.link().post_bytes(7, b"aside").expect("room in the queue");
    pair.a.shutdown().await.expect("shutdown");
    let mut read = Vec::new();
    pair.b.read_to_end(&mut read).await.expect("read");
    assert_eq!(read, b"in the stream");
    pair.end().await;
}

/// Nobody waits for the writes of a stream. Over RDMA, the latency of some of them is recorded.
/// Over TCP, their bytes are counted as TCP bytes.
pub(crate) async fn samples_latency(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    for size in [10, 8 * KIB] {
        let (bytes, mut read) = (pattern(0, size), vec![0; size]);
        for _ in 0..300 {
            pair.a.write_all(&bytes).await.expect("write");
            pair.b.read_exact(&mut read).await.expect("read");
        }
    }
    let fabric = pair.fabrics.connecting_fabric();
    if !fixture.is_tcp() {
        let is_sampled = async || fabric.stats().send_latency.count() > 10;
        until_async("latencies of some sends", is_sampled).await;
    }
    let stats = fabric.stats();
    let (sampled, sends) = (stats.send_latency.count(), stats.totals.send_ops);
    let bytes = 300 * (10 + 8 * KIB as u64);
    let (most, over_tcp) = if fixture.is_tcp() { (0, bytes) } else { (sends / 16 + 1, 0) };
    assert!(sampled <= most, "{sampled} of {sends} sends were sampled");
    assert_eq!(stats.totals.tcp_bytes, over_tcp);
    pair.end().await;
}
