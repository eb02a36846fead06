//! Destroying queue pairs: from the ERROR state to the end.
//!
//! ```text
//!   to ERROR ──► LAST_WQE_REACHED, or 100 ms ──► poll the completion queue ──► destroy
//! ```
//!
//! A queue pair with a shared receive queue must be destroyed in this order (InfiniBand
//! specification 10.2.9.3; `__ib_drain_srq` in the kernel's `drivers/infiniband/core/verbs.c`).
//! When a queue pair is destroyed, providers such as mlx5 remove its completions that were not
//! polled and return their receives to the shared queue. The stock would then count them as posted
//! for ever.
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
/// needs far less than a millisecond; a device that takes longer does not report it.
pub(super) const LAST_RECEIVE: Duration = Duration::from_millis(100);

/// A queue pair that is in ERROR and no longer belongs to a link.
pub(crate) struct Leaving {
    device: Arc<SharedDevice>,
    number: u32,
    /// The link that it belonged to, and the source that its command is charged to.
    link: u32,
    source: Source,
    queue: SendQueue<RequestContext>,
}

impl Poller {
    /// Downgrades a link that has lost its RDMA path, as soon as the device has reported that
    /// nothing more arrives there.
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
            self.timers.add(self.now + LAST_RECEIVE, Timer::LastReceive(link.name));
        }
    }

    /// Takes over a queue pair that was stopped, and destroys it once it has taken its last
    /// receive.
    pub(crate) fn destroy_when_drained(
        &mut self,
        device: &Arc<SharedDevice>,
        queue: SendQueue<RequestContext>,
        link: &LinkShared,
    ) {
        let Some(number) = queue.qp().map(QueuePair::number) else { return };
        let (link, source) = (link.index, link.source());
        self.leaving.push(Leaving { device: Arc::clone(device), number, link, source, queue });
        self.timers.add(self.now + LAST_RECEIVE, Timer::Leaving(device.index, number));
    }

    /// Handles the device's report that a queue pair has taken its last receive.
    pub(super) fn on_last_receive(&mut self, shared: &Shared, device: usize, number: u32) {
        self.destroy_leaving(shared, |leaving| {
            leaving.device.index == device && leaving.number == number
        });
        if let Some(link) =
            self.by_qp.get(device, number).and_then(|index| self.link(shared, index))
        {
            link.with_wakes(&mut self.wakes, |state, _, _| state.on_last_receive(number));
        }
    }

    /// Destroys the waiting queue pairs that match. If the device does not destroy one, it is
    /// leaked with its memory and counted.
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
                // The entries of one that was not destroyed are never used again.
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
        self.destroy_leaving(shared, |leaving| {
            leaving.device.index == device && leaving.number == number
        });
    }
}
