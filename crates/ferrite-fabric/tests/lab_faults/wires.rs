//! A bad wire: packets are lost, late, out of order, doubled or damaged, and nobody but the clock
//! notices.

use std::time::{Duration, Instant};

use crate::harness::quick;
use crate::net::Wire;
use crate::pair::Pair;
use crate::traffic::Traffic;

/// Enough that every kind of loss happens: a round of messages alone is some 30 packets.
const ROUNDS: u64 = 10;

/// The MTU of the lab's devices.
const ONE_PACKET: usize = 4096;
/// For three rounds of a slow wire.
const LONG_ENOUGH: Duration = Duration::from_secs(30);

/// Traffic of each kind under `netem` on both sides.
fn goes_on_under(netem: &str) {
    let wire = Wire::new(&["h1", "h2"]);
    let pair = Pair::start(quick(), quick());
    wire.set(netem);
    pair.traffic.rounds(&[0, 1, 2], ROUNDS, netem);
    pair.survives(netem);
}

#[test]
fn loss_of_1_percent() {
    goes_on_under("loss 1%");
}

#[test]
fn loss_of_5_percent() {
    goes_on_under("loss 5%");
}

const REORDER: &str = "delay 10ms reorder 25% 50%";

/// With reads of one packet: see below.
#[test]
fn delay_with_reordering() {
    let wire = Wire::new(&["h1", "h2"]);
    let pair = Pair::with(quick(), quick(), |link| Traffic::with_reads_of(ONE_PACKET, link));
    wire.set(REORDER);
    pair.traffic.rounds(&[0, 1, 2], 3, REORDER);
    pair.survives(REORDER);
}

/// Soft-RoCE takes the pieces of a read that come in another order for a fatal error
/// (drivers/infiniband/sw/rxe/rxe_comp.c, `check_ack`), where hardware asks again: the link is
/// down, and says so. If the order is kept by chance, it goes on.
#[test]
fn long_reads_reordered() {
    let wire = Wire::new(&["h1", "h2"]);
    let pair = Pair::start(quick(), quick());
    let since = Instant::now();
    wire.set(REORDER);
    pair.traffic.rounds(&[0, 1, 2], 3, REORDER);
    wire.set("delay 0");
    pair.traffic.flows("when the order is kept again");
    if pair.traffic.is_over() {
        pair.fails_during("long reads reordered", since, LONG_ENOUGH, || drop(wire));
    } else {
        pair.survives("long reads reordered");
    }
}

#[test]
fn duplicates() {
    goes_on_under("duplicate 20%");
}

/// Damage is found by the checksum of the packet: what arrives is right.
#[test]
fn damage() {
    goes_on_under("corrupt 5%");
}
