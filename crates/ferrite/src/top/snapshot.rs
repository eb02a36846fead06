//! The state of a program at one moment, whichever source reported it, and the rates computed from
//! two such states.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::latency::two_decimals;

/// The state that a program reports at one moment.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Snapshot {
    /// The program and its version.
    pub(super) program: String,
    /// The module's state, address and devices. With an admin port, `no listener` if the program
    /// does not listen, otherwise empty.
    pub(super) status: String,
    /// The sessions; `None` if the source does not list them.
    pub(super) sessions: Option<Vec<Session>>,
    /// Numbers of open sessions, by transport.
    pub(super) transports: BTreeMap<String, u64>,
    /// Counters that only grow.
    pub(super) totals: BTreeMap<&'static str, u64>,
    /// Links over TCP instead of RDMA, by cause. Causes that did not occur are left out.
    pub(super) fallbacks: BTreeMap<String, u64>,
    /// Pinned memory in bytes, by use, and its limit.
    pub(super) memory: BTreeMap<&'static str, u64>,
    pub(super) latency: Vec<LatencyRow>,
    /// Counters of devices that are not zero, by name. If they come from an admin port, the name
    /// includes the device and the port.
    pub(super) devices: BTreeMap<String, u64>,
    #[serde(skip)]
    pub(super) taken: Instant,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self {
            program: String::new(),
            status: String::new(),
            sessions: None,
            transports: BTreeMap::new(),
            totals: BTreeMap::new(),
            fallbacks: BTreeMap::new(),
            memory: BTreeMap::new(),
            latency: Vec::new(),
            devices: BTreeMap::new(),
            taken: Instant::now(),
        }
    }
}

impl Snapshot {
    pub(super) fn total(&self, name: &str) -> u64 {
        self.totals.get(name).copied().unwrap_or(0)
    }
}

/// One session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Session {
    pub(super) id: u64,
    pub(super) client_id: Option<u64>,
    pub(super) user: String,
    pub(super) address: String,
    pub(super) local_address: String,
    pub(super) transport: String,
    pub(super) device: String,
    pub(super) path: String,
    pub(super) age_s: u64,
    pub(super) held_bytes: u64,
    pub(super) in_bytes: u64,
    pub(super) out_bytes: u64,
}

/// Percentiles of one kind of operation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LatencyRow {
    pub(super) name: String,
    /// The number of operations; `None` if the source does not report it.
    pub(super) count: Option<u64>,
    /// The percentiles that the source reports, such as `p99.9`, in microseconds.
    pub(super) percentiles: Vec<(String, f64)>,
}

impl LatencyRow {
    /// Returns a percentile in microseconds, if the source reports it.
    pub(super) fn at(&self, percentile: &str) -> Option<f64> {
        self.percentiles.iter().find(|(name, _)| name == percentile).map(|(_, us)| *us)
    }
}

/// A figure that is written with two decimals.
#[derive(Serialize)]
struct Rounded(#[serde(serialize_with = "two_decimals")] f64);

impl Serialize for LatencyRow {
    /// Writes a percentile such as `p99.9` as the field `p99_9_us`.
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut row = to.serialize_map(None)?;
        row.serialize_entry("name", &self.name)?;
        row.serialize_entry("count", &self.count)?;
        for (percentile, us) in &self.percentiles {
            row.serialize_entry(&format!("{}_us", percentile.replace('.', "_")), &Rounded(*us))?;
        }
        row.end()
    }
}

/// Changes per second between two snapshots.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Rates {
    pub(super) totals_per_s: BTreeMap<&'static str, u64>,
    /// Bytes to the engine and to the client, by the id of the session.
    pub(super) session_bytes_per_s: BTreeMap<u64, (u64, u64)>,
    pub(super) devices_per_s: BTreeMap<String, u64>,
}

impl Rates {
    /// Returns the rates. A counter that decreased belongs to a program that was restarted: its
    /// rate is zero.
    pub(super) fn between(before: &Snapshot, now: &Snapshot) -> Self {
        let time = now.taken.saturating_duration_since(before.taken);
        let totals = now.totals.iter().map(|(name, value)| {
            let before = before.totals.get(name).copied().unwrap_or(*value);
            (*name, per_second(before, *value, time))
        });
        let old: BTreeMap<u64, &Session> =
            before.sessions.iter().flatten().map(|session| (session.id, session)).collect();
        let sessions = now.sessions.iter().flatten().map(|session| {
            let (in_bytes, out_bytes) = match old.get(&session.id) {
                Some(old) => (old.in_bytes, old.out_bytes),
                None => (0, 0), // the session began in between
            };
            let input = per_second(in_bytes, session.in_bytes, time);
            (session.id, (input, per_second(out_bytes, session.out_bytes, time)))
        });
        let devices = now.devices.iter().map(|(name, value)| {
            let before = before.devices.get(name).copied().unwrap_or(*value);
            (name.clone(), per_second(before, *value, time))
        });
        Self {
            totals_per_s: totals.collect(),
            session_bytes_per_s: sessions.collect(),
            devices_per_s: devices.collect(),
        }
    }

    pub(super) fn total(&self, name: &str) -> u64 {
        self.totals_per_s.get(name).copied().unwrap_or(0)
    }

    pub(super) fn device(&self, name: &str) -> u64 {
        self.devices_per_s.get(name).copied().unwrap_or(0)
    }

    pub(super) fn session(&self, id: u64) -> (u64, u64) {
        self.session_bytes_per_s.get(&id).copied().unwrap_or_default()
    }
}

fn per_second(before: u64, now: u64, time: Duration) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    now.saturating_sub(before).saturating_mul(1000) / millis
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_survive_a_restart() {
        let session = |id, in_bytes| Session { id, in_bytes, ..Session::default() };
        let before = Snapshot {
            totals: [("ops", 100), ("restarted", 100)].into(),
            sessions: Some(vec![session(1, 50)]),
            ..Snapshot::default()
        };
        let now = Snapshot {
            totals: [("ops", 300), ("restarted", 5), ("new", 7)].into(),
            sessions: Some(vec![session(1, 250), session(2, 40)]),
            taken: before.taken + Duration::from_secs(2),
            ..Snapshot::default()
        };
        let rates = Rates::between(&before, &now);
        assert_eq!((rates.total("ops"), rates.total("restarted"), rates.total("new")), (100, 0, 0));
        assert_eq!((rates.session(1), rates.session(2)), ((100, 0), (20, 0)));
        assert_eq!(rates.session(3), (0, 0));
    }
}
