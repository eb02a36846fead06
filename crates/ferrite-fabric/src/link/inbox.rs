//! Received data: assembles frames into messages, and keeps messages until the application takes
//! them. The inbox uses neither devices nor memory pools. [`Limits`] and the link's credits bound
//! the data that a peer can make it keep.

use std::collections::VecDeque;

use super::message::Parts;

/// The limits for a peer, as announced in the hello of this side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) channels: u16,
    /// The limit on the bytes of all unfinished messages together.
    pub(crate) max_message_bytes: u64,
    /// The limit on the frames of all unfinished messages together.
    pub(crate) max_frames: u64,
}

/// A violation of the protocol by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error("a frame on channel {channel}, but there are only {channels} channels")]
    Channel { channel: u16, channels: u16 },
    #[error("more than {max} bytes of unfinished messages")]
    TooLarge { max: u64 },
    #[error("more than {max} frames of unfinished messages")]
    TooMany { max: u64 },
    #[error("an empty frame that is not the last of its message")]
    Empty,
}

/// A complete message, or the notice of a one-sided write.
#[derive(Debug)]
pub(crate) enum Arrived<B> {
    Message { channel: u16, parts: Parts<B>, bytes: usize },
    Notice(u32),
}

struct Partial<B> {
    channel: u16,
    parts: Parts<B>,
    /// The number of frames. It may exceed the number of parts, because the last frame may be
    /// empty.
    frames: usize,
    bytes: usize,
}

pub(crate) struct Inbox<B> {
    limits: Limits,
    /// Complete messages and notices, each with its number of frames.
    ready: VecDeque<(Arrived<B>, usize)>,
    /// The number of frames in `ready`. The peer gets the credits of these frames back when the
    /// application takes the messages, unless it got them back while a message was unfinished.
    ready_frames: usize,
    /// Unfinished messages, at most one per channel. There are rarely more than a few.
    partial: Vec<Partial<B>>,
    partial_bytes: u64,
    partial_frames: u64,
}

impl<B: AsRef<[u8]>> Inbox<B> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            ready: VecDeque::new(),
            ready_frames: 0,
            partial: Vec::new(),
            partial_bytes: 0,
            partial_frames: 0,
        }
    }

    /// Adds a frame. Returns true if it completes a message.
    pub(crate) fn frame(&mut self, channel: u16, more: bool, piece: B) -> Result<bool, Violation> {
        let Limits { channels, max_message_bytes: max, max_frames } = self.limits;
        if channel >= channels {
            return Err(Violation::Channel { channel, channels });
        }
        let bytes = piece.as_ref().len();
        let len = bytes as u64;
        let begun = self.partial.iter().position(|partial| partial.channel == channel);
        if !more && begun.is_none() {
            let parts = if bytes == 0 { Parts::Empty } else { Parts::One(piece) };
            self.push(Arrived::Message { channel, parts, bytes }, 1);
            return Ok(true);
        }
        if len == 0 && more {
            return Err(Violation::Empty); // only the last frame of a message may be empty
        }
        if self.partial_bytes + len > max {
            return Err(Violation::TooLarge { max });
        }
        if self.partial_frames >= max_frames {
            return Err(Violation::TooMany { max: max_frames });
        }
        let at = begun.unwrap_or_else(|| {
            self.partial.push(Partial { channel, parts: Parts::Empty, frames: 0, bytes: 0 });
            self.partial.len() - 1
        });
        self.partial_frames += 1;
        self.partial_bytes += len;
        let partial = &mut self.partial[at];
        partial.frames += 1;
        partial.bytes += bytes;
        if bytes > 0 {
            partial.parts.push(piece);
        }
        if !more {
            let Partial { channel, parts, frames, bytes } = self.partial.swap_remove(at);
            self.partial_bytes -= bytes as u64;
            self.partial_frames -= frames as u64;
            self.push(Arrived::Message { channel, parts, bytes }, frames);
        }
        Ok(!more)
    }

    /// Adds the notice of a one-sided write.
    pub(crate) fn notice(&mut self, imm: u32) {
        self.push(Arrived::Notice(imm), 1);
    }

    fn push(&mut self, arrived: Arrived<B>, frames: usize) {
        self.ready_frames += frames;
        self.ready.push_back((arrived, frames));
    }

    /// Returns the next complete message or notice.
    pub(crate) fn pop(&mut self) -> Option<Arrived<B>> {
        let (arrived, frames) = self.ready.pop_front()?;
        self.ready_frames -= frames;
        Some(arrived)
    }

    /// Returns whether the inbox has nothing, not even a part of a message.
    #[cfg(feature = "tokio")]
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.partial.is_empty()
    }

    /// Returns the number of frames of the complete messages and notices that the application has
    /// not taken.
    pub(crate) fn ready_frames(&self) -> usize {
        self.ready_frames
    }

    /// Drops all unfinished messages. The caller knows that their remaining frames cannot arrive.
    pub(crate) fn drop_partial(&mut self) {
        self.partial = Vec::new();
        self.partial_bytes = 0;
        self.partial_frames = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inbox() -> Inbox<&'static [u8]> {
        Inbox::new(Limits { channels: 2, max_message_bytes: 10, max_frames: 4 })
    }

    fn text(arrived: Option<Arrived<&'static [u8]>>) -> (u16, String) {
        match arrived.expect("a message or a notice") {
            Arrived::Message { channel, parts, bytes } => {
                let text = parts.as_slice().concat();
                assert_eq!(text.len(), bytes);
                (channel, String::from_utf8_lossy(&text).into_owned())
            }
            Arrived::Notice(imm) => (0, format!("notice {imm}")),
        }
    }

    #[test]
    fn frames_of_two_channels_become_two_messages() {
        let mut inbox = inbox();
        assert_eq!(inbox.frame(0, true, b"lar"), Ok(false));
        assert_eq!(inbox.frame(1, false, b"small"), Ok(true));
        assert_eq!(inbox.frame(0, false, b"ge"), Ok(true));
        inbox.notice(7);
        assert_eq!(inbox.ready_frames(), 4);
        assert_eq!(text(inbox.pop()), (1, "small".into()));
        assert_eq!(text(inbox.pop()), (0, "large".into()));
        assert_eq!(text(inbox.pop()), (0, "notice 7".into()));
        assert!(inbox.pop().is_none() && inbox.ready_frames() == 0);
    }

    #[test]
    fn empty_messages_and_empty_ends() {
        let mut inbox = inbox();
        assert_eq!(inbox.frame(0, false, b""), Ok(true));
        assert_eq!(text(inbox.pop()), (0, String::new()));
        assert_eq!(inbox.frame(0, true, b"x"), Ok(false));
        assert_eq!(inbox.frame(0, false, b""), Ok(true));
        assert_eq!(inbox.ready_frames(), 2, "the empty one is a frame too");
        assert_eq!(text(inbox.pop()), (0, "x".into()));
        assert_eq!(inbox.ready_frames(), 0);
        assert_eq!(inbox.frame(0, true, b""), Err(Violation::Empty));
    }

    #[test]
    fn what_a_peer_can_make_us_keep_is_bounded() {
        let mut inbox = inbox();
        assert_eq!(inbox.frame(2, false, b""), Err(Violation::Channel { channel: 2, channels: 2 }));
        assert_eq!(inbox.frame(0, true, b"12345"), Ok(false));
        assert_eq!(inbox.frame(1, true, b"12345"), Ok(false));
        assert_eq!(inbox.frame(1, true, b"6"), Err(Violation::TooLarge { max: 10 }));
        inbox.drop_partial();
        assert_eq!(inbox.frame(1, true, b"6"), Ok(false));
        for channel in [0, 0, 1] {
            assert_eq!(inbox.frame(channel, true, b"."), Ok(false));
        }
        assert_eq!(
            inbox.frame(1, false, b"."),
            Err(Violation::TooMany { max: 4 }),
            "small frames count, too"
        );
    }
}
