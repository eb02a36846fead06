//! Calls into the kernel or the firmware that block, on the fake provider: a fabric with command
//! threads serves all other peers meanwhile.

use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::time::Duration;

use ferrite_fabric::mem::{Pool, Purpose};
use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, ErrorKind, Fabric, Link, Listener, Rdma, Transport,
};
use ferrite_verbs::fake::{DeviceSpec, World};

const SERVER: &str = "127.0.0.1";
/// The host for whose links a call blocks.
const BLOCKING: &str = "127.0.0.2";
const ANOTHER: &str = "127.0.0.4";
/// The host that must not be affected.
const HONEST: &str = "127.0.0.3";
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn address(host: &str) -> SocketAddr {
    SocketAddr::new(host.parse().expect("an address"), 0)
}

fn until(what: &str, done: impl FnMut() -> bool) {
    ferrite_testkit::until(TEST_TIMEOUT, what, done);
}

/// Blocks all calls of one verbs function until this is dropped.
struct BlockedCall<'a>(&'a World, &'static str);

impl<'a> BlockedCall<'a> {
    fn new(world: &'a World, call: &'static str) -> Self {
        world.hold(call);
        Self(world, call)
    }
}

impl Drop for BlockedCall<'_> {
    fn drop(&mut self) {
        self.0.let_go(self.1);
    }
}

/// A server, an honest client with a link to it, and a client for whose links a call will block.
struct StallHarness {
    world: World,
    server: Fabric,
    honest: Fabric,
    blocking: Fabric,
    listener: Listener,
    /// Both ends of the honest client's link.
    pair: (Link, Link),
}

impl StallHarness {
    fn new() -> Self {
        let world = World::new();
        for (device, host) in [("fake1", SERVER), ("fake2", BLOCKING), ("fake3", HONEST)] {
            world.add_device(DeviceSpec::new(device, host.parse().expect("an address")));
        }
        let [server, blocking, honest] =
            ["fake1", "fake2", "fake3"].map(|device| fabric(&world, device));
        let mut listener = server.listen(address(SERVER)).expect("listen");
        let pair = open_link(&honest, HONEST, &mut listener, &server);
        Self { world, server, honest, blocking, listener, pair }
    }

    /// Checks that messages travel both ways between the honest client and the server. A blocked
    /// driver thread would prevent that.
    fn check_honest_client(&self) {
        let (server, honest) = (self.server.clone(), self.honest.clone());
        let (there, here) = self.pair.clone();
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for number in 0..50_u8 {
                there.post_bytes(0, &[number]).expect("room in the queue");
                assert_eq!(server.block_on(here.recv()).expect("a message").to_vec(), [number]);
                here.post_bytes(0, &[number]).expect("room in the queue");
                assert_eq!(honest.block_on(there.recv()).expect("an answer").to_vec(), [number]);
            }
            let _ = sender.send(());
        });
        receiver.recv_timeout(TEST_TIMEOUT).expect("no driver thread is blocked");
    }
}

/// Builds a fabric on a device, driven by a thread of its own.
fn fabric(world: &World, device: &str) -> Fabric {
    let config = Config { busy_poll_us: 0, ..Config::default() };
    let builder = Fabric::builder(&world.verbs()).device(device).config(config);
    let fabric = builder.command_threads().build().expect("a fabric");
    fabric.spawn_thread().expect("a thread");
    fabric
}

fn options(host: &str) -> ConnectOptions {
    ConnectOptions::new().local(address(host)).mode(ConnectMode::Cm)
}

fn open_link(
    client: &Fabric,
    host: &str,
    listener: &mut Listener,
    server: &Fabric,
) -> (Link, Link) {
    let connecting = client.connect_with(listener.local_addr(), &options(host));
    let here = server.block_on(listener.accept()).expect("a link");
    (client.block_on(connecting).expect("a link"), here)
}

/// While `rdma_accept` blocks for one peer's request, the server begins to answer another peer's
/// request, and serves the honest client's link.
#[test]
fn handles_cm_events_while_a_cm_call_blocks() {
    let mut harness = StallHarness::new();
    harness.world.add_device(DeviceSpec::new("fake4", ANOTHER.parse().expect("an address")));
    let another = fabric(&harness.world, "fake4");
    let blocked = BlockedCall::new(&harness.world, "rdma_accept");
    let to = harness.listener.local_addr();
    let mut connecting = Vec::new();
    for (number, (client, host)) in (1..).zip([(&harness.blocking, BLOCKING), (&another, ANOTHER)])
    {
        connecting.push((client, client.connect_with(to, &options(host))));
        until("the request is being answered", || {
            harness.world.waiting_in("rdma_accept") == number
        });
        harness.check_honest_client();
    }
    drop(blocked);
    for (client, connecting) in connecting {
        client.block_on(connecting).expect("a link");
        harness.server.block_on(harness.listener.accept()).expect("a link");
    }
}

/// The RDMA path of a link breaks, which its peer can cause. The queue pair is destroyed before the
/// link continues over TCP.
#[test]
fn serves_others_while_a_lost_path_is_destroyed() {
    let mut harness = StallHarness::new();
    let (there, here) =
        open_link(&harness.blocking, BLOCKING, &mut harness.listener, &harness.server);
    let blocked = BlockedCall::new(&harness.world, "ibv_destroy_qp");
    assert!(harness.world.break_queue_pair(here.qp_num().expect("on RDMA")));
    until("the queue pair is being destroyed", || harness.world.waiting_in("ibv_destroy_qp") > 0);
    harness.check_honest_client();
    there.post_bytes(0, b"later").expect("room in the queue");
    drop(blocked);
    assert_eq!(harness.server.block_on(here.recv()).expect("a message").to_vec(), b"later");
    assert_eq!((here.transport(), here.stats().moves), (Transport::Tcp, 1));
}

/// A link is aborted while the queue pair of its lost path is being destroyed.
#[test]
fn forgets_a_link_that_ends_while_its_lost_path_is_destroyed() {
    let mut harness = StallHarness::new();
    let (there, here) =
        open_link(&harness.blocking, BLOCKING, &mut harness.listener, &harness.server);
    let links = harness.server.stats().links;
    let blocked = BlockedCall::new(&harness.world, "ibv_destroy_qp");
    assert!(harness.world.break_queue_pair(here.qp_num().expect("on RDMA")));
    until("the queue pair is being destroyed", || harness.world.waiting_in("ibv_destroy_qp") > 0);
    here.abort();
    drop((there, here));
    harness.check_honest_client();
    drop(blocked);
    until("nothing is left of the link", || {
        harness.server.stats().links == links - 1 && harness.blocking.stats().links == 0
    });
    harness.check_honest_client();
}

/// A peer disappears, and the fabric queries the device for the cause. The link fails at once. The
/// causes of its error are known later.
#[test]
fn serves_others_while_a_failure_is_diagnosed() {
    let mut harness = StallHarness::new();
    let options = options(BLOCKING).rdma(Rdma::Require);
    let connecting = harness.blocking.connect_with(harness.listener.local_addr(), &options);
    let here = harness.server.block_on(harness.listener.accept()).expect("a link");
    let there = harness.blocking.block_on(connecting).expect("a link");
    let blocked = BlockedCall::new(&harness.world, "ibv_query_port");
    harness.world.black_hole("fake1", "fake2");
    here.post_bytes(0, b"into the dark").expect("room in the queue");
    until("the link fails", || here.failure().is_some());
    until("the device is queried", || harness.world.waiting_in("ibv_query_port") > 0);
    harness.check_honest_client();
    let error = here.failure().expect("link failed");
    assert_eq!((error.kind(), error.causes()), (ErrorKind::LinkDown, &[][..]));
    drop(blocked);
    until("the causes are known", || !error.causes().is_empty());
    drop(there);
}

/// A query of the memory in use does not wait while the pool registers memory. Sessions make this
/// query on the driver thread to choose the size of a window.
#[test]
fn reports_memory_in_use_while_memory_is_registered() {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", SERVER.parse().expect("an address")));
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("a device");
    let domain = context.allocate_protection_domain().expect("a domain");
    let pool = Pool::builder(&[domain]).build().expect("a pool");
    let taken = pool.take_uncharged(2 << 20, Purpose::Receive).expect("initial memory");
    let in_use = pool.in_use_bytes(Purpose::Receive);
    assert_eq!((pool.stats().growths, in_use), (0, 2 << 20));
    let blocked = BlockedCall::new(&world, "ibv_reg_mr");
    std::thread::scope(|scope| {
        let growing = scope
            .spawn(|| pool.take_uncharged(2 << 20, Purpose::Receive).expect("more memory").len());
        until("the pool grows", || world.waiting_in("ibv_reg_mr") == 1);
        let (sender, receiver) = channel();
        let asking = pool.clone();
        std::thread::spawn(move || {
            let numbers =
                (asking.in_use_bytes(Purpose::Receive), asking.stats().receive.in_use_bytes);
            let _ = sender.send((numbers, asking.domains().len()));
        });
        let reported = receiver.recv_timeout(TEST_TIMEOUT);
        drop(blocked);
        assert_eq!(
            reported,
            Ok(((in_use, in_use), 1)),
            "the query must not wait for the registration"
        );
        assert_eq!(growing.join().expect("the pool has grown"), 2 << 20);
    });
    drop(taken);
    assert_eq!(pool.in_use_bytes(Purpose::Receive), 0);
}
