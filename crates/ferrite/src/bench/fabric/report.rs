//! The result, as text and as JSON.

use std::fmt::Write as _;
use std::net::SocketAddr;

use anyhow::Context as _;
use ferrite_fabric::Link;
use ferrite_verbs::Verbs;
use serde::Serialize;

use super::Measure;
use super::bandwidth::Transferred;
use super::idle;
use super::plan::Case;
use super::protocol::{Resources, Work};
use super::side;
use crate::choice::{Mode, Op, name};
use crate::exit::Failure;
use crate::latency::{self, Latency};
use crate::output;

/// The path of the messages: device, MTU and addresses.
#[derive(Debug, Clone, Serialize)]
pub(in crate::bench) struct PathInfo {
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    /// Whether the device is emulated in software.
    software: bool,
    mtu_bytes: u32,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
}

impl PathInfo {
    pub(in crate::bench) fn of(verbs: &Verbs, link: &Link) -> anyhow::Result<Self> {
        let device = verbs.device(&link.device().context("the link does not use RDMA")?)?;
        Ok(Self {
            device: device.name(),
            driver: device.driver(),
            software: device.quirks().is_software,
            mtu_bytes: link.mtu().context("the link has no RDMA path")?.bytes(),
            local: link.local_addr(),
            peer: link.peer_addr(),
        })
    }

    /// Formats the first lines of the result. `mode` says how both sides wait.
    pub(in crate::bench) fn text(&self, links: u32, mode: &str) -> String {
        let many = if links == 1 { "1 link".to_owned() } else { format!("{links} links") };
        let caveat = match self.software {
            false => "",
            true => "Software device: compare ratios only, not absolute times.\n",
        };
        format!(
            "{} → {} over {}, {many}, MTU {}, {mode}\n{caveat}",
            side::name(self.local),
            side::name(self.peer),
            self.device,
            self.mtu_bytes
        )
    }
}

/// The result of one case.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) op: Op,
    pub(super) measure: Measure,
    pub(super) size_bytes: u32,
    pub(super) seconds: f64,
    #[serde(flatten)]
    pub(super) figures: Figures,
    pub(super) client: Work,
    pub(super) server: Work,
}

#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(super) enum Figures {
    Latency {
        latency_of: &'static str,
        iterations: u64,
        warmup: u64,
        latency_us: Latency,
    },
    Bandwidth {
        window: u32,
        warmup: u64,
        messages: u64,
        bytes: u64,
        #[serde(serialize_with = "latency::two_decimals")]
        mib_per_s: f64,
        #[serde(serialize_with = "latency::two_decimals")]
        messages_per_s: f64,
    },
}

impl Figures {
    pub(super) fn of_bandwidth(case: &Case, transferred: Transferred) -> Self {
        let Transferred { messages, time } = transferred;
        let bytes = messages * u64::from(case.size);
        let per_second = |count: u64| {
            #[expect(clippy::cast_precision_loss, reason = "2^53 bytes are 8 PiB")]
            let count = count as f64;
            count / time.as_secs_f64().max(1e-9)
        };
        Self::Bandwidth {
            window: case.window,
            warmup: case.warmup,
            messages,
            bytes,
            mib_per_s: per_second(bytes) / f64::from(1 << 20),
            messages_per_s: per_second(messages),
        }
    }
}

/// The result of a client.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    format: u32,
    role: &'static str,
    mode: Mode,
    links: u32,
    #[serde(flatten)]
    path: PathInfo,
    server: Resources,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle: Option<idle::Figures>,
    results: Vec<Row>,
    notes: Vec<String>,
    /// The failure that ended the benchmark early.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
}

impl Report {
    #[expect(clippy::too_many_arguments, reason = "one for each part of the report")]
    pub(super) fn new(
        mode: Mode,
        links: u32,
        path: PathInfo,
        server: Resources,
        idle: Option<idle::Figures>,
        results: Vec<Row>,
        notes: Vec<String>,
        error: Option<Failure>,
    ) -> Self {
        Self { format: 1, role: "client", mode, links, path, server, idle, results, notes, error }
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        output::print(self, json, Self::text)
    }

    fn text(&self) -> String {
        let mut out = self.path.text(self.links, &format!("{} mode", name(&self.mode)));
        if let Some(idle) = &self.idle {
            out += &idle_text(idle);
        }
        self.latencies(&mut out);
        self.bandwidths(&mut out);
        for note in &self.notes {
            let _ = writeln!(out, "\nNote: {note}.");
        }
        out
    }

    fn latencies(&self, out: &mut String) {
        let mut heading = Some(latency::heading());
        for row in &self.results {
            let Figures::Latency { latency_of, latency_us, .. } = &row.figures else { continue };
            if let Some(heading) = heading.take() {
                let _ = writeln!(out, "\n{:27}{heading}", "latency, µs");
            }
            let case = format!("{:5} {:>5} ", name(&row.op), size_text(row.size_bytes));
            let _ = writeln!(out, "{case}{:15}{}", latency_of.replace('_', " "), latency_us.row());
        }
    }

    fn bandwidths(&self, out: &mut String) {
        let mut first = true;
        for row in &self.results {
            let Figures::Bandwidth { window, mib_per_s, messages_per_s, .. } = &row.figures else {
                continue;
            };
            if std::mem::take(&mut first) {
                let _ = writeln!(out, "\nbandwidth      MiB/s  messages/s  window  seconds");
            }
            let case = format!("{:5} {:>5} ", name(&row.op), size_text(row.size_bytes));
            let seconds = row.seconds;
            let _ = writeln!(
                out,
                "{case}{mib_per_s:>8.1}  {messages_per_s:>10.0}  {window:>6}  {seconds:>7.2}"
            );
        }
    }
}

fn idle_text(idle: &idle::Figures) -> String {
    let idle::Figures {
        asked,
        open,
        seconds,
        pinned_bytes_per_link,
        kept,
        close_seconds,
        failures,
    } = idle;
    let mut text = format!(
        "{open} of {asked} idle links opened in {seconds:.2} s; the server pins \
         {pinned_bytes_per_link:.0} bytes for each;\n{kept} still open at the end, closed in \
         {close_seconds:.2} s\n"
    );
    for (kind, idle::Failures { count, example }) in failures {
        let _ = writeln!(text, "  {kind}: {count} failed, first error: {example}");
    }
    text
}

/// Formats a size as the user may type it.
pub(in crate::bench) fn size_text(bytes: u32) -> String {
    ferrite_config::size::format(bytes.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::plan::Amount;
    use super::*;

    fn report() -> Report {
        let path = PathInfo {
            device: "rxe2".into(),
            driver: Some("rxe".into()),
            software: true,
            mtu_bytes: 4096,
            local: "10.0.0.2:4711".parse().ok(),
            peer: "10.0.0.1:7472".parse().ok(),
        };
        let work: Work =
            serde_json::from_str(r#"{"passes":1,"completions":2,"sleeps":3}"#).expect("counters");
        let resources = Resources { links: 3, registered_bytes: 1, receives_posted: 512 };
        let case = Case {
            op: Op::Write,
            measure: Measure::Bandwidth,
            size: 64 << 10,
            warmup: 16,
            amount: Amount::Operations(160),
            window: 16,
        };
        let transferred = Transferred { messages: 160, time: Duration::from_millis(500) };
        let latency_us =
            Latency { min: 1.0, p50: 2.0, p90: 3.0, p99: 4.0, p99_9: 5.0, max: 6.0, mean: 2.5 };
        let rows = vec![
            Row {
                op: Op::Send,
                measure: Measure::Latency,
                size_bytes: 64,
                seconds: 0.1,
                figures: Figures::Latency {
                    latency_of: "half_round_trip",
                    iterations: 1000,
                    warmup: 100,
                    latency_us,
                },
                client: work,
                server: work,
            },
            Row {
                op: Op::Write,
                measure: Measure::Bandwidth,
                size_bytes: 64 << 10,
                seconds: 0.5,
                figures: Figures::of_bandwidth(&case, transferred),
                client: work,
                server: work,
            },
        ];
        let idle = idle::Figures {
            asked: 2000,
            open: 1999,
            seconds: 3.5,
            pinned_bytes_per_link: 12.0,
            kept: 1998,
            close_seconds: 1.0,
            failures: [("timeout", idle::Failures { count: 1, example: "no answer".into() })]
                .into(),
        };
        Report::new(
            Mode::Poll,
            3,
            path,
            resources,
            Some(idle),
            rows,
            vec!["nothing more".into()],
            None,
        )
    }

    #[test]
    fn formats_text() {
        let expected = "\
10.0.0.2:4711 → 10.0.0.1:7472 over rxe2, 3 links, MTU 4096, poll mode
Software device: compare ratios only, not absolute times.
1999 of 2000 idle links opened in 3.50 s; the server pins 12 bytes for each;
1998 still open at the end, closed in 1.00 s
  timeout: 1 failed, first error: no answer

latency, µs                     min      p50      p90      p99    p99.9      max     mean
send     64 half round trip    1.00     2.00     3.00     4.00     5.00     6.00     2.50

bandwidth      MiB/s  messages/s  window  seconds
write  64kb     20.0         320      16     0.50

Note: nothing more.
";
        assert_eq!(report().text(), expected);
    }

    #[test]
    fn formats_json() {
        let json = serde_json::to_value(report()).expect("a report");
        assert_eq!(
            (&json["device"], &json["mode"], &json["links"]),
            (&"rxe2".into(), &"poll".into(), &3.into())
        );
        assert_eq!(json["results"][0]["latency_us"]["p99_9"], 5.0);
        assert_eq!(json["results"][1]["mib_per_s"], 20.0);
        assert_eq!(json["results"][1]["server"]["sleeps"], 3);
        assert_eq!((&json["idle"]["open"], &json["server"]["links"]), (&1999.into(), &3.into()));
    }

    #[test]
    fn sizes() {
        let shown: Vec<_> = [1, 64, 1024, 1000, 64 << 10, 3 << 19, 1 << 20].map(size_text).into();
        assert_eq!(shown, ["1", "64", "1kb", "1000", "64kb", "1536kb", "1mb"]);
    }
}
