//! A loom model of how a fabric's drivers sleep and are woken. It explores the interleavings of a
//! few threads, within the bounds that are set for loom.
//!
//! The [`Mailbox`] and the [`Wakeup`] are the real ones. The kernel and the device are the
//! simplified ones of `event_fd/model.rs`. The loops are reduced copies of those in `poller.rs` and
//! `drive.rs`, so a change of those loops must be repeated here. A driver that sleeps although
//! there is work causes a deadlock.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::thread;

use super::event_fd::model::{KERNEL, complete, sleep, sleep_edge_triggered};
use super::mailbox::Mailbox;
use super::wakeup::Wakeup;
use crate::sync::{explore, lock};

struct Poller {
    /// Whether the driver has prepared to sleep since the last check of the descriptor.
    armed: bool,
    /// Whether the completion queue is armed and its event was not taken yet.
    asked: bool,
}

/// The model of `Shared`.
struct Model {
    /// Locked during a pass.
    poller: Mutex<Poller>,
    mailbox: Mailbox,
    drivers: AtomicUsize,
    over: AtomicBool,
    futures: [Mutex<Future>; 2],
    /// Number of links that were serviced.
    attended: AtomicUsize,
    /// Whether every pass checks the descriptor, as if a millisecond had passed. Otherwise, only
    /// the first pass after a sleep checks it.
    checks_always: bool,
    /// Whether `run` sleeps edge-triggered, as with tokio.
    edge_triggered: bool,
}

#[derive(Default)]
struct Future {
    ready: bool,
    waker: Option<Waker>,
}

enum Armed {
    Sleep,
    Retry,
    Busy,
}

impl Model {
    fn new(checks_always: bool) -> Arc<Self> {
        Self::with_sleep(checks_always, false)
    }

    fn with_sleep(checks_always: bool, edge_triggered: bool) -> Arc<Self> {
        Arc::new(Self {
            poller: Mutex::new(Poller { armed: true, asked: false }),
            mailbox: Mailbox::new().expect("an eventfd"),
            drivers: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            futures: [Mutex::default(), Mutex::default()],
            attended: AtomicUsize::new(0),
            checks_always,
            edge_triggered,
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
        if self.checks_always || poller.armed {
            self.mailbox.awake(|| {
                poller.armed = false;
                if std::mem::take(&mut lock(&KERNEL.state).event) {
                    poller.asked = false;
                }
                self.mailbox.clear();
            });
        }
        let mut done = self.reap(&mut wakes);
        let links = self.mailbox.take().len();
        self.attended.fetch_add(links, Ordering::Relaxed);
        done += links;
        drop(poller);
        wakes.into_iter().for_each(Waker::wake);
        done
    }

    fn arm(&self) -> Armed {
        let Ok(mut poller) = self.poller.try_lock() else { return Armed::Busy };
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
        if armed && !woken { Armed::Sleep } else { Armed::Retry }
    }

    fn begin(&self) {
        self.drivers.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        if self.drivers.fetch_sub(1, Ordering::SeqCst) > 1 {
            self.mailbox.hand_over();
        }
    }

    /// Models `Fabric::poll`.
    fn poll(&self) {
        self.pass();
        if self.drivers.load(Ordering::SeqCst) > 0 {
            self.mailbox.hand_over();
        }
    }

    /// Models `Shared::run` or `Fabric::drive`, until `over` is set and `links` links were
    /// serviced.
    fn run(&self, links: usize) {
        loop {
            if self.pass() > 0 {
                continue;
            }
            let is_over = || {
                self.over.load(Ordering::Acquire) && self.attended.load(Ordering::Relaxed) >= links
            };
            if is_over() {
                break;
            }
            match self.arm() {
                Armed::Sleep if is_over() => break,
                Armed::Sleep if self.edge_triggered => sleep_edge_triggered(),
                Armed::Sleep => sleep(None),
                Armed::Retry => {}
                Armed::Busy => thread::yield_now(),
            }
        }
        self.leave();
    }

    /// Models `Fabric::progress`.
    fn progress(&self) {
        while self.pass() > 0 {}
        match self.arm() {
            Armed::Sleep => {}
            Armed::Retry => self.progress(),
            Armed::Busy => self.mailbox.wake(),
        }
    }

    /// Models `Fabric::block_on` of a future that the device completes.
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
                Armed::Retry => {}
                Armed::Busy => thread::yield_now(),
            }
        }
        self.leave();
    }

    /// Models dropping the last handle of the fabric.
    fn abandon(&self) {
        self.over.store(true, Ordering::Release);
        self.mailbox.notify();
    }
}

fn spawn(model: &Arc<Model>, act: impl FnOnce(&Model) + 'static) -> thread::JoinHandle<()> {
    let model = Arc::clone(model);
    thread::spawn(move || act(&model))
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().expect("the thread ends without a panic"));
}

/// Two threads request service while the driver falls asleep.
#[test]
fn loom_drivers_never_sleep_over_a_request() {
    for (checks_always, edge_triggered) in
        [(false, false), (true, false), (false, true), (true, true)]
    {
        explore("drivers never sleep over a request", move || {
            let model = Model::with_sleep(checks_always, edge_triggered);
            model.begin();
            // `run` ends when both links were serviced.
            model.over.store(true, Ordering::Release);
            let callers =
                [1, 2].map(|link| spawn(&model, move |model| model.mailbox.request_service(link)));
            model.run(2);
            join(callers);
        });
    }
}

/// An event loop prepares to sleep while another thread holds the poller, for example to add a
/// listener.
#[test]
fn loom_an_event_loop_is_woken_by_requests() {
    for checks_always in [false, true] {
        explore("an event loop is woken by requests", move || {
            let model = Model::new(checks_always);
            model.begin();
            let requesting = spawn(&model, |model| {
                let poller = lock(&model.poller);
                model.over.store(true, Ordering::Release);
                drop(poller);
                model.mailbox.notify();
            });
            loop {
                model.progress();
                if model.over.load(Ordering::Acquire) {
                    break;
                }
                sleep(None);
            }
            join([requesting]);
        });
    }
}

/// Every driver notices the end of the fabric.
#[test]
fn loom_all_drivers_end() {
    for checks_always in [false, true] {
        explore("all drivers end", move || {
            let model = Model::new(checks_always);
            model.begin();
            model.begin();
            let driver = spawn(&model, |model| model.run(0));
            let dropping = spawn(&model, Model::abandon);
            model.run(0);
            join([driver, dropping]);
        });
    }
}

/// Two threads wait, each for its own future. A sleeping thread is woken by the other thread, or by
/// its own completion.
#[test]
fn loom_two_threads_block_at_once() {
    for checks_always in [false, true] {
        explore("two threads block at once", move || {
            let model = Model::new(checks_always);
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

/// One thread blocks while another drives. Then the fabric ends.
#[test]
fn loom_one_thread_blocks_while_another_drives() {
    for (checks_always, edge_triggered) in [(false, false), (true, false), (false, true)] {
        explore("one blocks while another drives", move || {
            let model = Model::with_sleep(checks_always, edge_triggered);
            model.begin();
            let driver = spawn(&model, |model| model.run(0));
            let device = spawn(&model, |_| complete(0));
            model.block_on(0);
            model.abandon();
            join([driver, device]);
        });
    }
}

/// One thread blocks. Another thread makes a single pass and takes the event that should wake the
/// first thread.
#[test]
fn loom_one_thread_blocks_while_another_polls() {
    for checks_always in [false, true] {
        explore("one blocks while another polls", move || {
            let model = Model::new(checks_always);
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

/// Like the previous test, but two threads poll. One of them must not take away the signal with
/// which the other hands over.
#[test]
fn loom_one_thread_blocks_while_two_poll() {
    for checks_always in [false, true] {
        explore("one blocks while two poll", move || {
            let model = Model::new(checks_always);
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
