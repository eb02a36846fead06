//! One stream: its two directions, each with its credit and its class.
//!
//! ```text
//!   sending    Open ── FIN sent ──► Finished        receiving  Open ── FIN received ──► Finished
//!
//!   change of class of the sender:   settled ── DATA with the mark ──► moving
//!                                       ▲                                │
//!                                       └──── GRANT with the answer ◄────┘
//! ```
//!
//! A sender that changes its class changes to another channel, and messages on different channels
//! can overtake each other. So the sender marks its last DATA record on the old channel, and waits
//! for the answer before it sends on the new one.

use super::config::CREDIT_MAX;
use super::error::MuxError;
use super::id::{Class, StreamId};
use super::rate::Traffic;
use super::record::{DataHead, Route};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HalfState {
    Open,
    Finished,
}

/// The direction to the peer.
#[derive(Debug)]
pub(super) struct Sending {
    /// The route for the OPEN record, until that is sent.
    pub(super) open: Option<Route>,
    pub(super) state: HalfState,
    pub(super) class: Class,
    /// The next class, from the mark until the peer has answered.
    pub(super) moving: Option<Class>,
    /// How many bytes may be sent.
    pub(super) credit: u32,
    /// Whether the driver has bytes, or the end of the stream.
    pub(super) is_ready: bool,
    /// Whether the stream waits for its turn.
    pub(super) is_queued: bool,
    traffic: Traffic,
}

/// The direction from the peer.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) state: HalfState,
    class: Class,
    /// The peer's next class, from its mark until this side has answered.
    moving: Option<Class>,
    /// How many bytes the peer may send.
    allowed: u32,
    /// The number of received bytes that are not consumed.
    pub(super) held: u32,
    /// The number of consumed bytes that are not granted again.
    ungranted: u32,
    pub(super) is_grant_queued: bool,
}

/// A stream that has not ended.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) sending: Sending,
    pub(super) receiving: Receiving,
}

impl Stream {
    pub(super) fn new(
        class: Class,
        open: Option<Route>,
        window: u32,
        bulk_bytes_per_second: u64,
    ) -> Self {
        Self {
            sending: Sending {
                open,
                state: HalfState::Open,
                class,
                moving: None,
                credit: window,
                is_ready: false,
                is_queued: false,
                traffic: Traffic::new(bulk_bytes_per_second),
            },
            receiving: Receiving {
                state: HalfState::Open,
                class,
                moving: None,
                allowed: window,
                held: 0,
                ungranted: 0,
                is_grant_queued: false,
            },
        }
    }

    /// Returns whether both directions have ended and every byte was consumed.
    pub(super) fn is_finished(&self) -> bool {
        self.sending.state == HalfState::Finished
            && self.receiving.state == HalfState::Finished
            && self.receiving.held == 0
    }
}

impl Sending {
    /// Returns whether bytes, or the end, may be sent now.
    pub(super) fn may_send(&self) -> bool {
        self.state == HalfState::Open && self.is_ready && self.credit > 0 && self.moving.is_none()
    }

    /// Returns whether the stream needs a turn.
    pub(super) fn needs_turn(&self) -> bool {
        self.open.is_some() || self.may_send()
    }

    /// Counts bytes that are sent. Returns the class to announce with them, if it changes.
    pub(super) fn send(
        &mut self,
        opened_as: Class,
        now: std::time::Instant,
        bytes: u32,
    ) -> Option<Class> {
        self.credit -= bytes;
        let is_bulk = self.traffic.count(now, bytes.into());
        let class = if is_bulk { Class::Bulk } else { opened_as };
        if class != self.class {
            self.moving = Some(class);
        }
        self.moving
    }

    /// Applies a GRANT.
    pub(super) fn grant(
        &mut self,
        stream: StreamId,
        bytes: u32,
        answers_move: bool,
    ) -> Result<(), MuxError> {
        let credit = self.credit.checked_add(bytes).filter(|credit| *credit <= CREDIT_MAX);
        self.credit = credit.ok_or(MuxError::TooMuchCredit { stream })?;
        if answers_move {
            self.class = self.moving.take().ok_or(MuxError::UnexpectedAnswer { stream })?;
        }
        Ok(())
    }
}

impl Receiving {
    fn check(&self, stream: StreamId, class: Class) -> Result<(), MuxError> {
        if self.state == HalfState::Finished {
            return Err(MuxError::AfterFin { stream });
        }
        if self.moving.is_some() {
            return Err(MuxError::EarlyMove { stream });
        }
        if self.class != class {
            return Err(MuxError::WrongClass { stream, class });
        }
        Ok(())
    }

    /// Applies the head of a DATA record that arrived on the channel of `class`. Returns whether it
    /// must be answered.
    pub(super) fn data(&mut self, head: &DataHead, class: Class) -> Result<bool, MuxError> {
        let DataHead { stream, length, next_class } = *head;
        self.check(stream, class)?;
        if next_class == Some(self.class) {
            return Err(MuxError::SameClass { stream });
        }
        let credit = self.allowed;
        self.allowed =
            credit.checked_sub(length).ok_or(MuxError::BeyondCredit { stream, length, credit })?;
        self.moving = next_class;
        Ok(next_class.is_some())
    }

    /// Applies a FIN that arrived on the channel of `class`.
    pub(super) fn fin(&mut self, stream: StreamId, class: Class) -> Result<(), MuxError> {
        self.check(stream, class)?;
        self.state = HalfState::Finished;
        Ok(())
    }

    /// Notes that held bytes were consumed. Returns whether a GRANT is due.
    pub(super) fn consume(&mut self, bytes: u32, window: u32) -> bool {
        self.held -= bytes;
        self.ungranted += bytes;
        self.state == HalfState::Open && self.ungranted >= window / 2
    }

    /// Returns the number of bytes to grant, and whether the GRANT answers a change of class.
    pub(super) fn take_grant(&mut self) -> (u32, bool) {
        let bytes = std::mem::take(&mut self.ungranted);
        self.allowed += bytes;
        self.is_grant_queued = false;
        let answers_move = self.moving.is_some();
        self.class = self.moving.take().unwrap_or(self.class);
        (bytes, answers_move)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::id::Side;
    use super::*;

    const WINDOW: u32 = 100;

    fn stream() -> (StreamId, Stream) {
        let id = StreamId::new(Side::Caller, Class::Interactive, 1).expect("a valid name");
        (id, Stream::new(Class::Interactive, None, WINDOW, 150))
    }

    fn head(stream: StreamId, length: u32, next_class: Option<Class>) -> DataHead {
        DataHead { stream, length, next_class }
    }

    #[test]
    fn grants_half_a_window_at_a_time() {
        let (id, mut it) = stream();
        let class = Class::Interactive;
        assert_eq!(it.receiving.data(&head(id, WINDOW, None), class), Ok(false));
        it.receiving.held = WINDOW;
        assert!(!it.receiving.consume(49, WINDOW));
        let beyond = MuxError::BeyondCredit { stream: id, length: 1, credit: 0 };
        assert_eq!(it.receiving.data(&head(id, 1, None), class), Err(beyond));
        assert!(it.receiving.consume(1, WINDOW));
        assert_eq!(it.receiving.take_grant(), (50, false));
        assert_eq!(it.receiving.data(&head(id, 50, None), class), Ok(false));
        assert_eq!(it.receiving.fin(id, class), Ok(()));
        assert!(!it.receiving.consume(50, WINDOW), "a finished direction needs no credit");
    }

    #[test]
    fn nothing_follows_the_end() {
        let (id, mut it) = stream();
        assert_eq!(it.receiving.fin(id, Class::Interactive), Ok(()));
        let error = Err(MuxError::AfterFin { stream: id });
        assert_eq!(it.receiving.fin(id, Class::Interactive), error);
        assert_eq!(it.receiving.data(&head(id, 1, None), Class::Interactive).map(drop), error);
    }

    #[test]
    fn a_change_of_class_is_answered_before_the_sender_continues() {
        let (id, mut it) = stream();
        let (now, old, new) = (Instant::now(), Class::Interactive, Class::Bulk);
        it.sending.is_ready = true;
        it.sending.grant(id, 100, false).expect("a grant");
        assert_eq!(it.sending.send(old, now, 150), None);
        assert_eq!(it.sending.send(old, now, 1), Some(new));
        assert!(!it.sending.may_send());
        it.sending.grant(id, 10, false).expect("a grant");
        assert_eq!((it.sending.class, it.sending.may_send()), (old, false));
        it.sending.grant(id, 0, true).expect("the answer");
        assert_eq!((it.sending.class, it.sending.may_send()), (new, true));
        let error = MuxError::UnexpectedAnswer { stream: id };
        assert_eq!(it.sending.grant(id, 0, true), Err(error));

        let receiving = &mut it.receiving;
        let wrong = MuxError::WrongClass { stream: id, class: new };
        assert_eq!(receiving.data(&head(id, 1, None), new), Err(wrong));
        let same = MuxError::SameClass { stream: id };
        assert_eq!(receiving.data(&head(id, 1, Some(old)), old), Err(same));
        assert_eq!(receiving.data(&head(id, 1, Some(new)), old), Ok(true));
        let early = MuxError::EarlyMove { stream: id };
        for class in [old, new] {
            assert_eq!(receiving.data(&head(id, 1, None), class), Err(early));
            assert_eq!(receiving.fin(id, class), Err(early));
        }
        assert_eq!(receiving.take_grant(), (0, true));
        assert_eq!(receiving.data(&head(id, 1, None), new), Ok(false));
        let wrong = MuxError::WrongClass { stream: id, class: old };
        assert_eq!(receiving.data(&head(id, 1, None), old), Err(wrong));
    }

    #[test]
    fn credit_has_a_maximum() {
        let (id, mut it) = stream();
        assert_eq!(it.sending.grant(id, CREDIT_MAX - WINDOW, false), Ok(()));
        let error = Err(MuxError::TooMuchCredit { stream: id });
        assert_eq!(it.sending.grant(id, 1, false), error);
        assert_eq!(it.sending.grant(id, u32::MAX, false), error);
    }
}
