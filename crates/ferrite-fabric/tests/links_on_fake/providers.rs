//! The fabric on a fake that imitates various devices, their drivers and rdma-core's providers,
//! according to their sources.

use std::time::{Duration, Instant};

use ferrite_fabric::{Config, ConnectOptions, ErrorKind, Fabric, Listener, Rdma};
use ferrite_verbs::fake::{Objects, World};
use futures_util::future::join_all;
use futures_util::join;

use crate::links::Fixture;
use crate::links::isolation::ForeignPeerServer;
use crate::links::pair::{clear, connect, drive, open_link, run_for, until};
use crate::world;

/// Returns the number of posted receives, the number of receives that failed links took without
/// completing them, and the bytes of receive memory in use.
fn receives(fabric: &Fabric) -> (u64, u64, u64) {
    let stats = fabric.stats();
    (stats.receives_posted, stats.receives_overdue, stats.memory.receive.in_use_bytes)
}

/// Opens `together` links. The client sends eight messages on each, and the server aborts them all
/// without taking a message.
pub(super) fn flood(
    fixture: &Fixture,
    server: &Fabric,
    client: &Fabric,
    listener: &mut Listener,
    together: usize,
) {
    let calls: Vec<_> =
        (0..together).map(|_| connect(client, &fixture.hosts[1], listener)).collect();
    let accepting = async {
        let mut ours = Vec::new();
        while ours.len() < together {
            ours.push(listener.accept().await.expect("accept"));
        }
        ours
    };
    let (theirs, ours) = drive(&[server, client], async { join!(join_all(calls), accepting) });
    let theirs: Vec<_> = theirs.into_iter().map(|link| link.expect("connect")).collect();
    for link in &theirs {
        for _ in 0..8 {
            link.post_bytes(0, b"one of many").expect("room in the queue");
        }
    }
    for link in &ours {
        link.abort(); // with received messages that nobody took
    }
    drop(ours);
    drop(theirs);
    until(&[server, client], "the links have ended", || {
        server.stats().links + client.stats().links == 0
    });
}

/// mlx5 removes completions that nobody has polled when their queue pair is destroyed.
#[test]
fn keeps_all_receives_when_clients_flood_sessions_that_end() {
    const SESSIONS: usize = 10_000;
    const TOGETHER: usize = 50;
    let (world, fixture) = world(|device| device.cleans_completions = true);
    // A pass takes few completions, so that some are left when a link is torn down. All handshakes
    // may be open at once, so that none displaces another when the machine pauses.
    let config = Config {
        poll_batch: 1,
        recv_queue_depth: 256,
        window: 16,
        max_half_open: 2 * TOGETHER,
        ..Config::default()
    };
    let server = fixture.fabric(&fixture.hosts[0], &config);
    let client = fixture.fabric(&fixture.hosts[1], &Config::default());
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let before = receives(&server);
    assert_eq!(before.0, 256);
    for _ in 0..SESSIONS / TOGETHER {
        flood(&fixture, &server, &client, &mut listener, TOGETHER);
        until(&[&server, &client], "the receives are posted again", || receives(&server) == before);
    }
    drop(listener);
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// Soft-RoCE before Linux 6.11 never reports that a queue pair has taken its last receive.
#[test]
fn ends_links_on_devices_that_report_no_last_receive() {
    let (world, fixture) = world(|device| device.reports_last_receive = false);
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let before = receives(&server);
    let begun = Instant::now();
    flood(&fixture, &server, &client, &mut listener, 10);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    until(&[&server, &client], "the receives are posted again", || receives(&server) == before);
    drop(listener);
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// Returns the settings of a gateway or a module.
pub(super) fn server_config() -> Config {
    Config { recv_buffer_size: 64 << 10, ..Config::default() }
}

/// A post fails, and the provider does not say which request it refused. Any of the requests may be
/// in its queue.
#[test]
fn ends_the_link_when_a_post_fails_without_naming_a_request() {
    for bytes in [16, 4096] {
        let (world, fixture) = world(|_| {});
        let config = Config { inline_threshold: 64, ..Config::default() };
        let [server, client] = [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &config));
        let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
        let [there, here] = open_link(&client, &fixture.hosts[1], &server, &mut listener);
        world.fail_next_doorbell(5);
        let posted = there.post_bytes(0, &vec![7; bytes]);
        assert!(
            posted.is_err() || there.failure().is_some(),
            "the link continues after a failed post of {bytes} bytes"
        );
        drop((there, here));
        until(&[&server, &client], "the links have ended", || {
            server.stats().links + client.stats().links == 0
        });
        drop(listener);
        clear([server, client]);
        assert_eq!(world.objects(), Objects::default());
    }
}

/// The post of a request that binds a window fails. The request may be in the queue. Then its
/// memory stays in use until it completes.
#[test]
fn ends_the_connection_when_a_bind_fails_without_naming_a_request() {
    let (world, fixture) = world(|_| {});
    let server = ForeignPeerServer::new(&fixture, &Config::default());
    let client = server.client();
    server.check_write(&client);
    world.fail_next_doorbell(5);
    let other = client.expose();
    until(&server.fabrics(), "the connection has ended", || server.fabrics[1].stats().links == 0);
    assert_eq!(server.fabrics[1].stats().totals.stale_completions, 0, "the request is in flight");
    drop(other);
    server.end(vec![client]);
    drop(fixture);
    assert_eq!(world.objects(), Objects::default());
}

/// A provider may refuse a post although the fabric counts room in the queue: mlx5 with ENOMEM, if
/// its own count says that the queue is full (`mlx5_wq_overflow` in rdma-core's
/// `providers/mlx5/qp.c`), others with EAGAIN, EBUSY or EINVAL.
#[test]
fn ends_the_link_with_link_down_when_a_post_is_refused() {
    for errno in [11, 12, 16, 22] {
        for bytes in [16, 4096] {
            let (world, fixture) = world(|_| {});
            let config = Config { inline_threshold: 64, ..Config::default() };
            let [server, client] = [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &config));
            let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
            let [there, here] = open_link(&client, &fixture.hosts[1], &server, &mut listener);
            world.fail_next("ibv_post_send", errno);
            let _ = there.post_bytes(0, &vec![7; bytes]); // may report the failure
            let failure = there.failure().expect("the link has failed");
            assert_eq!(failure.kind(), ErrorKind::LinkDown, "errno {errno}: {failure}");
            let sent = drive(&[&server, &client], there.send_bytes(0, b"one more"));
            assert_eq!(sent.expect_err("the link is down").kind(), ErrorKind::LinkDown);
            drop((there, here, listener));
            clear([server, client]);
            assert_eq!(world.objects(), Objects::default());
        }
    }
}

/// Opens a link, sends eight messages to the server, and ends the link while no completion is
/// reported. Returns when both fabrics have released the link.
fn end_link_without_completions(
    (world, fixture): (&World, &Fixture),
    [server, client]: [&Fabric; 2],
    listener: &mut Listener,
    silent_for: Option<Duration>,
) {
    let [there, here] = open_link(client, &fixture.hosts[1], server, listener);
    world.delay_completions(true);
    for _ in 0..8 {
        there.post_bytes(0, b"one of many").expect("room in the queue");
    }
    there.abort();
    here.abort();
    drop((there, here));
    if let Some(time) = silent_for {
        run_for(&[server, client], time);
        world.delay_completions(false);
    }
    until(&[server, client], "the links have ended", || {
        server.stats().links + client.stats().links == 0
    });
    world.delay_completions(false);
}

/// mlx5 removes the completions of a destroyed queue pair, so the fabric first waits for late ones.
#[test]
fn keeps_all_receives_when_flushes_are_late() {
    let (world, fixture) = world(|device| device.cleans_completions = true);
    let config = Config { recv_queue_depth: 64, ..Config::default() };
    let [server, client] = [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &config));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let late = Some(Duration::from_millis(300));
    for _ in 0..12 {
        end_link_without_completions((&world, &fixture), [&server, &client], &mut listener, late);
    }
    until(&[&server, &client], "the receives are posted again", || {
        world.receives_waiting()[0] >= 64
    });
    drop(listener);
    clear([server, client]);
}

/// The device reports nothing for longer than the fabric waits. The fabric posts other receives in
/// place of the ones that may be missing.
#[test]
fn replaces_receives_that_a_silent_device_took_along() {
    let (world, fixture) = world(|device| device.cleans_completions = true);
    let config = Config { recv_queue_depth: 64, window: 32, ..Config::default() };
    let [server, client] = [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &config));
    let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    for _ in 0..3 {
        end_link_without_completions((&world, &fixture), [&server, &client], &mut listener, None);
        until(&[&server, &client], "the receives are replaced", || {
            world.receives_waiting()[0] == 64
        });
    }
    assert_eq!(server.stats().receives_missing, 24, "as many as the three links took");
    // After the queue has been used up twice, the fabric knows which receives are missing.
    let [there, here] = open_link(&client, &fixture.hosts[1], &server, &mut listener);
    for _ in 0..300 {
        let (sent, message) =
            drive(&[&server, &client], async { join!(there.send_bytes(0, b"next"), here.recv()) });
        assert!(sent.is_ok() && message.is_ok(), "{sent:?} {message:?}");
    }
    let stats = server.stats();
    assert_eq!((stats.receives_missing, stats.receives_overdue), (0, 24));
    drop((there, here, listener));
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// The ports of two hosts carry packets of different sizes, and the connection manager knows only
/// the port of the side that connects.
#[test]
fn uses_the_smaller_mtu_of_both_ports() {
    for serves in [0, 1] {
        let (world, fixture) = world(|device| device.active_mtu = 3);
        let fabrics = [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
        let (server, client) = (&fabrics[serves], &fabrics[1 - serves]);
        let mut listener = server.listen(fixture.hosts[serves].any_port()).expect("listen");
        let links = open_link(client, &fixture.hosts[1 - serves], server, &mut listener);
        for (from, to) in [(0, 1), (1, 0)] {
            assert_eq!(links[from].mtu().map(ferrite_verbs::Mtu::bytes), Some(1024));
            let sending = links[from].send_bytes(0, &[7; 20_000]);
            let (sent, message) =
                drive(&[server, client], async { join!(sending, links[to].recv()) });
            sent.expect("the packets are small enough");
            assert_eq!(message.expect("a message").len(), 20_000);
        }
        drop((links, listener));
        clear(fabrics);
        assert_eq!(world.objects(), Objects::default());
    }
}

/// A foreign peer takes the path MTU of the connection manager, so it cannot be told that this port
/// carries less.
#[test]
fn refuses_a_foreign_peer_whose_packets_are_too_large() {
    let (world, fixture) = world(|device| device.active_mtu = 3);
    let [server, client] =
        [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
    let listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
    let foreign_peers = listener.foreign_peers();
    let options = ConnectOptions::new().local(fixture.hosts[1].any_port()).rdma(Rdma::Require);
    let connecting = client.connect_raw(listener.local_addr(), &options);
    let accepting = async {
        let request = foreign_peers.next().await.expect("a request");
        foreign_peers.accept(request).await
    };
    let (connected, accepted) = drive(&[&server, &client], async { join!(connecting, accepting) });
    assert!(connected.is_err());
    let error = accepted.expect_err("the packets are too large");
    assert_eq!(error.kind(), ErrorKind::Unreachable);
    assert!(error.to_string().contains("4096") && error.to_string().contains("1024"), "{error}");
    drop((foreign_peers, listener));
    clear([server, client]);
    assert_eq!(world.objects(), Objects::default());
}

/// Devices may run out of registrations for a while. mlx5 then fails with EAGAIN or ENOMEM because
/// its firmware has no pages (`mlx5_cmd_exec` and `give_pages` in the kernel's
/// `drivers/net/ethernet/mellanox/mlx5`). Without inline data, even a credit needs registered
/// memory.
#[test]
fn keeps_links_when_memory_cannot_grow_for_a_while() {
    for errno in [11, 12] {
        let (world, fixture) = world(|device| device.max_inline = 0);
        let [server, client] =
            [0, 1].map(|host| fixture.fabric(&fixture.hosts[host], &Config::default()));
        let mut listener = server.listen(fixture.hosts[0].any_port()).expect("listen");
        let [there, here] = open_link(&client, &fixture.hosts[1], &server, &mut listener);
        let mut held = Vec::new();
        for size in [1 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10, 1 << 10, 256, 64, 1] {
            let take = || {
                world.fail_next("ibv_reg_mr", errno);
                server.buffer(size)
            };
            while let Ok(buf) = take() {
                held.push(buf);
            }
        }
        world.fail_next("ibv_reg_mr", errno);
        let error = here.post_bytes(0, &[7; 300]).expect_err("there is no memory");
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        (0..20).for_each(|_| world.fail_next("ibv_reg_mr", errno));
        // Sends more messages than the window allows, so that credits must come back.
        let mut received = 0;
        until(&[&server, &client], "all messages arrive", || {
            let _ = there.post_bytes(0, &[7; 300]);
            while let Ok(Some(_)) = here.try_recv() {
                received += 1;
            }
            let failures = (there.failure(), here.failure());
            assert!(failures.0.is_none() && failures.1.is_none(), "{failures:?}");
            received >= 600
        });
        drop((held, there, here, listener));
        clear([server, client]);
        assert_eq!(world.objects(), Objects::default());
    }
}
