//! Tests of single endpoints: the messages that they send, accept and refuse. `tests/pair.rs` tests
//! two connected endpoints.

use std::time::Duration;

use super::outbox::FEATURES_WAITING;
use super::*;
use crate::message::MessageError;
use crate::window::WindowError;

const OURS: Registration = Registration { addr: 0x1000, length: 16, rkey: 1 };
const THEIRS: Registration = Registration { addr: 0x9000, length: 8, rkey: 2 };

fn open(role: Role, config: Config, now: Instant) -> Endpoint {
    let mut endpoint = Endpoint::new(role, config, OURS).expect("a good configuration");
    endpoint.handle_established(now).expect("the endpoint is not closed");
    assert_eq!(endpoint.poll_message(), Some(Message::RegisterXferMemory(OURS).encode()));
    endpoint.handle_message_sent();
    endpoint
}

/// Returns an open endpoint that has the peer's announcement.
fn ready(role: Role, config: Config, now: Instant) -> Endpoint {
    let mut endpoint = open(role, config, now);
    endpoint
        .handle_message(&Message::RegisterXferMemory(THEIRS).encode())
        .expect("the first announcement is legal");
    endpoint
}

#[test]
fn accepts_an_announcement_while_connecting() {
    let now = Instant::now();
    let mut server =
        Endpoint::new(Role::Server, Config::default(), OURS).expect("a good configuration");
    assert_eq!((server.poll_message(), server.poll_timeout()), (None, None));
    server
        .handle_message(&Message::RegisterXferMemory(THEIRS).encode())
        .expect("an announcement is legal before the connection is established");
    assert_eq!(
        (server.write_plan(5), server.writable()),
        (None, 0),
        "the connection is not established"
    );
    server.handle_established(now).expect("the endpoint is not closed");
    server.handle_established(now).expect("a second call does nothing");
    assert_eq!(server.poll_message(), Some(Message::RegisterXferMemory(OURS).encode()));
    assert_eq!(server.poll_message(), None);
    assert_eq!(server.write_plan(5).map(|write| write.remote_addr), Some(0x9000));
    assert_eq!((server.writable(), server.peer_window()), (3, Some(THEIRS)));
}

#[test]
fn rejects_memory_without_bytes() {
    let error = Endpoint::new(Role::Client, Config::default(), Registration { length: 0, ..OURS });
    assert_eq!(error.map(|_| ()), Err(ConfigError { field: "length" }));
}

#[test]
fn replaces_memory_between_two_announcements() {
    let now = Instant::now();
    let mut server = ready(Role::Server, Config::default(), now);
    assert!(!server.is_to_announce(), "the peer may still write to the memory");
    server.handle_immediate(16, 16).expect("there is room for 16 bytes");
    server.consume(15);
    assert!(!server.is_to_announce(), "a byte is not consumed");
    server.consume(1);
    assert!(server.is_to_announce());
    let larger = Registration { addr: 0x2000, length: 64, rkey: 3 };
    server.replace_memory(larger);
    assert_eq!(server.poll_message(), Some(Message::RegisterXferMemory(larger).encode()));
    assert!(!server.is_to_announce());
    server.handle_immediate(64, 64).expect("there is room for it now");
    assert_eq!(server.readable(), 0..64);
}

#[test]
#[should_panic(expected = "the peer may still write to the memory")]
fn panics_if_announced_memory_is_replaced() {
    let mut server = ready(Role::Server, Config::default(), Instant::now());
    server.replace_memory(OURS);
}

#[test]
#[should_panic(expected = "a client's memory must keep its length of 16 bytes, not 17")]
fn panics_if_a_client_changes_the_length() {
    let now = Instant::now();
    let mut client = ready(Role::Client, Config::default(), now);
    client.handle_immediate(16, 16).expect("there is room for 16 bytes");
    client.consume(16);
    client.replace_memory(Registration { length: 17, ..OURS });
}

#[test]
fn error_is_permanent_and_close_ignores_events() {
    let now = Instant::now();
    let mut server = ready(Role::Server, Config::default(), now);
    let unknown = ProtocolError::Message(MessageError::Unknown { opcode: 0xFFFF });
    assert_eq!(server.handle_message(&[0xFF; 32]), Err(unknown));
    assert_eq!(server.handle_message(&Message::Keepalive.encode()), Err(unknown));
    assert_eq!(server.handle_immediate(0, 0), Err(unknown));
    assert_eq!(server.handle_timeout(now), Err(unknown));
    server.close();
    assert_eq!((server.error(), server.is_closed()), (Some(unknown), true));
    assert_eq!(
        (server.write_plan(1), server.poll_message(), server.poll_timeout()),
        (None, None, None)
    );

    let mut client = ready(Role::Client, Config::default(), now);
    client.close();
    assert_eq!(client.handle_message(&[0xFF; 3]), Ok(()));
    assert_eq!(client.handle_immediate(u32::MAX, 0), Ok(()));
    assert_eq!((client.error(), client.is_closed(), client.write_plan(1)), (None, true, None));
}

#[test]
fn rejects_bytes_before_or_beyond_the_announcement() {
    let now = Instant::now();
    let mut early =
        Endpoint::new(Role::Server, Config::default(), OURS).expect("a good configuration");
    early.handle_established(now).expect("the endpoint is not closed");
    let overrun = |bytes, room| Err(WindowError::Overrun { bytes, room }.into());
    assert_eq!(early.handle_immediate(1, 1), overrun(1, 0));

    let mut server = open(Role::Server, Config::default(), now);
    server.handle_immediate(10, 4).expect("an immediate also counts earlier writes without one");
    assert_eq!(server.handle_immediate(u32::MAX, 0), overrun(u32::MAX, 6));
    assert_eq!(server.readable(), 0..10, "earlier bytes are still readable");

    let mut server = open(Role::Server, Config::default(), now);
    let more = ProtocolError::Immediate { immediate: 3, byte_len: 4 };
    assert_eq!(server.handle_immediate(3, 4), Err(more));
}

#[test]
fn announces_again_when_full_and_consumed() {
    let now = Instant::now();
    let mut server = open(Role::Server, Config::default(), now);
    server.handle_immediate(16, 16).expect("the window has room");
    server.consume(15);
    assert_eq!(server.poll_message(), None);
    server.consume(1);
    assert_eq!(server.poll_message(), Some(Message::RegisterXferMemory(OURS).encode()));
    assert_eq!(server.stats().registrations_sent, 2);
    server.handle_immediate(16, 16).expect("the window has room again");
}

#[test]
fn server_sends_keepalives_and_detects_a_dead_peer() {
    let now = Instant::now();
    let second = Duration::from_secs(1);
    let mut server = open(Role::Server, Config::default(), now);
    assert_eq!(server.poll_timeout(), Some(now + 3 * second));
    server.handle_timeout(now + 2 * second).expect("nothing is due yet");
    assert_eq!(server.poll_message(), None);
    for round in 1..=5 {
        server
            .handle_timeout(now + round * 3 * second)
            .expect("the peer does not count as dead yet");
    }
    for _ in 0..3 {
        assert_eq!(server.poll_message(), Some(Message::Keepalive.encode()));
    }
    assert_eq!(server.poll_message(), None, "at most three keepalives are in flight");
    assert_eq!((server.stats().keepalives_sent, server.stats().keepalives_skipped), (3, 2));

    // The first keepalive is acknowledged. The oldest remaining one was queued at 6 s.
    server.handle_message_sent();
    let dead = ProtocolError::Dead { after: 30 * second };
    server.handle_timeout(now + 35 * second).expect("the peer does not count as dead yet");
    // After an arrival, the silence counts from the next call of `handle_timeout`.
    server.handle_immediate(1, 1).expect("the window has room");
    server.handle_timeout(now + 38 * second).expect("the peer does not count as dead yet");
    server.handle_timeout(now + 67 * second).expect("the peer does not count as dead yet");
    assert_eq!(server.poll_timeout(), Some(now + 68 * second));
    assert_eq!(server.handle_timeout(now + 68 * second), Err(dead));

    // If all keepalives are acknowledged, the peer is never dead.
    let mut server = open(Role::Server, Config::default(), now);
    server.handle_timeout(now + 3 * second).expect("the peer does not count as dead yet");
    server.poll_message().expect("a keepalive");
    server.handle_message_sent();
    server.handle_timeout(now + 3600 * second).expect("the peer does not count as dead yet");
}

#[test]
fn client_sends_no_keepalives() {
    let now = Instant::now();
    let mut client = open(Role::Client, Config::default(), now);
    assert_eq!(client.poll_timeout(), None);
    client.handle_timeout(now + Duration::from_secs(100)).expect("nothing is due");
    client.handle_message(&Message::Keepalive.encode()).expect("the message is ignored");
    assert_eq!((client.poll_message(), client.stats().keepalives_received), (None, 1));
}

#[test]
fn server_answers_feature_questions() {
    let now = Instant::now();
    let mut server = open(Role::Server, Config { features: 5, ..Config::default() }, now);
    let question = Message::GetServerFeature { select: 7, features: 0 }.encode();
    server.handle_message(&question).expect("a question is legal");
    server
        .handle_message(&Message::SetClientFeature { select: 0, features: 3 }.encode())
        .expect("a feature message is legal");
    assert_eq!(
        server.poll_message(),
        Some(Message::GetServerFeature { select: 7, features: 5 }.encode())
    );
    assert_eq!((server.poll_message(), server.stats().features_received), (None, 2));

    for _ in 0..FEATURES_WAITING {
        server.handle_message(&question).expect("there is room for the answer");
    }
    let too_many = ProtocolError::TooManyFeatureRequests { requests: FEATURES_WAITING + 1 };
    assert_eq!(server.handle_message(&question), Err(too_many));
}

#[test]
fn client_rejects_features_that_it_did_not_request() {
    let mut client = open(Role::Client, Config::default(), Instant::now());
    client
        .handle_message(&Message::SetClientFeature { select: 0, features: 1 }.encode())
        .expect("the message is ignored");
    let answer = Message::GetServerFeature { select: 0, features: 9 }.encode();
    assert_eq!(client.handle_message(&answer), Err(ProtocolError::UnrequestedFeatures));
}

#[test]
fn client_waits_for_an_arrival_from_the_server() {
    let now = Instant::now();
    let config = Config { max_unseen: Some(3), ..Config::default() };
    let mut client = ready(Role::Client, config.clone(), now);
    for _ in 0..3 {
        client.write_plan(1).expect("below the limit");
        client.handle_writes_sent(1); // the local completion is not an arrival
    }
    assert_eq!((client.write_plan(1), client.writable()), (None, 0));
    assert_eq!(client.stats().stalled_by_silence, 1);
    client.handle_message(&Message::Keepalive.encode()).expect("the arrival is legal");
    assert_eq!(client.writable(), 5);

    let mut server = ready(Role::Server, config, now);
    for _ in 0..8 {
        server.write_plan(1).expect("servers do not wait");
    }
}

#[test]
fn writes_wait_for_completions_and_for_the_window() {
    let now = Instant::now();
    let config = Config { max_writes_in_flight: 2, max_write: 3, ..Config::default() };
    let mut server = ready(Role::Server, config, now);
    assert_eq!(server.write_plan(100).map(|write| write.len), Some(3));
    assert_eq!(server.write_plan(1).map(|write| write.len), Some(1));
    assert_eq!(server.write_plan(1), None);
    server.handle_writes_sent(2);
    assert_eq!(server.write_plan(0), None);
    assert_eq!(server.write_plan(100).map(|write| write.len), Some(3));
    assert_eq!(server.write_plan(100).map(|write| write.len), Some(1));
    server.handle_writes_sent(1);
    assert_eq!(server.write_plan(100), None);
    let stats = server.stats();
    assert_eq!((stats.stalled_by_completions, stats.stalled_by_window), (1, 1));
    assert_eq!((stats.writes, stats.bytes_written), (4, 8));
    server
        .handle_message(&Message::RegisterXferMemory(THEIRS).encode())
        .expect("a full window may be announced again");
    assert_eq!(server.write_plan(100).map(|write| write.remote_addr), Some(0x9000));
}

#[test]
fn messages_in_flight_are_bounded() {
    let now = Instant::now();
    let mut server = open(Role::Server, Config::default(), now);
    let question = Message::GetServerFeature { select: 7, features: 0 }.encode();
    for _ in 0..MESSAGES_IN_FLIGHT {
        server.handle_message(&question).expect("there is room for the answer");
        server.poll_message().expect("the answer");
    }
    server.handle_message(&question).expect("the answer waits");
    assert_eq!(server.poll_message(), None);
    server.handle_message_sent();
    assert!(server.poll_message().is_some());
}

#[test]
fn every_counter_is_updated() {
    let now = Instant::now();
    let config = Config {
        max_writes_in_flight: 2,
        max_unseen: Some(3),
        max_keepalives: 1,
        ..Config::default()
    };
    let mut server = ready(Role::Server, config.clone(), now);
    for round in 1..=2 {
        server
            .handle_timeout(now + round * config.keepalive_interval)
            .expect("the peer does not count as dead yet");
    }
    server.poll_message().expect("a keepalive");
    let mut client = ready(Role::Client, config, now);
    client.handle_message(&Message::Keepalive.encode()).expect("the message is ignored");
    client
        .handle_message(&Message::SetClientFeature { select: 0, features: 0 }.encode())
        .expect("the message is ignored");
    client.handle_immediate(2, 2).expect("the window has room");
    client.consume(1);
    for (available, sent) in [(1, 0), (1, 0), (1, 2), (1, 1), (1, 0)] {
        client.write_plan(available);
        client.handle_writes_sent(sent);
    }
    client.handle_immediate(0, 0).expect("the arrival is legal");
    client.write_plan(100).expect("a write of the remaining bytes");
    client.write_plan(100);

    let server = server.stats();
    assert_eq!(
        (server.keepalives_sent, server.keepalives_skipped, server.messages_sent),
        (1, 1, 2)
    );
    let counted = Stats {
        messages_sent: 1,
        messages_received: 3,
        registrations_sent: 1,
        registrations_received: 1,
        keepalives_sent: 0,
        keepalives_skipped: 0,
        keepalives_received: 1,
        features_received: 1,
        writes: 4,
        bytes_written: 8,
        immediates: 2,
        bytes_received: 2,
        bytes_consumed: 1,
        stalled_by_window: 1,
        stalled_by_completions: 1,
        stalled_by_silence: 1,
    };
    assert_eq!(client.stats(), counted);
}
