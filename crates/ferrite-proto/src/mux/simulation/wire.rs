//! Virtual time, and one direction of a link: the frames of three channels take turns, as in the
//! link core's outbox. Messages of a channel stay in order; those of different channels do not.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferrite_testkit::Random;

use crate::mux::Class;

/// Virtual time.
pub(super) struct Clock {
    begun: Instant,
    micros: u64,
}

/// The longest step of the clock.
pub(super) const STEP_MICROS: u64 = 400;

impl Clock {
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), micros: 0 }
    }

    pub(super) fn now(&self) -> Instant {
        self.begun + Duration::from_micros(self.micros)
    }

    pub(super) fn micros(&self) -> u64 {
        self.micros
    }

    /// Advances the clock by a random step, shorter than [`STEP_MICROS`].
    pub(super) fn advance(&mut self, random: &mut Random) {
        self.micros += random.below(STEP_MICROS);
    }
}

#[derive(Debug, Clone)]
struct Message {
    bytes: Vec<u8>,
    sent: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Wire {
    /// Bytes per millisecond.
    rate: u64,
    latency_micros: u64,
    segment_bytes: usize,
    channels: [VecDeque<Message>; Class::ALL.len()],
    turn: usize,
    /// When the frame that is being sent ends.
    free_at_nanos: u64,
    /// Complete messages, with the time of their arrival.
    arriving: VecDeque<(u64, u16, Vec<u8>)>,
    /// Acknowledgements of messages, with the time at which the sender receives them.
    acknowledged: VecDeque<(u64, Class)>,
}

impl Wire {
    pub(super) fn new(random: &mut Random) -> Self {
        Self {
            rate: [1 << 10, 100 << 10, 10 << 20][random.index(3)],
            latency_micros: [5, 50, 2000][random.index(3)],
            segment_bytes: [256, 1024, 8 << 10][random.index(3)],
            channels: Default::default(),
            turn: 0,
            free_at_nanos: 0,
            arriving: VecDeque::new(),
            acknowledged: VecDeque::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.arriving.is_empty()
            && self.acknowledged.is_empty()
            && self.channels.iter().all(VecDeque::is_empty)
    }

    /// Returns the most that a message of `bytes` on an otherwise empty channel takes, however busy
    /// the other channels are.
    pub(super) fn most_micros(&self, bytes: usize) -> u64 {
        let frames = bytes.div_ceil(self.segment_bytes) as u64;
        let all = bytes as u64 + (2 * frames + 1) * self.segment_bytes as u64;
        self.latency_micros + all * 1000 / self.rate + 1
    }

    pub(super) fn round_trip_micros(&self) -> u64 {
        2 * self.latency_micros
    }

    pub(super) fn post(&mut self, class: Class, bytes: Vec<u8>, clock: &Clock) {
        if self.channels.iter().all(VecDeque::is_empty) {
            self.free_at_nanos = self.free_at_nanos.max(clock.micros * 1000);
        }
        self.channels[usize::from(class.channel())].push_back(Message { bytes, sent: 0 });
    }

    pub(super) fn block(&mut self, clock: &Clock, micros: u64) {
        self.free_at_nanos = self.free_at_nanos.max((clock.micros + micros) * 1000);
    }

    /// Sends the frames that the wire can send up to the current time.
    pub(super) fn advance(&mut self, clock: &Clock) {
        while self.free_at_nanos < clock.micros * 1000 {
            let Some(at) = (0..Class::ALL.len())
                .map(|skipped| (self.turn + skipped) % Class::ALL.len())
                .find(|at| !self.channels[*at].is_empty())
            else {
                return;
            };
            self.turn = at + 1;
            let queue = &mut self.channels[at];
            let Some(message) = queue.front_mut() else { return };
            let frame = self.segment_bytes.min(message.bytes.len() - message.sent);
            message.sent += frame;
            self.free_at_nanos += frame as u64 * 1_000_000 / self.rate;
            if message.sent == message.bytes.len()
                && let Some(Message { bytes, .. }) = queue.pop_front()
            {
                let arrival = self.free_at_nanos / 1000 + self.latency_micros;
                self.arriving.push_back((arrival, at as u16, bytes));
                self.acknowledged.push_back((arrival + self.latency_micros, Class::ALL[at]));
            }
        }
    }

    pub(super) fn arrived(&mut self, clock: &Clock) -> Option<(u16, Vec<u8>)> {
        let (at, ..) = self.arriving.front()?;
        if *at > clock.micros {
            return None;
        }
        self.arriving.pop_front().map(|(_, channel, bytes)| (channel, bytes))
    }

    pub(super) fn sent(&mut self, clock: &Clock) -> Option<Class> {
        let (at, _) = self.acknowledged.front()?;
        if *at > clock.micros {
            return None;
        }
        self.acknowledged.pop_front().map(|(_, class)| class)
    }
}
