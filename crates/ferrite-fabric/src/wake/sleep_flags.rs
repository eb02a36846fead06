//! The rule by which a thread that sleeps on a descriptor does not miss work. The drivers of a
//! fabric (`mailbox.rs`), threads that wait for a future (`wakeup.rs`), and the module's tasks in
//! the engine's event loop follow this rule.

use std::sync::atomic::Ordering;

use crate::sync::AtomicBool;

/// Whether there is work, and whether the thread that does the work sleeps.
///
/// Before sleeping, the thread sets `asleep` and then checks `woken`. Another thread that has work
/// for it sets `woken` and then checks `asleep`. So at least one of the two threads sees the
/// other's flag. The flags are always swapped and never just stored to. A swap sees the effects of
/// the previous swap, and loom models swaps best.
#[derive(Debug)]
pub struct SleepFlags {
    woken: AtomicBool,
    asleep: AtomicBool,
}

impl SleepFlags {
    /// Returns the flags of a thread that sleeps and has no work.
    #[must_use]
    pub fn asleep() -> Self {
        Self { woken: AtomicBool::new(false), asleep: AtomicBool::new(true) }
    }

    /// Returns the flags of a thread that is awake and has work.
    #[must_use]
    pub fn woken() -> Self {
        Self { woken: AtomicBool::new(true), asleep: AtomicBool::new(false) }
    }

    /// Records that there is work. Returns whether the caller must make the thread's descriptor
    /// readable, because the thread sleeps.
    #[must_use]
    pub fn wake(&self) -> bool {
        self.woken.swap(true, Ordering::SeqCst);
        self.asleep.swap(false, Ordering::SeqCst)
    }

    /// Returns whether there is work.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.woken.load(Ordering::SeqCst)
    }

    /// Returns whether there was work, and resets that flag. The thread must look for the work
    /// after this.
    pub fn take_woken(&self) -> bool {
        self.woken.load(Ordering::Relaxed) && self.woken.swap(false, Ordering::SeqCst)
    }

    /// Records that the thread is about to sleep. Returns `false` if work has arrived in the
    /// meantime; then the thread must not sleep.
    #[must_use]
    pub fn fall_asleep(&self) -> bool {
        self.asleep.swap(true, Ordering::SeqCst);
        !self.is_woken()
    }

    /// Records that the thread is awake, so that nobody needs to make its descriptor readable.
    pub fn get_up(&self) {
        self.asleep.swap(false, Ordering::SeqCst);
    }
}

#[cfg(all(test, loom))]
mod tests {
    use std::sync::Arc;

    use loom::sync::Mutex;
    use loom::thread;

    use super::*;
    use crate::sync::{explore, lock};
    use crate::wake::event_fd::EventFd;
    use crate::wake::event_fd::model::sleep;

    /// A reduced copy of the module's task queue. A change of that queue must be repeated here.
    struct TaskQueue {
        ready: Mutex<usize>,
        flags: SleepFlags,
        event_fd: EventFd,
    }

    impl TaskQueue {
        fn push(&self) {
            *lock(&self.ready) += 1;
            self.notify();
        }

        fn notify(&self) {
            if self.flags.wake() {
                self.event_fd.signal();
            }
        }

        /// Makes one iteration of the event loop. Sleeps until the descriptor is readable, and runs
        /// at most one task, as if that task had used up the event-loop slice. Returns the number
        /// of tasks that ran.
        fn iterate(&self) -> usize {
            sleep(Some(&self.event_fd));
            self.event_fd.clear();
            self.flags.get_up();
            self.flags.take_woken();
            let ran = {
                let mut ready = lock(&self.ready);
                let ran = (*ready).min(1);
                *ready -= ran;
                ran
            };
            let is_idle = *lock(&self.ready) == 0;
            if !self.flags.fall_asleep() || !is_idle {
                self.notify();
            }
            ran
        }
    }

    /// A task that never runs causes a deadlock.
    #[test]
    fn loom_task_queue_runs_every_task() {
        explore("a task queue and two threads that wake", || {
            let queue = Arc::new(TaskQueue {
                ready: Mutex::new(0),
                flags: SleepFlags::asleep(),
                event_fd: EventFd::new().expect("an eventfd"),
            });
            let threads = [0, 1].map(|_| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || queue.push())
            });
            let mut ran = 0;
            while ran < 2 {
                ran += queue.iterate();
            }
            threads.into_iter().for_each(|thread| thread.join().expect("the thread did not panic"));
        });
    }
}
