//! Measures what misbehaving clients cost others. A client sends commands all the time, over one
//! connection, while an attacker alternates between attacks and pauses. The test compares the
//! client's p99 latency during attacks with its p99 during the pauses. It also checks that the
//! gateway holds no more memory afterwards than before.
//!
//! ```text
//!   the client    command, reply, command, reply, …                        a thread of its own
//!   the attacker          [ attack ]         [ attack ]         [ attack ]  a thread of its own
//!   measured       pause    attack    pause    attack    pause    attack    medians of p99s
//! ```
//!
//! Attacker, gateway, engine and client share the guest's two CPUs, so an attack that is nothing
//! but a heavy load slows others down in any case. Such attacks are compared with a neighbour: a
//! client that obeys the protocol and sends commands as fast as it gets replies, during the pauses.
#![expect(
    clippy::print_stdout,
    reason = "prints the measurements for `cargo xtask lab-test beside -- --no-capture`"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_fabric::{Arrival, Fabric};
use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_session::{GatewayConfig, ValkeyConfig, ValkeyStream};
use ferrite_testkit::Engine;
use ferrite_verbs::{
    Access, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation, QueuePair,
    QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State, WorkCompletion, cm,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use crate::sessions::gateway::{TestServer, unprotected};
use crate::sessions::hostile::{FEATURE_FLOOD, HostileClient, VIOLATIONS};
use crate::sessions::{Harness, any_port, run_on};

/// The number of pairs of a pause and an attack.
const ROUNDS: usize = 5;
/// How long each pause and each attack is measured.
const PHASE: Duration = Duration::from_millis(800);
/// The time between two measurements, in which an attack may begin or end.
const BETWEEN: Duration = Duration::from_millis(150);
const TIMEOUT: Duration = Duration::from_secs(20);

/// The phase that is measured at the moment (even numbers are pauses, odd ones attacks),
/// [`NOT_MEASURED`] or [`END`].
struct Script(AtomicUsize);

const NOT_MEASURED: usize = usize::MAX;
const END: usize = usize::MAX - 1;

impl Script {
    fn now(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// The environment of an attack. `attacks` is [`PAUSE`], [`ATTACK`] or [`OVER`].
struct Attacker {
    harness: Harness,
    fabric: Fabric,
    address: SocketAddr,
    attacks: Arc<AtomicUsize>,
}

const PAUSE: usize = 0;
const ATTACK: usize = 1;
const OVER: usize = 2;

impl Attacker {
    fn is_attacking(&self) -> bool {
        self.attacks.load(Ordering::Relaxed) == ATTACK
    }

    /// Waits until it is time to attack. Returns false if there are no more attacks.
    async fn next(&self) -> bool {
        loop {
            match self.attacks.load(Ordering::Relaxed) {
                ATTACK => return true,
                OVER => return false,
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// Waits until the current attack is over.
    async fn wait_for_pause(&self) {
        while self.is_attacking() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Opens a connection that is used for all attacks, when the first one begins.
    async fn connect_once(&self) -> HostileClient {
        self.next().await;
        self.connect().await
    }

    async fn connect(&self) -> HostileClient {
        HostileClient::connect(&self.fabric, self.address).await
    }
}

/// Starts a thread with a runtime of its own, so that its work slows others down no more than a
/// separate process would.
fn spawn_thread(
    harness: Harness,
    act: impl AsyncFnOnce(Harness) + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build();
        run_on(&runtime.expect("build the runtime"), harness, act);
    })
}

/// Sends PING until the end, and returns the latencies of each phase.
async fn measure(harness: Harness, address: SocketAddr, script: &Script) -> Vec<Vec<Duration>> {
    let mut stream: ValkeyStream =
        harness.connect(&harness.fabric(1), address, &ValkeyConfig::default()).await;
    let mut latencies = vec![Vec::new(); 2 * ROUNDS];
    let mut reply = [0; 7];
    while script.now() != END {
        let (phase, begun) = (script.now(), Instant::now());
        let exchange = async {
            stream.write_all(b"PING\r\n").await?;
            stream.read_exact(&mut reply).await
        };
        timeout(TIMEOUT, exchange).await.expect("a reply in time").expect("a reply");
        assert_eq!(&reply, b"+PONG\r\n");
        if phase == script.now() && phase < latencies.len() {
            latencies[phase].push(begun.elapsed());
        }
    }
    latencies
}

/// Lowers the thread's priority. Real attackers run on their own hosts; here they get the CPU time
/// that the client and the gateway leave.
fn lower_priority() {
    rustix::process::nice(19).expect("lower the priority");
}

fn p99(latencies: &mut [Duration]) -> Duration {
    latencies.sort_unstable();
    // Without any reply, the latency is at least the whole phase.
    latencies.get(latencies.len() * 99 / 100).copied().unwrap_or(PHASE)
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

/// A client that sends as many commands as it can, and reads all replies.
struct Neighbour {
    commands: Vec<u8>,
    reply_bytes: usize,
}

impl Neighbour {
    /// Sends commands during all pauses.
    async fn run(self, harness: Harness, address: SocketAddr, attacks: &AtomicUsize) {
        let mut stream =
            harness.connect(&harness.fabric(1), address, &ValkeyConfig::default()).await;
        let mut replies = vec![0; self.reply_bytes];
        loop {
            match attacks.load(Ordering::Relaxed) {
                PAUSE => {
                    let (mut reader, mut writer) = tokio::io::split(&mut stream);
                    let both = async {
                        tokio::try_join!(
                            writer.write_all(&self.commands),
                            reader.read_exact(&mut replies)
                        )
                    };
                    timeout(TIMEOUT, both).await.expect("replies in time").expect("replies");
                }
                OVER => return,
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }
}

/// Compares latencies during an attack with latencies without any load.
async fn compare_with_idle<F>(harness: Harness, name: &str, attack: F)
where
    F: AsyncFnOnce(Attacker) + Send + 'static,
{
    compare(harness, name, None, attack).await;
}

/// Compares latencies during an attack with latencies in the pauses, in which the neighbour runs if
/// there is one.
async fn compare<F>(harness: Harness, name: &str, neighbour: Option<Neighbour>, attack: F)
where
    F: AsyncFnOnce(Attacker) + Send + 'static,
{
    let redis = Engine::redis(&[]);
    let mut config: GatewayConfig = unprotected(&redis);
    config.valkey.proto.keepalive_interval = Duration::from_millis(100);
    let server = TestServer::start(&harness, config);
    let mut stream = server.connect(&harness).await;
    let value = format!("SET value {}\r\n", "x".repeat(60_000)); // inline commands end at 64 KiB
    stream.write_all(value.as_bytes()).await.expect("write");
    stream.read_exact(&mut [0; 5]).await.expect("read the reply");
    drop(stream);
    wait_for_sessions(&server, 0).await;

    let script = Arc::new(Script(AtomicUsize::new(NOT_MEASURED)));
    let (results, result) = std::sync::mpsc::channel();
    let measuring = spawn_thread(harness.clone(), {
        let (script, address) = (Arc::clone(&script), server.address);
        async move |harness: Harness| {
            let _ = results.send(measure(harness, address, &script).await);
        }
    });
    let attacks = Arc::new(AtomicUsize::new(PAUSE));
    let neighbours = usize::from(neighbour.is_some());
    let neighbour_thread = neighbour.map(|neighbour| {
        let (attacks, address) = (Arc::clone(&attacks), server.address);
        spawn_thread(harness.clone(), async move |harness: Harness| {
            lower_priority();
            neighbour.run(harness, address, &attacks).await;
        })
    });
    let attacking = spawn_thread(harness.clone(), {
        let (attacks, address) = (Arc::clone(&attacks), server.address);
        async move |harness: Harness| {
            lower_priority();
            let fabric = harness.fabric(1);
            attack(Attacker { harness, fabric, address, attacks }).await;
        }
    });
    wait_for_sessions(&server, 1 + neighbours).await;
    let before = least_held(&server).await;
    let sessions_before = server.gateway.stats().valkey_sessions;
    for phase in 0..2 * ROUNDS {
        attacks.store(if phase % 2 == 1 { ATTACK } else { PAUSE }, Ordering::Relaxed);
        sleep(BETWEEN).await;
        script.0.store(phase, Ordering::Relaxed);
        sleep(PHASE).await;
        script.0.store(NOT_MEASURED, Ordering::Relaxed);
    }
    attacks.store(OVER, Ordering::Relaxed);
    join(attacking, "attacker").await;
    if let Some(neighbour) = neighbour_thread {
        join(neighbour, "neighbour").await;
    }
    // Only the measuring client stays connected.
    wait_for_sessions(&server, 1).await;
    let begun = Instant::now();
    loop {
        let now = least_held(&server).await;
        // The number of receive blocks varies while receives are processed and posted again. An
        // attack that leaks one block for each connection would exceed this tolerance.
        if now.0 == 1 && now.1 == before.1 && now.2 < before.2 + 8 {
            break;
        }
        assert!(begun.elapsed() < TIMEOUT, "{name}: {before:?} before, {now:?} now");
    }
    script.0.store(END, Ordering::Relaxed);
    join(measuring, "measuring client").await;
    let sessions = server.gateway.stats().valkey_sessions - sessions_before;
    let refused = server.gateway.stats().refused;
    server.end().await;

    let mut latencies = result.recv().expect("results of the measuring client");
    let replies: usize = latencies.iter().map(Vec::len).sum();
    let p99s: Vec<_> = latencies.iter_mut().map(|latencies| p99(latencies)).collect();
    let median_from = |first: usize| median(p99s.iter().skip(first).step_by(2).copied().collect());
    let (usual, attacked) = (median_from(0), median_from(1));
    let ratio = attacked.as_secs_f64() / usual.as_secs_f64();
    let otherwise = ["without load", "with a regular neighbour"][neighbours];
    println!(
        "{name}: p99 {attacked:.1?}, {otherwise} {usual:.1?}, ratio {ratio:.2}; {replies} \
         replies; {sessions} sessions of the attacker, {refused} rejected"
    );
    println!("  {p99s:.1?}");
    assert!(ratio <= 2.0, "{name}: p99 of others is {ratio:.2} times the p99 {otherwise}");
}

async fn join(thread: JoinHandle<()>, name: &str) {
    let joined = tokio::task::spawn_blocking(|| thread.join()).await.expect("join does not panic");
    assert!(joined.is_ok(), "the {name} has panicked");
}

/// Returns the least that the gateway holds over 200 ms, that is, between two commands of the
/// client.
async fn least_held(server: &TestServer) -> (u64, u64, u64) {
    let mut least = server.holds();
    for _ in 0..100 {
        sleep(Duration::from_millis(2)).await;
        let (now, so_far) = (server.holds(), least);
        least = (now.0.min(so_far.0), now.1.min(so_far.1), now.2.min(so_far.2));
    }
    least
}

async fn wait_for_sessions(server: &TestServer, sessions: usize) {
    let begun = Instant::now();
    while server.gateway.stats().sessions != sessions {
        assert!(begun.elapsed() < TIMEOUT, "{:?}", server.gateway.stats());
        sleep(Duration::from_millis(5)).await;
    }
}

/// The attacker commits all violations in turn, each on a connection of its own.
pub(crate) async fn protocol_violations(harness: Harness) {
    compare_with_idle(harness, "protocol-violations", async |it| {
        let mut violations = VIOLATIONS.iter().cycle();
        while it.next().await
            && let Some((what, violate)) = violations.next()
        {
            let hostile = it.connect().await;
            violate(&hostile);
            if *what != FEATURE_FLOOD {
                hostile.wait_for_disconnect(what).await;
            }
        }
    })
    .await;
}

fn pings() -> Neighbour {
    Neighbour { commands: b"PING\r\n".repeat(64), reply_bytes: 64 * b"+PONG\r\n".len() }
}

fn values() -> Neighbour {
    Neighbour {
        commands: b"GET value\r\n".repeat(10),
        reply_bytes: 10 * (b"$60000\r\n\r\n".len() + 60_000),
    }
}

/// The attacker sends as many writes of one byte as it can, 64 at a time.
pub(crate) async fn tiny_writes(harness: Harness) {
    compare(harness, "tiny-writes", Some(pings()), async |it| {
        let hostile = it.connect_once().await;
        let (mut sent, mut at) = (0, 0);
        while it.next().await {
            for _ in 0..64 {
                if at == u64::from(hostile.window.length) {
                    let announced = async {
                        loop {
                            let arrival = hostile.raw.arrival().await.expect("receive a message");
                            // 3 is the opcode of RegisterXferMemory.
                            if matches!(arrival, Arrival::Message(message) if message[1] == 3) {
                                break;
                            }
                        }
                    };
                    timeout(TIMEOUT, announced).await.expect("the window is announced again");
                    at = 0;
                }
                // Empty lines are not commands and have no reply.
                hostile.write(at, &[b"\r\n"[(at % 2) as usize]], 1);
                (sent, at) = (sent + 1, at + 1);
            }
            wait_until_done(&hostile, |done| done.writes, sent).await;
        }
    })
    .await;
}

/// The attacker sends empty writes, which use nothing of its window.
pub(crate) async fn empty_writes(harness: Harness) {
    compare(harness, "empty-writes", Some(pings()), async |it| {
        let hostile = it.connect_once().await;
        let mut sent = 0;
        while it.next().await {
            (0..64).for_each(|_| hostile.write(0, b"", 0));
            sent += 64;
            wait_until_done(&hostile, |done| done.writes, sent).await;
        }
    })
    .await;
}

/// The attacker sends keepalives, which clients may send although they have no effect.
pub(crate) async fn keepalive_flood(harness: Harness) {
    compare(harness, "keepalive-flood", Some(pings()), async |it| {
        let hostile = it.connect_once().await;
        let mut sent = 0;
        while it.next().await {
            for _ in 0..64 {
                hostile.raw.send_message(&Message::Keepalive.encode()).expect("still connected");
            }
            sent += 64;
            wait_until_done(&hostile, |done| done.messages, sent).await;
        }
    })
    .await;
}

/// Waits until this number of requests has completed. `count` selects the kind of requests.
async fn wait_until_done(
    hostile: &HostileClient,
    count: fn(ferrite_fabric::Done) -> u64,
    sent: u64,
) {
    let done = std::future::poll_fn(|cx| {
        if count(hostile.raw.done(Some(cx.waker()))) >= sent || hostile.raw.failure().is_some() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    });
    timeout(TIMEOUT, done).await.expect("requests complete in time");
    assert!(hostile.raw.failure().is_none(), "{:?}", hostile.raw.failure());
}

/// The attackers send commands, but never announce a window for the replies.
pub(crate) async fn clients_without_a_window(harness: Harness) {
    compare_with_idle(harness, "clients-without-a-window", async |it| {
        while it.next().await {
            let mut silent = Vec::new();
            for _ in 0..20 {
                let hostile = it.connect().await;
                hostile.write(0, b"GET value\r\nGET value\r\n", 22);
                silent.push(hostile);
            }
            it.wait_for_pause().await;
        }
    })
    .await;
}

/// The attackers request more data than their windows hold, and read none of it.
pub(crate) async fn slow_readers(harness: Harness) {
    compare(harness, "slow-readers", Some(values()), async |it| {
        while it.next().await {
            let mut slow: Vec<(HostileClient, Exposed)> = Vec::new();
            for _ in 0..10 {
                let hostile = it.connect().await;
                let memory = hostile.raw.pool().take_uncharged(64 << 10, Purpose::Receive);
                let memory = memory.expect("take memory from the pool");
                let exposed =
                    hostile.raw.expose(memory).map_err(|(_, error)| error).expect("expose memory");
                hostile.register(exposed.remote().addr, 64 << 10, exposed.remote().rkey);
                let commands = b"GET value\r\n".repeat(10);
                hostile.write(0, &commands, commands.len() as u32);
                slow.push((hostile, exposed));
            }
            it.wait_for_pause().await;
        }
    })
    .await;
}

/// The attackers post one receive, for the first message, and accept nothing after it. The
/// gateway's device retries.
pub(crate) async fn never_polling(harness: Harness) {
    compare_with_idle(harness, "never-polling", async |it| {
        while it.next().await {
            let deaf: Vec<_> = (0..10).map(|_| DeafClient::connect(&it)).collect();
            it.wait_for_pause().await;
            drop(deaf);
        }
    })
    .await;
}

/// At least a thousand attackers request a connection, and do not answer when it is accepted.
pub(crate) async fn unfinished_connects(harness: Harness) {
    compare_with_idle(harness, "unfinished-connects", async |it| {
        let mut begun = 0;
        let mut begin = || {
            let id = cm::resolve(&it.harness.verbs, Some(any_port(1)), it.address, TIMEOUT);
            let id = id.expect("resolve the route");
            begun += 1;
            // Each uses another number: the kernel takes two requests of one queue pair for the
            // same.
            id.connect(&ConnectParams { qp_num: 0x1_0000 + begun, ..connect_params() })
                .expect("request a connection");
            (id, begun)
        };
        let mut total = 0;
        while it.next().await {
            let mut unfinished = Vec::new();
            while it.is_attacking() && unfinished.len() < 250 {
                let (id, begun) = begin();
                unfinished.push(id);
                total = begun;
                // Not all at once, as if they came from many hosts.
                sleep(Duration::from_millis(2)).await;
            }
            it.wait_for_pause().await;
        }
        while total < 1000 {
            total = begin().1;
        }
        println!("unfinished-connects: {total} requests");
    })
    .await;
}

fn connect_params() -> ConnectParams<'static> {
    ConnectParams {
        qp_num: 0,
        srq: false,
        private_data: &[],
        reads_in: 1,
        reads_out: 1,
        retries: 7,
        rnr_retries: 7,
    }
}

/// A client on plain verbs that receives nothing. Its fields are in the order in which they must be
/// dropped.
struct DeafClient {
    _qp: QueuePair,
    _cq: CompletionQueue,
    _region: MemoryRegion,
    _id: CmId,
}

impl DeafClient {
    fn connect(it: &Attacker) -> Self {
        const WINDOW: usize = 1024;
        let id = cm::resolve(&it.harness.verbs, Some(any_port(1)), it.address, TIMEOUT);
        let id = id.expect("resolve the route");
        let context =
            it.harness.verbs.device("rxe2").and_then(|device| device.open()).expect("open rxe2");
        let domain = context.allocate_protection_domain().expect("allocate a protection domain");
        let cq = context.create_completion_queue(16, None, 0).expect("create the queue");
        let config =
            QueuePairConfig { max_send_wr: 4, max_recv_wr: 1, ..QueuePairConfig::new(&cq) };
        let qp = domain.create_queue_pair(&config).expect("create the queue pair");
        let region = domain.allocate(WINDOW + 2 * MESSAGE_BYTES, Access::REMOTE_WRITE);
        let mut region = region.expect("allocate memory");
        let init = id.queue_pair_attributes(State::INIT).expect("attributes");
        qp.modify(&init.access(Access::REMOTE_WRITE)).expect("INIT");
        let (incoming, outgoing) =
            (WINDOW..WINDOW + MESSAGE_BYTES, WINDOW + MESSAGE_BYTES..WINDOW + 2 * MESSAGE_BYTES);
        let message = [region.sge(incoming.clone())];
        qp.post_recv(&[RecvRequest::new(0, &message)]).expect("post a receive");
        cm::connect(&id, &qp, Access::REMOTE_WRITE, &connect_params(), TIMEOUT).expect("connect");
        let begun = Instant::now();
        let mut completion = [WorkCompletion::default()];
        while cq.poll(&mut completion).expect("poll the queue") == 0 {
            assert!(begun.elapsed() < TIMEOUT, "no message");
            std::thread::sleep(Duration::from_micros(100));
        }
        let Ok(Message::RegisterXferMemory(window)) =
            Message::decode(&region.to_vec(incoming.start, MESSAGE_BYTES))
        else {
            panic!("expected RegisterXferMemory")
        };
        let remote = region.remote(0..WINDOW);
        let ours = Registration { addr: remote.addr, length: WINDOW as u32, rkey: remote.rkey };
        region.write(outgoing.start, &Message::RegisterXferMemory(ours).encode());
        let message = [region.sge(outgoing.clone())];
        let register = SendRequest::new(1, Operation::Send, &message);
        qp.post_send(&[register]).map_err(|refused| refused.error).expect("post the message");
        region.write(0, b"GET value\r\n");
        let command = [region.sge(0..11)];
        let to = RemoteSlice { addr: window.addr, len: 11, rkey: window.rkey };
        let write = SendRequest::new(2, Operation::WriteImm(to, 11), &command);
        qp.post_send(&[write]).map_err(|refused| refused.error).expect("post the write");
        Self { _qp: qp, _cq: cq, _region: region, _id: id }
    }
}
