//! Liveness of the peer: a peer that is silent for too long gets a keepalive. If the peer does not
//! answer, its path or its link fails.

use std::time::{Duration, Instant};

use super::probing::Probing;
use super::{ActiveTransport, LinkCore};
use crate::link::keepalive::Keepalive;
use crate::wire::Control;

/// A frame over TCP may take this many times as long as a peer may be silent. Large frames over
/// slow networks need time.
const FRAME_TIMEOUTS: u32 = 8;

/// How long a peer may leave a keepalive unanswered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PeerTimeouts {
    /// For its process to answer, after its device or its kernel has acknowledged the keepalive.
    pub(crate) answer: Duration,
    /// Over TCP, while its kernel is silent, too.
    pub(crate) silence: Duration,
}

/// When the peer was last heard from, whether a keepalive was sent since, and when the path is
/// probed.
#[derive(Debug)]
pub(crate) struct Liveness {
    keepalive: Keepalive,
    timeouts: PeerTimeouts,
    last_heard: Instant,
    asked: Option<Instant>,
    /// Over TCP: when the peer's kernel has acknowledged something since the keepalive.
    kernel_heard: Option<Instant>,
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
    pub(crate) fn new(keepalive: Keepalive, timeouts: PeerTimeouts, now: Instant) -> Self {
        Self {
            keepalive,
            timeouts,
            last_heard: now,
            asked: None,
            kernel_heard: None,
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
        self.asked.is_some_and(|asked| now.saturating_duration_since(asked) >= self.timeouts.answer)
    }

    /// Restarts the wait for the peer, which cannot be heard while there is no path.
    pub(crate) fn wait_for_path(&mut self, now: Instant) -> Look {
        self.last_heard = now;
        Look::Asked(now + self.timeouts.answer)
    }

    /// Checks the timers. Over TCP, `kernel_heard` tells when the peer's kernel was last heard. It
    /// is called only if the peer has not answered a keepalive.
    ///
    /// # Errors
    /// The peer has not answered in time.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        is_caller: bool,
        kernel_heard: impl FnOnce() -> Option<Instant>,
    ) -> Result<Look, Silence> {
        if let Some(asked) = self.asked {
            let PeerTimeouts { answer, silence } = self.timeouts;
            let mut deadline = asked + answer;
            if now >= deadline && now < asked + silence {
                deadline = self.late_deadline(asked, now, kernel_heard());
            }
            if now >= deadline {
                let after = now.saturating_duration_since(asked);
                return Err(Silence { after, acknowledged: self.has_acknowledged });
            }
            return Ok(Look::Asked(deadline));
        }
        let ask_at = self.last_heard + self.keepalive.wait(is_caller);
        if now < ask_at {
            return Ok(Look::Well(ask_at));
        }
        self.asked = Some(now);
        self.keepalive.asked();
        (self.has_acknowledged, self.kernel_heard) = (false, None);
        Ok(Look::Ask(now + self.timeouts.answer))
    }

    /// Returns until when to wait for a peer that has not answered in time. It has failed if that
    /// moment is past.
    fn late_deadline(&mut self, asked: Instant, now: Instant, heard: Option<Instant>) -> Instant {
        let PeerTimeouts { answer, silence } = self.timeouts;
        let Some(heard) = heard else { return asked + answer }; // not over TCP
        if heard > asked {
            // The kernel can be reached, so the process must answer, too. After an interruption of
            // the network, it needs some time for that.
            return (*self.kernel_heard.get_or_insert(heard) + answer).min(asked + silence);
        }
        (now + answer).min(asked + silence)
    }
}

impl LinkCore {
    /// Returns whether the peer has not answered a keepalive in time.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.liveness.is_overdue(now)
    }

    /// Returns how long a frame may take over TCP, from its first part to its last. Until then,
    /// each part of the frame is a sign of life.
    pub(crate) fn frame_limit(&self) -> Duration {
        let Liveness { keepalive, timeouts, .. } = &self.liveness;
        FRAME_TIMEOUTS * (keepalive.interval() + timeouts.answer)
    }

    /// Checks the timers. Queues a keepalive if the peer was silent for too long. Returns `None` if
    /// the link is not up. Over TCP, `kernel_heard` tells when the peer's kernel was last heard.
    ///
    /// # Errors
    /// The peer has not answered a keepalive in time.
    pub(crate) fn on_timer(
        &mut self,
        now: Instant,
        kernel_heard: impl FnOnce() -> Option<Instant>,
    ) -> Result<Option<Look>, Silence> {
        if !self.is_up() {
            return Ok(None);
        }
        if self.migration.transport == ActiveTransport::Migrating {
            return Ok(Some(self.liveness.wait_for_path(now)));
        }
        let look = self.liveness.look(now, self.migration.is_caller, kernel_heard)?;
        if let Look::Ask(_) = look {
            self.outbox.controls.push_back(Control::Ping(self.credits.sent()));
        }
        Ok(Some(look))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn liveness(keepalive: u64, answer: u64, silence: u64, begun: Instant) -> Liveness {
        let [keepalive, answer, silence] = [keepalive, answer, silence].map(Duration::from_secs);
        Liveness::new(Keepalive::new(keepalive, 1), PeerTimeouts { answer, silence }, begun)
    }

    #[test]
    fn a_silent_peer_is_asked_once_and_then_given_up() {
        let timeout = Duration::from_secs(3);
        let begun = Instant::now();
        let mut liveness = liveness(10, 3, 3, begun);
        let Ok(Look::Well(at)) = liveness.look(begun, true, || None) else {
            panic!("a new peer must not be asked at once")
        };
        assert_eq!(liveness.look(at, true, || None), Ok(Look::Ask(at + timeout)));
        assert_eq!(liveness.look(at, true, || None), Ok(Look::Asked(at + timeout)));
        assert!(!liveness.is_overdue(at) && liveness.is_overdue(at + timeout));
        let silence = Silence { after: timeout, acknowledged: false };
        assert_eq!(liveness.look(at + timeout, true, || Some(at)), Err(silence));
        liveness.on_acknowledged();
        let silence = Silence { after: timeout, acknowledged: true };
        assert_eq!(liveness.look(at + timeout, true, || None), Err(silence));
        liveness.on_heard(at + timeout);
        assert!(matches!(liveness.look(at + timeout, true, || None), Ok(Look::Well(_))));
    }

    #[test]
    fn a_question_ends_with_its_path() {
        let begun = Instant::now();
        let mut liveness = liveness(1, 1, 1, begun);
        let later = begun + Duration::from_secs(10);
        assert!(matches!(liveness.look(later, false, || None), Ok(Look::Ask(_))));
        liveness.forget_path();
        assert_eq!(liveness.wait_for_path(later), Look::Asked(later + Duration::from_secs(1)));
        assert!(matches!(liveness.look(later, false, || None), Ok(Look::Well(_))));
    }

    /// Asks a peer. Returns the liveness, and a function for the time in seconds after that.
    fn ask(answer: u64, silence: u64) -> (Liveness, impl Fn(u64) -> Instant) {
        let begun = Instant::now();
        let mut liveness = liveness(1, answer, silence, begun);
        let asked = begun + Duration::from_secs(1);
        let look = liveness.look(asked, true, || None);
        assert!(matches!(look, Ok(Look::Ask(_))));
        (liveness, move |seconds| asked + Duration::from_secs(seconds))
    }

    #[test]
    fn a_peer_whose_kernel_is_silent_has_more_time() {
        let (mut liveness, after) = ask(2, 13);
        let heard = after(0);
        for (now, next) in [(2, 4), (4, 6), (12, 13)] {
            let look = liveness.look(after(now), true, || Some(heard));
            assert_eq!(look, Ok(Look::Asked(after(next))), "{now}");
        }
        let given_up = liveness.look(after(13), true, || Some(heard));
        assert_eq!(given_up.expect_err("silence").after, Duration::from_secs(13));
    }

    #[test]
    fn a_peer_whose_kernel_answers_but_not_its_process_is_given_up_early() {
        let (mut liveness, after) = ask(2, 13);
        // The kernel still acknowledges data, so it was heard later with each look.
        assert_eq!(liveness.look(after(2), true, || Some(after(1))), Ok(Look::Asked(after(3))));
        let given_up = liveness.look(after(3), true, || Some(after(3)));
        assert_eq!(given_up.expect_err("silence").after, Duration::from_secs(3));
    }

    #[test]
    fn a_process_has_time_to_answer_after_the_network_is_back() {
        let (mut liveness, after) = ask(2, 13);
        assert_eq!(liveness.look(after(2), true, || Some(after(0))), Ok(Look::Asked(after(4))));
        assert_eq!(liveness.look(after(4), true, || Some(after(4))), Ok(Look::Asked(after(6))));
        liveness.on_heard(after(5));
        assert!(matches!(liveness.look(after(5), true, || None), Ok(Look::Well(_))));
    }

    #[test]
    fn rdma_has_no_kernel_to_wait_for() {
        let (mut liveness, after) = ask(2, 13);
        assert!(liveness.look(after(2), true, || None).is_err());
    }
}
