//! Tests of the multiplexer's rules, one at a time. The simulator tests them together.

use std::time::Instant;

use super::*;

fn route() -> Route {
    let address = "10.0.0.2:6379".parse().expect("an address");
    Route { destination: address, source: address }
}

fn config() -> Config {
    Config { window: 1000, turn_bytes: 100, message_bytes: 1000, ..Config::default() }
}

/// Two ends, and the messages between them.
struct Pair {
    caller: Mux,
    called: Mux,
    now: Instant,
}

impl Pair {
    fn new(config: &Config) -> Self {
        Self::with(config.clone(), config.clone())
    }

    /// Creates two ends with limits of their own.
    fn with(caller: Config, called: Config) -> Self {
        let new = |side, config| Mux::new(side, config).expect("valid limits");
        let (caller, called) = (new(Side::Caller, caller), new(Side::Called, called));
        Self { caller, called, now: Instant::now() }
    }

    /// Packs a message at one end. Each stream sends up to `most` bytes in a turn.
    fn pack(mux: &mut Mux, class: Class, now: Instant, most: usize) -> Option<Vec<u8>> {
        let mut out = vec![0; mux.config().message_bytes];
        let len = mux.poll_message(class, &mut out, now, |_, room| {
            room.fill(7);
            Filled::Bytes { len: room.len().min(most), is_more: true }
        })?;
        out.truncate(len);
        Some(out)
    }

    /// Passes a message to an end that consumes all bytes. Returns what it has received.
    fn deliver(
        mux: &mut Mux,
        class: Class,
        message: &[u8],
        now: Instant,
    ) -> Vec<(StreamId, usize)> {
        let (mut piece, mut received) = (message, Vec::new());
        while let Some(it) =
            mux.handle_piece(class.channel(), &mut piece, now).expect("a valid message")
        {
            match it {
                Received::Opened { stream, .. } => received.push((stream, 0)),
                Received::Data { stream, bytes } => {
                    mux.consume(stream, bytes.len() as u32);
                    received.push((stream, bytes.len()));
                }
                Received::Fin { .. } => {}
            }
        }
        mux.handle_message_end().expect("whole records");
        received
    }

    fn send_to_called(&mut self, class: Class, most: usize) -> Vec<(StreamId, usize)> {
        let Some(message) = Self::pack(&mut self.caller, class, self.now, most) else {
            return Vec::new();
        };
        self.caller.handle_sent(class);
        Self::deliver(&mut self.called, class, &message, self.now)
    }

    fn send_to_caller(&mut self, class: Class) -> Vec<(StreamId, usize)> {
        let Some(message) = Self::pack(&mut self.called, class, self.now, 0) else {
            return Vec::new();
        };
        self.called.handle_sent(class);
        Self::deliver(&mut self.caller, class, &message, self.now)
    }

    fn open(&mut self, class: Class) -> StreamId {
        let stream = self.caller.open(class, route()).expect("a stream");
        self.caller.set_ready(stream);
        stream
    }
}

#[test]
fn packs_turns_of_several_streams_into_one_message() {
    let mut pair = Pair::new(&config());
    let streams = [(); 3].map(|()| pair.open(Class::Interactive));
    let received = pair.send_to_called(Class::Interactive, 50);
    let turns: Vec<_> = received.iter().filter(|(_, len)| *len > 0).map(|it| it.0).collect();
    assert_eq!(turns[..4], [streams[0], streams[1], streams[2], streams[0]]);
    assert!(received.iter().all(|(_, len)| *len <= 50));
    assert!(pair.send_to_called(Class::Bus, 50).is_empty(), "each class has its own messages");
}

#[test]
fn sends_no_more_than_the_credit() {
    let mut pair = Pair::new(&config());
    let stream = pair.open(Class::Bulk);
    let mut sent = 0;
    for _ in 0..10 {
        if let Some(message) = Pair::pack(&mut pair.caller, Class::Bulk, pair.now, 1000) {
            pair.caller.handle_sent(Class::Bulk);
            sent += Pair::deliver(&mut pair.called, Class::Bulk, &message, pair.now)
                .iter()
                .map(|it| it.1)
                .sum::<usize>();
        }
    }
    assert_eq!((sent, pair.caller.credit(stream)), (1000, 0));
    pair.send_to_caller(Class::Bus); // all of it was consumed
    assert_eq!(pair.caller.credit(stream), 1000);
}

#[test]
fn limits_the_messages_in_flight_of_each_class() {
    let mut pair = Pair::new(&config());
    for class in [Class::Bulk, Class::Interactive] {
        let _streams = [(); 20].map(|()| pair.open(class));
    }
    let (caller, now) = (&mut pair.caller, pair.now);
    let count = std::iter::from_fn(|| Pair::pack(caller, Class::Bulk, now, 1000)).count();
    assert_eq!(count, 4);
    assert!(Pair::pack(caller, Class::Interactive, now, 1000).is_some());
    caller.handle_sent(Class::Bulk);
    assert!(Pair::pack(caller, Class::Bulk, now, 1000).is_some());
    assert!(Pair::pack(caller, Class::Bulk, now, 1000).is_none());
}

#[test]
fn a_stream_that_sends_much_moves_to_bulk_and_loses_nothing() {
    let mut pair = Pair::new(&Config { bulk_bytes_per_second: 1500, ..config() });
    let stream = pair.open(Class::Interactive);
    let mut sent = 0;
    for _ in 0..10 {
        for class in Class::ALL {
            sent += pair.send_to_called(class, 100).iter().map(|it| it.1).sum::<usize>();
            pair.send_to_caller(class);
        }
    }
    assert_eq!(pair.caller.class(stream), Some(Class::Bulk));
    assert_eq!(
        pair.called.class(stream),
        Some(Class::Interactive),
        "each direction has its own class"
    );
    assert!(sent > 3000, "only {sent} bytes were sent");
    assert_eq!(pair.caller.stats().class_changes, 1);
}

#[test]
fn a_stream_that_was_reset_before_its_open_leaves_no_trace() {
    let mut pair = Pair::new(&config());
    let stream = pair.open(Class::Interactive);
    pair.caller.reset(stream, Cause::CONNECTION_LOST);
    assert_eq!((pair.caller.streams(), pair.caller.poll_ended()), (0, None));
    assert!(pair.send_to_called(Class::Interactive, 10).is_empty());
    let next = pair.open(Class::Interactive);
    assert_eq!(next.number(), stream.number() + 1, "its name is not used again");
    assert_eq!(pair.send_to_called(Class::Interactive, 10)[0], (next, 0));
}

#[test]
fn go_away_ends_the_streams_that_were_not_accepted() {
    let mut pair = Pair::new(&config());
    let accepted = pair.open(Class::Interactive);
    pair.send_to_called(Class::Interactive, 10);
    pair.called.go_away();
    let late = pair.open(Class::Bulk);
    let message = Pair::pack(&mut pair.called, Class::Bus, pair.now, 0).expect("the GOAWAY");
    assert!(
        pair.send_to_called(Class::Bulk, 10).is_empty(),
        "the stream comes after the GOAWAY, so it is ignored"
    );
    Pair::deliver(&mut pair.caller, Class::Bus, &message, pair.now);
    let end = End::ResetByPeer(Cause::GOING_AWAY);
    assert_eq!(pair.caller.poll_ended(), Some(Ended { stream: late, end }));
    assert!(pair.caller.is_live(accepted) && pair.caller.is_peer_going_away());
    assert_eq!(pair.caller.open(Class::Bus, route()), Err(OpenError::GoingAway));
    assert!(!pair.called.is_drained());
    pair.called.reset(accepted, Cause::CONNECTION_LOST);
    assert!(!pair.called.is_drained(), "the RESET is not sent yet");
    pair.send_to_caller(Class::Interactive);
    assert!(pair.called.is_drained());
}

/// Without a limit, grants and resets could fill every message of a class.
#[test]
fn a_flood_of_grants_leaves_room_for_turns() {
    let mut pair = Pair::new(&Config { message_bytes: 200, ..config() });
    let bulk = [(); 50].map(|()| pair.open(Class::Bulk));
    for _ in 0..500 {
        let message = Pair::pack(&mut pair.caller, Class::Bulk, pair.now, 1000);
        let Some(message) = message else { break };
        pair.caller.handle_sent(Class::Bulk);
        Pair::deliver(&mut pair.called, Class::Bulk, &message, pair.now);
    }
    let bus = pair.called.open(Class::Bus, route()).expect("a stream");
    pair.called.set_ready(bus);
    let message = Pair::pack(&mut pair.called, Class::Bus, pair.now, 10).expect("a message");
    let received = Pair::deliver(&mut pair.caller, Class::Bus, &message, pair.now);
    assert!(received.contains(&(bus, 10)), "{received:?}");
    assert!(bulk.iter().filter(|stream| pair.caller.credit(**stream) > 0).count() < 10);
}

#[test]
fn a_violation_is_final() {
    let mut pair = Pair::new(&config());
    let mut piece = &[9; 12][..];
    let error = pair.called.handle_piece(0, &mut piece, pair.now).expect_err("no record");
    assert_eq!(pair.called.error(), Some(error));
    assert_eq!(pair.called.handle_message_end(), Err(error));
    assert_eq!(pair.called.open(Class::Bus, route()), Err(OpenError::Ended));
    assert!(!pair.called.has_output(Class::Bus));
}

/// A host whose clients use all streams still reaches the cluster bus.
#[test]
fn some_streams_are_reserved_for_the_bus() {
    let limits = Config { max_streams: 32, bus_streams: 2, ..config() };
    let mut pair = Pair::new(&limits);
    let _clients: Vec<_> = (0..30).map(|_| pair.open(Class::Interactive)).collect();
    for class in [Class::Interactive, Class::Bulk] {
        assert_eq!(pair.caller.open(class, route()), Err(OpenError::TooManyStreams));
    }
    let _bus = [0; 2].map(|_| pair.open(Class::Bus));
    assert_eq!(pair.caller.open(Class::Bus, route()), Err(OpenError::TooManyStreams));
    while !pair.send_to_called(Class::Interactive, 0).is_empty() {}
    while !pair.send_to_called(Class::Bus, 0).is_empty() {}
    assert_eq!((pair.called.streams(), pair.called.stats().refused), (32, 0));
}

/// A refused stream counts as open until its RESET is sent. Refusals that wait may outnumber the
/// streams that are allowed.
#[test]
fn refused_streams_of_clients_do_not_take_the_reserve_of_the_bus() {
    let small = Config { max_streams: 8, bus_streams: 2, ..config() };
    let mut pair = Pair::with(config(), small);
    let _clients: Vec<_> = (0..40).map(|_| pair.open(Class::Interactive)).collect();
    let bus = [0; 2].map(|_| pair.open(Class::Bus));
    // An empty answer does not mean the end: a message whose streams are all refused has one, too.
    for class in [Class::Interactive, Class::Bus] {
        (0..8).for_each(|_| drop(pair.send_to_called(class, 0)));
    }
    assert!(bus.iter().all(|stream| pair.called.is_live(*stream)));
    assert_eq!((pair.called.streams(), pair.called.stats().refused), (8, 34));
}

/// While clients use no streams, the bus may use all. Clients that come later get none.
#[test]
fn bus_may_use_the_streams_that_clients_do_not_use() {
    let mut pair = Pair::new(&Config { max_streams: 8, bus_streams: 2, ..config() });
    let _bus: Vec<_> = (0..8).map(|_| pair.open(Class::Bus)).collect();
    assert_eq!(pair.caller.open(Class::Bus, route()), Err(OpenError::TooManyStreams));
    assert_eq!(pair.caller.open(Class::Interactive, route()), Err(OpenError::TooManyStreams));
    while !pair.send_to_called(Class::Bus, 0).is_empty() {}
    assert_eq!((pair.called.streams(), pair.called.stats().refused), (8, 0));
}

#[test]
fn many_opens_of_clients_do_not_take_the_rate_of_the_bus() {
    let mut pair = Pair::new(&Config { opens_per_second: 4, ..config() });
    let _clients: Vec<_> = (0..6).map(|_| pair.open(Class::Interactive)).collect();
    let bus = pair.open(Class::Bus);
    pair.send_to_called(Class::Interactive, 0);
    pair.send_to_called(Class::Bus, 0);
    assert_eq!(pair.called.stats().refused, 2);
    assert!(pair.called.is_live(bus));
}
