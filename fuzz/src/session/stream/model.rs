//! A second implementation of the rules of Valkey's protocol, as far as a stream's peer and its
//! application see them.

use std::collections::VecDeque;

use ferrite_proto::{Message, Registration, Role};

use super::{PEER_WINDOW_MAX, WINDOW};

/// Maximum number of feature requests between two runs of the driver. Each run answers all
/// requests.
const FEATURE_REQUESTS_MAX: usize = 16;

/// Maximum number of messages that may arrive before the driver runs. The fabric keeps no more, and
/// disconnects the peer.
const UNTAKEN_MAX: usize = 1024;

/// Whether and how the connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    None,
    /// The peer violated the protocol.
    Broken,
    /// The model does not know what happens next.
    Unknown,
}

/// Something that arrived but was not handled yet.
enum Event {
    Message(Vec<u8>, bool),
    /// Writes with immediate data: the sum of the announced bytes, and the sum of the written
    /// bytes.
    Written(u64, u64),
    Violation,
}

pub(super) struct Model {
    role: Role,
    pub(super) ending: Ending,
    events: VecDeque<Event>,
    /// The content of the stream's window.
    window: Vec<u8>,
    /// The offset at which an honest peer continues to write.
    due_at: u32,
    /// The state of the stream's window.
    announced: bool,
    filled: u32,
    consumed: u32,
    /// The peer's window, and whether the peer really has that memory.
    theirs: Option<(Registration, bool)>,
    /// Number of bytes that were written to the peer's window.
    written: u32,
    /// Writes that the peer was not notified of yet.
    unannounced: VecDeque<(Registration, u32, Vec<u8>)>,
    feature_requests: usize,
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
            unannounced: VecDeque::new(),
            feature_requests: 0,
        }
    }

    /// Returns whether everything that arrived was handled.
    pub(super) fn is_quiet(&self) -> bool {
        self.events.is_empty()
    }

    /// Returns whether the fabric has already disconnected the peer. The stream may not know this
    /// yet.
    pub(super) fn is_disconnected(&self) -> bool {
        matches!(self.events.back(), Some(Event::Violation))
    }

    /// Returns the offset at which an honest peer continues to write.
    pub(super) fn due_at(&self) -> u32 {
        self.due_at.min(WINDOW)
    }

    /// Records that the peer writes to the window.
    pub(super) fn wrote(&mut self, at: u32, bytes: &[u8], imm: Option<u32>) {
        let at = at as usize;
        let Some(part) = self.window.get_mut(at..at + bytes.len()) else {
            self.ending = Ending::Unknown; // the device refuses the write
            return;
        };
        part.copy_from_slice(bytes);
        let Some(imm) = imm else { return };
        self.due_at = self.due_at.saturating_add(imm);
        if let Some(Event::Written(sum, written)) = self.events.back_mut() {
            *sum += u64::from(imm);
            *written += bytes.len() as u64;
        } else {
            self.events.push_back(Event::Written(imm.into(), bytes.len() as u64));
        }
    }

    /// Records that the peer sends a message. `is_real` tells whether memory that the peer
    /// registers is its own.
    pub(super) fn message(&mut self, bytes: &[u8], is_real: bool) {
        let untaken =
            self.events.iter().filter(|event| matches!(event, Event::Message(..))).count();
        if untaken == UNTAKEN_MAX {
            return self.violation();
        }
        self.events.push_back(Event::Message(bytes.to_vec(), is_real));
    }

    /// Records that the peer violates the protocol.
    pub(super) fn violation(&mut self) {
        self.events.push_back(Event::Violation);
    }

    /// Handles everything that arrived, as the stream does.
    pub(super) fn drive(&mut self) {
        self.feature_requests = 0;
        while let Some(event) = self.events.pop_front() {
            let is_valid = match event {
                Event::Message(bytes, is_real) => self.take(&bytes, is_real),
                Event::Written(sum, written) => {
                    let room = if self.announced { WINDOW - self.filled } else { 0 };
                    let is_valid = sum <= room.into() && written <= sum;
                    self.filled += if is_valid { sum as u32 } else { 0 };
                    is_valid
                }
                Event::Violation => false,
            };
            if !is_valid {
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
                self.feature_requests += 1;
                self.role == Role::Server && self.feature_requests <= FEATURE_REQUESTS_MAX
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

    /// Returns the bytes that the application must read.
    pub(super) fn read(&mut self, count: usize) -> Vec<u8> {
        let end = self.filled.min(self.consumed + count as u32);
        let bytes = self.window[self.consumed as usize..end as usize].to_vec();
        self.consumed = end;
        if self.consumed == WINDOW {
            (self.announced, self.filled, self.consumed) = (false, 0, 0);
        }
        bytes
    }

    /// Returns how many bytes the application may write.
    pub(super) fn writable(&self) -> usize {
        self.theirs.map_or(0, |(theirs, _)| theirs.length - self.written) as usize
    }

    pub(super) fn application_wrote(&mut self, bytes: &[u8]) {
        let (memory, is_real) = self.theirs.expect("a window");
        if is_real {
            self.unannounced.push_back((memory, self.written, bytes.to_vec()));
        } else {
            self.ending = Ending::Unknown; // the peer's device refuses the write
        }
        self.written += bytes.len() as u32;
    }

    /// Handles the notification of a write at the peer. Returns the memory, the offset and the
    /// bytes.
    pub(super) fn notified(&mut self, imm: u32, byte_len: u32) -> (Registration, u32, Vec<u8>) {
        let write = self.unannounced.pop_front().expect("a write of the application");
        assert_eq!((imm, byte_len), (write.2.len() as u32, imm));
        write
    }

    /// Handles a message that the peer received.
    pub(super) fn message_from_stream(&mut self, message: &Message) {
        match message {
            Message::RegisterXferMemory(memory) => {
                assert_eq!(memory.length, WINDOW);
                assert!(
                    !self.announced && self.filled == 0,
                    "a window is announced only when it is used up"
                );
                self.announced = true;
                self.due_at = 0;
            }
            Message::Keepalive | Message::GetServerFeature { .. } => {
                assert_eq!(self.role, Role::Server);
            }
            Message::SetClientFeature { .. } => panic!("the stream must not set features"),
        }
    }
}
