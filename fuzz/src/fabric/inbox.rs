//! Reassembly of frames into messages, compared with a model made of lists.
//!
//! ```text
//!   a step is two bytes:   kind (2 bits), more, channel (3 bits)  │  length, or bits of a notice
//!   kind   0 1 a frame   2 a notice   3 the application takes a message; or, if the first byte is
//!                                       255, the incomplete messages are dropped
//! ```

use std::collections::VecDeque;

use ferrite_fabric::fuzzing::{Arrived, Inbox};

const CHANNELS: u16 = 6;
/// The limit on the bytes of incomplete messages: only a few frames, so that inputs reach it.
const MAX_BYTES: usize = 600;

/// Checks that each message is delivered once, complete, in order and only on existing channels.
/// Incomplete messages never exceed the limit. Every frame is counted until its message is taken.
pub fn inbox(bytes: &[u8]) {
    let mut inbox = Inbox::new(CHANNELS, MAX_BYTES as u64);
    let mut model = Model::default();
    for (number, step) in bytes.chunks_exact(2).enumerate() {
        let (more, channel, len) =
            (step[0] & 4 != 0, u16::from(step[0] >> 3 & 7), usize::from(step[1]));
        match step[0] & 3 {
            0 | 1 => {
                let piece = vec![number as u8; len];
                let taken = inbox.frame(channel, more, piece.clone());
                assert_eq!(taken.ok(), model.frame(channel, more, piece));
            }
            2 => {
                inbox.notice(u32::from(step[1]));
                model.ready.push_back((Arrived::Notice(u32::from(step[1])), 1));
            }
            _ if step[0] == u8::MAX => {
                inbox.drop_partial();
                model.partial.clear();
            }
            _ => assert_eq!(inbox.pop(), model.pop()),
        }
        assert!(model.partial_bytes() <= MAX_BYTES);
        assert_eq!(
            inbox.ready_frames(),
            model.ready.iter().map(|(_, frames)| frames).sum::<usize>()
        );
    }
    while let Some(arrived) = model.pop() {
        assert_eq!(inbox.pop(), Some(arrived));
    }
    assert_eq!((inbox.pop(), inbox.ready_frames()), (None, 0));
}

/// Incomplete messages by channel, and complete ones with the number of their frames.
#[derive(Default)]
struct Model {
    partial: Vec<(u16, Vec<Vec<u8>>)>,
    ready: VecDeque<(Arrived, usize)>,
}

impl Model {
    fn partial_bytes(&self) -> usize {
        self.partial.iter().flat_map(|(_, pieces)| pieces).map(Vec::len).sum()
    }

    /// Returns whether the frame completed a message, or `None` if it must be refused.
    fn frame(&mut self, channel: u16, more: bool, piece: Vec<u8>) -> Option<bool> {
        let begun = self.partial.iter().position(|(other, _)| *other == channel);
        let alone = begun.is_none() && !more;
        let too_many = !alone && self.partial_bytes() + piece.len() > MAX_BYTES;
        if channel >= CHANNELS || more && piece.is_empty() || too_many {
            return None;
        }
        let mut pieces = begun.map(|at| self.partial.remove(at).1).unwrap_or_default();
        pieces.push(piece);
        if more {
            self.partial.push((channel, pieces));
        } else {
            let frames = pieces.len();
            pieces.retain(|piece| !piece.is_empty());
            self.ready.push_back((Arrived::Message { channel, pieces }, frames));
        }
        Some(!more)
    }

    fn pop(&mut self) -> Option<Arrived> {
        self.ready.pop_front().map(|(arrived, _)| arrived)
    }
}
