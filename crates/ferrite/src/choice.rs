//! Choices that several commands offer.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What crosses the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Messages: both sides take part.
    Send,
    /// Writes into the peer's memory; who waits for one watches the last byte.
    Write,
    /// Reads of the peer's memory; the peer is idle.
    Read,
}

impl Op {
    /// What its latency is, for scripts, and which part of a round trip that is. A read comes back
    /// to where it started: there is no half of it.
    pub(crate) fn latency_measure(self) -> (&'static str, f64) {
        if self == Self::Read { ("round_trip", 1.0) } else { ("half_round_trip", 2.0) }
    }
}

/// How completions are awaited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// By asking all the time: least latency, one busy CPU per side.
    Poll,
    /// By sleeping until the device interrupts.
    Event,
}

/// A choice as it is typed on the command line.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}
