//! Counts the requests of each source that a device refused: wrong keys, addresses out of bounds,
//! missing rights.
//!
//! Correct software never sends such requests, so one mistake is forgiven. A peer that guesses keys
//! loses its connection with each guess. From the second guess on, it cannot connect over RDMA for
//! a while. Each further guess doubles that time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::source::Source;

/// The longest exclusion, however many strikes a source has.
const MOST: Duration = Duration::from_secs(600);
/// The strikes of a source are forgotten after this time without another strike.
const FORGIVEN: Duration = Duration::from_secs(1800);
/// Maximum number of sources to remember. Beyond it, the source whose last strike is the oldest is
/// forgotten.
const SOURCES_MAX: usize = 4096;

/// Counts strikes by source.
pub(crate) struct Strikes {
    /// The exclusion after the second strike. Each further strike doubles it.
    first: Duration,
    by_source: HashMap<Source, Strike>,
}

struct Strike {
    count: u32,
    last: Instant,
}

impl Strikes {
    pub(crate) fn new(first: Duration) -> Self {
        Self { first, by_source: HashMap::new() }
    }

    /// Records that a request of `source` was refused. Returns how long the source is excluded,
    /// or `None` if it is not.
    pub(crate) fn record(&mut self, source: Source, now: Instant) -> Option<Duration> {
        if !self.by_source.contains_key(&source) && self.by_source.len() >= SOURCES_MAX {
            self.by_source
                .retain(|_, strike| now.saturating_duration_since(strike.last) < FORGIVEN);
            let oldest = self
                .by_source
                .iter()
                .min_by_key(|(_, strike)| strike.last)
                .map(|(source, _)| *source);
            if let Some(oldest) = oldest.filter(|_| self.by_source.len() >= SOURCES_MAX) {
                self.by_source.remove(&oldest);
            }
        }
        let strike = self.by_source.entry(source).or_insert(Strike { count: 0, last: now });
        if now.saturating_duration_since(strike.last) >= FORGIVEN {
            strike.count = 0;
        }
        (strike.count, strike.last) = (strike.count.saturating_add(1), now);
        self.wait(source, now)
    }

    /// Returns how long `source` is still excluded.
    pub(crate) fn wait(&self, source: Source, now: Instant) -> Option<Duration> {
        let strike = self.by_source.get(&source)?;
        let doubled = strike.count.checked_sub(2)?;
        let until = strike.last + self.first.saturating_mul(1 << doubled.min(16)).min(MOST);
        until.checked_duration_since(now).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::source as named;

    const FIRST: Duration = Duration::from_secs(1);

    fn source(number: u32) -> Source {
        named(&std::net::Ipv4Addr::from(number).to_string())
    }

    #[test]
    fn forgives_one_strike_and_doubles_the_exclusion_with_each_further_one() {
        let (mut strikes, now) = (Strikes::new(FIRST), Instant::now());
        assert_eq!(strikes.record(source(1), now), None);
        assert_eq!(strikes.record(source(1), now), Some(FIRST));
        assert_eq!(strikes.record(source(1), now), Some(FIRST * 2));
        assert_eq!(strikes.wait(source(1), now + FIRST), Some(FIRST));
        assert_eq!(strikes.wait(source(1), now + FIRST * 2), None);
        assert_eq!(strikes.wait(source(2), now), None, "another source");
        let longest = (0..100).filter_map(|_| strikes.record(source(1), now)).max();
        assert_eq!(longest, Some(MOST));
        assert_eq!(
            strikes.record(source(1), now + FORGIVEN),
            None,
            "earlier strikes are forgotten"
        );
    }

    #[test]
    fn counts_all_addresses_of_a_host_together() {
        let (mut strikes, now) = (Strikes::new(FIRST), Instant::now());
        strikes.record(named("2001:db8::1"), now);
        assert!(strikes.record(named("2001:db8::2"), now).is_some());
        assert!(strikes.wait(named("2001:db8::3"), now).is_some());
    }

    #[test]
    fn forgets_the_oldest_source_when_full() {
        let (mut strikes, now) = (Strikes::new(FIRST), Instant::now());
        for number in 0..SOURCES_MAX as u32 + 100 {
            strikes.record(source(number), now + Duration::from_millis(number.into()));
        }
        assert_eq!(strikes.by_source.len(), SOURCES_MAX);
        assert!(!strikes.by_source.contains_key(&source(0)), "the oldest is forgotten");
    }
}
