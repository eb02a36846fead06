//! The rules of Valkey's protocol, written a second time, as far as a stream's peer and its
//! application see them.

use std::collections::VecDeque;

use ferrite_proto::{Message, Registration, Role};

use super::{PEER_WINDOW_MAX, WINDOW};

/// Questions about features that may come at a time: all are answered when the stream has looked.
const QUESTIONS_MAX: usize = 16;

/// Messages that may come before the stream looks: the fabric keeps no more, and hangs up.
const UNTAKEN_MAX: usize = 1024;

/// Whether it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    None,
    /// The peer broke a rule.
    Broken,
    /// The model does not say how it went on.
    Unknown,
}

/// What came, and was not looked at yet.
enum Event {
    Message(Vec<u8>, bool),
    /// What the peer said it wrote, and what it did.
    Told(u64, u64),
    Violation,
}

pub(super) struct Model {
    role: Role,
    pub(super) ending: Ending,
    events: VecDeque<Event>,
    /// The stream's window as it is, where the peer goes on by what it knows, and where the stream
    /// is.
    window: Vec<u8>,
    due_at: u32,
    announced: bool,
    filled: u32,
    consumed: u32,
    /// The peer's window, whether it has it, and how much of it is written.
    theirs: Option<(Registration, bool)>,
    written: u32,
    /// Writes that the peer was not told of yet.
    under_way: VecDeque<(Registration, u32, Vec<u8>)>,
    questions: usize,
}

impl Model {
    pub(super) fn new(role: Role) -> Self {
        Self {
            role,
            ending: Ending::None,
            events: VecDeque::new(),
            window: vec![0; WINDOW as usize],
            due_at: 0,
            announced: false,
            filled: 0,
            consumed: 0,
            theirs: None,
            written: 0,
            under_way: VecDeque::new(),
            questions: 0,
        }
    }

    /// Whether everything that came was looked at.
    pub(super) fn is_quiet(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether the fabric has hung up on the peer already, though the stream has not heard of it.
    pub(super) fn is_hung_up(&self) -> bool {
        matches!(self.events.back(), Some(Event::Violation))
    }

    /// Where a peer that keeps to the rules goes on.
    pub(super) fn due_at(&self) -> u32 {
        self.due_at.min(WINDOW)
    }

    /// The peer writes to the window.
    pub(super) fn wrote(&mut self, at: u32, bytes: &[u8], told: Option<u32>) {
        let at = at as usize;
        let Some(part) = self.window.get_mut(at..at + bytes.len()) else {
            self.ending = Ending::Unknown; // the device refuses it
            return;
        };
        part.copy_from_slice(bytes);
        let Some(told) = told else { return };
        self.due_at = self.due_at.saturating_add(told);
        if let Some(Event::Told(sum, written)) = self.events.back_mut() {
            *sum += u64::from(told);
            *written += bytes.len() as u64;
        } else {
            self.events.push_back(Event::Told(told.into(), bytes.len() as u64));
        }
    }

    /// The peer sends a message; whether the memory that it may register is its own.
    pub(super) fn message(&mut self, bytes: &[u8], is_real: bool) {
        let untaken =
            self.events.iter().filter(|event| matches!(event, Event::Message(..))).count();
        if untaken == UNTAKEN_MAX {
            return self.violation();
        }
        self.events.push_back(Event::Message(bytes.to_vec(), is_real));
    }

    /// The peer does what nobody may do.
    pub(super) fn violation(&mut self) {
        self.events.push_back(Event::Violation);
    }

    /// The stream looks at what came.
    pub(super) fn drive(&mut self) {
        self.questions = 0;
        while let Some(event) = self.events.pop_front() {
            let good = match event {
                Event::Message(bytes, is_real) => self.take(&bytes, is_real),
                Event::Told(sum, written) => {
                    let room = if self.announced { WINDOW - self.filled } else { 0 };
                    let good = sum <= room.into() && written <= sum;
                    self.filled += if good { sum as u32 } else { 0 };
                    good
                }
                Event::Violation => false,
            };
            if !good {
                self.ending = Ending::Broken;
                self.events.clear();
            }
        }
    }

    fn take(&mut self, bytes: &[u8], is_real: bool) -> bool {
        match Message::decode(bytes) {
            Err(_) => false,
            Ok(Message::Keepalive | Message::SetClientFeature { .. }) => true,
            Ok(Message::GetServerFeature { .. }) => {
                self.questions += 1;
                self.role == Role::Server && self.questions <= QUESTIONS_MAX
            }
            Ok(Message::RegisterXferMemory(memory)) => {
                let due = self
                    .theirs
                    .is_none_or(|(before, _)| self.written == 0 || self.written == before.length);
                let fits = (1..=PEER_WINDOW_MAX).contains(&memory.length)
                    && u128::from(memory.addr) + u128::from(memory.length) <= 1 << 64;
                if due && fits {
                    (self.theirs, self.written) = (Some((memory, is_real)), 0);
                }
                due && fits
            }
        }
    }

    /// What the application reads.
    pub(super) fn read(&mut self, count: usize) -> Vec<u8> {
        let end = self.filled.min(self.consumed + count as u32);
        let bytes = self.window[self.consumed as usize..end as usize].to_vec();
        self.consumed = end;
        if self.consumed == WINDOW {
            (self.announced, self.filled, self.consumed) = (false, 0, 0);
        }
        bytes
    }

    /// How much the application may write.
    pub(super) fn writable(&self) -> usize {
        self.theirs.map_or(0, |(theirs, _)| theirs.length - self.written) as usize
    }

    pub(super) fn application_wrote(&mut self, bytes: &[u8]) {
        let (memory, is_real) = self.theirs.expect("a window");
        if is_real {
            self.under_way.push_back((memory, self.written, bytes.to_vec()));
        } else {
            self.ending = Ending::Unknown; // the peer's device refuses it
        }
        self.written += bytes.len() as u32;
    }

    /// The peer was told of a write: of which, to which memory, from where on.
    pub(super) fn told(&mut self, imm: u32, byte_len: u32) -> (Registration, u32, Vec<u8>) {
        let write = self.under_way.pop_front().expect("nobody wrote");
        assert_eq!((imm, byte_len), (write.2.len() as u32, imm));
        write
    }

    /// The peer heard a message.
    pub(super) fn heard(&mut self, message: &Message) {
        match message {
            Message::RegisterXferMemory(memory) => {
                assert_eq!(memory.length, WINDOW);
                assert!(!self.announced && self.filled == 0, "only a window that is used up");
                self.announced = true;
                self.due_at = 0;
            }
            Message::Keepalive | Message::GetServerFeature { .. } => {
                assert_eq!(self.role, Role::Server)
            }
            Message::SetClientFeature { .. } => panic!("nobody asked for that"),
        }
    }
}
