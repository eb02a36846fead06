//! Which link to a peer is used, and when a new one is opened. Has no I/O: time and the numbers of
//! links are arguments.
//!
//! The streams of this side use only links that this agent has opened, to the address where the
//! peer listens. A link that the peer has opened carries the peer's streams alone: any user of the
//! peer's host can open one, and must not receive connections that are meant for the peer.

use std::time::{Duration, Instant};

/// How long a connection may wait for a link that is being opened.
pub(super) const BUDGET: Duration = Duration::from_millis(300);
/// The pause after the first failure. Each further failure doubles it.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest pause after a failure.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The number of a link. The agent never uses it twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct LinkId(pub(super) u64);

/// What to do for a connection to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Carry it over this link.
    Use(LinkId),
    /// Connect to the peer, and wait for a link until then.
    Connect { until: Instant },
    /// Wait for a link until then. The agent connects already.
    Wait { until: Instant },
    /// There is no link in time.
    Unavailable,
}

/// The link to a peer, and the attempts to open one.
#[derive(Debug, Default)]
pub(super) struct PeerLinks {
    /// The link that new streams use. This agent has opened it.
    active: Option<LinkId>,
    /// If the agent connects: how long connections wait for that.
    connecting: Option<Instant>,
    /// After a failure: when the agent connects again.
    again_at: Option<Instant>,
    pause: Duration,
}

impl PeerLinks {
    // ---- getters ---------------------------------------------------------------------------

    /// Returns the link that new streams use.
    pub(super) fn active(&self) -> Option<LinkId> {
        self.active
    }

    /// Returns how long the agent does not connect after the last failure.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    // ---- commands --------------------------------------------------------------------------

    /// Decides how a new connection gets to the peer.
    pub(super) fn next_step(&mut self, now: Instant) -> Step {
        if let Some(active) = self.active {
            return Step::Use(active);
        }
        match self.connecting {
            Some(until) if now < until => return Step::Wait { until },
            Some(_) => return Step::Unavailable,
            None => {}
        }
        if self.again_at.is_some_and(|again_at| now < again_at) {
            return Step::Unavailable;
        }
        let until = now + BUDGET;
        self.connecting = Some(until);
        Step::Connect { until }
    }

    // ---- events ----------------------------------------------------------------------------

    /// Notes that the agent could not connect to the peer.
    pub(super) fn handle_failure(&mut self, now: Instant) {
        self.connecting = None;
        // The peer may have connected meanwhile.
        if self.active.is_none() {
            self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            self.again_at = Some(now + self.pause);
        }
    }

    /// Notes a link that this agent has opened.
    pub(super) fn handle_up(&mut self, id: LinkId) {
        self.connecting = None;
        self.again_at = None;
        self.pause = Duration::ZERO;
        self.active = Some(id);
    }

    /// Notes that the peer has opened a link, so that this agent can probably open one, too.
    pub(super) fn handle_contact(&mut self) {
        self.again_at = None;
        self.pause = Duration::ZERO;
    }

    /// Notes that a link accepts no further streams, or has ended.
    pub(super) fn handle_gone(&mut self, id: LinkId) {
        if self.active() == Some(id) {
            self.active = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links() -> (PeerLinks, Instant) {
        (PeerLinks::default(), Instant::now())
    }

    #[test]
    fn connections_wait_for_one_attempt_and_no_longer_than_its_budget() {
        let (mut links, now) = links();
        let until = now + BUDGET;
        assert_eq!(links.next_step(now), Step::Connect { until });
        assert_eq!(links.next_step(now + BUDGET / 2), Step::Wait { until });
        assert_eq!(links.next_step(until), Step::Unavailable);
        links.handle_up(LinkId(1));
        assert_eq!(links.next_step(until), Step::Use(LinkId(1)));
    }

    #[test]
    fn each_failure_doubles_the_pause_up_to_a_minute() {
        let (mut links, mut now) = links();
        for seconds in [5, 10, 20, 40, 60, 60] {
            assert_eq!(links.next_step(now), Step::Connect { until: now + BUDGET });
            links.handle_failure(now);
            let pause = Duration::from_secs(seconds);
            assert_eq!(links.pause(), pause);
            assert_eq!(links.next_step(now + pause - BUDGET), Step::Unavailable);
            now += pause;
        }
        // A link of the peer ends the pause, and the next failure has the first one again.
        links.handle_contact();
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
        links.handle_failure(now);
        assert_eq!(links.pause(), FIRST_PAUSE);
    }

    #[test]
    fn link_of_the_peer_is_not_used_and_ends_no_link_of_this_side() {
        let (mut links, now) = links();
        links.handle_contact();
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
        links.handle_contact();
        assert!(matches!(links.next_step(now), Step::Wait { .. }), "one attempt at a time");
        links.handle_up(LinkId(1));
        links.handle_contact();
        assert_eq!(links.next_step(now), Step::Use(LinkId(1)));
        links.handle_gone(LinkId(2));
        assert_eq!(links.active(), Some(LinkId(1)));
        links.handle_gone(LinkId(1));
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
    }
}
