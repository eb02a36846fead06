//! Whether busy-polling pays: learned from what happened after the fabric last fell asleep.
//!
//! A poll that finds nothing costs CPU for no latency. So after one, the fabric sleeps at once,
//! until something arrives so soon after it fell asleep that polling would have found it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What the fabric has learned. Drivers on several threads share it, and a lost update only costs a
/// poll.
#[derive(Debug)]
pub(crate) struct AdaptiveSpin {
    pays: AtomicBool,
    /// When the fabric fell asleep, in the clock's raw units; 0 if it is awake.
    asleep_since: AtomicU64,
}

impl AdaptiveSpin {
    pub(super) fn new() -> Self {
        Self { pays: AtomicBool::new(true), asleep_since: AtomicU64::new(0) }
    }

    pub(super) fn pays(&self) -> bool {
        self.pays.load(Ordering::Relaxed)
    }

    /// The fabric has found nothing, and is about to sleep.
    pub(super) fn falls_asleep(&self, clock: &quanta::Clock) {
        self.pays.store(false, Ordering::Relaxed);
        self.asleep_since.store(clock.raw().max(1), Ordering::Relaxed);
    }

    /// The fabric has found work. `poll` is how long a poll would have lasted.
    pub(super) fn found_work(&self, clock: &quanta::Clock, poll: Duration) {
        if self.asleep_since.load(Ordering::Relaxed) == 0 {
            return; // it was awake: nothing to learn, and no clock to read
        }
        let since = self.asleep_since.swap(0, Ordering::Relaxed);
        if since != 0 && clock.delta(since, clock.raw()) <= poll {
            self.pays.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_pays_while_work_arrives_soon() {
        const POLL: Duration = Duration::from_micros(50);
        let (clock, mock) = quanta::Clock::mock();
        mock.increment(1_000);
        let spin = AdaptiveSpin::new();
        assert!(spin.pays(), "nothing is known yet");
        spin.falls_asleep(&clock);
        assert!(!spin.pays(), "the poll found nothing");
        mock.increment(Duration::from_micros(200));
        spin.found_work(&clock, POLL);
        assert!(!spin.pays(), "too late for a poll");
        spin.falls_asleep(&clock);
        mock.increment(Duration::from_micros(30));
        spin.found_work(&clock, POLL);
        assert!(spin.pays(), "a poll would have found it");
        mock.increment(Duration::from_micros(900));
        spin.found_work(&clock, POLL);
        assert!(spin.pays(), "it was awake meanwhile");
    }
}
