//! Decides how long a driver polls after it has found no work, before it sleeps.
//!
//! A message that arrives while the driver polls is handled at once. A later message has to wake
//! the driver, and that often takes longer than the answer itself. So with adaptive polling, the
//! driver learns how long it waits for answers. It polls twice as long, up to the limit that the
//! user has set:
//!
//! - A wait up to the limit is worth polling for. The driver learns the longest such wait, even if
//!   it slept during a part of it.
//! - If a wait exceeds the limit, the driver has polled in vain. The learned value is then halved.
//!   So a driver that has nothing to wait for soon sleeps at once.
//!
//! Waits are measured with the clock that each pass reads anyway. A wait starts at the first pass
//! that found nothing, so a busy driver does not measure. Drivers on several threads share this
//! state without a lock. A lost update costs only one poll.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Polling is not adapted if the limit is this long or longer.
const UNADAPTED: Duration = Duration::from_secs(1);
/// If halving gives less than this, the expected time becomes 0, and the driver sleeps at once.
const SHORTEST_NS: u64 = 1_000;
/// The value of `expected_ns` before anything was learned.
const UNKNOWN: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct BusyPoll {
    clock: quanta::Clock,
    is_adaptive: bool,
    limit_us: AtomicU32,
    /// The expected time until an answer, in nanoseconds. 0 means that polling is not worth it.
    expected_ns: AtomicU64,
    /// When the first pass of this wait found nothing, as the clock's raw value. 0 if the last pass
    /// found work.
    waiting_since: AtomicU64,
}

impl BusyPoll {
    pub(super) fn new(clock: quanta::Clock, limit_us: u32, is_adaptive: bool) -> Self {
        Self {
            clock,
            is_adaptive,
            limit_us: AtomicU32::new(limit_us),
            expected_ns: AtomicU64::new(UNKNOWN),
            waiting_since: AtomicU64::new(0),
        }
    }

    pub(super) fn set_limit_us(&self, limit_us: u32) {
        self.limit_us.store(limit_us, Ordering::Relaxed);
    }

    fn limit_ns(&self) -> u64 {
        u64::from(self.limit_us.load(Ordering::Relaxed)) * 1_000
    }

    fn adapts_to(&self, limit_ns: u64) -> bool {
        self.is_adaptive && u128::from(limit_ns) < UNADAPTED.as_nanos()
    }

    /// Returns how long to poll now.
    fn poll_ns(&self) -> u64 {
        let limit_ns = self.limit_ns();
        match self.expected_ns.load(Ordering::Relaxed) {
            expected if self.adapts_to(limit_ns) => limit_ns.min(expected.saturating_mul(2)),
            _ => limit_ns,
        }
    }

    /// Records that the pass at the raw time `at` has found work.
    pub(super) fn found_work(&self, at: u64) {
        if self.waiting_since.load(Ordering::Relaxed) != 0 {
            let since = self.waiting_since.swap(0, Ordering::Relaxed);
            self.learn(self.clock.delta_as_nanos(since, at));
        }
    }

    /// Records that the pass at the raw time `at` has found nothing. If the driver should continue
    /// to poll, returns how long it has waited. Returns `None` if it should sleep.
    pub(super) fn poll_on(&self, at: u64) -> Option<Duration> {
        let since = match self.waiting_since.load(Ordering::Relaxed) {
            0 => {
                self.waiting_since.store(at.max(1), Ordering::Relaxed);
                at
            }
            since => since,
        };
        let waited = self.clock.delta_as_nanos(since, at);
        (waited < self.poll_ns()).then(|| Duration::from_nanos(waited))
    }

    /// Starts a new wait, because the program has acted and may expect an answer. If the last wait
    /// lasted longer than its poll and had no answer, learns that this poll was in vain.
    pub(super) fn expect_answer(&self) {
        if self.waiting_since.load(Ordering::Relaxed) == 0 {
            return;
        }
        let since = self.waiting_since.swap(0, Ordering::Relaxed);
        if self.clock.delta_as_nanos(since, self.clock.raw()) >= self.poll_ns() {
            self.learn(u64::MAX);
        }
    }

    /// Updates the expected time from the length of a wait.
    fn learn(&self, waited_ns: u64) {
        let limit_ns = self.limit_ns();
        if !self.adapts_to(limit_ns) {
            return;
        }
        let known = match self.expected_ns.load(Ordering::Relaxed) {
            UNKNOWN => 0,
            known => known,
        };
        let expected = match known / 2 {
            _ if waited_ns <= limit_ns => known.max(waited_ns),
            ..SHORTEST_NS => 0,
            half => half,
        };
        self.expected_ns.store(expected, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LIMIT_US: u32 = 200;

    /// A driver that makes a pass every microsecond. Only the driver advances its clock.
    struct Driver {
        clock: quanta::Clock,
        mock: Arc<quanta::Mock>,
        poll: BusyPoll,
    }

    impl Driver {
        fn new(limit_us: u32, is_adaptive: bool) -> Self {
            let (clock, mock) = quanta::Clock::mock();
            mock.increment(1_000);
            let poll = BusyPoll::new(clock.clone(), limit_us, is_adaptive);
            Self { clock, mock, poll }
        }

        /// Waits for an answer that takes `micros`. Returns the number of passes that polled for
        /// it.
        fn wait(&self, micros: u64) -> u64 {
            let begun = self.clock.raw();
            let mut passes = 0;
            while self.clock.raw() - begun < micros * 1_000 {
                match self.poll.poll_on(self.clock.raw()) {
                    Some(_) => self.mock.increment(1_000),
                    None => break,
                }
                passes += 1;
            }
            let slept = (micros * 1_000).saturating_sub(self.clock.raw() - begun);
            self.mock.increment(slept);
            self.poll.found_work(self.clock.raw());
            passes
        }
    }

    #[test]
    fn polls_until_the_answer_once_it_knows_how_long_answers_take() {
        let driver = Driver::new(LIMIT_US, true);
        assert_eq!(driver.wait(10_000), 200, "nothing is known yet: polls as long as it may");
        assert_eq!(driver.wait(80), 0, "the first poll was in vain, so it sleeps at once");
        for _ in 0..100 {
            assert_eq!(driver.wait(80), 80, "polls until the answer");
            assert_eq!(driver.wait(5), 5, "a short wait is no reason to poll for less");
        }
        assert_eq!(driver.wait(150), 150, "polls up to twice the expected time");
    }

    #[test]
    fn polls_no_longer_than_the_limit() {
        let driver = Driver::new(LIMIT_US, true);
        driver.wait(190);
        assert_eq!(driver.wait(201), 200);
        driver.poll.set_limit_us(0);
        assert_eq!(driver.wait(5), 0);
    }

    #[test]
    fn stops_polling_for_answers_that_do_not_come() {
        let driver = Driver::new(LIMIT_US, true);
        driver.wait(100);
        let polled: Vec<_> = (0..10).map(|_| driver.wait(5_000)).collect();
        assert_eq!(polled, [200, 100, 50, 25, 13, 7, 4, 0, 0, 0]);
        for _ in 0..1_000 {
            assert_eq!(driver.wait(5_000), 0);
        }
    }

    #[test]
    fn a_wait_that_the_program_ends_counts_if_the_poll_was_in_vain() {
        let driver = Driver::new(LIMIT_US, true);
        driver.wait(100);
        let act = |after: u64| {
            let polled = driver.poll.poll_on(driver.clock.raw()).is_some();
            driver.mock.increment(after * 1_000);
            driver.poll.expect_answer();
            polled
        };
        for _ in 0..1_000 {
            assert!(act(5), "a wait that ended before the poll was over must not end polling");
        }
        let polls = (0..1_000).filter(|_| act(400)).count();
        assert_eq!(polls, 7);
    }

    #[test]
    fn without_adaptive_polling_every_wait_is_polled_for() {
        let driver = Driver::new(LIMIT_US, false);
        for _ in 0..10 {
            assert_eq!(driver.wait(5_000), 200);
            assert_eq!(driver.wait(20), 20);
        }
    }

    #[test]
    fn long_polling_is_not_adapted() {
        let driver = Driver::new(u32::MAX, true);
        driver.wait(5);
        assert_eq!(driver.wait(5_000), 5_000);
    }
}
