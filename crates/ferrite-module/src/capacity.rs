//! Tracks whether the engine had reached `maxclients` when a client connected.
//!
//! The engine's own port rejects a client at the moment it accepts the connection. A session opens
//! its proxy connection some iterations of the event loop later, after the client's first bytes. If
//! another client left in between, the session would be accepted although the engine's own port
//! would have rejected its client. So this file tracks, by the engine's events, when the engine was
//! full. Everything here runs on the engine's main thread.

use std::cell::Cell;
use std::time::Instant;

use crate::api::Context;
use crate::call_path;

/// The number of the engine's clients, their limit, and when the engine was last full.
#[derive(Debug, Clone, Copy)]
struct Capacity {
    clients: u64,
    /// Zero if unknown.
    max: u64,
    full: Option<FullPeriod>,
}

/// A period in which the engine was full.
#[derive(Debug, Clone, Copy)]
struct FullPeriod {
    since: Instant,
    /// `None` if the engine is still full.
    until: Option<Instant>,
}

thread_local! {
    static CAPACITY: Cell<Capacity> =
        const { Cell::new(Capacity { clients: 0, max: 0, full: None }) };
}

impl Capacity {
    fn set(&mut self, clients: u64, max: u64, now: Instant) {
        (self.clients, self.max) = (clients, max);
        let is_full = max > 0 && clients >= max;
        match &mut self.full {
            Some(full @ FullPeriod { until: None, .. }) if !is_full => full.until = Some(now),
            Some(FullPeriod { until: None, .. }) => {}
            _ if is_full => self.full = Some(FullPeriod { since: now, until: None }),
            _ => {}
        }
    }

    /// Returns whether the engine was full when a client was accepted, or at any time since
    /// `first_bytes` (see [`was_full`]).
    fn was_full(&self, accepted: Instant, first_bytes: Instant) -> bool {
        self.full.is_some_and(|FullPeriod { since, until }| {
            let is_before_end = |at| until.is_none_or(|until| at <= until);
            since <= accepted && is_before_end(accepted) || is_before_end(first_bytes)
        })
    }
}

fn change(act: impl FnOnce(Capacity) -> (u64, u64)) {
    let mut capacity = CAPACITY.get();
    let (clients, max) = act(capacity);
    capacity.set(clients, max, Instant::now());
    CAPACITY.set(capacity);
}

/// Reads the engine's limit and its number of clients.
pub(crate) fn follow(context: Context<'_>) {
    let max = context.config(c"maxclients").and_then(|text| text.parse().ok()).unwrap_or(0);
    change(|capacity| (call_path::connected_clients().unwrap_or(capacity.clients), max));
}

/// Returns the engine's `maxclients`; zero if unknown.
pub(crate) fn max_clients() -> u64 {
    CAPACITY.get().max
}

pub(crate) fn on_connected() {
    change(|Capacity { clients, max, .. }| (clients + 1, max));
}

pub(crate) fn on_disconnected() {
    // Saturates, because the engine reports the disconnect of a link to a primary, but not the
    // connect.
    change(|Capacity { clients, max, .. }| (clients.saturating_sub(1), max));
}

/// Returns whether the engine's own port would have rejected a client that the module's port
/// accepted at `accepted`. `first_bytes` is when the client's first bytes arrived, or when the
/// module stopped waiting for them.
pub(crate) fn was_full(accepted: Instant, first_bytes: Instant) -> bool {
    if CAPACITY.get().full.is_some_and(|full| full.until.is_none())
        && let Some(clients) = call_path::connected_clients()
    {
        change(|Capacity { max, .. }| (clients, max)); // the engine's own count is exact
    }
    CAPACITY.get().was_full(accepted, first_bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn rejects_clients_that_came_while_the_engine_was_full() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut capacity = Capacity { clients: 0, max: 2, full: None };
        assert!(!capacity.was_full(at(0), at(0)));
        capacity.set(2, 2, at(10));
        assert!(capacity.was_full(at(11), at(12)), "still full");
        capacity.set(1, 2, at(20));
        assert!(capacity.was_full(at(11), at(30)), "accepted while full");
        assert!(capacity.was_full(at(9), at(19)), "sent its first bytes while full");
        assert!(!capacity.was_full(at(9), at(21)), "was silent while full");
        assert!(!capacity.was_full(at(21), at(21)), "came later");
        capacity.set(5, 0, at(40));
        assert!(!capacity.was_full(at(40), at(40)), "the limit is unknown");
    }
}
