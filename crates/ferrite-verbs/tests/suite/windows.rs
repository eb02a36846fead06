//! Memory windows: memory that only the peer of one queue pair may access.

use std::ops::Range;
use std::time::Instant;

use ferrite_verbs::{
    Access, CompletionQueue, Context, ErrorKind, GidType, MemoryRegion, MemoryWindow, Opcode,
    Operation, Path, PeerAddress, ProtectionDomain, QueuePair, QueuePairAttributes,
    QueuePairConfig, RemoteSlice, SendRequest, Status, WorkCompletion,
};

use super::{Fixture, Host, TIMEOUT};

/// Number of clients. Each is connected to its own queue pair of the server's protection domain.
const CLIENTS: usize = 2;
const REGION: usize = 4096;
/// The range of the windows in these tests.
const WINDOW: Range<usize> = 1024..2048;

struct Side {
    qps: Vec<QueuePair>,
    cq: CompletionQueue,
    region: MemoryRegion,
    domain: ProtectionDomain,
    context: Context,
    address: PeerAddress,
    gid_index: u8,
}

impl Side {
    fn new(fixture: &Fixture, host: &Host, access: Access) -> Self {
        let context = fixture.verbs.device(&host.device).expect("device").open().expect("open");
        let domain = context.allocate_protection_domain().expect("domain");
        let cq = context.create_completion_queue(64, None, 0).expect("queue");
        let region = domain.allocate(REGION, access).expect("region");
        let qp = |_| domain.create_queue_pair(&QueuePairConfig::new(&cq)).expect("queue pair");
        let gids = context.gids().expect("addresses");
        let mine =
            gids.iter().find(|entry| entry.gid.ip() == host.ip && entry.kind == GidType::ROCE_V2);
        let mine = mine.expect("the host's address as RoCE v2");
        let address = PeerAddress { qp_num: 0, psn: 0, gid: mine.gid, lid: 0 };
        let gid_index = mine.index as u8;
        Self {
            qps: (0..CLIENTS).map(qp).collect(),
            cq,
            region,
            domain,
            context,
            address,
            gid_index,
        }
    }

    fn address(&self, at: usize) -> PeerAddress {
        let qp_num = self.qps[at].number();
        PeerAddress { qp_num, psn: 1000 + qp_num, ..self.address }
    }

    fn connect(&self, at: usize, peer: &Self, access: Access) {
        let (qp, own, peer) = (&self.qps[at], self.address(at), peer.address(at));
        let path =
            Path { mtu: self.context.port(1).expect("port").active_mtu, ..Default::default() };
        qp.modify(&QueuePairAttributes::init(1, access)).expect("init");
        qp.modify(&QueuePairAttributes::connect_to(&peer, 1, self.gid_index, &path, 4))
            .expect("RTR");
        qp.modify(&QueuePairAttributes::ready_to_send(own.psn, &path, 4)).expect("RTS");
    }

    fn post(&self, at: usize, request: SendRequest<'_>) -> WorkCompletion {
        self.qps[at].post_send(&[request.signaled()]).expect("post");
        let (mut out, began) = ([WorkCompletion::default()], Instant::now());
        while self.cq.poll(&mut out).expect("poll") == 0 {
            assert!(began.elapsed() < TIMEOUT, "no completion arrived in time");
            std::thread::yield_now();
        }
        out[0]
    }
}

struct Harness {
    server: Side,
    clients: Side,
}

impl Harness {
    fn new(fixture: &Fixture) -> Self {
        Self::with(fixture, Access::WINDOWS, Access::REMOTE_WRITE | Access::REMOTE_READ)
    }

    fn with(fixture: &Fixture, region: Access, rights: Access) -> Self {
        let [host, peer] = &fixture.hosts;
        let mut clients = Side::new(fixture, peer, Access::LOCAL);
        clients.region.write(0, &[7; REGION]);
        let server = Side::new(fixture, host, region);
        assert!(server.context.limits().expect("limits").queue_pair_windows);
        for at in 0..CLIENTS {
            server.connect(at, &clients, rights);
            clients.connect(at, &server, Access::LOCAL);
        }
        Self { server, clients }
    }

    fn window(&self) -> MemoryWindow {
        self.server.region.window(WINDOW, Access::REMOTE_WRITE).expect("a window")
    }

    /// Returns a window that the first client may write to.
    fn bound(&self) -> MemoryWindow {
        self.bound_on(WINDOW)
    }

    fn bound_on(&self, range: Range<usize>) -> MemoryWindow {
        let window = self.server.region.window(range, Access::REMOTE_WRITE).expect("a window");
        let done = self.server.post(0, SendRequest::bind(1, &window));
        assert_eq!((done.status(), done.opcode()), (Status::SUCCESS, Opcode::BIND));
        window
    }

    fn write(&self, client: usize, to: RemoteSlice) -> Status {
        let local = [self.clients.region.sge(0..to.len as usize)];
        self.clients.post(client, SendRequest::write(2, &local, to)).status()
    }

    fn is_untouched(&self) -> bool {
        self.server.region.to_vec(0, REGION) == [0; REGION]
    }
}

pub(crate) fn bound_window_allows_writes(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.bound();
    assert_eq!(harness.write(0, window.remote()), Status::SUCCESS);
    let mut expected = vec![0; REGION];
    expected[WINDOW].fill(7);
    assert!(harness.server.region.to_vec(0, REGION) == expected);
}

/// The attacker knows the window's address and key, and has its own connection to the same domain.
pub(crate) fn window_of_another_queue_pair_is_refused(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.bound();
    assert_eq!(harness.write(1, window.remote()), Status::REMOTE_ACCESS);
    assert!(harness.is_untouched());
    // The owner of the window is not affected.
    assert_eq!(harness.write(0, window.remote()), Status::SUCCESS);
}

pub(crate) fn keys_of_the_region_under_a_window_are_refused(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let _window = harness.bound();
    for (client, key) in
        [harness.server.region.rkey(), harness.server.region.lkey()].into_iter().enumerate()
    {
        let target = RemoteSlice { rkey: key, ..harness.server.region.remote(WINDOW) };
        assert_eq!(harness.write(client, target), Status::REMOTE_ACCESS);
    }
    assert!(harness.is_untouched());
}

/// Soft-RoCE checks only the bounds of the region (`check_rkey` in `rxe_resp.c`). So on Soft-RoCE,
/// the window covers the whole region.
pub(crate) fn access_outside_a_window_is_refused(fixture: &Fixture) {
    for by in [-1_i64, 1] {
        let harness = Harness::new(fixture);
        let is_soft = harness.server.context.device().driver().as_deref() == Some("rxe");
        let window = harness.bound_on(if is_soft { 0..REGION } else { WINDOW });
        let good = window.remote();
        let target = RemoteSlice { addr: good.addr.wrapping_add_signed(by), ..good };
        assert_eq!(harness.write(0, target), Status::REMOTE_ACCESS, "{by}");
        assert!(harness.is_untouched());
    }
}

pub(crate) fn write_only_window_refuses_reads(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.bound();
    let local = [harness.clients.region.sge(0..64)];
    let read = SendRequest::read(2, &local, window.remote());
    assert_eq!(harness.clients.post(0, read).status(), Status::REMOTE_ACCESS);
}

pub(crate) fn unbound_window_is_refused(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.window();
    assert_eq!(harness.write(0, window.remote()), Status::REMOTE_ACCESS);
    assert!(harness.is_untouched());
}

pub(crate) fn invalidated_window_is_refused(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.bound();
    let key = window.remote().rkey;
    let done = harness.server.post(0, SendRequest::new(3, Operation::Invalidate(key), &[]));
    assert_eq!((done.status(), done.opcode()), (Status::SUCCESS, Opcode::INVALIDATE));
    assert_eq!(harness.write(0, window.remote()), Status::REMOTE_ACCESS);
    assert!(harness.is_untouched());
}

pub(crate) fn deallocated_window_is_refused(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.bound();
    let target = window.remote();
    window.deallocate().expect("deallocate");
    assert_eq!(harness.write(0, target), Status::REMOTE_ACCESS);
    assert!(harness.is_untouched());
}

/// Asserts that a bind request failed. The specification gives "memory window bind error",
/// Soft-RoCE of Linux 7 gives "flushed".
fn assert_not_bound(status: Status) {
    assert!([Status::BIND, Status::FLUSHED].contains(&status), "{status}");
}

pub(crate) fn window_can_be_bound_only_once(fixture: &Fixture) {
    let harness = Harness::new(fixture);
    let window = harness.bound();
    assert_not_bound(harness.server.post(1, SendRequest::bind(4, &window)).status());
    assert_eq!(harness.write(0, window.remote()), Status::SUCCESS);
}

pub(crate) fn bind_needs_a_region_that_allows_windows(fixture: &Fixture) {
    let harness = Harness::with(fixture, Access::LOCAL, Access::REMOTE_WRITE);
    let window = harness.window();
    assert_not_bound(harness.server.post(0, SendRequest::bind(5, &window)).status());
}

/// Without remote rights on the queue pair, its peer can access no memory. This includes the window
/// that is bound to the queue pair.
pub(crate) fn queue_pair_without_rights_refuses_its_window(fixture: &Fixture) {
    let harness = Harness::with(fixture, Access::WINDOWS, Access::LOCAL);
    let window = harness.bound();
    let status = harness.write(0, window.remote());
    assert!([Status::REMOTE_ACCESS, Status::REMOTE_INVALID_REQUEST].contains(&status), "{status}");
    assert!(harness.is_untouched());
}

pub(crate) fn region_cannot_be_deregistered_before_its_windows(fixture: &Fixture) {
    let Harness { server, clients } = Harness::new(fixture);
    let region = server.domain.allocate(REGION, Access::WINDOWS).expect("region");
    let window = region.window(0..64, Access::REMOTE_WRITE).expect("a window");
    assert_eq!(server.post(0, SendRequest::bind(6, &window)).status(), Status::SUCCESS);
    let (region, error) = region.deregister().expect_err("a window is bound");
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    window.deallocate().expect("deallocate");
    region.deregister().expect("no window is left");
    drop(clients);
}
