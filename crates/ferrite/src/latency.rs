//! Measures round trips with the CPU's counter and reports percentiles.
//!
//! The recorder reads the clock right after each post, while the message is on its way. The time
//! between two readings is one round trip. The clock is the CPU's time stamp counter, if that
//! counter is steady. Some hosts, such as many virtual machines, do not map the kernel's clock into
//! the process: reading it there costs a system call.

use std::time::Instant;

use hdrhistogram::Histogram;
use serde::{Serialize, Serializer};

/// Records the duration of round trips.
pub(crate) struct Recorder {
    clock: quanta::Clock,
    /// The start, in ticks and on the kernel's clock. A second pair at the end gives the length of
    /// a tick.
    started: (u64, Instant),
    warmup: u64,
    posted: u64,
    last: u64,
    ticks: Histogram<u64>,
}

/// Durations of round trips, in ticks of the counter.
pub(crate) struct RoundTrips {
    pub(crate) ticks: Histogram<u64>,
    pub(crate) us_per_tick: f64,
}

impl Recorder {
    /// Creates a recorder that skips the first `warmup` round trips, at least one.
    pub(crate) fn new(warmup: u64) -> anyhow::Result<Self> {
        /// About an hour for a counter of 2.4 GHz. Longer round trips are recorded as this value.
        const LONGEST_TICKS: u64 = 1 << 43;
        let clock = quanta::Clock::new();
        let started = (clock.raw(), Instant::now());
        let ticks = Histogram::new_with_bounds(1, LONGEST_TICKS, 3)?;
        Ok(Self { clock, started, warmup: warmup.max(1), posted: 0, last: 0, ticks })
    }

    /// Records that a message has just been posted.
    pub(crate) fn posted(&mut self) {
        let now = self.clock.raw();
        if self.posted >= self.warmup {
            self.ticks.saturating_record(now.saturating_sub(self.last));
        }
        self.posted += 1;
        self.last = now;
    }

    /// Returns the recorded round trips.
    pub(crate) fn finish(self) -> RoundTrips {
        let (ticks, time) =
            (self.clock.raw().saturating_sub(self.started.0), self.started.1.elapsed());
        #[expect(clippy::cast_precision_loss, reason = "2^53 ticks are a month")]
        let us_per_tick = time.as_secs_f64() * 1e6 / ticks.max(1) as f64;
        RoundTrips { ticks: self.ticks, us_per_tick }
    }
}

/// Percentiles of latency, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Latency {
    #[serde(serialize_with = "two_decimals")]
    pub(crate) min: f64,
    #[serde(serialize_with = "two_decimals")]
    pub(crate) p50: f64,
    #[serde(serialize_with = "two_decimals")]
    pub(crate) p90: f64,
    #[serde(serialize_with = "two_decimals")]
    pub(crate) p99: f64,
    #[serde(serialize_with = "two_decimals")]
    pub(crate) p99_9: f64,
    #[serde(serialize_with = "two_decimals")]
    pub(crate) max: f64,
    #[serde(serialize_with = "two_decimals")]
    pub(crate) mean: f64,
}

/// Writes a figure with at most two decimals: no measurement is more exact.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde requires this signature")]
pub(crate) fn two_decimals<S: Serializer>(figure: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((figure * 100.0).round() / 100.0)
}

impl Latency {
    /// Computes the percentiles of round trips, each divided by `parts`.
    pub(crate) fn of(RoundTrips { ticks, us_per_tick }: &RoundTrips, parts: f64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "2^53 ticks are a month")]
        let us = |ticks: u64| ticks as f64 * us_per_tick / parts;
        let at = |quantile| us(ticks.value_at_quantile(quantile));
        Self {
            min: us(ticks.min()),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            max: us(ticks.max()),
            mean: ticks.mean() * us_per_tick / parts,
        }
    }

    /// Formats a row of a table, under [`heading`].
    pub(crate) fn row(&self) -> String {
        let columns = [self.min, self.p50, self.p90, self.p99, self.p99_9, self.max, self.mean];
        columns.map(|us| format!("{us:>8.2}")).join(" ")
    }
}

/// Formats the column names for [`Latency::row`].
pub(crate) fn heading() -> String {
    ["min", "p50", "p90", "p99", "p99.9", "max", "mean"].map(|name| format!("{name:>8}")).join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divides_round_trips_and_converts_to_microseconds() {
        let mut ticks = Histogram::new_with_bounds(1, 1_000_000_000, 3).expect("bounds");
        for value in [4_000, 8_000, 8_000, 20_000] {
            ticks.record(value).expect("in bounds");
        }
        let latency = Latency::of(&RoundTrips { ticks, us_per_tick: 0.0005 }, 2.0);
        assert!(
            (latency.min - 1.0).abs() < 0.01 && (latency.p50 - 2.0).abs() < 0.01,
            "{latency:?}"
        );
        assert!(
            (latency.max - 5.0).abs() < 0.01 && (latency.mean - 2.5).abs() < 0.01,
            "{latency:?}"
        );
    }

    #[test]
    fn json_has_at_most_two_decimals() {
        let figures = [579_338.239_000_000_1, 0.1 + 0.2, 12.0];
        let [min, p50, p90] = figures;
        let latency = Latency { min, p50, p90, p99: 1.005, p99_9: 2.0, max: 3.0, mean: 4.999 };
        let json = serde_json::to_string(&latency).expect("JSON");
        assert!(json.starts_with(r#"{"min":579338.24,"p50":0.3,"p90":12.0,"#), "{json}");
        assert!(json.ends_with(r#""mean":5.0}"#), "{json}");
    }

    #[test]
    fn skips_warm_up_round_trips() {
        let mut recorder = Recorder::new(3).expect("bounds");
        (0..10).for_each(|_| recorder.posted());
        assert_eq!(recorder.finish().ticks.len(), 7);
    }
}
