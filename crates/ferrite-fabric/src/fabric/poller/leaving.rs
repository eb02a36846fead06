//! Destroys queue pairs, starting from the ERROR state.
//!
//! ```text
//!   to ERROR ──► LAST_WQE_REACHED, or a timeout ──► poll the completion queue ──► destroy
//! ```
//!
//! For a queue pair with a shared receive queue, the InfiniBand specification recommends this order
//! (10.3.1, quoted at `__ib_drain_srq` in the kernel's `drivers/infiniband/core/verbs.c`).
//! When a queue pair is destroyed, providers such as mlx5 discard its completions that were not
//! polled, and free the entries of the shared receive queue that belong to these completions. The
//! stock of receives (`device/slots/receives.rs`) would then count these receives as posted for
//! ever. So if a queue pair is destroyed before LAST_WQE_REACHED was reported, the stock posts
//! other receives in their place.
//!
//! The queue pair of a link waits in the link's state. Queue pairs that no longer belong to a link
//! wait here.

use std::sync::Arc;
use std::time::Duration;

use ferrite_verbs::QueuePair;

use super::Poller;
use crate::device::shared_device::SharedDevice;
use crate::device::slots::SendQueue;
use crate::fabric::Shared;
use crate::fabric::timers::Timer;
use crate::link::core::RequestContext;
use crate::link::shared::LinkShared;
use crate::source::Source;

/// How long to wait for the device's report that a queue pair has taken its last receive. Hardware
/// mostly needs far less than a millisecond, but an event can be late on a busy host.
const LAST_RECEIVE: Duration = Duration::from_secs(2);
/// How long to wait on a device that is known not to report the last receive. By then, the device
/// has flushed the queue pair.
const NO_LAST_RECEIVE: Duration = Duration::from_millis(100);
/// Maximum number of receives that the queue pair of a withdrawn upgrade can have taken.
const PROBES: usize = 4;

/// A queue pair that is about to be destroyed although the device has not reported its last
/// receive.
pub(super) struct Unreported {
    device: usize,
    number: u32,
    /// How many receives the queue pair can have taken that will not complete.
    receives: usize,
}

/// A queue pair that is in ERROR and no longer belongs to a link.
pub(crate) struct Leaving {
    device: Arc<SharedDevice>,
    number: u32,
    /// The number of the link that the queue pair belonged to, and the source that the destroy
    /// command is charged to.
    link: u32,
    source: Source,
    queue: SendQueue<RequestContext>,
}

impl Poller {
    /// Downgrades a link that has lost its RDMA path, as soon as the device has reported that
    /// nothing more arrives over that path, or had enough time to report it.
    pub(crate) fn downgrade_when_drained(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let (drained, first) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let drained = state.took_last();
            let waits =
                state.core.lost_mut().map(|lost| std::mem::replace(&mut lost.is_draining, true));
            (drained, waits == Some(false))
        });
        if drained {
            self.downgrade(shared, link);
        } else if first {
            self.wait_for_last_receive(link);
        }
    }

    /// Limits the wait for the report that a link's queue pair has taken its last receive.
    pub(super) fn wait_for_last_receive(&mut self, link: &LinkShared) {
        let wait = link.device().map_or(NO_LAST_RECEIVE, |device| last_receive_wait(&device));
        self.timers.add(self.now + wait, Timer::LastReceive(link.name));
    }

    /// Stops waiting for the report that a link's queue pair has taken its last receive.
    pub(super) fn last_receive_timed_out(&mut self, shared: &Shared, link: &LinkShared) {
        self.expect_missing_receives(shared, link);
        link.with_wakes(&mut self.wakes, |state, _, _| state.stop_waiting_for_last_receive());
    }

    /// Records the queue pair of a link, if it is about to be destroyed without the report of its
    /// last receive.
    pub(super) fn expect_missing_receives(&mut self, shared: &Shared, link: &LinkShared) {
        let route = link.route();
        let Some(device) = route.device else { return };
        let is_reported = link.with_wakes(&mut self.wakes, |state, _, _| {
            let is_over = state.failure().is_some() || state.core.is_to_be_detached();
            !is_over || state.took_last() || state.is_away()
        });
        if !is_reported {
            // A peer that speaks our protocol sends at most `window` frames, and some control
            // frames.
            let receives = match link.is_raw() {
                true => shared.config.recv_queue_depth as usize,
                false => usize::from(shared.config.window) + 16,
            };
            self.record_unreported(&device, route.qp_num, receives);
        }
    }

    fn record_unreported(&mut self, device: &SharedDevice, number: u32, receives: usize) {
        let is_it = |it: &Unreported| it.device == device.index && it.number == number;
        if device.reports_last_receive() && !self.unreported.iter().any(is_it) {
            self.unreported.push(Unreported { device: device.index, number, receives });
        }
    }

    /// Replaces the receives that were possibly lost with a destroyed queue pair, if the device did
    /// not report its last receive.
    pub(super) fn replace_missing_receives(&mut self, device: &SharedDevice, number: u32) {
        let is_it = |it: &Unreported| it.device == device.index && it.number == number;
        let Some(at) = self.unreported.iter().position(is_it) else { return };
        let receives = self.unreported.swap_remove(at).receives;
        if let Some(objects) = &mut self.device_objects[device.index] {
            objects.stock.expect_missing(device.reserve_receives(receives));
        }
    }

    /// Takes over a queue pair that was stopped, and destroys it once it has taken its last
    /// receive, or after a timeout.
    pub(crate) fn destroy_when_drained(
        &mut self,
        device: &Arc<SharedDevice>,
        queue: SendQueue<RequestContext>,
        link: &LinkShared,
    ) {
        let Some(number) = queue.qp().map(QueuePair::number) else { return };
        let (link, source) = (link.index, link.source());
        self.leaving.push(Leaving { device: Arc::clone(device), number, link, source, queue });
        let wait = last_receive_wait(device);
        self.timers.add(self.now + wait, Timer::Leaving(device.index, number));
    }

    /// Handles the device's report that a queue pair has taken its last receive.
    pub(super) fn on_last_receive(&mut self, shared: &Shared, device: usize, number: u32) {
        shared.devices[device].has_reported_last_receive();
        self.destroy_leaving(shared, |leaving| {
            leaving.device.index == device && leaving.number == number
        });
        if let Some(link) =
            self.by_qp.get(device, number).and_then(|index| self.link(shared, index))
        {
            link.with_wakes(&mut self.wakes, |state, _, _| state.on_last_receive(number));
        }
    }

    /// Destroys the waiting queue pairs that match. If the device fails to destroy a queue pair,
    /// the queue pair and its memory are leaked and counted.
    pub(super) fn destroy_leaving(&mut self, shared: &Shared, matches: impl Fn(&Leaving) -> bool) {
        if !self.leaving.iter().any(&matches) {
            return;
        }
        self.reap_all(shared);
        let (gone, kept): (Vec<_>, _) =
            std::mem::take(&mut self.leaving).into_iter().partition(matches);
        self.leaving = kept;
        // Count all of them first, so that the device is not released between two of them.
        for Leaving { device, .. } in &gone {
            if let Some(objects) = &mut self.device_objects[device.index] {
                objects.under_way += 1;
            }
        }
        for Leaving { device, number, link, source, queue } in gone {
            let work = |queue: &mut SendQueue<RequestContext>| {
                let mut entries = 0;
                queue.destroy(|_| entries += 1)?;
                Ok(entries)
            };
            self.command(shared, source, queue, work, move |poller, shared, queue, entries| {
                // If the queue pair was not destroyed, its entries of the completion queue are
                // never used again.
                device.release(entries.unwrap_or(0));
                drop(queue);
                poller.forget_qp(&device, number, link);
                poller.end_queue_pair(shared, &device);
            });
        }
    }

    /// Destroys the waiting queue pairs of one device.
    pub(super) fn destroy_leaving_on(&mut self, shared: &Shared, device: usize) {
        self.destroy_leaving(shared, |leaving| leaving.device.index == device);
    }

    /// Destroys a queue pair whose last receive the device has not reported in time.
    pub(super) fn leaving_timed_out(&mut self, shared: &Shared, device: usize, number: u32) {
        if self.leaving.iter().any(|it| it.device.index == device && it.number == number) {
            self.record_unreported(&shared.devices[device], number, PROBES);
        }
        self.destroy_leaving(shared, |leaving| {
            leaving.device.index == device && leaving.number == number
        });
    }
}

/// Returns how long to wait for the report of a last receive.
fn last_receive_wait(device: &SharedDevice) -> Duration {
    if device.reports_last_receive() { LAST_RECEIVE } else { NO_LAST_RECEIVE }
}
