//! Calls to the kernel or the firmware that do not return, on the fake provider: a fabric with
//! command threads serves everybody else meanwhile.

use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ferrite_fabric::mem::{Pool, Purpose};
use ferrite_fabric::{
    Config, ConnectOptions, ErrorKind, Fabric, Link, Listener, Meet, Rdma, Transport,
};
use ferrite_verbs::fake::{DeviceSpec, World};

const SERVER: &str = "127.0.0.1";
/// Whose links have trouble.
const TROUBLED: &str = "127.0.0.2";
const ANOTHER: &str = "127.0.0.4";
/// Who must not notice.
const HONEST: &str = "127.0.0.3";
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn address(host: &str) -> SocketAddr {
    SocketAddr::new(host.parse().expect("an address"), 0)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A call that waits until this is dropped.
struct Held<'a>(&'a World, &'static str);

impl<'a> Held<'a> {
    fn new(world: &'a World, call: &'static str) -> Self {
        world.hold(call);
        Self(world, call)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.let_go(self.1);
    }
}

/// A server, an honest client with a link to it, and a host whose links are to have trouble.
struct Rig {
    world: World,
    server: Fabric,
    honest: Fabric,
    troubled: Fabric,
    listener: Listener,
    /// Both ends of the honest client's link.
    pair: (Link, Link),
}

impl Rig {
    fn new() -> Self {
        let world = World::new();
        for (device, host) in [("fake1", SERVER), ("fake2", TROUBLED), ("fake3", HONEST)] {
            world.add_device(DeviceSpec::new(device, host.parse().expect("an address")));
        }
        let [server, troubled, honest] =
            ["fake1", "fake2", "fake3"].map(|device| fabric(&world, device));
        let mut listener = server.listen(address(SERVER)).expect("listen");
        let pair = meet(&honest, HONEST, &mut listener, &server);
        Self { world, server, honest, troubled, listener, pair }
    }

    /// Messages go to and fro between the honest client and the server, which a driver that waits
    /// would not let happen.
    fn serves_the_honest(&self) {
        let (server, honest) = (self.server.clone(), self.honest.clone());
        let (there, here) = self.pair.clone();
        let (tell, told) = channel();
        std::thread::spawn(move || {
            for number in 0..50_u8 {
                there.post_bytes(0, &[number]).expect("room");
                assert_eq!(server.block_on(here.recv()).expect("a message").to_vec(), [number]);
                here.post_bytes(0, &[number]).expect("room");
                assert_eq!(honest.block_on(there.recv()).expect("an answer").to_vec(), [number]);
            }
            let _ = tell.send(());
        });
        told.recv_timeout(TEST_TIMEOUT).expect("the driver of a fabric waits");
    }
}

/// A fabric on a device, driven by a thread of its own.
fn fabric(world: &World, device: &str) -> Fabric {
    let config = Config { busy_poll_us: 0, ..Config::default() };
    let builder = Fabric::builder(&world.verbs()).device(device).config(config);
    let fabric = builder.command_threads().build().expect("a fabric");
    fabric.spawn_thread().expect("a thread");
    fabric
}

fn options(host: &str) -> ConnectOptions {
    ConnectOptions::new().local(address(host)).meet(Meet::Cm)
}

fn meet(client: &Fabric, host: &str, listener: &mut Listener, server: &Fabric) -> (Link, Link) {
    let connecting = client.connect_with(listener.local_addr(), &options(host));
    let here = server.block_on(listener.accept()).expect("a link");
    (client.block_on(connecting).expect("a link"), here)
}

/// A peer's request is being answered while another asks.
#[test]
fn takes_cm_events_while_a_cm_call_waits() {
    let mut rig = Rig::new();
    rig.world.add_device(DeviceSpec::new("fake4", ANOTHER.parse().expect("an address")));
    let another = fabric(&rig.world, "fake4");
    let held = Held::new(&rig.world, "rdma_accept");
    let to = rig.listener.local_addr();
    let mut connecting = Vec::new();
    for (number, (client, host)) in (1..).zip([(&rig.troubled, TROUBLED), (&another, ANOTHER)]) {
        connecting.push((client, client.connect_with(to, &options(host))));
        until("the request is taken and answered", || {
            rig.world.waiting_in("rdma_accept") == number
        });
        rig.serves_the_honest();
    }
    drop(held);
    for (client, connecting) in connecting {
        client.block_on(connecting).expect("a link");
        rig.server.block_on(rig.listener.accept()).expect("a link");
    }
}

/// The path of a link breaks, which its peer can cause: the queue pair is destroyed before the link
/// goes on over TCP.
#[test]
fn serves_others_while_a_lost_path_is_destroyed() {
    let mut rig = Rig::new();
    let (there, here) = meet(&rig.troubled, TROUBLED, &mut rig.listener, &rig.server);
    let held = Held::new(&rig.world, "ibv_destroy_qp");
    assert!(rig.world.break_queue_pair(here.qp_num().expect("on RDMA")));
    until("it is destroyed", || rig.world.waiting_in("ibv_destroy_qp") > 0);
    rig.serves_the_honest();
    there.post_bytes(0, b"later").expect("room");
    drop(held);
    assert_eq!(rig.server.block_on(here.recv()).expect("a message").to_vec(), b"later");
    assert_eq!((here.transport(), here.stats().moves), (Transport::Tcp, 1));
}

/// The same, and the link is given up meanwhile.
#[test]
fn forgets_a_link_that_ends_while_its_lost_path_is_destroyed() {
    let mut rig = Rig::new();
    let (there, here) = meet(&rig.troubled, TROUBLED, &mut rig.listener, &rig.server);
    let links = rig.server.stats().links;
    let held = Held::new(&rig.world, "ibv_destroy_qp");
    assert!(rig.world.break_queue_pair(here.qp_num().expect("on RDMA")));
    until("it is destroyed", || rig.world.waiting_in("ibv_destroy_qp") > 0);
    here.abort();
    drop((there, here));
    rig.serves_the_honest();
    drop(held);
    until("nothing is left of it", || {
        rig.server.stats().links == links - 1 && rig.troubled.stats().links == 0
    });
    rig.serves_the_honest();
}

/// A peer vanishes, and the device is asked why a request failed: the link fails at once, and its
/// causes are known later.
#[test]
fn serves_others_while_a_failure_is_diagnosed() {
    let mut rig = Rig::new();
    let options = options(TROUBLED).rdma(Rdma::Require);
    let connecting = rig.troubled.connect_with(rig.listener.local_addr(), &options);
    let here = rig.server.block_on(rig.listener.accept()).expect("a link");
    let there = rig.troubled.block_on(connecting).expect("a link");
    let held = Held::new(&rig.world, "ibv_query_port");
    rig.world.black_hole("fake1", "fake2");
    here.post_bytes(0, b"into the dark").expect("room");
    until("the link fails", || here.failure().is_some());
    until("the device is asked", || rig.world.waiting_in("ibv_query_port") > 0);
    rig.serves_the_honest();
    let error = here.failure().expect("it failed");
    assert_eq!((error.kind(), error.causes()), (ErrorKind::LinkDown, &[][..]));
    drop(held);
    until("the causes are known", || !error.causes().is_empty());
    drop(there);
}

/// Sessions ask what is in use whenever a window is renewed, on the driver's thread.
#[test]
fn tells_what_is_in_use_while_memory_is_registered() {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", SERVER.parse().expect("an address")));
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("a device");
    let domain = context.allocate_protection_domain().expect("a domain");
    let pool = Pool::builder(&[domain]).build().expect("a pool");
    let taken = pool.take_uncharged(2 << 20, Purpose::Receive).expect("what it begins with");
    let in_use = pool.in_use_bytes(Purpose::Receive);
    assert_eq!((pool.stats().growths, in_use), (0, 2 << 20));
    let held = Held::new(&world, "ibv_reg_mr");
    std::thread::scope(|scope| {
        let growing =
            scope.spawn(|| pool.take_uncharged(2 << 20, Purpose::Receive).expect("more").len());
        until("it grows", || world.waiting_in("ibv_reg_mr") == 1);
        let (tell, told) = channel();
        let asking = pool.clone();
        std::thread::spawn(move || {
            let numbers =
                (asking.in_use_bytes(Purpose::Receive), asking.stats().receive.in_use_bytes);
            let _ = tell.send((numbers, asking.domains().len()));
        });
        let told = told.recv_timeout(TEST_TIMEOUT);
        drop(held);
        assert_eq!(told, Ok(((in_use, in_use), 1)), "whoever asks waits");
        assert_eq!(growing.join().expect("it has grown"), 2 << 20);
    });
    drop(taken);
    assert_eq!(pool.in_use_bytes(Purpose::Receive), 0);
}
