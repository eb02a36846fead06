//! Locks and flags for the code that loom checks. With `--cfg loom`, they are loom's types (`cargo
//! xtask loom`).

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::{Mutex, atomic::AtomicBool};

#[cfg(all(test, loom))]
pub(crate) use loom::sync::{Mutex, atomic::AtomicBool};

#[cfg(not(all(test, loom)))]
pub(crate) use crate::mem::lock;

#[cfg(all(test, loom))]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs `act` in every interleaving within the bounds (`LOOM_MAX_PREEMPTIONS`,
/// `LOOM_MAX_DURATION`), and prints the number of interleavings.
#[cfg(all(test, loom))]
#[expect(clippy::print_stdout, reason = "`cargo xtask loom` reads it")]
pub(crate) fn explore(what: &str, act: impl Fn() + Send + Sync + 'static) {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    let bounds = loom::model::Builder::new();
    let (limit, begun) = (bounds.max_duration, Instant::now());
    let executions = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&executions);
    bounds.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        act();
    });
    let end = if limit.is_some_and(|limit| begun.elapsed() >= limit) { ", not all" } else { "" };
    println!("\nloom: {what}: {} executions{end}", executions.load(Ordering::Relaxed));
}
