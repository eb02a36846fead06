//! Queue pairs that leave: from ERROR to destroyed.
//!
//! ```text
//!   to ERROR ──► LAST_WQE_REACHED, or 100 ms ──► reap the completion queue ──► destroy
//! ```
//!
//! A queue pair with a shared receive queue must go in this order (InfiniBand specification
//! 10.2.9.3; `__ib_drain_srq` in the kernel's `drivers/infiniband/core/verbs.c`). Providers such as
//! mlx5 remove the completions that nobody has reaped when a queue pair is destroyed, and give
//! their receives back to the shared queue: the stock would count them as posted for ever.
//!
//! The queue pair of a link waits in the link's state. Those that no link has any more wait here.

use std::sync::Arc;
use std::time::Duration;

use ferrite_verbs::QueuePair;

use super::Shared;
use super::poller::Poller;
use super::shared_device::SharedDevice;
use super::slots::SendQueue;
use super::timers::Timer;
use crate::link::shared::LinkShared;
use crate::link::state::RequestContext;
use crate::source::Source;

/// A device that has not said by then that a queue pair has taken its last receive does not say it.
/// Hardware takes far less than a millisecond.
pub(super) const LAST_RECEIVE: Duration = Duration::from_millis(100);

/// A queue pair that is in ERROR and that no link has any more.
pub(crate) struct Leaving {
    device: Arc<SharedDevice>,
    number: u32,
    /// Whose it was, and who pays for its end.
    link: u32,
    source: Source,
    queue: SendQueue<RequestContext>,
}

impl Poller {
    /// A link has lost its RDMA path: goes on when the device has said that nothing more comes
    /// there.
    pub(crate) fn downgrade_when_drained(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let (drained, first) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let drained = state.took_last();
            let waits = state.lost.as_mut().map(|lost| std::mem::replace(&mut lost.draining, true));
            (drained, waits == Some(false))
        });
        if drained {
            self.fall(shared, link);
        } else if first {
            self.timers.add(self.now + LAST_RECEIVE, Timer::LastReceive(link.name));
        }
    }

    /// Takes over a queue pair that was stopped: it is destroyed when it has taken its last
    /// receive.
    pub(crate) fn let_leave(
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

    /// The device says that a queue pair has taken its last receive.
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

    /// Destroys the queue pairs that leave and match. One that the device does not let go of is
    /// leaked, with its memory, and counted.
    pub(super) fn destroy_leaving(&mut self, shared: &Shared, matches: impl Fn(&Leaving) -> bool) {
        if !self.leaving.iter().any(&matches) {
            return;
        }
        self.reap_all(shared);
        let (gone, kept): (Vec<_>, _) =
            std::mem::take(&mut self.leaving).into_iter().partition(matches);
        self.leaving = kept;
        // All of them first: the device is not let go of between two.
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
                // those of one that did not go are never used again
                device.release(entries.unwrap_or(0));
                drop(queue);
                poller.forget_qp(&device, number, link);
                poller.end_making(shared, &device);
            });
        }
    }

    /// Destroys those of one device.
    pub(super) fn destroy_leaving_on(&mut self, shared: &Shared, device: usize) {
        self.destroy_leaving(shared, |leaving| leaving.device.index == device);
    }

    /// The device has not said that this one has taken its last receive.
    pub(super) fn leaving_timed_out(&mut self, shared: &Shared, device: usize, number: u32) {
        self.destroy_leaving(shared, |leaving| {
            leaving.device.index == device && leaving.number == number
        });
    }
}
