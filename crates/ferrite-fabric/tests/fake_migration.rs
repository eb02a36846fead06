//! Links that change between RDMA and TCP, or lose their RDMA path and get another. On the fake
//! provider and this host's TCP.
#![expect(clippy::print_stdout, reason = "prints the seed that replays a failure")]

mod migration {
    pub(crate) mod traffic;
}

use std::time::{Duration, Instant};

use ferrite_fabric::wire::Rights;
use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, ErrorKind, Fabric, Link, Listener, Rdma, Transport,
};
use ferrite_testkit::wait::until_or;
use ferrite_testkit::{Random, until};
use ferrite_verbs::fake::{DeviceSpec, World};
use migration::traffic::Traffic;

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
const HOSTS: [(&str, &str); 2] = [("fake1", "127.0.0.1"), ("fake2", "127.0.0.2")];

/// Two hosts with a device each, and a link between them that can migrate.
struct MigratingLink {
    world: World,
    fabrics: [Fabric; 2],
    links: [Link; 2],
    listener: Listener,
}

fn config() -> Config {
    Config {
        busy_poll_us: 0,
        upgrade_after: Duration::from_millis(50),
        keepalive: Duration::from_secs(2),
        peer_timeout: Duration::from_secs(2),
        ..Config::default()
    }
}

fn spec(at: usize) -> DeviceSpec {
    DeviceSpec::new(HOSTS[at].0, HOSTS[at].1.parse().expect("an address"))
}

impl MigratingLink {
    fn new() -> Self {
        Self::with_connect_mode(ConnectMode::Cm)
    }

    fn with_connect_mode(mode: ConnectMode) -> Self {
        Self::on_devices([spec(0), spec(1)], mode)
    }

    fn on_devices(devices: [DeviceSpec; 2], mode: ConnectMode) -> Self {
        let world = World::new();
        devices.into_iter().for_each(|device| world.add_device(device));
        let verbs = world.verbs();
        let fabrics = [0, 1].map(|at| {
            let builder = Fabric::builder(&verbs).device(HOSTS[at].0).config(config());
            // The first fabric runs its commands on the driver thread, the second on command
            // threads.
            let builder = if at == 1 { builder.command_threads() } else { builder };
            let fabric = builder.build().expect("a fabric");
            fabric.spawn_thread().expect("a thread");
            fabric
        });
        let mut listener = fabrics[1]
            .listen(format!("{}:0", HOSTS[1].1).parse().expect("an address"))
            .expect("listen");
        let local = format!("{}:0", HOSTS[0].1).parse().expect("an address");
        let options = ConnectOptions::new().local(local).mode(mode);
        let connecting = fabrics[0].connect_with(listener.local_addr(), &options);
        let (a, b) =
            fabrics[0].block_on(async { futures_util::join!(connecting, listener.accept()) });
        let links = [a.expect("connect"), b.expect("accept")];
        Self { world, fabrics, links, listener }
    }

    fn traffic(&self, seed: u64) -> Traffic {
        Traffic::start(&self.links, seed)
    }

    /// Waits until both ends are on `transport`.
    fn wait_until_on(&self, transport: Transport) {
        until_or(
            TEST_TIMEOUT,
            &format!("both ends on {transport}"),
            || self.links.iter().all(|link| link.transport() == transport),
            || {
                let failures = [0, 1].map(|at| self.links[at].failure());
                let now = [0, 1].map(|at| self.links[at].transport());
                format!("{now:?} {failures:?}")
            },
        );
    }
}

/// A link keeps sent bytes, so that it can send them again after a migration. The number of these
/// bytes is limited, even if the peer has a large window and takes no message.
#[test]
fn limits_the_frames_that_it_keeps() {
    let world = World::new();
    (0..2).for_each(|at| world.add_device(spec(at)));
    let verbs = world.verbs();
    let generous = Config { window: 4096, recv_queue_depth: 4096, ..config() };
    let fabrics = [config(), generous].map(Some).into_iter().enumerate().map(|(at, config)| {
        let builder =
            Fabric::builder(&verbs).device(HOSTS[at].0).config(config.expect("a configuration"));
        let fabric = builder.build().expect("a fabric");
        fabric.spawn_thread().expect("a thread");
        fabric
    });
    let fabrics: Vec<_> = fabrics.collect();
    let at = format!("{}:0", HOSTS[1].1).parse().expect("an address");
    let mut listener = fabrics[1].listen(at).expect("listen");
    let local = format!("{}:0", HOSTS[0].1).parse().expect("an address");
    let connecting = fabrics[0].connect_with(
        listener.local_addr(),
        &ConnectOptions::new().local(local).mode(ConnectMode::Cm),
    );
    let (a, b) = fabrics[0].block_on(async { futures_util::join!(connecting, listener.accept()) });
    let (a, b) = (a.expect("connect"), b.expect("accept"));
    let mut sent = 0;
    while a.post_bytes(0, &[7; 8 << 10]).is_ok() {
        sent += 1;
    }
    let waiting = config().send_queue_bytes; // queued, not sent yet
    let most = (4 << 20) + waiting + ((128 * 8) << 10);
    assert!(sent * (8 << 10) <= most, "{sent} messages were accepted without an answer");
    for _ in 0..sent {
        assert_eq!(fabrics[0].block_on(b.recv()).expect("every message arrives").len(), 8 << 10);
    }
    drop((a, b, listener));
}

/// A provider may refuse a post although the fabric counts room in the queue: mlx5 with ENOMEM, if
/// its own count says that the queue is full (`mlx5_wq_overflow` in rdma-core's
/// `providers/mlx5/qp.c`), others with EAGAIN, EBUSY or EINVAL.
#[test]
fn migrates_when_a_post_is_refused() {
    let pair = MigratingLink::new();
    pair.wait_until_on(Transport::Rdma);
    let traffic = pair.traffic(3);
    traffic.wait_for(100, TEST_TIMEOUT, "at first");
    for (moves, errno) in (1..).zip([11, 12, 16, 22]) {
        pair.world.fail_next("ibv_post_send", errno);
        let begun = Instant::now();
        while pair.links[0].stats().moves < moves {
            assert!(begun.elapsed() < TEST_TIMEOUT, "{errno}: {:?}", pair.links[0].failure());
            std::thread::sleep(Duration::from_millis(2));
        }
        traffic.wait_for(100, TEST_TIMEOUT, "after the refusal");
        pair.wait_until_on(Transport::Rdma);
    }
    traffic.stop();
}

#[test]
fn migrates_when_a_queue_pair_breaks() {
    let pair = MigratingLink::new();
    pair.wait_until_on(Transport::Rdma);
    let traffic = pair.traffic(1);
    traffic.wait_for(100, TEST_TIMEOUT, "at first");
    for side in [0, 1, 0] {
        let number = pair.links[side].qp_num().expect("on RDMA");
        assert!(pair.world.break_queue_pair(number));
        traffic.wait_for(100, TEST_TIMEOUT, "after the break");
        pair.wait_until_on(Transport::Rdma);
        traffic.wait_for(100, TEST_TIMEOUT, "back on RDMA");
    }
    let counts = traffic.stop();
    assert!(counts.iter().all(|count| *count > 500), "{counts:?}");
    let stats = [0, 1].map(|at| pair.fabrics[at].stats());
    assert!(stats.iter().all(|stats| stats.upgrades >= 3 && stats.totals.moves >= 3), "{stats:?}");
    let (a, b) = pair.fabrics[0]
        .block_on(async { futures_util::join!(pair.links[0].close(), pair.links[1].ended()) });
    assert!(a.is_ok() && b.is_ok(), "{a:?} {b:?}");
    drop(pair.listener);
}

/// When a peer resumes its link, the fabric reports which frames arrived only after the queue pair
/// has taken its last receive. This device does not report that (LAST_WQE_REACHED), so the fabric
/// waits for two seconds.
#[test]
fn resume_waits_for_the_last_receive() {
    let silent = DeviceSpec { reports_last_receive: false, ..spec(1) };
    let pair = MigratingLink::on_devices([spec(0), silent], ConnectMode::Cm);
    pair.wait_until_on(Transport::Rdma);
    let begun = Instant::now();
    assert!(pair.links[0].leave_rdma());
    pair.links[0].post_bytes(0, b"on another way").expect("room in the queue");
    let message = pair.fabrics[1].block_on(pair.links[1].recv()).expect("a message");
    assert_eq!(message.to_vec(), b"on another way");
    assert!(begun.elapsed() >= Duration::from_millis(1900), "{:?}", begun.elapsed());
    pair.wait_until_on(Transport::Rdma);
}

/// The link upgrades to RDMA without the connection manager before the application gets it. The TCP
/// connection stays open and shows when the peer is gone.
#[test]
fn tcp_first() {
    let pair = MigratingLink::with_connect_mode(ConnectMode::TcpFirst);
    assert_eq!(pair.links[0].transport(), Transport::Rdma);
    pair.wait_until_on(Transport::Rdma);
    let traffic = pair.traffic(4);
    traffic.wait_for(300, TEST_TIMEOUT, "on RDMA");
    traffic.stop();
    assert_eq!(pair.links[0].stats().tcp_bytes, 0, "TCP must carry nothing");
    let MigratingLink { fabrics: [a, b], links: [link, other], listener, .. } = pair;
    other.abort();
    let begun = Instant::now();
    let error = a.block_on(link.ended()).expect_err("the link must fail");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(error.kind(), ErrorKind::LinkDown, "{error}");
    drop((b, listener));
}

/// A device with two ports: the first is active, and the second has the address.
#[test]
fn upgrades_over_the_port_that_has_the_address() {
    let devices = [spec(0), DeviceSpec { port: 2, ..spec(1) }];
    let pair = MigratingLink::on_devices(devices, ConnectMode::TcpFirst);
    pair.wait_until_on(Transport::Rdma);
    let traffic = pair.traffic(5);
    traffic.wait_for(100, TEST_TIMEOUT, "on RDMA");
    traffic.stop();
}

/// A connect to a port on which nobody listens retries as often as configured, then fails, whether
/// RDMA is required or preferred. It succeeds if a listener starts meanwhile.
#[test]
fn connect_retries_as_configured() {
    let pair = MigratingLink::new();
    let builder = |rdma| {
        let config =
            Config { connection_retries: 3, retry_delay: Duration::from_millis(100), ..config() };
        let verbs = pair.world.verbs();
        let builder = Fabric::builder(&verbs).device(HOSTS[0].0).rdma(rdma).config(config);
        builder.command_threads().build().expect("a fabric")
    };
    let nowhere = format!("{}:4709", HOSTS[1].1).parse().expect("an address");
    for rdma in [Rdma::Require, Rdma::Prefer] {
        let fabric = builder(rdma);
        let begun = Instant::now();
        let error = fabric.block_on(fabric.connect(nowhere)).expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
        assert_eq!(fabric.stats().connect_retries, 3);
    }
    // A listener starts between the attempts.
    let fabric = builder(Rdma::Require);
    let (late, calling) = (pair.fabrics[1].clone(), fabric.clone());
    let listener = std::thread::spawn(move || {
        until(TEST_TIMEOUT, "a second attempt", || calling.stats().connect_retries > 0);
        late.listen(nowhere)
    });
    fabric.block_on(fabric.connect(nowhere)).expect("a link");
    drop(listener.join());
}

/// The path is lost and restored: the link is downgraded to TCP and upgraded again.
#[test]
fn upgrades_when_the_path_is_restored() {
    let pair = MigratingLink::new();
    let traffic = pair.traffic(2);
    pair.world.black_hole(HOSTS[0].0, HOSTS[1].0);
    pair.wait_until_on(Transport::Tcp);
    traffic.wait_for(200, TEST_TIMEOUT, "over TCP");
    assert!(pair.links[0].fallback().is_some(), "the fallback must be reported");
    pair.world.heal(HOSTS[0].0, HOSTS[1].0);
    pair.wait_until_on(Transport::Rdma);
    assert!(pair.links[0].fallback().is_none());
    traffic.wait_for(200, TEST_TIMEOUT, "over RDMA");
    traffic.stop();
}

#[test]
fn device_removed_and_added() {
    let pair = MigratingLink::new();
    let traffic = pair.traffic(3);
    traffic.wait_for(50, TEST_TIMEOUT, "at first");
    for side in [0, 1] {
        pair.world.remove_device(HOSTS[side].0);
        traffic.wait_for(200, TEST_TIMEOUT, "without a device");
        pair.wait_until_on(Transport::Tcp);
        pair.world.add_device(spec(side));
        pair.wait_until_on(Transport::Rdma);
        traffic.wait_for(200, TEST_TIMEOUT, "with the device again");
    }
    traffic.stop();
}

/// Grants stay valid, whatever transport carries the link.
#[test]
fn grants_survive() {
    let pair = MigratingLink::new();
    let [a, b] = &pair.links;
    let mut buf = pair.fabrics[1].buffer(10_000).expect("memory");
    buf.fill(1);
    let region = b
        .register_memory(buf, Rights::READ | Rights::WRITE)
        .map_err(|(_, error)| error)
        .expect("a region");
    let token = region.grant(b);
    let round = |number: u8| {
        let mut write = pair.fabrics[0].buffer(5000).expect("memory");
        write.fill(number);
        let written = a.rdma_write(&token, 100, write.freeze()).expect("room in the queue");
        pair.fabrics[0].block_on(written).expect("written");
        let read = a
            .rdma_read(&token, 99, pair.fabrics[0].buffer(5002).expect("memory"))
            .expect("room in the queue");
        let read = pair.fabrics[0].block_on(read).expect("read");
        assert!(
            read[0] == 1 && read[5001] == 1 && read[1..5001].iter().all(|byte| *byte == number),
            "{number}"
        );
    };
    round(2);
    for number in [3, 5, 7] {
        pair.world.break_queue_pair(a.qp_num().expect("on RDMA"));
        round(number);
        pair.wait_until_on(Transport::Rdma);
        round(number + 1);
    }
    let buf = pair.fabrics[0].block_on(region.revoke()).expect("buffer returned");
    assert_eq!(buf[100], 8);
}

/// A grant is made after the path was lost but before the fabric noticed. The grant's bind is
/// dropped, and the grant gets a new window on the next path.
#[test]
fn grant_on_a_lost_path_gets_a_new_window() {
    let world = World::new();
    (0..2).for_each(|at| world.add_device(spec(at)));
    let [client, server] = [0, 1].map(|at| {
        let builder = Fabric::builder(&world.verbs()).device(HOSTS[at].0).config(config());
        builder.build().expect("a fabric")
    });
    client.spawn_thread().expect("a thread");
    let mut listener =
        server.listen(format!("{}:0", HOSTS[1].1).parse().expect("an address")).expect("listen");
    let local = format!("{}:0", HOSTS[0].1).parse().expect("an address");
    let options = ConnectOptions::new().local(local).mode(ConnectMode::Cm);
    let connecting = client.connect_with(listener.local_addr(), &options);
    let (there, here) =
        server.block_on(async { futures_util::join!(connecting, listener.accept()) });
    let (there, here) = (there.expect("connect"), here.expect("accept"));
    let buf = server.buffer(1000).expect("memory");
    let region =
        here.register_memory(buf, Rights::READ).map_err(|(_, error)| error).expect("a region");
    let first = region.grant(&here);
    assert_eq!(here.stats().binds_dropped, 0);
    // Nothing drives the server until `reads`, so the server does not notice the lost path before.
    assert!(here.leave_rdma());
    let token = region.grant(&here);
    assert_eq!(here.stats().binds_dropped, 1);
    let reads = || {
        for token in [&first, &token] {
            let read = there
                .rdma_read(token, 0, client.buffer(1000).expect("memory"))
                .expect("room in the queue");
            server.block_on(read).map_err(|error| error.error).expect("read");
        }
    };
    reads();
    let begun = Instant::now();
    while server.stats().upgrades == 0 || there.transport() != Transport::Rdma {
        server.progress();
        assert!(begun.elapsed() < TEST_TIMEOUT, "{:?} {:?}", there.failure(), here.failure());
    }
    reads();
    assert_eq!(here.stats().binds_dropped, 1);
}

/// Operations that are pending when the path breaks complete on the next path, each exactly once.
#[test]
fn pending_operations_complete_once() {
    let pair = MigratingLink::new();
    let [a, b] = &pair.links;
    let buf = pair.fabrics[1].buffer(1 << 20).expect("memory");
    let region =
        b.register_memory(buf, Rights::WRITE).map_err(|(_, error)| error).expect("a region");
    let token = region.grant(b);
    for round in 0..20_u32 {
        pair.wait_until_on(Transport::Rdma);
        let mut writing = Vec::new();
        for at in 0..40_u32 {
            let mut buf = pair.fabrics[0].buffer(1000).expect("memory");
            buf.fill((round + at) as u8);
            writing.push(
                a.rdma_write_imm(&token, u64::from(at) * 1000, buf.freeze(), round << 8 | at)
                    .expect("room in the queue"),
            );
            if at == 20 {
                pair.world
                    .break_queue_pair(pair.links[round as usize % 2].qp_num().expect("on RDMA"));
            }
        }
        for writing in writing {
            pair.fabrics[0].block_on(writing).expect("written");
        }
        for at in 0..40 {
            let notice = pair.fabrics[1].block_on(b.recv()).expect("a notice").notice();
            assert_eq!(notice, Some(round << 8 | at), "notices must arrive once and in order");
            let mut byte = [0];
            assert!(region.read(at as usize * 1000 + 999, &mut byte));
            assert_eq!(byte[0], (round + at) as u8);
        }
    }
}

/// When the peer is gone for good, the link ends soon after `move_timeout` (10 s) at the latest.
#[test]
fn ends_when_the_peer_is_gone() {
    let MigratingLink { world, fabrics: [a, b], links: [link, other], listener } =
        MigratingLink::new();
    link.post_bytes(0, b"hello").expect("room in the queue");
    drop((other, listener, b));
    let begun = Instant::now();
    let ended = a.block_on(link.ended());
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    drop((ended, world));
}

/// Random faults in random order. `FERRITE_SEED` replays them.
#[test]
#[expect(clippy::disallowed_types, reason = "the seed is not a secret")]
fn random_faults() {
    let seed = std::env::var("FERRITE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| {
            use std::hash::{BuildHasher, Hasher};
            std::collections::hash_map::RandomState::new().build_hasher().finish() >> 40
        });
    println!("FERRITE_SEED={seed}");
    let mut random = Random::new(seed);
    let mut next = move |below: u64| random.below(below);
    let pair = MigratingLink::new();
    let traffic = pair.traffic(seed);
    for round in 0..40 {
        let side = next(2) as usize;
        let device = HOSTS[side].0;
        match next(4) {
            0 => {
                if let Some(number) = pair.links[side].qp_num() {
                    pair.world.break_queue_pair(number);
                }
            }
            1 => {
                pair.world.black_hole(HOSTS[0].0, HOSTS[1].0);
                std::thread::sleep(Duration::from_millis(next(100)));
                pair.world.heal(HOSTS[0].0, HOSTS[1].0);
            }
            2 => {
                pair.world.device_down(device);
                std::thread::sleep(Duration::from_millis(next(100)));
                pair.world.device_up(device);
            }
            _ => {
                pair.world.remove_device(device);
                std::thread::sleep(Duration::from_millis(next(100)));
                pair.world.add_device(spec(side));
            }
        }
        traffic.wait_for(20 + next(50), TEST_TIMEOUT, &format!("fault {round}"));
    }
    pair.wait_until_on(Transport::Rdma);
    let traffic_gap = traffic.take_longest_gap();
    let counts = traffic.stop();
    println!(
        "{counts:?} messages, {} migrations, at most {traffic_gap:?} without a message",
        pair.links[0].stats().moves
    );
}
