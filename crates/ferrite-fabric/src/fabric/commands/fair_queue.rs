//! Decides which source's command runs next, so that no peer can take the threads from the others.
//! The queue does not start or manage threads.
//!
//! - Commands of one source run one after the other, in the order in which they were submitted. A
//!   source therefore occupies at most one thread.
//! - This process is also a source. It never waits for peers, because peers share all threads
//!   except one.
//! - Nobody can predict that a peer will be slow. A source counts as *slow* for a minute after one
//!   of its commands had to wait for the kernel or the device. Slow sources share half of the
//!   threads, round-robin. The other half serves the other sources, however many slow sources there
//!   are.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::source::Source;

/// A command that takes this long had to wait. Other commands are about a thousand times faster.
const SLOW: Duration = Duration::from_millis(100);
/// How long a source counts as slow after such a command.
const SLOW_FOR: Duration = Duration::from_secs(60);
/// Maximum number of slow sources to remember. Beyond it, none is added until some have expired.
const SLOW_SOURCES_MAX: usize = 1024;

/// Waiting jobs by source, for a given number of threads. The source `None` is this process.
pub(super) struct FairQueue<J> {
    threads: usize,
    queues: HashMap<Option<Source>, SourceQueue<J>>,
    /// Peers whose next job may run. Each such peer is once in either `quick` or `slow`. A peer
    /// with a running job is in neither queue.
    quick: VecDeque<Source>,
    slow: VecDeque<Source>,
    /// Number of running jobs of peers. `slow_under_way` counts the jobs that were taken from
    /// `slow`.
    peers_under_way: usize,
    slow_under_way: usize,
    was_slow: HashMap<Source, Instant>,
    waiting: usize,
}

struct SourceQueue<J> {
    jobs: VecDeque<J>,
    is_under_way: bool,
}

/// A job that is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunningJob {
    source: Option<Source>,
    is_slow: bool,
}

impl<J> FairQueue<J> {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads,
            queues: HashMap::new(),
            quick: VecDeque::new(),
            slow: VecDeque::new(),
            peers_under_way: 0,
            slow_under_way: 0,
            was_slow: HashMap::new(),
            waiting: 0,
        }
    }

    /// Returns the number of waiting jobs of one source and of all sources.
    pub(super) fn waiting(&self, source: Option<Source>) -> (usize, usize) {
        (self.queues.get(&source).map_or(0, |queue| queue.jobs.len()), self.waiting)
    }

    pub(super) fn push(&mut self, source: Option<Source>, job: J, now: Instant) {
        self.waiting += 1;
        let queue = self
            .queues
            .entry(source)
            .or_insert_with(|| SourceQueue { jobs: VecDeque::new(), is_under_way: false });
        queue.jobs.push_back(job);
        if queue.jobs.len() == 1 && !queue.is_under_way {
            self.schedule(source, now);
        }
    }

    /// Returns whether a job may start now.
    pub(super) fn has_next(&self) -> bool {
        self.pick().is_some()
    }

    /// Takes the next job that may start.
    pub(super) fn next(&mut self) -> Option<(RunningJob, J)> {
        let running = self.pick()?;
        match running.source {
            None => {}
            Some(_) if running.is_slow => drop(self.slow.pop_front()),
            Some(_) => drop(self.quick.pop_front()),
        }
        let queue = self.queues.get_mut(&running.source)?;
        let job = queue.jobs.pop_front()?;
        queue.is_under_way = true;
        self.waiting -= 1;
        self.peers_under_way += usize::from(running.source.is_some());
        self.slow_under_way += usize::from(running.is_slow);
        Some((running, job))
    }

    /// Records that a job has ended and how long it took.
    pub(super) fn done(&mut self, running: RunningJob, took: Duration, now: Instant) {
        let RunningJob { source, is_slow } = running;
        self.peers_under_way -= usize::from(source.is_some());
        self.slow_under_way -= usize::from(is_slow);
        if let Some(source) = source.filter(|_| took >= SLOW) {
            self.remember_slow(source, now);
        }
        let Some(queue) = self.queues.get_mut(&source) else { return };
        queue.is_under_way = false;
        if queue.jobs.is_empty() {
            self.queues.remove(&source);
        } else {
            self.schedule(source, now);
        }
    }

    /// Takes out all waiting jobs. [`FairQueue::done`] may still be called for running jobs.
    pub(super) fn take_all(&mut self) -> Vec<J> {
        self.quick.clear();
        self.slow.clear();
        self.waiting = 0;
        self.queues.drain().flat_map(|(_, queue)| queue.jobs).collect()
    }

    fn pick(&self) -> Option<RunningJob> {
        let own = self.queues.get(&None);
        if own.is_some_and(|queue| !queue.is_under_way && !queue.jobs.is_empty()) {
            return Some(RunningJob { source: None, is_slow: false });
        }
        if self.peers_under_way + 1 >= self.threads {
            return None; // the last thread is reserved for this process
        }
        let slow = self.slow.front().filter(|_| self.slow_under_way < self.threads / 2);
        // Slow sources always get one thread, and more (up to half) only if no quick source waits.
        let (source, is_slow) = match (self.quick.front(), slow) {
            (Some(_), Some(slow)) if self.slow_under_way == 0 => (slow, true),
            (Some(quick), _) => (quick, false),
            (None, slow) => (slow?, true),
        };
        Some(RunningJob { source: Some(*source), is_slow })
    }

    fn schedule(&mut self, source: Option<Source>, now: Instant) {
        let Some(source) = source else { return };
        match self.was_slow.get(&source) {
            Some(since) if now.saturating_duration_since(*since) < SLOW_FOR => {
                self.slow.push_back(source);
            }
            _ => self.quick.push_back(source),
        }
    }

    fn remember_slow(&mut self, source: Source, now: Instant) {
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

    /// Takes all jobs that may start.
    fn start_all(jobs: &mut FairQueue<usize>) -> Vec<(RunningJob, usize)> {
        std::iter::from_fn(|| jobs.next()).collect()
    }

    #[test]
    fn gives_a_source_one_thread_and_reserves_one_for_this_process() {
        let (mut jobs, now) = (FairQueue::new(THREADS), Instant::now());
        for job in 0..3 {
            (1..10).for_each(|number| jobs.push(source(number), 10 * number + job, now));
        }
        let begun = start_all(&mut jobs);
        assert_eq!(begun.iter().map(|(_, job)| *job).collect::<Vec<_>>(), [10, 20, 30]);
        assert!(!jobs.has_next());
        jobs.push(None, 0, now);
        jobs.push(None, 1, now);
        let own = start_all(&mut jobs);
        assert_eq!(own.iter().map(|(_, job)| *job).collect::<Vec<_>>(), [0]);
        jobs.done(own[0].0, Duration::ZERO, now);
        assert_eq!(jobs.next().map(|(_, job)| job), Some(1));
        jobs.done(begun[0].0, Duration::ZERO, now);
        assert_eq!(
            start_all(&mut jobs).iter().map(|(_, job)| *job).collect::<Vec<_>>(),
            [40],
            "round-robin"
        );
    }

    #[test]
    fn limits_slow_sources_to_half_of_the_threads() {
        let (mut jobs, mut now) = (FairQueue::new(THREADS), Instant::now());
        // Each of a hundred sources is slow once.
        for number in 0..100 {
            jobs.push(source(number), number, now);
            for (running, _) in start_all(&mut jobs) {
                jobs.done(running, SLOW, now);
            }
        }
        (0..100).for_each(|number| jobs.push(source(number), number, now));
        let slow = start_all(&mut jobs);
        assert_eq!(slow.len(), THREADS / 2);
        jobs.push(source(100), 100, now);
        let (quick, job) = jobs.next().expect("a quick source does not wait");
        assert_eq!(job, 100);
        // Slow sources are served even if quick sources never pause.
        (101..200).for_each(|number| jobs.push(source(number), number, now));
        jobs.done(slow[0].0, SLOW, now);
        jobs.done(slow[1].0, SLOW, now);
        jobs.done(quick, Duration::ZERO, now);
        let next = start_all(&mut jobs);
        assert_eq!(
            next.iter().filter(|(job, _)| job.is_slow).map(|(_, job)| *job).collect::<Vec<_>>(),
            [2]
        );
        for (running, _) in next {
            jobs.done(running, Duration::ZERO, now);
        }
        now += SLOW_FOR;
        jobs.push(source(0), 1000, now);
        assert!(!jobs.slow.contains(&named("10.0.0.0")), "no longer slow after a minute");
    }

    #[test]
    fn keeps_no_state_for_sources_without_jobs() {
        let (mut jobs, now) = (FairQueue::new(THREADS), Instant::now());
        for number in 0..3000 {
            jobs.push(source(number), number, now);
            while let Some((running, _)) = jobs.next() {
                jobs.done(running, SLOW, now);
            }
        }
        assert!(jobs.queues.is_empty() && jobs.quick.is_empty() && jobs.slow.is_empty());
        assert_eq!(jobs.waiting(source(1)), (0, 0));
        assert_eq!(jobs.was_slow.len(), SLOW_SOURCES_MAX);
    }
}
