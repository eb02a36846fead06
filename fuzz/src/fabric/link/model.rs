//! The rules of `docs/book/src/protocol/links.md`, written a second time: what a link must make of what its peer does.

use std::collections::VecDeque;

use ferrite_fabric::ErrorKind;
use ferrite_fabric::wire::{Control, Frame};

use super::{OURS, PEERS};

/// Something for the application.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    Message { channel: u16, bytes: Vec<u8> },
    Notice(u32),
}

#[derive(Default)]
pub(super) struct Model {
    /// Why the link must be down.
    pub(super) down: Option<ErrorKind>,
    /// Counted frames to the link, how many of them it has consumed, and what it has said of that.
    received: u64,
    consumed: u64,
    told: u64,
    /// Counted frames from the link, and how many of them the peer has acknowledged.
    sent: u64,
    acknowledged: u64,
    /// Messages to the link that have begun, by channel.
    partial: Vec<(u16, Vec<Vec<u8>>)>,
    /// Messages to the link that nobody took, each with its frames, and those of them that keep a buffer.
    ready: VecDeque<(Arrived, u64, usize)>,
    /// Messages of the link's application that have not arrived, and how much of the first one has.
    queued: [VecDeque<Vec<u8>>; PEERS.channels as usize],
    arriving: [Vec<u8>; PEERS.channels as usize],
    /// Answers that the link owes.
    answers: VecDeque<Control>,
    /// Its application has closed it; it has said farewell; the peer has; it has answered.
    pub(super) closing: bool,
    fin: bool,
    peer_fin: bool,
    fin_ack: bool,
}

impl Model {
    /// What an honest peer says of credit.
    pub(super) fn count(&self) -> u16 {
        self.sent as u16
    }

    /// A frame to the link.
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
        let under_way: usize = self.partial.iter().flat_map(|(_, pieces)| pieces).map(Vec::len).sum();
        let frames: usize = self.partial.iter().map(|(_, pieces)| pieces.len()).sum();
        let frames_max = usize::from(OURS.window) + 2 * (OURS.message / OURS.segment);
        let alone = begun.is_none() && !frame.more;
        let wrong = !self.count_frame()
            || frame.channel >= OURS.channels
            || frame.more && payload.is_empty()
            || !alone && (under_way + payload.len() > OURS.message || frames >= frames_max);
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

    /// A write with these bits.
    pub(super) fn notice(&mut self, imm: u32) {
        if !self.count_frame() {
            return self.violation();
        }
        self.ready.push_back((Arrived::Notice(imm), 1, 0));
        self.consume();
    }

    /// Whether a counted frame may come now.
    fn count_frame(&mut self) -> bool {
        self.received += 1;
        !self.peer_fin && self.received - self.told <= OURS.window.into()
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

    /// The application takes what is next: that, or how it must fail.
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

    /// The application sent a message: with this result?
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
            (None, Err(ErrorKind::Full)) => assert!(!self.all_sent(), "full of nothing"),
            (wrong, result) => assert_eq!(wrong, result.err()),
        }
    }

    fn all_sent(&self) -> bool {
        self.queued.iter().all(VecDeque::is_empty)
    }

    /// A frame from the link.
    pub(super) fn heard(&mut self, imm: u32, payload: &[u8]) {
        let Frame { control, more, channel, consumed } = Frame::from_imm(imm);
        self.told += u64::from(consumed.wrapping_sub(self.told as u16));
        assert!(self.told <= self.consumed, "credit for {} frames of {}", self.told, self.consumed);
        if control {
            match Control::decode(payload).expect("a control message") {
                Control::Credit => {}
                Control::Fin => assert!(self.closing && !std::mem::replace(&mut self.fin, true)),
                Control::FinAck => assert!(self.peer_fin && !std::mem::replace(&mut self.fin_ack, true)),
                answer => assert_eq!(self.answers.pop_front(), Some(answer)),
            }
            return;
        }
        assert!(!self.fin, "a frame after the last");
        self.sent += 1;
        assert!(self.sent - self.acknowledged <= PEERS.window.into(), "more than there was credit for");
        assert!(channel < PEERS.channels && payload.len() <= PEERS.segment && !(more && payload.is_empty()));
        let channel = usize::from(channel);
        self.arriving[channel].extend_from_slice(payload);
        let under_way: usize = self.arriving.iter().map(Vec::len).sum();
        assert!(!more || under_way <= PEERS.message, "{under_way} bytes under way");
        if !more {
            let message = std::mem::take(&mut self.arriving[channel]);
            assert_eq!(Some(message), self.queued[channel].pop_front());
        }
    }

    /// Whatever the last step was, the link has done what follows from it.
    pub(super) fn settled(&self) {
        if self.down.is_some() {
            return;
        }
        assert!(self.answers.is_empty(), "owes {:?}", self.answers);
        let untold = self.consumed - self.told;
        assert!(self.peer_fin || untold < u64::from(OURS.window / 2).max(1), "keeps credit back");
        let spent = self.sent - self.acknowledged == PEERS.window.into();
        assert!(self.all_sent() || spent, "keeps messages back");
        assert_eq!(self.fin, self.closing && self.all_sent(), "its farewell");
        assert_eq!(self.fin_ack, self.peer_fin && self.all_sent(), "its answer to the peer's");
    }

    /// Receive buffers that it may keep.
    pub(super) fn kept(&self) -> usize {
        let partial: usize = self.partial.iter().map(|(_, pieces)| pieces.len()).sum();
        partial + self.ready.iter().map(|(.., buffers)| buffers).sum::<usize>()
    }
}
