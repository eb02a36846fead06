//! Loom tests of the slot table and the tickets, which a link uses under its lock. One thread reaps
//! completions, while others post requests, and poll and drop the futures.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread;

use super::tickets::{Outcome, Ticket, Tickets};
use crate::device::slots::{Key, Table};
use crate::error::{Error, ErrorKind};
use crate::sync::{explore, lock};

/// The part of a `LinkState` that matters here.
struct State {
    table: Table<(Ticket, u32)>,
    tickets: Tickets,
    /// Completions that the device has for us.
    completed: VecDeque<Key>,
}

struct Link {
    state: Mutex<State>,
    /// Signals that there is room, or a completion.
    changed: Condvar,
}

impl Link {
    fn new() -> Arc<Self> {
        // With a single slot, every request reuses it.
        let (table, tickets) = (Table::new(1, 0), Tickets::default());
        let state = Mutex::new(State { table, tickets, completed: VecDeque::new() });
        Arc::new(Self { state, changed: Condvar::new() })
    }

    /// Returns the state as soon as `ready` accepts it.
    fn when(&self, ready: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        while !ready(&state) {
            state = self.changed.wait(state).expect("no thread panicked");
        }
        state
    }

    /// Posts a request once there is room. The device completes it at once.
    fn post(&self, what: u32) -> Ticket {
        let mut state = self.when(|state| state.table.room() > 0);
        let ticket = state.tickets.issue();
        let key = state.table.claim((ticket, what)).expect("room");
        state.completed.push_back(key);
        drop(state);
        self.changed.notify_all();
        ticket
    }

    /// Takes this many completions. Each is processed twice, and the second time must find no
    /// request.
    fn reap(&self, count: usize) {
        for _ in 0..count {
            let mut wakes = Vec::new();
            let mut state = self.when(|state| !state.completed.is_empty());
            let State { table, tickets, completed } = &mut *state;
            let key = completed.pop_front().expect("a completion");
            let known = table.complete(key, |(ticket, what), last| {
                assert!(last);
                wakes.extend(tickets.finish(ticket, outcome(what)));
            });
            assert!(known && !table.complete(key, |_, _| unreachable!("already completed")));
            drop(state);
            self.changed.notify_all();
            wakes.into_iter().for_each(Waker::wake);
        }
    }

    fn poll(&self, ticket: Ticket, waker: &Waker) -> Poll<String> {
        lock(&self.state).tickets.poll(ticket, waker).map(|outcome| {
            outcome.result.expect_err("an error with the name of the request").to_string()
        })
    }

    /// Polls for the result of a request until it is there.
    fn wait(&self, ticket: Ticket, what: u32) {
        let parker = Arc::new(Parker::default());
        let waker = Waker::from(Arc::clone(&parker));
        loop {
            if let Poll::Ready(result) = self.poll(ticket, &waker) {
                assert_eq!(result, name(what));
                return;
            }
            parker.park();
        }
    }

    fn is_empty(&self) -> bool {
        let state = lock(&self.state);
        state.table.in_flight() == 0 && state.tickets.is_empty()
    }
}

fn name(what: u32) -> String {
    Error::new(ErrorKind::Misuse, what.to_string()).to_string()
}

/// Returns a result that names its request. Only an error can carry the name.
fn outcome(what: u32) -> Outcome {
    Outcome { result: Err(Error::new(ErrorKind::Misuse, what.to_string())), buf: None }
}

#[derive(Default)]
struct Parker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Parker {
    fn park(&self) {
        let mut woken = lock(&self.woken);
        while !std::mem::take(&mut *woken) {
            woken = self.changed.wait(woken).expect("no thread panicked");
        }
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        *lock(&self.woken) = true;
        self.changed.notify_one();
    }
}

/// Each future gets its own result, in whichever order the threads run. No request or ticket is
/// left over.
#[test]
fn loom_every_waiter_gets_its_own() {
    explore("every waiter gets its own", || {
        let link = Link::new();
        let waiting = [1, 2].map(|what| {
            let link = Arc::clone(&link);
            thread::spawn(move || link.wait(link.post(what), what))
        });
        link.reap(2);
        waiting.into_iter().for_each(|thread| thread.join().expect("the thread got its result"));
        assert!(link.is_empty());
    });
}

/// A dropped future, polled before or not, does not affect its operation. The next future gets its
/// own result.
#[test]
fn loom_dropped_futures_leave_nothing() {
    for asked in [false, true] {
        explore("dropped futures leave nothing", move || {
            let link = Link::new();
            let dropping = {
                let link = Arc::clone(&link);
                thread::spawn(move || {
                    let ticket = link.post(1);
                    if !asked || link.poll(ticket, Waker::noop()).is_pending() {
                        lock(&link.state).tickets.abandon(ticket);
                    }
                    link.wait(link.post(2), 2);
                })
            };
            let reaping = {
                let link = Arc::clone(&link);
                thread::spawn(move || link.reap(3))
            };
            link.wait(link.post(3), 3);
            dropping.join().expect("the thread got its result");
            reaping.join().expect("the thread reaped all completions");
            assert!(link.is_empty());
        });
    }
}

/// When a future moves to another thread, only its last waker counts.
#[test]
fn loom_the_last_waker_counts() {
    explore("the last waker counts", || {
        let link = Link::new();
        let reaping = {
            let link = Arc::clone(&link);
            thread::spawn(move || link.reap(1))
        };
        let ticket = link.post(1);
        let first = Arc::new(Parker::default());
        if link.poll(ticket, &Waker::from(first)).is_pending() {
            let link = Arc::clone(&link);
            thread::spawn(move || link.wait(ticket, 1)).join().expect("the thread got its result");
        }
        reaping.join().expect("the thread reaped all completions");
        assert!(link.is_empty());
    });
}
