//! A thousand lives: create, connect, use and drop in random order, with peers dying, and nothing
//! is left.
//!
//! `rdma resource show` counts what the kernel holds, /proc/self/fd what we hold. Both must be back
//! where they started. A failure prints its seed, and `FERRITE_SEED` replays it.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::{QueuePairConfig, RecvRequest, SendRequest, Status};

use crate::lab;
use crate::process::{again, connect_and_wait, role};
use crate::suite::pair::{Mode, Pair, PairConfig, Parts, params};
use crate::suite::random::Random;
use crate::suite::{Fixture, PATIENCE};

const LIVES: u32 = 1000;
/// The emulated kernel is some twenty times slower.
const LIVES_EMULATED: u32 = 100;
/// One life in this many has a peer in a process of its own, which is killed.
const KILLED_EVERY: u32 = 50;

/// What the kernel holds, by kind ("rxe1 qp" → 1), and our file descriptors.
fn resources() -> BTreeMap<String, u64> {
    let out = Command::new("rdma").args(["resource", "show"]).output().expect("rdma");
    let text = String::from_utf8(out.stdout).expect("text");
    // 0: rxe1: qp 1 cq 0 pd 0 mr 0 ctx 0 srq 0 cm_id 0
    let mut held = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace().skip(1);
        let device = words.next().expect("a device").trim_end_matches(':').to_owned();
        while let (Some(kind), Some(count)) = (words.next(), words.next()) {
            held.insert(format!("{device} {kind}"), count.parse().expect("a count"));
        }
    }
    assert!(held.len() >= 8, "rdma resource show printed: {text}");
    let fds = std::fs::read_dir("/proc/self/fd").expect("fds").count() as u64;
    held.insert("fds".to_owned(), fds);
    held
}

/// Waits until the kernel has released what is already closed: identifiers linger in timewait, and
/// the objects of a killed process go after it.
fn settled(start: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = resources();
        if now == *start || Instant::now() > deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_thousand_lives_leave_nothing() {
    if let Some(target) = role() {
        return connect_and_wait(&target);
    }
    let seed = std::env::var("FERRITE_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| {
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(1, |now| now.as_nanos() as u64)
        });
    let mut random = Random::new(seed);
    let emulated = std::env::var("FERRITE_LAB_KERNEL").is_ok_and(|kernel| kernel != "uml");
    let lives = if emulated { LIVES_EMULATED } else { LIVES };
    let fixture = lab();
    // The first connection opens what librdmacm keeps for the life of the process.
    drop(Pair::new(&fixture));
    let start = settled(&BTreeMap::new());
    for life in 0..lives {
        if life % KILLED_EVERY == KILLED_EVERY - 1 {
            outlive_a_peer(&fixture);
        } else {
            live(&fixture, &mut random);
        }
    }
    assert_eq!(settled(&start), start, "after {lives} lives, FERRITE_SEED={seed}");
    assert_eq!(ferrite_verbs::leaked_objects(), 0, "FERRITE_SEED={seed}");
}

/// One connection: made, used by a random share of what it could do, and dropped piece by piece in
/// random order, perhaps with work under way and perhaps without a goodbye.
fn live(fixture: &Fixture, random: &mut Random) {
    let config = PairConfig {
        region_bytes: 16 << 10,
        srq_receives: (random.below(2) == 0).then_some(32),
        ..Default::default()
    };
    let pair = Pair::with(fixture, &config);
    let [to, from] = &pair.ends;
    let operations = random.below(4);
    for _ in 0..operations {
        let remote = to.region.remote(0..512);
        let local = [from.region.sge(0..512)];
        let request = if random.below(2) == 0 {
            SendRequest::write(1, &local, remote)
        } else {
            SendRequest::read(1, &local, remote)
        };
        from.post(request.signaled());
        // Sometimes the work is still under way when everything goes.
        if random.below(4) > 0 {
            assert_eq!(from.reap(Mode::Poll).status(), Status::SUCCESS);
        }
    }
    to.receive_into(2, 0..64);
    if random.below(2) == 0 {
        from.id.disconnect().expect("disconnect");
    }
    let mut pieces = pair.into_pieces();
    random.shuffle(&mut pieces);
    drop(pieces);
}

/// A child connects to us and is killed with the connection up.
fn outlive_a_peer(fixture: &Fixture) {
    let config = PairConfig::default();
    let listener = Listener::bind(&fixture.verbs, fixture.hosts[0].any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("an address");
    let mut child = again("churn::a_thousand_lives_leave_nothing", &target.to_string(), &[])
        .spawn()
        .expect("a child");
    let request = listener.next_request(PATIENCE).expect("events").expect("the child's request");
    let parts = Parts::new(fixture, &fixture.hosts[0], &config);
    cm::accept(&request, &parts.qp, config.access, &params(&config), PATIENCE).expect("accept");
    parts.qp.post_recv(&[RecvRequest::new(1, &[parts.region.sge(0..64)])]).expect("post");
    child.kill().expect("kill");
    child.wait().expect("wait");
    // A second queue pair on the same objects, for good measure, while the first one's peer is
    // gone.
    parts.domain.create_queue_pair(&QueuePairConfig::new(&parts.cq)).expect("queue pair");
}
