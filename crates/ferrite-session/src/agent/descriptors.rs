//! How many descriptors connections may take. Without a limit, one user of the host could take all
//! of them, and links, the cluster bus and the admin port would get none. Has no I/O.
//!
//! ```text
//! free when the agent starts   ├── connections: 3/4 ──────────────────┤ bus: 1/8 │ links: 1/8 │
//!                              ├── direct: 1/2 at most ──┤
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferrite_proto::mux::Class;

/// The descriptors of the agent, and how many of them connections have taken.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// The number of descriptors for connections, links and the admin port.
    free: AtomicUsize,
    taken: AtomicUsize,
    /// Those of direct connections, with the program's side of each.
    taken_by_direct: AtomicUsize,
}

/// A descriptor that a connection has taken, until this is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    all: Arc<Descriptors>,
    is_direct: bool,
}

impl Default for Descriptors {
    fn default() -> Self {
        let [taken, taken_by_direct] = [0, 0].map(AtomicUsize::new);
        Self { free: AtomicUsize::new(usize::MAX), taken, taken_by_direct }
    }
}

impl Descriptors {
    /// Sets the number of descriptors for connections, links and the admin port.
    pub(super) fn set_free(&self, free: usize) {
        self.free.store(free, Ordering::Relaxed);
    }

    /// Takes the descriptor of a connection. Returns `None` if there are too few for its class.
    pub(super) fn take(self: &Arc<Self>, class: Class) -> Option<Taken> {
        let free = self.free.load(Ordering::Relaxed);
        let reserve = if class == Class::Bus { free / 8 } else { free / 4 };
        raise(&self.taken, 1, free - reserve)?;
        Some(Taken { all: Arc::clone(self), is_direct: false })
    }

    /// Takes the second descriptor of a connection that goes directly. Returns `None` if there are
    /// too few for its class, or too many direct connections. The bus is exempt from the latter.
    pub(super) fn take_for_direct(self: &Arc<Self>, class: Class) -> Option<Taken> {
        let free = self.free.load(Ordering::Relaxed);
        let mut taken = self.take(class)?;
        let limit = if class == Class::Bus { usize::MAX } else { free / 2 };
        raise(&self.taken_by_direct, 2, limit)?;
        taken.is_direct = true;
        Some(taken)
    }
}

/// Adds to a counter, unless it would be beyond its limit.
fn raise(counter: &AtomicUsize, count: usize, limit: usize) -> Option<()> {
    let more = |now: usize| now.checked_add(count).filter(|now| *now <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| ())
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.all.taken.fetch_sub(1, Ordering::Relaxed);
        if self.is_direct {
            self.all.taken_by_direct.fetch_sub(2, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptors(free: usize) -> Arc<Descriptors> {
        let descriptors = Arc::new(Descriptors::default());
        descriptors.set_free(free);
        descriptors
    }

    #[test]
    fn bus_has_descriptors_of_its_own_and_links_too() {
        let all = descriptors(80);
        let take = |class| std::iter::from_fn(|| all.take(class)).collect::<Vec<_>>();
        let (clients, bus) = (take(Class::Interactive), take(Class::Bus));
        assert_eq!((clients.len(), bus.len()), (60, 10));
        drop(clients);
        assert_eq!(take(Class::Bulk).len(), 50);
    }

    #[test]
    fn direct_connections_take_half_of_the_descriptors_at_most() {
        let all = descriptors(80);
        let direct = |class| Some((all.take(class)?, all.take_for_direct(class)?));
        let clients: Vec<_> = std::iter::from_fn(|| direct(Class::Interactive)).collect();
        assert_eq!(clients.len(), 20);
        assert_eq!(all.taken.load(Ordering::Relaxed), 40, "nothing is taken if it is refused");
        let bus: Vec<_> = std::iter::from_fn(|| direct(Class::Bus)).collect();
        assert_eq!(bus.len(), 15);
        drop((clients, bus));
        let left = [&all.taken, &all.taken_by_direct].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(left, [0, 0]);
    }

    #[test]
    fn nothing_is_limited_by_default() {
        let all = Arc::new(Descriptors::default());
        assert!(all.take(Class::Interactive).is_some());
        assert!(all.take_for_direct(Class::Interactive).is_some());
    }
}
