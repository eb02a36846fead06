//! Several streams, directions and tasks at a time.

use ferrite_fabric::{Config, Stream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{KIB, MIB, Pair, StreamFixture, pattern};

/// Sends `total` bytes, and checks that the same bytes arrive.
async fn exchange(stream: Stream, total: usize, from: usize) {
    let (mut reading, mut writing) = stream.into_split();
    let writer = tokio::spawn(async move {
        for at in (0..total).step_by(48 * KIB) {
            writing
                .write_all(&pattern(from + at, (48 * KIB).min(total - at)))
                .await
                .expect("write");
        }
        writing.shutdown().await.expect("shutdown");
    });
    let mut read = Vec::new();
    reading.read_to_end(&mut read).await.expect("read");
    assert!(
        read == pattern(from, total),
        "read {} bytes, not the {total} expected ones",
        read.len()
    );
    writer.await.expect("writer task");
}

pub(crate) async fn both_ways_at_once(fixture: StreamFixture) {
    let Pair { a, b, fabrics } = fixture.pair().await;
    let total = 4 * MIB / fixture.work_divisor;
    futures_util::join!(exchange(a, total, 7), exchange(b, total, 7));
    fabrics.clear().await;
}

pub(crate) async fn many_streams(fixture: StreamFixture) {
    let fabrics = fixture.fabrics(&Config::default());
    let mut tasks = Vec::new();
    for from in 0..50 / fixture.work_divisor.min(5) {
        let total = (1 + from % 7) * 30 * KIB;
        for stream in fabrics.open_stream().await {
            tasks.push(tokio::spawn(exchange(stream, total, from)));
        }
    }
    for task in tasks {
        task.await.expect("exchange task");
    }
    fabrics.clear().await;
}

/// Two ends communicate and close through a relay that runs `copy_bidirectional`.
pub(crate) async fn relay(fixture: StreamFixture) {
    let fabrics = fixture.fabrics(&Config::default());
    let [client, mut inner] = fabrics.open_stream().await;
    let [mut outer, server] = fabrics.open_stream().await;
    let total = 2 * MIB / fixture.work_divisor;
    let relay =
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut inner, &mut outer).await });
    let serving = tokio::spawn(async move {
        let (mut reading, mut writing) = server.into_split();
        tokio::io::copy(&mut reading, &mut writing).await.expect("echo")
    });
    exchange(client, total, 3).await;
    let total = total as u64;
    assert_eq!(relay.await.expect("relay task").expect("relayed"), (total, total));
    assert_eq!(serving.await.expect("server task"), total);
    fabrics.clear().await;
}

/// The fabrics, the client and the server run on one thread. None may starve another.
pub(crate) async fn on_one_thread(fixture: StreamFixture) {
    let (done, finished) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let Pair { a, b, fabrics } = fixture.pair().await;
            let total = MIB / fixture.work_divisor;
            futures_util::join!(exchange(a, total, 9), exchange(b, total, 9));
            fabrics.clear().await;
        });
        let _ = done.send(());
    });
    tokio::task::spawn_blocking(move || finished.recv())
        .await
        .expect("a thread")
        .expect("the test passes");
    thread.join().expect("the thread ends");
}
