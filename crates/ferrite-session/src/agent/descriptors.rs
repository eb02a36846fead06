//! How many descriptors connections may take. Without a limit, one user of the host could take all
//! of them, and links, the cluster bus and the admin port would get none. Has no I/O.
//!
//! ```text
//! free when the agent starts   ├── connections: 3/4 ──────────────────┤ bus: 1/8 │ links: 1/8 │
//!                              ├── direct: 1/2 at most ──┤            unfinished handshakes: 1/16
//! ```
//!
//! Only the port tells that a connection is one of the cluster bus, and everybody may connect to
//! it. So one peer gets half of the places of the bus at most, and one user of this host a quarter:
//! a user who has taken that quarter leaves places at the peer, too, for the others of this host.
//! Beyond its share, the connections of a source to a bus count as any other connection.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many places of the bus the connections of one source to one host may have: three quarters of
/// the streams that a link reserves for the bus (`bus_streams`), so that a source cannot take all
/// of them. It is enough for 13 nodes on each host.
const PLACES_FOR_EACH_HOST: usize = 192;

/// Who has opened a connection to a cluster bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum BusSource {
    /// A user of this host, if the kernel tells which one.
    User(Option<u32>),
    /// The peer with this alias.
    Peer(Ipv4Addr),
}

impl BusSource {
    /// Returns how many of the places of the bus this source may have.
    fn share_of(self, places: usize) -> usize {
        match self {
            Self::User(_) => places.div_ceil(4),
            Self::Peer(_) => places.div_ceil(2),
        }
    }
}

/// The connections of a source to the buses of a host.
pub(super) type BusRoute = (BusSource, IpAddr);

/// The descriptors of the agent, and how many of them connections have taken.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// The number of descriptors for connections, links and the admin port.
    free: AtomicUsize,
    /// Those of connections that have no place of the bus.
    taken: AtomicUsize,
    /// Those of direct connections among them, with the program's side of each.
    taken_by_direct: AtomicUsize,
    /// The places of the bus that are taken.
    bus: Mutex<HashMap<BusRoute, usize>>,
}

/// A descriptor that a connection has taken, until this is dropped.
#[derive(Debug)]
pub(super) struct Taken {
    all: Arc<Descriptors>,
    /// Set if it is a place of the bus.
    bus: Option<BusRoute>,
    is_direct: bool,
}

impl Default for Descriptors {
    fn default() -> Self {
        let [taken, taken_by_direct] = [0, 0].map(AtomicUsize::new);
        Self { free: AtomicUsize::new(usize::MAX), taken, taken_by_direct, bus: Mutex::default() }
    }
}

impl Descriptors {
    /// Sets the number of descriptors for connections, links and the admin port.
    pub(super) fn set_free(&self, free: usize) {
        self.free.store(free, Ordering::Relaxed);
    }

    /// Takes the descriptor of a connection. Returns `None` if there are too few.
    pub(super) fn take(self: &Arc<Self>) -> Option<Taken> {
        let free = self.free();
        raise(&self.taken, 1, free - free / 4)?;
        Some(Taken { all: Arc::clone(self), bus: None, is_direct: false })
    }

    /// Takes the descriptor of a connection to a cluster bus: a place of the bus, or else one of
    /// those for all connections. Returns `None` if there are too few.
    pub(super) fn take_for_bus(self: &Arc<Self>, route: BusRoute) -> Option<Taken> {
        self.take_place_of_bus(route).or_else(|| self.take())
    }

    /// Takes the second descriptor of a connection that goes directly. Returns `None` if there are
    /// too few, or too many direct connections. The places of the bus are exempt from the latter.
    pub(super) fn take_for_direct(self: &Arc<Self>, first: &Taken) -> Option<Taken> {
        if let Some(taken) = first.bus.and_then(|route| self.take_place_of_bus(route)) {
            return Some(taken);
        }
        let mut taken = self.take()?;
        raise(&self.taken_by_direct, 2, self.free() / 2)?;
        taken.is_direct = true;
        Some(taken)
    }

    fn take_place_of_bus(self: &Arc<Self>, route: BusRoute) -> Option<Taken> {
        let places = self.free() / 8;
        let mut bus = self.bus();
        let of_source = |(taken_by, _): &BusRoute| *taken_by == route.0;
        let by_source: usize =
            bus.iter().filter(|(taken_by, _)| of_source(taken_by)).map(|(_, count)| count).sum();
        let has_room = bus.values().sum::<usize>() < places
            && by_source < route.0.share_of(places)
            && bus.get(&route).is_none_or(|count| *count < PLACES_FOR_EACH_HOST);
        if !has_room {
            return None;
        }
        *bus.entry(route).or_default() += 1;
        Some(Taken { all: Arc::clone(self), bus: Some(route), is_direct: false })
    }

    fn free(&self) -> usize {
        self.free.load(Ordering::Relaxed)
    }

    fn bus(&self) -> MutexGuard<'_, HashMap<BusRoute, usize>> {
        self.bus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// Returns whether this is a place of the bus.
    pub(super) fn is_of_bus(&self) -> bool {
        self.bus.is_some()
    }
}

/// Adds to a counter, unless it would be beyond its limit.
fn raise(counter: &AtomicUsize, count: usize, limit: usize) -> Option<()> {
    let more = |now: usize| now.checked_add(count).filter(|now| *now <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| ())
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(route) = self.bus {
            let mut bus = self.all.bus();
            if let Some(count) = bus.get_mut(&route) {
                *count -= 1;
                if *count == 0 {
                    bus.remove(&route);
                }
            }
            return;
        }
        self.all.taken.fetch_sub(1, Ordering::Relaxed);
        if self.is_direct {
            self.all.taken_by_direct.fetch_sub(2, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENGINES: BusSource = BusSource::User(Some(999));
    const OTHERS: BusSource = BusSource::User(Some(65_534));
    const UNKNOWN: BusSource = BusSource::User(None);

    fn descriptors(free: usize) -> Arc<Descriptors> {
        let descriptors = Arc::new(Descriptors::default());
        descriptors.set_free(free);
        descriptors
    }

    /// The buses of a host.
    fn buses(source: BusSource, host: u8) -> BusRoute {
        (source, [10, 0, 0, host].into())
    }

    fn all(take: impl FnMut() -> Option<Taken>) -> Vec<Taken> {
        std::iter::from_fn(take).collect()
    }

    #[test]
    fn bus_has_descriptors_of_its_own_and_links_too() {
        let free = descriptors(80);
        let clients = all(|| free.take());
        let bus = all(|| free.take_for_bus(buses(ENGINES, 2)));
        assert_eq!((clients.len(), bus.len()), (60, 3));
        let of_peer = all(|| free.take_for_bus(buses(BusSource::Peer([10, 0, 0, 2].into()), 1)));
        assert_eq!(of_peer.len(), 5);
        drop(clients);
        assert_eq!(all(|| free.take()).len(), 60);
    }

    #[test]
    fn flood_of_a_source_at_a_bus_leaves_places_for_other_sources() {
        let free = descriptors(80);
        let flood = all(|| free.take_for_bus(buses(OTHERS, 2)));
        assert_eq!(flood.iter().filter(|taken| taken.is_of_bus()).count(), 3);
        assert_eq!(flood.len(), 63, "the others are connections like any");
        // Floods at other hosts get nothing, either.
        assert!(free.take_for_bus(buses(OTHERS, 3)).is_none());
        let engines = all(|| free.take_for_bus(buses(ENGINES, 2)));
        assert_eq!(engines.len(), 3);
        let others = [UNKNOWN, BusSource::User(Some(0))];
        let others = others.map(|user| all(|| free.take_for_bus(buses(user, 2))));
        assert_eq!(others.each_ref().map(Vec::len), [3, 1], "those for links are left");
        drop((flood, engines, others));
        assert_eq!(all(|| free.take_for_bus(buses(UNKNOWN, 3))).len(), 63);
        assert!(free.bus().is_empty(), "no state is kept");
    }

    #[test]
    fn source_cannot_take_all_streams_of_the_bus_to_a_host() {
        let free = descriptors(100_000);
        let mut places = all(|| free.take_place_of_bus(buses(OTHERS, 2)));
        assert_eq!(places.len(), PLACES_FOR_EACH_HOST);
        assert!(PLACES_FOR_EACH_HOST < ferrite_proto::mux::Config::default().bus_streams);
        for route in [buses(OTHERS, 3), buses(ENGINES, 2)] {
            places.push(free.take_place_of_bus(route).expect("a place"));
        }
    }

    #[test]
    fn direct_connections_take_half_of_the_descriptors_at_most() {
        let free = descriptors(80);
        let direct = |first: Taken| Some((free.take_for_direct(&first)?, first));
        let clients: Vec<_> = std::iter::from_fn(|| direct(free.take()?)).collect();
        assert_eq!(clients.len(), 20);
        assert_eq!(free.taken.load(Ordering::Relaxed), 40, "nothing is taken if it is refused");
        let to_bus = || direct(free.take_place_of_bus(buses(ENGINES, 2))?);
        let bus: Vec<_> = std::iter::from_fn(to_bus).collect();
        assert_eq!(bus.len(), 1);
        drop((clients, bus));
        let left = [&free.taken, &free.taken_by_direct].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(left, [0, 0]);
    }

    #[test]
    fn nothing_is_limited_by_default() {
        let free = Arc::new(Descriptors::default());
        let first = free.take().expect("a descriptor");
        assert!(free.take_for_direct(&first).is_some());
        assert!(free.take_for_bus(buses(UNKNOWN, 2)).is_some_and(|taken| taken.is_of_bus()));
    }
}
