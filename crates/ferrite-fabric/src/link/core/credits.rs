//! Credits: how many frames each side may have under way.
//!
//! The receiver's window limits the frames that are sent but not consumed. The receiver counts
//! every frame as consumed, except the frames of complete messages that the application has not
//! taken. The count never decreases: frames of an unfinished message stay consumed when it becomes
//! complete. Every frame except the notice of a write carries the number of consumed frames so far,
//! modulo 2^16. A side that has nothing else to send reports this number in a control frame once
//! half a window was consumed.
//!
//! ```text
//!   our frames:         acknowledged <= sent
//!   the peer's frames:  announced <= consumed <= received
//! ```
//!
//! The peer has consumed the first `acknowledged` of our frames, and knows that we have consumed
//! the first `announced` of its frames. The sender stops at `sent == acknowledged + window`. The
//! receiver never sees more than `announced + window`, because the sender knows only what was
//! announced to it.

/// Maximum number of frames under way on a link, even if the peer's window is larger. On a link
/// that can migrate, the sender keeps each frame until the peer has consumed it, so the peer alone
/// must not set the limit.
const UNDER_WAY_MAX: u64 = 1024;

/// A violation of the credit rules by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CreditViolation {
    #[error("credits for frames that were never sent")]
    NeverSent,
    #[error("more frames than it had credits for")]
    BeyondWindow,
    #[error("it reports more received frames than were sent, or fewer than it consumed")]
    Resumed,
}

/// Counts frames in both directions.
#[derive(Debug, Clone)]
pub(crate) struct Credits {
    /// The window of this side, which limits the peer's frames under way.
    own_window: u64,
    /// The window of the peer, which limits our frames under way.
    peer_window: u64,
    sent: u64,
    acknowledged: u64,
    received: u64,
    consumed: u64,
    announced: u64,
}

impl Credits {
    pub(crate) fn new(own_window: u16, peer_window: u16) -> Self {
        Self {
            own_window: own_window.into(),
            peer_window: peer_window.into(),
            sent: 0,
            acknowledged: 0,
            received: 0,
            consumed: 0,
            announced: 0,
        }
    }

    /// Applies the window in the peer's hello.
    pub(crate) fn set_peer_window(&mut self, window: u16) {
        self.peer_window = window.into();
    }

    /// Returns how many frames may be sent now.
    pub(crate) fn available(&self) -> usize {
        let window = self.peer_window.min(UNDER_WAY_MAX);
        window.saturating_sub(self.sent - self.acknowledged) as usize
    }

    /// Counts frames that are sent.
    pub(crate) fn send(&mut self, frames: u64) {
        self.sent += frames;
    }

    /// Returns the number of sent frames, which is also the number of the last frame.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Returns how many of the sent frames the peer has consumed.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Returns whether the peer has consumed every sent frame.
    pub(crate) fn is_all_acknowledged(&self) -> bool {
        self.acknowledged == self.sent
    }

    /// Returns the credits to put into the next frame, and notes that the peer will know them.
    pub(crate) fn announce(&mut self) -> u16 {
        self.announced = self.consumed;
        self.consumed as u16
    }

    /// Like [`Credits::announce`], but does not note that the peer knows the credits.
    pub(crate) fn unannounced(&self) -> u16 {
        self.consumed as u16
    }

    /// Applies the credits in a frame of the peer. Returns whether they are new.
    pub(crate) fn on_acknowledged(&mut self, consumed: u16) -> Result<bool, CreditViolation> {
        let newly = u64::from(consumed.wrapping_sub(self.acknowledged as u16));
        if newly > self.sent - self.acknowledged {
            return Err(CreditViolation::NeverSent);
        }
        self.acknowledged += newly;
        Ok(newly > 0)
    }

    /// Counts a received frame.
    pub(crate) fn on_received(&mut self) -> Result<(), CreditViolation> {
        self.received += 1;
        if self.received - self.announced > self.own_window {
            return Err(CreditViolation::BeyondWindow);
        }
        Ok(())
    }

    /// Counts a refused write with a notice, which uses a credit like a frame.
    pub(crate) fn on_refused(&mut self) {
        self.received += 1;
    }

    /// Returns the number of received frames, including refused writes.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Marks all frames as consumed, except those of messages that the application has not taken.
    pub(crate) fn on_consumed(&mut self, unread_frames: usize) {
        self.consumed = self.consumed.max(self.received.saturating_sub(unread_frames as u64));
    }

    /// Returns whether half a window was consumed since the last announcement. A control frame must
    /// then return the credits to the peer.
    pub(crate) fn is_announcement_due(&self) -> bool {
        let news = self.consumed - self.announced;
        news > 0 && news >= self.own_window / 2
    }

    /// Checks the number of received frames that the peer reports when it resumes on another path.
    pub(crate) fn check_resumed(&self, peer_received: u64) -> Result<(), CreditViolation> {
        let is_possible = (self.acknowledged..=self.sent).contains(&peer_received);
        if is_possible { Ok(()) } else { Err(CreditViolation::Resumed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sends_a_window_of_frames_and_then_waits() {
        let mut credits = Credits::new(4, 3);
        assert_eq!(credits.available(), 3);
        credits.send(3);
        assert_eq!(credits.available(), 0);
        assert_eq!(credits.on_acknowledged(2), Ok(true));
        assert_eq!(credits.on_acknowledged(2), Ok(false));
        assert_eq!((credits.available(), credits.is_all_acknowledged()), (2, false));
        assert_eq!(credits.on_acknowledged(4), Err(CreditViolation::NeverSent));
        assert_eq!(credits.on_acknowledged(1), Err(CreditViolation::NeverSent), "too few");
    }

    #[test]
    fn keeps_no_more_than_its_own_limit() {
        let credits = Credits::new(2, u16::MAX >> 1);
        assert_eq!(credits.available() as u64, UNDER_WAY_MAX);
    }

    #[test]
    fn rejects_frames_beyond_what_was_announced() {
        let mut credits = Credits::new(2, 2);
        assert_eq!((credits.on_received(), credits.on_received()), (Ok(()), Ok(())));
        credits.on_consumed(1);
        assert!(credits.is_announcement_due());
        assert_eq!(
            credits.clone().on_received(),
            Err(CreditViolation::BeyondWindow),
            "the consumed frame was not announced to the peer yet"
        );
        assert_eq!(credits.announce(), 1);
        assert!(!credits.is_announcement_due());
        assert_eq!(credits.on_received(), Ok(()));
        assert_eq!(credits.on_received(), Err(CreditViolation::BeyondWindow));
    }

    #[test]
    fn consumed_frames_never_become_unread_again() {
        let mut credits = Credits::new(8, 8);
        (0..3).for_each(|_| credits.on_received().expect("within the window"));
        credits.on_consumed(0); // the frames are parts of an unfinished message
        credits.on_consumed(3); // the message is complete, and unread
        assert_eq!(credits.announce(), 3);
    }

    #[test]
    fn counters_wrap_around_on_the_wire_only() {
        let mut credits = Credits::new(1000, 1000);
        for round in 0..200_u64 {
            credits.send(1000);
            assert_eq!(credits.available(), 0);
            assert_eq!(credits.on_acknowledged(((round + 1) * 1000) as u16), Ok(true));
        }
        assert_eq!((credits.sent(), credits.acknowledged()), (200_000, 200_000));
    }

    #[test]
    fn resumes_only_with_what_is_possible() {
        let mut credits = Credits::new(8, 8);
        credits.send(5);
        credits.on_acknowledged(2).expect("five frames were sent");
        assert_eq!(credits.check_resumed(1), Err(CreditViolation::Resumed));
        assert_eq!(credits.check_resumed(6), Err(CreditViolation::Resumed));
        assert!((2..=5).all(|received| credits.check_resumed(received).is_ok()));
    }
}
