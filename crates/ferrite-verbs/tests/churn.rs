//! The test creates a thousand connections (a hundred in an emulated guest), uses them at random,
//! and drops their objects in random order. It also kills some peers. Nothing may be left.
//!
//! `rdma resource show` counts the kernel's objects, and /proc/self/fd shows the process's file
//! descriptors. Both numbers must return to their initial values. The test prints its seed, and
//! `FERRITE_SEED` replays it.

use ferrite_testkit::Random;
use ferrite_testkit::lab::LeakCheck;
use ferrite_testkit::process::role;
use ferrite_verbs::cm::{self, Listener};
use ferrite_verbs::{QueuePairConfig, RecvRequest, SendRequest, Status};

use crate::lab;
use crate::process::{connect_and_wait, rerun_test};
use crate::suite::pair::{Mode, Pair, PairConfig, Parts, params};
use crate::suite::{Fixture, TIMEOUT};

const CONNECTIONS: u32 = 1000;
/// Number of connections in an emulated guest, which is about twenty times slower.
const CONNECTIONS_EMULATED: u32 = 100;
/// One connection in this many has a peer in a separate process, which the test kills.
const KILLED_EVERY: u32 = 50;

#[test]
#[expect(clippy::print_stdout, reason = "prints the seed that replays a failure")]
fn a_thousand_connections_leave_nothing() {
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
    let connections = if emulated { CONNECTIONS_EMULATED } else { CONNECTIONS };
    let fixture = lab();
    println!("FERRITE_SEED={seed}, {connections} connections");
    let leaks = LeakCheck::begin();
    for number in 0..connections {
        if number % KILLED_EVERY == KILLED_EVERY - 1 {
            kill_a_peer(&fixture);
        } else {
            run_connection(&fixture, &mut random);
        }
    }
    leaks.end();
}

/// Creates a connection, makes up to three random requests, and drops its objects in random order.
/// Sometimes requests are still in flight then, and sometimes there was no disconnect.
fn run_connection(fixture: &Fixture, random: &mut Random) {
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
        // In one of four cases the test does not wait, so that the request may still be in flight
        // when everything is dropped.
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

/// Accepts a connection from a child process and kills the child while connected.
fn kill_a_peer(fixture: &Fixture) {
    let config = PairConfig::default();
    let listener = Listener::bind(&fixture.verbs, fixture.hosts[0].any_port(), 4).expect("listen");
    let target = listener.id().local_addr().expect("an address");
    let mut child =
        rerun_test("churn::a_thousand_connections_leave_nothing", &target.to_string(), &[])
            .spawn()
            .expect("a child");
    let request = listener.next_request(TIMEOUT).expect("events").expect("the child's request");
    let parts = Parts::new(fixture, &fixture.hosts[0], &config);
    cm::accept(&request, &parts.qp, config.access, &params(&config), TIMEOUT).expect("accept");
    parts.qp.post_recv(&[RecvRequest::new(1, &[parts.region.sge(0..64)])]).expect("post");
    child.kill().expect("kill");
    child.wait().expect("wait");
    // A second queue pair can be created on the same objects after the peer of the first is gone.
    parts.domain.create_queue_pair(&QueuePairConfig::new(&parts.cq)).expect("queue pair");
}
