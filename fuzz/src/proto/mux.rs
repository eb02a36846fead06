//! A multiplexer whose peer and driver act as the input bytes say, and its decoder alone.
//!
//! ```text
//!   first byte  which side; the second decides how much is read
//!   a step      low 4 bits of a byte; its other bits and the following bytes are arguments
//!   0           a message of any bytes: channel; their number; the bytes
//!   1           OPEN: class and opener in the argument; number
//!   2           DATA: stream; length; a change of class
//!   3           GRANT: stream; bytes
//!   4           FIN: stream              5   RESET: stream              6   GOAWAY: stream
//!   7           this side opens a stream
//!   8           a message of each class is packed
//!   9           time passes
//!   10          this side resets a stream
//!   11          held bytes are read
//!   12          this side accepts no further streams
//!   others      nothing
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ferrite_proto::mux::{
    Cause, Class, Config, Control, DataHead, Decoded, Decoder, Filled, Mux, MuxError, Received,
    Route, Side, StreamId,
};

use super::input::Input;

fn config() -> Config {
    Config {
        window: 100,
        turn_bytes: 40,
        message_bytes: 300,
        max_streams: 5,
        bus_streams: 1,
        max_refused: 10,
        opens_per_second: 20,
        max_held_bytes: 250,
        bulk_bytes_per_second: 150,
        ..Config::default()
    }
}

/// Checks that records are found at the same places, however a message is divided, and that their
/// encoding decodes to the same record.
pub fn mux_records(bytes: &[u8]) {
    let mut whole = Vec::new();
    let result = decode(bytes, bytes.len().max(1), &mut whole);
    for size in [1, 7] {
        let mut pieces = Vec::new();
        assert_eq!(decode(bytes, size, &mut pieces), result);
        assert_eq!(pieces, whole);
    }
}

/// Decodes a message in pieces of `size`, and appends what was found to `found`: records in their
/// encoding, and the bytes of streams.
fn decode(
    bytes: &[u8],
    size: usize,
    found: &mut Vec<u8>,
) -> Result<(), ferrite_proto::mux::RecordError> {
    let mut decoder = Decoder::default();
    for mut piece in bytes.chunks(size) {
        while let Some(decoded) = decoder.next(&mut piece)? {
            match decoded {
                Decoded::Data(head) => found.extend_from_slice(&head.encode()),
                Decoded::Bytes(bytes) => found.extend_from_slice(bytes),
                Decoded::Control(control) => {
                    let encoded = control.encode();
                    found.extend_from_slice(&encoded);
                    let (mut again, mut piece) = (Decoder::default(), &encoded[..]);
                    assert_eq!(again.next(&mut piece), Ok(Some(Decoded::Control(control))));
                }
            }
        }
    }
    decoder.end_message()
}

/// Checks that whatever a peer sends, limits hold, an error is final, and the bytes of a stream
/// stay within its credit.
pub fn mux(bytes: &[u8]) {
    let mut input = Input(bytes);
    let (first, read) = (input.byte(), input.byte());
    let side = if first & 1 == 0 { Side::Caller } else { Side::Called };
    let mux = Mux::new(side, config()).expect("valid limits");
    let held = BTreeMap::new();
    let mut harness = Harness { mux, side, read, now: Instant::now(), held, error: None };
    while !input.0.is_empty() {
        harness.step(&mut input);
        harness.check();
    }
}

struct Harness {
    mux: Mux,
    side: Side,
    /// How many bytes of each piece are read at once.
    read: u8,
    now: Instant,
    /// The bytes of each stream that are not read.
    held: BTreeMap<StreamId, u32>,
    error: Option<MuxError>,
}

impl Harness {
    fn step(&mut self, input: &mut Input<'_>) {
        let (step, more) = input.step();
        let channel = u16::from(more & 3);
        match step {
            0 => {
                let len = input.byte().into();
                let message = input.take(len).to_vec();
                self.receive(channel, &message);
            }
            1 => {
                if let Some(stream) = stream(input) {
                    self.receive(channel, &Control::Open { stream, route: route() }.encode());
                }
            }
            2 => {
                let (Some(stream), length) = (stream(input), u32::from(input.byte())) else {
                    return;
                };
                let next_class =
                    if more & 4 == 0 { None } else { Class::from_channel(u16::from(more >> 3)) };
                let mut message = DataHead { stream, length, next_class }.encode().to_vec();
                message.resize(message.len() + length as usize, 7);
                self.receive(channel, &message);
            }
            3 => {
                let (Some(stream), bytes) = (stream(input), u32::from(input.byte())) else {
                    return;
                };
                let bytes = if more & 4 == 0 { bytes } else { bytes << 24 };
                let answers_move = more & 8 != 0;
                self.receive(channel, &Control::Grant { stream, bytes, answers_move }.encode());
            }
            4..=6 => {
                let stream = stream(input);
                let record = match (step, stream) {
                    (6, last) => Control::GoAway { last },
                    (_, None) => return,
                    (4, Some(stream)) => Control::Fin { stream },
                    (_, Some(stream)) => Control::Reset { stream, cause: Cause::REFUSED },
                };
                self.receive(channel, &record.encode());
            }
            7 => {
                let class = Class::from_channel(channel).unwrap_or(Class::Bulk);
                if let Ok(stream) = self.mux.open(class, route()) {
                    self.held.insert(stream, 0);
                    self.mux.set_ready(stream);
                }
            }
            8 => Class::ALL.into_iter().for_each(|class| self.send(class, more)),
            9 => self.now += Duration::from_millis(u64::from(input.byte()) * 10),
            10 => {
                if let Some(stream) = self.pick(more) {
                    self.mux.reset(stream, Cause::CONNECTION_LOST);
                    self.held.remove(&stream);
                    assert!(!self.mux.is_live(stream));
                }
            }
            11 => {
                if let Some(stream) = self.pick(more) {
                    let bytes = self.held.get_mut(&stream).map_or(0, std::mem::take);
                    self.mux.consume(stream, bytes);
                    self.mux.set_ready(stream);
                }
            }
            12 => self.mux.go_away(),
            _ => {}
        }
    }

    fn pick(&self, number: u8) -> Option<StreamId> {
        self.held.keys().nth(usize::from(number)).copied()
    }

    fn receive(&mut self, channel: u16, message: &[u8]) {
        let result = self.feed(channel, message);
        if let Some(error) = self.error {
            assert_eq!(result, Err(error), "an error is final");
        }
        self.error = result.err();
        self.poll_ended();
    }

    fn feed(&mut self, channel: u16, message: &[u8]) -> Result<(), MuxError> {
        let mut piece = message;
        while let Some(received) = self.mux.handle_piece(channel, &mut piece, self.now)? {
            match received {
                Received::Opened { stream, route: to } => {
                    assert_eq!(
                        (stream.opener(), to.destination.port() > 0),
                        (self.side.other(), true)
                    );
                    assert_eq!(self.held.insert(stream, 0), None, "a stream was opened twice");
                }
                Received::Data { stream, bytes } => {
                    let held = self.held.get_mut(&stream).expect("a live stream");
                    let read = bytes.len().min(self.read.into());
                    *held += (bytes.len() - read) as u32;
                    assert!(*held <= config().window);
                    self.mux.consume(stream, read as u32);
                }
                Received::Fin { stream } => assert!(self.held.contains_key(&stream)),
            }
            self.poll_ended();
        }
        self.mux.handle_message_end()
    }

    fn poll_ended(&mut self) {
        while let Some(ended) = self.mux.poll_ended() {
            assert!(
                self.held.remove(&ended.stream).is_some(),
                "the end of a stream must be reported once"
            );
            assert!(!self.mux.is_live(ended.stream));
        }
    }

    fn send(&mut self, class: Class, more: u8) {
        let mut out = [0; 300];
        let (mux, now) = (&mut self.mux, self.now);
        let len = mux.poll_message(class, &mut out, now, |stream, room| {
            assert!(self.held.contains_key(&stream) && !room.is_empty());
            match more {
                14 => Filled::End,
                15 => {
                    self.held.remove(&stream);
                    Filled::Failed(Cause::CONNECTION_LOST)
                }
                more => {
                    Filled::Bytes { len: room.len().min(usize::from(more) * 5), is_more: false }
                }
            }
        });
        if let Some(len) = len {
            assert!(self.error.is_none() && len > 0);
            mux_records(&out[..len]);
            mux.handle_sent(class);
        }
        self.poll_ended();
    }

    fn check(&self) {
        let held: u32 = self.held.values().sum();
        assert_eq!(u64::from(held), self.mux.held_bytes());
        assert!(self.mux.held_bytes() <= config().max_held_bytes);
        assert!(self.mux.streams() <= 2 * config().max_streams);
        assert_eq!(self.mux.streams(), self.held.len());
        assert_eq!(self.mux.error(), self.error);
    }
}

/// Reads the name of a stream: opener and class in 3 bits, a small number in the others.
fn stream(input: &mut Input<'_>) -> Option<StreamId> {
    StreamId::from_wire(input.byte().into())
}

fn route() -> Route {
    let address = "10.0.0.1:7".parse().expect("an address");
    Route { destination: address, source: address }
}
