//! Whether the engine had a place (`maxclients`) for a client when the client came.
//!
//! The engine decides when it accepts a connection. A session's proxy connection is made some turns
//! of the loop later, when the client has spoken: a place that became free meanwhile would go to a
//! client that the engine's own port refuses, and not to one that came before it. So the engine's
//! events tell when it was full. Everything here is on the engine's main thread.

use std::cell::Cell;
use std::time::Instant;

use crate::api::Context;
use crate::event_loop;

/// The engine's clients and their limit, and when it last had no place.
#[derive(Debug, Clone, Copy)]
struct Capacity {
    clients: u64,
    /// Zero: not known.
    max: u64,
    full: Option<Full>,
}

/// A time without a place.
#[derive(Debug, Clone, Copy)]
struct Full {
    since: Instant,
    /// `None`: there is still none.
    until: Option<Instant>,
}

thread_local! {
    static CAPACITY: Cell<Capacity> = const { Cell::new(Capacity { clients: 0, max: 0, full: None }) };
}

impl Capacity {
    fn set(&mut self, clients: u64, max: u64, now: Instant) {
        (self.clients, self.max) = (clients, max);
        let is_full = max > 0 && clients >= max;
        match &mut self.full {
            Some(full @ Full { until: None, .. }) if !is_full => full.until = Some(now),
            Some(Full { until: None, .. }) => {}
            _ if is_full => self.full = Some(Full { since: now, until: None }),
            _ => {}
        }
    }

    /// Whether there was no place when a client was accepted, or at some time since it spoke.
    fn was_full(&self, accepted: Instant, heard: Instant) -> bool {
        self.full.is_some_and(|Full { since, until }| {
            let is_before_end = |at| until.is_none_or(|until| at <= until);
            since <= accepted && is_before_end(accepted) || is_before_end(heard)
        })
    }
}

fn change(act: impl FnOnce(Capacity) -> (u64, u64)) {
    let mut capacity = CAPACITY.get();
    let (clients, max) = act(capacity);
    capacity.set(clients, max, Instant::now());
    CAPACITY.set(capacity);
}

/// Reads the limit and the number of clients.
pub(crate) fn follow(context: Context<'_>) {
    let max = context.config(c"maxclients").and_then(|text| text.parse().ok()).unwrap_or(0);
    change(|capacity| (event_loop::connected_clients().unwrap_or(capacity.clients), max));
}

/// The engine's `maxclients`; zero if it is not known.
pub(crate) fn max_clients() -> u64 {
    CAPACITY.get().max
}

pub(crate) fn on_connected() {
    change(|Capacity { clients, max, .. }| (clients + 1, max));
}

pub(crate) fn on_disconnected() {
    // The engine tells of the end of a link to a primary, but not of its beginning.
    change(|Capacity { clients, max, .. }| (clients.saturating_sub(1), max));
}

/// Returns whether the engine would have refused a client that was accepted and heard at these
/// times.
pub(crate) fn was_full(accepted: Instant, heard: Instant) -> bool {
    if CAPACITY.get().full.is_some_and(|full| full.until.is_none())
        && let Some(clients) = event_loop::connected_clients()
    {
        change(|Capacity { max, .. }| (clients, max)); // its own number is right
    }
    CAPACITY.get().was_full(accepted, heard)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn knows_who_came_while_there_was_no_place() {
        let begun = Instant::now();
        let at = |millis| begun + Duration::from_millis(millis);
        let mut capacity = Capacity { clients: 0, max: 2, full: None };
        assert!(!capacity.was_full(at(0), at(0)));
        capacity.set(2, 2, at(10));
        assert!(capacity.was_full(at(11), at(12)), "it is full");
        capacity.set(1, 2, at(20));
        assert!(capacity.was_full(at(11), at(30)), "accepted while it was");
        assert!(capacity.was_full(at(9), at(19)), "had spoken before there was a place");
        assert!(!capacity.was_full(at(9), at(21)), "was silent meanwhile");
        assert!(!capacity.was_full(at(21), at(21)), "came later");
        capacity.set(5, 0, at(40));
        assert!(!capacity.was_full(at(40), at(40)), "no limit is known");
    }
}
