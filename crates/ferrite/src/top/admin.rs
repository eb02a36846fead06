//! A program with an admin port: Prometheus text over HTTP.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

use super::snapshot::{LatencyRow, Snapshot};
use super::source::Source;
use crate::address;
use crate::engine_client::{Answer, TIMEOUT};

const DEFAULT_PORT: u16 = 9121;

/// Metrics and their names in `Snapshot::totals`. If a metric has a label here, only samples with
/// that label count. Several metrics may have the same name here, and their values are added: a
/// program exports either the gateway's metrics or the relay's.
const TOTALS: [(&str, &str); 28] = [
    ("ferrite_sessions_refused_total", "refused"),
    ("ferrite_sessions_killed_total", "killed"),
    ("ferrite_sessions_evicted_total", "evicted"),
    ("ferrite_sessions_opened_total{client=ferrite}", "opened_ferrite"),
    ("ferrite_sessions_opened_total{client=valkey}", "opened_valkey"),
    ("ferrite_sessions_opened_total{client=tcp}", "opened_tcp"),
    ("ferrite_relay_sessions_opened_total{transport=rdma}", "opened_ferrite"),
    ("ferrite_relay_sessions_opened_total{transport=tcp}", "opened_tcp"),
    ("ferrite_engine_connect_failures_total", "engine_failures"),
    ("ferrite_relay_connect_failures_total", "engine_failures"),
    ("ferrite_commands_total{path=called}", "called"),
    ("ferrite_commands_total{path=proxied}", "proxied"),
    ("ferrite_session_bytes_total{direction=to_engine}", "in_bytes"),
    ("ferrite_session_bytes_total{direction=to_client}", "out_bytes"),
    ("ferrite_relay_bytes_total{direction=to_server}", "in_bytes"),
    ("ferrite_relay_bytes_total{direction=to_client}", "out_bytes"),
    ("ferrite_rdma_operations_total{type=send}", "send_ops"),
    ("ferrite_rdma_operations_total{type=recv}", "recv_ops"),
    ("ferrite_rdma_operations_total{type=read}", "read_ops"),
    ("ferrite_rdma_operations_total{type=write}", "write_ops"),
    ("ferrite_rdma_bytes_total{type=send}", "send_bytes"),
    ("ferrite_rdma_bytes_total{type=recv}", "recv_bytes"),
    ("ferrite_rdma_bytes_total{type=read}", "read_bytes"),
    ("ferrite_rdma_bytes_total{type=write}", "write_bytes"),
    ("ferrite_rdma_tcp_bytes_total", "tcp_bytes"),
    ("ferrite_rdma_completions_total", "completions"),
    ("ferrite_rdma_links_failed_total", "failed_links"),
    ("ferrite_rdma_migrations_total", "migrations"),
];
const MEMORY: [(&str, &str); 5] = [
    ("ferrite_memory_registered_bytes", "registered"),
    ("ferrite_memory_registered_max_bytes", "limit"),
    ("ferrite_memory_send_in_use_bytes", "send"),
    ("ferrite_memory_receive_in_use_bytes", "receive"),
    ("ferrite_memory_exposed_bytes", "windows"),
];

/// An admin port.
#[derive(Debug, Clone)]
pub(super) struct Admin {
    address: SocketAddr,
    /// The host and the port as they were given.
    host: String,
}

impl Admin {
    /// Parses `http://HOST:PORT`, also without `http://`, and with `/metrics`.
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        let rest = match url.split_once("://") {
            None => url,
            Some(("http", rest)) => rest,
            Some((scheme, _)) => {
                return Err(format!("{scheme}:// is not supported; expected http://HOST:PORT"));
            }
        };
        let host = rest.trim_end_matches('/').trim_end_matches("/metrics").to_owned();
        Ok(Self { address: address::parse::<DEFAULT_PORT>(&host)?, host })
    }

    fn fetch(&self) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        // HTTP 1.0: the answer is not chunked, and ends with the connection.
        let request = format!("GET /metrics HTTP/1.0\r\nHost: {}\r\n\r\n", self.host);
        stream.write_all(request.as_bytes())?;
        let (mut answer, mut input) = (Answer::new(), vec![0; 16 << 10]);
        loop {
            match stream.read(&mut input)? {
                0 => break,
                count => answer.add(&input[..count])?,
            }
        }
        let answer = String::from_utf8(answer.bytes).context("the answer is not text")?;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .context("the answer is not HTTP; is it the port of admin-listen?")?;
        let status = head.split_whitespace().nth(1).unwrap_or_default();
        ensure!(status == "200", "the HTTP status is {}", head.lines().next().unwrap_or_default());
        Ok(body.to_owned())
    }
}

impl Source for Admin {
    fn address(&self) -> String {
        self.host.clone()
    }

    fn poll(&mut self) -> anyhow::Result<Snapshot> {
        let text =
            self.fetch().with_context(|| format!("cannot read http://{}/metrics", self.host))?;
        Ok(snapshot(&parse(&text)))
    }

    fn kill(&mut self, _: u64) -> anyhow::Result<()> {
        bail!("an admin port cannot end sessions")
    }
}

/// A sample: the metric's name, its labels and its value.
#[derive(Debug, PartialEq)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative")]
    fn count(&self) -> u64 {
        self.value.max(0.0) as u64
    }
}

/// Parses the text format. Comments and lines that are no samples are skipped.
fn parse(text: &str) -> Vec<Sample> {
    text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect()
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, behind) = rest.split_once("=\"")?;
            let (value, behind) = quoted(behind)?;
            labels.insert(label.to_owned(), value);
            rest = behind.strip_prefix(',').unwrap_or(behind);
        }
        rest = &rest[1..];
    }
    // A time stamp or an exemplar may follow the value.
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// Returns the value of a label up to its closing quote, and the text after the quote.
fn quoted(text: &str) -> Option<(String, &str)> {
    let (mut value, mut chars) = (String::new(), text.char_indices());
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

fn snapshot(samples: &[Sample]) -> Snapshot {
    let of = |name: &'static str| samples.iter().filter(move |sample| sample.name == name);
    let sum = |selected: &str| {
        let (name, label) = match selected.split_once('{') {
            Some((name, label)) => (name, label.trim_end_matches('}').split_once('=')),
            None => (selected, None),
        };
        let mut found = samples.iter().filter(|sample| {
            sample.name == name && label.is_none_or(|(label, value)| sample.label(label) == value)
        });
        let first = found.next()?.count();
        Some(found.fold(first, |sum, sample| sum.saturating_add(sample.count())))
    };
    let mut totals = BTreeMap::new();
    for (metric, name) in TOTALS {
        if let Some(count) = sum(metric) {
            let total: &mut u64 = totals.entry(name).or_default();
            *total = total.saturating_add(count);
        }
    }
    // Flushed requests were in flight when a connection ended. They are not errors.
    let errors = of("ferrite_rdma_completion_errors_total");
    let errors = errors.filter(|sample| !sample.label("status").contains("flush"));
    let errors = errors.map(Sample::count).fold(0, u64::saturating_add);
    totals.insert("completion_errors", errors);
    let counts = |metric: &'static str, label: &'static str| {
        of(metric)
            .filter(|sample| sample.count() > 0)
            .map(|sample| (sample.label(label).replace('_', " "), sample.count()))
            .collect::<BTreeMap<_, _>>()
    };
    let info = of("ferrite_build_info").next();
    let program = info.map_or_else(
        || "unknown program".into(),
        |info| format!("ferrite {} {}", info.label("program"), info.label("version")),
    );
    let status = match of("ferrite_listener_up").next().map(Sample::count) {
        Some(0) => "no listener",
        _ => "",
    };
    let ports = of("ferrite_port_counter_total").filter(|sample| sample.count() > 0);
    let ports = ports.map(|sample| {
        let name = ["device", "port", "counter"].map(|label| sample.label(label)).join(" ");
        (name, sample.count())
    });
    let memory = MEMORY.iter().filter_map(|(metric, name)| Some((*name, sum(metric)?))).collect();
    Snapshot {
        program,
        status: status.into(),
        sessions: None,
        transports: counts("ferrite_sessions", "transport"),
        totals,
        fallbacks: counts("ferrite_rdma_fallbacks_total", "cause"),
        memory,
        latency: latency(samples),
        devices: ports.collect(),
        taken: Instant::now(),
    }
}

/// Returns the percentiles of each operation, from the buckets of the histogram.
fn latency(samples: &[Sample]) -> Vec<LatencyRow> {
    let mut buckets: BTreeMap<&str, Vec<(f64, u64)>> = BTreeMap::new();
    for sample in samples {
        if sample.name == "ferrite_rdma_latency_seconds_bucket" {
            let bound = sample.label("le").parse().unwrap_or(f64::INFINITY);
            buckets.entry(sample.label("op")).or_default().push((bound, sample.count()));
        }
    }
    let row = |(op, mut buckets): (&str, Vec<(f64, u64)>)| {
        buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
        let count = buckets.last().map(|bucket| bucket.1).filter(|count| *count > 0)?;
        let percentiles = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];
        let percentiles = percentiles
            .map(|(name, quantile)| (name.to_owned(), quantile_us(&buckets, count, quantile)));
        Some(LatencyRow {
            name: op.to_owned(),
            count: Some(count),
            percentiles: percentiles.into(),
        })
    };
    buckets.into_iter().filter_map(row).collect()
}

/// Estimates a percentile within its bucket, as Prometheus does. `buckets` are cumulative.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn quantile_us(buckets: &[(f64, u64)], count: u64, quantile: f64) -> f64 {
    let rank = count as f64 * quantile;
    let index = buckets.partition_point(|(_, below)| (*below as f64) < rank);
    let (lower, before) = match index {
        0 => (0.0, 0),
        index => buckets[index - 1],
    };
    let (upper, below) = buckets.get(index).copied().unwrap_or((lower, count));
    let within = (rank - before as f64) / (below.saturating_sub(before).max(1)) as f64;
    let seconds = if upper.is_finite() { lower + (upper - lower) * within } else { lower };
    seconds * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_samples() {
        let text = "# HELP a b\nup 1\na_total{x=\"y\\\"\\n,}\",z=\"\"} 12.5 1700000000\nnonsense\n";
        let samples = parse(text);
        assert_eq!(samples.len(), 2);
        assert_eq!((samples[0].name.as_str(), samples[0].value), ("up", 1.0));
        assert_eq!((samples[1].label("x"), samples[1].label("z")), ("y\"\n,}", ""));
        assert!((samples[1].value - 12.5).abs() < 1e-9);
    }

    #[test]
    fn parses_urls() {
        for url in ["http://127.0.0.1:9121", "127.0.0.1:9121", "http://127.0.0.1:9121/metrics"] {
            assert_eq!(Admin::parse(url).expect("a URL").address.port(), 9121, "{url}");
        }
        assert!(Admin::parse("https://127.0.0.1").is_err_and(|why| why.contains("expected http")));
    }

    #[test]
    fn estimates_percentiles_from_buckets() {
        let buckets = [(1e-6, 50), (2e-6, 90), (4e-6, 100), (f64::INFINITY, 100)];
        assert!((quantile_us(&buckets, 100, 0.5) - 1.0).abs() < 1e-6);
        assert!((quantile_us(&buckets, 100, 0.7) - 1.5).abs() < 1e-6);
        assert!((quantile_us(&buckets, 100, 0.99) - 3.8).abs() < 1e-6);
    }
}
