//! Releases pool memory to the system after a burst.
//!
//! While a heap of the pool has more than the two arenas that it always keeps, and buffers have
//! been returned to the pool, a timer runs every 5 s. Each run releases the memory that nobody has
//! used since the previous run. When nothing is left to release, the timer stops until buffers have
//! been returned again.
//!
//! Returning a buffer does not wake a sleeping driver. The driver notices the returned buffer in
//! its next pass.

use std::time::Duration;

use super::Poller;
use crate::fabric::Shared;
use crate::fabric::timers::Timer;

/// The interval between two runs, and the maximum number of arenas that one run releases.
/// Deregistering an arena takes a while.
const EVERY: Duration = Duration::from_secs(5);
const ARENAS: usize = 8;

/// The state of the release timer.
#[derive(Default)]
pub(super) struct Shrinking {
    /// Whether the timer is running.
    is_set: bool,
    /// The value of [`Pool::returned_bytes`](crate::mem::Pool) when nothing was left to release.
    settled_at: u64,
}

impl Poller {
    /// Starts the timer if there may be memory to release.
    pub(super) fn watch_memory(&mut self, shared: &Shared) {
        if self.shrinking.is_set
            || !shared.pool.has_grown()
            || shared.pool.returned_bytes() == self.shrinking.settled_at
        {
            return;
        }
        self.shrinking.is_set = true;
        self.timers.add(self.now + EVERY, Timer::Shrink);
    }

    /// Releases memory that nobody has used for a while, and restarts the timer while there is
    /// more.
    pub(super) fn shrink(&mut self, shared: &Shared) {
        // The counter is read before `shrink` runs. That call may miss a buffer that is returned
        // meanwhile; such a buffer must still count as new afterwards.
        let returned = shared.pool.returned_bytes();
        self.shrinking.is_set = shared.pool.shrink(ARENAS);
        if self.shrinking.is_set {
            self.timers.add(self.now + EVERY, Timer::Shrink);
        } else {
            self.shrinking.settled_at = returned;
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_verbs::fake::{DeviceSpec, World};

    use crate::fabric::timers::Timer;
    use crate::mem::Purpose;
    use crate::{Config, Fabric};

    /// Returns the deadline of the timer, after checking the pool.
    fn deadline(fabric: &Fabric) -> Option<std::time::Instant> {
        fabric.shared().with_poller(|poller, shared| {
            poller.watch_memory(shared);
            poller.timers.soonest()
        })
    }

    /// Lets the timer expire.
    fn pass_time(fabric: &Fabric) {
        fabric.shared().with_poller(|poller, shared| {
            let at = poller.timers.soonest().expect("the timer is running");
            assert_eq!(poller.timers.due(at), Some(Timer::Shrink));
            poller.shrink(shared);
        });
    }

    #[test]
    fn runs_the_timer_only_while_memory_can_be_released() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let config = Config { busy_poll_us: 0, ..Config::default() };
        let fabric = Fabric::builder(&world.verbs()).device("fake1").config(config).build();
        let fabric = fabric.expect("a fabric");
        let pool = &fabric.shared().pool;
        assert_eq!(deadline(&fabric), None, "the pool has its initial size");
        let begun = pool.stats().arenas;
        let mut taken = Vec::new();
        while pool.stats().arenas < begun + 4 {
            taken.push(pool.take_uncharged(2 << 20, Purpose::Send).expect("memory"));
        }
        assert_eq!(deadline(&fabric), None, "no buffer was returned");
        let last = taken.pop().expect("a buffer was taken");
        // Return a small buffer.
        taken.push(pool.take_uncharged(64, Purpose::Send).expect("memory"));
        drop(taken.pop());
        assert!(deadline(&fabric).is_some(), "a buffer was returned");
        pass_time(&fabric);
        assert_eq!(deadline(&fabric), None, "all arenas are in use, so the timer stops");
        drop((taken, last));
        for round in 0.. {
            if deadline(&fabric).is_none() {
                break;
            }
            assert!(round < 100, "the timer never stops");
            pass_time(&fabric);
        }
        assert!(pool.stats().arenas <= begun + 1, "{:?}", pool.stats());
    }

    #[test]
    fn the_timer_stops_with_memory_that_is_kept() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let memory = crate::mem::PoolConfig {
            receive_initial: 32 << 20,
            max_region: 2 << 20,
            ..crate::mem::PoolConfig::default()
        };
        let config = Config { busy_poll_us: 0, memory, ..Config::default() };
        let fabric = Fabric::builder(&world.verbs()).device("fake1").config(config).build();
        let fabric = fabric.expect("a fabric");
        let pool = &fabric.shared().pool;
        drop(pool.take_uncharged(64, Purpose::Send).expect("memory"));
        for round in 0.. {
            if deadline(&fabric).is_none() {
                break;
            }
            assert!(round < 100, "the timer never stops: {:?}", pool.stats());
            pass_time(&fabric);
        }
    }
}
