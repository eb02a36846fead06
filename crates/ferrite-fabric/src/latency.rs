//! Latency histograms with power-of-two buckets, cheap enough to be always on.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of buckets. The last bucket counts operations that took 2^39 ns (about nine minutes) or
/// longer.
const BUCKETS: usize = 41;

/// The histograms by operation, shared by the fabric and its links.
#[derive(Debug, Default)]
pub(crate) struct Latencies {
    pub(crate) send: Histogram,
    pub(crate) write: Histogram,
    pub(crate) read: Histogram,
}

#[derive(Debug)]
pub(crate) struct Histogram([AtomicU64; BUCKETS]);

impl Default for Histogram {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; BUCKETS])
    }
}

impl Histogram {
    pub(crate) fn record(&self, nanoseconds: u64) {
        let bucket = (u64::BITS - nanoseconds.leading_zeros()) as usize;
        self.0[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> LatencyStats {
        LatencyStats { buckets: std::array::from_fn(|at| self.0[at].load(Ordering::Relaxed)) }
    }
}

/// The latencies of operations that succeeded, from their start to their completion. Includes all
/// of them that a caller waited for and, over RDMA, a sample of the others.
///
/// ```
/// # fn show(fabric: &ferrite_fabric::Fabric) {
/// let send = fabric.stats().send_latency;
/// let (half, most) = (send.within(50.0), send.within(99.0));
/// println!("{} sends, half of them within {half:?}, 99 % within {most:?}", send.count());
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LatencyStats {
    /// Bucket `n` counts operations that took less than 2^n nanoseconds and at least half of that.
    /// Bucket 0 counts those that took 0. The last bucket also counts those that took longer.
    buckets: [u64; BUCKETS],
}

impl LatencyStats {
    /// Returns the number of operations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the upper bound and the count of each bucket that is not empty. The last of all
    /// buckets, with the bound 2^40 ns, also counts operations that took longer.
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        let bounds = self
            .buckets
            .iter()
            .enumerate()
            .map(|(at, count)| (Duration::from_nanos(1 << at), *count));
        bounds.filter(|(_, count)| *count > 0)
    }

    /// Returns a duration within which `percent` of the operations finished, accurate to a factor
    /// of two. Returns zero if there were no operations.
    #[must_use]
    pub fn within(&self, percent: f64) -> Duration {
        let wanted = self.count() as f64 * percent / 100.0;
        let mut seen = 0;
        for (bound, count) in self.buckets() {
            seen += count;
            if seen as f64 >= wanted {
                return bound;
            }
        }
        Duration::ZERO
    }
}

impl fmt::Debug for LatencyStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.buckets()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_power_of_two_and_computes_percentiles() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().within(50.0), Duration::ZERO);
        for nanoseconds in [0, 1, 3, 1000, 1023, 1024, u64::MAX] {
            histogram.record(nanoseconds);
        }
        let stats = histogram.snapshot();
        assert_eq!(stats.count(), 7);
        let buckets: Vec<_> =
            stats.buckets().map(|(bound, count)| (bound.as_nanos(), count)).collect();
        assert_eq!(buckets, [(1, 1), (2, 1), (4, 1), (1024, 2), (2048, 1), (1 << 40, 1)]);
        assert_eq!(stats.within(50.0), Duration::from_nanos(1024));
        assert_eq!(stats.within(100.0), Duration::from_nanos(1 << 40));
    }
}
