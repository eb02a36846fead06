//! Internals for the fuzz targets (`fuzz/`), behind the feature `fuzzing`. They are not part of the
//! public interface.

use crate::link::inbox;
use crate::link::message::Parts;

/// Assembles frames into messages, without a device.
pub struct Inbox(inbox::Inbox<Vec<u8>>);

#[derive(Debug, PartialEq, Eq)]
pub enum Arrived {
    Message { channel: u16, pieces: Vec<Vec<u8>> },
    Notice(u32),
}

impl Inbox {
    #[must_use]
    pub fn new(channels: u16, max_message_bytes: u64) -> Self {
        Self(inbox::Inbox::new(inbox::Limits { channels, max_message_bytes, max_frames: u64::MAX }))
    }

    /// # Errors
    /// Fails if the frame violates the protocol.
    pub fn frame(&mut self, channel: u16, more: bool, piece: Vec<u8>) -> Result<bool, String> {
        self.0.frame(channel, more, piece).map_err(|violation| violation.to_string())
    }

    pub fn notice(&mut self, imm: u32) {
        self.0.notice(imm);
    }

    pub fn pop(&mut self) -> Option<Arrived> {
        Some(match self.0.pop()? {
            inbox::Arrived::Notice(imm) => Arrived::Notice(imm),
            inbox::Arrived::Message { channel, parts, .. } => {
                let pieces = match parts {
                    Parts::Empty => Vec::new(),
                    Parts::One(piece) => vec![piece],
                    Parts::Many(pieces) => pieces,
                };
                Arrived::Message { channel, pieces }
            }
        })
    }

    #[must_use]
    pub fn ready_frames(&self) -> usize {
        self.0.ready_frames()
    }

    pub fn drop_partial(&mut self) {
        self.0.drop_partial();
    }
}
