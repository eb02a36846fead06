//! Option values that several commands share.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The RDMA operation to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// Messages: send and receive on both sides
    Send,
    /// RDMA writes into the peer's memory; the receiver polls the last byte
    Write,
    /// RDMA reads of the peer's memory; the peer stays idle
    Read,
}

impl Op {
    /// Returns the name of the reported latency in JSON, and the divisor that turns a round trip
    /// into it. A read is a full round trip, which is not halved.
    pub(crate) fn latency_measure(self) -> (&'static str, f64) {
        if self == Self::Read { ("round_trip", 1.0) } else { ("half_round_trip", 2.0) }
    }
}

/// How to wait for completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// Busy-poll: lowest latency, one busy CPU per side
    Poll,
    /// Sleep until the device raises an interrupt
    Event,
}

/// Returns the name of a choice as the user types it on the command line.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}
