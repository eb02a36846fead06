//! The slice of the event loop that runs now: how long it may last, and whether it must end. Only
//! the engine's main thread uses this.

use std::cell::Cell;
use std::time::Duration;

use quanta::Instant;

thread_local! {
    /// How long a slice may last before the engine serves its other clients (`slice-us`). The limit
    /// is a time, and not a number of commands, because the cost of a session's work varies widely:
    /// from one command to a MiB of values. On Soft-RoCE, the cost includes the work that hardware
    /// would do.
    static LENGTH: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The number of seconds between the start of the event loop and the start of this slice.
    static SECONDS: Cell<u64> = const { Cell::new(0) };
    /// When this slice is over.
    static END: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Whether this slice must end early: a command was proxied in it, or a call wrote data that
    /// blocked clients may wait for.
    static MUST_YIELD: Cell<bool> = const { Cell::new(false) };
}

/// Sets how long a slice may last.
pub(crate) fn set_length(length: Duration) {
    LENGTH.set(length);
}

/// Begins a slice, this many seconds after the start of the event loop.
pub(crate) fn begin(now: Instant, seconds: u64) {
    END.set(Some(now + LENGTH.get()));
    SECONDS.set(seconds);
    MUST_YIELD.set(false);
}

/// Ends this slice early, so that the engine serves its other clients first.
#[inline]
pub(crate) fn end_early() {
    MUST_YIELD.set(true);
}

/// Returns whether this slice was ended early.
pub(crate) fn must_yield() -> bool {
    MUST_YIELD.get()
}

/// Returns whether this slice may continue.
#[inline]
pub(crate) fn has_time() -> bool {
    !MUST_YIELD.get() && END.get().is_some_and(|end| Instant::now() < end)
}

/// Returns the number of seconds between the start of the event loop and the start of this slice.
#[inline]
pub(crate) fn seconds() -> u64 {
    SECONDS.get()
}
