//! A future that, after its first poll, is polled only if it was woken itself, and not when its
//! task was woken for another reason.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// Saves most polls of a future that is rarely ready, in a task that is woken often. A session uses
/// it to wait for its end while it runs commands.
pub(crate) struct PolledWhenWoken<F> {
    future: Pin<Box<F>>,
    own: Arc<OwnWaker>,
    waker: Waker,
}

/// The waker that the future gets.
struct OwnWaker {
    is_woken: AtomicBool,
    /// The waker of the task.
    task: Mutex<Waker>,
}

impl<F: Future> PolledWhenWoken<F> {
    pub(crate) fn new(future: F) -> Self {
        let task = Mutex::new(Waker::noop().clone());
        let own = Arc::new(OwnWaker { is_woken: AtomicBool::new(true), task });
        let waker = Waker::from(Arc::clone(&own));
        Self { future: Box::pin(future), own, waker }
    }
}

impl<F: Future> Future for PolledWhenWoken<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        // The task's waker is stored before `is_woken` is read, so that a wake between the two
        // reaches this task.
        self.own.set_task(cx.waker());
        if !self.own.is_woken.swap(false, Ordering::SeqCst) {
            return Poll::Pending;
        }
        let Self { future, waker, .. } = &mut *self;
        future.as_mut().poll(&mut Context::from_waker(waker))
    }
}

impl OwnWaker {
    fn set_task(&self, waker: &Waker) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if !task.will_wake(waker) {
            task.clone_from(waker);
        }
    }
}

impl Wake for OwnWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::SeqCst);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
        task.wake(); // without the lock, since waking may run anything
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct CountedWakes(AtomicUsize);

    impl Wake for CountedWakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn polls_the_future_only_after_its_own_wake() {
        let (mut polls, mut inner) = (0, None);
        let mut future = Box::pin(PolledWhenWoken::new(std::future::poll_fn(|cx| {
            polls += 1;
            inner = Some(cx.waker().clone());
            if polls < 2 { Poll::Pending } else { Poll::Ready(polls) }
        })));
        let tasks = [Arc::new(CountedWakes::default()), Arc::new(CountedWakes::default())];
        let mut poll = |task: &Arc<CountedWakes>| {
            future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(task))))
        };
        assert_eq!(poll(&tasks[0]), Poll::Pending, "the first poll");
        assert_eq!(poll(&tasks[0]), Poll::Pending, "woken for another reason");
        assert_eq!(poll(&tasks[1]), Poll::Pending, "moved to another task");
        drop(future);
        let inner = inner.expect("polled once");
        assert_eq!(polls, 1);
        inner.wake();
        let woken = tasks.map(|task| task.0.load(Ordering::SeqCst));
        assert_eq!(woken, [0, 1], "only the last task is woken");
    }

    #[test]
    fn polls_a_future_that_was_woken_while_it_ran() {
        let mut polls = 0;
        let mut future = std::pin::pin!(PolledWhenWoken::new(std::future::poll_fn(|cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls < 2 { Poll::Pending } else { Poll::Ready(polls) }
        })));
        let task = Arc::new(CountedWakes::default());
        let waker = Waker::from(Arc::clone(&task));
        assert_eq!(future.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Pending);
        assert_eq!(task.0.load(Ordering::SeqCst), 1, "the task is woken");
        assert_eq!(future.as_mut().poll(&mut Context::from_waker(&waker)), Poll::Ready(2));
    }
}
