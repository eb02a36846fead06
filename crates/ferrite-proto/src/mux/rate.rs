//! Rates: how fast the peer opens streams, and which streams send so much that they are bulk.

use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Limits the streams that the peer opens in a second. After a pause, a second's worth of streams
/// may be opened at once.
#[derive(Debug)]
pub(super) struct OpenRate {
    interval: Duration,
    /// Each admitted stream takes one interval, which begins at the end of the previous one or now,
    /// if that is later. This is the end of the last interval; it is at most a second from now.
    paid_until: Option<Instant>,
}

impl OpenRate {
    pub(super) fn new(opens_per_second: u32) -> Self {
        Self { interval: SECOND / opens_per_second.max(1), paid_until: None }
    }

    /// Counts a stream. Returns whether it is within the limit.
    pub(super) fn admit(&mut self, now: Instant) -> bool {
        let begin = self.paid_until.map_or(now, |until| until.max(now));
        let until = begin + self.interval;
        if until - now > SECOND {
            return false;
        }
        self.paid_until = Some(until);
        true
    }
}

/// Measures how many bytes a stream sends in a second.
#[derive(Debug)]
pub(super) struct Traffic {
    limit: u64,
    /// When the current second has begun.
    begun: Option<Instant>,
    /// The number of bytes in the current second.
    bytes: u64,
    is_bulk: bool,
}

impl Traffic {
    pub(super) fn new(bulk_bytes_per_second: u64) -> Self {
        Self { limit: bulk_bytes_per_second, begun: None, bytes: 0, is_bulk: false }
    }

    /// Counts bytes. Returns whether the stream is bulk.
    pub(super) fn count(&mut self, now: Instant, bytes: u64) -> bool {
        let elapsed = self.begun.map_or(SECOND, |begun| now.saturating_duration_since(begun));
        if elapsed >= SECOND {
            let was_quiet = elapsed >= SECOND * 2; // the second after the counted one had no bytes
            self.is_bulk &= self.bytes >= self.limit / 4 && !was_quiet;
            self.begun = Some(now);
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.is_bulk |= self.bytes > self.limit;
        self.is_bulk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admits_a_second_of_opens_at_once_and_then_the_rate() {
        let (now, mut rate) = (Instant::now(), OpenRate::new(100));
        assert_eq!((0..200).filter(|_| rate.admit(now)).count(), 100);
        let later = now + Duration::from_millis(55);
        assert_eq!((0..200).filter(|_| rate.admit(later)).count(), 5);
        assert_eq!((0..200).filter(|_| rate.admit(now + SECOND * 9)).count(), 100);
    }

    #[test]
    fn streams_are_bulk_while_they_send_much() {
        let (now, mut traffic) = (Instant::now(), Traffic::new(1000));
        let at = |ms: u64| now + Duration::from_millis(ms);
        assert!(!traffic.count(at(0), 1000));
        assert!(traffic.count(at(999), 1), "more than the limit in a second");
        assert!(
            traffic.count(at(1000), 240),
            "a bulk stream stays bulk until a second has less than a quarter of the limit"
        );
        assert!(traffic.count(at(1900), 10), "a bulk stream stays bulk within a second");
        assert!(traffic.count(at(2100), 249), "the last second had a quarter of the limit");
        assert!(!traffic.count(at(3200), 1), "the last second had less than a quarter");
        assert!(traffic.count(at(3300), 1000));
        assert!(!traffic.count(at(5300), 10), "a stream is not bulk after a pause");
        assert!(!traffic.count(at(6299), 990));
        assert!(!traffic.count(at(6300), 900), "two seconds, each within the limit");
    }
}
