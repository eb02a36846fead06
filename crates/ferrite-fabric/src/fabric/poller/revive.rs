//! Searches for a removed device until a device of the same name exists and works.
//!
//! ```text
//!   in use ── removed or failed ──► gone: no new links; existing links end
//!     ▲                                │    or continue over TCP
//!     │                                │ no link uses it any more
//!     │                                ▼
//!     └── found, all objects ◄────  retired: nothing is held; searched for
//!         created again                after 1 s, then at delays up to 4 s
//! ```
//!
//! The verbs library does not announce new devices, so the fabric polls for them with a timer. A
//! fabric that has all its devices has no such timer. The device keeps its index, and with it its
//! domain in the pool: buffers that are in use remain valid for the device that came back. A search
//! registers the pool's memory, and releasing a device deregisters it. Both take long, so they run
//! as commands, one after the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmId, EventChannel, Verbs};

use super::Poller;
use super::connect::watch;
use crate::config::Config;
use crate::device::device_objects::DeviceObjects;
use crate::device::shared_device::{Life, SharedDevice};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::timers::Timer;
use crate::mem::Pool;

/// The first and the longest delay before a search.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LAST_DELAY: Duration = Duration::from_secs(4);

/// The search for a missing device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Search {
    /// The delay before the next attempt.
    wait: Duration,
    /// Whether the latest attempt found the device but could not use it, because it is still coming
    /// up.
    seen: bool,
}

impl Search {
    const FIRST: Self = Self { wait: FIRST_DELAY, seen: false };

    /// Returns the search after an attempt that failed. A device that has just appeared will soon
    /// be usable, so the delays start over.
    fn next(self, seen: bool) -> Self {
        if seen && !self.seen {
            return Self { seen, ..Self::FIRST };
        }
        Self { wait: (self.wait * 2).min(LAST_DELAY), seen }
    }
}

impl Poller {
    /// Releases a device that is gone and that nothing uses any more, and starts the search for it.
    pub(super) fn retire(&mut self, shared: &Shared, device: &SharedDevice) {
        let Some(objects) = self.device_objects[device.index].take() else { return };
        objects.detach(&shared.waits);
        let (pool, index) = (shared.pool.clone(), device.index);
        shared.commands.run(None, move || release(objects, &pool, index));
        device.close();
        self.search(device, Search::FIRST);
    }

    fn search(&mut self, device: &SharedDevice, search: Search) {
        self.searches.insert(device.index, search);
        self.timers.add(Instant::now() + search.wait, Timer::FindDevice(device.index));
    }

    /// Searches for a missing device.
    pub(super) fn find_device(&mut self, shared: &Shared, device: usize) {
        let device = Arc::clone(&shared.devices[device]);
        let Some(search) = self.searches.get(&device.index).copied() else { return };
        let attempt = Attempt {
            verbs: shared.verbs.as_ref().ok_or_else(|| shared.no_rdma()).cloned(),
            channel: self.cm.clone(),
            pool: shared.pool.clone(),
            config: shared.config.clone(),
            name: device.name.clone(),
            device: device.index,
            had_address: self.handshakes.was_watched(device.index),
        };
        let work = |(attempt, seen): &mut (Attempt, bool)| {
            let found = attempt.revive(seen);
            if found.is_err() {
                // The device may have come and gone during the attempt without an event.
                if let Some(channel) = &attempt.channel {
                    channel.close_removed_devices();
                }
            }
            found
        };
        self.command(
            shared,
            None,
            (attempt, false),
            work,
            move |poller, shared, (_, seen), found| {
                poller.searches.remove(&device.index);
                if let Err(error) =
                    found.and_then(|found| poller.reattach_device(shared, &device, found))
                {
                    device.set_absence(error);
                    poller.search(&device, search.next(seen));
                } else {
                    poller.retry_upgrades(shared);
                    shared.counters.devices_back.fetch_add(1, Ordering::Relaxed);
                    tracing::info!("RDMA device {} is back and in use again", device.name);
                }
            },
        );
    }

    /// Starts to use a device again after it has come back.
    fn reattach_device(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
        found: Found,
    ) -> Result<(), Error> {
        let Found { life, objects, watching } = found;
        if let Err(error) = objects.attach(&shared.waits, device.index) {
            objects.detach(&shared.waits);
            let (pool, index) = (shared.pool.clone(), device.index);
            shared.commands.run(None, move || release(objects, &pool, index));
            return Err(error);
        }
        self.device_objects[device.index] = Some(objects);
        if let Some(id) = watching {
            shared.commands.discard(None, self.handshakes.watch(id, device.index));
        }
        device.begin(life);
        self.prepare_queue_pairs(shared, device);
        Ok(())
    }
}

/// One attempt to open a missing device.
struct Attempt {
    verbs: Result<Verbs, Error>,
    channel: Option<EventChannel>,
    pool: Pool,
    config: Config,
    name: String,
    device: usize,
    /// Whether the connection manager could bind to an address of the device earlier.
    had_address: bool,
}

/// A device that is back, with all its objects.
struct Found {
    life: Life,
    objects: DeviceObjects,
    watching: Option<CmId>,
}

impl Attempt {
    /// Opens the device of this name and creates all its objects. If a step fails, releases all of
    /// them.
    fn revive(&self, seen: &mut bool) -> Result<Found, Error> {
        let device = self.verbs.as_ref().map_err(Clone::clone)?.device(&self.name)?;
        *seen = true;
        let context = device.open()?;
        context.active_port()?;
        // Start with the step that fails while the device is still coming up. Without an identifier
        // on the device, some removals would go unnoticed. A device that never had an address to
        // bind to (an InfiniBand port without IPoIB) is used without an identifier, as at the
        // start.
        let channel = self.channel.as_ref();
        let watching = channel.and_then(|channel| watch(channel, &context, &self.name));
        if watching.is_none() && self.had_address {
            return Err(no_address(&self.name));
        }
        let domain = context.allocate_protection_domain()?;
        let (life, mut objects) = DeviceObjects::open(self.device, &domain, &self.config)?;
        self.pool.restore_domain(self.device, &domain)?;
        if let Err(error) = objects.refill(&self.pool) {
            release(objects, &self.pool, self.device);
            return Err(error);
        }
        Ok(Found { life, objects, watching })
    }
}

fn no_address(device: &str) -> Error {
    Error::new(ErrorKind::Absent, format!("{device} has no address yet"))
}

/// Releases everything on a device. Drops the receives first, because they use the registrations.
fn release(objects: DeviceObjects, pool: &Pool, device: usize) {
    drop(objects);
    pool.retire_domain(device);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn search_delays_double_and_start_over_when_the_device_appears() {
        let waits = |seen: &[bool]| {
            let mut search = Search::FIRST;
            let mut waits = vec![search.wait.as_secs()];
            for seen in seen {
                search = search.next(*seen);
                waits.push(search.wait.as_secs());
            }
            waits
        };
        assert_eq!(waits(&[false; 5]), [1, 2, 4, 4, 4, 4]);
        assert_eq!(waits(&[false, false, true, true, true]), [1, 2, 4, 1, 2, 4]);
        assert_eq!(waits(&[true, false, true]), [1, 1, 2, 1]);
    }
}
