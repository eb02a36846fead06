//! Calls that may wait for the kernel or for a device's firmware: made where waiting harms nobody.
//!
//! Creating, modifying and destroying a queue pair, registering memory, and most calls of the
//! connection manager are commands to firmware or wait for locks in the kernel: tens of
//! microseconds on a good day, a second when the kernel has to find the hardware address of a
//! silent peer. Whoever drives the fabric may be a database, so it never makes them itself:
//!
//! ```text
//!   driver: command(own, work, then) ──► a queue per source ──► command thread: work(own) ──► driver: then(own, result)
//! ```
//!
//! - A command owns what it works on, and gives it back with its result. While it is under way
//!   nobody else has it, so that nothing has to be locked for it. A command that panics has failed:
//!   what it owned comes back, and what follows it runs.
//! - Commands of one source (a peer's, or this process) run in the order in which they were given.
//!   Sources take turns, one command each: a source whose commands take a second has one thread,
//!   and others go on beside it (`turns.rs`).
//! - There is always a thread that waits, up to [`THREADS_MAX`]: the one that takes a command and
//!   finds no other starts it.
//! - A source may have [`EACH`] commands waiting. Whoever gives a command that a peer can cause
//!   asks first ([`Commands::has_room`]) and refuses the peer if there is none. Commands that give
//!   something back are always taken.
//! - Posting, polling and arming stay with the driver: they do not enter the kernel.
//!
//! Without the threads ([`Builder::command_threads`](super::Builder::command_threads)) a command is
//! carried out at once by whoever gives it, as in tests that must be the same each time, and in
//! programs that have nothing else to do meanwhile.

mod turns;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::Shared;
use super::mailbox::Mailbox;
use super::poller::Poller;
use crate::error::{Error, ErrorKind};
use crate::mem::lock;
use crate::source::Source;
use turns::{Turn, Turns};

/// Commands of one source that may wait before more are refused.
const EACH: usize = 64;
/// Commands of all that may wait: beyond this, sources with none waiting only.
const ALL: usize = 1024;
/// From the beginning, and at most. Those that were needed once stay, and wait.
const THREADS: usize = 2;
const THREADS_MAX: usize = 8;
/// Results that one pass deals with; the rest has its turn in the next.
const RESULTS: usize = 32;

/// What is left to do with the result, in a pass.
type Finish = Box<dyn FnOnce(&mut Poller, &Shared) + Send>;

enum Job {
    /// Its result goes to the driver. Dropped if the fabric ends before: what it holds goes with
    /// it.
    Command(Box<dyn FnOnce() -> Finish + Send>),
    /// It deals with its result itself, and is carried out whatever happens: memory that it has may
    /// be in use by a device until then.
    Errand(Box<dyn FnOnce() + Send>),
}

/// How commands are carried out.
pub(crate) struct Commands {
    /// `None`: at once, by whoever gives them.
    queue: Option<Arc<Queue>>,
}

struct Queue {
    state: Mutex<State>,
    /// There is something to do, or nothing ever again.
    called: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
    results: Mutex<VecDeque<Finish>>,
    has_results: AtomicBool,
    mailbox: Arc<Mailbox>,
}

struct State {
    turns: Turns<Job>,
    /// All threads, and those that wait.
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Commands {
    /// Carried out at once.
    pub(super) fn inline() -> Self {
        Self { queue: None }
    }

    /// Carried out on threads of their own; results ring the mailbox.
    pub(super) fn on_threads(mailbox: &Arc<Mailbox>) -> Result<Self, Error> {
        let turns = Turns::new(THREADS_MAX);
        let queue = Arc::new(Queue {
            state: Mutex::new(State { turns, threads: 0, idle: 0, closed: false }),
            called: Condvar::new(),
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
                Error::new(ErrorKind::System, format!("no thread for commands: {error}"))
            })?;
        }
        Ok(commands)
    }

    /// Whether a source may cause another command.
    pub(crate) fn has_room(&self, source: impl Into<Option<Source>>) -> bool {
        let Some(queue) = &self.queue else { return true };
        let (own, all) = lock(&queue.state).turns.waiting(source.into());
        own < EACH && (own == 0 || all < ALL)
    }

    /// Carries out `work`, whose result concerns nobody who drives the fabric. It owns what waits
    /// for its end: that goes with it if it panics.
    pub(crate) fn run(
        &self,
        source: impl Into<Option<Source>>,
        work: impl FnOnce() + Send + 'static,
    ) {
        match &self.queue {
            None => work(),
            Some(queue) => queue.push(source.into(), Job::Errand(Box::new(work))),
        }
    }

    /// Lets go of something whose end may wait for the kernel.
    pub(crate) fn discard(&self, source: impl Into<Option<Source>>, thing: impl Send + 'static) {
        self.run(source, move || drop(thing));
    }

    /// Ends the threads. From then on errands are carried out at once, and commands never.
    pub(super) fn close(&self) {
        let Some(queue) = &self.queue else { return };
        let left = {
            let mut state = lock(&queue.state);
            state.closed = true;
            state.turns.take_all()
        };
        queue.called.notify_all();
        // One by one: the last of them may have started another just now.
        loop {
            let Some(thread) = lock(&queue.threads).pop() else { break };
            // The last handle of the fabric may go in a `work` or in a `then`.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        left.into_iter().for_each(|job| match job {
            Job::Command(command) => drop(command),
            Job::Errand(errand) => errand(),
        });
        lock(&queue.results).clear();
    }
}

impl Drop for Commands {
    /// For one that no fabric was made with.
    fn drop(&mut self) {
        self.close();
    }
}

impl Poller {
    /// Carries out `work` on `own` where it may wait, then `then` with both and its result: in a
    /// pass, or at once where there are no threads.
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
                    let result = caught(|| work(&mut own)).unwrap_or_else(Err);
                    Box::new(move |poller: &mut Self, shared: &Shared| {
                        then(poller, shared, own, result)
                    }) as Finish
                };
                queue.push(source.into(), Job::Command(Box::new(command)));
            }
        }
    }

    /// Deals with results that have come; how many. Called after the mailbox was emptied: whoever
    /// puts a result there rings afterwards.
    pub(super) fn finish_commands(&mut self, shared: &Shared) -> usize {
        let Some(queue) = &shared.commands.queue else { return 0 };
        if !queue.has_results.load(Ordering::SeqCst) {
            return 0;
        }
        let finished: Vec<Finish> = {
            let mut results = lock(&queue.results);
            let count = results.len().min(RESULTS);
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
            if let Job::Errand(errand) = job {
                errand();
            }
            return;
        }
        state.turns.push(source, job, Instant::now());
        let wakes = state.idle > 0 && state.turns.has_next();
        drop(state);
        if wakes {
            self.called.notify_one();
        }
    }

    /// Starts a thread that was counted already.
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

    /// A command thread.
    fn run(self: &Arc<Self>) {
        while let Some((turn, job)) = self.next() {
            let begun = Instant::now();
            match job {
                Job::Command(command) => {
                    let finish = command();
                    {
                        let mut results = lock(&self.results);
                        results.push_back(finish);
                        self.has_results.store(true, Ordering::SeqCst);
                    }
                    self.mailbox.ring();
                }
                Job::Errand(errand) => drop(caught(errand)),
            }
            let now = Instant::now();
            lock(&self.state).turns.done(turn, now - begun, now);
        }
    }

    /// The next command, in turn; `None` at the end. A thread is left that waits, if there may be
    /// another.
    fn next(self: &Arc<Self>) -> Option<(Turn, Job)> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(next) = state.turns.next() {
                let more = state.turns.has_next();
                let another =
                    (state.idle == 0 && state.threads < THREADS_MAX).then_some(state.threads);
                state.threads += usize::from(another.is_some());
                drop(state);
                if let Some(number) = another {
                    let _ = self.spawn(number); // or else those that there are do it
                } else if more {
                    self.called.notify_one();
                }
                return Some(next);
            }
            state.idle += 1;
            state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// What `work` returns.
///
/// # Errors
/// It has panicked. The thread lives on.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Error> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(|_| {
        tracing::error!("a command to a device has panicked");
        Error::new(ErrorKind::System, "a command to a device has panicked")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use ferrite_verbs::fake::{DeviceSpec, World};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn commands() -> Commands {
        Commands::on_threads(&Arc::new(Mailbox::new().expect("a mailbox"))).expect("threads")
    }

    fn source(number: usize) -> Option<Source> {
        Some(crate::source::tests::source(&format!("10.0.0.{number}")))
    }

    /// Gives a command that says when it has begun and waits until it may end.
    fn blocked(commands: &Commands, of: Option<Source>) -> (Receiver<()>, Sender<()>) {
        let ((begun, begins), (go, may)) = (channel(), channel());
        commands.run(of, move || {
            let _ = begun.send(());
            let _ = may.recv_timeout(PATIENCE);
        });
        (begins, go)
    }

    #[test]
    fn keeps_the_order_of_a_source_and_does_not_make_others_wait_for_it() {
        let commands = commands();
        let (begins, go) = blocked(&commands, source(1));
        begins.recv_timeout(PATIENCE).expect("it runs");
        let (tell, told) = channel();
        for number in 0..50 {
            let tell = tell.clone();
            commands.run(source(1), move || {
                let _ = tell.send((1, number));
            });
        }
        commands.run(source(3), move || {
            let _ = tell.send((3, 0));
        });
        assert_eq!(told.recv_timeout(PATIENCE), Ok((3, 0)));
        drop(go);
        let done: Vec<_> =
            (0..50).map(|_| told.recv_timeout(PATIENCE).expect("all are carried out")).collect();
        assert_eq!(done, (0..50).map(|number| (1, number)).collect::<Vec<_>>());
        commands.close();
    }

    #[test]
    fn refuses_a_source_with_too_many_and_no_other() {
        let commands = commands();
        let (begins, go) = blocked(&commands, source(1));
        begins.recv_timeout(PATIENCE).expect("it runs");
        for _ in 0..EACH {
            assert!(commands.has_room(source(1)));
            commands.run(source(1), || {});
        }
        assert!(!commands.has_room(source(1)));
        assert!(commands.has_room(source(2)) && commands.has_room(None));
        drop(go);
        let (tell, told) = channel();
        commands.run(source(1), move || {
            let _ = tell.send(());
        });
        told.recv_timeout(PATIENCE).expect("carried out in its turn");
        assert!(commands.has_room(source(1)));
        commands.close();
    }

    #[test]
    fn goes_on_while_commands_of_other_sources_wait() {
        let commands = commands();
        let (tell, told) = channel();
        let carried_out = |of: Option<Source>| {
            let tell = tell.clone();
            commands.run(of, move || {
                let _ = tell.send(());
            });
            told.recv_timeout(PATIENCE).expect("not held up");
        };
        let mut holds = Vec::new();
        for number in 1..THREADS_MAX - 1 {
            let (begins, go) = blocked(&commands, source(number));
            begins.recv_timeout(PATIENCE).expect("it runs");
            holds.push(go);
            carried_out(source(100));
        }
        // The last thread is this process's.
        let (begins, go) = blocked(&commands, source(THREADS_MAX - 1));
        begins.recv_timeout(PATIENCE).expect("it runs");
        carried_out(None);
        drop((holds, go));
        commands.close();
        let queue = commands.queue.as_ref().expect("threads");
        assert!(lock(&queue.state).threads <= THREADS_MAX);
    }

    #[test]
    fn drops_what_waits_at_the_end() {
        let commands = commands();
        let holds = [blocked(&commands, source(1)), blocked(&commands, source(2))];
        for (begins, _) in &holds {
            begins.recv_timeout(PATIENCE).expect("it runs");
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
        commands.discard(None, thing); // too late, and dropped as well
        drop(waits);
    }

    /// A fabric that a test drives.
    fn fabric(world: &World) -> crate::Fabric {
        let config = crate::Config { busy_poll_us: 0, ..crate::Config::default() };
        crate::Fabric::builder(&world.verbs())
            .config(config)
            .command_threads()
            .build()
            .expect("a fabric")
    }

    #[test]
    fn what_follows_a_command_that_panics_runs_and_the_threads_live_on() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", std::net::Ipv4Addr::LOCALHOST.into()));
        let fabric = fabric(&world);
        let (tell, told) = channel();
        for number in 0..2 * THREADS_MAX {
            let tell = tell.clone();
            let then = move |_: &mut Poller, _: &Shared, own: usize, result: Result<(), Error>| {
                let _ = tell.send((own, result.map_err(|error| error.kind())));
            };
            let work = move |own: &mut usize| match number % 2 {
                0 => panic!("as one does on purpose here"),
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
        fabric.shared().commands.run(None, || panic!("an errand does, too"));
        let mut done = Vec::new();
        let begun = Instant::now();
        while done.len() < 2 * THREADS_MAX {
            assert!(begun.elapsed() < PATIENCE, "only {done:?}");
            fabric.progress();
            done.extend(told.try_iter());
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
    fn threads_end_when_no_fabric_comes_to_have_them() {
        let commands = commands();
        let queue = Arc::downgrade(commands.queue.as_ref().expect("threads"));
        drop(commands);
        assert!(queue.upgrade().is_none(), "its threads have it");
    }
}
