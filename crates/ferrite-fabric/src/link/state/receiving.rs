//! The receiving half of a link's state: what frames mean, and what a peer must not do.

use std::time::Instant;

use ferrite_verbs::{Opcode, WorkCompletion};

use super::{
    ActiveTransport, Again, CONTROLS_MAX, LinkState, REVOKED_MAX, RequestContext, Wakes, outcome,
};
use crate::error::{Error, ErrorKind};
use crate::link::outbox::OneSided;
use crate::link::tcp::TcpPath;
use crate::mem::{BufMut, Pool, Purpose};
use crate::wire::{Control, Frame};

impl LinkState {
    /// A receive completed with something of this link's.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub(crate) fn on_received(
        &mut self,
        pool: &Pool,
        wc: &WorkCompletion,
        mut buf: BufMut,
        now: Instant,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        if self.raw.is_some() {
            return self.on_raw_received(wc, buf, wakes);
        }
        let Some(imm) = wc.imm() else { return Err(protocol("a frame without immediate data")) };
        if self.upgrade_queue(wc.qp_num()).is_some() {
            buf.set_len((wc.byte_len() as usize).min(buf.capacity()));
            return self.on_upgrade_frame(&buf);
        }
        if wc.opcode() == Opcode::RECV_WRITE_IMM {
            return self.on_frame(imm, None, now, wakes);
        }
        buf.set_len((wc.byte_len() as usize).min(buf.capacity()));
        if Frame::from_imm(imm).more {
            buf = fitting(pool, buf);
        }
        self.on_frame(imm, Some(buf), now, wakes)
    }

    /// A frame came with its payload, or the notice of a write, without.
    pub(super) fn on_frame(
        &mut self,
        imm: u32,
        buf: Option<BufMut>,
        now: Instant,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        if let Some(error) = self.failure()
            && error.kind() == ErrorKind::Protocol
        {
            return Ok(()); // nothing that follows means anything
        }
        self.last_heard = now;
        self.asked = None;
        let frame = Frame::from_imm(imm);
        if let Some(buf) = buf.as_ref().filter(|_| frame.control) {
            self.acknowledge(frame)?;
            let control = Control::decode(buf).map_err(|error| protocol(&error.to_string()))?;
            return self.on_control(control, wakes);
        }
        self.begin_frame(frame, buf.is_some())?;
        let complete = if let Some(buf) = buf {
            self.stats.recv_bytes += buf.len() as u64;
            let complete = self.inbox.frame(frame.channel, frame.more, buf.freeze());
            let complete = complete.map_err(|violation| protocol(&violation.to_string()))?;
            self.stats.recv_ops += u64::from(complete);
            complete
        } else {
            self.stats.recv_ops += 1;
            self.inbox.notice(imm);
            true
        };
        if complete {
            wakes.append(&mut self.receivers);
        }
        self.count_consumed();
        Ok(())
    }

    /// The peer has consumed frames of ours.
    fn acknowledge(&mut self, frame: Frame) -> Result<(), Error> {
        let newly = frame.consumed.wrapping_sub(self.acknowledged as u16);
        if u64::from(newly) > self.sent - self.acknowledged {
            return Err(protocol("credits for frames that were never sent"));
        }
        self.acknowledged += u64::from(newly);
        if newly > 0 {
            self.let_go();
        }
        Ok(())
    }

    /// Counts a frame that is no control message; the notice of a write says nothing of credits.
    pub(super) fn begin_frame(&mut self, frame: Frame, has_credits: bool) -> Result<(), Error> {
        if has_credits {
            self.acknowledge(frame)?;
        }
        if self.peer_fin {
            return Err(protocol("a frame after the last"));
        }
        self.received += 1;
        if self.received - self.told > u64::from(self.limits.hello.window) {
            return Err(protocol("more frames than it had credits for"));
        }
        Ok(())
    }

    fn on_control(&mut self, control: Control, wakes: &mut Wakes) -> Result<(), Error> {
        if self.failure().is_some() {
            return Ok(()); // there is nobody to answer
        }
        if self.controls.len() + self.revoking.len() >= CONTROLS_MAX {
            return Err(protocol("more questions than answers fit"));
        }
        match control {
            Control::Credit | Control::Pong(_) => {}
            Control::Ping(nonce) => self.controls.push_back(Control::Pong(nonce)),
            Control::Revoke(grant) => {
                if self.revoked.len() >= REVOKED_MAX {
                    self.revoked.pop_first();
                }
                if self.revoked.insert(grant) {
                    let denied = Error::new(ErrorKind::Denied, "the peer took its grant back");
                    for OneSided { ticket, held, .. } in self.outbox.take_using(grant) {
                        if let Some(ticket) = ticket {
                            let denied = outcome(Err(denied.clone()), held);
                            wakes.extend(self.tickets.finish(ticket, denied));
                        }
                    }
                }
                self.revoking.push(grant);
                self.answer_revocations();
            }
            Control::Revoked(grant) => {
                self.released.push(grant);
                self.told_revoked.retain(|told| *told != grant);
                self.tell_revoked();
            }
            Control::Fin => {
                self.peer_fin = true;
                wakes.append(&mut self.receivers);
                wakes.append(&mut self.wait_for_room);
            }
            Control::FinAck if self.fin_sent => {
                let closed = Error::new(ErrorKind::Closed, "the link is closed");
                self.fail(closed, wakes);
            }
            Control::FinAck => return Err(protocol("an answer to a farewell that was not sent")),
        }
        Ok(())
    }

    /// Tells the peer of grants that nothing in flight uses any more.
    pub(super) fn answer_revocations(&mut self) {
        if self.transport != ActiveTransport::Rdma && self.tcp.is_none() || self.lost.is_some() {
            return; // its connection is being read, or there is none: afterwards
        }
        let (queue, tcp, again, controls) =
            (&self.queue, &self.tcp, &self.again, &mut self.controls);
        self.revoking.retain(|grant| {
            // A peer may have a grant of number 0, which is what sends have.
            let uses =
                |request: &RequestContext| request.grant == *grant && request.kind.is_one_sided();
            let used = queue.iter().any(|in_flight| uses(&in_flight.request))
                || again
                    .iter()
                    .any(|again| matches!(again, Again::OneSided { request, .. } if uses(request)))
                || tcp.iter().flat_map(TcpPath::asked).any(|asked| uses(&asked.request));
            if !used {
                controls.push_back(Control::Revoked(*grant));
            }
            used
        });
    }

    pub(crate) fn is_revoked(&self, grant: u64) -> bool {
        self.revoked.contains(&grant)
    }

    pub(super) fn count_consumed(&mut self) {
        let kept = self.inbox.ready_frames() as u64;
        self.consumed = self.consumed.max(self.received.saturating_sub(kept));
    }
}

/// A part of a message may lie here for long: a small one does not keep a large receive.
fn fitting(pool: &Pool, buf: BufMut) -> BufMut {
    const SMALL: usize = 8; // so little of the block that copying it costs nothing
    if buf.len() > buf.capacity() / SMALL {
        return buf;
    }
    match pool.take_uncharged(buf.len(), Purpose::Receive) {
        Ok(mut small) => {
            small.copy_from_slice(&buf);
            small
        }
        Err(_) => buf,
    }
}

pub(super) fn protocol(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the peer broke the protocol: {what}"))
}
