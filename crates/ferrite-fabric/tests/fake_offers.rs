//! Offers to upgrade to RDMA, valid and invalid, from a TCP client that the test plays by hand. On
//! the fake provider.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use ferrite_fabric::wire::{
    Features, GREETING_BYTES, Greeting, Hello, TCP_FRAME_HEADER_BYTES, TcpFrame, TcpFrameKind,
};
use ferrite_fabric::{Config, ErrorKind, Fabric, Link, Listener, Transport};
use ferrite_testkit::handshake::{HELLO, offer};
use ferrite_verbs::fake::{DeviceSpec, Objects, World};

const SERVER: &str = "127.0.0.1";
const CLIENT: &str = "127.0.0.2";
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A server with a device, and a TCP client that has sent its hello and can then send anything.
struct OfferHarness {
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

fn server_address() -> SocketAddr {
    SocketAddr::new(SERVER.parse().expect("an address"), 0)
}

fn offer_of(address: &str) -> Vec<u8> {
    offer(address.parse().expect("an address"))
}

impl OfferHarness {
    fn new() -> Self {
        let world = world();
        let fabric = fabric(&world);
        fabric.spawn_thread().expect("a thread");
        let mut listener = fabric.listen(server_address()).expect("listen");
        let client = connect(listener.local_addr());
        let link = fabric.block_on(listener.accept()).expect("a link");
        Self { world, fabric, link, client, listener }
    }

    fn offer(&mut self, address: &str) {
        self.client.write_all(&offer_of(address)).expect("write");
    }

    fn withdraw(&mut self) {
        let tcp_frame =
            TcpFrame { kind: TcpFrameKind::Withdraw, imm: 0, len: 0, op: 0, grant: 0, offset: 0 };
        self.client.write_all(&tcp_frame.encode()).expect("write");
    }

    /// Reads the next TCP frame from the server.
    fn read_frame(&mut self) -> TcpFrame {
        let mut bytes = [0; TCP_FRAME_HEADER_BYTES];
        self.client.read_exact(&mut bytes).expect("an answer");
        let tcp_frame = TcpFrame::decode(&bytes).expect("a TCP frame");
        let mut rest = vec![0; tcp_frame.follows()];
        self.client.read_exact(&mut rest).expect("the rest of the frame");
        tcp_frame
    }

    /// Waits until the server closes the connection.
    fn wait_closed(&mut self) {
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

/// Connects and sends a greeting.
fn connect(to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType};
    let socket =
        rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    let from = SocketAddr::new(CLIENT.parse().expect("an address"), 0);
    rustix::net::bind(&socket, &from).expect("bind");
    rustix::net::connect(&socket, &to).expect("connect");
    let mut client = TcpStream::from(socket);
    client.set_read_timeout(Some(TEST_TIMEOUT)).expect("set the timeout");
    let hello = Hello { features: HELLO.features | Features::MOVE, session: 9, ..HELLO };
    client.write_all(&Greeting { hello, resume: None }.encode()).expect("write");
    client
}

/// Reads the server's greeting.
fn read_greeting(harness: &mut OfferHarness) {
    let mut bytes = [0; GREETING_BYTES];
    harness.client.read_exact(&mut bytes).expect("a greeting");
}

#[test]
fn rejects_addresses_other_than_the_tcp_peers() {
    let mut harness = OfferHarness::new();
    read_greeting(&mut harness);
    let queue_pairs = harness.world.objects().queue_pairs;
    for (number, address) in
        ["10.0.0.250", "127.0.0.3", "fe80::5054:ff:fe12:3456", "::"].iter().enumerate()
    {
        harness.offer(address);
        assert_eq!(harness.read_frame().kind, TcpFrameKind::Withdraw, "{address}");
        assert_eq!(harness.fabric.stats().offers_refused, number as u64 + 1, "{address}");
    }
    assert_eq!(
        harness.world.objects().queue_pairs,
        queue_pairs,
        "the offers must not create queue pairs"
    );
    // The link still works.
    assert!(harness.link.failure().is_none());
    harness.offer(CLIENT);
    assert_eq!(harness.read_frame().kind, TcpFrameKind::Answer);
    assert_eq!(harness.fabric.stats().offers_refused, 4);
}

#[test]
fn ends_a_link_whose_peer_makes_two_offers_at_a_time() {
    let mut harness = OfferHarness::new();
    read_greeting(&mut harness);
    harness.offer(CLIENT);
    harness.offer(CLIENT);
    let error = harness.fabric.block_on(harness.link.ended()).expect_err("the link must fail");
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("a second offer before the first"), "{error}");
    harness.wait_closed();
}

#[test]
fn accepts_an_offer_after_one_was_withdrawn() {
    let mut harness = OfferHarness::new();
    read_greeting(&mut harness);
    for _ in 0..3 {
        harness.offer(CLIENT);
        assert_eq!(harness.read_frame().kind, TcpFrameKind::Answer);
        harness.withdraw();
    }
    // An offer that is withdrawn before it was answered may or may not be answered, so this case is
    // the last one.
    harness.offer(CLIENT);
    harness.withdraw();
    harness.offer(CLIENT);
    assert_eq!(harness.read_frame().kind, TcpFrameKind::Answer);
    assert!(harness.link.failure().is_none());
}

/// While the kernel is slow to bring up a queue pair, other peers do not wait.
#[test]
fn serves_others_while_an_offer_waits_for_the_kernel() {
    let mut harness = OfferHarness::new();
    read_greeting(&mut harness);
    let config = Config { busy_poll_us: 0, ..Config::default() };
    let other = Fabric::builder(&harness.world.verbs()).device("fake2").config(config).build();
    let other = other.expect("a fabric");
    other.spawn_thread().expect("a thread");
    let connecting = other.connect(harness.listener.local_addr());
    let (there, here) =
        other.block_on(async { futures_util::join!(connecting, harness.listener.accept()) });
    let (there, here) = (there.expect("connect"), here.expect("accept"));
    assert_eq!(there.transport(), Transport::Rdma);

    harness.world.hold("ibv_modify_qp");
    harness.offer(CLIENT);
    for number in 0..100_u8 {
        there.post_bytes(0, &[number]).expect("room in the queue");
        let message = harness.fabric.block_on(here.recv()).expect("a message");
        assert_eq!(message.to_vec(), [number]);
    }
    harness.world.let_go("ibv_modify_qp");
    assert_eq!(harness.read_frame().kind, TcpFrameKind::Answer);
}

/// A fabric that is dropped while a link upgrades to RDMA destroys the new queue pair and frees its
/// receives.
#[test]
fn leaves_nothing_when_the_fabric_is_dropped_during_an_offer() {
    let world = world();
    let fabric = fabric(&world);
    let mut listener = fabric.listen(server_address()).expect("listen");
    let mut client = connect(listener.local_addr());
    client.write_all(&offer_of(CLIENT)).expect("write");
    let (mut link, begun) = (None, Instant::now());
    // The fabric is not driven after this loop.
    while link.is_none() || world.objects().queue_pairs == 0 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "no queue pair for the offer");
        fabric.progress();
        link = link.or(listener.try_accept().expect("listener is up"));
    }
    let pool = fabric.pool().clone();
    drop((fabric, link, listener));
    assert_eq!(world.objects().queue_pairs, 0);
    assert_eq!(pool.stats().receive.in_use_bytes, 0, "receives stay in use");
    drop(pool);
    assert_eq!(world.objects(), Objects::default());
    assert_eq!(ferrite_verbs::leaked_objects(), 0);
}
