//! Who is at the door: connections that are not links yet, counted by where they come from.
//!
//! Nobody may keep others out. There is a limit for each source and one for all. Who comes when a
//! limit is reached takes the place of the oldest of its own source, or of the busiest source; a
//! handshake that has only just begun is left alone if it is of a source with no more of them than
//! the newcomer's.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::source::Source;

/// How many there may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) all: usize,
    pub(crate) each: usize,
    /// One that is younger than this makes no place for another of its own source.
    pub(crate) grace: Duration,
}

/// Whether there is a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place<K> {
    Free,
    /// If this one ends.
    Of(K),
    /// Not before this time, unless somebody ends.
    Later(Instant),
}

/// Connections by their keys.
#[derive(Debug)]
pub(crate) struct AdmissionQueue<K> {
    /// The oldest first. No list is empty.
    sources: HashMap<Source, VecDeque<(K, Instant)>>,
    of: HashMap<K, Source>,
}

impl<K> Default for AdmissionQueue<K> {
    fn default() -> Self {
        Self { sources: HashMap::new(), of: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash> AdmissionQueue<K> {
    /// The place for another of a source.
    pub(crate) fn place(&self, source: Source, now: Instant, limits: Limits) -> Place<K> {
        let here = self.count(source);
        let (crowded, may_hurry) = if here >= limits.each {
            (self.sources.get(&source), false)
        } else if self.of.len() >= limits.all {
            let age =
                |line: &VecDeque<(K, Instant)>| line.front().map(|(_, since)| Reverse(*since));
            let busiest = self.sources.values().max_by_key(|line| (line.len(), age(line)));
            (busiest, busiest.is_some_and(|line| line.len() > here + 1))
        } else {
            return Place::Free;
        };
        match crowded.and_then(VecDeque::front) {
            None => Place::Free,
            Some((oldest, since)) if may_hurry || now >= *since + limits.grace => {
                Place::Of(*oldest)
            }
            Some((_, since)) => Place::Later(*since + limits.grace),
        }
    }

    pub(crate) fn enter(&mut self, key: K, source: Source, now: Instant) {
        self.leave(key);
        self.of.insert(key, source);
        self.sources.entry(source).or_default().push_back((key, now));
    }

    /// Whether it was here.
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
    fn one_source_crowds_out_itself_alone() {
        let (now, [busy, quiet]) = (Instant::now(), ["10.0.0.1", "10.0.0.2"].map(source));
        let mut crowd = AdmissionQueue::default();
        for key in 0..3 {
            assert_eq!(crowd.place(busy, now, LIMITS), Place::Free);
            crowd.enter(key, busy, now);
        }
        assert_eq!(crowd.place(busy, now, LIMITS), Place::Later(now + GRACE), "they may be honest");
        assert_eq!(crowd.place(busy, now + GRACE, LIMITS), Place::Of(0), "the oldest of its own");
        assert_eq!(crowd.place(quiet, now, LIMITS), Place::Free);
        crowd.enter(3, quiet, now + GRACE / 2);
        assert_eq!(
            crowd.place(quiet, now, LIMITS),
            Place::Of(0),
            "all are full: the busiest makes place, at once"
        );
        assert!(crowd.leave(0) && !crowd.leave(0) && !crowd.contains(0) && crowd.contains(1));
        crowd.enter(4, quiet, now + GRACE / 2);
        assert_eq!(
            crowd.place(quiet, now, LIMITS),
            Place::Later(now + GRACE),
            "nobody is busier than it"
        );
        assert_eq!(crowd.place(quiet, now + GRACE, LIMITS), Place::Of(1));
    }

    #[test]
    fn nothing_is_kept_of_who_left() {
        let (now, mut crowd) = (Instant::now(), AdmissionQueue::default());
        for key in 0..100_u32 {
            crowd.enter(key, source(&format!("10.0.0.{key}")), now);
        }
        assert!((0..100).all(|key| crowd.leave(key)));
        assert!(crowd.sources.is_empty() && crowd.of.is_empty());
    }
}
