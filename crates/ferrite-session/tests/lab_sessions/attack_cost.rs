//! Measures what misbehaving clients cost other clients. A client sends commands all the time, over
//! one connection, while an attacker alternates between attacks and pauses. The test compares the
//! client's p99 latency during attacks with its p99 during the pauses. It also checks that the
//! gateway does not hold more memory afterwards than before.
//!
//! ```text
//!   the client    command, reply, command, reply, …                        a thread of its own
//!   the attacker          [ attack ]         [ attack ]         [ attack ]  a thread of its own
//!   measured       pause    attack    pause    attack    pause    attack    medians of p99s
//! ```
//!
//! The attacker, the gateway, the engine and the client share the guest's two CPUs, so an attack
//! that only causes load slows others down in any case. Such an attack is compared with a
//! neighbour, which runs during the pauses. The neighbour is a client that obeys the protocol and
//! sends commands as fast as it gets replies.
#![expect(
    clippy::print_stdout,
    reason = "prints the measurements for \
              `cargo xtask lab-test measured_isolation -- --no-capture`"
)]

mod measure;

use std::time::{Duration, Instant};

use ferrite_fabric::Arrival;
use ferrite_fabric::mem::{Exposed, Purpose};
use ferrite_proto::{MESSAGE_BYTES, Message, Registration};
use ferrite_verbs::{
    Access, CmId, CompletionQueue, ConnectParams, MemoryRegion, Operation, QueuePair,
    QueuePairConfig, RecvRequest, RemoteSlice, SendRequest, State, WorkCompletion, cm,
};
use tokio::time::{sleep, timeout};

use crate::sessions::hostile::{FEATURE_FLOOD, HostileClient, VIOLATIONS};
use crate::sessions::{Harness, any_port};

use measure::{Attacker, Neighbour, compare, compare_with_idle};

const TIMEOUT: Duration = Duration::from_secs(20);

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
            // Each request has its own queue pair number. Otherwise the kernel would take two
            // requests for the same one.
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
                // The requests are spread over time, as if they came from many hosts.
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

/// A client on plain verbs that receives only the gateway's first message. Its fields are in the
/// order in which they must be dropped.
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
            assert!(begun.elapsed() < TIMEOUT, "the gateway sent no message");
            std::thread::sleep(Duration::from_micros(100));
        }
        let Ok(Message::RegisterXferMemory(window)) =
            Message::decode(&region.to_vec(incoming.start, MESSAGE_BYTES))
        else {
            panic!("the gateway's first message is not RegisterXferMemory")
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
