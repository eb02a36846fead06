//! Cached snapshots of ports: the baseline from the time when links were healthy, and the current
//! state when links fail.
//!
//! Thousands of links may be opened, or may fail, at the same moment. A snapshot costs a hundred
//! system calls, so callers within a short time share one. Measuring takes at most a fiftieth of
//! the time while links are healthy, and a tenth when they fail, even if the host or its device is
//! slow. No lock is held while a file is read. Two concurrent callers may both measure, and one of
//! the results is kept.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_verbs::Context;

use super::files::Roots;
use super::snapshot::Snapshot;
use super::surroundings::Surroundings;

/// The cache for healthy links. Every idle link takes a baseline now and then, so with thousands of
/// links there are requests all the time.
static BASELINES: Shared = Shared::new(Duration::from_secs(1), 50);
/// The cache for failed links. The maximum age is short, so that a snapshot is not from before the
/// fault. But it is long enough that a thousand links that fail together need only a few
/// measurements. The snapshots in `BASELINES` cannot be used here, because the latest one is often
/// from just before the fault.
static CURRENT: Shared = Shared::new(FACTS_AGE, 10);
static SURROUNDINGS: Mutex<Option<Arc<Surroundings>>> = Mutex::new(None);

const FACTS_AGE: Duration = Duration::from_millis(20);
/// Maximum number of ports to remember.
const PORTS_MAX: usize = 64;

/// The counters and the state of a port when a link on it was healthy.
///
/// Take a baseline when a link is opened, and again whenever its peer has answered, for example
/// with each keepalive. Later changes then happened while the peer was silent. A baseline is cheap:
/// the links of a port share it, and the port is measured at most once per second.
#[derive(Clone)]
pub struct Baseline(pub(super) Arc<Snapshot>);

impl Baseline {
    /// Measures port `port`, unless it was measured within the last second.
    #[must_use]
    pub fn take(context: &Context, port: u8) -> Self {
        Self(BASELINES.snapshot(context, port))
    }

    /// Returns when the port was measured.
    #[must_use]
    pub fn taken(&self) -> Instant {
        self.0.taken
    }
}

impl fmt::Debug for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Snapshot { device, number, taken, .. } = &*self.0;
        write!(f, "Baseline({device} port {number}, {:?} ago)", taken.elapsed())
    }
}

/// Returns the current state of the port.
pub(super) fn current(context: &Context, port: u8) -> Arc<Snapshot> {
    CURRENT.snapshot(context, port)
}

/// Returns the current surroundings.
pub(super) fn surroundings() -> Arc<Surroundings> {
    let cached = SURROUNDINGS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(fresh) = cached.filter(|cached| is_fresh(&CURRENT, cached.taken, cached.cost)) {
        return fresh;
    }
    let read = Arc::new(Surroundings::read(&Roots::system()));
    *SURROUNDINGS.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&read));
    read
}

/// Returns whether a measurement may be reused by the rules of `shared`. `taken` is its time, and
/// `cost` is how long it took.
fn is_fresh(shared: &Shared, taken: Instant, cost: Duration) -> bool {
    taken.elapsed() < shared.max_age.max(shared.cost_factor * cost)
}

/// The latest snapshot of each port.
struct Shared {
    /// A snapshot may be reused up to this age, or up to `cost_factor` times the duration of its
    /// measurement, whichever is longer.
    max_age: Duration,
    /// See `max_age`.
    cost_factor: u32,
    latest: Mutex<Vec<Arc<Snapshot>>>,
}

impl Shared {
    const fn new(max_age: Duration, cost_factor: u32) -> Self {
        Self { max_age, cost_factor, latest: Mutex::new(Vec::new()) }
    }

    fn snapshot(&self, context: &Context, port: u8) -> Arc<Snapshot> {
        let (device, guid) = (context.device().name(), context.device().guid());
        let is_of_port =
            |of: &Arc<Snapshot>| of.number == port && of.guid == guid && of.device == device;
        let cached = self.lock().iter().find(|of| is_of_port(of)).cloned();
        if let Some(fresh) = cached.filter(|cached| is_fresh(self, cached.taken, cached.cost)) {
            return fresh;
        }
        let taken = Arc::new(Snapshot::take(&Roots::system(), context, port));
        let mut latest = self.lock();
        latest.retain(|of| !is_of_port(of));
        if latest.len() >= PORTS_MAX {
            latest.remove(0);
        }
        latest.push(Arc::clone(&taken));
        taken
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Snapshot>>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
