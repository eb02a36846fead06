//! Completion queues and channels, with completions in order, one event per notification request,
//! and overrun.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::task::Poll;

use rustix::io::Errno;

use super::enter::{enter, enter_until};
use super::object::{
    self, ACK_WAIT, Events, Id, Object, code, extended, id_of, minus_one, pointer,
};
use super::records::{Armed, Channel, Entry, FreedEntries, Queue, Subject};
use super::state::State;
use crate::sys;

impl State {
    /// Adds a completion, and an event if the queue is armed for this kind of completion. While a
    /// test delays completions, holds the completion back instead. If the queue is full, loses the
    /// completion and reports the overrun once.
    pub(super) fn complete(&mut self, queue_id: Id, entry: Entry) {
        let Some(entry) = self.keep_late(queue_id, entry) else { return };
        let Some(queue) = self.queues.get_mut(&queue_id) else { return };
        let context = queue.context;
        if queue.entries.len() >= queue.depth {
            // The completion is lost. The entries that it would free stay in use.
            if !std::mem::replace(&mut queue.overrun, true) {
                self.notify(
                    context,
                    sys::ibv_event_type::IBV_EVENT_CQ_ERR,
                    Subject::Queue(queue_id),
                );
            }
            return;
        }
        let failed = entry.wc.status != sys::ibv_wc_status::IBV_WC_SUCCESS;
        let wakes = match queue.armed {
            Armed::No => false,
            Armed::Solicited => entry.solicited || failed,
            Armed::Any => true,
        };
        queue.entries.push_back(entry);
        if wakes {
            queue.armed = Armed::No;
            let channel = queue.channel;
            if let Some(channel) = channel.and_then(|id| self.channels.get_mut(&id)) {
                channel.events.push(queue_id);
            }
        }
    }

    /// Removes the completions of a destroyed queue pair from `queue`, including those that are
    /// held back, and frees their work queue entries.
    pub(super) fn remove_completions(&mut self, queue: Id, qp_num: u32) {
        for entry in self.take_late(queue, qp_num) {
            self.free_entries(entry.freed);
        }
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        let (gone, kept): (VecDeque<_>, _) = std::mem::take(&mut queue.entries)
            .into_iter()
            .partition(|entry| entry.wc.qp_num == qp_num);
        queue.entries = kept;
        for entry in gone {
            self.free_entries(entry.freed);
        }
    }

    fn free_entries(&mut self, freed: FreedEntries) {
        match freed {
            FreedEntries::Sends { qp, epoch, count } => {
                if let Some(qp) = self.queue_pairs.get_mut(&qp).filter(|qp| qp.epoch == epoch) {
                    qp.sends_used = qp.sends_used.saturating_sub(count);
                }
            }
            FreedEntries::Receive { qp, epoch } => {
                if let Some(qp) = self.queue_pairs.get_mut(&qp).filter(|qp| qp.epoch == epoch) {
                    qp.receives_used = qp.receives_used.saturating_sub(1);
                }
            }
            FreedEntries::Shared(srq) => {
                if let Some(srq) = self.srqs.get_mut(&srq) {
                    srq.used = srq.used.saturating_sub(1);
                }
            }
        }
    }
}

pub(super) unsafe extern "C" fn create_comp_channel(
    context: *mut sys::ibv_context,
) -> *mut sys::ibv_comp_channel {
    // SAFETY: the caller's context is open.
    pointer(unsafe {
        enter("ibv_create_comp_channel", extended(context), |state, context| {
            let raw_context = state.usable(context)?.raw.context();
            let events = Events::new()?;
            let raw = sys::ibv_comp_channel { context: raw_context, fd: events.fd(), refcnt: 0 };
            let id = state.new_id();
            let raw = Object::for_caller(raw, id, state.world()?);
            state.channels.insert(id, Channel { context, events, raw });
            Ok(raw.0)
        })
    })
}

pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut sys::ibv_comp_channel) -> c_int {
    // SAFETY: the caller's channel is alive until here, and not used after.
    code(unsafe {
        enter("ibv_destroy_comp_channel", channel, |state, id| {
            if state.queues.values().any(|queue| queue.channel == Some(id)) {
                return Err(Errno::BUSY);
            }
            object::free(state.channels.remove(&id).ok_or(Errno::INVAL)?.raw);
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut sys::ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut sys::ibv_comp_channel,
    comp_vector: c_int,
) -> *mut sys::ibv_cq {
    // SAFETY: the caller's context is open; the channel is null or alive.
    pointer(unsafe {
        let channel_id = id_of(channel);
        enter("ibv_create_cq", extended(context), |state, context| {
            let raw_context = state.usable(context)?.raw.context();
            let spec = &state.device_of(context)?.spec;
            let depth = usize::try_from(cqe).map_err(|_| Errno::INVAL)?;
            let foreign = channel_id
                .is_some_and(|id| state.channels.get(&id).is_none_or(|c| c.context != context));
            if depth == 0 || depth > spec.max_cqe as usize || comp_vector < 0 || foreign {
                return Err(Errno::INVAL);
            }
            if state.queues.len() >= spec.max_cq as usize {
                return Err(Errno::NOMEM);
            }
            state.sizes.completion_queue = depth;
            let raw = sys::ibv_cq {
                context: raw_context,
                channel,
                cq_context,
                cqe,
                ..Default::default()
            };
            let id = state.new_id();
            let raw = Object::for_caller(raw, id, state.world()?);
            let queue = Queue {
                context,
                channel: channel_id,
                entries: VecDeque::new(),
                depth,
                armed: Armed::No,
                overrun: false,
                unacked: 0,
                raw,
            };
            state.queues.insert(id, queue);
            Ok(raw.0)
        })
    })
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut sys::ibv_cq) -> c_int {
    // SAFETY: the caller's queue is alive until here, and not used after.
    code(unsafe {
        enter_until("ibv_destroy_cq", cq, Some(ACK_WAIT), |state, id| {
            let used = state.queue_pairs.values().any(|qp| qp.send_cq == id || qp.recv_cq == id);
            match state.queues.get(&id) {
                None => return Poll::Ready(Err(state.no_object())),
                Some(_) if used => return Poll::Ready(Err(Errno::BUSY)),
                Some(queue) if queue.unacked > 0 => return Poll::Pending,
                Some(_) => {}
            }
            let Some(queue) = state.queues.remove(&id) else {
                return Poll::Ready(Err(Errno::INVAL));
            };
            if let Some(channel) = queue.channel.and_then(|id| state.channels.get_mut(&id)) {
                channel.events.remove(|waiting| *waiting == id);
            }
            state.drop_async_events(queue.context, Subject::Queue(id));
            object::free(queue.raw);
            Poll::Ready(Ok(()))
        })
    })
}

pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut sys::ibv_comp_channel,
    cq: *mut *mut sys::ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's channel is alive, and both places are valid for the write. The queue is
    // alive, because destroying a queue removes its events.
    minus_one(unsafe {
        enter_until("ibv_get_cq_event", channel, None, |state, id| {
            let Some(channel) = state.channels.get_mut(&id) else {
                return Poll::Ready(Err(Errno::INVAL));
            };
            channel.events.take().map_ok(|queue_id| {
                if let Some(queue) = state.queues.get_mut(&queue_id) {
                    queue.unacked += 1;
                    *cq = queue.raw.0;
                    *cq_context = (*queue.raw.0).cq_context;
                }
            })
        })
    })
}

pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut sys::ibv_cq, nevents: c_uint) {
    // SAFETY: the caller's queue is alive, because destroying it waits for the acknowledgement.
    let _ = unsafe {
        enter("ibv_ack_cq_events", cq, |state, id| {
            if let Some(queue) = state.queues.get_mut(&id) {
                queue.unacked = queue.unacked.saturating_sub(nevents as usize);
            }
            Ok(())
        })
    };
}

pub(super) unsafe extern "C" fn poll_cq(
    cq: *mut sys::ibv_cq,
    num_entries: c_int,
    wc: *mut sys::ibv_wc,
) -> c_int {
    // SAFETY: the caller's queue is alive, and `wc` has room for `num_entries`.
    let reaped = unsafe {
        enter("ibv_poll_cq", cq, |state, id| {
            let mut reaped = 0;
            state.sizes.poll_batch = num_entries.unsigned_abs() as usize;
            while reaped < num_entries {
                let queue = state.queues.get_mut(&id).ok_or(Errno::INVAL)?;
                let Some(entry) = queue.entries.pop_front() else { break };
                wc.add(reaped.unsigned_abs() as usize).write(entry.wc);
                reaped += 1;
                state.free_entries(entry.freed);
            }
            Ok(reaped)
        })
    };
    reaped.unwrap_or(-1)
}

pub(super) unsafe extern "C" fn req_notify_cq(
    cq: *mut sys::ibv_cq,
    solicited_only: c_int,
) -> c_int {
    // SAFETY: the caller's queue is alive.
    code(unsafe {
        enter("ibv_req_notify_cq", cq, |state, id| {
            let queue = state.queues.get_mut(&id).ok_or(Errno::INVAL)?;
            // A request for solicited events does not cancel an earlier request for all events.
            if solicited_only == 0 {
                queue.armed = Armed::Any;
            } else if queue.armed == Armed::No {
                queue.armed = Armed::Solicited;
            }
            Ok(())
        })
    })
}
