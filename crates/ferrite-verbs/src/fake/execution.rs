//! Execution of work requests: what a send, a write or a read does on both sides.
//!
//! A post executes its requests on the caller's thread, under the world's lock, as far as possible.
//! A request that cannot continue stays in its send queue, for example because the peer has no
//! receive or is not ready yet. Its queue pair stays in `pending`, and [`State::settle`] tries the
//! request again after every change. No time passes: if a device would retry and then fail, the
//! request fails at once.

mod reading;

use std::ffi::c_int;

use rustix::io::Errno;

use super::enter::enter;
use super::memory;
use super::object::{Id, code};
use super::records::{
    Device, ERROR, Entry, FreedEntries, INIT, Kind, LOCAL_WRITE, Payload, QueuePair, REMOTE_READ,
    REMOTE_WRITE, RESET, RTS, Receive, Send, Span, Subject,
};
use super::state::State;
use crate::sys;
use crate::sys::ibv_event_type as Event;
use crate::sys::ibv_wc_opcode as Opcode;
use crate::sys::ibv_wc_status as Status;
pub(super) use reading::pieces;

pub(super) const MAX_MESSAGE_BYTES: u32 = 1 << 30;

/// The name of an injected fault that fails a post after all its requests were queued.
pub(super) const DOORBELL: &str = "doorbell";

/// The value of `rnr_retry` with which a request waits for a receive for ever.
const RNR_FOR_EVER: u8 = 7;

/// The result of executing the head of a send queue.
enum Outcome {
    Done,
    /// The request cannot continue now, and [`State::settle`] tries it again after the next change.
    Wait,
    Fail(Status),
}

/// The responder's answer to a request.
enum Answer {
    Acknowledged,
    ReceiverNotReady,
}

/// A responder's refusal: the status of the requester's completion, and the async event for the
/// responder's users.
struct Refusal {
    why: Status,
    event: Option<Event>,
}

impl State {
    /// Executes the requests of all queue pairs until none can continue.
    pub(super) fn settle(&mut self) {
        loop {
            let mut moved = false;
            for id in self.pending.iter().copied().collect::<Vec<_>>() {
                while self.step(id) {
                    moved = true;
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Executes the head of a send queue; returns `false` if nothing could be executed.
    fn step(&mut self, id: Id) -> bool {
        let Some(qp) = self.queue_pairs.get_mut(&id).filter(|qp| qp.state == RTS) else {
            self.pending.remove(&id);
            return false;
        };
        let Some(send) = qp.sends.pop_front() else {
            self.pending.remove(&id);
            return false;
        };
        match self.execute(id, &send) {
            Outcome::Done => self.complete_send(id, &send, Status::IBV_WC_SUCCESS),
            Outcome::Wait => {
                if let Some(qp) = self.queue_pairs.get_mut(&id) {
                    qp.sends.push_front(send);
                }
                return false;
            }
            Outcome::Fail(why) => {
                self.complete_send(id, &send, why);
                self.fail(id);
            }
        }
        true
    }

    fn execute(&mut self, id: Id, send: &Send) -> Outcome {
        let qp = &self.queue_pairs[&id];
        let (domain, timeout, rnr_retry) = (qp.domain, qp.attr.timeout, qp.attr.rnr_retry);
        if !self.devices.get(&qp.device).is_some_and(Device::is_alive) {
            return Outcome::Fail(Status::IBV_WC_LOC_QP_OP_ERR);
        }
        if send.len > MAX_MESSAGE_BYTES.into() {
            return Outcome::Fail(Status::IBV_WC_LOC_LEN_ERR);
        }
        let local_operation = match (send.kind, &send.binding) {
            (Kind::Bind, Some(binding)) => Some(self.bind_window(id, binding)),
            (Kind::Invalidate, _) => Some(self.invalidate_window(id, send.rkey)),
            _ => None,
        };
        if let Some(done) = local_operation {
            return done.map_or_else(Outcome::Fail, |()| Outcome::Done);
        }
        let qp = &self.queue_pairs[&id];
        if send.kind == Kind::Read && qp.attr.max_rd_atomic == 0 {
            return Outcome::Wait;
        }
        let access = if send.kind == Kind::Read { LOCAL_WRITE } else { 0 };
        let local = match &send.payload {
            Payload::Inline(bytes) => Some(vec![Span::of(bytes)]),
            Payload::Pieces(pieces) => self.local_spans(domain, pieces, send.len, access),
        };
        let Some(local) = local else { return Outcome::Fail(Status::IBV_WC_LOC_PROT_ERR) };
        let peer = match self.peer_of(id) {
            Peer::Ready(peer) => peer,
            Peer::NotReady => return Outcome::Wait,
            // Without a timeout, the requester waits for the path to come back.
            Peer::Unreachable if timeout == 0 => return Outcome::Wait,
            Peer::Unreachable => return Outcome::Fail(Status::IBV_WC_RETRY_EXC_ERR),
        };
        if !self.carries(id, peer, send) {
            return Outcome::Fail(Status::IBV_WC_RETRY_EXC_ERR);
        }
        match self.respond(peer, send, &local) {
            Ok(Answer::Acknowledged) => Outcome::Done,
            Ok(Answer::ReceiverNotReady) if rnr_retry == RNR_FOR_EVER => Outcome::Wait,
            Ok(Answer::ReceiverNotReady) => Outcome::Fail(Status::IBV_WC_RNR_RETRY_EXC_ERR),
            Err(Refusal { why, event }) => {
                self.fail_responder(peer, event);
                Outcome::Fail(why)
            }
        }
    }

    /// Returns whether both ports can carry the packets of the request or, for a read, of the
    /// response. Packets that are larger than a port's MTU are lost.
    fn carries(&self, from: Id, to: Id, send: &Send) -> bool {
        let bytes = |code: u32| 128_u64 << code;
        let [from, to] = [from, to].map(|id| &self.queue_pairs[&id]);
        let sender = if send.kind == Kind::Read { to } else { from };
        let packet = send.len.min(bytes(sender.attr.path_mtu.0));
        let port = |qp: &QueuePair| {
            self.devices.get(&qp.device).is_none_or(|it| packet <= bytes(it.spec.active_mtu))
        };
        port(from) && port(to)
    }

    /// Executes the responder's half of a request.
    fn respond(&mut self, id: Id, send: &Send, local: &[Span]) -> Result<Answer, Refusal> {
        let qp = &self.queue_pairs[&id];
        let domain = qp.domain;
        let (needed, accepts) = match send.kind {
            Kind::Send | Kind::Bind | Kind::Invalidate => (0, true),
            Kind::Write => (REMOTE_WRITE, true),
            Kind::Read => (REMOTE_READ, qp.attr.max_dest_rd_atomic > 0),
        };
        if qp.attr.qp_access_flags & needed != needed || !accepts {
            return Err(Refusal {
                why: Status::IBV_WC_REM_INV_REQ_ERR,
                event: Some(Event::IBV_EVENT_QP_REQ_ERR),
            });
        }
        let takes_receive = send.kind == Kind::Send || send.imm.is_some();
        if takes_receive && !self.has_receive(id) {
            return Ok(Answer::ReceiverNotReady);
        }
        if needed != 0 {
            let remote = self
                .remote_span(id, send.rkey, send.remote_addr, send.len, needed)
                .ok_or(Refusal {
                    why: Status::IBV_WC_REM_ACCESS_ERR,
                    event: Some(Event::IBV_EVENT_QP_ACCESS_ERR),
                })?;
            match send.kind {
                Kind::Read => memory::copy(&[remote], local),
                _ => memory::copy(local, &[remote]),
            }
        }
        if takes_receive && let Some(receive) = self.take_receive(id) {
            let mut opcode = Opcode::IBV_WC_RECV_RDMA_WITH_IMM;
            if send.kind == Kind::Send {
                opcode = Opcode::IBV_WC_RECV;
                if receive.capacity() < send.len {
                    self.complete_receive(id, &receive, Status::IBV_WC_LOC_LEN_ERR, opcode, send);
                    return Err(Refusal { why: Status::IBV_WC_REM_INV_REQ_ERR, event: None });
                }
                let Some(places) = self.local_spans(domain, &receive.pieces, send.len, LOCAL_WRITE)
                else {
                    self.complete_receive(id, &receive, Status::IBV_WC_LOC_PROT_ERR, opcode, send);
                    return Err(Refusal { why: Status::IBV_WC_REM_OP_ERR, event: None });
                };
                memory::copy(local, &places);
            }
            self.complete_receive(id, &receive, Status::IBV_WC_SUCCESS, opcode, send);
        }
        Ok(Answer::Acknowledged)
    }

    fn fail_responder(&mut self, id: Id, kind: Option<Event>) {
        if let Some(kind) = kind
            && let Some(qp) = self.queue_pairs.get(&id)
        {
            self.notify(qp.context, kind, Subject::QueuePair(id));
        }
        self.fail(id);
    }

    /// Completes a send. An unsignaled request that succeeds gives no completion.
    fn complete_send(&mut self, id: Id, send: &Send, why: Status) {
        let Some(qp) = self.queue_pairs.get_mut(&id) else { return };
        if why == Status::IBV_WC_SUCCESS && !send.signaled && !qp.all_signaled {
            qp.unsignaled += 1;
            return;
        }
        let count = std::mem::take(&mut qp.unsignaled) + 1;
        let opcode = match send.kind {
            Kind::Send => Opcode::IBV_WC_SEND,
            Kind::Write => Opcode::IBV_WC_RDMA_WRITE,
            Kind::Read => Opcode::IBV_WC_RDMA_READ,
            Kind::Bind => Opcode::IBV_WC_BIND_MW,
            Kind::Invalidate => Opcode::IBV_WC_LOCAL_INV,
        };
        let wc = sys::ibv_wc {
            wr_id: send.wr_id,
            status: why,
            opcode,
            byte_len: u32::try_from(send.len).unwrap_or(u32::MAX),
            qp_num: qp.number,
            ..Default::default()
        };
        let (queue, freed) = (qp.send_cq, FreedEntries::Sends { qp: id, epoch: qp.epoch, count });
        self.complete(queue, Entry { wc, freed, solicited: false });
    }

    fn complete_receive(
        &mut self,
        id: Id,
        receive: &Receive,
        why: Status,
        opcode: Opcode,
        send: &Send,
    ) {
        let Some(qp) = self.queue_pairs.get(&id) else { return };
        let mut wc = sys::ibv_wc {
            wr_id: receive.wr_id,
            status: why,
            opcode,
            byte_len: u32::try_from(send.len).unwrap_or(u32::MAX),
            qp_num: qp.number,
            src_qp: qp.attr.dest_qp_num,
            ..Default::default()
        };
        if let Some(imm) = send.imm {
            wc.wc_flags = sys::ibv_wc_flags::IBV_WC_WITH_IMM.0;
            wc.__bindgen_anon_1.imm_data = imm;
        }
        let queue = qp.recv_cq;
        self.complete(queue, Entry { wc, freed: receive.freed, solicited: send.solicited });
    }

    /// Moves a queue pair to ERROR and flushes it. With a shared receive queue, also reports
    /// LAST_WQE_REACHED, if the device does so.
    pub(super) fn fail(&mut self, id: Id) {
        let Some(qp) = self.queue_pairs.get_mut(&id) else { return };
        if qp.state == ERROR {
            return;
        }
        qp.state = ERROR;
        let (context, has_srq, device) = (qp.context, qp.srq.is_some(), qp.device);
        self.flush(id);
        if has_srq
            && self.devices.get(&device).is_some_and(|device| device.spec.reports_last_receive)
            && !self.keep_late_last_receive(context, id)
        {
            self.notify(context, Event::IBV_EVENT_QP_LAST_WQE_REACHED, Subject::QueuePair(id));
        }
    }

    /// Completes everything that is posted to a failed queue pair with the status "flushed".
    pub(super) fn flush(&mut self, id: Id) {
        let Some(qp) = self.queue_pairs.get_mut(&id) else { return };
        let (number, queue) = (qp.number, qp.recv_cq);
        let (sends, receives) = (std::mem::take(&mut qp.sends), std::mem::take(&mut qp.receives));
        for send in &sends {
            self.complete_send(id, send, Status::IBV_WC_WR_FLUSH_ERR);
        }
        for receive in receives {
            let wc = sys::ibv_wc {
                wr_id: receive.wr_id,
                status: Status::IBV_WC_WR_FLUSH_ERR,
                opcode: Opcode::IBV_WC_RECV,
                qp_num: number,
                ..Default::default()
            };
            self.complete(queue, Entry { wc, freed: receive.freed, solicited: false });
        }
    }

    fn peer_of(&self, id: Id) -> Peer {
        let qp = &self.queue_pairs[&id];
        // SAFETY: both members of the union are plain bytes.
        let gid = unsafe { qp.attr.ah_attr.grh.dgid.raw };
        let Some(device) = self.device_at(gid).filter(|device| self.reaches(qp.device, *device))
        else {
            return Peer::Unreachable;
        };
        let number = qp.attr.dest_qp_num;
        match self.by_qp_num.get(&number).and_then(|id| Some((*id, self.queue_pairs.get(id)?))) {
            Some((_, peer)) if peer.device != device => Peer::Unreachable,
            Some((_, peer)) if peer.state == RESET || peer.state == INIT => Peer::NotReady,
            Some((id, peer)) if peer.state != ERROR && peer.attr.dest_qp_num == qp.number => {
                Peer::Ready(id)
            }
            _ => Peer::Unreachable,
        }
    }

    /// Returns the device that has `gid`.
    pub(super) fn device_at(&self, gid: [u8; 16]) -> Option<Id> {
        self.devices
            .values()
            .find(|device| !device.removed && device.gid_index(gid).is_some())
            .map(|d| d.id)
    }

    /// Returns whether packets from one device reach the other device.
    pub(super) fn reaches(&self, from: Id, to: Id) -> bool {
        let alive = |id| self.devices.get(&id).is_some_and(Device::is_alive);
        alive(from) && alive(to) && !self.black_holes.contains(&(from.min(to), from.max(to)))
    }

    fn accept_send(&mut self, id: Id, send: Send, pieces: usize) -> Result<(), Errno> {
        let qp = self.queue_pairs.get_mut(&id).ok_or(Errno::INVAL)?;
        let inline_too_long = matches!(&send.payload, Payload::Inline(_))
            && send.len > u64::from(qp.cap.max_inline_data);
        if (qp.state != RTS && qp.state != ERROR)
            || pieces > qp.cap.max_send_sge as usize
            || inline_too_long
        {
            return Err(Errno::INVAL);
        }
        if self.devices.get(&qp.device).is_none_or(|device| device.removed) {
            return Err(Errno::IO);
        }
        if qp.sends_used >= qp.cap.max_send_wr {
            return Err(Errno::NOMEM);
        }
        qp.sends_used += 1;
        qp.sends.push_back(send);
        if qp.state == ERROR {
            self.flush(id);
        } else {
            self.pending.insert(id);
        }
        Ok(())
    }
}

enum Peer {
    Ready(Id),
    /// The peer exists, but is not ready to receive yet. A device would resend until it is ready.
    NotReady,
    Unreachable,
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut sys::ibv_qp,
    mut wr: *mut sys::ibv_send_wr,
    bad_wr: *mut *mut sys::ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's queue pair is alive; the chain is valid for the call, as is `bad_wr`.
    code(unsafe {
        *bad_wr = wr;
        enter("ibv_post_send", qp, |state, id| {
            let mut result = Ok(());
            while result.is_ok() && !wr.is_null() {
                let pieces = usize::try_from((*wr).num_sge).unwrap_or(usize::MAX);
                result = Send::from_raw(&*wr).and_then(|send| state.accept_send(id, send, pieces));
                if result.is_ok() {
                    wr = (*wr).next;
                }
            }
            *bad_wr = wr;
            if let (Ok(()), Some(errno)) = (&result, state.take_fault(DOORBELL)) {
                return Err(errno); // all requests are queued, and `bad_wr` is null
            }
            state.settle();
            result
        })
    })
}
