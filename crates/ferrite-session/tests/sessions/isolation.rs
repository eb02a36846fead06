//! Tests with an attacker that uses plain verbs to access the window of another client. The
//! attacker knows the window's address and key.

use std::net::SocketAddr;
use std::time::Instant;

use ferrite_fabric::Config;
use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_testkit::Engine;
use ferrite_testkit::wait::until_async;
use ferrite_verbs::{
    Access, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation, QueuePair,
    QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State, Status, Verbs, WorkCompletion,
    cm,
};
use redis::AsyncCommands as _;

use super::gateway::{TestServer, connection, unprotected};
use super::hostile::HostileClient;
use super::{Harness, TIMEOUT, any_port};

const EVIL: &[u8] = b"*2\r\n$4\r\nINCR\r\n$5\r\npwned\r\n";
const GOOD: &[u8] = b"*2\r\n$4\r\nINCR\r\n$5\r\nclean\r\n";

/// A connection that looks like an ordinary client to the server. Its fields are in the order in
/// which they must be dropped.
struct Attacker {
    qp: QueuePair,
    cq: CompletionQueue,
    region: MemoryRegion,
    /// The server's window for this connection.
    window: Registration,
    _id: CmId,
}

impl Attacker {
    /// Connects, or returns `None` if the server rejects the connection.
    fn connect(verbs: &Verbs, to: SocketAddr) -> Option<Self> {
        const MESSAGE: std::ops::Range<usize> = 64..64 + MESSAGE_BYTES;
        let id = cm::resolve(verbs, Some(any_port(1)), to, TIMEOUT).expect("resolve the route");
        let context = verbs.device("rxe2").and_then(|device| device.open()).expect("open rxe2");
        let domain = context.allocate_protection_domain().expect("allocate a protection domain");
        let cq = context.create_completion_queue(16, None, 0).expect("create the queue");
        let config =
            QueuePairConfig { max_send_wr: 4, max_recv_wr: 1, ..QueuePairConfig::new(&cq) };
        let qp = domain.create_queue_pair(&config).expect("create the queue pair");
        let mut region = domain.allocate(4096, Access::LOCAL).expect("allocate memory");
        region.write(0, EVIL);
        qp.modify(&id.queue_pair_attributes(State::INIT).expect("attributes")).expect("INIT");
        qp.post_recv(&[RecvRequest::new(0, &[region.sge(MESSAGE)])]).expect("post a receive");
        let params = ConnectParams {
            qp_num: 0,
            srq: false,
            private_data: &[],
            reads_in: 1,
            reads_out: 1,
            retries: 6,
            rnr_retries: 7,
        };
        cm::connect(&id, &qp, Access::LOCAL, &params, TIMEOUT).ok()?;
        let window = Registration { addr: 0, length: 0, rkey: 0 };
        let mut it = Self { qp, cq, region, window, _id: id };
        assert_eq!(it.completion(), Status::SUCCESS);
        let Ok(Message::RegisterXferMemory(window)) =
            Message::decode(&it.region.to_vec(64, MESSAGE_BYTES))
        else {
            panic!("the server's first message is not RegisterXferMemory")
        };
        it.window = window;
        Some(it)
    }

    fn completion(&self) -> Status {
        let (begun, mut completion) = (Instant::now(), [WorkCompletion::default()]);
        while self.cq.poll(&mut completion).expect("poll the queue") == 0 {
            assert!(begun.elapsed() < TIMEOUT, "no completion arrived in time");
            std::thread::yield_now();
        }
        completion[0].status()
    }

    /// Performs an operation on remote memory, and returns the status of its completion.
    fn access(&self, operation: impl Fn(RemoteSlice) -> Operation, addr: u64, rkey: u32) -> Status {
        let len = EVIL.len();
        let memory = [self.region.sge(0..len)];
        let operation = operation(RemoteSlice { addr, len: len as u64, rkey });
        let request = SendRequest::new(1, operation, &memory).signaled();
        self.qp.post_send(&[request]).expect("post the request");
        self.completion()
    }
}

type Attempt =
    (&'static str, fn(RemoteSlice) -> Operation, fn(&Registration, &Registration) -> u32);

/// The attacker's operations, and the key that each uses: of the victim's window, of the attacker's
/// own window, or another.
const ATTEMPTS: &[Attempt] = &[
    ("a write", Operation::Write, |victims, _| victims.rkey),
    ("a write with immediate data", |to| Operation::WriteImm(to, 26), |victims, _| victims.rkey),
    ("a read", Operation::Read, |victims, _| victims.rkey),
    ("its own key at the victim's address", Operation::Write, |_, own| own.rkey),
    ("a guessed key", Operation::Write, |victims, _| victims.rkey ^ 1),
    ("no key", Operation::Write, |_, _| 0),
];

/// A regular client whose window is known to the attacker.
struct Victim {
    it: HostileClient,
    written: u64,
    _replies: Exposed,
}

impl Victim {
    async fn connect(server: &TestServer) -> Self {
        let it = HostileClient::connect(&server.client, server.address).await;
        let buf = it.raw.pool().take_uncharged(4096, Purpose::Receive);
        let mut buf = buf.expect("take memory from the pool");
        buf.fill(0);
        let replies = it.raw.expose(buf).map_err(|(_, error)| error).expect("expose memory");
        let remote = replies.remote();
        it.register(remote.addr, remote.len as u32, remote.rkey);
        Self { it, written: 0, _replies: replies }
    }

    fn incr(&mut self) {
        self.it.write(self.written, GOOD, GOOD.len() as u32);
        self.written += GOOD.len() as u64;
    }
}

/// The device rejects each attempt, and the server counts it. The victim's session continues, and
/// no byte of the attacker reaches the engine.
pub(crate) async fn protects_windows_from_other_clients(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start(&harness, unprotected(&redis));
    let mut bystander = connection(server.connect(&harness).await).await;
    let mut victim = Victim::connect(&server).await;
    for (at, (what, operation, key)) in ATTEMPTS.iter().enumerate() {
        let (verbs, to, window) = (harness.verbs.clone(), server.address, victim.it.window);
        let (operation, key) = (*operation, *key);
        let next = window.addr + victim.written; // where the victim's next command will be
        let attack = tokio::task::spawn_blocking(move || {
            let attacker = Attacker::connect(&verbs, to).expect("connect");
            attacker.access(operation, next, key(&window, &attacker.window))
        });
        let status = attack.await.expect("attacker does not panic");
        assert!(
            [Status::REMOTE_ACCESS, Status::REMOTE_INVALID_REQUEST].contains(&status),
            "{what}: {status}"
        );
        victim.incr();
        loop {
            let clean: usize =
                bystander.get("clean").await.map(Option::unwrap_or_default).expect("GET");
            if clean == at + 1 {
                break;
            }
            assert!(clean <= at, "{what}: {clean} commands ran, {} were sent", at + 1);
        }
    }
    let pwned: Option<u64> = bystander.get("pwned").await.expect("GET");
    assert_eq!(pwned, None);
    let all = ATTEMPTS.len() as u64;
    until_async("an error for each attempt", async || server.remote_access_errors() >= all).await;
    assert_eq!(server.remote_access_errors(), ATTEMPTS.len() as u64);
    drop((bystander, victim));
    server.end().await;
}

/// After two guesses, the server rejects new connections from the client's address for a while.
pub(crate) async fn rejects_clients_that_guess_keys(harness: Harness) {
    let redis = Engine::redis(&[]);
    let server = TestServer::start_with(&harness, unprotected(&redis), Config::default());
    let mut victim = Victim::connect(&server).await;
    for attempt in 1..=2 {
        let (verbs, to, window) = (harness.verbs.clone(), server.address, victim.it.window);
        let attack = tokio::task::spawn_blocking(move || {
            let attacker = Attacker::connect(&verbs, to).expect("connect");
            attacker.access(Operation::Write, window.addr, window.rkey ^ attempt)
        });
        assert_eq!(attack.await.expect("attacker does not panic"), Status::REMOTE_ACCESS);
        let seen = async || server.remote_access_errors() >= u64::from(attempt);
        until_async("the attempt is counted", seen).await;
    }
    let (verbs, to) = (harness.verbs.clone(), server.address);
    let reconnect = tokio::task::spawn_blocking(move || Attacker::connect(&verbs, to).is_some());
    assert!(!reconnect.await.expect("attacker does not panic"), "the server accepts the attacker");
    // An existing connection from the same address stays.
    victim.incr();
    until_async("the victim's write", async || victim.it.raw.done(None).writes >= 1).await;
    assert!(victim.it.raw.failure().is_none());
    drop(victim);
    server.end().await;
}
