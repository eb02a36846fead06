//! Queue pairs as objects: creation, state changes, queries and destruction.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::task::Poll;

use rustix::io::Errno;

use super::enter::{enter, enter_until};
use super::object::{self, ACK_WAIT, Id, Object, code, id_of, pointer};
use super::records::{ERROR, INIT, QueuePair, RESET, RTR, RTS, Subject};
use super::state::State;
use crate::sys;
use crate::sys::ibv_qp_attr_mask as Mask;

const STATE: u32 = Mask::IBV_QP_STATE.0;
const CUR_STATE: u32 = Mask::IBV_QP_CUR_STATE.0;
const ACCESS: u32 = Mask::IBV_QP_ACCESS_FLAGS.0;
const PKEY_INDEX: u32 = Mask::IBV_QP_PKEY_INDEX.0;
const PORT: u32 = Mask::IBV_QP_PORT.0;
const RNR_TIMER: u32 = Mask::IBV_QP_MIN_RNR_TIMER.0;
const TO_INIT: u32 = PKEY_INDEX | PORT | ACCESS;
const TO_RTR: u32 = Mask::IBV_QP_AV.0
    | Mask::IBV_QP_PATH_MTU.0
    | Mask::IBV_QP_DEST_QPN.0
    | Mask::IBV_QP_RQ_PSN.0
    | Mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
    | RNR_TIMER;
const TO_RTS: u32 = Mask::IBV_QP_TIMEOUT.0
    | Mask::IBV_QP_RETRY_CNT.0
    | Mask::IBV_QP_RNR_RETRY.0
    | Mask::IBV_QP_SQ_PSN.0
    | Mask::IBV_QP_MAX_QP_RD_ATOMIC.0;

/// Returns the attributes that a transition requires, and the further attributes that it allows.
/// Returns `None` if there is no such transition. The values are from the kernel's table for
/// reliable connections, without the state "send queue drained".
fn attributes(from: sys::ibv_qp_state, to: sys::ibv_qp_state) -> Option<(u32, u32)> {
    match (from, to) {
        (RESET, INIT) => Some((TO_INIT, 0)),
        (INIT, INIT) => Some((0, TO_INIT)),
        (INIT, RTR) => Some((TO_RTR, ACCESS | PKEY_INDEX)),
        (RTR, RTS) => Some((TO_RTS, CUR_STATE | ACCESS | RNR_TIMER)),
        (RTS, RTS) => Some((0, CUR_STATE | ACCESS | RNR_TIMER)),
        (_, RESET | ERROR) => Some((0, 0)),
        _ => None,
    }
}

impl State {
    fn modify(&mut self, id: Id, new: &sys::ibv_qp_attr, mask: u32) -> Result<(), Errno> {
        let qp = self.queue_pairs.get(&id).ok_or(Errno::INVAL)?;
        let device = self.device_of(qp.context)?;
        let to = if mask & STATE != 0 { new.qp_state } else { qp.state };
        let (required, optional) = attributes(qp.state, to).ok_or(Errno::INVAL)?;
        let brought = mask & !STATE;
        if brought & required != required || brought & !(required | optional) != 0 {
            return Err(Errno::INVAL);
        }
        if mask & PORT != 0 && !(1..=device.spec.port).contains(&new.port_num) {
            return Err(Errno::INVAL);
        }
        if mask & Mask::IBV_QP_AV.0 != 0 {
            let route = new.ah_attr.grh;
            if new.ah_attr.is_global == 0
                || usize::from(route.sgid_index) > device.spec.addresses.len()
            {
                return Err(Errno::INVAL);
            }
            // The kernel resolves the hardware address, and gives up after a timeout.
            // SAFETY: both members of the union are plain bytes.
            self.device_at(unsafe { route.dgid.raw }).ok_or(Errno::TIMEDOUT)?;
        }
        let max_reads = device.spec.max_reads;
        let reads = if to == RTR { new.max_dest_rd_atomic } else { new.max_rd_atomic };
        if brought & required & (TO_RTR | TO_RTS) != 0 && u32::from(reads) > max_reads {
            return Err(Errno::INVAL);
        }
        if let Some(qp) = self.queue_pairs.get_mut(&id) {
            merge(&mut qp.attr, new, mask);
            match to {
                RESET => qp.reset(),
                ERROR => self.fail(id),
                _ => qp.state = to,
            }
        }
        // Requests of peers may have been waiting for this change.
        self.settle();
        Ok(())
    }
}

impl QueuePair {
    /// Resets the queue pair, and drops everything posted to it without completions.
    fn reset(&mut self) {
        self.state = RESET;
        self.attr = sys::ibv_qp_attr::default();
        self.epoch += 1;
        self.sends.clear();
        self.receives.clear();
        (self.sends_used, self.receives_used, self.unsignaled) = (0, 0, 0);
    }
}

/// Copies the fields that `mask` names.
fn merge(old: &mut sys::ibv_qp_attr, new: &sys::ibv_qp_attr, mask: u32) {
    macro_rules! fields {
        ($($bit:ident => $($field:ident),+;)*) => {
            $(if mask & Mask::$bit.0 != 0 { $(old.$field = new.$field;)+ })*
        };
    }
    fields! {
        IBV_QP_ACCESS_FLAGS => qp_access_flags;
        IBV_QP_PKEY_INDEX => pkey_index;
        IBV_QP_PORT => port_num;
        IBV_QP_AV => ah_attr;
        IBV_QP_PATH_MTU => path_mtu;
        IBV_QP_TIMEOUT => timeout;
        IBV_QP_RETRY_CNT => retry_cnt;
        IBV_QP_RNR_RETRY => rnr_retry;
        IBV_QP_RQ_PSN => rq_psn;
        IBV_QP_SQ_PSN => sq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC => max_rd_atomic;
        IBV_QP_MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        IBV_QP_MIN_RNR_TIMER => min_rnr_timer;
        IBV_QP_DEST_QPN => dest_qp_num;
    }
}

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut sys::ibv_pd,
    init: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: the caller's domain and queues are alive, and `init` is valid for the call.
    pointer(unsafe {
        enter("ibv_create_qp", pd, |state, domain| {
            let init = &mut *init;
            let found = state.domains.get(&domain).ok_or(Errno::INVAL)?;
            let (raw_pd, context) = (found.raw, found.context);
            let raw_context = state.usable(context)?.raw.context();
            let device = state.device_of(context)?;
            let (device_id, spec, cap) = (device.id, &device.spec, init.cap);
            let (send_cq, recv_cq, srq) =
                (id_of(init.send_cq), id_of(init.recv_cq), id_of(init.srq));
            let (Some(send_cq), Some(recv_cq)) = (send_cq, recv_cq) else {
                return Err(Errno::INVAL);
            };
            let ours = |id| state.queues.get(id).is_some_and(|queue| queue.context == context);
            let too_much = cap.max_send_wr > spec.max_qp_wr
                || cap.max_recv_wr > spec.max_qp_wr
                || cap.max_send_sge > spec.max_sge
                || cap.max_recv_sge > spec.max_sge
                || cap.max_inline_data > spec.max_inline;
            if too_much && spec.refuses_silently {
                return Ok(std::ptr::null_mut());
            }
            if !ours(&send_cq) || !ours(&recv_cq) || too_much {
                return Err(Errno::INVAL);
            }
            if init.qp_type != sys::ibv_qp_type::IBV_QPT_RC {
                return Err(Errno::OPNOTSUPP);
            }
            if state.queue_pairs.len() >= spec.max_qp as usize {
                return Err(Errno::NOMEM);
            }
            if srq.is_some() {
                // As in the kernel, the sizes of the queue pair's own receive queue are ignored.
                (init.cap.max_recv_wr, init.cap.max_recv_sge) = (0, 0);
            }
            (state.sizes.send_queue, state.sizes.inline) = (cap.max_send_wr, cap.max_inline_data);
            let (id, number) = (state.new_id(), state.next_qp_num);
            state.next_qp_num += 1;
            let raw = sys::ibv_qp {
                context: raw_context,
                qp_context: init.qp_context,
                pd: raw_pd.0,
                send_cq: init.send_cq,
                recv_cq: init.recv_cq,
                srq: init.srq,
                qp_num: number,
                state: RESET,
                qp_type: init.qp_type,
                ..Default::default()
            };
            let raw = Object::for_caller(raw, id, state.world()?);
            let qp = QueuePair {
                number,
                device: device_id,
                context,
                domain,
                send_cq,
                recv_cq,
                srq,
                cap: init.cap,
                all_signaled: init.sq_sig_all != 0,
                state: RESET,
                attr: sys::ibv_qp_attr::default(),
                epoch: 0,
                sends: VecDeque::new(),
                receives: VecDeque::new(),
                sends_used: 0,
                receives_used: 0,
                unsignaled: 0,
                unacked: 0,
                raw,
            };
            state.queue_pairs.insert(id, qp);
            state.by_qp_num.insert(number, id);
            Ok(raw.0)
        })
    })
}

pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller's queue pair is alive, and `attr` is valid for the call.
    code(unsafe {
        enter("ibv_modify_qp", qp, |state, id| state.modify(id, &*attr, mask.cast_unsigned()))
    })
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut sys::ibv_qp,
    attr: *mut sys::ibv_qp_attr,
    _mask: c_int,
    init: *mut sys::ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's queue pair is alive, and both structs are valid for the write.
    code(unsafe {
        enter("ibv_query_qp", qp, |state, id| {
            let found = state.queue_pairs.get(&id).ok_or(Errno::INVAL)?;
            state.usable(found.context)?;
            let (state, cap) = (found.state, found.cap);
            *attr = sys::ibv_qp_attr { qp_state: state, cur_qp_state: state, cap, ..found.attr };
            *init = sys::ibv_qp_init_attr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap,
                qp_type: (*qp).qp_type,
                sq_sig_all: found.all_signaled.into(),
            };
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut sys::ibv_qp) -> c_int {
    // SAFETY: the caller's queue pair is alive until here, and not used after.
    code(unsafe {
        enter_until("ibv_destroy_qp", qp, Some(ACK_WAIT), |state, id| {
            match state.queue_pairs.get(&id) {
                None => return Poll::Ready(Err(state.no_object())),
                Some(qp) if qp.unacked > 0 => return Poll::Pending,
                // The specification requires this error while windows of type 2B are bound.
                // Soft-RoCE waits until the windows are released instead.
                Some(_)
                    if state.windows.values().any(|window| window.is_bound_to_queue_pair(id)) =>
                {
                    return Poll::Ready(Err(Errno::BUSY));
                }
                Some(_) => {}
            }
            if let Some(qp) = state.queue_pairs.remove(&id) {
                state.by_qp_num.remove(&qp.number);
                state.pending.remove(&id);
                state.drop_async_events(qp.context, Subject::QueuePair(id));
                if state
                    .devices
                    .get(&qp.device)
                    .is_some_and(|device| device.spec.cleans_completions)
                {
                    state.remove_completions(qp.recv_cq, qp.number);
                    state.remove_completions(qp.send_cq, qp.number);
                }
                object::free(qp.raw);
                // Requests of peers may have been waiting for this queue pair. They get no answer
                // any more.
                state.settle();
            }
            Poll::Ready(Ok(()))
        })
    })
}
