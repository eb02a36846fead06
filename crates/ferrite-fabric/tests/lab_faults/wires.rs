//! A bad wire: packets are lost, delayed, reordered, duplicated or damaged, or the MTU is smaller.
//! Links slow down but keep working. There is one exception: on Soft-RoCE, long reads fail if their
//! packets are reordered.

use std::time::{Duration, Instant};

use crate::pair::Pair;
use crate::traffic::Traffic;
use ferrite_testkit::lab::{Wire, fault, short_timeouts};

/// Enough rounds for every kind of loss: a round of messages alone takes about 30 packets.
const ROUNDS: u64 = 10;

/// The MTU of the lab's devices.
const ONE_PACKET: usize = 4096;
/// The limit for reordered reads to fail. It is enough for three rounds over a slow wire.
const LONG_ENOUGH: Duration = Duration::from_secs(30);

/// Checks traffic of each kind under `netem` on both sides.
fn check_works_under(netem: &str) {
    let wire = Wire::new(&["h1", "h2"]);
    let pair = Pair::start(short_timeouts(), short_timeouts());
    wire.set(netem);
    pair.traffic.rounds(&[0, 1, 2], ROUNDS, netem);
    pair.survives(netem);
}

#[test]
fn loss_of_1_percent() {
    check_works_under("loss 1%");
}

#[test]
fn loss_of_5_percent() {
    check_works_under("loss 5%");
}

/// The peer's interface carries smaller packets. The connection manager knows only the MTU of the
/// local interface.
#[test]
fn mtu_that_is_smaller_at_the_peer() {
    let _restore = fault("ip link set h1 mtu 1500", "ip link set h1 mtu 9000");
    let pair = Pair::start(short_timeouts(), short_timeouts());
    pair.traffic.rounds(&[0, 1, 2], ROUNDS, "a smaller MTU at the peer");
    pair.survives("a smaller MTU at the peer");
}

const REORDER: &str = "delay 10ms reorder 25% 50%";

/// Reads one packet at a time, because longer reads may fail: see [`long_reads_reordered`].
#[test]
fn delay_with_reordering() {
    let wire = Wire::new(&["h1", "h2"]);
    let pair = Pair::with(short_timeouts(), short_timeouts(), |link| {
        Traffic::with_reads_of(ONE_PACKET, link)
    });
    wire.set(REORDER);
    pair.traffic.rounds(&[0, 1, 2], 3, REORDER);
    pair.survives(REORDER);
}

/// Soft-RoCE treats read responses that arrive out of order as a fatal error (`check_ack` in
/// drivers/infiniband/sw/rxe/rxe_comp.c), where hardware repeats the request. The link fails and
/// reports the error. If the order is kept by chance, the link continues.
#[test]
fn long_reads_reordered() {
    let wire = Wire::new(&["h1", "h2"]);
    let pair = Pair::start(short_timeouts(), short_timeouts());
    let since = Instant::now();
    wire.set(REORDER);
    pair.traffic.rounds(&[0, 1, 2], 3, REORDER);
    wire.set("delay 0");
    pair.traffic.check_progress("without reordering");
    if pair.traffic.has_ended() {
        pair.fails_during("long reads reordered", since, LONG_ENOUGH, || drop(wire));
    } else {
        pair.survives("long reads reordered");
    }
}

#[test]
fn duplicates() {
    check_works_under("duplicate 20%");
}

/// The packet checksum detects damage, so that all delivered bytes are correct.
#[test]
fn damage() {
    check_works_under("corrupt 5%");
}
