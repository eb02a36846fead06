//! Whose command is next: who waits, who is served, and what nobody can take from the others. Knows
//! nothing of threads.
//!
//! - Commands of one source run one after the other, in the order in which they were given. So a
//!   source has one thread at most.
//! - This process is a source of its own. It never waits for peers: they have all threads but one.
//! - A peer cannot be told to be slow before it was. One that was, because the kernel or the device
//!   let a command of its wait, is a slow source for a minute. Slow sources have half of the
//!   threads, and take turns among themselves: however many they are, the other half is there for
//!   the rest.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::source::Source;

/// A command that takes so long was waiting for something. Good days are a thousand times shorter.
const SLOW: Duration = Duration::from_millis(100);
/// How long that is held against its source.
const SLOW_FOR: Duration = Duration::from_secs(60);
/// Sources that are known to be slow, at most: beyond that none are added until some are forgotten.
const SLOW_SOURCES_MAX: usize = 1024;

/// Jobs that wait, by who has caused them (`None`: this process), for so many threads.
pub(super) struct Turns<J> {
    threads: usize,
    lines: HashMap<Option<Source>, Line<J>>,
    /// Peers whose turn comes: each once, and none whose command is under way.
    quick: VecDeque<Source>,
    slow: VecDeque<Source>,
    /// Peers whose commands are under way, and those of them that were taken from `slow`.
    peers_under_way: usize,
    slow_under_way: usize,
    was_slow: HashMap<Source, Instant>,
    waiting: usize,
}

struct Line<J> {
    jobs: VecDeque<J>,
    is_under_way: bool,
}

/// A job that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Turn {
    caller: Option<Source>,
    is_slow: bool,
}

impl<J> Turns<J> {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads,
            lines: HashMap::new(),
            quick: VecDeque::new(),
            slow: VecDeque::new(),
            peers_under_way: 0,
            slow_under_way: 0,
            was_slow: HashMap::new(),
            waiting: 0,
        }
    }

    /// Jobs that wait: of one, and of all.
    pub(super) fn waiting(&self, caller: Option<Source>) -> (usize, usize) {
        (self.lines.get(&caller).map_or(0, |line| line.jobs.len()), self.waiting)
    }

    pub(super) fn push(&mut self, caller: Option<Source>, job: J, now: Instant) {
        self.waiting += 1;
        let line = self
            .lines
            .entry(caller)
            .or_insert_with(|| Line { jobs: VecDeque::new(), is_under_way: false });
        line.jobs.push_back(job);
        if line.jobs.len() == 1 && !line.is_under_way {
            self.queue(caller, now);
        }
    }

    /// Whether a thread that has nothing to do could take something.
    pub(super) fn has_next(&self) -> bool {
        self.pick().is_some()
    }

    /// The next job, if one may begin.
    pub(super) fn next(&mut self) -> Option<(Turn, J)> {
        let turn = self.pick()?;
        match turn.caller {
            None => {}
            Some(_) if turn.is_slow => drop(self.slow.pop_front()),
            Some(_) => drop(self.quick.pop_front()),
        }
        let line = self.lines.get_mut(&turn.caller)?;
        let job = line.jobs.pop_front()?;
        line.is_under_way = true;
        self.waiting -= 1;
        self.peers_under_way += usize::from(turn.caller.is_some());
        self.slow_under_way += usize::from(turn.is_slow);
        Some((turn, job))
    }

    /// A job has ended, after so long.
    pub(super) fn done(&mut self, turn: Turn, took: Duration, now: Instant) {
        let Turn { caller, is_slow } = turn;
        self.peers_under_way -= usize::from(caller.is_some());
        self.slow_under_way -= usize::from(is_slow);
        if let Some(source) = caller.filter(|_| took >= SLOW) {
            self.remember(source, now);
        }
        let Some(line) = self.lines.get_mut(&caller) else { return };
        line.is_under_way = false;
        if line.jobs.is_empty() {
            self.lines.remove(&caller);
        } else {
            self.queue(caller, now);
        }
    }

    /// Takes out all that waits. What is under way may still be [`Turns::done`].
    pub(super) fn take_all(&mut self) -> Vec<J> {
        self.quick.clear();
        self.slow.clear();
        self.waiting = 0;
        self.lines.drain().flat_map(|(_, line)| line.jobs).collect()
    }

    fn pick(&self) -> Option<Turn> {
        let own = self.lines.get(&None);
        if own.is_some_and(|line| !line.is_under_way && !line.jobs.is_empty()) {
            return Some(Turn { caller: None, is_slow: false });
        }
        if self.peers_under_way + 1 >= self.threads {
            return None; // that one is this process's
        }
        let slow = self.slow.front().filter(|_| self.slow_under_way < self.threads / 2);
        // One thread for slow sources if there are any, and more of them if nobody else wants them.
        let (caller, is_slow) = match (self.quick.front(), slow) {
            (Some(_), Some(slow)) if self.slow_under_way == 0 => (slow, true),
            (Some(quick), _) => (quick, false),
            (None, slow) => (slow?, true),
        };
        Some(Turn { caller: Some(*caller), is_slow })
    }

    fn queue(&mut self, caller: Option<Source>, now: Instant) {
        let Some(source) = caller else { return };
        match self.was_slow.get(&source) {
            Some(since) if now.saturating_duration_since(*since) < SLOW_FOR => {
                self.slow.push_back(source)
            }
            _ => self.quick.push_back(source),
        }
    }

    fn remember(&mut self, source: Source, now: Instant) {
        if self.was_slow.len() >= SLOW_SOURCES_MAX {
            self.was_slow.retain(|_, since| now.saturating_duration_since(*since) < SLOW_FOR);
        }
        if self.was_slow.len() < SLOW_SOURCES_MAX || self.was_slow.contains_key(&source) {
            self.was_slow.insert(source, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::source as named;

    const THREADS: usize = 4;

    fn source(number: usize) -> Option<Source> {
        Some(named(&format!("10.0.{}.{}", number / 256, number % 256)))
    }

    /// Takes all that may begin.
    fn begin(turns: &mut Turns<usize>) -> Vec<(Turn, usize)> {
        std::iter::from_fn(|| turns.next()).collect()
    }

    #[test]
    fn a_source_has_one_thread_and_this_process_always_one() {
        let (mut turns, now) = (Turns::new(THREADS), Instant::now());
        for job in 0..3 {
            (1..10).for_each(|number| turns.push(source(number), 10 * number + job, now));
        }
        let begun = begin(&mut turns);
        assert_eq!(begun.iter().map(|(_, job)| *job).collect::<Vec<_>>(), [10, 20, 30]);
        assert!(!turns.has_next());
        turns.push(None, 0, now);
        turns.push(None, 1, now);
        let own = begin(&mut turns);
        assert_eq!(own.iter().map(|(_, job)| *job).collect::<Vec<_>>(), [0]);
        turns.done(own[0].0, Duration::ZERO, now);
        assert_eq!(turns.next().map(|(_, job)| job), Some(1));
        turns.done(begun[0].0, Duration::ZERO, now);
        assert_eq!(
            begin(&mut turns).iter().map(|(_, job)| *job).collect::<Vec<_>>(),
            [40],
            "turn by turn"
        );
    }

    #[test]
    fn sources_that_were_slow_leave_half_of_the_threads_to_others() {
        let (mut turns, mut now) = (Turns::new(THREADS), Instant::now());
        // A hundred sources, each slow once.
        for number in 0..100 {
            turns.push(source(number), number, now);
            for (turn, _) in begin(&mut turns) {
                turns.done(turn, SLOW, now);
            }
        }
        (0..100).for_each(|number| turns.push(source(number), number, now));
        let slow = begin(&mut turns);
        assert_eq!(slow.len(), THREADS / 2);
        turns.push(source(100), 100, now);
        let (quick, job) = turns.next().expect("an honest one does not wait");
        assert_eq!(job, 100);
        // The slow ones have their turns, too, though others never end.
        (101..200).for_each(|number| turns.push(source(number), number, now));
        turns.done(slow[0].0, SLOW, now);
        turns.done(slow[1].0, SLOW, now);
        turns.done(quick, Duration::ZERO, now);
        let next = begin(&mut turns);
        assert_eq!(
            next.iter().filter(|(turn, _)| turn.is_slow).map(|(_, job)| *job).collect::<Vec<_>>(),
            [2]
        );
        for (turn, _) in next {
            turns.done(turn, Duration::ZERO, now);
        }
        now += SLOW_FOR;
        turns.push(source(0), 1000, now);
        assert!(!turns.slow.contains(&named("10.0.0.0")), "forgotten after a while");
    }

    #[test]
    fn nothing_is_kept_of_who_waits_no_more() {
        let (mut turns, now) = (Turns::new(THREADS), Instant::now());
        for number in 0..3000 {
            turns.push(source(number), number, now);
            while let Some((turn, _)) = turns.next() {
                turns.done(turn, SLOW, now);
            }
        }
        assert!(turns.lines.is_empty() && turns.quick.is_empty() && turns.slow.is_empty());
        assert_eq!(turns.waiting(source(1)), (0, 0));
        assert_eq!(turns.was_slow.len(), SLOW_SOURCES_MAX);
    }
}
