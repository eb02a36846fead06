//! Admission control for connections that are not links yet. It counts them by source.
//!
//! No source may lock out others. There is a limit for each source and a limit for all:
//!
//! - A connection that exceeds its source's limit displaces the oldest connection of its own
//!   source.
//! - A connection that exceeds the total limit displaces the oldest connection of the busiest
//!   source.
//!
//! A connection that is younger than a grace period is displaced only at the total limit, and only
//! if its source has more connections than the new connection's source, the new connection
//! included.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::source::Source;

/// The maximum number of connections, in total and for each source.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) all: usize,
    pub(crate) each: usize,
    /// A connection that is younger than this is not displaced, unless its source is busier than
    /// the new connection's source.
    pub(crate) grace: Duration,
}

impl Limits {
    /// Returns the limits for at most this many connections, but at least one.
    pub(crate) fn at_most(self, connections: usize) -> Self {
        let all = self.all.min(connections).max(1);
        Self { all, each: self.each.min(all.div_ceil(2)), ..self }
    }
}

/// Whether a connection is admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission<K> {
    Granted,
    /// Granted if the caller ends the connection with this key.
    Displaces(K),
    /// Not granted before this time, unless another connection ends.
    Wait(Instant),
}

/// Connections that are not links yet, by key.
#[derive(Debug)]
pub(crate) struct AdmissionQueue<K> {
    /// The connections of each source, the oldest first. No list is empty.
    sources: HashMap<Source, VecDeque<(K, Instant)>>,
    of: HashMap<K, Source>,
}

impl<K> Default for AdmissionQueue<K> {
    fn default() -> Self {
        Self { sources: HashMap::new(), of: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash> AdmissionQueue<K> {
    /// Decides whether to admit another connection of a source.
    pub(crate) fn admit(&self, source: Source, now: Instant, limits: Limits) -> Admission<K> {
        let here = self.count(source);
        let (busiest, ignores_grace) = if here >= limits.each {
            (self.sources.get(&source), false)
        } else if self.of.len() >= limits.all {
            let age =
                |line: &VecDeque<(K, Instant)>| line.front().map(|(_, since)| Reverse(*since));
            let busiest = self.sources.values().max_by_key(|line| (line.len(), age(line)));
            (busiest, busiest.is_some_and(|line| line.len() > here + 1))
        } else {
            return Admission::Granted;
        };
        match busiest.and_then(VecDeque::front) {
            None => Admission::Granted,
            Some((oldest, since)) if ignores_grace || now >= *since + limits.grace => {
                Admission::Displaces(*oldest)
            }
            Some((_, since)) => Admission::Wait(*since + limits.grace),
        }
    }

    pub(crate) fn enter(&mut self, key: K, source: Source, now: Instant) {
        self.leave(key);
        self.of.insert(key, source);
        self.sources.entry(source).or_default().push_back((key, now));
    }

    /// Removes a connection. Returns whether it was in the queue.
    pub(crate) fn leave(&mut self, key: K) -> bool {
        let Some(source) = self.of.remove(&key) else { return false };
        if let Some(line) = self.sources.get_mut(&source) {
            line.retain(|(other, _)| *other != key);
            if line.is_empty() {
                self.sources.remove(&source);
            }
        }
        true
    }

    pub(crate) fn contains(&self, key: K) -> bool {
        self.of.contains_key(&key)
    }

    fn count(&self, source: Source) -> usize {
        self.sources.get(&source).map_or(0, VecDeque::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::source;

    const GRACE: Duration = Duration::from_millis(100);
    const LIMITS: Limits = Limits { all: 4, each: 3, grace: GRACE };

    #[test]
    fn a_busy_source_displaces_only_itself() {
        let (now, [busy, quiet]) = (Instant::now(), ["10.0.0.1", "10.0.0.2"].map(source));
        let mut queue = AdmissionQueue::default();
        for key in 0..3 {
            assert_eq!(queue.admit(busy, now, LIMITS), Admission::Granted);
            queue.enter(key, busy, now);
        }
        assert_eq!(
            queue.admit(busy, now, LIMITS),
            Admission::Wait(now + GRACE),
            "the others are too young"
        );
        assert_eq!(
            queue.admit(busy, now + GRACE, LIMITS),
            Admission::Displaces(0),
            "the oldest of its source"
        );
        assert_eq!(queue.admit(quiet, now, LIMITS), Admission::Granted);
        queue.enter(3, quiet, now + GRACE / 2);
        assert_eq!(
            queue.admit(quiet, now, LIMITS),
            Admission::Displaces(0),
            "the total limit: the busiest source is displaced at once"
        );
        assert!(queue.leave(0) && !queue.leave(0) && !queue.contains(0) && queue.contains(1));
        queue.enter(4, quiet, now + GRACE / 2);
        assert_eq!(
            queue.admit(quiet, now, LIMITS),
            Admission::Wait(now + GRACE),
            "no source is busier"
        );
        assert_eq!(queue.admit(quiet, now + GRACE, LIMITS), Admission::Displaces(1));
    }

    #[test]
    fn keeps_no_state_for_connections_that_left() {
        let (now, mut queue) = (Instant::now(), AdmissionQueue::default());
        for key in 0..100_u32 {
            queue.enter(key, source(&format!("10.0.0.{key}")), now);
        }
        assert!((0..100).all(|key| queue.leave(key)));
        assert!(queue.sources.is_empty() && queue.of.is_empty());
    }
}
