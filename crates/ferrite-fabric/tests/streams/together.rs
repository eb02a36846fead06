//! Several things at a time.

use ferrite_fabric::{Config, Stream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{KIB, MIB, Pair, Scene, pattern};

/// Sends `total` bytes, and checks that as many come.
async fn exchange(stream: Stream, total: usize, from: usize) {
    let (mut reading, mut writing) = stream.into_split();
    let writer = tokio::spawn(async move {
        for at in (0..total).step_by(48 * KIB) {
            writing
                .write_all(&pattern(from + at, (48 * KIB).min(total - at)))
                .await
                .expect("to write");
        }
        writing.shutdown().await.expect("the end");
    });
    let mut read = Vec::new();
    reading.read_to_end(&mut read).await.expect("to read");
    assert!(read == pattern(from, total), "{} of {total} bytes, from {from}", read.len());
    writer.await.expect("the writer");
}

pub(crate) async fn both_ways_at_once(scene: Scene) {
    let Pair { a, b, fabrics } = scene.pair().await;
    let total = 4 * MIB / scene.work_divisor;
    futures_util::join!(exchange(a, total, 7), exchange(b, total, 7));
    fabrics.clear().await;
}

pub(crate) async fn many_streams(scene: Scene) {
    let fabrics = scene.fabrics(&Config::default());
    let mut tasks = Vec::new();
    for from in 0..50 / scene.work_divisor.min(5) {
        let total = (1 + from % 7) * 30 * KIB;
        for stream in fabrics.meet().await {
            tasks.push(tokio::spawn(exchange(stream, total, from)));
        }
    }
    for task in tasks {
        task.await.expect("its bytes");
    }
    fabrics.clear().await;
}

/// `copy_bidirectional` in the middle of two streams: both ends talk and end through it.
pub(crate) async fn relay(scene: Scene) {
    let fabrics = scene.fabrics(&Config::default());
    let [client, mut inner] = fabrics.meet().await;
    let [mut outer, server] = fabrics.meet().await;
    let total = 2 * MIB / scene.work_divisor;
    let relay =
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut inner, &mut outer).await });
    let serving = tokio::spawn(async move {
        let (mut reading, mut writing) = server.into_split();
        tokio::io::copy(&mut reading, &mut writing).await.expect("an echo")
    });
    exchange(client, total, 3).await;
    let total = total as u64;
    assert_eq!(relay.await.expect("the relay").expect("in good order"), (total, total));
    assert_eq!(serving.await.expect("the server"), total);
    fabrics.clear().await;
}

/// One thread for the fabrics, the client and the server: nobody may starve another.
pub(crate) async fn on_one_thread(scene: Scene) {
    let (done, finished) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let Pair { a, b, fabrics } = scene.pair().await;
            let total = MIB / scene.work_divisor;
            futures_util::join!(exchange(a, total, 9), exchange(b, total, 9));
            fabrics.clear().await;
        });
        let _ = done.send(());
    });
    tokio::task::spawn_blocking(move || finished.recv())
        .await
        .expect("a thread")
        .expect("it passes");
    thread.join().expect("the thread");
}
