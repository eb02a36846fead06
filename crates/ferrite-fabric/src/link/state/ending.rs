//! How a link ends: in good order, by a failure, or because its peer gives no sign of life.

use std::time::{Duration, Instant};

use ferrite_verbs::QueuePair;

use super::{ActiveTransport, LinkEnv, LinkState, Phase, RequestContext, Wakes, outcome};
use crate::error::{Error, ErrorKind};
use crate::fabric::slots::{InFlight, SendQueue};
use crate::link::tcp::TcpPath;
use crate::wire::Control;

/// How far the end of a link's queue pair is.
pub(crate) enum Destroying {
    /// Something is in flight, or a command has it.
    NotYet,
    /// There is none.
    Gone,
    /// To be destroyed.
    Queue(Box<SendQueue<RequestContext>>),
}

/// A peer that was asked for a sign of life and gave none.
pub(crate) struct Silence {
    pub(crate) after: Duration,
    /// Its device did.
    pub(crate) acknowledged: bool,
}

impl LinkState {
    /// Takes nothing new; what was sent is delivered, then the link ends.
    pub(crate) fn close(&mut self) {
        self.close_called |= !self.closing;
        self.closing = true;
    }

    /// Whether the link was told to close since this was asked last.
    pub(crate) fn take_closing(&mut self) -> bool {
        std::mem::take(&mut self.close_called)
    }

    /// Whether we have said goodbye and the peer has taken all before it: it may end as soon as it
    /// has heard that, and its answer be lost.
    pub(crate) fn peer_has_everything(&self) -> bool {
        self.fin_sent && self.acknowledged == self.sent
    }

    /// The peer's connection manager hung up.
    pub(crate) fn on_disconnected(&mut self, wakes: &mut Wakes, what: impl FnOnce() -> Error) {
        // A path that can be replaced is looked for: the peer may have something to say yet.
        if self.fin_ack_sent || self.raw.is_some() || !self.moves && self.peer_has_everything() {
            self.fail(Error::new(ErrorKind::Closed, "the peer has closed the link"), wakes);
        } else if self.failure().is_none() {
            self.fail(what(), wakes);
        }
    }

    /// Ends the path, if that is what failed and the link can go on elsewhere; else the link.
    pub(crate) fn fail(&mut self, error: Error, wakes: &mut Wakes) {
        if !self.lose(&error) {
            self.end(error, wakes);
        }
    }

    /// Ends the link: `error` is what everything under way is told, now or when its completion
    /// comes. The first failure counts.
    pub(crate) fn end(&mut self, error: Error, wakes: &mut Wakes) {
        if self.failure().is_some() {
            return;
        }
        if let Some(qp) = self.queue.qp() {
            let _ = qp.stop(); // a device that is gone has stopped it
        }
        let tickets = &mut self.tickets;
        self.outbox.drain(|ticket, held| {
            wakes.extend(tickets.finish(ticket, outcome(Err(error.clone()), held)));
        });
        self.end_again(&error, wakes);
        self.end_raw();
        self.controls.clear();
        self.binds.clear();
        self.revoking.clear();
        self.to_be_revoked.clear();
        self.phase = Phase::Down(error);
        wakes.append(&mut self.receivers);
        wakes.append(&mut self.wait_for_room);
        wakes.append(&mut self.wait_for_end);
    }

    /// Whether the peer was asked and has not answered in time, by what was taken from the device
    /// so far.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.asked
            .is_some_and(|asked| now.saturating_duration_since(asked) >= self.limits.peer_timeout)
    }

    /// Looks at the clock: asks a silent peer for a sign of life, gives a dead one up. When to look
    /// again, and whether the peer was heard lately.
    ///
    /// # Errors
    /// The peer has not answered.
    pub(crate) fn on_timer(&mut self, now: Instant) -> Result<Option<(Instant, bool)>, Silence> {
        if !matches!(self.phase, Phase::Up) || self.raw.is_some() {
            return Ok(None);
        }
        if self.transport == ActiveTransport::Moving {
            self.last_heard = now;
            return Ok(Some((now + self.limits.peer_timeout, false)));
        }
        if let Some(asked) = self.asked {
            let after = now.saturating_duration_since(asked);
            if after >= self.limits.peer_timeout {
                return Err(Silence { after, acknowledged: self.acknowledged_since });
            }
            return Ok(Some((asked + self.limits.peer_timeout, false)));
        }
        let ask_at = self.last_heard + self.limits.patience.wait(self.is_caller);
        if now < ask_at {
            return Ok(Some((ask_at, true)));
        }
        self.asked = Some(now);
        self.limits.patience.asked();
        self.acknowledged_since = false;
        self.controls.push_back(Control::Ping(self.sent));
        Ok(Some((now + self.limits.peer_timeout, false)))
    }

    /// A command gives the queue pair back. It may be that the link went down meanwhile.
    pub(crate) fn take_back(&mut self, qp: QueuePair) {
        if self.failure().is_some() {
            let _ = qp.stop(); // as `end` would have
        }
        self.queue.take_back(qp);
    }

    /// Whether a command has the queue pair, and the fabric has to wait for it.
    pub(crate) fn is_away(&self) -> bool {
        self.queue.is_away() || self.is_destroying
    }

    /// Where the generations of the next queue pair with the link's number begin.
    pub(crate) fn next_generation(&self) -> u32 {
        if self.device.is_some() { self.queue.next_generation() } else { self.generation }
    }

    /// Whether the fabric is to look at the link: it went down, or nothing of it is in flight any
    /// more, or a grant came back.
    pub(crate) fn wants_attention(&self) -> bool {
        if self.is_away() {
            return false; // when it is back
        }
        let down = self.failure().is_some() && (self.queue.qp().is_some() || self.tcp.is_some());
        down && (!self.announced || self.may_destroy())
            || !self.released.is_empty()
            || !self.steps.is_empty()
            || self.is_to_be_detached() && (!self.is_draining() || self.took_last())
            || !self.flushed.is_empty() && !self.flush_called
            || self.has_left_over()
    }

    /// Whether something was read from the TCP connection that the fabric has to look at.
    pub(crate) fn has_left_over(&self) -> bool {
        self.tcp.as_ref().is_some_and(TcpPath::has_left_over)
    }

    /// Whether requests were flushed and nobody has said why, for the first time.
    pub(crate) fn take_flushed(&mut self) -> bool {
        !self.flushed.is_empty() && !std::mem::replace(&mut self.flush_called, true)
    }

    /// Whether requests were flushed, and it is not known why.
    pub(crate) fn has_flushed(&self) -> bool {
        !self.flushed.is_empty()
    }

    /// The device says that a queue pair of the link has taken its last receive.
    pub(crate) fn on_last_receive(&mut self, qp: u32) {
        if self.is_carried_by(qp) {
            self.queue.on_last_receive();
        }
    }

    /// The device has not said so in time: it never will.
    pub(crate) fn stop_waiting_for_last_receive(&mut self) {
        if self.failure().is_some() || self.is_to_be_detached() {
            self.queue.on_last_receive();
        }
    }

    /// Whether the queue pair takes no more receives. That of a device that is gone takes none.
    pub(crate) fn took_last(&self) -> bool {
        self.queue.took_last() || self.device.as_ref().is_none_or(|device| device.is_gone())
    }

    /// Whether nothing of the queue pair is under way any more: what the device did with it is in
    /// its completion queue.
    pub(crate) fn may_destroy(&self) -> bool {
        self.queue.in_flight() == 0 && self.took_last()
    }

    /// First step of the end: closes the connection, and gives away the queue pair to be destroyed,
    /// if nothing is under way or `by_force`. The caller has reaped the completion queue.
    pub(crate) fn begin_destroy(&mut self, by_force: bool, wakes: &mut Wakes) -> Destroying {
        if self.close_tcp(wakes) {
            self.inbox.drop_partial();
        }
        if self.is_away() {
            return Destroying::NotYet;
        }
        if self.queue.qp().is_none() {
            return Destroying::Gone;
        }
        if !self.may_destroy() && !by_force {
            return Destroying::NotYet;
        }
        self.is_destroying = true;
        Destroying::Queue(Box::new(std::mem::replace(&mut self.queue, SendQueue::none())))
    }

    /// Second step: the queue pair is gone, with what was in flight, or did not go and is back.
    pub(crate) fn end_destroy(
        &mut self,
        env: &LinkEnv<'_>,
        queue: SendQueue<RequestContext>,
        in_flight: Vec<InFlight<RequestContext>>,
        wakes: &mut Wakes,
    ) {
        self.queue = queue;
        self.is_destroying = false;
        let error = self
            .failure()
            .cloned()
            .unwrap_or_else(|| Error::new(ErrorKind::Closed, "the link is gone"));
        env.release(in_flight.len());
        for InFlight { held, request } in in_flight {
            if let Some(ticket) = request.ticket {
                wakes.extend(self.tickets.finish(ticket, outcome(Err(error.clone()), held)));
            }
        }
        if self.queue.qp().is_none() {
            self.inbox.drop_partial();
        }
    }

    /// Destroys the queue pair at once, and closes the connection: the fabric ends.
    pub(crate) fn destroy(&mut self, env: &LinkEnv<'_>, wakes: &mut Wakes) -> bool {
        if self.close_tcp(wakes) {
            self.inbox.drop_partial();
        }
        if self.queue.qp().is_none() {
            return true;
        }
        let error = self
            .failure()
            .cloned()
            .unwrap_or_else(|| Error::new(ErrorKind::Closed, "the link is gone"));
        let tickets = &mut self.tickets;
        let mut entries = 0;
        let destroyed = self.queue.destroy(|InFlight { held, request }| {
            entries += 1;
            if let Some(ticket) = request.ticket {
                wakes.extend(tickets.finish(ticket, outcome(Err(error.clone()), held)));
            }
        });
        env.release(entries);
        if destroyed.is_ok() {
            self.inbox.drop_partial();
        }
        destroyed.is_ok()
    }
}
