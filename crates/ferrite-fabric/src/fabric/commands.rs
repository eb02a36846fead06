//! Runs calls that may block in the kernel or in a device's firmware, on threads other than the
//! driver's.
//!
//! Creating, modifying and destroying a queue pair, registering memory, and most calls of the
//! connection manager are firmware commands or wait for kernel locks. They usually take tens of
//! microseconds. They take a full second if the kernel has to resolve the hardware address of a
//! peer that does not answer. The program that drives the fabric may be a database, so the driver
//! leaves these calls to command threads:
//!
//! ```text
//!   driver:          command(own, work, then)
//!                      │  a queue per source
//!   command thread:  work(own)
//!                      │  results, and a wake-up through the mailbox
//!   driver:          then(own, result)
//! ```
//!
//! - A command owns the objects that it works on, and returns them with its result. Nobody else has
//!   access to them in the meantime, so no lock is needed. A command that panics counts as failed.
//!   Its objects are returned, and later commands still run.
//! - Commands of one source (a peer, or this process) run in the order in which they were
//!   submitted. Sources are served round-robin, one command each. A source whose commands take a
//!   second occupies one thread, and other sources continue on the other threads (`fair_queue.rs`).
//! - While there are fewer than [`THREADS_MAX`] threads, one is always idle. A thread that takes a
//!   command and leaves no idle thread behind starts another thread.
//! - A source may have [`WAITING_PER_SOURCE_MAX`] commands waiting. Before a caller submits a
//!   command on behalf of a peer, it checks [`Commands::has_room`], and refuses the peer if there
//!   is no room. Commands that release something are always accepted.
//! - The driver itself posts, polls and arms, because these calls do not enter the kernel on
//!   network cards.
//! - Two changes of a queue pair are made at once, by the thread that needs them. When a link
//!   fails, its queue pair changes to the ERROR state, so that the device accepts nothing more. A
//!   grant gives the peer access rights on the queue pair.
//!
//! Without the threads ([`Builder::command_threads`](super::Builder::command_threads)) the caller
//! runs each command at once. That suits deterministic tests, and programs that have nothing else
//! to do meanwhile.

mod fair_queue;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::Shared;
use super::poller::Poller;
use crate::error::{Error, ErrorKind};
use crate::mem::lock;
use crate::source::Source;
use crate::wake::mailbox::Mailbox;
use fair_queue::{FairQueue, RunningJob};

/// Maximum number of waiting commands of one source. Beyond it, [`Commands::has_room`] is false.
const WAITING_PER_SOURCE_MAX: usize = 64;
/// Maximum number of waiting commands of all sources. Beyond it, a source has room only if it has
/// no command waiting.
const WAITING_MAX: usize = 1024;
/// The initial and the maximum number of threads. A thread that was started stays.
const THREADS: usize = 2;
const THREADS_MAX: usize = 8;
/// Maximum number of results that one pass handles. The next pass handles the rest.
const RESULTS_PER_PASS: usize = 32;

/// Handles the result of a command, in a pass of the driver.
type Finish = Box<dyn FnOnce(&mut Poller, &Shared) + Send>;

enum Job {
    /// A job whose result the driver handles. If the fabric ends before the job has started, the
    /// job is dropped together with everything it owns.
    Command(Box<dyn FnOnce() -> Finish + Send>),
    /// A job without a result for the driver. It always runs, even when the fabric ends, because a
    /// device may use the memory that the job owns until the job has run.
    Detached(Box<dyn FnOnce() + Send>),
}

/// Runs commands, on threads of their own or inline.
pub(crate) struct Commands {
    /// `None` if the caller runs each command at once.
    queue: Option<Arc<Queue>>,
}

struct Queue {
    state: Mutex<State>,
    /// Notified when a job may be available or the queue was closed.
    job_ready: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
    results: Mutex<VecDeque<Finish>>,
    has_results: AtomicBool,
    mailbox: Arc<Mailbox>,
}

struct State {
    jobs: FairQueue<Job>,
    /// Number of all threads.
    threads: usize,
    /// Number of threads that wait for a job.
    idle: usize,
    closed: bool,
}

impl Commands {
    /// Returns an executor whose commands run at once, in the caller.
    pub(super) fn inline() -> Self {
        Self { queue: None }
    }

    /// Starts the threads that run commands. Each result wakes the driver through `mailbox`.
    pub(super) fn on_threads(mailbox: &Arc<Mailbox>) -> Result<Self, Error> {
        let jobs = FairQueue::new(THREADS_MAX);
        let queue = Arc::new(Queue {
            state: Mutex::new(State { jobs, threads: 0, idle: 0, closed: false }),
            job_ready: Condvar::new(),
            threads: Mutex::default(),
            results: Mutex::default(),
            has_results: AtomicBool::new(false),
            mailbox: Arc::clone(mailbox),
        });
        let commands = Self { queue: Some(Arc::clone(&queue)) };
        for number in 0..THREADS {
            lock(&queue.state).threads += 1;
            let spawned = queue.spawn(number);
            spawned.map_err(|error| {
                Error::new(
                    ErrorKind::System,
                    format!("cannot start a thread for device commands: {error}"),
                )
            })?;
        }
        Ok(commands)
    }

    /// Returns whether `source` may submit another command.
    pub(crate) fn has_room(&self, source: impl Into<Option<Source>>) -> bool {
        let Some(queue) = &self.queue else { return true };
        let (own, all) = lock(&queue.state).jobs.waiting(source.into());
        own < WAITING_PER_SOURCE_MAX && (own == 0 || all < WAITING_MAX)
    }

    /// Runs `work`, which has no result for the driver. `work` must own everything that it needs.
    /// If `work` panics, these objects are dropped.
    pub(crate) fn run(
        &self,
        source: impl Into<Option<Source>>,
        work: impl FnOnce() + Send + 'static,
    ) {
        match &self.queue {
            None => work(),
            Some(queue) => queue.push(source.into(), Job::Detached(Box::new(work))),
        }
    }

    /// Drops something whose destructor may block in the kernel.
    pub(crate) fn discard(&self, source: impl Into<Option<Source>>, thing: impl Send + 'static) {
        self.run(source, move || drop(thing));
    }

    /// Ends the threads after their current jobs. Then runs the waiting detached jobs, and drops
    /// the waiting commands and the results. Afterwards the caller runs detached jobs at once, and
    /// commands never run. Without threads, does nothing.
    pub(super) fn close(&self) {
        let Some(queue) = &self.queue else { return };
        let left = {
            let mut state = lock(&queue.state);
            state.closed = true;
            state.jobs.take_all()
        };
        queue.job_ready.notify_all();
        // Join one thread at a time, because a thread may have started another one just before it
        // ended.
        loop {
            let Some(thread) = lock(&queue.threads).pop() else { break };
            // A thread cannot join itself. This function runs on a command thread if a command
            // drops the last handle of the fabric.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        left.into_iter().for_each(|job| match job {
            Job::Command(command) => drop(command),
            Job::Detached(work) => work(),
        });
        lock(&queue.results).clear();
    }
}

impl Drop for Commands {
    /// Ends the threads if building the fabric failed. Otherwise the fabric has already closed the
    /// queue.
    fn drop(&mut self) {
        self.close();
    }
}

impl Poller {
    /// Runs `work` with `own` on a command thread, where it may block. Then calls `then` with `own`
    /// and the result, in a pass of the driver. Without command threads, runs both at once.
    pub(crate) fn command<O: Send + 'static, T: Send + 'static>(
        &mut self,
        shared: &Shared,
        source: impl Into<Option<Source>>,
        mut own: O,
        work: impl FnOnce(&mut O) -> Result<T, Error> + Send + 'static,
        then: impl FnOnce(&mut Self, &Shared, O, Result<T, Error>) + Send + 'static,
    ) {
        match &shared.commands.queue {
            None => {
                let result = work(&mut own);
                then(self, shared, own, result);
            }
            Some(queue) => {
                let command = move || {
                    let result = catch_panic(|| work(&mut own)).unwrap_or_else(Err);
                    Box::new(move |poller: &mut Self, shared: &Shared| {
                        then(poller, shared, own, result);
                    }) as Finish
                };
                queue.push(source.into(), Job::Command(Box::new(command)));
            }
        }
    }

    /// Handles up to [`RESULTS_PER_PASS`] results that have arrived and returns their number. Must
    /// be called after emptying the mailbox, because a command thread adds its result before it
    /// wakes the driver.
    pub(super) fn finish_commands(&mut self, shared: &Shared) -> usize {
        let Some(queue) = &shared.commands.queue else { return 0 };
        if !queue.has_results.load(Ordering::SeqCst) {
            return 0;
        }
        let finished: Vec<Finish> = {
            let mut results = lock(&queue.results);
            let count = results.len().min(RESULTS_PER_PASS);
            queue.has_results.store(results.len() > count, Ordering::SeqCst);
            results.drain(..count).collect()
        };
        let count = finished.len();
        finished.into_iter().for_each(|finish| finish(self, shared));
        count
    }
}

impl Queue {
    fn push(&self, source: Option<Source>, job: Job) {
        let mut state = lock(&self.state);
        if state.closed {
            drop(state);
            if let Job::Detached(work) = job {
                work();
            }
            return;
        }
        state.jobs.push(source, job, Instant::now());
        let wakes = state.idle > 0 && state.jobs.has_next();
        drop(state);
        if wakes {
            self.job_ready.notify_one();
        }
    }

    /// Starts a thread that `State::threads` already counts.
    fn spawn(self: &Arc<Self>, number: usize) -> std::io::Result<()> {
        let queue = Arc::clone(self);
        let thread = std::thread::Builder::new().name(format!("ferrite-cmd-{number}"));
        match thread.spawn(move || queue.run()) {
            Ok(thread) => {
                lock(&self.threads).push(thread);
                Ok(())
            }
            Err(error) => {
                lock(&self.state).threads -= 1;
                Err(error)
            }
        }
    }

    /// The body of a command thread.
    fn run(self: &Arc<Self>) {
        while let Some((running, job)) = self.next() {
            let begun = Instant::now();
            match job {
                Job::Command(command) => {
                    let finish = command();
                    {
                        let mut results = lock(&self.results);
                        results.push_back(finish);
                        self.has_results.store(true, Ordering::SeqCst);
                    }
                    self.mailbox.notify();
                }
                Job::Detached(work) => drop(catch_panic(work)),
            }
            let now = Instant::now();
            lock(&self.state).jobs.done(running, now - begun, now);
        }
    }

    /// Waits for the next job. Returns `None` once the queue is closed. If no other thread is idle,
    /// starts another thread first, up to [`THREADS_MAX`].
    fn next(self: &Arc<Self>) -> Option<(RunningJob, Job)> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(next) = state.jobs.next() {
                let more = state.jobs.has_next();
                let another =
                    (state.idle == 0 && state.threads < THREADS_MAX).then_some(state.threads);
                state.threads += usize::from(another.is_some());
                drop(state);
                if let Some(number) = another {
                    let _ = self.spawn(number); // if it fails, the existing threads do the work
                } else if more {
                    self.job_ready.notify_one();
                }
                return Some(next);
            }
            state.idle += 1;
            state = self.job_ready.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// Calls `work` and returns its result.
///
/// # Errors
/// Returns an error if `work` panics. The thread survives.
fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(|_| {
        tracing::error!("a device command panicked");
        Error::new(ErrorKind::System, "a device command panicked")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use ferrite_verbs::fake::{DeviceSpec, World};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn commands() -> Commands {
        Commands::on_threads(&Arc::new(Mailbox::new().expect("a mailbox"))).expect("threads")
    }

    fn source(number: usize) -> Option<Source> {
        Some(crate::source::tests::source(&format!("10.0.0.{number}")))
    }

    /// Submits a command that reports when it has started and then blocks. Returns the channel for
    /// the report, and a sender. Dropping the sender lets the command finish.
    fn submit_blocking(commands: &Commands, of: Option<Source>) -> (Receiver<()>, Sender<()>) {
        let ((begun, begins), (go, may)) = (channel(), channel());
        commands.run(of, move || {
            let _ = begun.send(());
            let _ = may.recv_timeout(TIMEOUT);
        });
        (begins, go)
    }

    #[test]
    fn runs_each_source_in_order_without_delaying_others() {
        let commands = commands();
        let (begins, go) = submit_blocking(&commands, source(1));
        begins.recv_timeout(TIMEOUT).expect("the command starts");
        let (complete, completed) = channel();
        for number in 0..50 {
            let complete = complete.clone();
            commands.run(source(1), move || {
                let _ = complete.send((1, number));
            });
        }
        commands.run(source(3), move || {
            let _ = complete.send((3, 0));
        });
        assert_eq!(completed.recv_timeout(TIMEOUT), Ok((3, 0)));
        drop(go);
        let done: Vec<_> =
            (0..50).map(|_| completed.recv_timeout(TIMEOUT).expect("all commands run")).collect();
        assert_eq!(done, (0..50).map(|number| (1, number)).collect::<Vec<_>>());
        commands.close();
    }

    #[test]
    fn refuses_only_the_source_with_too_many_commands() {
        let commands = commands();
        let (begins, go) = submit_blocking(&commands, source(1));
        begins.recv_timeout(TIMEOUT).expect("the command starts");
        for _ in 0..WAITING_PER_SOURCE_MAX {
            assert!(commands.has_room(source(1)));
            commands.run(source(1), || {});
        }
        assert!(!commands.has_room(source(1)));
        assert!(commands.has_room(source(2)) && commands.has_room(None));
        drop(go);
        let (complete, completed) = channel();
        commands.run(source(1), move || {
            let _ = complete.send(());
        });
        completed.recv_timeout(TIMEOUT).expect("the last command runs after the others");
        assert!(commands.has_room(source(1)));
        commands.close();
    }

    #[test]
    fn runs_commands_while_those_of_other_sources_block() {
        let commands = commands();
        let (complete, completed) = channel();
        let run_to_end = |of: Option<Source>| {
            let complete = complete.clone();
            commands.run(of, move || {
                let _ = complete.send(());
            });
            completed.recv_timeout(TIMEOUT).expect("other sources do not delay the command");
        };
        let mut holds = Vec::new();
        for number in 1..THREADS_MAX - 1 {
            let (begins, go) = submit_blocking(&commands, source(number));
            begins.recv_timeout(TIMEOUT).expect("the command starts");
            holds.push(go);
            run_to_end(source(100));
        }
        // Commands for peers cannot occupy the last thread, which is reserved for this process's
        // own commands.
        let (begins, go) = submit_blocking(&commands, source(THREADS_MAX - 1));
        begins.recv_timeout(TIMEOUT).expect("the command starts");
        run_to_end(None);
        drop((holds, go));
        commands.close();
        let queue = commands.queue.as_ref().expect("threads");
        assert!(lock(&queue.state).threads <= THREADS_MAX);
    }

    #[test]
    fn releases_waiting_jobs_when_closed() {
        let commands = commands();
        let holds = [submit_blocking(&commands, source(1)), submit_blocking(&commands, source(2))];
        for (begins, _) in &holds {
            begins.recv_timeout(TIMEOUT).expect("the command starts");
        }
        let thing = Arc::new(());
        let held = Arc::clone(&thing);
        commands.run(source(1), move || drop(held));
        let (waits, go): (Vec<_>, Vec<_>) = holds.into_iter().unzip();
        std::thread::scope(|scope| {
            scope.spawn(|| commands.close());
            drop(go);
        });
        assert_eq!(Arc::strong_count(&thing), 1);
        commands.discard(None, thing); // dropped at once, because the queue is closed
        drop(waits);
    }

    /// Builds a fabric that the test drives by hand.
    fn fabric(world: &World) -> crate::Fabric {
        let config = crate::Config { busy_poll_us: 0, ..crate::Config::default() };
        crate::Fabric::builder(&world.verbs())
            .config(config)
            .command_threads()
            .build()
            .expect("a fabric")
    }

    #[test]
    fn survives_commands_that_panic() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", std::net::Ipv4Addr::LOCALHOST.into()));
        let fabric = fabric(&world);
        let (complete, completed) = channel();
        for number in 0..2 * THREADS_MAX {
            let complete = complete.clone();
            let then = move |_: &mut Poller, _: &Shared, own: usize, result: Result<(), Error>| {
                let _ = complete.send((own, result.map_err(|error| error.kind())));
            };
            let work = move |own: &mut usize| match number % 2 {
                0 => panic!("on purpose"),
                _ => {
                    *own += 100;
                    Ok(())
                }
            };
            lock(&fabric.shared().poller).command(
                fabric.shared(),
                source(number),
                number,
                work,
                then,
            );
        }
        fabric.shared().commands.run(None, || panic!("on purpose, in a detached job"));
        let mut done = Vec::new();
        let begun = Instant::now();
        while done.len() < 2 * THREADS_MAX {
            assert!(begun.elapsed() < TIMEOUT, "only these commands have finished: {done:?}");
            fabric.progress();
            done.extend(completed.try_iter());
        }
        done.sort_unstable_by_key(|(own, _)| own % 100);
        for (number, done) in done.into_iter().enumerate() {
            let expected = match number % 2 {
                0 => (number, Err(ErrorKind::System)),
                _ => (number + 100, Ok(())),
            };
            assert_eq!(done, expected);
        }
    }

    #[test]
    fn dropping_commands_ends_the_threads() {
        let commands = commands();
        let queue = Arc::downgrade(commands.queue.as_ref().expect("threads"));
        drop(commands);
        assert!(queue.upgrade().is_none(), "a thread still holds the queue");
    }
}
