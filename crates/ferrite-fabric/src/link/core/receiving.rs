//! Handling of received frames, and of a peer's violations of the protocol.

use std::time::Instant;

use super::credits::CreditViolation;
use super::{LinkCore, Wakes, outcome};
use crate::error::{Error, ErrorKind};
use crate::link::outbox::OneSided;
use crate::mem::BufMut;
use crate::wire::{Control, Features, Frame};

/// Limit on the control frames that wait to be sent plus the peer's revocations that wait for an
/// answer. A control frame of the peer beyond it is a violation of the protocol.
const CONTROLS_MAX: usize = 1024;

impl LinkCore {
    /// Handles a frame with its payload, or the notice of a write, which has no payload.
    ///
    /// # Errors
    /// The peer violated the protocol.
    pub(crate) fn on_frame(
        &mut self,
        imm: u32,
        buf: Option<BufMut>,
        now: Instant,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        if self.failure().is_some_and(|error| error.kind() == ErrorKind::Protocol) {
            return Ok(()); // later frames have no meaning
        }
        self.liveness.on_heard(now);
        let frame = Frame::from_imm(imm);
        if let Some(buf) = buf.as_ref().filter(|_| frame.control) {
            self.acknowledge(frame)?;
            let control = Control::decode(buf).map_err(|error| protocol(&error.to_string()))?;
            return self.on_control(control, wakes);
        }
        self.begin_frame(frame, buf.is_some())?;
        let is_complete = if let Some(buf) = buf {
            self.stats.recv_bytes += buf.len() as u64;
            let complete = self.inbox.frame(frame.channel, frame.more, buf.freeze());
            complete.map_err(|violation| protocol(&violation.to_string()))?
        } else {
            if !self.uses(Features::WRITE_IMM) {
                return Err(protocol("a write with immediate data, which a hello does not allow"));
            }
            self.inbox.notice(imm);
            true
        };
        if is_complete {
            self.stats.recv_ops += 1;
            wakes.append(&mut self.waiters.message);
        }
        self.count_consumed();
        Ok(())
    }

    /// Handles a frame whose payload the driver has already passed to its reader.
    pub(crate) fn on_read_through(&mut self, imm: u32) -> Result<(), Error> {
        self.begin_frame(Frame::from_imm(imm), true)?;
        self.stats.recv_ops += 1;
        self.count_consumed();
        Ok(())
    }

    /// Handles the peer's report of consumed frames.
    fn acknowledge(&mut self, frame: Frame) -> Result<(), Error> {
        if self.credits.on_acknowledged(frame.consumed)? {
            self.migration.let_go(self.credits.acknowledged());
        }
        Ok(())
    }

    /// Counts a frame that is not a control frame. The notice of a write carries no credits,
    /// because its immediate data belongs to the application.
    fn begin_frame(&mut self, frame: Frame, has_credits: bool) -> Result<(), Error> {
        if has_credits {
            self.acknowledge(frame)?;
        }
        if self.closing.peer_has_closed() {
            return Err(protocol("a data frame after Fin"));
        }
        Ok(self.credits.on_received()?)
    }

    /// Counts a refused write with a notice, which uses a credit like a frame.
    pub(crate) fn on_refused_notice(&mut self) {
        self.credits.on_refused();
        self.count_consumed();
    }

    fn on_control(&mut self, control: Control, wakes: &mut Wakes) -> Result<(), Error> {
        if self.failure().is_some() {
            return Ok(()); // nobody would receive the answer
        }
        if self.outbox.controls.len() + self.grants.waiting() >= CONTROLS_MAX {
            return Err(protocol("too many requests that wait for an answer"));
        }
        match control {
            Control::Credit | Control::Pong(_) => {}
            Control::Ping(nonce) => self.outbox.controls.push_back(Control::Pong(nonce)),
            Control::Revoke(grant) => self.on_revoke(grant, wakes),
            Control::Revoked(grant) => {
                self.grants.on_released(grant);
                while let Some(next) = self.grants.next_revocation() {
                    self.outbox.controls.push_back(next);
                }
            }
            Control::Fin => {
                self.closing.on_peer_fin();
                wakes.append(&mut self.waiters.message);
                wakes.append(&mut self.waiters.room);
            }
            Control::FinAck if self.closing.fin_sent() => {
                self.fail(Error::new(ErrorKind::Closed, "the link is closed"), wakes);
            }
            Control::FinAck => {
                return Err(protocol("FinAck, but no Fin was sent"));
            }
        }
        Ok(())
    }

    /// Handles a revocation by the peer. Operations that have not begun fail; the answer waits for
    /// the others ([`LinkCore::answer_revocations`]).
    fn on_revoke(&mut self, grant: u64, wakes: &mut Wakes) {
        if !self.grants.on_revoked(grant) {
            return;
        }
        let denied = Error::new(ErrorKind::Denied, "the peer has revoked the grant");
        for OneSided { ticket, held, .. } in self.outbox.take_using(grant) {
            if let Some(ticket) = ticket {
                wakes.extend(self.tickets.finish(ticket, outcome(Err(denied.clone()), held)));
            }
        }
    }

    pub(super) fn count_consumed(&mut self) {
        self.credits.on_consumed(self.inbox.ready_frames());
    }
}

impl From<CreditViolation> for Error {
    fn from(violation: CreditViolation) -> Self {
        protocol(&violation.to_string())
    }
}

/// Creates the error for a violation of the protocol.
pub(crate) fn protocol(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the peer broke the protocol: {what}"))
}
