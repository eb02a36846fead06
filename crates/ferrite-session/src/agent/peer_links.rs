//! Which link to a peer is used, and when a new one is opened. Has no I/O: time and the numbers of
//! links are arguments.
//!
//! Without TLS, the streams of this side use only links that this agent has opened, to the address
//! where the peer listens. A link that the peer has opened carries the peer's streams alone: any
//! user of the peer's host can open one, and must not receive connections that are meant for the
//! peer.
//!
//! With TLS, both agents are authenticated and share one link. If both connect at the same time,
//! there are two links for a moment. Both sides keep the link that the agent with the lower
//! instance has opened. The other link ends when its streams have ended. The instance is a random
//! number of an agent's process, which the hello of a link carries.
//!
//! A peer connects only while it has no link. So if it connects long after the shared link was
//! opened, it has lost that link, and this side has not noticed yet. The new link then replaces the
//! old one.

use std::time::{Duration, Instant};

use ferrite_proto::mux::Side;

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
    /// Carry the connection over this link.
    Use(LinkId),
    /// Connect to the peer, and wait for a link until this time.
    Connect { until: Instant },
    /// Wait for a link until this time. The agent is already connecting.
    Wait { until: Instant },
    /// There is no link, and none is expected in time.
    Unavailable,
}

/// How the authenticated agents of two hosts share one link.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharing {
    /// The instance of this agent.
    pub(super) instance: u64,
    /// The longest time that an attempt to connect takes, until the called side uses the link.
    pub(super) longest_attempt: Duration,
}

/// The link to a peer, and the attempts to open one.
#[derive(Debug)]
pub(super) struct PeerLinks {
    /// Set if the agents are authenticated and share one link.
    sharing: Option<Sharing>,
    /// The link that new streams use.
    active: Option<Active>,
    /// While the agent is connecting: until when connections wait for the link.
    connecting: Option<Instant>,
    /// After a failure: the time from which the agent may connect again.
    again_at: Option<Instant>,
    pause: Duration,
}

/// The link that new streams use.
#[derive(Debug, Clone, Copy)]
struct Active {
    id: LinkId,
    /// This side's part: whether it has connected the link or accepted it.
    side: Side,
    peer_instance: u64,
    since: Instant,
}

impl PeerLinks {
    /// Returns the state without links. Without `sharing`, each side uses the links that it has
    /// opened.
    pub(super) fn new(sharing: Option<Sharing>) -> Self {
        Self { sharing, active: None, connecting: None, again_at: None, pause: Duration::ZERO }
    }

    // ---- getters ---------------------------------------------------------------------------

    /// Returns the link that new streams use.
    pub(super) fn active(&self) -> Option<LinkId> {
        self.active.map(|active| active.id)
    }

    /// Returns the pause after the last failure, in which the agent does not connect.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    // ---- commands --------------------------------------------------------------------------

    /// Decides how a new connection gets to the peer.
    pub(super) fn next_step(&mut self, now: Instant) -> Step {
        if let Some(active) = self.active {
            return Step::Use(active.id);
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

    /// Notes that the peer has another address now. Ends the pause, because the attempts at the old
    /// one have failed.
    pub(super) fn handle_moved(&mut self) {
        self.again_at = None;
        self.pause = Duration::ZERO;
    }

    /// Notes a new link. If there are now two links for the streams of this side, returns the one
    /// that must end when its streams have ended.
    pub(super) fn handle_up(
        &mut self,
        id: LinkId,
        side: Side,
        peer_instance: u64,
        now: Instant,
    ) -> Option<LinkId> {
        if side == Side::Caller {
            self.connecting = None;
        }
        // Ends the pause even if the peer has opened the link: then this agent can probably open
        // one, too.
        self.handle_moved();
        let new = Active { id, side, peer_instance, since: now };
        let Some(sharing) = self.sharing else {
            if side == Side::Caller {
                self.active = Some(new);
            }
            return None;
        };
        let Some(old) = self.active else {
            self.active = Some(new);
            return None;
        };
        let caller_of = |link: Active| match link.side {
            Side::Caller => sharing.instance,
            Side::Called => link.peer_instance,
        };
        // Both agents have connected at the same time only if each of the same two processes has
        // opened one of the links, and the later attempt began before the first link was up. Else
        // the peer has given up the old link. An attempt of this side began while it had no link.
        let is_glare = old.peer_instance == peer_instance
            && old.side != side
            && (side == Side::Caller || now < old.since + sharing.longest_attempt);
        if is_glare && caller_of(old) < caller_of(new) {
            return Some(new.id);
        }
        self.active = Some(new);
        Some(old.id)
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

    const OWN: u64 = 50;
    const LONGEST_ATTEMPT: Duration = Duration::from_secs(10);

    fn links() -> (PeerLinks, Instant) {
        (PeerLinks::new(None), Instant::now())
    }

    fn shared_links() -> (PeerLinks, Instant) {
        let sharing = Sharing { instance: OWN, longest_attempt: LONGEST_ATTEMPT };
        (PeerLinks::new(Some(sharing)), Instant::now())
    }

    fn handle_contact(links: &mut PeerLinks, now: Instant) {
        assert_eq!(links.handle_up(LinkId(9), Side::Called, 7, now), None);
    }

    #[test]
    fn connections_wait_for_one_attempt_and_no_longer_than_its_budget() {
        let (mut links, now) = links();
        let until = now + BUDGET;
        assert_eq!(links.next_step(now), Step::Connect { until });
        assert_eq!(links.next_step(now + BUDGET / 2), Step::Wait { until });
        assert_eq!(links.next_step(until), Step::Unavailable);
        assert_eq!(links.handle_up(LinkId(1), Side::Caller, 7, now), None);
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
        // A link that the peer opens ends the pause. After the next failure, the pause is as short
        // as after the first one.
        handle_contact(&mut links, now);
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
        links.handle_failure(now);
        assert_eq!(links.pause(), FIRST_PAUSE);
    }

    #[test]
    fn another_address_ends_the_pause() {
        let (mut links, now) = links();
        links.next_step(now);
        links.handle_failure(now);
        assert_eq!(links.next_step(now), Step::Unavailable);
        links.handle_moved();
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
        links.handle_failure(now);
        assert_eq!(links.pause(), FIRST_PAUSE);
    }

    #[test]
    fn link_of_the_peer_is_not_used_and_ends_no_link_of_this_side() {
        let (mut links, now) = links();
        handle_contact(&mut links, now);
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
        handle_contact(&mut links, now);
        assert!(matches!(links.next_step(now), Step::Wait { .. }), "one attempt at a time");
        assert_eq!(links.handle_up(LinkId(1), Side::Caller, 7, now), None);
        handle_contact(&mut links, now);
        assert_eq!(links.next_step(now), Step::Use(LinkId(1)));
        links.handle_gone(LinkId(2));
        assert_eq!(links.active(), Some(LinkId(1)));
        links.handle_gone(LinkId(1));
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
    }

    #[test]
    fn failure_does_not_matter_if_the_peer_has_opened_the_shared_link() {
        let (mut links, now) = shared_links();
        links.next_step(now);
        assert_eq!(links.handle_up(LinkId(1), Side::Called, 7, now), None);
        links.handle_failure(now);
        assert_eq!(links.next_step(now), Step::Use(LinkId(1)));
        links.handle_gone(LinkId(1));
        assert!(matches!(links.next_step(now), Step::Connect { .. }), "no pause");
    }

    /// Both ends see the two links in any order, and keep the same one.
    #[test]
    fn both_sides_keep_the_shared_link_of_the_lower_instance() {
        let (called_by_us, called_by_peer) = (LinkId(1), LinkId(2));
        for (peer, kept, retired) in
            [(OWN + 1, called_by_us, called_by_peer), (OWN - 1, called_by_peer, called_by_us)]
        {
            for is_ours_first in [true, false] {
                let (mut links, now) = shared_links();
                let mut both = [(called_by_us, Side::Caller), (called_by_peer, Side::Called)];
                if !is_ours_first {
                    both.reverse();
                }
                assert_eq!(links.handle_up(both[0].0, both[0].1, peer, now), None);
                assert_eq!(links.handle_up(both[1].0, both[1].1, peer, now), Some(retired));
                assert_eq!(links.active(), Some(kept));
                links.handle_gone(retired);
                assert_eq!(links.active(), Some(kept));
            }
        }
    }

    #[test]
    fn link_of_a_restarted_peer_replaces_the_shared_one() {
        for (old_peer, old_side, new_peer, new_side) in [
            (7, Side::Called, 8, Side::Called),
            (7, Side::Caller, 99, Side::Called), // although this side has the lower instance
            (7, Side::Called, 7, Side::Called),
        ] {
            let (mut links, now) = shared_links();
            assert_eq!(links.handle_up(LinkId(1), old_side, old_peer, now), None);
            assert_eq!(links.handle_up(LinkId(2), new_side, new_peer, now), Some(LinkId(1)));
            assert_eq!(links.active(), Some(LinkId(2)));
        }
    }

    /// The peer has lost the shared link and connects again. This side, which has the lower
    /// instance, has not noticed the loss yet.
    #[test]
    fn link_that_the_peer_opens_later_replaces_one_that_it_has_lost() {
        for (after, retired) in [
            (LONGEST_ATTEMPT - BUDGET, LinkId(2)), // both have connected at once
            (LONGEST_ATTEMPT, LinkId(1)),
        ] {
            let (mut links, now) = shared_links();
            assert_eq!(links.handle_up(LinkId(1), Side::Caller, OWN + 1, now), None);
            let up = links.handle_up(LinkId(2), Side::Called, OWN + 1, now + after);
            assert_eq!(up, Some(retired), "after {after:?}");
            assert_ne!(links.active(), Some(retired));
        }
    }

    /// The peer's view of an attempt that takes longer than usual: this side began to connect
    /// before the link of the peer was up.
    #[test]
    fn own_attempt_of_any_length_is_one_of_two_at_once() {
        let (mut links, now) = shared_links();
        assert!(matches!(links.next_step(now), Step::Connect { .. }));
        assert_eq!(links.handle_up(LinkId(1), Side::Called, OWN - 1, now), None);
        let up = links.handle_up(LinkId(2), Side::Caller, OWN - 1, now + LONGEST_ATTEMPT * 2);
        assert_eq!((up, links.active()), (Some(LinkId(2)), Some(LinkId(1))));
    }
}
