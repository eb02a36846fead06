//! Links beyond the number of queue pairs that a device has, on the fake provider and this host's
//! TCP. They use TCP, and one of them takes the place of a link that ends.
#![cfg(not(miri))] // Miri has no network

use std::net::SocketAddr;
use std::time::Duration;

use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, Fabric, FallbackCause, Link, Listener, Transport,
};
use ferrite_testkit::wait::until;
use ferrite_verbs::fake::{DeviceSpec, World};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// The devices and addresses of the host that connects, and of the host that listens.
const HOSTS: [(&str, &str); 2] = [("fake1", "127.0.0.1"), ("fake2", "127.0.0.2")];
/// The fake provider counts the queue pairs of all devices. So this is enough for two links, which
/// have one queue pair on each side.
const QUEUE_PAIRS: u32 = 4;

fn at(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse().expect("an address"), 0)
}

/// Two hosts, of which the second listens.
struct Hosts {
    _world: World,
    fabrics: [Fabric; 2],
    listener: Listener,
}

impl Hosts {
    /// Makes the hosts. The device of the host with this index has few queue pairs.
    fn with_few_queue_pairs(limited: usize) -> Self {
        let world = World::new();
        for (index, (device, ip)) in HOSTS.into_iter().enumerate() {
            let mut spec = DeviceSpec::new(device, at(ip).ip());
            if index == limited {
                spec.max_qp = QUEUE_PAIRS;
            }
            world.add_device(spec);
        }
        let verbs = world.verbs();
        let fabrics = HOSTS.map(|(device, _)| {
            let config = Config { upgrade_after: Duration::from_millis(20), ..Config::default() };
            let builder = Fabric::builder(&verbs).device(device).config(config);
            let fabric = builder.build().expect("a fabric");
            fabric.spawn_thread().expect("a thread");
            fabric
        });
        let listener = fabrics[1].listen(at(HOSTS[1].1)).expect("listen");
        Self { _world: world, fabrics, listener }
    }

    /// Opens a link. Returns both ends.
    fn open(&mut self, mode: ConnectMode) -> [Link; 2] {
        let options = ConnectOptions::new().local(at(HOSTS[0].1)).mode(mode);
        let connecting = self.fabrics[0].connect_with(self.listener.local_addr(), &options);
        let link = self.fabrics[0].block_on(connecting).expect("a link");
        let other = self.fabrics[1].block_on(self.listener.accept()).expect("the other end");
        [link, other]
    }
}

/// Opens two links over RDMA and one more. Returns why that one uses TCP. Then closes a link over
/// RDMA, and waits until the one on TCP has been upgraded.
fn cause_of_surplus_link(limited: usize, mode: ConnectMode) -> FallbackCause {
    let mut hosts = Hosts::with_few_queue_pairs(limited);
    let [first, second] = [(); 2].map(|()| hosts.open(mode));
    for [link, _] in [&first, &second] {
        assert_eq!(link.transport(), Transport::Rdma, "{mode}");
    }
    let [surplus, other] = hosts.open(mode);
    assert_eq!(surplus.transport(), Transport::Tcp, "{mode}");
    let cause = surplus.fallback().expect("a reason").cause;
    surplus.post_bytes(0, b"over TCP").expect("room in the queue");
    let message = hosts.fabrics[1].block_on(other.recv()).expect("a message");
    assert_eq!(message.to_vec(), b"over TCP");
    assert_eq!(second[0].transport(), Transport::Rdma, "the other links stay");
    drop(first);
    until(TEST_TIMEOUT, "a queue pair for the surplus link", || {
        surplus.transport() == Transport::Rdma
    });
    cause
}

#[test]
fn links_beyond_the_callers_queue_pairs_use_tcp_until_one_is_free() {
    for mode in [ConnectMode::Auto, ConnectMode::TcpFirst] {
        assert_eq!(cause_of_surplus_link(0, mode), FallbackCause::Resources, "{mode}");
    }
}

#[test]
fn links_beyond_the_listeners_queue_pairs_use_tcp_until_one_is_free() {
    // Over TCP, the peer withdraws without a reason.
    for (mode, cause) in [
        (ConnectMode::Auto, FallbackCause::Refused),
        (ConnectMode::TcpFirst, FallbackCause::Unreachable),
    ] {
        assert_eq!(cause_of_surplus_link(1, mode), cause, "{mode}");
    }
}
