//! The results of connections, and their sums.

use std::sync::{Mutex, MutexGuard, PoisonError};

use hdrhistogram::Histogram;

use super::dial::TransportInfo;

/// The longest latency of the histogram, in nanoseconds: an hour.
pub(super) const LONGEST_NS: u64 = 3_600_000_000_000;

/// The result of a test, of one of its turns, or of one connection.
pub(super) struct Run {
    pub(super) transport_info: Option<TransportInfo>,
    pub(super) seconds: f64,
    /// Requests within the measured time.
    pub(super) requests: u64,
    pub(super) errors: u64,
    /// The first error reply of the server.
    pub(super) first_error: Option<String>,
    /// Requests of --rate that were sent too late: more than 1 ms after they were due, and also
    /// more than the planned time between two batches of a connection.
    pub(super) late: u64,
    /// All requests, including those of the warm-up.
    pub(super) all_requests: u64,
    /// The latencies of the requests within the measured time, in nanoseconds.
    pub(super) latency: Histogram<u64>,
}

impl Run {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self {
            transport_info: None,
            seconds: 0.0,
            requests: 0,
            errors: 0,
            first_error: None,
            late: 0,
            all_requests: 0,
            latency: Histogram::new_with_bounds(1, LONGEST_NS, 3)?,
        })
    }

    /// Adds a result that was measured at the same time as this one.
    pub(super) fn add_concurrent(&mut self, other: &Self) {
        let seconds = self.seconds.max(other.seconds);
        self.add_next(other);
        self.seconds = seconds;
    }

    /// Adds a result that was measured after this one.
    pub(super) fn add_next(&mut self, other: &Self) {
        match (&mut self.transport_info, &other.transport_info) {
            // In a cluster, nodes may be reached over different transports.
            (Some(mine), Some(other)) => mine.add(other),
            (mine, other) => *mine = mine.take().or_else(|| other.clone()),
        }
        self.seconds += other.seconds;
        self.requests += other.requests;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.late += other.late;
        self.all_requests += other.all_requests;
        self.latency += &other.latency;
    }
}

/// The result of one connection so far. It outlives the connection, so that no result is lost if
/// the connection fails. The connection locks it for each batch. Other threads lock it only to show
/// the progress, and at the end.
pub(super) struct SharedRun(Mutex<Run>);

impl SharedRun {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self(Mutex::new(Run::new()?)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Run> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
