//! When a fabric has command threads, the thread that drives it makes no blocking calls itself,
//! except to change a queue pair to the error state. On the fake provider.

use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ferrite_fabric::{
    Config, ConnectMode, ConnectOptions, Fabric, Link, Listener, RawConnection, Rdma,
};
use ferrite_verbs::fake::{DeviceSpec, World};

const SERVER: &str = "127.0.0.1";
const CLIENT: &str = "127.0.0.2";
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Calls that neither enter the firmware nor block: the data path, reading events, and
/// disconnecting.
const NON_BLOCKING: [&str; 10] = [
    "ibv_ack_cq_events",
    "ibv_get_async_event",
    "ibv_get_cq_event",
    "ibv_poll_cq",
    "ibv_post_recv",
    "ibv_post_send",
    "ibv_post_srq_recv",
    "ibv_req_notify_cq",
    "rdma_disconnect",
    "rdma_get_cm_event",
];

/// The call that changes a queue pair to the error state. The thread that detects a link's failure
/// makes this call itself, so that the device accepts nothing more from then on.
const MODIFY_TO_ERROR: &str = "ibv_modify_qp";

/// The index in the fake's GID table of the entry with the device's address.
const GID_INDEX: u32 = 1;

fn address(host: &str) -> SocketAddr {
    SocketAddr::new(host.parse().expect("an address"), 0)
}

fn config() -> Config {
    // The fabric checks the configured GID index for each connection.
    Config { busy_poll_us: 0, gid_index: Some(GID_INDEX), ..Config::default() }
}

/// Runs `act` for the client on a thread of its own, while this thread drives the server.
fn while_driving<T: Send + 'static>(
    server: &Fabric,
    client: &Fabric,
    act: impl FnOnce(&Fabric) -> T + Send + 'static,
) -> T {
    let (sender, receiver) = channel();
    let client = client.clone();
    std::thread::spawn(move || {
        let _ = sender.send(act(&client));
    });
    let begun = Instant::now();
    loop {
        server.progress();
        match receiver.try_recv() {
            Ok(done) => return done,
            Err(_) => assert!(begun.elapsed() < TEST_TIMEOUT, "the client did not finish"),
        }
    }
}

fn drive_until(server: &Fabric, what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        server.progress();
        assert!(begun.elapsed() < TEST_TIMEOUT, "{what}: not within the time limit");
    }
}

fn connect(client: &Fabric, to: SocketAddr, mode: ConnectMode) -> Link {
    let options = ConnectOptions::new().local(address(CLIENT)).mode(mode);
    client.block_on(client.connect_with(to, &options)).expect("a link")
}

fn accept(server: &Fabric, listener: &mut Listener) -> Link {
    let mut link = None;
    drive_until(server, "a link", || {
        link = listener.try_accept().expect("listener is up");
        link.is_some()
    });
    link.expect("a link")
}

fn exchange(server: &Fabric, client: &Fabric, there: &Link, here: &Link) {
    let to_server = there.clone();
    while_driving(server, client, move |_| {
        to_server.post_bytes(0, &[7; 100_000]).expect("room in the queue");
    });
    assert_eq!(server.block_on(here.recv()).expect("a message").len(), 100_000);
    here.post_bytes(0, b"answer").expect("room in the queue");
    let at_client = there.clone();
    while_driving(server, client, move |client| {
        assert_eq!(client.block_on(at_client.recv()).expect("a message").to_vec(), b"answer");
    });
}

/// Returns a server with command threads, which the test drives, and a client with a thread of its
/// own.
fn command_threads() -> (World, Fabric, Fabric) {
    let world = World::new();
    for (device, host) in [("fake1", SERVER), ("fake2", CLIENT)] {
        world.add_device(DeviceSpec::new(device, host.parse().expect("an address")));
    }
    let builder = Fabric::builder(&world.verbs()).device("fake1").config(config());
    let server = builder.command_threads().build().expect("a fabric");
    let client = Fabric::builder(&world.verbs()).device("fake2").config(config()).build();
    let client = client.expect("a fabric");
    client.spawn_thread().expect("a thread");
    (world, server, client)
}

#[test]
fn driving_thread_makes_no_call_that_may_wait() {
    let (world, server, client) = command_threads();
    let mut listener = server.listen(address(SERVER)).expect("listen");
    let to = listener.local_addr();
    world.forget_calls();

    // Opens, uses and closes a link in each connect mode.
    for mode in [ConnectMode::Cm, ConnectMode::TcpFirst] {
        let there = while_driving(&server, &client, move |client| connect(client, to, mode));
        let here = accept(&server, &mut listener);
        exchange(&server, &client, &there, &here);
        while_driving(&server, &client, move |client| drop(client.block_on(there.close())));
        drive_until(&server, "the link ends", || here.failure().is_some());
    }
    // The first foreign peer gets memory to write to. The second is gone before it is accepted.
    let foreign_peers = listener.foreign_peers();
    for stays in [true, false] {
        let raw = while_driving(&server, &client, move |client| {
            let options = ConnectOptions::new().local(address(CLIENT)).rdma(Rdma::Require);
            let connecting = client.connect_raw(to, &options);
            std::thread::spawn({
                let client = client.clone();
                move || stays.then(|| client.block_on(connecting).expect("a connection"))
            })
        });
        if stays {
            let request = server.block_on(foreign_peers.next()).expect("a request");
            let here: RawConnection =
                server.block_on(foreign_peers.accept(request)).expect("a connection");
            let window = server.block_on(here.prepare(1 << 20)).expect("memory");
            assert_eq!(window.len(), 1 << 20);
            drop(window);
            here.abort("enough");
        }
        drop(raw.join());
    }
    drive_until(&server, "all links end", || server.stats().links == 0);
    let calls = world.calls_of(std::thread::current().id());
    let slow: Vec<_> = calls
        .iter()
        .filter(|call| {
            !call.is_empty() && **call != MODIFY_TO_ERROR && !NON_BLOCKING.contains(call)
        })
        .collect();
    assert!(slow.is_empty(), "{slow:?}");
}

/// Destroying an identifier blocks while the kernel removes the device (`cma_process_remove` in the
/// kernel's `drivers/infiniband/core/cma.c`).
#[test]
fn driving_thread_destroys_no_identifier_when_the_device_is_removed() {
    for is_announced in [true, false] {
        let (world, server, client) = command_threads();
        let mut listener = server.listen(address(SERVER)).expect("listen");
        let to = listener.local_addr();
        let there =
            while_driving(&server, &client, move |client| connect(client, to, ConnectMode::Cm));
        let here = accept(&server, &mut listener);
        world.forget_calls();
        if is_announced {
            world.remove_device("fake1");
        } else {
            world.disassociate_device("fake1");
        }
        drive_until(&server, "the device is gone", || server.stats().devices_lost == 1);
        world.add_device(DeviceSpec::new("fake1", SERVER.parse().expect("an address")));
        drive_until(&server, "the device is back", || server.stats().devices_back == 1);
        let calls = world.calls_of(std::thread::current().id());
        assert!(!calls.contains(&"rdma_destroy_id"), "announced: {is_announced}");
        drop((there, here, listener));
    }
}
