//! Waits for an event with a deadline. Tests use this instead of sleeping for a fixed time. A test
//! names the event, and fails with this name if the event does not occur.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Longer than any step of a test takes, even on a busy machine and on the slowest kernel of the
/// lab.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// The first and the longest pause between two checks of a condition.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// Checks a condition repeatedly. Returns whether it became true within `limit`.
#[must_use]
pub fn comes_true(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    let mut pause = PAUSES.0;
    loop {
        // Reads the clock first, so that a thread that did not run for a long time still checks
        // once more.
        let is_last = Instant::now() >= deadline;
        if condition() {
            return true;
        }
        if is_last {
            return false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Waits until `condition` holds. `what` describes the condition.
///
/// # Panics
/// If the condition does not hold within `limit`.
#[track_caller]
pub fn until(limit: Duration, what: &str, condition: impl FnMut() -> bool) {
    until_or(limit, what, condition, String::new);
}

/// Waits until `condition` holds, like [`until`]. The message of a failure ends with the result of
/// `details`, such as a log.
///
/// # Panics
/// If the condition does not hold within `limit`.
#[track_caller]
pub fn until_or(
    limit: Duration,
    what: &str,
    condition: impl FnMut() -> bool,
    details: impl FnOnce() -> String,
) {
    let came_true = comes_true(limit, condition);
    assert!(came_true, "timeout after {limit:?} waiting for: {what}; {}", details());
}

/// Waits in an async test until `condition` holds, like [`until`].
///
/// # Panics
/// If the condition does not hold within [`TIMEOUT`]. The time is real, even if tokio's clock is
/// paused.
#[cfg(feature = "tokio")]
pub async fn until_async(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < TIMEOUT, "timeout after {TIMEOUT:?} waiting for: {what}");
        tokio::time::sleep(PAUSES.0).await;
    }
}

/// Runs a future on this thread. Other threads must make the progress that the future waits for.
///
/// # Panics
/// If the future is not ready within `limit`.
#[track_caller]
pub fn within<F: Future>(limit: Duration, what: &str, future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let deadline = Instant::now() + limit;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "{what}: not ready after {limit:?}");
        std::thread::park_timeout(left);
    }
}

/// Waits until a thread ends, and returns its result.
///
/// # Panics
/// If the thread does not end within `limit`, or panicked.
#[track_caller]
pub fn join<T>(thread: JoinHandle<T>, limit: Duration, what: &str) -> T {
    until(limit, what, || thread.is_finished());
    thread.join().unwrap_or_else(|_| panic!("{what}: the thread panicked"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_until_the_condition_holds() {
        let mut looks = 0;
        until(TIMEOUT, "three looks", || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
    }

    #[test]
    fn looks_once_more_after_the_deadline() {
        assert!(comes_true(Duration::ZERO, || true));
        assert!(!comes_true(Duration::ZERO, || false));
    }

    #[test]
    #[should_panic(expected = "waiting for: a miracle; the log")]
    fn says_what_did_not_happen() {
        until_or(Duration::ZERO, "a miracle", || false, || "the log".into());
    }

    #[test]
    fn runs_a_future_that_another_thread_completes() {
        let flag = std::sync::Mutex::new((false, None::<Waker>));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut state = flag.lock().expect("no panic");
                state.0 = true;
                if let Some(waker) = state.1.take() {
                    waker.wake();
                }
            });
            let future = std::future::poll_fn(|context| {
                let mut state = flag.lock().expect("no panic");
                state.1 = Some(context.waker().clone());
                if state.0 { Poll::Ready(5) } else { Poll::Pending }
            });
            assert_eq!(within(TIMEOUT, "the other thread", future), 5);
        });
    }

    #[test]
    #[should_panic(expected = "a worker: the thread panicked")]
    fn reports_a_thread_that_panicked() {
        join(std::thread::spawn(|| panic!("as expected")), TIMEOUT, "a worker");
    }
}
