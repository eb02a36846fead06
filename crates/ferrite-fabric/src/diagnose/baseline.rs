//! The port when a link was well, shared by all links of the port; and the same sight of it when
//! links fail.
//!
//! Thousands of links are set up, and can fail, in one moment. A snapshot costs a hundred system
//! calls, so that all who ask within a short time get the same one, and however slow the host or
//! its device, looking takes a fiftieth of the time at most while links are well, a tenth when they
//! fail. Nothing is locked while a file is read: two who come at once may both look, and one of the
//! results is kept.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_verbs::Context;

use super::files::Roots;
use super::snapshot::Snapshot;
use super::surroundings::Surroundings;

/// Every silent link asks for one now and then: with thousands, all the time.
static BASELINES: Shared = Shared::new(Duration::from_secs(1), 50);
/// Short enough not to be from before the fault, long enough that a thousand links that fail
/// together are looked at a few times only. Baselines do not serve here: one of them is often from
/// just before the fault.
static SIGHTS: Shared = Shared::new(FACTS_AGE, 10);
static SURROUNDINGS: Mutex<Option<Arc<Surroundings>>> = Mutex::new(None);

const FACTS_AGE: Duration = Duration::from_millis(20);
/// Ports that are remembered.
const PORTS_MAX: usize = 64;

/// The counters and the state of a port at a time when a link over it was well.
///
/// Take one when a link is up, and again whenever its peer has answered (each keepalive, say): what
/// moved since then is what moved while the peer was silent. It is cheap: links of one port share
/// it, and the port is looked at once per second at most.
#[derive(Clone)]
pub struct Baseline(pub(super) Arc<Snapshot>);

impl Baseline {
    /// Looks at port `port`, unless that was done within the last second.
    #[must_use]
    pub fn take(context: &Context, port: u8) -> Self {
        Self(BASELINES.snapshot(context, port))
    }

    /// When the port was looked at.
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

/// The port now.
pub(super) fn current(context: &Context, port: u8) -> Arc<Snapshot> {
    SIGHTS.snapshot(context, port)
}

/// The surroundings now.
pub(super) fn surroundings() -> Arc<Surroundings> {
    let cached = SURROUNDINGS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(fresh) = cached.filter(|cached| is_fresh(&SIGHTS, cached.taken, cached.cost)) {
        return fresh;
    }
    let read = Arc::new(Surroundings::read(&Roots::system()));
    *SURROUNDINGS.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&read));
    read
}

/// Whether something may still serve that was seen at `taken`, at that cost, by the rules of
/// `shared`.
fn is_fresh(shared: &Shared, taken: Instant, cost: Duration) -> bool {
    taken.elapsed() < shared.max_age.max(shared.costs * cost)
}

/// The latest snapshot of each port.
struct Shared {
    /// How old one may be that serves again,
    max_age: Duration,
    /// or how many times as old as looking took, if that is more.
    costs: u32,
    latest: Mutex<Vec<Arc<Snapshot>>>,
}

impl Shared {
    const fn new(max_age: Duration, costs: u32) -> Self {
        Self { max_age, costs, latest: Mutex::new(Vec::new()) }
    }

    fn snapshot(&self, context: &Context, port: u8) -> Arc<Snapshot> {
        let (device, guid) = (context.device().name(), context.device().guid());
        let is_it =
            |of: &Arc<Snapshot>| of.number == port && of.guid == guid && of.device == device;
        let cached = self.lock().iter().find(|of| is_it(of)).cloned();
        if let Some(fresh) = cached.filter(|cached| is_fresh(self, cached.taken, cached.cost)) {
            return fresh;
        }
        let taken = Arc::new(Snapshot::take(&Roots::system(), context, port));
        let mut latest = self.lock();
        latest.retain(|of| !is_it(of));
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
