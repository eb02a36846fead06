//! Turns of the links that try to upgrade to RDMA between the same two addresses, while their
//! attempts fail. Each link gets its turn in the order in which the links asked.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// The longest delay between attempts to upgrade to RDMA.
pub(super) const UPGRADE_MAX: Duration = Duration::from_secs(5);
/// The delay between the attempts of links that need not wait for each other.
pub(super) const APART: Duration = Duration::from_millis(20);

/// The answer to a link whose attempt is due.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn<L> {
    /// It is the link's turn.
    Now,
    /// The link must ask again after this time. If a link is named, it is that link's turn.
    After(Duration, Option<L>),
}

/// The links between two addresses.
#[derive(Debug)]
struct Turns<L> {
    /// When the next link may try.
    free: Instant,
    waiting: VecDeque<L>,
}

/// The addresses between which attempts fail, `K`, and the links that wait, `L`.
#[derive(Debug)]
pub(crate) struct UpgradeTurns<K, L>(HashMap<K, Turns<L>>);

impl<K, L> Default for UpgradeTurns<K, L> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Hash + Eq, L: Copy + Eq> UpgradeTurns<K, L> {
    /// Makes the links between two addresses take turns, because an attempt has failed. The next
    /// link may try after `spacing`.
    pub(super) fn on_failed(&mut self, key: K, now: Instant, spacing: Duration) {
        match self.0.get_mut(&key) {
            Some(turns) => turns.free = turns.free.max(now + spacing),
            None => self.on_lost(key, now, spacing),
        }
    }

    /// Makes the links between two addresses take turns, because the path is lost. The first link
    /// may try after `spacing`.
    pub(super) fn on_lost(&mut self, key: K, now: Instant, spacing: Duration) {
        if self.0.contains_key(&key) {
            return; // a link that loses its path again and again must not delay the others
        }
        // Links that still wait ask at least every `UPGRADE_MAX`, and one of them then tries.
        self.0.retain(|_, turns| turns.free + 2 * UPGRADE_MAX > now);
        self.0.insert(key, Turns { free: now + spacing, waiting: VecDeque::new() });
    }

    /// Lets the next link try soon, because an attempt has failed for a reason of its link alone.
    pub(super) fn pass(&mut self, key: &K, now: Instant) {
        if let Some(turns) = self.0.get_mut(key) {
            turns.free = now + APART;
        }
    }

    /// Ends the turns between two addresses. Returns whether links took turns.
    pub(super) fn end(&mut self, key: &K) -> bool {
        self.0.remove(key).is_some()
    }

    /// Ends all turns.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Handles a link whose attempt is due. `waits` tells whether another link still waits for its
    /// turn.
    pub(super) fn ask(
        &mut self,
        key: &K,
        link: L,
        now: Instant,
        spacing: Duration,
        mut waits: impl FnMut(L) -> bool,
    ) -> Turn<L> {
        let Some(turns) = self.0.get_mut(key) else { return Turn::Now };
        while turns.waiting.pop_front_if(|first| *first != link && !waits(*first)).is_some() {}
        let place = turns.waiting.iter().position(|other| *other == link).unwrap_or_else(|| {
            turns.waiting.push_back(link);
            turns.waiting.len() - 1
        });
        if now < turns.free {
            let ahead = u32::try_from(place).unwrap_or(u32::MAX);
            let wait = turns.free - now + spacing.saturating_mul(ahead);
            return Turn::After(wait.min(UPGRADE_MAX.max(turns.free - now)), None);
        }
        if place == 0 {
            turns.waiting.pop_front();
            turns.free = now + spacing;
            return Turn::Now;
        }
        let first = turns.waiting.front().copied();
        Turn::After(spacing.max(APART), first)
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::{BinaryHeap, HashMap};

    use super::*;

    const SPACING: Duration = Duration::from_secs(1);

    /// The delay of the attempts of a link that fails, as `upgrade_schedule.rs` computes it.
    fn backoff(delays: &mut HashMap<u32, Duration>, link: u32) -> Duration {
        let next = delays.entry(link).or_insert(SPACING);
        let delay = *next;
        *next = (delay * 2).min(UPGRADE_MAX);
        delay
    }

    /// Links that can never upgrade take turns with one that can. Returns when that one tries.
    fn time_of_the_last_link(bad: u32) -> Duration {
        let begun = Instant::now();
        let (mut turns, mut delays) = (UpgradeTurns::default(), HashMap::new());
        let mut due = HashMap::new();
        let mut timers = BinaryHeap::new();
        turns.on_lost("path", begun, SPACING);
        for link in 0..=bad {
            // All are due at the same time, and the last one a little later.
            let at = begun + if link == bad { SPACING / 2 } else { Duration::ZERO };
            due.insert(link, at);
            timers.push(Reverse((at, link)));
        }
        while let Some(Reverse((now, link))) = timers.pop() {
            if due[&link] != now {
                continue;
            }
            let mut wake = |link: u32, wait: Duration| {
                due.insert(link, now + wait);
                timers.push(Reverse((now + wait, link)));
            };
            match turns.ask(&"path", link, now, SPACING, |_| true) {
                Turn::Now if link == bad => return now - begun,
                Turn::Now => {
                    turns.on_failed("path", now + Duration::from_millis(3), SPACING);
                    wake(link, backoff(&mut delays, link));
                }
                Turn::After(wait, first) => {
                    wake(link, wait);
                    first.into_iter().for_each(|first| wake(first, Duration::ZERO));
                }
            }
            assert!(now - begun < Duration::from_secs(3600), "the link never gets its turn");
        }
        unreachable!("all links try for ever");
    }

    #[test]
    fn links_that_never_succeed_do_not_keep_others_from_their_turn() {
        for bad in [1, 5, 6, 20, 100] {
            let took = time_of_the_last_link(bad);
            let limit = SPACING * (bad + 2) * 2;
            assert!(took <= limit, "{bad} other links: {took:?} is more than {limit:?}");
        }
    }

    #[test]
    fn a_link_that_is_gone_does_not_block_the_others() {
        let (mut turns, now) = (UpgradeTurns::default(), Instant::now());
        turns.on_lost("path", now, SPACING);
        assert!(matches!(turns.ask(&"path", 1, now, SPACING, |_| true), Turn::After(..)));
        assert!(matches!(turns.ask(&"path", 2, now, SPACING, |_| true), Turn::After(..)));
        let later = now + SPACING;
        assert_eq!(
            turns.ask(&"path", 2, later, SPACING, |_| true),
            Turn::After(SPACING, Some(1)),
            "link 1 was first"
        );
        assert_eq!(turns.ask(&"path", 2, later, SPACING, |link| link != 1), Turn::Now);
    }

    #[test]
    fn links_try_at_once_when_nothing_fails() {
        let (mut turns, now) = (UpgradeTurns::default(), Instant::now());
        assert_eq!(turns.ask(&"path", 1, now, SPACING, |_| true), Turn::Now);
        turns.on_lost("path", now, SPACING);
        assert!(matches!(turns.ask(&"path", 1, now, SPACING, |_| true), Turn::After(..)));
        assert_eq!(turns.ask(&"other", 1, now, SPACING, |_| true), Turn::Now, "another path");
        assert!(turns.end(&"path") && !turns.end(&"path"));
        assert_eq!(turns.ask(&"path", 1, now, SPACING, |_| true), Turn::Now);
    }

    #[test]
    fn paths_that_no_link_uses_any_more_are_forgotten() {
        let (mut turns, begun) = (UpgradeTurns::<u32, u32>::default(), Instant::now());
        for path in 0..10_000 {
            turns.on_lost(path, begun + Duration::from_millis(path.into()) * 10, SPACING);
        }
        assert!(turns.0.len() < 1200, "{} paths", turns.0.len());
    }
}
