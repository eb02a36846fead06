//! Probes of the RDMA path while the peer is silent.
//!
//! A device notices a lost path only if it has something to send. So a side that waits for a reply
//! would notice nothing until its next keepalive. Its peer may notice, but only the caller can
//! reconnect. So a caller that hears nothing for a while after any traffic sends a frame that needs
//! no answer: if the path is lost, the caller's device reports that soon. The frame also returns
//! credits, so the peer can release what it keeps for a migration.
//!
//! The link does not know whether the application waits for more. One reply may be the first of
//! several, or the first frame of a long one. So every kind of traffic starts the wait.
//!
//! ```text
//!   Idle ── a frame was sent or received ──► Wanted ── the driver starts a timer ──► Waiting
//!    ▲                                                                                 │
//!    └─── silence until the keepalive comes before the next probe ◄────────────────────┤
//!                                                                                      │
//!              expires after traffic: wait again; after silence: probe, wait twice as long
//! ```
//!
//! A link without traffic has no timer and sends no probes.

use std::time::{Duration, Instant};

/// How long a caller hears nothing before its first probe.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// No probe is sent if the wait before it is longer. The keepalive then comes first.
const LAST_WAIT: Duration = Duration::from_secs(4);

/// What a link has sent and received so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    /// The number of frames that this side has sent.
    pub(crate) sent: u64,
    /// Grows with each frame of the peer, and with each of our frames that it has consumed.
    pub(crate) heard: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No timer until there is progress beyond this.
    Idle(Progress),
    Wanted,
    /// A timer expires at `until`, after `wait`. The progress is that of the beginning.
    Waiting {
        until: Instant,
        wait: Duration,
        from: Progress,
    },
}

/// Decides when a caller probes its path.
#[derive(Debug)]
pub(crate) struct Probing(State);

impl Default for Probing {
    fn default() -> Self {
        Self(State::Idle(Progress::default()))
    }
}

/// What to do when the timer has expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    /// Nothing: the timer is obsolete, or the keepalive does the rest.
    None,
    /// Start the timer again.
    Wait(Instant),
    /// Send a probe, and start the timer again.
    Send(Instant),
}

impl Probing {
    /// Forgets the timer, because the path is lost.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Returns whether the driver must start the timer. Returns true only once.
    pub(super) fn take_request(&mut self, progress: Progress) -> bool {
        let is_wanted = match self.0 {
            State::Idle(seen) => progress != seen,
            State::Wanted => false,
            // New traffic must not wait as long as the traffic before.
            State::Waiting { wait, from, .. } => wait > FIRST_WAIT && progress != from,
        };
        if is_wanted {
            self.0 = State::Wanted;
        }
        is_wanted
    }

    /// Starts the wait, if it was requested. Returns when the timer must expire.
    pub(super) fn begin(&mut self, progress: Progress, now: Instant) -> Option<Instant> {
        (self.0 == State::Wanted).then(|| self.wait(FIRST_WAIT, progress, now))
    }

    fn wait(&mut self, wait: Duration, from: Progress, now: Instant) -> Instant {
        let until = now + wait;
        self.0 = State::Waiting { until, wait, from };
        until
    }

    /// Handles an expired timer.
    pub(super) fn on_timer(&mut self, progress: Progress, now: Instant) -> Probe {
        let State::Waiting { until, wait, from } = self.0 else { return Probe::None };
        if now < until {
            return Probe::None; // another timer has replaced this one
        }
        if progress != from {
            return Probe::Wait(self.wait(FIRST_WAIT, progress, now));
        }
        if wait >= LAST_WAIT {
            self.0 = State::Idle(progress);
            return Probe::None;
        }
        Probe::Send(self.wait(wait * 2, progress, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(sent: u64, heard: u64) -> Progress {
        Progress { sent, heard }
    }

    #[test]
    fn probes_while_the_peer_is_silent_and_less_and_less_often() {
        let (mut probing, begun) = (Probing::default(), Instant::now());
        assert!(!probing.take_request(progress(0, 0)), "nothing was sent");
        assert!(probing.take_request(progress(1, 0)) && !probing.take_request(progress(1, 0)));
        let mut at = probing.begin(progress(1, 0), begun).expect("a timer");
        let mut probes = Vec::new();
        loop {
            match probing.on_timer(progress(1, 0), at) {
                Probe::Send(next) => {
                    probes.push((at - begun).as_millis());
                    at = next;
                }
                Probe::Wait(_) => panic!("there was no traffic"),
                Probe::None => break,
            }
        }
        assert_eq!(probes, [250, 750, 1750, 3750]);
        assert!(!probing.take_request(progress(1, 0)), "the keepalive does the rest");
        assert!(probing.take_request(progress(2, 0)), "another request was sent");
    }

    #[test]
    fn sends_nothing_while_there_is_traffic() {
        let (mut probing, begun) = (Probing::default(), Instant::now());
        assert!(probing.take_request(progress(1, 0)));
        let mut at = probing.begin(progress(1, 0), begun).expect("a timer");
        assert_eq!(probing.on_timer(progress(1, 0), begun), Probe::None, "not yet");
        for (sent, heard) in [(2, 1), (2, 2), (3, 2)] {
            let Probe::Wait(next) = probing.on_timer(progress(sent, heard), at) else {
                panic!("traffic")
            };
            assert_eq!(next, at + FIRST_WAIT);
            at = next;
        }
        assert!(matches!(probing.on_timer(progress(3, 2), at), Probe::Send(_)), "silence");
    }

    /// Two commands are under way, or one whose reply has several frames.
    #[test]
    fn the_rest_of_a_reply_is_probed_for() {
        let (mut probing, begun) = (Probing::default(), Instant::now());
        assert!(probing.take_request(progress(2, 0)));
        let at = probing.begin(progress(2, 0), begun).expect("a timer");
        // The first frame of the replies has arrived. Then the path is lost.
        let Probe::Wait(at) = probing.on_timer(progress(2, 1), at) else { panic!("traffic") };
        assert!(matches!(probing.on_timer(progress(2, 1), at), Probe::Send(_)));
    }

    #[test]
    fn a_late_frame_of_the_peer_starts_the_wait_again() {
        let (mut probing, mut at) = (Probing::default(), Instant::now());
        assert!(probing.take_request(progress(1, 0)));
        at = probing.begin(progress(1, 0), at).expect("a timer");
        while let Probe::Send(next) = probing.on_timer(progress(1, 0), at) {
            at = next;
        }
        assert!(!probing.take_request(progress(1, 0)), "an idle link has no timer");
        assert!(probing.take_request(progress(1, 1)), "a frame may be the first of several");
    }

    #[test]
    fn a_new_request_is_probed_as_soon_as_the_first() {
        let (mut probing, begun) = (Probing::default(), Instant::now());
        assert!(probing.take_request(progress(1, 0)));
        let at = probing.begin(progress(1, 0), begun).expect("a timer");
        let Probe::Send(late) = probing.on_timer(progress(1, 0), at) else { panic!("silence") };
        assert!(probing.take_request(progress(2, 0)));
        assert_eq!(probing.on_timer(progress(2, 0), late), Probe::None, "it was replaced");
        let soon = probing.begin(progress(2, 0), at).expect("a timer");
        assert_eq!(soon, at + FIRST_WAIT);
    }

    #[test]
    fn forgets_a_lost_path() {
        let (mut probing, begun) = (Probing::default(), Instant::now());
        assert!(probing.take_request(progress(1, 0)));
        let at = probing.begin(progress(1, 0), begun).expect("a timer");
        probing.forget();
        assert_eq!(probing.on_timer(progress(1, 0), at), Probe::None);
    }
}
