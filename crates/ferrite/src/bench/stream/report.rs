//! The result, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::Over;
use super::exchange::{Measured, Test};
use super::fabric::{Measure, PathInfo, size_text};
use crate::latency::{self, Latency};
use crate::output;

/// The result of one test.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    measure: Measure,
    size_bytes: u32,
    rounds: u64,
    transfers: u64,
    seconds: f64,
    #[serde(serialize_with = "latency::two_decimals")]
    us_per_transfer: f64,
    #[serde(serialize_with = "latency::two_decimals")]
    mib_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_us: Option<Latency>,
}

impl Row {
    pub(super) fn new(measure: Measure, test: Test, measured: &Measured) -> Self {
        let Test { size_bytes, rounds, transfers, .. } = test;
        let seconds = measured.time.as_secs_f64().max(1e-9);
        #[expect(clippy::cast_precision_loss, reason = "2^53 transfers would take years")]
        let both_ways = (2 * rounds * transfers) as f64;
        Self {
            measure,
            size_bytes,
            rounds,
            transfers,
            seconds,
            us_per_transfer: seconds * 1e6 / both_ways,
            mib_per_s: both_ways * f64::from(size_bytes) / f64::from(1 << 20) / seconds,
            // A single round has no latency: the recorder skips the first one.
            latency_us: (measure == Measure::Latency && rounds > 1)
                .then(|| Latency::of(&measured.rounds, 2.0)),
        }
    }
}

/// The result of a client.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    format: u32,
    role: &'static str,
    over: Over,
    busy_poll_us: u32,
    /// The device and the addresses, for RDMA.
    #[serde(flatten)]
    path: Option<PathInfo>,
    results: Vec<Row>,
}

impl Report {
    pub(super) fn new(
        busy_poll_us: u32,
        over: Over,
        path: Option<PathInfo>,
        results: Vec<Row>,
    ) -> Self {
        Self { format: 1, role: "client", over, busy_poll_us, path, results }
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        output::print(self, json, Self::text)
    }

    fn text(&self) -> String {
        let mode = format!("busy-polls for up to {} µs", self.busy_poll_us);
        let mut out = match (&self.path, self.over) {
            (Some(path), _) => path.text(1, &mode),
            (None, Over::Tokio) => "tokio's TCP stream\n".to_owned(),
            (None, _) => format!("over TCP, {mode}\n"),
        };
        let mut heading = Some(latency::heading());
        for row in &self.results {
            let Some(latency_us) = &row.latency_us else { continue };
            if let Some(heading) = heading.take() {
                let _ = writeln!(out, "\nlatency, µs {heading}");
            }
            let _ = writeln!(out, "{:>11} {}", size_text(row.size_bytes), latency_us.row());
        }
        let mut first = true;
        for row in self.results.iter().filter(|row| row.measure == Measure::Bandwidth) {
            if std::mem::take(&mut first) {
                let _ = writeln!(out, "\nbandwidth    MiB/s  writes each way  seconds");
            }
            let Row { size_bytes, transfers, seconds, mib_per_s, .. } = row;
            let size = size_text(*size_bytes);
            let _ = writeln!(out, "{size:>9} {mib_per_s:>8.1}  {transfers:>15}  {seconds:>7.2}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::latency::Recorder;

    #[test]
    fn counts_bytes_of_both_directions() {
        let mut recorder = Recorder::new(1).expect("bounds");
        (0..3).for_each(|_| recorder.posted());
        let measured = Measured { time: Duration::from_secs(2), rounds: recorder.finish() };
        let test = Test { size_bytes: 1 << 20, rounds: 1, transfers: 10, busy_poll_us: 0 };
        let row = Row::new(Measure::Bandwidth, test, &measured);
        assert!(
            (row.mib_per_s - 10.0).abs() < 1e-6 && (row.us_per_transfer - 1e5).abs() < 1e-3,
            "{row:?}"
        );
        assert!(row.latency_us.is_none());
    }
}
