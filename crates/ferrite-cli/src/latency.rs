//! `--latency` and `--latency-history`: measure round trips of PING.

use std::time::{Duration, Instant};

use crate::format::Style;
use crate::output;
use crate::server::Server;

/// The time between two samples.
const PAUSE: Duration = Duration::from_millis(10);
const HISTORY_INTERVAL: Duration = Duration::from_secs(15);
/// How long `--latency` measures if its output is not for people.
const UNATTENDED_INTERVAL: Duration = Duration::from_secs(1);

/// Statistics of the round trips so far.
#[derive(Debug, Default)]
struct Samples {
    count: u32,
    min: Duration,
    max: Duration,
    sum: Duration,
}

impl Samples {
    fn add(&mut self, time: Duration) {
        self.min = if self.count == 0 { time } else { self.min.min(time) };
        self.max = self.max.max(time);
        self.sum += time;
        self.count += 1;
    }

    fn mean(&self) -> Duration {
        self.sum / self.count.max(1)
    }

    /// Formats the statistics in milliseconds, as redis-cli does. JSON also has microseconds.
    fn line(&self, style: Style) -> String {
        let Self { count, min, max, .. } = self;
        let (min_ms, max_ms, mean_ms) =
            (min.as_millis(), max.as_millis(), self.mean().as_secs_f64() * 1e3);
        match style {
            Style::Human => {
                format!("min: {min_ms}, max: {max_ms}, avg: {mean_ms:.2} ({count} samples)")
            }
            Style::Csv => format!("{min_ms},{max_ms},{mean_ms:.2},{count}\n"),
            Style::Raw => format!("{min_ms} {max_ms} {mean_ms:.2} {count}\n"),
            Style::Json | Style::QuotedJson => format!(
                "{{\"min\": {min_ms}, \"max\": {max_ms}, \"avg\": {mean_ms:.2}, \"count\": {count}, \
                 \"min_us\": {}, \"max_us\": {}, \"avg_us\": {}}}\n",
                min.as_micros(),
                max.as_micros(),
                self.mean().as_micros()
            ),
        }
    }
}

/// Measures the latency. For people, updates one line until interrupted. In other styles, prints
/// one line at the end of the interval. With `history`, prints one line for each interval.
pub(crate) async fn run(server: &mut Server, history: bool) -> anyhow::Result<()> {
    let style = server.settings.format.style;
    let default = if history { HISTORY_INTERVAL } else { UNATTENDED_INTERVAL };
    let interval = server.settings.interval.unwrap_or(default);
    let mut begun = Instant::now();
    let mut samples = Samples::default();
    loop {
        let sent = Instant::now();
        server.request_with_reconnects(&["PING"]).await?;
        samples.add(sent.elapsed());
        if style == Style::Human {
            output::write_own(format!("\x1b[0G\x1b[2K{}", samples.line(style)).as_bytes())?;
        }
        if begun.elapsed() > interval && (history || style != Style::Human) {
            match style {
                Style::Human => {
                    let seconds = begun.elapsed().as_secs_f64();
                    output::write(format!(" -- {seconds:.2} seconds range\n").as_bytes())?;
                }
                _ => output::write(samples.line(style).as_bytes())?,
            }
            if !history {
                return Ok(());
            }
            (begun, samples) = (Instant::now(), Samples::default());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_statistics() {
        let mut samples = Samples::default();
        [1500, 2500].iter().for_each(|time| samples.add(Duration::from_micros(*time)));
        assert_eq!(samples.line(Style::Human), "min: 1, max: 2, avg: 2.00 (2 samples)");
        assert_eq!(samples.line(Style::Raw), "1 2 2.00 2\n");
        assert_eq!(samples.line(Style::Csv), "1,2,2.00,2\n");
        let json = samples.line(Style::Json);
        assert!(json.contains("\"min_us\": 1500, \"max_us\": 2500, \"avg_us\": 2000}"), "{json}");
    }
}
