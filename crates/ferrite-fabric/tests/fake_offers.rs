//! Offers to go on over RDMA from a TCP client that does not keep to the rules, on the fake
//! provider.

#[path = "links/hello.rs"]
mod hello;
#[path = "links/offer.rs"]
mod offer;

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{
    Features, GREETING_BYTES, Greeting, Hello, TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind,
};
use ferrite_fabric::{Config, ErrorKind, Fabric, Link, Listener, Transport};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};
use hello::HELLO;
use offer::offer;

const SERVER: &str = "127.0.0.1";
const CLIENT: &str = "127.0.0.2";
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A server with a device, and a TCP client that has said hello and says what it likes from then
/// on.
struct Scene {
    world: World,
    fabric: Fabric,
    link: Link,
    client: TcpStream,
    listener: Listener,
}

fn world() -> World {
    let world = World::new();
    for (device, address) in [("fake1", SERVER), ("fake2", CLIENT)] {
        world.add_device(DeviceSpec::new(device, address.parse().expect("an address")));
    }
    world
}

fn fabric(world: &World) -> Fabric {
    let config = Config { busy_poll_us: 0, ..Config::default() };
    let builder = Fabric::builder(&world.verbs()).device("fake1").config(config);
    builder.command_threads().build().expect("a fabric")
}

fn server() -> SocketAddr {
    SocketAddr::new(SERVER.parse().expect("an address"), 0)
}

fn offer_of(address: &str) -> Vec<u8> {
    offer(address.parse().expect("an address"))
}

impl Scene {
    fn new() -> Self {
        let world = world();
        let fabric = fabric(&world);
        fabric.spawn_thread().expect("a thread");
        let mut listener = fabric.listen(server()).expect("listen");
        let client = call(listener.local_addr());
        let link = fabric.block_on(listener.accept()).expect("a link");
        Self { world, fabric, link, client, listener }
    }

    fn offer(&mut self, address: &str) {
        self.client.write_all(&offer_of(address)).expect("to write");
    }

    fn withdraw(&mut self) {
        let tcp_frame =
            TcpFrame { kind: TcpFrameKind::Withdraw, imm: 0, len: 0, op: 0, grant: 0, offset: 0 };
        self.client.write_all(&tcp_frame.encode()).expect("to write");
    }

    /// The next thing that the server says.
    fn heard(&mut self) -> TcpFrame {
        let mut bytes = [0; TCP_FRAME_HEADER_BYTES];
        self.client.read_exact(&mut bytes).expect("an answer");
        let tcp_frame = TcpFrame::decode(&bytes).expect("a tcp_frame");
        let mut rest = vec![0; tcp_frame.follows()];
        self.client.read_exact(&mut rest).expect("what follows");
        tcp_frame
    }

    fn is_closed(&mut self) {
        let mut bytes = [0; 512];
        loop {
            match self.client.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == IoErrorKind::ConnectionReset => return,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn call(to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType};
    let socket =
        rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    let from = SocketAddr::new(CLIENT.parse().expect("an address"), 0);
    rustix::net::bind(&socket, &from).expect("to bind");
    rustix::net::connect(&socket, &to).expect("to connect");
    let mut client = TcpStream::from(socket);
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    let hello = Hello { features: HELLO.features | Features::MOVE, session: 9, ..HELLO };
    client.write_all(&Greeting { hello, resume: None }.encode()).expect("to write");
    client
}

fn greeting(scene: &mut Scene) {
    let mut bytes = [0; GREETING_BYTES];
    scene.client.read_exact(&mut bytes).expect("a greeting");
}

#[test]
fn rejects_an_address_that_is_not_the_tcp_peers() {
    let mut scene = Scene::new();
    greeting(&mut scene);
    let queue_pairs = scene.world.objects().queue_pairs;
    for (number, address) in
        ["10.0.0.250", "127.0.0.3", "fe80::5054:ff:fe12:3456", "::"].iter().enumerate()
    {
        scene.offer(address);
        assert_eq!(scene.heard().kind, TcpFrameKind::Withdraw, "{address}");
        assert_eq!(scene.fabric.stats().offers_refused, number as u64 + 1, "{address}");
    }
    assert_eq!(scene.world.objects().queue_pairs, queue_pairs, "none is made for such an offer");
    // The link is as well as before.
    assert!(scene.link.failure().is_none());
    scene.offer(CLIENT);
    assert_eq!(scene.heard().kind, TcpFrameKind::Answer);
    assert_eq!(scene.fabric.stats().offers_refused, 4);
}

#[test]
fn ends_a_link_whose_peer_makes_two_offers_at_a_time() {
    let mut scene = Scene::new();
    greeting(&mut scene);
    scene.offer(CLIENT);
    scene.offer(CLIENT);
    let error = scene.fabric.block_on(scene.link.ended()).expect_err("not in good order");
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("an offer before"), "{error}");
    scene.is_closed();
}

#[test]
fn takes_another_offer_after_one_was_withdrawn() {
    let mut scene = Scene::new();
    greeting(&mut scene);
    for _ in 0..3 {
        scene.offer(CLIENT);
        assert_eq!(scene.heard().kind, TcpFrameKind::Answer);
        scene.withdraw();
    }
    // Withdrawn before it was answered: whether it still is depends on who was quicker, so this is
    // the last.
    scene.offer(CLIENT);
    scene.withdraw();
    scene.offer(CLIENT);
    assert_eq!(scene.heard().kind, TcpFrameKind::Answer);
    assert!(scene.link.failure().is_none());
}

/// The kernel takes its time to bring a queue pair up: nobody else waits for that.
#[test]
fn serves_others_while_an_offer_waits_for_the_kernel() {
    let mut scene = Scene::new();
    greeting(&mut scene);
    let config = Config { busy_poll_us: 0, ..Config::default() };
    let other = Fabric::builder(&scene.world.verbs()).device("fake2").config(config).build();
    let other = other.expect("a fabric");
    other.spawn_thread().expect("a thread");
    let connecting = other.connect(scene.listener.local_addr());
    let (there, here) =
        other.block_on(async { futures_util::join!(connecting, scene.listener.accept()) });
    let (there, here) = (there.expect("connect"), here.expect("accept"));
    assert_eq!(there.transport(), Transport::Rdma);

    scene.world.hold("ibv_modify_qp");
    scene.offer(CLIENT);
    for number in 0..100_u8 {
        there.post_bytes(0, &[number]).expect("room");
        let message = scene.fabric.block_on(here.recv()).expect("a message");
        assert_eq!(message.to_vec(), [number]);
    }
    scene.world.let_go("ibv_modify_qp");
    assert_eq!(scene.heard().kind, TcpFrameKind::Answer);
}

/// A fabric that ends while a link goes up to RDMA lets go of the queue pair there, and so of its
/// receives.
#[test]
fn leaves_nothing_when_the_fabric_ends_during_an_offer() {
    let world = world();
    let fabric = fabric(&world);
    let mut listener = fabric.listen(server()).expect("listen");
    let mut client = call(listener.local_addr());
    client.write_all(&offer_of(CLIENT)).expect("to write");
    let (mut link, begun) = (None, Instant::now());
    // Nobody drives it after this.
    while link.is_none() || world.objects().queue_pairs == 0 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "no queue pair for the offer");
        fabric.progress();
        link = link.or(listener.try_accept().expect("a listener"));
    }
    let pool = fabric.pool().clone();
    drop((fabric, link, listener));
    assert_eq!(world.objects().queue_pairs, 0);
    assert_eq!(pool.stats().receive.in_use_bytes, 0, "receives are in use for ever");
    drop(pool);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
