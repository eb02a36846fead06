//! A model of how a fabric's drivers sleep and are woken, for loom: every order in which a few
//! threads can do it.
//!
//! Real are the [`Mailbox`] and the [`Wakeup`]. What they work with is made small: eventfds are
//! flags, the device is one completion queue that tells of a completion if it was asked to, and the
//! loops are those of `poller.rs` and `drive.rs` without what does not matter here. A change there
//! belongs here too. Who sleeps over something is found as a deadlock.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::mailbox::Mailbox;
use super::wakeup::Wakeup;
use crate::error::Error;
use crate::sync::{explore, lock};

loom::lazy_static! {
    /// One for each execution.
    static ref KERNEL: Kernel = Kernel { state: Mutex::new(KernelState::default()), changed: Condvar::new() };
}

struct Kernel {
    state: Mutex<KernelState>,
    changed: Condvar,
}

#[derive(Default)]
struct KernelState {
    event_fds: Vec<bool>,
    /// What completed and was not taken: the futures that it is for.
    completions: Vec<usize>,
    /// Whether the next completion makes the descriptor readable.
    armed: bool,
    event: bool,
    /// The descriptor was made readable since who is told of changes only went to sleep.
    changed: bool,
}

/// Stands for an eventfd.
pub(crate) struct EventFd(usize);

impl EventFd {
    pub(crate) fn new() -> Result<Self, Error> {
        let mut kernel = lock(&KERNEL.state);
        kernel.event_fds.push(false);
        Ok(Self(kernel.event_fds.len() - 1))
    }

    pub(crate) fn ring(&self) {
        let mut kernel = lock(&KERNEL.state);
        kernel.event_fds[self.0] = true;
        kernel.changed |= self.0 == MAIL;
        drop(kernel);
        KERNEL.changed.notify_all();
    }

    pub(crate) fn silence(&self) {
        lock(&KERNEL.state).event_fds[self.0] = false;
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        unreachable!("a flag has no descriptor")
    }
}

/// The device completes something for a future.
fn complete(future: usize) {
    let mut kernel = lock(&KERNEL.state);
    kernel.completions.push(future);
    if std::mem::take(&mut kernel.armed) {
        kernel.event = true;
        kernel.changed = true;
        drop(kernel);
        KERNEL.changed.notify_all();
    }
}

/// The mailbox's eventfd: the first that was made.
const MAIL: usize = 0;

/// WaitSet until the descriptor is readable, or the eventfd.
fn sleep(event_fd: Option<&EventFd>) {
    let mut kernel = lock(&KERNEL.state);
    while !(kernel.event
        || kernel.event_fds[MAIL]
        || event_fd.is_some_and(|event_fd| kernel.event_fds[event_fd.0]))
    {
        kernel = KERNEL.changed.wait(kernel).expect("no panic");
    }
}

/// WaitSet for a change of the descriptor, as tokio tells of it: what was readable before and was
/// not taken is forgotten.
fn sleep_by_changes() {
    let mut kernel = lock(&KERNEL.state);
    while !std::mem::take(&mut kernel.changed) {
        kernel = KERNEL.changed.wait(kernel).expect("no panic");
    }
}

struct Poller {
    /// The descriptor was prepared for waiting, and not looked at since.
    armed: bool,
    /// The device was asked to tell of the next completion, and that was not taken yet.
    asked: bool,
}

/// What `Shared` is to the fabric.
struct Model {
    /// Who has it makes a pass.
    poller: Mutex<Poller>,
    mailbox: Mailbox,
    drivers: AtomicUsize,
    over: AtomicBool,
    futures: [Mutex<Future>; 2],
    called: AtomicUsize,
    /// Whether a pass looks at the descriptor because of the time that has passed, not only after
    /// sleep.
    time_flies: bool,
    /// Whether `run` sleeps as tokio does.
    by_changes: bool,
}

#[derive(Default)]
struct Future {
    ready: bool,
    waker: Option<Waker>,
}

enum Armed {
    Sleep,
    Again,
    Elsewhere,
}

impl Model {
    fn new(time_flies: bool) -> Arc<Self> {
        Self::sleeping(time_flies, false)
    }

    fn sleeping(time_flies: bool, by_changes: bool) -> Arc<Self> {
        Arc::new(Self {
            poller: Mutex::new(Poller { armed: true, asked: false }),
            mailbox: Mailbox::new().expect("a event_fd"),
            drivers: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            futures: [Mutex::default(), Mutex::default()],
            called: AtomicUsize::new(0),
            time_flies,
            by_changes,
        })
    }

    fn reap(&self, wakes: &mut Vec<Waker>) -> usize {
        let completions = std::mem::take(&mut lock(&KERNEL.state).completions);
        for future in &completions {
            let mut future = lock(&self.futures[*future]);
            future.ready = true;
            wakes.extend(future.waker.take());
        }
        completions.len()
    }

    fn pass(&self) -> usize {
        let Ok(mut poller) = self.poller.try_lock() else { return 0 };
        let mut wakes = Vec::new();
        if self.time_flies || poller.armed {
            self.mailbox.awake(|| {
                poller.armed = false;
                if std::mem::take(&mut lock(&KERNEL.state).event) {
                    poller.asked = false;
                }
                self.mailbox.silence();
            });
        }
        let mut done = self.reap(&mut wakes);
        let calls = self.mailbox.take().len();
        self.called.fetch_add(calls, Ordering::Relaxed);
        done += calls;
        drop(poller);
        wakes.into_iter().for_each(Waker::wake);
        done
    }

    fn arm(&self) -> Armed {
        let Ok(mut poller) = self.poller.try_lock() else { return Armed::Elsewhere };
        if !std::mem::replace(&mut poller.asked, true) {
            lock(&KERNEL.state).armed = true;
        }
        let mut wakes = Vec::new();
        let found = self.reap(&mut wakes);
        poller.armed = true;
        let armed = self.mailbox.fall_asleep() && found == 0;
        drop(poller);
        let woken = !wakes.is_empty();
        wakes.into_iter().for_each(Waker::wake);
        if armed && !woken { Armed::Sleep } else { Armed::Again }
    }

    fn begin(&self) {
        self.drivers.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        if self.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            self.mailbox.hand_over();
        }
    }

    /// `Fabric::poll`.
    fn poll(&self) {
        self.pass();
        if self.drivers.load(Ordering::SeqCst) > 0 {
            self.mailbox.hand_over();
        }
    }

    /// `Shared::run` or `Fabric::drive`, until `over` and so many calls have come.
    fn run(&self, calls: usize) {
        loop {
            if self.pass() > 0 {
                continue;
            }
            let is_over = || {
                self.over.load(Ordering::Acquire) && self.called.load(Ordering::Relaxed) >= calls
            };
            if is_over() {
                break;
            }
            match self.arm() {
                Armed::Sleep if is_over() => break,
                Armed::Sleep if self.by_changes => sleep_by_changes(),
                Armed::Sleep => sleep(None),
                Armed::Again => {}
                Armed::Elsewhere => thread::yield_now(),
            }
        }
        self.leave();
    }

    /// `Fabric::progress`.
    fn progress(&self) {
        while self.pass() > 0 {}
        match self.arm() {
            Armed::Sleep => {}
            Armed::Again => self.progress(),
            Armed::Elsewhere => self.mailbox.wake(),
        }
    }

    /// `Fabric::block_on` of a future that the device makes ready.
    fn block_on(&self, future: usize) {
        self.begin();
        let wakeup = Arc::new(Wakeup::new());
        loop {
            if wakeup.take() {
                let mut future = lock(&self.futures[future]);
                if future.ready {
                    break;
                }
                future.waker = Some(Waker::from(Arc::clone(&wakeup)));
            }
            if self.pass() > 0 || wakeup.is_woken() {
                continue;
            }
            match self.arm() {
                Armed::Sleep => wakeup.sleep(|event_fd| sleep(event_fd)),
                Armed::Again => {}
                Armed::Elsewhere => thread::yield_now(),
            }
        }
        self.leave();
    }

    /// The last handle of the fabric is dropped.
    fn abandon(&self) {
        self.over.store(true, Ordering::Release);
        self.mailbox.ring();
    }
}

fn spawn(model: &Arc<Model>, act: impl FnOnce(&Model) + 'static) -> thread::JoinHandle<()> {
    let model = Arc::clone(model);
    thread::spawn(move || act(&model))
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().expect("it to end"));
}

/// Two threads call while the driver falls asleep, again and again.
#[test]
fn loom_no_call_is_slept_over() {
    for (time_flies, by_changes) in [(false, false), (true, false), (false, true), (true, true)] {
        explore("no call is slept over", move || {
            let model = Model::sleeping(time_flies, by_changes);
            model.begin();
            model.over.store(true, Ordering::Release); // ends when all have called
            let callers = [1, 2].map(|link| spawn(&model, move |model| model.mailbox.attend(link)));
            model.run(2);
            join(callers);
        });
    }
}

/// A foreign loop prepares to sleep while another thread has the poller, as for a new listener.
#[test]
fn loom_a_foreign_loop_hears_of_calls() {
    for time_flies in [false, true] {
        explore("a foreign loop hears of calls", move || {
            let model = Model::new(time_flies);
            model.begin();
            let calling = spawn(&model, |model| {
                let poller = lock(&model.poller);
                model.over.store(true, Ordering::Release);
                drop(poller);
                model.mailbox.ring();
            });
            loop {
                model.progress();
                if model.over.load(Ordering::Acquire) {
                    break;
                }
                sleep(None);
            }
            join([calling]);
        });
    }
}

/// The end of the fabric reaches each of its drivers.
#[test]
fn loom_all_drivers_end() {
    for time_flies in [false, true] {
        explore("all drivers end", move || {
            let model = Model::new(time_flies);
            model.begin();
            model.begin();
            let driver = spawn(&model, |model| model.run(0));
            let dropping = spawn(&model, Model::abandon);
            model.run(0);
            join([driver, dropping]);
        });
    }
}

/// Two threads wait, each for its own; whoever sleeps, is woken for the other, or has what it
/// waited for.
#[test]
fn loom_two_block_at_once() {
    for time_flies in [false, true] {
        explore("two block at once", move || {
            let model = Model::new(time_flies);
            let other = spawn(&model, |model| model.block_on(1));
            let device = spawn(&model, |_| {
                complete(0);
                complete(1);
            });
            model.block_on(0);
            join([other, device]);
        });
    }
}

/// One waits while another drives; then the fabric ends.
#[test]
fn loom_one_blocks_beside_a_driver() {
    for (time_flies, by_changes) in [(false, false), (true, false), (false, true)] {
        explore("one blocks beside a driver", move || {
            let model = Model::sleeping(time_flies, by_changes);
            model.begin();
            let driver = spawn(&model, |model| model.run(0));
            let device = spawn(&model, |_| complete(0));
            model.block_on(0);
            model.abandon();
            join([driver, device]);
        });
    }
}

/// One waits; another makes a single pass and takes the event that was to wake it.
#[test]
fn loom_one_blocks_while_another_polls() {
    for time_flies in [false, true] {
        explore("one blocks while another polls", move || {
            let model = Model::new(time_flies);
            let polling = spawn(&model, |model| {
                complete(1);
                model.poll();
                complete(0);
            });
            model.block_on(0);
            join([polling]);
        });
    }
}

/// The same with two that poll: what one hands over, the other must not take away.
#[test]
fn loom_one_blocks_while_two_poll() {
    for time_flies in [false, true] {
        explore("one blocks while two poll", move || {
            let model = Model::new(time_flies);
            let first = spawn(&model, |model| {
                complete(1);
                model.poll();
            });
            let second = spawn(&model, |model| {
                model.poll();
                complete(0);
            });
            model.block_on(0);
            join([first, second]);
        });
    }
}
