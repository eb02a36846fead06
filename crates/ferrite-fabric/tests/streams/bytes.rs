//! What is written is what is read, however it is cut.

use std::future::poll_fn;
use std::io::{ErrorKind, IoSlice};

use tokio::io::{AsyncReadExt as _, AsyncWrite as _, AsyncWriteExt as _};

use super::{KIB, MIB, Pair, Random, Scene, pattern};

pub(crate) async fn of_every_size(scene: Scene) {
    let mut pair = scene.pair().await;
    let sizes = [1, 2, 63, 64, 219, 220, 221, 256, 257, 4096, 8 * KIB - 1, 8 * KIB, 8 * KIB + 1];
    let large = [64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, 5 * MIB + 3]
        .map(|size| size / scene.work_divisor);
    for size in sizes.into_iter().chain(large) {
        let bytes = pattern(size, size);
        let (mut there, mut back) = (vec![0; size], vec![0; size]);
        let Pair { a, b, .. } = &mut pair;
        let (written, read) = futures_util::join!(a.write_all(&bytes), b.read_exact(&mut there));
        written.and(read).expect("there");
        let (written, read) = futures_util::join!(b.write_all(&there), a.read_exact(&mut back));
        written.and(read).expect("and back");
        assert!(back == bytes, "{size} bytes");
    }
    pair.end().await;
}

/// Writes and reads of any size, compared byte by byte.
pub(crate) async fn random_sizes(scene: Scene) {
    for seed in 1..=4 {
        let total = 4 * MIB / scene.work_divisor;
        let Pair { mut a, mut b, fabrics } = scene.pair().await;
        let writing = tokio::spawn(async move {
            let (mut random, mut at) = (Random::new(seed), 0);
            while at < total {
                let len = random.length(200 * KIB).min(total - at);
                a.write_all(&pattern(at, len)).await.expect("to write");
                at += len;
            }
            a.shutdown().await.expect("the end");
            a
        });
        let (mut random, mut at) = (Random::new(seed + 100), 0);
        loop {
            let mut buf = vec![0; random.length(100 * KIB)];
            let len = b.read(&mut buf).await.expect("to read");
            assert!(buf[..len] == pattern(at, len), "seed {seed}: other bytes at {at}");
            at += len;
            if len == 0 {
                break;
            }
        }
        assert_eq!(at, total, "seed {seed}");
        drop((writing.await.expect("the writer"), b));
        fabrics.clear().await;
    }
}

/// From memory of the fabric's, bytes and such pieces by turns.
pub(crate) async fn from_where_it_lies(scene: Scene) {
    let mut pair = scene.pair().await;
    let total = 2 * MIB / scene.work_divisor;
    let Pair { a, b, fabrics } = &mut pair;
    let writing = async {
        let (mut random, mut at) = (Random::new(7), 0);
        while at < total {
            let len = random.length(200 * KIB).min(total - at);
            let mut buf = fabrics.of_caller().buffer(len).expect("a buffer");
            buf.copy_from_slice(&pattern(at, len));
            let mut rest = buf.freeze();
            while !rest.is_empty() {
                let sent = poll_fn(|cx| a.poll_write_buf(cx, &rest)).await.expect("to write");
                rest = rest.slice(sent..);
            }
            at += len;
            a.write_all(&pattern(at, 10)).await.expect("to write");
            at += 10;
        }
        a.shutdown().await.expect("the end");
        at
    };
    let mut read = Vec::new();
    let (written, count) = futures_util::join!(writing, b.read_to_end(&mut read));
    assert_eq!(count.expect("to read"), written);
    assert!(read == pattern(0, written));
    let buf = fabrics.of_caller().buffer(1).expect("a buffer").freeze();
    let late = poll_fn(|cx| pair.a.poll_write_buf(cx, &buf)).await;
    assert_eq!(late.map_err(|error| error.kind()), Err(ErrorKind::BrokenPipe), "it was shut down");
    drop(buf);
    pair.end().await;
}

pub(crate) async fn vectored(scene: Scene) {
    let mut pair = scene.pair().await;
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
        let written = pair.a.write_vectored(&slices).await.expect("to write");
        let most = if scene.is_tcp() { total } else { 64 * KIB };
        assert_eq!(written, total.min(most), "all at once, as far as a buffer goes");
        let mut read = vec![0; written];
        pair.b.read_exact(&mut read).await.expect("to read");
        assert!(read == bytes[..written], "{parts:?}");
    }
    pair.end().await;
}

pub(crate) async fn without_a_copy(scene: Scene) {
    let mut pair = scene.pair().await;
    let bytes = pattern(0, 100 * KIB);
    pair.a.write_all(&bytes).await.expect("to write");
    pair.a.shutdown().await.expect("the end");
    let mut first = [0; 10];
    pair.b.read_exact(&mut first).await.expect("to read");
    let (mut read, mut pieces) = (first.to_vec(), 0);
    let frame = if scene.is_tcp() { 64 * KIB } else { 8 * KIB };
    loop {
        let piece = pair.b.read_bytes().await.expect("to read");
        if piece.is_empty() {
            break;
        }
        assert!(piece.len() <= frame, "a piece is a frame");
        read.extend_from_slice(&piece);
        pieces += 1;
    }
    assert!(read == bytes, "the same bytes");
    assert_eq!(pieces, bytes.len().div_ceil(frame));
    pair.end().await;
}

pub(crate) async fn nothing_is_nothing(scene: Scene) {
    let mut pair = scene.pair().await;
    assert_eq!(pair.a.write(&[]).await.expect("nothing"), 0);
    assert_eq!(
        pair.a.write_vectored(&[IoSlice::new(&[]), IoSlice::new(&[])]).await.expect("nothing"),
        0
    );
    assert_eq!(pair.b.read(&mut []).await.expect("no wait"), 0);
    pair.a.flush().await.expect("nothing to wait for");
    pair.a.write_all(b"x").await.expect("to write");
    assert_eq!(pair.b.read_u8().await.expect("no end before it"), b'x');
    pair.end().await;
}

pub(crate) async fn other_channels_are_not_bytes(scene: Scene) {
    let mut pair = scene.pair().await;
    pair.a.link().post_bytes(7, b"aside").expect("room");
    pair.a.write_all(b"in the stream").await.expect("to write");
    pair.a.link().post_bytes(7, b"aside").expect("room");
    pair.a.shutdown().await.expect("the end");
    let mut read = Vec::new();
    pair.b.read_to_end(&mut read).await.expect("to read");
    assert_eq!(read, b"in the stream");
    pair.end().await;
}
