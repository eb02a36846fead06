//! Writes samples in the text format, with the crate `prometheus-client`.
//!
//! The values are read at each scrape, so the counter types of that crate are not used.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

/// The samples of a family: the labels and the value of each.
type Samples<'a> = &'a [(Vec<(&'a str, &'a str)>, u64)];

/// A histogram of the operations of one kind.
#[derive(Debug)]
pub(crate) struct Histogram<'a> {
    pub(crate) op: &'a str,
    pub(crate) sum: f64,
    /// The upper bound and count of each bucket.
    pub(crate) buckets: Vec<(f64, u64)>,
}

/// Writes metrics. All names get the prefix `ferrite_`.
#[derive(Debug, Default)]
pub struct Exposition {
    families: Vec<Family>,
}

#[derive(Debug)]
struct Family {
    name: String,
    help: String,
    kind: MetricType,
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    labels: Labels,
    value: Value,
}

#[derive(Debug)]
enum Value {
    Number(u64),
    /// The sum, and the upper bound and count of each bucket.
    Histogram(f64, Vec<(f64, u64)>),
}

impl Exposition {
    /// Adds a counter. Its name in the output ends with `_total`.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, &[(vec![], value)]);
    }

    /// Adds a counter for each set of labels.
    pub fn counters(&mut self, name: &str, help: &str, samples: Samples<'_>) {
        self.numbers(name, help, MetricType::Counter, samples);
    }

    /// Adds a gauge.
    pub fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.gauges(name, help, &[(vec![], value)]);
    }

    /// Adds a gauge for each set of labels.
    pub fn gauges(&mut self, name: &str, help: &str, samples: Samples<'_>) {
        self.numbers(name, help, MetricType::Gauge, samples);
    }

    /// Adds a histogram for each value of the label `op`.
    pub(crate) fn histograms(&mut self, name: &str, help: &str, histograms: Vec<Histogram<'_>>) {
        let samples = histograms.into_iter().map(|Histogram { op, sum, buckets }| Sample {
            labels: Labels(vec![("op".into(), op.into())]),
            value: Value::Histogram(sum, buckets),
        });
        self.families.push(Family {
            name: name.into(),
            help: help.into(),
            kind: MetricType::Histogram,
            samples: samples.collect(),
        });
    }

    fn numbers(&mut self, name: &str, help: &str, kind: MetricType, samples: Samples<'_>) {
        let samples = samples.iter().map(|(labels, value)| Sample {
            labels: Labels(labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()),
            value: Value::Number(*value),
        });
        let samples = samples.collect();
        self.families.push(Family { name: name.into(), help: help.into(), kind, samples });
    }

    /// Returns the text that Prometheus reads.
    #[must_use]
    pub fn into_text(self) -> String {
        let mut registry = Registry::with_prefix("ferrite");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        encode(&mut text, &registry).expect("a String takes every text");
        text
    }
}

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in &self.families {
            let mut metric =
                encoder.encode_descriptor(&family.name, &family.help, None, family.kind)?;
            for Sample { labels, value } in &family.samples {
                // Without labels, `encode_family` would write empty braces.
                match labels.0.is_empty() {
                    true => value.encode(family.kind, &mut metric)?,
                    false => value.encode(family.kind, &mut metric.encode_family(labels)?)?,
                }
            }
        }
        Ok(())
    }
}

impl Value {
    fn encode(&self, kind: MetricType, to: &mut MetricEncoder<'_>) -> fmt::Result {
        match (self, kind) {
            (Self::Number(number), MetricType::Counter) => {
                to.encode_counter::<NoLabelSet, _, u64>(number, None)
            }
            (Self::Number(number), _) => to.encode_gauge(number),
            (Self::Histogram(sum, buckets), _) => {
                let count = buckets.iter().map(|(_, count)| count).sum();
                to.encode_histogram::<NoLabelSet>(*sum, count, buckets, None)
            }
        }
    }
}

#[derive(Debug)]
struct Labels(Vec<(String, String)>);

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        self.0.as_slice().encode(encoder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_help_type_labels_and_cumulative_buckets() {
        let mut out = Exposition::default();
        out.counters("x_operations", "Operations", &[(vec![("type", "send")], 7)]);
        out.gauge("x_bytes", "Bytes", 9);
        let buckets = vec![(0.5, 1), (1.0, 2), (f64::INFINITY, 1)];
        let send = Histogram { op: "send", sum: 2.5, buckets };
        out.histograms("x_latency_seconds", "Latency", vec![send]);
        assert_eq!(
            out.into_text(),
            "# HELP ferrite_x_operations Operations\n\
             # TYPE ferrite_x_operations counter\n\
             ferrite_x_operations_total{type=\"send\"} 7\n\
             # HELP ferrite_x_bytes Bytes\n\
             # TYPE ferrite_x_bytes gauge\n\
             ferrite_x_bytes 9\n\
             # HELP ferrite_x_latency_seconds Latency\n\
             # TYPE ferrite_x_latency_seconds histogram\n\
             ferrite_x_latency_seconds_sum{op=\"send\"} 2.5\n\
             ferrite_x_latency_seconds_count{op=\"send\"} 4\n\
             ferrite_x_latency_seconds_bucket{le=\"0.5\",op=\"send\"} 1\n\
             ferrite_x_latency_seconds_bucket{le=\"1.0\",op=\"send\"} 3\n\
             ferrite_x_latency_seconds_bucket{le=\"+Inf\",op=\"send\"} 4\n\
             # EOF\n"
        );
    }
}
