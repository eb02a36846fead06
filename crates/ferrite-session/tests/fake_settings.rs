//! Ferrite accepts the settings of other RDMA software under the names that they have in that
//! software, except those that it refuses with a replacement. These tests set each of them by that
//! name, and check its effect on the fake provider. They use only the gateway's settings, because
//! the module and the relay open their fabrics in the same way.

mod captured_log;

use std::cell::Cell;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use captured_log::Log;
use ferrite_config::table::{FOREIGN, refused};
use ferrite_config::{Origin, Program, Values, find};
use ferrite_fabric::mem::{Account, BufMut, ErrorKind as PoolErrorKind, Pool, Purpose, SizeClass};
use ferrite_fabric::{ConnectOptions, Error, ErrorKind, Fabric, Link, Listener};
use ferrite_session::{fabric_config, open_fabric};
use ferrite_verbs::fake::{DeviceSpec, World};

const MIB: u64 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(30);

fn values(settings: &[(&str, &str)]) -> Values {
    let mut values = Values::new(Program::Gateway);
    for (name, text) in settings {
        let (setting, alias) = find(Program::Gateway, name).expect(name);
        values.set_text(setting, alias, text, Origin::Flag).expect(text);
    }
    values.check().unwrap_or_else(|wrong| panic!("{wrong:?}"));
    values
}

/// Returns a world with the devices rxe1 and rxe2, at 127.0.0.1 and 127.0.0.2.
fn world() -> World {
    let world = World::new();
    world.add_device(DeviceSpec::new("rxe1", "127.0.0.1".parse().expect("an address")));
    world.add_device(DeviceSpec::new("rxe2", "127.0.0.2".parse().expect("an address")));
    world
}

/// Opens a fabric with these settings, which have their names in other software.
fn try_open(world: &World, settings: &[(&str, &str)]) -> Result<Fabric, Error> {
    let values = values(settings);
    open_fabric(&values, &fabric_config(&values), || Fabric::builder(&world.verbs()))
}

fn open(world: &World, settings: &[(&str, &str)]) -> Fabric {
    try_open(world, settings).expect("a fabric")
}

fn on_rxe1(world: &World, settings: &[(&str, &str)]) -> Fabric {
    open(world, &[settings, &[("rdma_device", "rxe1")]].concat())
}

fn at(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

/// Drives fabrics until the future is ready.
fn drive<F: Future>(fabrics: &[&Fabric], future: F) -> F::Output {
    let (mut future, mut context) = (pin!(future), Context::from_waker(Waker::noop()));
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        fabrics.iter().for_each(|fabric| {
            let _ = fabric.poll();
        });
        assert!(Instant::now() < deadline, "not ready within {DEADLINE:?}");
    }
}

fn until(fabrics: &[&Fabric], mut condition: impl FnMut() -> bool) {
    drive(
        fabrics,
        std::future::poll_fn(|_| if condition() { Poll::Ready(()) } else { Poll::Pending }),
    );
}

/// A link from rxe2, with default settings, to rxe1, with the given settings.
struct Pair {
    world: World,
    here: Fabric,
    there: Fabric,
    link: Link,
    peer: Link,
    _listener: Listener,
}

impl Pair {
    fn new(settings: &[(&str, &str)]) -> Self {
        Self::in_world(world(), settings)
    }

    fn in_world(world: World, settings: &[(&str, &str)]) -> Self {
        let settings = [settings, &[("rdma_device", "rxe1"), ("rdma", "require")]].concat();
        let here = open(&world, &settings);
        let there = open(&world, &[("rdma_device", "rxe2"), ("rdma", "require")]);
        let mut listener = here.listen(at("127.0.0.1:0")).expect("a listener");
        let options = ConnectOptions::new().local(at("127.0.0.2:0"));
        let connecting = there.connect_with(listener.local_addr(), &options);
        let (mut connecting, mut accepting) = (pin!(connecting), pin!(listener.accept()));
        let (mut peer, mut link) = (None, None);
        drive(
            &[&here, &there],
            std::future::poll_fn(|context| {
                if peer.is_none()
                    && let Poll::Ready(made) = connecting.as_mut().poll(context)
                {
                    peer = Some(made.expect("connected"));
                }
                if link.is_none()
                    && let Poll::Ready(made) = accepting.as_mut().poll(context)
                {
                    link = Some(made.expect("accepted"));
                }
                if peer.is_some() && link.is_some() { Poll::Ready(()) } else { Poll::Pending }
            }),
        );
        let (link, peer) = (link.expect("a link"), peer.expect("a link"));
        Self { world, here, there, link, peer, _listener: listener }
    }

    fn drive<F: Future>(&self, future: F) -> F::Output {
        drive(&[&self.here, &self.there], future)
    }

    /// Returns how many blocks of each size class a received message of `len` bytes holds.
    fn blocks_of_message(&self, len: usize) -> [u64; SizeClass::ALL.len()] {
        // The blocks are counted while all receives are posted, before and after the message.
        let posted = self.here.stats().receives_posted;
        let before = self.here.pool().stats().receive.in_use_blocks;
        self.drive(self.peer.send_bytes(0, &vec![7; len])).expect("sent");
        let message = self.drive(self.link.recv()).expect("a message");
        until(&[&self.here, &self.there], || self.here.stats().receives_posted == posted);
        let after = self.here.pool().stats().receive.in_use_blocks;
        assert_eq!(message.len(), len);
        std::array::from_fn(|class| after[class] - before[class])
    }
}

fn class(class: SizeClass) -> [u64; SizeClass::ALL.len()] {
    SizeClass::ALL.map(|other| u64::from(other == class))
}

/// Takes buffers of 2 MiB for sends until the pool has grown once.
fn grow(pool: &Pool) -> Vec<BufMut> {
    let (mut taken, before) = (Vec::new(), pool.stats().growths);
    while pool.stats().growths == before {
        taken.push(pool.take_uncharged(2 << 20, Purpose::Send).expect("a buffer"));
    }
    taken
}

#[test]
fn every_name_is_accepted_with_its_value_there() {
    for foreign in FOREIGN {
        let name = foreign.name.rsplit('.').next().expect("a name");
        if refused(name).is_some() {
            continue;
        }
        // The gateway has no settings for replication and clusters.
        let mut programs = [Program::Gateway, Program::Server].into_iter();
        let found = programs.find_map(|program| Some((program, find(program, name)?)));
        let (program, (setting, alias)) = found.expect(name);
        let text = foreign.default.split(' ').next().expect("a value");
        if text != "empty" {
            let set = Values::new(program).set_text(setting, alias, text, Origin::Flag);
            set.unwrap_or_else(|why| panic!("{name} {text}: {why}"));
        }
    }
}

#[test]
fn queues_have_the_sizes_that_were_set() {
    for settings in [
        [
            ("send_queue_depth", "64"),
            ("recv_queue_depth", "32"),
            ("cq_size", "1024"),
            ("inline_threshold", "100"),
            ("poll_batch", "7"),
            ("prepared_qp_count", "3"),
        ],
        [
            ("rdma_sq_size", "64"),
            ("rdma_rq_size", "32"),
            ("cq-size", "1024"),
            ("inline-threshold", "100"),
            ("rdma_cqe_poll_once", "7"),
            ("rdma_prepared_qp_cnt", "3"),
        ],
    ] {
        let world = world();
        let fabric = on_rxe1(&world, &settings);
        fabric.poll();
        let sizes = world.sizes();
        assert_eq!((sizes.send_queue, sizes.inline), (64, 100));
        assert_eq!((sizes.shared_receive_queue, sizes.completion_queue), (32, 1024));
        assert_eq!(sizes.poll_batch, 7);
        assert_eq!(fabric.stats().receives_posted, 32);
    }
}

#[test]
fn size_of_prepared_queue_pairs_is_the_send_queue_depth() {
    let world = world();
    let _fabric =
        on_rxe1(&world, &[("rdma_prepared_qp_size", "48"), ("rdma_prepared_qp_cnt", "1")]);
    assert_eq!(world.sizes().send_queue, 48);
}

#[test]
fn prepared_queue_pairs_are_used_and_replaced() {
    let pair = Pair::new(&[("rdma_prepared_qp_cnt", "3")]);
    until(&[&pair.here, &pair.there], || pair.world.objects().queue_pairs == 3 + 2);
    pair.drive(pair.peer.send_bytes(0, b"over a prepared queue pair")).expect("sent");
    assert_eq!(pair.drive(pair.link.recv()).expect("a message").len(), 26);
    let Pair { world, here, there, link, peer, _listener: listener } = pair;
    drop((link, peer, listener));
    until(&[&here, &there], || here.stats().links + there.stats().links == 0);
    drop((here, there));
    assert_eq!(world.objects().queue_pairs, 0);
}

/// The device allows one queue pair, and the fabric has prepared it.
#[test]
fn accepting_a_link_uses_a_prepared_queue_pair() {
    let world = World::new();
    let mut spec = DeviceSpec::new("rxe1", "127.0.0.1".parse().expect("an address"));
    spec.max_qp = 1;
    world.add_device(spec);
    world.add_device(DeviceSpec::new("rxe2", "127.0.0.2".parse().expect("an address")));
    let pair = Pair::in_world(world, &[("rdma_prepared_qp_cnt", "1")]);
    assert_eq!(pair.world.objects().queue_pairs, 2, "one on each side");
}

#[test]
fn device_port_and_gid_index_restrict_rdma() {
    let absence = |settings: &[(&str, &str)]| {
        let world = world();
        let fabric = on_rxe1(&world, settings);
        let listener = fabric.listen(at("127.0.0.1:0")).expect("a listener, over TCP at least");
        listener.absence().map(ToString::to_string)
    };
    assert_eq!(absence(&[("rdma_port", "1")]), None);
    let why = absence(&[("rdma_port", "2")]).expect("a reason why there is no RDMA");
    assert!(why.contains("port 1 of rxe1, but only port 2 may be used"), "{why}");
    // Entry 0 of the table is a link-local address, entry 1 is the device's own.
    assert_eq!(absence(&[("rdma_gid_index", "1")]), None);
    assert_eq!(absence(&[("rdma_gid_index", "-1")]), None);
    let why = absence(&[("rdma_gid_index", "0")]).expect("a reason why there is no RDMA");
    assert!(why.contains("GID index 0 of rxe1 has the address "), "{why}");
    let why = absence(&[("rdma_gid_index", "9")]).expect("a reason why there is no RDMA");
    assert!(why.contains("has no GID with index 9"), "{why}");
}

#[test]
fn only_the_named_device_is_opened() {
    let world = world();
    assert_eq!(open(&world, &[]).devices(), ["rxe1", "rxe2"]);
    assert_eq!(open(&world, &[("rdma_device", "rxe2")]).devices(), ["rxe2"]);
}

#[test]
fn rdma_is_enabled_and_falls_back_as_set() {
    let world = world();
    let why = open(&world, &[("rdma_enabled", "false")]).absence().map(ToString::to_string);
    assert_eq!(why.as_deref(), Some("RDMA is forbidden by the settings"));
    assert!(open(&world, &[("rdma_enabled", "true")]).absence().is_none());
    let empty = World::new();
    assert!(open(&empty, &[("rdma_fallback", "tcp")]).absence().is_some());
    let error = try_open(&empty, &[("rdma_fallback", "none")]).expect_err("no device");
    assert_eq!(error.kind(), ErrorKind::Absent);
}

#[test]
fn opening_the_devices_is_retried() {
    let attempts_until = |device_at: u32, retries: &str| {
        let world = World::new();
        let values = values(&[("connection_retries", retries), ("retry_delay_ms", "1")]);
        let attempts = Cell::new(0);
        let begin = || {
            attempts.set(attempts.get() + 1);
            if attempts.get() == device_at {
                world.add_device(DeviceSpec::new("rxe1", at("127.0.0.1:0").ip()));
            }
            Fabric::builder(&world.verbs())
        };
        let fabric = open_fabric(&values, &fabric_config(&values), begin).expect("a fabric");
        (attempts.get(), fabric.absence().is_none())
    };
    assert_eq!(attempts_until(3, "5"), (3, true));
    assert_eq!(attempts_until(3, "1"), (2, false), "TCP is used instead");
    assert_eq!(attempts_until(2, "0"), (1, false));
}

#[test]
fn delay_between_retries_is_kept() {
    let values = values(&[("connection_retries", "2"), ("retry_delay_ms", "40")]);
    let (world, begun) = (World::new(), Instant::now());
    let fabric = open_fabric(&values, &fabric_config(&values), || Fabric::builder(&world.verbs()));
    assert!(fabric.expect("a fabric that uses TCP").absence().is_some());
    assert!(begun.elapsed() >= Duration::from_millis(80));
}

/// If nobody answers two handshakes, the one with the shorter timeout ends first.
#[test]
fn handshake_ends_after_the_connection_timeout() {
    let world = world();
    let on_rxe2 = |timeout: &str| {
        let device = [("rdma_device", "rxe2"), ("rdma", "require")];
        open(&world, &[&device[..], &[("connection_timeout_ms", timeout)]].concat())
    };
    let (short, long) = (on_rxe2("50"), on_rxe2("60000"));
    let here = on_rxe1(&world, &[("rdma", "require")]);
    let listener = here.listen(at("127.0.0.1:0")).expect("a listener");
    // Nobody drives `here`, so nobody answers.
    let options = ConnectOptions::new().local(at("127.0.0.2:0"));
    let connect = |fabric: &Fabric| fabric.connect_with(listener.local_addr(), &options);
    let (first, mut second) = (connect(&short), pin!(connect(&long)));
    let error = drive(&[&short, &long], first).expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let mut context = Context::from_waker(Waker::noop());
    assert!(second.as_mut().poll(&mut context).is_pending(), "its timeout is a minute");
}

#[test]
fn memory_is_registered_in_the_amounts_that_were_set() {
    let world = world();
    let initial = [("rdma_memory_pool_initial_size_mb", "64")];
    let fabric = on_rxe1(&world, &[&initial[..], &[("max_mr_size", "4MB")]].concat());
    let stats = fabric.pool().stats();
    assert!(stats.mapped_bytes >= 64 * MIB, "{stats:?}");
    assert_eq!(world.sizes().largest_region, Some(4 << 20), "in regions of at most 4 MiB");
    drop(fabric);
    let fabric = on_rxe1(&world, &initial);
    assert_eq!(world.sizes().largest_region, Some(32 << 20), "half for sends, half for receives");
    drop(fabric);
    let fabric = on_rxe1(&world, &[("rdma_memory_pool_increase_size_mb", "40")]);
    let _taken = grow(fabric.pool());
    assert_eq!(world.sizes().largest_region, Some(40 << 20));
}

#[test]
fn pool_grows_up_to_its_regions_and_its_maximum() {
    let most = |settings: &[(&str, &str)]| {
        let fabric = on_rxe1(&world(), settings);
        let mut taken = Vec::new();
        loop {
            match fabric.pool().take_uncharged(2 << 20, Purpose::Send) {
                Ok(buf) => taken.push(buf),
                Err(error) => {
                    assert_eq!(error.kind(), PoolErrorKind::Exhausted, "{error}");
                    return taken.len();
                }
            }
        }
    };
    let small = [("memory_pool_increase", "2mb"), ("recv_queue_depth", "16")];
    let regions = [&small[..], &[("rdma_memory_pool_max_regions", "8")]].concat();
    assert_eq!(most(&regions), 4, "half of the regions, of 2 MiB each");
    let max = [&small[..], &[("memory_pool_max", "32mb"), ("receive_reserve", "20mb")]].concat();
    assert_eq!(most(&max), 6);
}

#[test]
fn receive_buffers_are_registered_at_start_and_kept() {
    let buffers = [("recv_buffer_size", "4096"), ("recv_queue_depth", "16")];
    let plain = on_rxe1(&world(), &buffers);
    let many = on_rxe1(&world(), &[&buffers[..], &[("recv_buffer_pool_size", "10000")]].concat());
    let receives = |fabric: &Fabric| fabric.pool().stats().receive.mapped_bytes;
    assert!(receives(&plain) < 8 * MIB, "{}", receives(&plain));
    // Each buffer takes a block of 8 KiB.
    assert!(receives(&many) >= 10_000 * (8 << 10), "{}", receives(&many));
}

#[test]
fn receives_have_the_block_type_that_was_set() {
    for (block_type, expected) in
        [("default", SizeClass::K8), ("large", SizeClass::K64), ("huge", SizeClass::M2)]
    {
        let settings = [("rdma_recv_block_type", block_type), ("recv_queue_depth", "16")];
        let fabric = on_rxe1(&world(), &settings);
        let blocks = fabric.pool().stats().receive.in_use_blocks;
        assert_eq!(blocks, class(expected).map(|one| 16 * one), "{block_type}");
    }
}

#[test]
fn small_messages_are_copied_below_the_zero_copy_threshold() {
    let pair = Pair::new(&[]);
    assert_eq!(pair.blocks_of_message(100), class(SizeClass::K64), "in its receive buffer");
    let pair = Pair::new(&[("rdma_zerocopy_min_size", "512")]);
    assert_eq!(pair.blocks_of_message(100), class(SizeClass::B256));
    assert_eq!(pair.blocks_of_message(512), class(SizeClass::K64));
    let pair = Pair::new(&[("rdma_recv_zerocopy", "false")]);
    assert_eq!(pair.blocks_of_message(5000), class(SizeClass::K8));
}

#[test]
fn free_buffers_are_cached_as_set() {
    let cached = |settings: &[(&str, &str)]| {
        let fabric = on_rxe1(&world(), settings);
        let account = Account::new("a test", 1 << 20);
        let taken: Vec<_> = (0..64)
            .map(|_| fabric.pool().take(200, Purpose::Send, &account).expect("a buffer"))
            .collect();
        drop(taken);
        fabric.pool().stats().send.cached_bytes / 256
    };
    assert!(cached(&[("rdma_memory_pool_tls_cache_num", "128")]) >= 64);
    assert!(cached(&[("rdma_memory_pool_tls_cache_num", "4")]) <= 4);
    assert_eq!(cached(&[("rdma_memory_pool_tls_cache_num", "0")]), 0);
}

/// With one cache, a thread gets the buffer that another thread has returned.
#[test]
fn threads_share_as_many_caches_as_set() {
    let is_shared = |buckets: &str| {
        let fabric = on_rxe1(&world(), &[("rdma_memory_pool_buckets", buckets)]);
        let address_in_new_thread = || {
            let pool = fabric.pool().clone();
            let take = move || {
                let buf = pool.take_uncharged(200, Purpose::Send).expect("a buffer");
                buf.as_ptr().addr()
            };
            std::thread::spawn(take).join().expect("no panic")
        };
        address_in_new_thread() == address_in_new_thread()
    };
    assert!(is_shared("1"));
    assert!(!is_shared("64"));
}

#[test]
fn huge_pages_are_asked_for() {
    let pages = |wanted: &str| on_rxe1(&world(), &[("huge_pages", wanted)]).pool().stats().pages;
    let normal = pages("false");
    assert_eq!((normal.transparent_bytes, normal.huge_bytes), (0, 0));
    let huge = pages("true");
    let host_has_them = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
    assert_eq!(huge.normal_bytes == 0, host_has_them, "{huge:?}");
}

#[test]
fn registered_memory_is_pinned() {
    let fabric = on_rxe1(&world(), &[("pin_memory", "true")]);
    let stats = fabric.pool().stats();
    assert_eq!(stats.registered_bytes, stats.mapped_bytes, "all of it is registered");
    let mut values = Values::new(Program::Gateway);
    let (setting, _) = find(Program::Gateway, "pin_memory").expect("a setting");
    values.set_text(setting, None, "false", Origin::Flag).expect("a switch");
    let wrong = values.check().expect_err("memory is always pinned");
    assert!(wrong[0].1.contains("rdma_enabled = false"), "{}", wrong[0].1);
}

/// Counts the passes of a call that finds nothing to do. There are many if the call polls, and a
/// few if it does not.
#[test]
fn busy_polling_lasts_as_set_and_adapts() {
    const FEW: u64 = 10;
    let passes = |fabric: &Fabric| {
        let before = fabric.stats().passes;
        fabric.progress();
        fabric.stats().passes - before
    };
    let fabric = on_rxe1(&world(), &[("busy_poll_us", "0")]);
    passes(&fabric); // the first one prepares the devices
    assert!(passes(&fabric) < FEW);
    let always = on_rxe1(&world(), &[("busy_poll_us", "50000"), ("adaptive_polling", "false")]);
    let begun = Instant::now();
    passes(&always);
    assert!(begun.elapsed() >= Duration::from_millis(50));
    assert!(passes(&always) >= FEW, "without adaptive polling, every call polls");
    let adaptive = on_rxe1(&world(), &[("busy_poll_us", "50000"), ("adaptive_polling", "true")]);
    assert!(passes(&adaptive) >= FEW, "the first call polls");
    assert!(passes(&adaptive) < FEW, "after a poll that found nothing, it does not poll again");
}

#[test]
fn connections_are_logged_if_asked_for() {
    let logged = |verbose: &str| {
        let mut text = String::new();
        Log::of(|log| {
            drop(Pair::new(&[("rdma_trace_verbose", verbose)]));
            text = log.text();
        });
        text
    };
    let text = logged("true");
    for part in ["RDMA connection: peer 127.0.0.2", "device rxe1 port 1", "queue pair 0x", "MTU "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!logged("false").contains("RDMA connection"));
}
