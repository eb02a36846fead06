//! How streams end, and that an end is never taken for a failure, nor the other way round.

use std::io::ErrorKind;

use ferrite_fabric::{Error, ErrorKind as Kind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{KIB, MIB, Pair, Scene, pattern};

pub(crate) async fn half_close_both_ways(scene: Scene) {
    let mut pair = scene.pair().await;
    pair.a.write_all(b"question").await.expect("to write");
    pair.a.shutdown().await.expect("half an end");
    pair.a.shutdown().await.expect("once is enough");
    let mut read = Vec::new();
    pair.b.read_to_end(&mut read).await.expect("the end of the question");
    assert_eq!(read, b"question");
    assert_eq!(pair.b.read(&mut [0; 8]).await.expect("still the end"), 0);
    // The other direction goes on, as long as it likes.
    let answer = pattern(0, MIB / scene.work_divisor);
    let Pair { a, b, .. } = &mut pair;
    let (written, read) = futures_util::join!(
        async {
            b.write_all(&answer).await?;
            b.shutdown().await
        },
        async {
            let mut read = Vec::new();
            a.read_to_end(&mut read).await.map(|_| read)
        }
    );
    written.expect("the answer");
    assert!(read.expect("the answer") == answer);
    pair.end().await;
}

pub(crate) async fn dropped_stream_delivers(scene: Scene) {
    let Pair { mut a, mut b, fabrics } = scene.pair().await;
    let bytes = pattern(0, 2 * MIB / scene.work_divisor);
    a.write_all(&bytes).await.expect("to write"); // the queue takes it all
    drop(a);
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("all, then the end");
    assert!(read == bytes, "{} of {} bytes", read.len(), bytes.len());
    drop(b);
    fabrics.clear().await;
}

pub(crate) async fn dropped_write_half(scene: Scene) {
    let Pair { a, mut b, fabrics } = scene.pair().await;
    let (mut reading, mut writing) = a.into_split();
    writing.write_all(b"that is all").await.expect("to write");
    drop(writing);
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("all, then the end");
    assert_eq!(read, b"that is all");
    b.write_all(b"answer").await.expect("the other direction is open");
    assert_eq!(reading.read_bytes().await.expect("to read"), "answer");
    drop((reading, b));
    fabrics.clear().await;
}

pub(crate) async fn dropped_read_half(scene: Scene) {
    let Pair { a, mut b, fabrics } = scene.pair().await;
    let (reading, mut writing) = a.into_split();
    drop(reading);
    writing.write_all(b"still here").await.expect("to write");
    writing.shutdown().await.expect("the end");
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("to read");
    assert_eq!(read, b"still here");
    drop((writing, b));
    fabrics.clear().await;
}

pub(crate) async fn reunited(scene: Scene) {
    let Pair { a, mut b, fabrics } = scene.pair().await;
    let [other, other_end] = fabrics.meet().await;
    let (reading, writing) = a.into_split();
    let (other_reading, other_writing) = other.into_split();
    let wrong = reading.reunite(other_writing).expect_err("halves of two streams");
    let (reading, other_writing) = (wrong.0, wrong.1);
    let mut a = reading.reunite(writing).expect("halves of one stream");
    a.write_all(b"whole").await.expect("not shut down by that");
    assert_eq!(b.read_bytes().await.expect("to read"), "whole");
    drop((a, b, other_reading, other_writing, other_end));
    fabrics.clear().await;
}

/// The error of ours that is inside.
fn ours(error: &std::io::Error) -> Kind {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    inner.expect("the source").kind()
}

pub(crate) async fn aborted_is_no_end(scene: Scene) {
    let mut pair = scene.pair().await;
    pair.a.write_all(b"before").await.expect("to write");
    let mut read = [0; 6];
    pair.b.read_exact(&mut read).await.expect("to read");
    pair.a.link().abort();
    let error = pair.b.read(&mut [0; 8]).await.expect_err("no end was said");
    assert_eq!(
        (error.kind(), ours(&error)),
        (ErrorKind::ConnectionReset, Kind::LinkDown),
        "{error}"
    );
    let error = pair.b.write(b"after").await.expect_err("nobody takes it");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    pair.end().await;
}

pub(crate) async fn aborted_here(scene: Scene) {
    let mut pair = scene.pair().await;
    pair.a.link().abort();
    let error = pair.a.read(&mut [0; 8]).await.expect_err("the peer said no end");
    assert_eq!(
        (error.kind(), ours(&error)),
        (ErrorKind::ConnectionAborted, Kind::Closed),
        "{error}"
    );
    pair.end().await;
}

pub(crate) async fn writing_after_the_end(scene: Scene) {
    let mut pair = scene.pair().await;
    pair.a.shutdown().await.expect("half an end");
    let error = pair.a.write(b"more").await.expect_err("it was said that there is none");
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    pair.end().await;
}

/// A writer that waits is told when the peer leaves.
pub(crate) async fn writing_to_nobody(scene: Scene) {
    let Pair { mut a, mut b, fabrics } = scene.pair().await;
    let writing = tokio::spawn(async move {
        let bytes = vec![1; 64 * KIB];
        loop {
            if let Err(error) = a.write_all(&bytes).await {
                return error;
            }
        }
    });
    b.read_exact(&mut [0; 100]).await.expect("it writes");
    drop(b);
    let error = writing.await.expect("the writer");
    assert!(
        matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
        "{error:?}"
    );
    fabrics.clear().await;
}

pub(crate) async fn nobody_listens(scene: Scene) {
    let Pair { a, b, fabrics } = scene.pair().await;
    let mut there = b.local_addr().expect("an address");
    assert_eq!(a.peer_addr().expect("an address"), there);
    there.set_port(there.port() ^ 1);
    let error = fabrics.call_at(there).await.expect_err("nobody");
    assert_eq!(
        (error.kind(), ours(&error)),
        (ErrorKind::ConnectionRefused, Kind::Refused),
        "{error:?}"
    );
    drop((a, b));
    fabrics.clear().await;
}
