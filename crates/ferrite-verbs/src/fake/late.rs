//! Devices that report late: completions and LAST_WQE_REACHED are held back until a test releases
//! them. This file also has three other methods of [`World`] for tests. One reports changes of a
//! GID table, and the others return the timeouts of queue pairs and the number of posted receives.
//!
//! The firmware of a device flushes a failed queue pair, and the driver delivers the event from a
//! kernel work queue. So the completions and the event can be late on a busy host
//! (`mlx5_ib_qp_event` and `mlx5_ib_handle_qp_event` in the kernel's
//! `drivers/infiniband/hw/mlx5/qp.c`).

use super::World;
use super::object::Id;
use super::records::{Entry, Subject};
use super::state::State;
use crate::sys;

impl World {
    /// Starts or ends a delay of completions and LAST_WQE_REACHED of all devices. When the delay
    /// ends, the devices report everything that they have held back.
    pub fn delay_completions(&self, is_on: bool) {
        self.with(|state| {
            state.late.is_on = is_on;
            if !is_on {
                state.report_late();
            }
        });
    }

    /// Reports `count` changes of a device's GID table at once. This happens when a host gets many
    /// addresses.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn change_gids(&self, name: &str, count: usize) {
        let kind = sys::ibv_event_type::IBV_EVENT_GID_CHANGE;
        self.with_device(name, |state, device| {
            (0..count).for_each(|_| state.notify_all(device, kind, Subject::Port(1)));
        });
    }

    /// Returns the acknowledgement timeouts of all queue pairs, encoded as in
    /// [`Path::ack_timeout`](crate::Path::ack_timeout), in the order of creation.
    #[must_use]
    pub fn ack_timeouts(&self) -> Vec<u8> {
        self.lock().queue_pairs.values().map(|qp| qp.attr.timeout).collect()
    }

    /// Returns how many receives wait in each shared receive queue, in the order of creation.
    #[must_use]
    pub fn receives_waiting(&self) -> Vec<usize> {
        self.lock().srqs.values().map(|srq| srq.waiting.len()).collect()
    }
}

impl State {
    /// Holds a completion back during a delay. Otherwise returns it.
    pub(super) fn keep_late(&mut self, queue: Id, entry: Entry) -> Option<Entry> {
        if !self.late.is_on {
            return Some(entry);
        }
        self.late.completions.push((queue, entry));
        None
    }

    /// Holds back LAST_WQE_REACHED of a queue pair during a delay. Returns whether it is held back.
    pub(super) fn keep_late_last_receive(&mut self, context: Id, qp: Id) -> bool {
        if self.late.is_on {
            self.late.last_receives.push((context, qp));
        }
        self.late.is_on
    }

    /// Takes the held-back completions of a destroyed queue pair that belong to `queue`.
    pub(super) fn take_late(&mut self, queue: Id, qp_num: u32) -> Vec<Entry> {
        let is_gone = |(of, entry): &(Id, Entry)| *of == queue && entry.wc.qp_num == qp_num;
        let (gone, kept): (Vec<_>, _) =
            std::mem::take(&mut self.late.completions).into_iter().partition(is_gone);
        self.late.completions = kept;
        gone.into_iter().map(|(_, entry)| entry).collect()
    }

    fn report_late(&mut self) {
        for (queue, entry) in std::mem::take(&mut self.late.completions) {
            self.complete(queue, entry);
        }
        for (context, qp) in std::mem::take(&mut self.late.last_receives) {
            if self.queue_pairs.contains_key(&qp) {
                let kind = sys::ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED;
                self.notify(context, kind, Subject::QueuePair(qp));
            }
        }
    }
}
