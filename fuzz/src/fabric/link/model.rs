//! A second implementation of the rules in `docs/book/src/protocol/links.md`: how a link must react
//! to its peer.

use std::collections::VecDeque;

use ferrite_fabric::ErrorKind;
use ferrite_fabric::wire::{Control, Frame};

use super::{OURS, PEERS};

/// Something that the application receives.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    Message { channel: u16, bytes: Vec<u8> },
    Notice(u32),
}

#[derive(Default)]
pub(super) struct Model {
    /// The error that the link must have failed with.
    pub(super) down: Option<ErrorKind>,
    /// Number of frames to the link that need credits.
    received: u64,
    /// Number of these frames that the link has consumed.
    consumed: u64,
    /// Number of these frames that the link has returned credits for.
    credited: u64,
    /// Number of frames from the link that need credits.
    sent: u64,
    /// Number of these frames that the peer has acknowledged.
    acknowledged: u64,
    /// Incomplete messages to the link, by channel.
    partial: Vec<(u16, Vec<Vec<u8>>)>,
    /// Messages and notices to the link that the application has not taken. Each has its number of
    /// frames and the number of receive buffers that it keeps.
    ready: VecDeque<(Arrived, u64, usize)>,
    /// Messages of the link's application that have not arrived completely.
    queued: [VecDeque<Vec<u8>>; PEERS.channels as usize],
    /// The bytes that have arrived of the first queued message, by channel.
    arriving: [Vec<u8>; PEERS.channels as usize],
    /// Answers that the link must still send.
    answers: VecDeque<Control>,
    /// Whether the application has closed the link.
    pub(super) closing: bool,
    /// Whether the link has sent Fin.
    fin: bool,
    /// Whether the peer has sent Fin.
    peer_fin: bool,
    /// Whether the link has sent FinAck.
    fin_ack: bool,
}

impl Model {
    /// Returns the credits that an honest peer sends.
    pub(super) fn count(&self) -> u16 {
        self.sent as u16
    }

    /// Handles a frame to the link.
    pub(super) fn frame(&mut self, imm: u32, payload: &[u8]) {
        let frame = Frame::from_imm(imm);
        let newly = u64::from(frame.consumed.wrapping_sub(self.acknowledged as u16));
        if newly > self.sent - self.acknowledged {
            return self.violation();
        }
        self.acknowledged += newly;
        if frame.control {
            return self.control(payload);
        }
        let begun = self.partial.iter().position(|(channel, _)| *channel == frame.channel);
        let incomplete: usize =
            self.partial.iter().flat_map(|(_, pieces)| pieces).map(Vec::len).sum();
        let frames: usize = self.partial.iter().map(|(_, pieces)| pieces.len()).sum();
        let frames_max = usize::from(OURS.window) + 2 * (OURS.message / OURS.segment);
        let alone = begun.is_none() && !frame.more;
        let wrong = !self.count_frame()
            || frame.channel >= OURS.channels
            || frame.more && payload.is_empty()
            || !alone && (incomplete + payload.len() > OURS.message || frames >= frames_max);
        if wrong {
            return self.violation();
        }
        let mut pieces = begun.map(|at| self.partial.remove(at).1).unwrap_or_default();
        pieces.push(payload.to_vec());
        if frame.more {
            self.partial.push((frame.channel, pieces));
        } else {
            let message = Arrived::Message { channel: frame.channel, bytes: pieces.concat() };
            let buffers = pieces.iter().filter(|piece| !piece.is_empty()).count();
            self.ready.push_back((message, pieces.len() as u64, buffers));
        }
        self.consume();
    }

    /// Handles a write with this immediate data.
    pub(super) fn notice(&mut self, imm: u32) {
        if !self.count_frame() {
            return self.violation();
        }
        self.ready.push_back((Arrived::Notice(imm), 1, 0));
        self.consume();
    }

    /// Counts a frame, and returns whether the peer may send it now.
    fn count_frame(&mut self) -> bool {
        self.received += 1;
        !self.peer_fin && self.received - self.credited <= OURS.window.into()
    }

    pub(super) fn violation(&mut self) {
        self.down = Some(ErrorKind::Protocol);
    }

    fn control(&mut self, payload: &[u8]) {
        match Control::decode(payload) {
            Err(_) => self.violation(),
            Ok(Control::Credit | Control::Pong(_) | Control::Revoked(_)) => {}
            Ok(Control::Ping(nonce)) => self.answers.push_back(Control::Pong(nonce)),
            Ok(Control::Revoke(grant)) => self.answers.push_back(Control::Revoked(grant)),
            Ok(Control::Fin) => self.peer_fin = true,
            Ok(Control::FinAck) if self.fin => self.down = Some(ErrorKind::Closed),
            Ok(Control::FinAck) => self.violation(),
        }
    }

    fn consume(&mut self) {
        let kept: u64 = self.ready.iter().map(|(_, frames, _)| frames).sum();
        self.consumed = self.consumed.max(self.received.saturating_sub(kept));
    }

    /// Takes the next message for the application. Returns it, or the error that the application
    /// must get.
    pub(super) fn take(&mut self) -> Result<Option<Arrived>, ErrorKind> {
        if let Some((arrived, ..)) = self.ready.pop_front() {
            self.consume();
            return Ok(Some(arrived));
        }
        match self.down {
            Some(kind) => Err(kind),
            None if self.peer_fin => Err(ErrorKind::Closed),
            None => Ok(None),
        }
    }

    /// Checks the result of a post by the application.
    pub(super) fn posted(&mut self, channel: u16, bytes: &[u8], result: Result<(), ErrorKind>) {
        let wrong = match () {
            () if self.down.is_some() => self.down,
            () if self.closing || self.peer_fin => Some(ErrorKind::Closed),
            () if channel >= PEERS.channels => Some(ErrorKind::Misuse),
            () if bytes.len() > PEERS.message => Some(ErrorKind::TooLarge),
            () => None,
        };
        match (wrong, result) {
            (None, Ok(())) => self.queued[usize::from(channel)].push_back(bytes.to_vec()),
            (None, Err(ErrorKind::Full)) => {
                assert!(!self.all_sent(), "the queue is full although everything was sent");
            }
            (wrong, result) => assert_eq!(wrong, result.err()),
        }
    }

    fn all_sent(&self) -> bool {
        self.queued.iter().all(VecDeque::is_empty)
    }

    /// Handles a frame from the link.
    pub(super) fn frame_from_link(&mut self, imm: u32, payload: &[u8]) {
        let Frame { control, more, channel, consumed } = Frame::from_imm(imm);
        self.credited += u64::from(consumed.wrapping_sub(self.credited as u16));
        assert!(
            self.credited <= self.consumed,
            "credit for {} frames, but only {} were consumed",
            self.credited,
            self.consumed
        );
        if control {
            match Control::decode(payload).expect("a control message") {
                Control::Credit => {}
                Control::Fin => assert!(self.closing && !std::mem::replace(&mut self.fin, true)),
                Control::FinAck => {
                    assert!(self.peer_fin && !std::mem::replace(&mut self.fin_ack, true));
                }
                answer => assert_eq!(self.answers.pop_front(), Some(answer)),
            }
            return;
        }
        assert!(!self.fin, "the link sent a frame after Fin");
        self.sent += 1;
        assert!(
            self.sent - self.acknowledged <= PEERS.window.into(),
            "the link sent more frames than it has credits for"
        );
        assert!(
            channel < PEERS.channels
                && payload.len() <= PEERS.segment
                && !(more && payload.is_empty())
        );
        let channel = usize::from(channel);
        self.arriving[channel].extend_from_slice(payload);
        let incomplete: usize = self.arriving.iter().map(Vec::len).sum();
        assert!(
            !more || incomplete <= PEERS.message,
            "too many bytes of incomplete messages: {incomplete}"
        );
        if !more {
            let message = std::mem::take(&mut self.arriving[channel]);
            assert_eq!(Some(message), self.queued[channel].pop_front());
        }
    }

    /// Checks that the link has done everything that follows from the last step.
    pub(super) fn check_settled(&self) {
        if self.down.is_some() {
            return;
        }
        assert!(self.answers.is_empty(), "answers are missing: {:?}", self.answers);
        let untold = self.consumed - self.credited;
        assert!(
            self.peer_fin || untold < u64::from(OURS.window / 2).max(1),
            "the link does not return credit"
        );
        let spent = self.sent - self.acknowledged == PEERS.window.into();
        assert!(self.all_sent() || spent, "the link does not send its messages");
        assert_eq!(self.fin, self.closing && self.all_sent(), "whether Fin was sent");
        assert_eq!(self.fin_ack, self.peer_fin && self.all_sent(), "whether FinAck was sent");
    }

    /// Returns the number of receive buffers that the link must be keeping.
    pub(super) fn kept_buffers(&self) -> usize {
        let partial: usize = self.partial.iter().map(|(_, pieces)| pieces.len()).sum();
        partial + self.ready.iter().map(|(.., buffers)| buffers).sum::<usize>()
    }
}
