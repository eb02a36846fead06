//! Two connected endpoints in virtual time and virtual memory. For any sizes, splits and order of
//! events, all bytes must arrive as sent, and no side may wait for ever.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferrite_proto::{Config, Endpoint, MESSAGE_BYTES, Registration, Role, Write};
use proptest::collection::vec;
use proptest::prelude::*;

/// The result of a completed receive.
#[derive(Debug)]
enum Arrival {
    Message([u8; MESSAGE_BYTES]),
    Immediate { immediate: u32, byte_len: u32 },
}

/// A posted request that has not completed yet.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Posted {
    Message,
    Write,
}

/// An endpoint with its memory, its queues and the bytes of its application.
struct Side {
    endpoint: Endpoint,
    registration: Registration,
    memory: Vec<u8>,
    arrivals: VecDeque<Arrival>,
    posted: VecDeque<Posted>,
    outgoing: Vec<u8>,
    written: usize,
    received: Vec<u8>,
}

impl Side {
    fn new(role: Role, config: &Config, registration: Registration) -> Self {
        Self {
            endpoint: Endpoint::new(role, config.clone(), registration)
                .expect("a good configuration"),
            registration,
            memory: vec![0; registration.length as usize],
            arrivals: VecDeque::new(),
            posted: VecDeque::new(),
            outgoing: Vec::new(),
            written: 0,
            received: Vec::new(),
        }
    }

    /// Queues more bytes to send. Neighbouring bytes differ.
    fn queue(&mut self, bytes: usize) {
        let from = self.outgoing.len();
        self.outgoing.extend((from..from + bytes).map(|at| (at * 7 % 251) as u8));
    }

    /// Posts all messages, and writes of at most `available` bytes until there is no room. Returns
    /// whether anything was posted.
    fn post(&mut self, available: usize, peer: &mut Side) -> bool {
        let mut any = false;
        while let Some(message) = self.endpoint.poll_message() {
            any = true;
            self.posted.push_back(Posted::Message);
            peer.arrivals.push_back(Arrival::Message(message));
        }
        loop {
            let available = available.min(self.outgoing.len() - self.written);
            let Some(write) = self.endpoint.write_plan(available) else { return any };
            any = true;
            assert!(write.len as usize <= available && write.immediate == write.len);
            let bytes = &self.outgoing[self.written..][..write.len as usize];
            self.written += bytes.len();
            self.posted.push_back(Posted::Write);
            peer.write(write, bytes);
        }
    }

    /// Performs a write of the peer, as our network card would.
    fn write(&mut self, write: Write, bytes: &[u8]) {
        assert_eq!(write.rkey, self.registration.rkey);
        let at = write.remote_addr.checked_sub(self.registration.addr).expect("within the memory")
            as usize;
        self.memory[at..at + bytes.len()].copy_from_slice(bytes);
        self.arrivals
            .push_back(Arrival::Immediate { immediate: write.immediate, byte_len: write.len });
    }

    fn deliver(&mut self, count: usize) -> bool {
        let count = count.min(self.arrivals.len());
        for arrival in self.arrivals.drain(..count) {
            let taken = match arrival {
                Arrival::Message(bytes) => self.endpoint.handle_message(&bytes),
                Arrival::Immediate { immediate, byte_len } => {
                    self.endpoint.handle_immediate(immediate, byte_len)
                }
            };
            taken.expect("no violation");
        }
        count > 0
    }

    fn complete(&mut self, count: usize) -> bool {
        let count = count.min(self.posted.len());
        for posted in self.posted.drain(..count) {
            match posted {
                Posted::Message => self.endpoint.handle_message_sent(),
                Posted::Write => self.endpoint.handle_writes_sent(1),
            }
        }
        count > 0
    }

    fn consume(&mut self, bytes: usize) -> bool {
        let readable = self.endpoint.readable();
        let bytes = bytes.min(readable.len());
        let from = readable.start as usize;
        self.received.extend_from_slice(&self.memory[from..from + bytes]);
        self.endpoint.consume(bytes as u32);
        bytes > 0
    }
}

struct Pair {
    sides: [Side; 2],
    now: Instant,
}

impl Pair {
    fn new(config: &Config, lengths: [u32; 2]) -> Self {
        let at = |addr, length| Registration { addr, length, rkey: length ^ 0x55 };
        let client = Side::new(Role::Client, config, at(0x10_0000, lengths[0]));
        let server = Side::new(Role::Server, config, at(u64::from(u32::MAX) - 3, lengths[1]));
        let mut pair = Self { sides: [client, server], now: Instant::now() };
        for side in &mut pair.sides {
            side.endpoint.handle_established(pair.now).expect("the endpoint is not closed");
        }
        pair
    }

    /// Returns one of the sides and its peer. `second` selects the server as the first of the two.
    fn both(&mut self, second: bool) -> (&mut Side, &mut Side) {
        let [client, server] = &mut self.sides;
        if second { (server, client) } else { (client, server) }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Queue(second, bytes) => self.both(second).0.queue(bytes),
            Step::Post(second, available) => {
                let (side, peer) = self.both(second);
                side.post(available, peer);
            }
            Step::Deliver(second, count) => {
                self.both(second).0.deliver(count);
            }
            Step::Complete(second, count) => {
                self.both(second).0.complete(count);
            }
            Step::Consume(second, bytes) => {
                self.both(second).0.consume(bytes);
            }
            Step::Wait(ms) => self.wait(Duration::from_millis(ms)),
        }
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
        for side in &mut self.sides {
            side.endpoint.handle_timeout(self.now).expect("no peer is dead");
        }
    }

    /// Runs everything that can happen until all bytes have arrived.
    fn finish(&mut self) {
        let mut waits = 0;
        while !self.is_finished() {
            let mut any = false;
            for second in [false, true] {
                let (side, peer) = self.both(second);
                any |= side.post(usize::MAX, peer) | peer.deliver(usize::MAX);
                any |= side.complete(usize::MAX) | peer.consume(usize::MAX);
            }
            if any {
                waits = 0;
                continue;
            }
            // Time must pass only for a client that waits for an arrival from the server.
            waits += 1;
            assert!(waits < 3, "no side can continue");
            let due = self.sides.iter().filter_map(|side| side.endpoint.poll_timeout()).min();
            let due = due.expect("a server has a timer");
            self.wait(due.saturating_duration_since(self.now));
        }
        for side in &mut self.sides {
            side.deliver(usize::MAX);
        }
    }

    fn is_finished(&self) -> bool {
        let [client, server] = &self.sides;
        client.received.len() == server.outgoing.len()
            && server.received.len() == client.outgoing.len()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Queue(bool, usize),
    Post(bool, usize),
    Deliver(bool, usize),
    Complete(bool, usize),
    Consume(bool, usize),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let side = any::<bool>;
    let step = prop_oneof![
        (side(), 0..200_usize).prop_map(|(side, bytes)| Step::Queue(side, bytes)),
        (side(), 1..100_usize).prop_map(|(side, bytes)| Step::Post(side, bytes)),
        (side(), 0..20_usize).prop_map(|(side, count)| Step::Deliver(side, count)),
        (side(), 0..20_usize).prop_map(|(side, count)| Step::Complete(side, count)),
        (side(), 0..80_usize).prop_map(|(side, bytes)| Step::Consume(side, bytes)),
        (0..4000_u64).prop_map(Step::Wait),
    ];
    vec(step, 0..150)
}

fn configs() -> impl Strategy<Value = Config> {
    let unseen = prop_oneof![Just(None), (1..8_u32).prop_map(Some)];
    (1..100_u32, 1..5_u32, unseen).prop_map(|(max_write, max_writes_in_flight, max_unseen)| {
        Config {
            max_write,
            max_writes_in_flight,
            max_unseen,
            dead_after: Duration::from_secs(3600),
            ..Config::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn all_bytes_arrive_without_a_deadlock(
        config in configs(),
        client in 1..64_u32,
        server in 1..64_u32,
        steps in steps(),
    ) {
        let mut pair = Pair::new(&config, [client, server]);
        for step in &steps {
            pair.step(step);
        }
        pair.finish();
        let [client, server] = &pair.sides;
        prop_assert_eq!(&client.received, &server.outgoing);
        prop_assert_eq!(&server.received, &client.outgoing);
        for (side, peer) in [(client, server), (server, client)] {
            let (ours, theirs) = (side.endpoint.stats(), peer.endpoint.stats());
            prop_assert_eq!(ours.bytes_written, side.outgoing.len() as u64);
            prop_assert_eq!(ours.bytes_written, theirs.bytes_received);
            prop_assert_eq!(theirs.bytes_consumed, theirs.bytes_received);
            prop_assert_eq!(ours.writes, theirs.immediates);
            prop_assert_eq!(ours.messages_sent, theirs.messages_received);
            // One announcement at the start, and one for each window that was used up.
            let windows = theirs.bytes_consumed / u64::from(peer.registration.length);
            prop_assert!(theirs.registrations_sent.abs_diff(windows + 1) <= 1);
        }
    }
}

/// A client sends byte by byte to a server that sends only keepalives. The client never takes more
/// of the server's receives than allowed, and the keepalives let it continue.
#[test]
fn does_not_overrun_a_silent_server() {
    let mut pair = Pair::new(&Config::default(), [64, 1 << 20]);
    for second in [false, true] {
        let (side, peer) = pair.both(second);
        side.post(0, peer);
        peer.deliver(usize::MAX);
        side.complete(usize::MAX);
    }
    let [client, server] = &mut pair.sides;
    client.queue(100_000);
    for round in 0..5 {
        client.post(1, server);
        // Completions of the network card do not show that the server's software has seen anything.
        client.complete(usize::MAX);
        assert!(server.arrivals.len() <= 256, "round {round}");
    }
    let before = client.written;
    server.deliver(usize::MAX);
    client.post(1, server);
    assert_eq!(client.written, before, "the client cannot see that the server works");
    pair.wait(Duration::from_secs(3));
    let (server, client) = pair.both(true);
    server.post(0, client);
    client.deliver(usize::MAX);
    client.post(1, server);
    assert_eq!(client.written, before + 256);
    assert!(client.endpoint.stats().stalled_by_silence > 0);
}

#[test]
fn transfers_a_megabyte_both_ways() {
    let mut pair = Pair::new(&Config::default(), [4096, 1000]);
    for side in &mut pair.sides {
        side.queue(1 << 20);
    }
    pair.finish();
    let [client, server] = &pair.sides;
    assert!(client.received == server.outgoing && server.received == client.outgoing);
    assert_eq!(client.endpoint.stats().registrations_sent, 1 + (1 << 20) / 4096);
}

#[test]
fn server_gives_up_on_unacknowledged_keepalives() {
    let config = Config::default();
    let mut pair = Pair::new(&config, [64, 64]);
    let [client, server] = &mut pair.sides;
    server.post(0, client);
    server.complete(usize::MAX);
    let begun = pair.now;
    let error = loop {
        pair.now = server.endpoint.poll_timeout().expect("a timer");
        if let Err(error) = server.endpoint.handle_timeout(pair.now) {
            break error;
        }
        server.post(0, client);
    };
    assert_eq!(error.to_string(), "the peer has been silent for 30s");
    assert_eq!(pair.now - begun, config.keepalive_interval + config.dead_after);
    assert_eq!(server.endpoint.stats().keepalives_sent, 3);
}
