//! Measures a client's latency while an attacker, or a neighbour, alternates between load and
//! pauses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_fabric::Fabric;
use ferrite_session::{GatewayConfig, ValkeyConfig, ValkeyStream};
use ferrite_testkit::Engine;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use super::TIMEOUT;
use crate::sessions::gateway::{TestServer, unprotected};
use crate::sessions::hostile::HostileClient;
use crate::sessions::{Harness, run_on};

/// The number of pairs of a pause and an attack.
const ROUNDS: usize = 5;
/// How long each pause and each attack is measured.
const PHASE: Duration = Duration::from_millis(800);
/// The time between two measurements, in which an attack may begin or end.
const BETWEEN: Duration = Duration::from_millis(150);

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
pub(super) struct Attacker {
    pub(super) harness: Harness,
    fabric: Fabric,
    pub(super) address: SocketAddr,
    attacks: Arc<AtomicUsize>,
}

const PAUSE: usize = 0;
const ATTACK: usize = 1;
const OVER: usize = 2;

impl Attacker {
    pub(super) fn is_attacking(&self) -> bool {
        self.attacks.load(Ordering::Relaxed) == ATTACK
    }

    /// Waits until it is time to attack. Returns false if there are no more attacks.
    pub(super) async fn next(&self) -> bool {
        loop {
            match self.attacks.load(Ordering::Relaxed) {
                ATTACK => return true,
                OVER => return false,
                _ => sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// Waits until the current attack is over.
    pub(super) async fn wait_for_pause(&self) {
        while self.is_attacking() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Opens a connection that is used for all attacks, when the first one begins.
    pub(super) async fn connect_once(&self) -> HostileClient {
        self.next().await;
        self.connect().await
    }

    pub(super) async fn connect(&self) -> HostileClient {
        HostileClient::connect(&self.fabric, self.address).await
    }
}

/// Starts a thread with a runtime of its own, so that its work affects others only as much as the
/// work of a separate process.
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
pub(super) struct Neighbour {
    pub(super) commands: Vec<u8>,
    pub(super) reply_bytes: usize,
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
pub(super) async fn compare_with_idle<F>(harness: Harness, name: &str, attack: F)
where
    F: AsyncFnOnce(Attacker) + Send + 'static,
{
    compare(harness, name, None, attack).await;
}

/// Compares latencies during an attack with latencies in the pauses. If there is a neighbour, it
/// runs in the pauses.
pub(super) async fn compare<F>(
    harness: Harness,
    name: &str,
    neighbour: Option<Neighbour>,
    attack: F,
) where
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
        assert!(
            begun.elapsed() < TIMEOUT,
            "{name}: the gateway holds more: {before:?} before, {now:?} now"
        );
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

/// Returns the least that the gateway holds within 200 ms. This is what it holds between two
/// commands of the client.
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
