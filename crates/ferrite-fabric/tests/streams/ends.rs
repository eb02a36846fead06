//! How streams end: an end is never mistaken for a failure, nor a failure for an end.

use std::io::ErrorKind;

use ferrite_fabric::{Error, ErrorKind as Kind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{KIB, MIB, Pair, StreamFixture, pattern};

pub(crate) async fn half_close_both_ways(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    pair.a.write_all(b"question").await.expect("write");
    pair.a.shutdown().await.expect("shutdown");
    pair.a.shutdown().await.expect("second shutdown");
    let mut read = Vec::new();
    pair.b.read_to_end(&mut read).await.expect("read to the end");
    assert_eq!(read, b"question");
    assert_eq!(pair.b.read(&mut [0; 8]).await.expect("read after the end"), 0);
    // The other direction stays open as long as it is used.
    let answer = pattern(0, MIB / fixture.work_divisor);
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
    written.expect("write the answer");
    assert!(read.expect("read the answer") == answer);
    pair.end().await;
}

pub(crate) async fn dropped_stream_delivers(fixture: StreamFixture) {
    let Pair { mut a, mut b, fabrics } = fixture.pair().await;
    let bytes = pattern(0, 2 * MIB / fixture.work_divisor);
    a.write_all(&bytes).await.expect("write"); // the queue has room for all of it
    drop(a);
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("read to the end");
    assert!(read == bytes, "read {} bytes, not the {} written ones", read.len(), bytes.len());
    drop(b);
    fabrics.clear().await;
}

pub(crate) async fn dropped_write_half(fixture: StreamFixture) {
    let Pair { a, mut b, fabrics } = fixture.pair().await;
    let (mut reading, mut writing) = a.into_split();
    writing.write_all(b"that is all").await.expect("write");
    drop(writing);
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("read to the end");
    assert_eq!(read, b"that is all");
    b.write_all(b"answer").await.expect("write in the other direction");
    assert_eq!(reading.read_bytes().await.expect("read"), "answer");
    drop((reading, b));
    fabrics.clear().await;
}

pub(crate) async fn dropped_read_half(fixture: StreamFixture) {
    let Pair { a, mut b, fabrics } = fixture.pair().await;
    let (reading, mut writing) = a.into_split();
    drop(reading);
    writing.write_all(b"still here").await.expect("write");
    writing.shutdown().await.expect("shutdown");
    let mut read = Vec::new();
    b.read_to_end(&mut read).await.expect("read");
    assert_eq!(read, b"still here");
    drop((writing, b));
    fabrics.clear().await;
}

pub(crate) async fn reunites_halves_of_one_stream(fixture: StreamFixture) {
    let Pair { a, mut b, fabrics } = fixture.pair().await;
    let [other, other_end] = fabrics.open_stream().await;
    let (reading, writing) = a.into_split();
    let (other_reading, other_writing) = other.into_split();
    let wrong = reading.reunite(other_writing).expect_err("halves of different streams");
    let (reading, other_writing) = (wrong.0, wrong.1);
    let mut a = reading.reunite(writing).expect("halves of one stream");
    a.write_all(b"whole").await.expect("write after reuniting");
    assert_eq!(b.read_bytes().await.expect("read"), "whole");
    drop((a, b, other_reading, other_writing, other_end));
    fabrics.clear().await;
}

/// Returns the kind of the fabric error inside an I/O error.
fn fabric_error_kind(error: &std::io::Error) -> Kind {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    inner.expect("a fabric error").kind()
}

pub(crate) async fn abort_by_the_peer_is_an_error(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    pair.a.write_all(b"before").await.expect("write");
    let mut read = [0; 6];
    pair.b.read_exact(&mut read).await.expect("read");
    pair.a.link().abort();
    let error = pair.b.read(&mut [0; 8]).await.expect_err("an abort is not an end");
    assert_eq!(
        (error.kind(), fabric_error_kind(&error)),
        (ErrorKind::ConnectionReset, Kind::LinkDown),
        "{error}"
    );
    let error = pair.b.write(b"after").await.expect_err("the peer has aborted");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    pair.end().await;
}

pub(crate) async fn local_abort_is_an_error(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    pair.a.link().abort();
    let error = pair.a.read(&mut [0; 8]).await.expect_err("an abort is not an end");
    assert_eq!(
        (error.kind(), fabric_error_kind(&error)),
        (ErrorKind::ConnectionAborted, Kind::Closed),
        "{error}"
    );
    pair.end().await;
}

pub(crate) async fn write_after_shutdown_fails(fixture: StreamFixture) {
    let mut pair = fixture.pair().await;
    pair.a.shutdown().await.expect("shutdown");
    let error = pair.a.write(b"more").await.expect_err("the stream was shut down");
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    pair.end().await;
}

/// A waiting writer gets an error when the peer leaves.
pub(crate) async fn writer_fails_when_the_peer_leaves(fixture: StreamFixture) {
    let Pair { mut a, mut b, fabrics } = fixture.pair().await;
    let writing = tokio::spawn(async move {
        let bytes = vec![1; 64 * KIB];
        loop {
            if let Err(error) = a.write_all(&bytes).await {
                return error;
            }
        }
    });
    b.read_exact(&mut [0; 100]).await.expect("data of the writer");
    drop(b);
    let error = writing.await.expect("writer task");
    assert!(
        matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
        "{error:?}"
    );
    fabrics.clear().await;
}

pub(crate) async fn refused_when_nobody_listens(fixture: StreamFixture) {
    let Pair { a, b, fabrics } = fixture.pair().await;
    let mut there = b.local_addr().expect("an address");
    assert_eq!(a.peer_addr().expect("an address"), there);
    there.set_port(there.port() ^ 1);
    let error = fabrics.connect_to(there).await.expect_err("nobody listens");
    assert_eq!(
        (error.kind(), fabric_error_kind(&error)),
        (ErrorKind::ConnectionRefused, Kind::Refused),
        "{error:?}"
    );
    drop((a, b));
    fabrics.clear().await;
}
