//! An endpoint whose peer and driver act as the input bytes say, compared with a model that knows
//! only the rules of the windows.
//!
//! ```text
//!   first byte  role, limits; the second is the length of our window
//!   a step      low 4 bits of a byte; its other bits and the following bytes are arguments
//!   0           the connection is established
//!   1           a message of any bytes: their number; the bytes
//!   2           a well-formed message: opcode; select, features
//!   3           a registration: length; possibly an address near the end of the address space
//!   4           immediate data: its value; the number of written bytes
//!   5           any immediate data
//!   6           the reader consumes
//!   7           the application writes
//!   8           messages are polled and posted
//!   9           a message has completed, if one is in flight
//!   10          writes have completed
//!   11          time passes
//!   13          the application closes
//!   others      nothing
//! ```

use std::time::{Duration, Instant};

use ferrite_proto::endpoint::MESSAGES_IN_FLIGHT;
use ferrite_proto::{Config, Endpoint, Message, ProtocolError, Registration, Role};

use super::input::Input;

const PEER_LIMIT: u32 = 200;

/// Checks that writes stay within the window that the peer registered, and that reads return only
/// received bytes. Only violations of the protocol, a dead client or the application may end the
/// connection.
pub fn valkey_endpoint(bytes: &[u8]) {
    let mut input = Input(bytes);
    let (first, length) = (input.byte(), u32::from(input.byte()) + 1);
    let role = if first & 1 == 0 { Role::Client } else { Role::Server };
    let config = Config {
        max_peer_window: PEER_LIMIT,
        max_write: u32::from(first >> 1 & 7) * 10 + 1,
        max_writes_in_flight: 3,
        max_unseen: (first & 16 != 0).then_some(4),
        features: 5,
        ..Config::default()
    };
    let memory = Registration { addr: 0x4000, length, rkey: 9 };
    let endpoint = Endpoint::new(role, config.clone(), memory).expect("valid configuration");
    let mut harness =
        Harness { endpoint, config, memory, now: Instant::now(), model: Model::default() };
    while !input.0.is_empty() {
        harness.step(&mut input);
        harness.check();
    }
}

struct Harness {
    endpoint: Endpoint,
    config: Config,
    memory: Registration,
    now: Instant,
    model: Model,
}

/// The rules of the windows, in their shortest form.
#[derive(Default)]
struct Model {
    established: bool,
    ended: Option<Option<ProtocolError>>,
    theirs: Option<Registration>,
    written: u32,
    announced: bool,
    filled: u32,
    consumed: u32,
    messages: usize,
    writes: u32,
    since_received: u32,
}

impl Harness {
    fn step(&mut self, input: &mut Input<'_>) {
        let (step, more) = input.step();
        match step {
            0 => {
                let result = self.endpoint.handle_established(self.now);
                self.outcome(result, Some(true));
                self.model.established = true;
            }
            1 => {
                let len = input.byte().min(40).into();
                let message = input.take(len).to_vec();
                self.message(&message);
            }
            2 => {
                let (select, features) = (input.byte().into(), input.byte().into());
                self.message(&match more % 3 {
                    0 => Message::GetServerFeature { select, features }.encode(),
                    1 => Message::SetClientFeature { select, features }.encode(),
                    _ => Message::Keepalive.encode(),
                });
            }
            3 => {
                let length = u32::from(input.byte()) + u32::from(more & 1) * 2;
                let addr = if more & 2 == 0 { 0x9000 } else { u64::MAX - u64::from(input.byte()) };
                self.message(
                    &Message::RegisterXferMemory(Registration { addr, length, rkey: more.into() })
                        .encode(),
                );
            }
            4 => {
                let (immediate, byte_len) = (u32::from(input.byte()), u32::from(input.byte()));
                self.immediate(immediate, if more & 1 == 0 { immediate } else { byte_len });
            }
            5 => {
                let (immediate, byte_len) = (input.word(), input.word());
                self.immediate(immediate, byte_len);
            }
            6 => self.consume(input.byte().into()),
            7 => self.write(input.byte().into()),
            8 => self.poll(),
            9 if self.model.messages > 0 => {
                self.endpoint.handle_message_sent();
                self.model.messages -= 1;
            }
            10 => {
                let count = self.model.writes.min(more.into());
                self.endpoint.handle_writes_sent(count);
                self.model.writes -= count;
            }
            11 => {
                self.now += Duration::from_millis(u64::from(input.byte()) * 100);
                let result = self.endpoint.handle_timeout(self.now);
                assert!(
                    !matches!(result, Err(ProtocolError::Dead { .. }))
                        || self.endpoint.role() == Role::Server
                );
                self.outcome(result, None);
            }
            13 => {
                self.endpoint.close();
                self.model.ended.get_or_insert(None);
            }
            _ => {}
        }
    }

    fn message(&mut self, bytes: &[u8]) {
        let model = &mut self.model;
        let is_valid = match Message::decode(bytes) {
            Err(_) => Some(false),
            Ok(Message::Keepalive | Message::SetClientFeature { .. }) => Some(true),
            // The model does not know the result, because too many requests at a time are an error.
            Ok(Message::GetServerFeature { .. }) if self.endpoint.role() == Role::Server => None,
            Ok(Message::GetServerFeature { .. }) => Some(false),
            Ok(Message::RegisterXferMemory(new)) => {
                let due = model
                    .theirs
                    .is_none_or(|old| model.written == 0 || model.written == old.length);
                let fits = (1..=PEER_LIMIT).contains(&new.length)
                    && u128::from(new.addr) + u128::from(new.length) <= 1 << 64;
                if due && fits && model.ended.is_none() {
                    (model.theirs, model.written) = (Some(new), 0);
                }
                Some(due && fits)
            }
        };
        let result = self.endpoint.handle_message(bytes);
        self.model.since_received = 0;
        self.outcome(result, is_valid);
    }

    fn immediate(&mut self, immediate: u32, byte_len: u32) {
        let model = &mut self.model;
        let room = if model.announced { self.memory.length - model.filled } else { 0 };
        let is_valid = immediate <= room && byte_len <= immediate;
        if is_valid && model.ended.is_none() {
            model.filled += immediate;
        }
        let result = self.endpoint.handle_immediate(immediate, byte_len);
        self.model.since_received = 0;
        self.outcome(result, Some(is_valid));
    }

    fn consume(&mut self, bytes: u32) {
        let model = &mut self.model;
        let bytes = bytes.min(model.filled - model.consumed);
        self.endpoint.consume(bytes);
        model.consumed += bytes;
        if model.consumed == self.memory.length {
            (model.announced, model.filled, model.consumed) = (false, 0, 0);
        }
    }

    fn write(&mut self, available: usize) {
        let writable = self.endpoint.writable();
        let Some(write) = self.endpoint.write_plan(available) else {
            return assert!(available == 0 || writable == 0);
        };
        let model = &mut self.model;
        let theirs = model.theirs.expect("the peer's registration");
        assert!(model.established && model.ended.is_none());
        assert_eq!((write.rkey, write.immediate), (theirs.rkey, write.len));
        assert_eq!(write.remote_addr, theirs.addr + u64::from(model.written));
        assert!(write.len > 0 && write.len as usize <= available && write.len <= writable);
        model.written += write.len;
        model.writes += 1;
        model.since_received += 1;
        assert!(model.written <= theirs.length && model.writes <= self.config.max_writes_in_flight);
        let limit = self.config.max_unseen.filter(|_| self.endpoint.role() == Role::Client);
        assert!(limit.is_none_or(|limit| model.since_received <= limit));
    }

    fn poll(&mut self) {
        while let Some(bytes) = self.endpoint.poll_message() {
            let (model, role) = (&mut self.model, self.endpoint.role());
            assert!(model.established && model.ended.is_none());
            model.messages += 1;
            model.since_received += 1;
            assert!(model.messages <= MESSAGES_IN_FLIGHT);
            match Message::decode(&bytes).expect("our own message") {
                Message::RegisterXferMemory(memory) => {
                    assert_eq!(memory, self.memory);
                    assert!(
                        !model.announced && model.filled == 0,
                        "a window is announced only when it is used up"
                    );
                    model.announced = true;
                }
                Message::Keepalive => assert_eq!(role, Role::Server),
                Message::GetServerFeature { features, .. } => {
                    assert_eq!(
                        features,
                        if role == Role::Server { self.config.features } else { 0 }
                    );
                }
                Message::SetClientFeature { .. } => assert_eq!(role, Role::Client),
            }
        }
    }

    /// Checks that the result is the one that the model expects, if the model knows it.
    fn outcome(&mut self, result: Result<(), ProtocolError>, is_valid: Option<bool>) {
        match self.model.ended {
            Some(Some(error)) => assert_eq!(result, Err(error), "an error is final"),
            Some(None) => assert_eq!(result, Ok(()), "after a close, everything is accepted"),
            None => {
                assert!(is_valid.is_none_or(|is_valid| result.is_ok() == is_valid), "{result:?}");
                self.model.ended = result.err().map(Some);
            }
        }
    }

    fn check(&self) {
        let (endpoint, model) = (&self.endpoint, &self.model);
        assert_eq!(endpoint.readable(), model.consumed..model.filled);
        assert_eq!(endpoint.is_closed(), model.ended.is_some());
        assert_eq!(endpoint.error(), model.ended.flatten());
        assert_eq!(endpoint.peer_window(), model.theirs);
        let timer = endpoint.role() == Role::Server && model.established && model.ended.is_none();
        assert_eq!(endpoint.poll_timeout().is_some(), timer);
        if let Some(error) = endpoint.error() {
            assert!(!error.to_string().is_empty());
        }
    }
}
