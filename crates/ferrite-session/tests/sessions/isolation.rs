//! A client by plain verbs that writes to another's window, with all that it could know: the
//! address and the key.

use std::net::SocketAddr;
use std::time::Instant;

use ferrite_fabric::Config;
use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_verbs::{
    Access, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation, QueuePair,
    QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State, Status, Verbs, WorkCompletion,
    cm,
};
use redis::AsyncCommands as _;

use super::gateway::{Served, connection, open};
use super::hostile::Hostile;
use super::{PATIENCE, Redis, Scene, any_port};

const EVIL: &[u8] = b"*2\r\n$4\r\nINCR\r\n$5\r\npwned\r\n";
const GOOD: &[u8] = b"*2\r\n$4\r\nINCR\r\n$5\r\nclean\r\n";

/// One connection, as the server sees any client. In the order in which things go.
struct Attacker {
    qp: QueuePair,
    cq: CompletionQueue,
    region: MemoryRegion,
    /// Where the server wants its bytes.
    window: Registration,
    _id: CmId,
}

impl Attacker {
    /// `None` if it is not let in.
    fn connect(verbs: &Verbs, to: SocketAddr) -> Option<Self> {
        const HEARD: std::ops::Range<usize> = 64..64 + MESSAGE_BYTES;
        let id = cm::resolve(verbs, Some(any_port(1)), to, PATIENCE).expect("a route");
        let context = verbs.device("rxe2").and_then(|device| device.open()).expect("a device");
        let domain = context.allocate_protection_domain().expect("a domain");
        let cq = context.create_completion_queue(16, None, 0).expect("a queue");
        let config =
            QueuePairConfig { max_send_wr: 4, max_recv_wr: 1, ..QueuePairConfig::new(&cq) };
        let qp = domain.create_queue_pair(&config).expect("a queue pair");
        let mut region = domain.allocate(4096, Access::LOCAL).expect("memory");
        region.write(0, EVIL);
        qp.modify(&id.queue_pair_attributes(State::INIT).expect("attributes")).expect("INIT");
        qp.post_recv(&[RecvRequest::new(0, &[region.sge(HEARD)])]).expect("room");
        let params = ConnectParams {
            qp_num: 0,
            srq: false,
            private_data: &[],
            reads_in: 1,
            reads_out: 1,
            retries: 6,
            rnr_retries: 7,
        };
        cm::connect(&id, &qp, Access::LOCAL, &params, PATIENCE).ok()?;
        let window = Registration { addr: 0, length: 0, rkey: 0 };
        let mut it = Self { qp, cq, region, window, _id: id };
        assert_eq!(it.completion(), Status::SUCCESS);
        let Ok(Message::RegisterXferMemory(window)) =
            Message::decode(&it.region.to_vec(64, MESSAGE_BYTES))
        else {
            panic!("another message")
        };
        it.window = window;
        Some(it)
    }

    fn completion(&self) -> Status {
        let (begun, mut completion) = (Instant::now(), [WorkCompletion::default()]);
        while self.cq.poll(&mut completion).expect("a queue") == 0 {
            assert!(begun.elapsed() < PATIENCE, "no completion");
            std::thread::yield_now();
        }
        completion[0].status()
    }

    fn ask(&self, operation: impl Fn(RemoteSlice) -> Operation, addr: u64, rkey: u32) -> Status {
        let len = EVIL.len();
        let words = [self.region.sge(0..len)];
        let operation = operation(RemoteSlice { addr, len: len as u64, rkey });
        self.qp.post_send(&[SendRequest::new(1, operation, &words).signaled()]).expect("room");
        self.completion()
    }
}

type Attempt =
    (&'static str, fn(RemoteSlice) -> Operation, fn(&Registration, &Registration) -> u32);

/// How it is asked, and by which key of the victim's window or the attacker's own.
const ATTEMPTS: &[Attempt] = &[
    ("a write", Operation::Write, |victims, _| victims.rkey),
    ("a write that is told of", |to| Operation::WriteImm(to, 26), |victims, _| victims.rkey),
    ("a read", Operation::Read, |victims, _| victims.rkey),
    ("its own key at the victim's address", Operation::Write, |_, own| own.rkey),
    ("a guess", Operation::Write, |victims, _| victims.rkey ^ 1),
    ("no key", Operation::Write, |_, _| 0),
];

/// A client whose window is known, and that is served.
struct Victim {
    it: Hostile,
    written: u64,
    _replies: Exposed,
}

impl Victim {
    async fn connect(served: &Served) -> Self {
        let it = Hostile::connect(&served.client, served.at).await;
        let mut buf = it.raw.pool().take_uncharged(4096, Purpose::Receive).expect("memory");
        buf.fill(0);
        let replies = it.raw.expose(buf).map_err(|(_, error)| error).expect("exposed");
        let remote = replies.remote();
        it.register(remote.addr, remote.len as u32, remote.rkey);
        Self { it, written: 0, _replies: replies }
    }

    fn incr(&mut self) {
        self.it.write(self.written, GOOD, GOOD.len() as u32);
        self.written += GOOD.len() as u64;
    }
}

/// Each attempt is refused by the device and counted; the victim's session goes on, and the fabric
/// hears of nothing.
pub(crate) async fn anothers_window_is_out_of_reach(scene: Scene) {
    let redis = Redis::start("isolation", &[]).await;
    let served = Served::start(&scene, open(&redis));
    let mut bystander = connection(served.call(&scene).await).await;
    let mut victim = Victim::connect(&served).await;
    for (at, (what, operation, key)) in ATTEMPTS.iter().enumerate() {
        let (verbs, to, window) = (scene.verbs.clone(), served.at, victim.it.window);
        let (operation, key) = (*operation, *key);
        let next = window.addr + victim.written; // where the victim's next command will be
        let attack = tokio::task::spawn_blocking(move || {
            let attacker = Attacker::connect(&verbs, to).expect("let in");
            attacker.ask(operation, next, key(&window, &attacker.window))
        });
        let status = attack.await.expect("no panic");
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
            assert!(clean <= at, "{what}: {clean} commands of {}", at + 1);
        }
    }
    let pwned: Option<u64> = bystander.get("pwned").await.expect("GET");
    assert_eq!(pwned, None);
    while served.remote_access_errors() < ATTEMPTS.len() as u64 {
        // or nothing comes of this test in time
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(served.remote_access_errors(), ATTEMPTS.len() as u64);
    drop((bystander, victim));
    served.end().await;
}

/// Who guesses is not let in again, for longer each time.
pub(crate) async fn who_guesses_is_turned_away(scene: Scene) {
    let redis = Redis::start("guesses", &[]).await;
    let served = Served::start_with(&scene, open(&redis), Config::default());
    let mut victim = Victim::connect(&served).await;
    for attempt in 1..=2 {
        let (verbs, to, window) = (scene.verbs.clone(), served.at, victim.it.window);
        let attack = tokio::task::spawn_blocking(move || {
            let attacker = Attacker::connect(&verbs, to).expect("let in");
            attacker.ask(Operation::Write, window.addr, window.rkey ^ attempt)
        });
        assert_eq!(attack.await.expect("no panic"), Status::REMOTE_ACCESS);
        while served.remote_access_errors() < u64::from(attempt) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
    let (verbs, to) = (scene.verbs.clone(), served.at);
    let again = tokio::task::spawn_blocking(move || Attacker::connect(&verbs, to).is_some());
    assert!(!again.await.expect("no panic"), "let in");
    // Who is there stays, although it comes from the same address.
    victim.incr();
    while victim.it.raw.done(None).writes < 1 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert!(victim.it.raw.failure().is_none());
    drop(victim);
    served.end().await;
}
