//! When memory that a burst took goes back to the system.
//!
//! ```text
//!   more than at the beginning, and buffers have come back ──► every 5 s: give back what nobody has used since the last time
//!                                 nothing left to give back ──► until buffers have come back again
//! ```
//!
//! A fabric that has nothing to do does not wake for it: what others return while it sleeps is
//! looked for when it is awake the next time.

use std::time::Duration;

use super::Shared;
use super::poller::Poller;
use super::timers::Timer;

/// Between two looks, and how much goes at a time: ending a registration takes a while.
const EVERY: Duration = Duration::from_secs(5);
const ARENAS: usize = 8;

/// What is known of memory that could go back.
#[derive(Default)]
pub(super) struct Shrinking {
    /// The clock was told to look.
    is_set: bool,
    /// Bytes that had come back, by [`Pool::returned_bytes`](crate::mem::Pool), when nothing was
    /// left to give back.
    settled_at: u64,
}

impl Poller {
    /// Has the clock look for memory that can go back, if there may be some.
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

    /// Gives back what nobody has used for a while, and looks again while there is something.
    pub(super) fn shrink(&mut self, shared: &Shared) {
        // before the look: what comes meanwhile may not be seen
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

    /// What the clock is set for, after a look at everything.
    fn due(fabric: &Fabric) -> Option<std::time::Instant> {
        fabric.shared().with_poller(|poller, shared| {
            poller.watch_memory(shared);
            poller.timers.soonest()
        })
    }

    /// The time of the next look has come.
    fn pass_time(fabric: &Fabric) {
        fabric.shared().with_poller(|poller, shared| {
            let at = poller.timers.soonest().expect("the clock is set");
            assert_eq!(poller.timers.due(at), Some(Timer::Shrink));
            poller.shrink(shared);
        });
    }

    #[test]
    fn wakes_for_memory_only_while_some_can_go_back() {
        let world = World::new();
        world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
        let config = Config { busy_poll_us: 0, ..Config::default() };
        let fabric = Fabric::builder(&world.verbs()).device("fake1").config(config).build();
        let fabric = fabric.expect("a fabric");
        let pool = &fabric.shared().pool;
        assert_eq!(due(&fabric), None, "it has what it began with");
        let begun = pool.stats().arenas;
        let mut taken = Vec::new();
        while pool.stats().arenas < begun + 4 {
            taken.push(pool.take_uncharged(2 << 20, Purpose::Send).expect("memory"));
        }
        assert_eq!(due(&fabric), None, "nothing has come back");
        let last = taken.pop().expect("one");
        // and one that does come back
        taken.push(pool.take_uncharged(64, Purpose::Send).expect("memory"));
        drop(taken.pop());
        assert!(due(&fabric).is_some(), "something has come back");
        pass_time(&fabric);
        assert_eq!(due(&fabric), None, "all is in use: the fabric is not woken for that again");
        drop((taken, last));
        for round in 0.. {
            if due(&fabric).is_none() {
                break;
            }
            assert!(round < 100, "it never ends");
            pass_time(&fabric);
        }
        assert!(pool.stats().arenas <= begun + 1, "{:?}", pool.stats());
    }
}
