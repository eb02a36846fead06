//! Probes of the RDMA path while the peer owes a reply.
//!
//! A device notices a lost path only if it has something to send. So a side that has sent a
//! request, and waits for the reply, would notice nothing until its next keepalive. Its peer may notice, but
//! only the caller can reconnect. So a caller that gets no reply for a while sends a frame that
//! needs no answer: if the path is lost, the caller's device reports that soon.
//!
//! ```text
//!   Idle ──── a frame is sent ────► Wanted ──── the driver starts a timer ────► Waiting
//!    ▲                                                                            │
//!    ├─── the timer expires, and the peer has replied to everything ◄─────────────┤
//!    │                                                                            │
//!    └─── the next frame is sent ◄── Over ◄── the keepalive comes before ◄────────┘
//!                                             the next probe        expires: probe, wait twice
//!                                                                   as long
//! ```
//!
//! A link on which nothing was sent since the last reply has no timer and sends no probes.

use std::time::{Duration, Instant};

/// How long a caller waits for a reply before the first probe.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// No probe is sent if the wait before it is longer. The keepalive then comes first.
const LAST_WAIT: Duration = Duration::from_secs(4);

/// What a link has sent and received so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The number of frames that this side has sent.
    pub(crate) sent: u64,
    /// Grows with each frame of the peer, and with each of our frames that it has consumed.
    pub(crate) heard: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Idle,
    Wanted,
    /// A timer expires at `until`, after `wait`. The progress is that of the beginning.
    Waiting {
        until: Instant,
        wait: Duration,
        from: Progress,
    },
    /// No more probes until more than `sent` frames were sent.
    Over {
        sent: u64,
    },
}

/// Decides when a caller probes its path.
#[derive(Debug, Default)]
pub(crate) struct Probing {
    state: State,
    /// The number of frames that were sent when the last frame of the peer arrived.
    replied: u64,
}

/// What to do when the timer has expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Probe {
    /// Nothing: the timer is obsolete, or the peer owes no reply.
    None,
    /// Start the timer again.
    Wait(Instant),
    /// Send a probe, and start the timer again.
    Send(Instant),
}

impl Probing {
    /// Notes a frame of the peer. `sent` is the number of frames that this side has sent.
    pub(super) fn on_reply(&mut self, sent: u64) {
        self.replied = sent;
    }

    /// Forgets the timer, because the path is lost.
    pub(super) fn forget(&mut self) {
        self.state = State::Idle;
    }

    /// Returns whether the driver must start the timer. Returns true only once.
    pub(super) fn take_request(&mut self, progress: Progress) -> bool {
        if progress.sent == self.replied {
            return false;
        }
        let is_wanted = match self.state {
            State::Idle => true,
            State::Wanted => false,
            // A new request must not wait as long as the one before.
            State::Waiting { wait, from, .. } => wait > FIRST_WAIT && progress.sent != from.sent,
            State::Over { sent } => progress.sent != sent,
        };
        if is_wanted {
            self.state = State::Wanted;
        }
        is_wanted
    }

    /// Starts the wait for a reply, if it was requested. Returns when the timer must expire.
    pub(super) fn begin(&mut self, progress: Progress, now: Instant) -> Option<Instant> {
        (self.state == State::Wanted).then(|| self.wait(FIRST_WAIT, progress, now))
    }

    fn wait(&mut self, wait: Duration, from: Progress, now: Instant) -> Instant {
        let until = now + wait;
        self.state = State::Waiting { until, wait, from };
        until
    }

    /// Handles an expired timer.
    pub(super) fn on_timer(&mut self, progress: Progress, now: Instant) -> Probe {
        let State::Waiting { until, wait, from } = self.state else { return Probe::None };
        if now < until {
            return Probe::None; // another timer has replaced this one
        }
        if progress.sent == self.replied {
            self.state = State::Idle;
            return Probe::None;
        }
        if progress.heard != from.heard {
            return Probe::Wait(self.wait(FIRST_WAIT, progress, now));
        }
        if wait >= LAST_WAIT {
            self.state = State::Over { sent: progress.sent };
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
    fn probes_while_a_reply_is_owed_and_less_and_less_often() {
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
                Probe::Wait(_) => panic!("nothing was heard"),
                Probe::None => break,
            }
        }
        assert_eq!(probes, [250, 750, 1750, 3750]);
        assert!(!probing.take_request(progress(1, 0)), "the keepalive does the rest");
        assert!(probing.take_request(progress(2, 0)), "another request was sent");
    }

    #[test]
    fn sends_nothing_while_the_peer_replies() {
        let (mut probing, begun) = (Probing::default(), Instant::now());
        assert!(probing.take_request(progress(1, 0)));
        let at = probing.begin(progress(1, 0), begun).expect("a timer");
        assert_eq!(probing.on_timer(progress(1, 0), begun), Probe::None, "not yet");
        // The reply to the first request has arrived, that to the second has not.
        probing.on_reply(1);
        let Probe::Wait(at) = probing.on_timer(progress(2, 1), at) else { panic!("heard") };
        probing.on_reply(2);
        assert_eq!(probing.on_timer(progress(2, 2), at), Probe::None);
        assert!(!probing.take_request(progress(2, 2)), "an idle link has no timer");
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
