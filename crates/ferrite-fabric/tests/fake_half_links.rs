//! Handshakes that a peer does not finish, or in which it violates the protocol, leave nothing
//! behind and do not affect other peers. Also tests windows for many connections and concurrent
//! charges to an account. On the fake provider.

use std::net::SocketAddr;
use std::time::Duration;

use ferrite_fabric::mem::{Account, Pool, Purpose};
use ferrite_fabric::wire::Refusal;
use ferrite_fabric::{Config, ConnectOptions, Fabric, ListenOptions, Rdma};
use ferrite_testkit::handshake::HELLO;
use ferrite_testkit::wait::comes_true;
use ferrite_verbs::fake::{DeviceSpec, World};
use ferrite_verbs::{
    Access, CmEventKind, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation,
    ProtectionDomain, QueuePair, QueuePairConfig, RemoteSlice, SendRequest, State, cm,
};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Makes hosts from 10.0.0.1 on, with a device each.
fn world(hosts: u8) -> World {
    let world = World::new();
    for number in 1..=hosts {
        let ip = format!("10.0.0.{number}").parse().expect("an address");
        world.add_device(DeviceSpec::new(&format!("fake{number}"), ip));
    }
    world
}

/// Builds a fabric on a host, driven by a thread of its own.
fn fabric(world: &World, host: u8, has_command_threads: bool) -> Fabric {
    let config = Config { busy_poll_us: 0, rdma: Rdma::Require, ..Config::default() };
    let builder = Fabric::builder(&world.verbs()).device(format!("fake{host}")).config(config);
    let builder = if has_command_threads { builder.command_threads() } else { builder };
    let fabric = builder.build().expect("a fabric");
    fabric.spawn_thread().expect("a thread");
    fabric
}

fn until(what: &str, done: impl FnMut() -> bool) {
    ferrite_testkit::until(TEST_TIMEOUT, what, done);
}

fn params(private_data: &[u8]) -> ConnectParams<'_> {
    let (reads_in, reads_out, retries, rnr_retries) = (4, 4, 6, 7);
    ConnectParams { qp_num: 0, srq: false, private_data, reads_in, reads_out, retries, rnr_retries }
}

/// A peer on 10.0.0.2 made of plain verbs, up to the point where the server has accepted it.
struct HalfPeer {
    id: CmId,
    qp: QueuePair,
    region: MemoryRegion,
    _rest: (CompletionQueue, ProtectionDomain),
}

impl HalfPeer {
    fn new(world: &World, to: SocketAddr, hello: &[u8]) -> Self {
        let verbs = world.verbs();
        let id =
            cm::resolve(&verbs, Some(address("10.0.0.2:0")), to, TEST_TIMEOUT).expect("a route");
        let context = verbs.device("fake2").and_then(|device| device.open()).expect("a device");
        let domain = context.allocate_protection_domain().expect("a domain");
        let cq = context.create_completion_queue(64, None, 0).expect("a queue");
        let region = domain.allocate(16 << 10, Access::REMOTE_WRITE).expect("memory");
        let config =
            QueuePairConfig { max_send_wr: 8, max_recv_wr: 8, ..QueuePairConfig::new(&cq) };
        let qp = domain.create_queue_pair(&config).expect("a queue pair");
        let attributes = |state| id.queue_pair_attributes(state).expect("attributes");
        let modified = qp.modify(&attributes(State::INIT).access(Access::REMOTE_WRITE));
        modified.expect("initialised");
        id.connect(&ConnectParams { qp_num: qp.number(), ..params(hello) }).expect("a request");
        let event = id.channel().wait_event(TEST_TIMEOUT).expect("a channel").expect("an answer");
        assert_eq!(
            event.kind,
            CmEventKind::CONNECT_RESPONSE,
            "{:?}",
            Refusal::decode(&event.private_data)
        );
        let receives = attributes(State::READY_TO_RECEIVE).access(Access::REMOTE_WRITE);
        qp.modify(&receives.reads_in(4).rnr_timer(12)).expect("ready to receive");
        qp.modify(&attributes(State::READY_TO_SEND).reads_out(4)).expect("ready to send");
        Self { id, qp, region, _rest: (cq, domain) }
    }

    fn post(&self, operation: Operation) {
        let pieces = [self.region.sge(0..8)];
        self.qp.post_send(&[SendRequest::new(1, operation, &pieces).signaled()]).expect("posted");
    }
}

/// A peer violates the protocol before it finishes the handshake, then finishes it, then
/// disconnects. By then another link may have the number of the failed link, and must not be
/// affected.
#[test]
fn failed_handshake_does_not_affect_other_links() {
    let world = world(3);
    let (server, client) = (fabric(&world, 1, false), fabric(&world, 3, false));
    let mut listener = server.listen(address("10.0.0.1:0")).expect("a listener");
    let to = listener.local_addr();
    let mut identifiers = None;
    for _ in 0..5 {
        let peer = HalfPeer::new(&world, to, &HELLO.encode());
        until("the link exists", || server.stats().links == 1);
        peer.post(Operation::Send); // without the immediate data that every frame needs
        until("the link has ended", || server.stats().links == 0);
        let _ = peer.id.establish();
        let options = ConnectOptions::new().local(address("10.0.0.3:0"));
        let there =
            client.block_on(client.connect_with(to, &options)).expect("honest client connects");
        let here = server.block_on(listener.accept()).expect("honest client's link");
        let _ = peer.id.disconnect();
        drop(peer);
        // When this message has arrived, the server has handled all earlier events.
        client.block_on(there.send_bytes(0, b"hello")).expect("sent");
        server.block_on(here.recv()).expect("a message");
        assert!(here.failure().is_none(), "{:?}", here.failure());
        drop((there, here));
        until("both links are gone", || server.stats().links == 0 && client.stats().links == 0);
        // The first round creates objects that stay, so later rounds are compared with it.
        let before = *identifiers.get_or_insert_with(|| world.objects().cm_ids);
        until("no identifier is left over", || world.objects().cm_ids <= before);
    }
}

/// Handshakes that wait for the kernel count towards the limit of their source.
#[test]
fn blocked_handshakes_do_not_keep_other_sources_out() {
    let world = world(3);
    let server = fabric(&world, 1, true);
    let listener = server.listen(address("10.0.0.1:0")).expect("a listener");
    let (to, verbs) = (listener.local_addr(), world.verbs());
    let request = |from: &str| {
        let id = cm::resolve(&verbs, Some(address(from)), to, TEST_TIMEOUT).expect("a route");
        id.connect(&ConnectParams { qp_num: 0x1234, ..params(&HELLO.encode()) })
            .expect("a request");
        id
    };
    world.hold("ibv_modify_qp");
    let many: Vec<_> = (0..100).map(|_| request("10.0.0.2:0")).collect();
    until("some requests are refused", || server.stats().refused > 0);
    let refused = server.stats().refused;
    let other = request("10.0.0.3:0");
    let event = other.channel().wait_event(Duration::from_millis(200)).expect("a channel");
    let is_refused = event.is_some_and(|event| event.kind == CmEventKind::REJECTED);
    world.let_go("ibv_modify_qp");
    assert!(
        !is_refused,
        "the second source was refused, and so were {refused} of {} requests of the first",
        many.len()
    );
}

/// A source whose handshakes block occupies one command thread. Other command threads serve the
/// next sources.
#[test]
fn handshakes_begin_while_other_sources_block() {
    let world = world(6);
    let server = fabric(&world, 1, true);
    let listener = server.listen(address("10.0.0.1:0")).expect("a listener");
    let (to, verbs) = (listener.local_addr(), world.verbs());
    world.hold("ibv_modify_qp");
    let before = world.objects().queue_pairs;
    let mut requests = Vec::new();
    for host in 2..=6 {
        let from = address(&format!("10.0.0.{host}:0"));
        let id = cm::resolve(&verbs, Some(from), to, TEST_TIMEOUT).expect("a route");
        id.connect(&ConnectParams { qp_num: 0x1234, ..params(&HELLO.encode()) })
            .expect("a request");
        requests.push(id);
        // The handshake creates its queue pair, then blocks in `ibv_modify_qp`.
        let made = || world.objects().queue_pairs - before;
        if !comes_true(TEST_TIMEOUT, || made() == requests.len()) {
            world.let_go("ibv_modify_qp");
            panic!("the handshake of host {host} waits for other hosts");
        }
    }
    world.let_go("ibv_modify_qp");
}

/// A failed handshake is cleaned up in the command queue of the peer's address, and does not delay
/// the server's own commands.
#[test]
fn cleanup_of_a_failed_handshake_does_not_delay_the_server() {
    let world = world(3);
    let config = Config { busy_poll_us: 0, rdma: Rdma::Require, ..Config::default() };
    let builder = Fabric::builder(&world.verbs()).device("fake1").device("fake3").config(config);
    let server = builder.command_threads().build().expect("a fabric");
    server.spawn_thread().expect("a thread");
    let listener = server.listen(address("10.0.0.1:0")).expect("a listener");
    let verbs = world.verbs();
    world.hold("ibv_destroy_qp");
    world.fail_next("rdma_accept", 12);
    let id = cm::resolve(&verbs, Some(address("10.0.0.2:0")), listener.local_addr(), TEST_TIMEOUT);
    let id = id.expect("a route");
    id.connect(&ConnectParams { qp_num: 0x1234, ..params(&HELLO.encode()) }).expect("a request");
    until("the request is refused", || server.stats().refused > 0);
    // A device of the server is removed and added. The search for the device is a command of the
    // server itself.
    world.remove_device("fake3");
    until("the device is lost", || server.stats().devices_lost == 1);
    world.add_device(DeviceSpec::new("fake3", "10.0.0.3".parse().expect("an address")));
    let is_back = comes_true(TEST_TIMEOUT, || server.stats().devices_back == 1);
    world.let_go("ibv_destroy_qp");
    assert!(is_back, "the server's own command waits for the peer's queue pair");
}

/// The server refuses a source that has caused two access errors, even if they occurred before a
/// handshake was finished.
#[test]
fn access_errors_during_the_handshake_count() {
    let world = world(2);
    let server = fabric(&world, 1, false);
    let how = ListenOptions::new().foreign_peers_only();
    let listener = server.listen_with(address("10.0.0.1:0"), &how).expect("a listener");
    let (to, foreign_peers, accepting) =
        (listener.local_addr(), listener.foreign_peers(), server.clone());
    std::thread::spawn(move || {
        while let Ok(request) = accepting.block_on(foreign_peers.next()) {
            std::mem::forget(foreign_peers.accept(request));
        }
    });
    for guess in 1..=2_u64 {
        let peer = HalfPeer::new(&world, to, b"");
        let rkey = 0x1234_5600 + u32::try_from(guess).expect("small number");
        peer.post(Operation::Write(RemoteSlice { addr: 0x1000, len: 8, rkey }));
        until("the access error is counted", || server.stats().remote_access_errors == guess);
    }
    let verbs = world.verbs();
    let id = cm::resolve(&verbs, Some(address("10.0.0.2:0")), to, TEST_TIMEOUT).expect("a route");
    id.connect(&ConnectParams { qp_num: 0x1234, ..params(b"") }).expect("a request");
    until("the source is refused", || server.stats().refused_after_access_errors == 1);
}

/// 100 connections of one host request windows at the same time, while the registration of memory
/// is blocked. Each gets its window afterwards.
#[test]
fn many_connections_get_windows_in_turn() {
    let world = world(2);
    let (server, client) = (fabric(&world, 1, true), fabric(&world, 2, false));
    let how = ListenOptions::new().foreign_peers_only();
    let listener = server.listen_with(address("10.0.0.1:0"), &how).expect("a listener");
    let (to, foreign_peers) = (listener.local_addr(), listener.foreign_peers());
    let options = ConnectOptions::new().local(address("10.0.0.2:0"));
    let mut links = Vec::new();
    for _ in 0..100 {
        let calling = client.connect_raw(to, &options);
        let request = server.block_on(foreign_peers.next()).expect("a request");
        let ours = server.block_on(foreign_peers.accept(request)).expect("a link");
        links.push((client.block_on(calling).expect("the other end"), ours));
    }
    world.hold("ibv_reg_mr");
    let preparing: Vec<_> = links.iter().map(|(_, ours)| ours.prepare(64 << 10)).collect();
    world.let_go("ibv_reg_mr");
    for prepared in preparing {
        server.block_on(prepared).expect("a window");
    }
}

/// Two threads charge and credit an account at once. Afterwards the account and its parent are at
/// 0.
#[test]
fn concurrent_charges_and_credits_cancel_out() {
    let world = world(1);
    let context = world.verbs().device("fake1").and_then(|device| device.open()).expect("a device");
    let pool = Pool::builder(&[context.allocate_protection_domain().expect("a domain")]).build();
    let pool = pool.expect("a pool");
    let all = Account::new("a host", 0);
    let block = 8 << 10;
    let link = all.part("a link", 1 << 30, 10 * block as u64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20_000 {
                // Both takes fit into the limit of `link` together: this one and the other thread's
                // block.
                let _ = pool.take(64 << 10, Purpose::Receive, &link);
            }
        });
        for _ in 0..20_000 {
            let _ = pool.take(block, Purpose::Receive, &link);
        }
    });
    assert_eq!((link.used_bytes(), all.used_bytes()), (0, 0));
}
