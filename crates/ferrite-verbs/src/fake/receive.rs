//! Receives of queue pairs and of shared receive queues.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::task::Poll;

use rustix::io::Errno;

use super::enter::{enter, enter_until};
use super::execution;
use super::object::{self, ACK_WAIT, Id, Object, code, pointer};
use super::records::{ERROR, FreedEntries, Piece, RESET, Receive, SharedQueue, Subject};
use super::state::State;
use crate::sys;

impl State {
    /// Takes the receive that the next message to `qp` consumes. Reports it if a shared receive
    /// queue falls below its armed limit.
    pub(super) fn take_receive(&mut self, qp: Id) -> Option<Receive> {
        let qp = self.queue_pairs.get_mut(&qp)?;
        let Some(srq_id) = qp.srq else { return qp.receives.pop_front() };
        let srq = self.srqs.get_mut(&srq_id)?;
        let receive = srq.waiting.pop_front()?;
        if (srq.waiting.len() as u64) < u64::from(srq.limit) {
            srq.limit = 0;
            let context = srq.context;
            self.notify(
                context,
                sys::ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED,
                Subject::SharedQueue(srq_id),
            );
        }
        Some(receive)
    }

    /// Returns whether there is a receive for the next message to `qp`.
    pub(super) fn has_receive(&self, qp: Id) -> bool {
        let Some(qp) = self.queue_pairs.get(&qp) else { return false };
        match qp.srq {
            Some(srq) => self.srqs.get(&srq).is_some_and(|srq| !srq.waiting.is_empty()),
            None => !qp.receives.is_empty(),
        }
    }

    fn accept_receive(
        &mut self,
        id: Id,
        wr: &sys::ibv_recv_wr,
        pieces: Vec<Piece>,
    ) -> Result<(), Errno> {
        let qp = self.queue_pairs.get_mut(&id).ok_or(Errno::INVAL)?;
        if qp.state == RESET || qp.srq.is_some() || pieces.len() > qp.cap.max_recv_sge as usize {
            return Err(Errno::INVAL);
        }
        if qp.receives_used >= qp.cap.max_recv_wr {
            return Err(Errno::NOMEM);
        }
        qp.receives_used += 1;
        let receive = Receive {
            wr_id: wr.wr_id,
            pieces,
            freed: FreedEntries::Receive { qp: id, epoch: qp.epoch },
        };
        qp.receives.push_back(receive);
        if qp.state == ERROR {
            self.flush(id);
        }
        Ok(())
    }

    fn accept_shared(
        &mut self,
        id: Id,
        wr: &sys::ibv_recv_wr,
        pieces: Vec<Piece>,
    ) -> Result<(), Errno> {
        let srq = self.srqs.get_mut(&id).ok_or(Errno::INVAL)?;
        if pieces.len() > srq.max_sge as usize {
            return Err(Errno::INVAL);
        }
        if srq.used >= srq.max_wr {
            return Err(Errno::NOMEM);
        }
        srq.used += 1;
        srq.waiting.push_back(Receive { wr_id: wr.wr_id, pieces, freed: FreedEntries::Shared(id) });
        Ok(())
    }
}

pub(super) unsafe extern "C" fn create_srq(
    pd: *mut sys::ibv_pd,
    init: *mut sys::ibv_srq_init_attr,
) -> *mut sys::ibv_srq {
    // SAFETY: the caller's domain is alive, and `init` is valid for the call.
    pointer(unsafe {
        enter("ibv_create_srq", pd, |state, domain| {
            let found = state.domains.get(&domain).ok_or(Errno::INVAL)?;
            let (raw_pd, context) = (found.raw, found.context);
            let raw_context = state.usable(context)?.raw.context();
            let spec = &state.device_of(context)?.spec;
            let sys::ibv_srq_attr { max_wr, max_sge, .. } = (*init).attr;
            if max_wr == 0 || max_wr > spec.max_srq_wr || max_sge > spec.max_srq_sge {
                return Err(Errno::INVAL);
            }
            if state.srqs.len() >= spec.max_srq as usize {
                return Err(Errno::NOMEM);
            }
            state.sizes.shared_receive_queue = max_wr;
            let raw = sys::ibv_srq {
                context: raw_context,
                srq_context: (*init).srq_context,
                pd: raw_pd.0,
                ..Default::default()
            };
            let id = state.new_id();
            let raw = Object::for_caller(raw, id, state.world()?);
            let srq = SharedQueue {
                context,
                domain,
                waiting: VecDeque::new(),
                used: 0,
                max_wr,
                max_sge,
                limit: 0,
                unacked: 0,
                raw,
            };
            state.srqs.insert(id, srq);
            Ok(raw.0)
        })
    })
}

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller's queue is alive, and `attr` is valid for the call.
    code(unsafe {
        enter("ibv_modify_srq", srq, |state, id| {
            let srq = state.srqs.get_mut(&id).ok_or(Errno::INVAL)?;
            // Resizing is not modelled.
            if mask.cast_unsigned() != sys::ibv_srq_attr_mask::IBV_SRQ_LIMIT.0
                || (*attr).srq_limit > srq.max_wr
            {
                return Err(Errno::INVAL);
            }
            srq.limit = (*attr).srq_limit;
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn query_srq(
    srq: *mut sys::ibv_srq,
    attr: *mut sys::ibv_srq_attr,
) -> c_int {
    // SAFETY: the caller's queue is alive, and `attr` is valid for the write.
    code(unsafe {
        enter("ibv_query_srq", srq, |state, id| {
            let srq = state.srqs.get(&id).ok_or(Errno::INVAL)?;
            *attr = sys::ibv_srq_attr {
                max_wr: srq.max_wr,
                max_sge: srq.max_sge,
                srq_limit: srq.limit,
            };
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut sys::ibv_srq) -> c_int {
    // SAFETY: the caller's queue is alive until here, and not used after.
    code(unsafe {
        enter_until("ibv_destroy_srq", srq, Some(ACK_WAIT), |state, id| {
            let used = state.queue_pairs.values().any(|qp| qp.srq == Some(id));
            match state.srqs.get(&id) {
                None => return Poll::Ready(Err(state.no_object())),
                Some(_) if used => return Poll::Ready(Err(Errno::BUSY)),
                Some(srq) if srq.unacked > 0 => return Poll::Pending,
                Some(_) => {}
            }
            if let Some(srq) = state.srqs.remove(&id) {
                state.drop_async_events(srq.context, Subject::SharedQueue(id));
                object::free(srq.raw);
            }
            Poll::Ready(Ok(()))
        })
    })
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut sys::ibv_qp,
    wr: *mut sys::ibv_recv_wr,
    bad_wr: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's queue pair is alive; the chain is valid for the call, as is `bad_wr`.
    unsafe { post("ibv_post_recv", qp, wr, bad_wr, State::accept_receive) }
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut sys::ibv_srq,
    wr: *mut sys::ibv_recv_wr,
    bad_wr: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe { post("ibv_post_srq_recv", srq, wr, bad_wr, State::accept_shared) }
}

/// Passes the requests of a chain to `accept`, one by one, until `accept` refuses one. Then lets
/// waiting senders continue.
unsafe fn post<C>(
    call: &'static str,
    raw: *mut C,
    mut wr: *mut sys::ibv_recv_wr,
    bad_wr: *mut *mut sys::ibv_recv_wr,
    accept: fn(&mut State, Id, &sys::ibv_recv_wr, Vec<Piece>) -> Result<(), Errno>,
) -> c_int {
    // SAFETY: both callers guarantee that the object is alive, and that the chain and `bad_wr` are
    // valid for the call.
    code(unsafe {
        *bad_wr = wr;
        enter(call, raw, |state, id| {
            let mut result = Ok(());
            while result.is_ok() && !wr.is_null() {
                let pieces = execution::pieces((*wr).sg_list, (*wr).num_sge);
                result = accept(state, id, &*wr, pieces);
                if result.is_ok() {
                    wr = (*wr).next;
                }
            }
            *bad_wr = wr;
            state.settle();
            result
        })
    })
}
