//! Devices that come back: a device whose device went is looked for until one of the same name is
//! there and works.
//!
//! ```text
//!   in use ── removed, or failed ──► gone: no new links, those there are end ── the last is gone ──► retired: nothing is held
//!     ▲                                                                                                 │
//!     └──────────────── found, and everything could be made anew ◄──── looked for, 1 s … 8 s ◄──────────┘
//! ```
//!
//! Nobody tells a program of new devices but udev, so the clock does; a fabric with all its devices
//! has no such timer. The device keeps its index, and with it its place in the pool: buffers that
//! are out are good for the device that came back. A look takes as long as it takes to register the
//! pool's memory, and letting go of a device as long as it takes to end that: both are commands,
//! one after the other.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmId, EventChannel, Verbs};

use super::Shared;
use super::config::Config;
use super::device_objects::DeviceObjects;
use super::poller::Poller;
use super::shared_device::{Life, SharedDevice};
use super::timers::Timer;
use super::wait_set::{Ready, WaitSet};
use crate::connect::watch;
use crate::error::{Error, ErrorKind};
use crate::mem::Pool;

/// Between looks for a device: at first, and at most.
const FIRST_LOOK: Duration = Duration::from_secs(1);
const LAST_LOOK: Duration = Duration::from_secs(8);

/// The search for the device of one device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Search {
    /// Until the next look.
    wait: Duration,
    /// The device was there, and not usable: it is on its way.
    seen: bool,
}

impl Search {
    const BEGINNING: Self = Self { wait: FIRST_LOOK, seen: false };

    /// After a look in vain. A device that has just appeared needs a moment, not the rest of a long
    /// wait.
    fn again(self, seen: bool) -> Self {
        if seen && !self.seen {
            return Self { seen, ..Self::BEGINNING };
        }
        Self { wait: (self.wait * 2).min(LAST_LOOK), seen }
    }
}

impl Poller {
    /// Lets go of a device that is gone and that nothing uses any more. From now on it is looked
    /// for.
    pub(super) fn retire(&mut self, shared: &Shared, device: &SharedDevice) {
        let Some(objects) = self.device_objects[device.index].take() else { return };
        detach(&objects, &shared.waits);
        let (pool, index) = (shared.pool.clone(), device.index);
        shared.commands.run(None, move || let_go(objects, &pool, index));
        device.close();
        self.search(device, Search::BEGINNING);
    }

    fn search(&mut self, device: &SharedDevice, search: Search) {
        self.searches.insert(device.index, search);
        self.timers.add(Instant::now() + search.wait, Timer::Look(device.index));
    }

    /// Looks for the device of a device.
    pub(super) fn look_for(&mut self, shared: &Shared, device: usize) {
        let device = Arc::clone(&shared.devices[device]);
        let Some(search) = self.searches.get(&device.index).copied() else { return };
        let look = Look {
            verbs: shared.verbs.as_ref().ok_or_else(|| shared.no_rdma()).cloned(),
            channel: self.cm.clone(),
            pool: shared.pool.clone(),
            config: shared.config.clone(),
            name: device.name.clone(),
            device: device.index,
        };
        let work = |(look, seen): &mut (Look, bool)| {
            let found = look.revive(seen);
            if found.is_err() {
                // A device that came and went while we looked may have gone unheard: librdmacm
                // looks what is gone, and lets go of it, when it loses an identifier.
                drop(look.channel.as_ref().map(EventChannel::create_id));
            }
            found
        };
        self.command(shared, None, (look, false), work, move |poller, shared, (_, seen), found| {
            poller.searches.remove(&device.index);
            if let Err(error) = found.and_then(|found| poller.take(shared, &device, found)) {
                device.set_absence(error);
                poller.search(&device, search.again(seen));
            } else {
                shared.counters.devices_back.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// Goes on with a device that came back.
    fn take(&mut self, shared: &Shared, device: &SharedDevice, found: Found) -> Result<(), Error> {
        let Found { life, objects, watching } = found;
        if let Err(error) = attach(&objects, &shared.waits, device.index) {
            detach(&objects, &shared.waits);
            let (pool, index) = (shared.pool.clone(), device.index);
            shared.commands.run(None, move || let_go(objects, &pool, index));
            return Err(error);
        }
        self.device_objects[device.index] = Some(objects);
        if let Some(id) = watching {
            self.handshakes.watch(id, device.index);
        }
        device.begin(life);
        Ok(())
    }
}

/// A look for the device of a device.
struct Look {
    verbs: Result<Verbs, Error>,
    channel: Option<EventChannel>,
    pool: Pool,
    config: Config,
    name: String,
    device: usize,
}

/// A device that is back, with everything made anew.
struct Found {
    life: Life,
    objects: DeviceObjects,
    watching: Option<CmId>,
}

impl Look {
    /// Makes everything anew on the device of the device's name; all or nothing.
    fn revive(&self, seen: &mut bool) -> Result<Found, Error> {
        let device = self.verbs.as_ref().map_err(Clone::clone)?.device(&self.name)?;
        *seen = true;
        let context = device.open()?;
        context.active_port()?;
        // First what fails while the device comes up. Without an identifier on it, its next removal
        // would not be heard.
        let watching = match &self.channel {
            Some(channel) => {
                let id = watch(channel, &context, &self.name);
                Some(id.ok_or_else(|| no_address(&self.name))?)
            }
            None => None,
        };
        let domain = context.allocate_protection_domain()?;
        let (life, mut objects) = Life::begin(self.device, &domain, &self.config)?;
        self.pool.restore_domain(self.device, &domain)?;
        if let Err(error) = objects.refill(&self.pool) {
            let_go(objects, &self.pool, self.device);
            return Err(error);
        }
        Ok(Found { life, objects, watching })
    }
}

fn no_address(device: &str) -> Error {
    Error::new(ErrorKind::Absent, format!("{device} has no address yet"))
}

/// Makes the fabric's descriptor tell of a device's events.
pub(super) fn attach(objects: &DeviceObjects, waits: &WaitSet, device: usize) -> Result<(), Error> {
    waits.add(objects.channel.as_fd(), Ready::Completions(device))?;
    waits.add(objects.context.as_fd(), Ready::Device(device))
}

/// The descriptor tells of them no more. They close with the device objects, unless something of
/// the device could not be released.
fn detach(objects: &DeviceObjects, waits: &WaitSet) {
    waits.remove(objects.channel.as_fd());
    waits.remove(objects.context.as_fd());
}

/// Lets go of everything on a device. The receives go before the registrations that they use.
fn let_go(objects: DeviceObjects, pool: &Pool, device: usize) {
    drop(objects);
    pool.retire_domain(device);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_become_rarer_and_begin_anew_when_the_device_appears() {
        let waits = |seen: &[bool]| {
            let mut search = Search::BEGINNING;
            let mut waits = vec![search.wait.as_secs()];
            for seen in seen {
                search = search.again(*seen);
                waits.push(search.wait.as_secs());
            }
            waits
        };
        assert_eq!(waits(&[false; 5]), [1, 2, 4, 8, 8, 8]);
        assert_eq!(waits(&[false, false, true, true, true]), [1, 2, 4, 1, 2, 4]);
        assert_eq!(waits(&[true, false, true]), [1, 1, 2, 1]);
    }
}
