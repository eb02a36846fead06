//! How a link ends: closed in good order, or with its first failure.

use super::{LinkCore, Phase, Waiters, Wakes, outcome};
use crate::error::{Error, ErrorKind};

impl LinkCore {
    /// Requests the end of the link. The link accepts no new messages, and delivers the queued ones
    /// first.
    pub(crate) fn close(&mut self) {
        self.closing.request();
    }

    /// Returns whether this side has begun to close the link.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_requested()
    }

    /// Returns whether a close was requested since the last call.
    pub(crate) fn take_close_request(&mut self) -> bool {
        self.closing.take_request()
    }

    /// Returns whether the peer has consumed everything and may have received our `Fin`. The peer
    /// may then end at once, so its `FinAck` may be lost.
    pub(crate) fn peer_has_everything(&self) -> bool {
        self.closing.fin_sent() && self.credits.is_all_acknowledged()
    }

    /// Returns whether this side has answered the peer's `Fin`.
    pub(crate) fn has_answered_fin(&self) -> bool {
        self.closing.fin_ack_sent()
    }

    /// Ends the path if only the path failed and the link can use another. Otherwise ends the link.
    pub(crate) fn fail(&mut self, error: Error, wakes: &mut Wakes) {
        if !self.lose(&error) {
            self.end(error, wakes);
        }
    }

    /// Ends the link. Queued operations, and those that wait for another path, fail with `error`
    /// now. Requests in flight end when they complete, or when the queue pair is destroyed. Only
    /// the first failure counts.
    pub(crate) fn end(&mut self, error: Error, wakes: &mut Wakes) {
        if self.failure().is_some() {
            return;
        }
        let error = error.into_failure();
        let tickets = &mut self.tickets;
        self.outbox.drain(|ticket, held| {
            wakes.extend(tickets.finish(ticket, outcome(Err(error.clone()), held)));
        });
        for (held, request) in self.migration.end() {
            self.complete(request, held, Err(error.clone()), wakes);
        }
        self.outbox.controls.clear();
        self.grants.end();
        self.phase = Phase::Down(error);
        let Waiters { message, room, end } = &mut self.waiters;
        [message, room, end].into_iter().for_each(|waiting| wakes.append(waiting));
    }

    /// Handles a disconnect by the peer's connection manager.
    pub(crate) fn on_disconnected(&mut self, wakes: &mut Wakes, what: impl FnOnce() -> Error) {
        // Once this side has sent `FinAck`, the peer has nothing more to send. Before that, the
        // peer may still have something to send, so a link that can migrate looks for another path.
        let is_in_order = self.closing.fin_ack_sent()
            || !self.migration.is_possible && self.peer_has_everything();
        if is_in_order {
            self.fail(Error::new(ErrorKind::Closed, "the peer has closed the link"), wakes);
        } else if self.failure().is_none() {
            self.fail(what(), wakes);
        }
        if let Some(lost) = self.lost_mut() {
            lost.has_peer_disconnected = true;
        }
    }
}
