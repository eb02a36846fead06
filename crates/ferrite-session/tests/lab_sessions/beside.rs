//! What misbehaviour costs others. A client asks and is answered all the time, over one connection;
//! another attacks, and pauses, in turn. The client's p99 beside the attack is held against its p99
//! in the pauses, of the same seconds; afterwards the gateway has what it had before.
//!
//! ```text
//!   the client    ask, answer, ask, answer, …                              a thread of its own
//!   the attacker          [ attack ]         [ attack ]         [ attack ]  a thread of its own
//!   measured       alone    beside    alone    beside    alone    beside    medians of p99s
//! ```
//!
//! Attacker, gateway, engine and client share the guest's two CPUs. Where an attack is nothing but
//! work, that alone costs others their share: such attacks are held against a neighbour that keeps
//! to the rules, asks as fast as it is answered and has the pauses to itself.
#![expect(
    clippy::print_stdout,
    reason = "what was measured, for who looks: `cargo xtask lab-test beside -- --no-capture`"
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
use ferrite_verbs::{
    Access, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation, QueuePair,
    QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State, WorkCompletion, cm,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use crate::sessions::gateway::{Served, open};
use crate::sessions::hostile::{Hostile, MISDEEDS};
use crate::sessions::{Redis, Scene, any_port, run_on};

/// Pairs of an attack and a pause.
const ROUNDS: usize = 5;
/// How long each of them is measured.
const WINDOW: Duration = Duration::from_millis(800);
/// What is left of an attack, or not yet there, is neither.
const BETWEEN: Duration = Duration::from_millis(150);
const PATIENCE: Duration = Duration::from_secs(20);

/// What goes on: none of the measured windows, one of them (even ones are pauses, odd ones
/// attacks), or the end.
struct Script(AtomicUsize);

const NOTHING: usize = usize::MAX;
const END: usize = usize::MAX - 1;

impl Script {
    fn now(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whoever attacks: the flag is up during attacks.
struct Attacker {
    scene: Scene,
    fabric: Fabric,
    at: SocketAddr,
    attacks: Arc<AtomicUsize>,
}

const PAUSE: usize = 0;
const ATTACK: usize = 1;
const OVER: usize = 2;

impl Attacker {
    fn is_on(&self) -> bool {
        self.attacks.load(Ordering::Relaxed) == ATTACK
    }

    /// Waits for the next attack; `false` when there is none.
    async fn next(&self) -> bool {
        loop {
            match self.attacks.load(Ordering::Relaxed) {
                ATTACK => return true,
                OVER => return false,
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }

    async fn pause(&self) {
        while self.is_on() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// A connection for all attacks.
    async fn first(&self) -> Hostile {
        self.next().await;
        self.connect().await
    }

    async fn connect(&self) -> Hostile {
        Hostile::connect(&self.fabric, self.at).await
    }
}

/// A thread with a runtime of its own: what it does costs others no more than a process would.
fn on_its_own(scene: Scene, act: impl AsyncFnOnce(Scene) + Send + 'static) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build();
        run_on(&runtime.expect("a runtime"), scene, act);
    })
}

/// Asks until the end; how long each answer took, by window.
async fn ask(scene: Scene, at: SocketAddr, script: &Script) -> Vec<Vec<Duration>> {
    let mut stream: ValkeyStream = scene.call(&scene.fabric(1), at, &ValkeyConfig::default()).await;
    let mut took = vec![Vec::new(); 2 * ROUNDS];
    let mut said = [0; 7];
    while script.now() != END {
        let (window, begun) = (script.now(), Instant::now());
        let asked = async {
            stream.write_all(b"PING\r\n").await?;
            stream.read_exact(&mut said).await
        };
        timeout(PATIENCE, asked).await.expect("an answer in time").expect("an answer");
        assert_eq!(&said, b"+PONG\r\n");
        if window == script.now() && window < took.len() {
            took[window].push(begun.elapsed());
        }
    }
    took
}

/// Others have a host of their own. Here they get what the client and the gateway leave.
fn give_way() {
    rustix::process::nice(19).expect("less");
}

fn p99(took: &mut [Duration]) -> Duration {
    took.sort_unstable();
    // without any answer, all of it or more
    took.get(took.len() * 99 / 100).copied().unwrap_or(WINDOW)
}

fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Asks for as much as it can get, and takes it.
struct Neighbour {
    asks: Vec<u8>,
    is_told: usize,
}

impl Neighbour {
    async fn live(self, scene: Scene, at: SocketAddr, attacks: &AtomicUsize) {
        let mut stream = scene.call(&scene.fabric(1), at, &ValkeyConfig::default()).await;
        let mut said = vec![0; self.is_told];
        loop {
            match attacks.load(Ordering::Relaxed) {
                PAUSE => {
                    let (mut reader, mut writer) = tokio::io::split(&mut stream);
                    let both = async {
                        tokio::try_join!(writer.write_all(&self.asks), reader.read_exact(&mut said))
                    };
                    timeout(PATIENCE, both).await.expect("answers in time").expect("answers");
                }
                OVER => return,
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }
}

async fn beside<F>(scene: Scene, name: &str, attack: F)
where
    F: AsyncFnOnce(Attacker) + Send + 'static,
{
    beside_or(scene, name, None, attack).await;
}

/// The same, with somebody else in the pauses.
async fn beside_or<F>(scene: Scene, name: &str, neighbour: Option<Neighbour>, attack: F)
where
    F: AsyncFnOnce(Attacker) + Send + 'static,
{
    let redis = Redis::start(name, &[]).await;
    let mut config: GatewayConfig = open(&redis);
    config.valkey.proto.keepalive_interval = Duration::from_millis(100);
    let served = Served::start(&scene, config);
    let mut stream = served.call(&scene).await;
    let value = format!("SET value {}\r\n", "x".repeat(60_000)); // as long as a line may be
    stream.write_all(value.as_bytes()).await.expect("to write");
    stream.read_exact(&mut [0; 5]).await.expect("OK");
    drop(stream);
    settled(&served, 0).await;

    let script = Arc::new(Script(AtomicUsize::new(NOTHING)));
    let (results, result) = std::sync::mpsc::channel();
    let asking = on_its_own(scene.clone(), {
        let (script, at) = (Arc::clone(&script), served.at);
        async move |scene: Scene| {
            let _ = results.send(ask(scene, at, &script).await);
        }
    });
    let attacks = Arc::new(AtomicUsize::new(PAUSE));
    let neighbours = usize::from(neighbour.is_some());
    let living = neighbour.map(|neighbour| {
        let (attacks, at) = (Arc::clone(&attacks), served.at);
        on_its_own(scene.clone(), async move |scene: Scene| {
            give_way();
            neighbour.live(scene, at, &attacks).await;
        })
    });
    let attacking = on_its_own(scene.clone(), {
        let (attacks, at) = (Arc::clone(&attacks), served.at);
        async move |scene: Scene| {
            give_way();
            let fabric = scene.fabric(1);
            attack(Attacker { scene, fabric, at, attacks }).await;
        }
    });
    settled(&served, 1 + neighbours).await;
    let before = least(&served).await;
    let sessions_before = served.gateway.stats().valkey_sessions;
    for window in 0..2 * ROUNDS {
        attacks.store(if window % 2 == 1 { ATTACK } else { PAUSE }, Ordering::Relaxed);
        sleep(BETWEEN).await;
        script.0.store(window, Ordering::Relaxed);
        sleep(WINDOW).await;
        script.0.store(NOTHING, Ordering::Relaxed);
    }
    attacks.store(OVER, Ordering::Relaxed);
    let attacked = tokio::task::spawn_blocking(|| attacking.join());
    attacked.await.expect("no panic").expect("no panic");
    if let Some(living) = living {
        tokio::task::spawn_blocking(|| living.join()).await.expect("no panic").expect("no panic");
    }
    // Their connections end, and not the client's.
    settled(&served, 1).await;
    let begun = Instant::now();
    loop {
        let now = least(&served).await;
        // Looked at while receives are taken and posted: an attack that left one of each
        // connection's would be seen.
        if now.0 == 1 && now.1 == before.1 && now.2 < before.2 + 8 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{name}: {before:?} before, {now:?} now");
    }
    script.0.store(END, Ordering::Relaxed);
    tokio::task::spawn_blocking(|| asking.join()).await.expect("no panic").expect("no panic");
    let by = served.gateway.stats().valkey_sessions - sessions_before;
    let refused = served.gateway.stats().refused;
    served.end().await;

    let mut took = result.recv().expect("results");
    let asked: usize = took.iter().map(Vec::len).sum();
    let p99s: Vec<_> = took.iter_mut().map(|took| p99(took)).collect();
    let of = |first: usize| median(p99s.iter().skip(first).step_by(2).copied().collect());
    let (usual, beside) = (of(0), of(1));
    let ratio = beside.as_secs_f64() / usual.as_secs_f64();
    let otherwise = ["alone", "beside an honest one"][neighbours];
    println!(
        "beside {name}: p99 {beside:.1?}, {otherwise} {usual:.1?}, ratio {ratio:.2}; {asked} answers; {by} sessions of the attacker, {refused} refused"
    );
    println!("  {p99s:.1?}");
    assert!(ratio <= 2.0, "beside {name}, others' p99 is {ratio:.2} times what it is {otherwise}");
}

/// What the gateway holds between two questions of the client.
async fn least(served: &Served) -> (u64, u64, u64) {
    let mut least = served.holds();
    for _ in 0..100 {
        sleep(Duration::from_millis(2)).await;
        let (now, so_far) = (served.holds(), least);
        least = (now.0.min(so_far.0), now.1.min(so_far.1), now.2.min(so_far.2));
    }
    least
}

async fn settled(served: &Served, sessions: usize) {
    let begun = Instant::now();
    while served.gateway.stats().sessions != sessions {
        assert!(begun.elapsed() < PATIENCE, "{:?}", served.gateway.stats());
        sleep(Duration::from_millis(5)).await;
    }
}

/// Every way of breaking the rules, one after the other, each on a connection of its own.
pub(crate) async fn broken_rules(scene: Scene) {
    beside(scene, "broken-rules", async |it| {
        let mut misdeeds = MISDEEDS.iter().cycle();
        while it.next().await
            && let Some((what, misdeed)) = misdeeds.next()
        {
            let hostile = it.connect().await;
            misdeed(&hostile);
            if *what != "questions without end" {
                hostile.wait_for_the_end(what).await;
            }
        }
    })
    .await;
}

fn pings() -> Neighbour {
    Neighbour { asks: b"PING\r\n".repeat(64), is_told: 64 * b"+PONG\r\n".len() }
}

fn values() -> Neighbour {
    Neighbour {
        asks: b"GET value\r\n".repeat(10),
        is_told: 10 * (b"$60000\r\n\r\n".len() + 60_000),
    }
}

/// As many as the attacker can make, one byte each, a few at a time.
pub(crate) async fn tiny_writes(scene: Scene) {
    beside_or(scene, "tiny-writes", Some(pings()), async |it| {
        let hostile = it.first().await;
        let (mut sent, mut at) = (0, 0);
        while it.next().await {
            for _ in 0..64 {
                if at == u64::from(hostile.window.length) {
                    let again = async { while !matches!(hostile.raw.arrival().await.expect("a message"), Arrival::Message(said) if said[1] == 3) {} };
                    timeout(PATIENCE, again).await.expect("the window again");
                    at = 0;
                }
                // Empty lines, which ask for nothing.
                hostile.write(at, &[b"\r\n"[(at % 2) as usize]], 1);
                (sent, at) = (sent + 1, at + 1);
            }
            done(&hostile, |done| done.writes, sent).await;
        }
    })
    .await;
}

/// Writes of nothing: they cost the attacker nothing of its window.
pub(crate) async fn empty_writes(scene: Scene) {
    beside_or(scene, "empty-writes", Some(pings()), async |it| {
        let hostile = it.first().await;
        let mut sent = 0;
        while it.next().await {
            (0..64).for_each(|_| hostile.write(0, b"", 0));
            sent += 64;
            done(&hostile, |done| done.writes, sent).await;
        }
    })
    .await;
}

/// Keepalives of a client, which mean nothing and are allowed.
pub(crate) async fn messages(scene: Scene) {
    beside_or(scene, "messages", Some(pings()), async |it| {
        let hostile = it.first().await;
        let mut sent = 0;
        while it.next().await {
            for _ in 0..64 {
                hostile.raw.send_message(&Message::Keepalive.encode()).expect("still connected");
            }
            sent += 64;
            done(&hostile, |done| done.messages, sent).await;
        }
    })
    .await;
}

async fn done(hostile: &Hostile, of: fn(ferrite_fabric::Done) -> u64, sent: u64) {
    let done = std::future::poll_fn(|cx| {
        if of(hostile.raw.done(Some(cx.waker()))) >= sent || hostile.raw.failure().is_some() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    });
    timeout(PATIENCE, done).await.expect("sent");
    assert!(hostile.raw.failure().is_none(), "{:?}", hostile.raw.failure());
}

/// They ask, and never say where the answers should go.
pub(crate) async fn half_open(scene: Scene) {
    beside(scene, "half-open", async |it| {
        while it.next().await {
            let mut silent = Vec::new();
            for _ in 0..20 {
                let hostile = it.connect().await;
                hostile.write(0, b"GET value\r\nGET value\r\n", 22);
                silent.push(hostile);
            }
            it.pause().await;
        }
    })
    .await;
}

/// They ask for more than their windows hold, and read nothing of it.
pub(crate) async fn slow_readers(scene: Scene) {
    beside_or(scene, "slow-readers", Some(values()), async |it| {
        while it.next().await {
            let mut slow: Vec<(Hostile, Exposed)> = Vec::new();
            for _ in 0..10 {
                let hostile = it.connect().await;
                let memory =
                    hostile.raw.pool().take_uncharged(64 << 10, Purpose::Receive).expect("memory");
                let exposed =
                    hostile.raw.expose(memory).map_err(|(_, error)| error).expect("exposed");
                hostile.register(exposed.remote().addr, 64 << 10, exposed.remote().rkey);
                let asked = b"GET value\r\n".repeat(10);
                hostile.write(0, &asked, asked.len() as u32);
                slow.push((hostile, exposed));
            }
            it.pause().await;
        }
    })
    .await;
}

/// They have one receive, for the first message, and take nothing after it: the gateway's device
/// repeats.
pub(crate) async fn never_polling(scene: Scene) {
    beside(scene, "never-polling", async |it| {
        while it.next().await {
            let deaf: Vec<_> = (0..10).map(|_| Deaf::connect(&it)).collect();
            it.pause().await;
            drop(deaf);
        }
    })
    .await;
}

/// A thousand ask for a connection, and say nothing when they are answered.
pub(crate) async fn stopping_half_way(scene: Scene) {
    beside(scene, "stopping-half-way", async |it| {
        let mut begun = 0;
        let mut begin = || {
            let id =
                cm::resolve(&it.scene.verbs, Some(any_port(1)), it.at, PATIENCE).expect("a route");
            begun += 1;
            // Each by another number: the kernel takes two of the same queue pair for one.
            id.connect(&ConnectParams { qp_num: 0x1_0000 + begun, ..nothing_of_ours() })
                .expect("to ask");
            (id, begun)
        };
        let mut total = 0;
        while it.next().await {
            let mut half_way = Vec::new();
            while it.is_on() && half_way.len() < 250 {
                let (id, begun) = begin();
                half_way.push(id);
                total = begun;
                // as they come from many hosts, not all at once
                sleep(Duration::from_millis(2)).await;
            }
            it.pause().await;
        }
        while total < 1000 {
            total = begin().1;
        }
        println!("stopping half way: {total} of them");
    })
    .await;
}

fn nothing_of_ours() -> ConnectParams<'static> {
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

/// A peer by plain verbs that takes nothing. In the order in which things go.
struct Deaf {
    _qp: QueuePair,
    _cq: CompletionQueue,
    _region: MemoryRegion,
    _id: CmId,
}

impl Deaf {
    fn connect(it: &Attacker) -> Self {
        const WINDOW: usize = 1024;
        let id = cm::resolve(&it.scene.verbs, Some(any_port(1)), it.at, PATIENCE).expect("a route");
        let context =
            it.scene.verbs.device("rxe2").and_then(|device| device.open()).expect("a device");
        let domain = context.allocate_protection_domain().expect("a domain");
        let cq = context.create_completion_queue(16, None, 0).expect("a queue");
        let config =
            QueuePairConfig { max_send_wr: 4, max_recv_wr: 1, ..QueuePairConfig::new(&cq) };
        let qp = domain.create_queue_pair(&config).expect("a queue pair");
        let mut region =
            domain.allocate(WINDOW + 2 * MESSAGE_BYTES, Access::REMOTE_WRITE).expect("memory");
        let init = id.queue_pair_attributes(State::INIT).expect("attributes");
        qp.modify(&init.access(Access::REMOTE_WRITE)).expect("INIT");
        let (heard, said) =
            (WINDOW..WINDOW + MESSAGE_BYTES, WINDOW + MESSAGE_BYTES..WINDOW + 2 * MESSAGE_BYTES);
        qp.post_recv(&[RecvRequest::new(0, &[region.sge(heard.clone())])]).expect("room");
        cm::connect(&id, &qp, Access::REMOTE_WRITE, &nothing_of_ours(), PATIENCE)
            .expect("connected");
        let begun = Instant::now();
        let mut completion = [WorkCompletion::default()];
        while cq.poll(&mut completion).expect("a queue") == 0 {
            assert!(begun.elapsed() < PATIENCE, "no message");
            std::thread::sleep(Duration::from_micros(100));
        }
        let Ok(Message::RegisterXferMemory(window)) =
            Message::decode(&region.to_vec(heard.start, MESSAGE_BYTES))
        else {
            panic!("another message")
        };
        let remote = region.remote(0..WINDOW);
        let ours = Registration { addr: remote.addr, length: WINDOW as u32, rkey: remote.rkey };
        region.write(said.start, &Message::RegisterXferMemory(ours).encode());
        let message = [region.sge(said.clone())];
        let register = SendRequest::new(1, Operation::Send, &message);
        qp.post_send(&[register]).map_err(|refused| refused.error).expect("room");
        region.write(0, b"GET value\r\n");
        let words = [region.sge(0..11)];
        let to = RemoteSlice { addr: window.addr, len: 11, rkey: window.rkey };
        let asks = SendRequest::new(2, Operation::WriteImm(to, 11), &words);
        qp.post_send(&[asks]).map_err(|refused| refused.error).expect("room");
        Self { _qp: qp, _cq: cq, _region: region, _id: id }
    }
}
