//! Whether the peer is alive: a peer that is silent for long is asked, and given up if it does not
//! answer.

use std::time::{Duration, Instant};

use crate::link::keepalive::Keepalive;

/// When the peer was heard, and whether it was asked since.
#[derive(Debug)]
pub(crate) struct Liveness {
    keepalive: Keepalive,
    peer_timeout: Duration,
    last_heard: Instant,
    asked: Option<Instant>,
    /// The peer's device has acknowledged something since the peer was asked.
    has_acknowledged: bool,
}

/// A peer that was asked and has not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Silence {
    pub(crate) after: Duration,
    /// Its device has answered.
    pub(crate) acknowledged: bool,
}

/// What the clock asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// The peer was heard lately: look again at this time.
    Well(Instant),
    /// The peer is to be asked now; look again at this time.
    Ask(Instant),
    /// The peer was asked: look again at this time.
    Asked(Instant),
}

impl Liveness {
    pub(crate) fn new(keepalive: Keepalive, peer_timeout: Duration, now: Instant) -> Self {
        Self { keepalive, peer_timeout, last_heard: now, asked: None, has_acknowledged: false }
    }

    /// The peer, or something that stands for it, was heard.
    pub(crate) fn on_heard(&mut self, now: Instant) {
        (self.last_heard, self.asked) = (now, None);
    }

    /// The peer's device has acknowledged something.
    pub(crate) fn on_acknowledged(&mut self) {
        self.has_acknowledged = true;
    }

    /// Forgets a question that went over a path that is gone.
    pub(crate) fn forget_question(&mut self) {
        self.asked = None;
    }

    /// Returns whether the peer was asked and has not answered in time.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.asked.is_some_and(|asked| now.saturating_duration_since(asked) >= self.peer_timeout)
    }

    /// While no path carries the link nobody can be heard.
    pub(crate) fn wait_for_path(&mut self, now: Instant) -> Look {
        self.last_heard = now;
        Look::Asked(now + self.peer_timeout)
    }

    /// Looks at the clock.
    ///
    /// # Errors
    /// The peer has not answered in time.
    pub(crate) fn look(&mut self, now: Instant, is_caller: bool) -> Result<Look, Silence> {
        if let Some(asked) = self.asked {
            let after = now.saturating_duration_since(asked);
            if after >= self.peer_timeout {
                return Err(Silence { after, acknowledged: self.has_acknowledged });
            }
            return Ok(Look::Asked(asked + self.peer_timeout));
        }
        let ask_at = self.last_heard + self.keepalive.wait(is_caller);
        if now < ask_at {
            return Ok(Look::Well(ask_at));
        }
        self.asked = Some(now);
        self.keepalive.asked();
        self.has_acknowledged = false;
        Ok(Look::Ask(now + self.peer_timeout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peer_is_asked_once_and_then_given_up() {
        let (keepalive, timeout) = (Duration::from_secs(10), Duration::from_secs(3));
        let begun = Instant::now();
        let mut liveness = Liveness::new(Keepalive::new(keepalive, 1), timeout, begun);
        let Ok(Look::Well(at)) = liveness.look(begun, true) else { panic!("heard just now") };
        assert_eq!(liveness.look(at, true), Ok(Look::Ask(at + timeout)));
        assert_eq!(liveness.look(at, true), Ok(Look::Asked(at + timeout)));
        assert!(!liveness.is_overdue(at) && liveness.is_overdue(at + timeout));
        let silence = Silence { after: timeout, acknowledged: false };
        assert_eq!(liveness.look(at + timeout, true), Err(silence));
        liveness.on_acknowledged();
        let silence = Silence { after: timeout, acknowledged: true };
        assert_eq!(liveness.look(at + timeout, true), Err(silence));
        liveness.on_heard(at + timeout);
        assert!(matches!(liveness.look(at + timeout, true), Ok(Look::Well(_))));
    }

    #[test]
    fn a_question_ends_with_its_path() {
        let begun = Instant::now();
        let keepalive = Keepalive::new(Duration::from_secs(1), 1);
        let mut liveness = Liveness::new(keepalive, Duration::from_secs(1), begun);
        let later = begun + Duration::from_secs(10);
        assert!(matches!(liveness.look(later, false), Ok(Look::Ask(_))));
        liveness.forget_question();
        assert_eq!(liveness.wait_for_path(later), Look::Asked(later + Duration::from_secs(1)));
        assert!(matches!(liveness.look(later, false), Ok(Look::Well(_))));
    }
}
