//! Valkey's protocol between two ends of ours.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::Purpose;
use ferrite_fabric::{ErrorKind, Fabric};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{Scene, pattern};

const KIB: usize = 1 << 10;

/// A client and a server that met, and their fabrics.
pub(super) async fn pair(
    scene: &Scene,
    config: &ValkeyConfig,
) -> (ValkeyStream, ValkeyStream, [Fabric; 2]) {
    let fabrics = [scene.fabric(0), scene.fabric(1)];
    let listener = scene.listen(&fabrics[0]);
    let foreign_peers = listener.foreign_peers();
    let answering = async {
        let request = foreign_peers.next().await.expect("a client");
        let raw = foreign_peers.accept(request).await.expect("it stays");
        ValkeyStream::new(raw, Role::Server, config).expect("a window")
    };
    let (client, server) =
        tokio::join!(scene.call(&fabrics[1], listener.local_addr(), config), answering);
    (client, server, fabrics)
}

/// Sends `total` bytes from one to the other in pieces of any size, reads them in others, and
/// compares.
pub(super) async fn carry(from: &mut ValkeyStream, to: &mut ValkeyStream, total: usize) {
    let bytes = pattern(0, total);
    let mut read = vec![0; total];
    let writing = async {
        let (mut at, mut piece) = (0, 1);
        while at < total {
            let end = (at + piece).min(total);
            from.write_all(&bytes[at..end]).await.expect("to write");
            (at, piece) = (end, (piece * 7 + 3) % 100_003 + 1);
        }
    };
    let reading = async {
        let (mut at, mut piece) = (0, 100);
        while at < total {
            let end = (at + piece).min(total);
            at += to.read(&mut read[at..end]).await.expect("to read");
            piece = (piece * 5 + 1) % 70_001 + 1;
        }
    };
    tokio::join!(writing, reading);
    assert!(read == bytes);
}

pub(crate) async fn both_ways(scene: Scene) {
    let (mut client, mut server, _engines) = pair(&scene, &ValkeyConfig::default()).await;
    let total = 4 << 20 >> scene.slower.ilog2();
    carry(&mut client, &mut server, total).await;
    carry(&mut server, &mut client, total).await;
    assert_eq!(server.stats().bytes_received, total as u64);
}

/// Windows that are announced again and again.
pub(crate) async fn windows_smaller_than_messages(scene: Scene) {
    let config =
        ValkeyConfig { window_bytes: 1000, window_max_bytes: 1000, ..ValkeyConfig::default() };
    let (mut client, mut server, _engines) = pair(&scene, &config).await;
    carry(&mut client, &mut server, 100 * KIB).await;
    carry(&mut server, &mut client, 100 * KIB).await;
    assert!(server.stats().registrations_sent > 100, "{:?}", server.stats());
}

/// Who writes much at a time gets a larger window, until its writes are small again; a client's
/// stays.
pub(crate) async fn windows_follow_what_comes(scene: Scene) {
    let (small, large) = (4 * KIB, 64 * KIB);
    let config = ValkeyConfig {
        window_bytes: small as u32,
        window_max_bytes: large as u32,
        ..ValkeyConfig::default()
    };
    let (mut client, mut server, fabrics) = pair(&scene, &config).await;
    let exposed = |fabric: usize| fabrics[fabric].pool().stats().exposed_bytes as usize;
    assert_eq!((exposed(0), exposed(1)), (small, small));
    carry(&mut client, &mut server, 500 * KIB).await;
    carry(&mut server, &mut client, 500 * KIB).await;
    assert_eq!((exposed(0), exposed(1)), (large, small));
    assert!(server.stats().registrations_sent < 30, "{:?}", server.stats());
    let (request, mut read) = ([7; 100], [0; 100]);
    for _ in 0..3 * large / request.len() {
        let (wrote, done) = tokio::join!(client.write_all(&request), server.read_exact(&mut read));
        wrote.expect("to write");
        done.expect("to read");
        assert_eq!(read, request);
    }
    assert_eq!((exposed(0), exposed(1)), (small, small));
}

/// Large windows are smaller when little memory is left for them, and larger again.
pub(crate) async fn windows_share_the_memory(scene: Scene) {
    let config = ValkeyConfig { window_bytes: 16 << 10, ..ValkeyConfig::default() };
    let (mut client, mut server, fabrics) = pair(&scene, &config).await;
    let pool = fabrics[0].pool();
    let mut taken = Vec::new();
    // (MiB that are left for large windows, or half of one more; the server's window in KiB: this
    // client writes at most 64 at once)
    for (left, window) in [(100, 512), (5, 512), (2, 64), (0, 16), (2, 64), (100, 512)] {
        let (left, block) = (left << 20, 512 << 10);
        let is_left = || {
            let receive = pool.stats().receive;
            (receive.max_bytes / 2)
                .saturating_sub(receive.in_use_bytes - pool.stats().exposed_bytes)
        };
        while is_left() >= left + block {
            taken.push(pool.take_uncharged(512 << 10, Purpose::Receive).expect("there is more"));
        }
        while is_left() < left {
            drop(taken.pop().expect("so much was taken"));
        }
        carry(&mut client, &mut server, 5 << 20).await;
        assert_eq!(pool.stats().exposed_bytes >> 10, window, "{left} bytes are left");
    }
}

/// Nothing is said for a long time but the server's keepalives; then it goes on.
pub(crate) async fn idle_ones_stay(scene: Scene) {
    let mut config = ValkeyConfig::default();
    config.proto.keepalive_interval = Duration::from_millis(20);
    let (mut client, mut server, _engines) = pair(&scene, &config).await;
    let (idle, begun) = (Duration::from_secs(1), Instant::now());
    let (mut one, mut other) = ([0], [0]);
    loop {
        let silent = tokio::join!(
            timeout(idle, client.read(&mut one)),
            timeout(idle, server.read(&mut other))
        );
        assert!(silent.0.is_err() && silent.1.is_err(), "nothing was said");
        let (sent, heard) = (server.stats().keepalives_sent, client.stats().messages_received);
        if sent > 10 && heard > 10 {
            break;
        }
        // Fifty of them fit into a second, on a machine that has one to give.
        assert!(begun.elapsed() < 5 * idle, "{sent} keepalives, {heard} messages");
    }
    carry(&mut client, &mut server, 10 * KIB).await;
}

/// A reader that does not read costs the writer its window, and nothing is lost.
pub(crate) async fn slow_reader(scene: Scene) {
    let (mut client, mut server, fabrics) = pair(&scene, &ValkeyConfig::default()).await;
    let mut written = 0;
    let bytes = pattern(0, 1 << 20);
    while let Ok(count) = timeout(Duration::from_millis(300), client.write(&bytes[written..])).await
    {
        written += count.expect("to write");
    }
    assert_eq!(written, 64 * KIB, "the server's window");
    let held = fabrics[1].pool().stats().send.in_use_bytes;
    assert!(held <= 64 * KIB as u64, "{held} bytes");
    let mut read = vec![0; bytes.len()];
    let (wrote, done) =
        tokio::join!(client.write_all(&bytes[written..]), server.read_exact(&mut read));
    wrote.expect("to write");
    done.expect("to read");
    assert!(read == bytes);
}

/// What was written before the end arrives, and then the end.
pub(crate) async fn the_end(scene: Scene) {
    for ends_first in [Role::Client, Role::Server] {
        let (client, server, _engines) = pair(&scene, &ValkeyConfig::default()).await;
        let (mut first, mut second) = match ends_first {
            Role::Client => (client, server),
            Role::Server => (server, client),
        };
        let bytes = pattern(3, 30 * KIB);
        first.write_all(&bytes).await.expect("to write");
        first.shutdown().await.expect("to end");
        let mut read = Vec::new();
        second.read_to_end(&mut read).await.expect("the end");
        assert!(read == bytes);
        let failed = second.write_all(b"too late").await.expect_err("nobody is there");
        assert_eq!(failed.kind(), std::io::ErrorKind::BrokenPipe);
        assert_eq!(second.raw().failure().map(|error| error.kind()), Some(ErrorKind::Closed));
    }
}
