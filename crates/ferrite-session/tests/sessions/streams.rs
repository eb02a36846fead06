//! Tests of Valkey Over RDMA between two ends of our own.

use std::time::{Duration, Instant};

use ferrite_fabric::mem::Purpose;
use ferrite_fabric::{ErrorKind, Fabric};
use ferrite_proto::Role;
use ferrite_session::{ValkeyConfig, ValkeyStream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{Harness, pattern};

const KIB: usize = 1 << 10;

/// Returns a client and a server that are connected, and their fabrics.
pub(crate) async fn pair(
    harness: &Harness,
    config: &ValkeyConfig,
) -> (ValkeyStream, ValkeyStream, [Fabric; 2]) {
    let fabrics = [harness.fabric(0), harness.fabric(1)];
    let listener = harness.listen(&fabrics[0]);
    let foreign_peers = listener.foreign_peers();
    let accepting = async {
        let request = foreign_peers.next().await.expect("a connection request");
        let raw = foreign_peers.accept(request).await.expect("accept");
        ValkeyStream::new(raw, Role::Server, config).expect("register a window")
    };
    let (client, server) =
        tokio::join!(harness.connect(&fabrics[1], listener.local_addr(), config), accepting);
    (client, server, fabrics)
}

/// Sends `total` bytes in pieces of various sizes, reads them in pieces of other sizes, and checks
/// that they are the same.
pub(super) async fn carry(from: &mut ValkeyStream, to: &mut ValkeyStream, total: usize) {
    let bytes = pattern(0, total);
    let mut read = vec![0; total];
    let writing = async {
        let (mut at, mut piece) = (0, 1);
        while at < total {
            let end = (at + piece).min(total);
            from.write_all(&bytes[at..end]).await.expect("write");
            (at, piece) = (end, (piece * 7 + 3) % 100_003 + 1);
        }
    };
    let reading = async {
        let (mut at, mut piece) = (0, 100);
        while at < total {
            let end = (at + piece).min(total);
            at += to.read(&mut read[at..end]).await.expect("read");
            piece = (piece * 5 + 1) % 70_001 + 1;
        }
    };
    tokio::join!(writing, reading);
    assert!(read == bytes);
}

pub(crate) async fn carries_bytes_in_both_directions(harness: Harness) {
    let (mut client, mut server, _fabrics) = pair(&harness, &ValkeyConfig::default()).await;
    let total = 4 << 20 >> harness.slowdown.ilog2();
    carry(&mut client, &mut server, total).await;
    carry(&mut server, &mut client, total).await;
    assert_eq!(server.stats().bytes_received, total as u64);
}

/// The windows are so small that they are announced more than a hundred times.
pub(crate) async fn carries_data_through_tiny_windows(harness: Harness) {
    let config =
        ValkeyConfig { window_bytes: 1000, window_max_bytes: 1000, ..ValkeyConfig::default() };
    let (mut client, mut server, _fabrics) = pair(&harness, &config).await;
    carry(&mut client, &mut server, 100 * KIB).await;
    carry(&mut server, &mut client, 100 * KIB).await;
    assert!(server.stats().registrations_sent > 100, "{:?}", server.stats());
}

/// The server's window grows while the client writes much at once, and shrinks when its writes
/// become small. The client's own window keeps its size.
pub(crate) async fn resizes_windows_to_the_clients_writes(harness: Harness) {
    let (small, large) = (4 * KIB, 64 * KIB);
    let config = ValkeyConfig {
        window_bytes: small as u32,
        window_max_bytes: large as u32,
        ..ValkeyConfig::default()
    };
    let (mut client, mut server, fabrics) = pair(&harness, &config).await;
    let exposed = |fabric: usize| fabrics[fabric].pool().stats().exposed_bytes as usize;
    assert_eq!((exposed(0), exposed(1)), (small, small));
    carry(&mut client, &mut server, 500 * KIB).await;
    carry(&mut server, &mut client, 500 * KIB).await;
    assert_eq!((exposed(0), exposed(1)), (large, small));
    assert!(server.stats().registrations_sent < 30, "{:?}", server.stats());
    let (request, mut read) = ([7; 100], [0; 100]);
    for _ in 0..3 * large / request.len() {
        let (wrote, done) = tokio::join!(client.write_all(&request), server.read_exact(&mut read));
        wrote.expect("write");
        done.expect("read");
        assert_eq!(read, request);
    }
    assert_eq!((exposed(0), exposed(1)), (small, small));
}

/// The server's window shrinks when little memory is left for large windows, and grows again when
/// there is more.
pub(crate) async fn shrinks_windows_when_memory_is_short(harness: Harness) {
    let config = ValkeyConfig { window_bytes: 16 << 10, ..ValkeyConfig::default() };
    let (mut client, mut server, fabrics) = pair(&harness, &config).await;
    let pool = fabrics[0].pool();
    let mut taken = Vec::new();
    // Each pair has the number of MiB that are left for large windows, and the resulting size of
    // the server's window in KiB. Up to half a MiB more may be left. The window does not exceed 512
    // KiB, because this client writes at most 64 KiB at once.
    for (left, window) in [(100, 512), (5, 512), (2, 64), (0, 16), (2, 64), (100, 512)] {
        let (left, block) = (left << 20, 512 << 10);
        let bytes_left = || {
            let receive = pool.stats().receive;
            (receive.max_bytes / 2)
                .saturating_sub(receive.in_use_bytes - pool.stats().exposed_bytes)
        };
        while bytes_left() >= left + block {
            let buf = pool.take_uncharged(512 << 10, Purpose::Receive);
            taken.push(buf.expect("take memory from the pool"));
        }
        while bytes_left() < left {
            drop(taken.pop().expect("the test holds enough memory to give back"));
        }
        carry(&mut client, &mut server, 5 << 20).await;
        assert_eq!(pool.stats().exposed_bytes >> 10, window, "{left} bytes are left");
    }
}

/// A connection that has carried only keepalives for a while still carries data.
pub(crate) async fn keeps_idle_connections(harness: Harness) {
    let mut config = ValkeyConfig::default();
    config.proto.keepalive_interval = Duration::from_millis(20);
    let (mut client, mut server, _fabrics) = pair(&harness, &config).await;
    let (idle, begun) = (Duration::from_secs(1), Instant::now());
    let (mut one, mut other) = ([0], [0]);
    loop {
        let silent = tokio::join!(
            timeout(idle, client.read(&mut one)),
            timeout(idle, server.read(&mut other))
        );
        assert!(silent.0.is_err() && silent.1.is_err(), "an idle stream has returned from a read");
        let (sent, received) = (server.stats().keepalives_sent, client.stats().messages_received);
        if sent > 10 && received > 10 {
            break;
        }
        // Fifty keepalives are due in a second; a busy machine may take longer.
        assert!(begun.elapsed() < 5 * idle, "{sent} keepalives sent, {received} messages received");
    }
    carry(&mut client, &mut server, 10 * KIB).await;
}

/// If the peer does not read, a writer stops when the window is full, and no data is lost.
pub(crate) async fn limits_a_slow_reader_to_its_window(harness: Harness) {
    let (mut client, mut server, fabrics) = pair(&harness, &ValkeyConfig::default()).await;
    let mut written = 0;
    let bytes = pattern(0, 1 << 20);
    while let Ok(count) = timeout(Duration::from_millis(300), client.write(&bytes[written..])).await
    {
        written += count.expect("write");
    }
    assert_eq!(written, 64 * KIB, "as much as the server's window holds");
    let held = fabrics[1].pool().stats().send.in_use_bytes;
    assert!(held <= 64 * KIB as u64, "the writer holds {held} bytes");
    let mut read = vec![0; bytes.len()];
    let (wrote, done) =
        tokio::join!(client.write_all(&bytes[written..]), server.read_exact(&mut read));
    wrote.expect("write");
    done.expect("read");
    assert!(read == bytes);
}

/// Data that was written before a shutdown arrives, and then the end of the stream.
pub(crate) async fn delivers_data_before_the_end(harness: Harness) {
    for ends_first in [Role::Client, Role::Server] {
        let (client, server, _fabrics) = pair(&harness, &ValkeyConfig::default()).await;
        let (mut first, mut second) = match ends_first {
            Role::Client => (client, server),
            Role::Server => (server, client),
        };
        let bytes = pattern(3, 30 * KIB);
        first.write_all(&bytes).await.expect("write");
        first.shutdown().await.expect("shut down");
        let mut read = Vec::new();
        second.read_to_end(&mut read).await.expect("read until the end of the stream");
        assert!(read == bytes);
        let failed = second.write_all(b"too late").await.expect_err("the peer has disconnected");
        assert_eq!(failed.kind(), std::io::ErrorKind::BrokenPipe);
        assert_eq!(second.raw().failure().map(|error| error.kind()), Some(ErrorKind::Closed));
    }
}
