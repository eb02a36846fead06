//! Liveness of the peer: a peer that is silent for too long gets a keepalive. If the peer does not
//! answer, its path or its link fails.

use std::time::{Duration, Instant};

use super::probing::Probing;
use crate::link::keepalive::Keepalive;

/// When the peer was last heard from, whether a keepalive was sent since, and when the path is
/// probed.
#[derive(Debug)]
pub(crate) struct Liveness {
    keepalive: Keepalive,
    peer_timeout: Duration,
    last_heard: Instant,
    asked: Option<Instant>,
    /// Whether the peer's device has acknowledged something since the keepalive.
    has_acknowledged: bool,
    pub(super) probing: Probing,
}

/// A peer that has not answered a keepalive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Silence {
    pub(crate) after: Duration,
    /// Whether the peer's device has acknowledged something since the keepalive.
    pub(crate) acknowledged: bool,
}

/// The action that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// No action: the peer was heard from recently. Check again at this time.
    Well(Instant),
    /// Send a keepalive now, and check again at this time.
    Ask(Instant),
    /// No action: a keepalive is unanswered, or the link has no path. Check again at this time.
    Asked(Instant),
}

impl Liveness {
    pub(crate) fn new(keepalive: Keepalive, peer_timeout: Duration, now: Instant) -> Self {
        Self {
            keepalive,
            peer_timeout,
            last_heard: now,
            asked: None,
            has_acknowledged: false,
            probing: Probing::default(),
        }
    }

    /// Notes a sign of life of the peer.
    pub(crate) fn on_heard(&mut self, now: Instant) {
        (self.last_heard, self.asked) = (now, None);
    }

    /// Notes that the peer's device has acknowledged something.
    pub(crate) fn on_acknowledged(&mut self) {
        self.has_acknowledged = true;
    }

    /// Forgets a keepalive that was sent over a lost path, and the timer for probes of that path.
    pub(crate) fn forget_path(&mut self) {
        self.asked = None;
        self.probing.forget();
    }

    /// Returns whether the peer has not answered a keepalive in time.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.asked.is_some_and(|asked| now.saturating_duration_since(asked) >= self.peer_timeout)
    }

    /// Restarts the wait for the peer, which cannot be heard while there is no path.
    pub(crate) fn wait_for_path(&mut self, now: Instant) -> Look {
        self.last_heard = now;
        Look::Asked(now + self.peer_timeout)
    }

    /// Checks the timers.
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
        let Ok(Look::Well(at)) = liveness.look(begun, true) else {
            panic!("a new peer must not be asked at once")
        };
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
        liveness.forget_path();
        assert_eq!(liveness.wait_for_path(later), Look::Asked(later + Duration::from_secs(1)));
        assert!(matches!(liveness.look(later, false), Ok(Look::Well(_))));
    }
}
