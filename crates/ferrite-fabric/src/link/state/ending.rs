//! How the queue pair and the connection of a link end.

use super::LinkState;
use crate::device::slots::{InFlight, SendQueue};
use crate::error::{Error, ErrorKind};
use crate::link::core::{RequestContext, Wakes};
use crate::link::tcp::TcpPath;

/// The progress of ending a link's queue pair.
pub(crate) enum Destroying {
    /// Requests are in flight, or a command owns the queue pair.
    NotYet,
    /// There is no queue pair.
    Gone,
    /// The queue pair must be destroyed.
    Queue(Box<SendQueue<RequestContext>>),
}

impl LinkState {
    /// Returns whether the link uses the queue pair with this number.
    pub(crate) fn is_carried_by(&self, number: u32) -> bool {
        self.rdma.queue.is_of(number)
    }

    /// Handles a receive that a queue pair took. Returns whether that queue pair is the link's
    /// current or next one.
    pub(crate) fn on_taken(&self, qp: u32, receive: u64) -> bool {
        let own = self.is_carried_by(qp).then_some(&self.rdma.queue);
        own.or_else(|| self.next_queue(qp)).map(|queue| queue.on_taken(receive)).is_some()
    }

    /// First step of a downgrade: hands over the queue pair of a lost path, to be destroyed. The
    /// caller has reaped the completion queue. Returns `None` if the link has not lost a path, if
    /// the queue pair was destroyed already, or if a command owns it.
    pub(crate) fn begin_detach(&mut self) -> Option<SendQueue<RequestContext>> {
        if self.is_away() || !self.core.is_to_be_detached() {
            return None;
        }
        self.rdma.is_destroying = true;
        Some(std::mem::replace(&mut self.rdma.queue, SendQueue::none()))
    }

    /// Second step of a downgrade: notes that the queue pair was destroyed, with these requests in
    /// flight. No data can arrive over it any more.
    ///
    /// # Errors
    /// The device did not release the queue pair, and may still use the memory of its requests, so
    /// the link cannot continue. Or the link has ended in the meantime.
    pub(crate) fn end_detach(
        &mut self,
        queue: SendQueue<RequestContext>,
        in_flight: Vec<InFlight<RequestContext>>,
        gone: Result<(), Error>,
        wakes: &mut Wakes,
    ) -> Result<(), Error> {
        self.rdma.is_destroying = false;
        if let Err(error) = gone {
            self.rdma.queue = queue;
            return Err(error);
        }
        if !self.core.is_to_be_detached() {
            self.end_destroy(queue, in_flight, wakes);
            return Err(Error::new(ErrorKind::Closed, "the link is gone"));
        }
        self.rdma.release(in_flight.len());
        self.core.on_detached(in_flight);
        self.rdma.forget(&queue);
        Ok(())
    }

    /// Returns whether a command owns the queue pair, so that the fabric must wait for it.
    pub(crate) fn is_away(&self) -> bool {
        self.rdma.queue.is_away() || self.rdma.is_destroying
    }

    /// Returns the first slot generation for the link's next queue pair.
    pub(crate) fn next_generation(&self) -> u32 {
        match self.rdma.device {
            Some(_) => self.rdma.queue.next_generation(),
            None => self.rdma.generation,
        }
    }

    /// Returns whether the fabric must process the link. Reasons are, for example, that the link
    /// went down, that its queue pair can be destroyed, or that a grant was released.
    pub(crate) fn wants_attention(&self) -> bool {
        if self.is_away() {
            return false; // the fabric checks again when the command returns the queue pair
        }
        let has_path = self.rdma.queue.qp().is_some() || self.tcp.is_some();
        let is_down = self.failure().is_some() && has_path;
        is_down && (!self.is_announced || self.may_destroy())
            || self.core.has_released()
            || self.core.has_steps()
            || self.is_starved
            || self.core.is_to_be_detached() && (!self.core.is_draining() || self.took_last())
            || !self.rdma.flushed.is_empty() && !self.rdma.flush_called
            || self.has_left_over()
    }

    /// Returns whether bytes were read from the connection that only the fabric can process.
    pub(crate) fn has_left_over(&self) -> bool {
        self.tcp.as_ref().is_some_and(TcpPath::has_left_over)
    }

    /// Like [`LinkState::has_flushed`], but returns true only once.
    pub(crate) fn take_flushed(&mut self) -> bool {
        self.has_flushed() && !std::mem::replace(&mut self.rdma.flush_called, true)
    }

    /// Returns whether requests were flushed for a reason that is not known yet.
    pub(crate) fn has_flushed(&self) -> bool {
        !self.rdma.flushed.is_empty()
    }

    /// Notes the device's report that the queue pair with the number `qp` has taken its last
    /// receive, if that is the link's current queue pair.
    pub(crate) fn on_last_receive(&mut self, qp: u32) {
        if self.is_carried_by(qp) {
            self.rdma.queue.on_last_receive();
        }
    }

    /// Gives up waiting for the report of the last receive, because it did not come in time. Has no
    /// effect on a queue pair that is still in use.
    pub(crate) fn stop_waiting_for_last_receive(&mut self) {
        if self.failure().is_some() || self.core.is_to_be_detached() {
            self.rdma.queue.on_last_receive();
        }
    }

    /// Returns whether the queue pair takes no more receives. This always holds after the device
    /// was removed.
    pub(crate) fn took_last(&self) -> bool {
        self.rdma.queue.took_last()
            || self.rdma.device.as_ref().is_none_or(|device| device.is_gone())
    }

    /// Returns whether the queue pair can be destroyed: it has no request in flight, and takes no
    /// more receives. Completions of its receives may still be in the completion queue.
    pub(crate) fn may_destroy(&self) -> bool {
        self.rdma.queue.in_flight() == 0 && self.took_last()
    }

    /// First step of the end: closes the connection, and hands over the queue pair to be destroyed,
    /// if [`LinkState::may_destroy`] allows it or `by_force` is set. The caller has reaped the
    /// completion queue.
    pub(crate) fn begin_destroy(&mut self, by_force: bool, wakes: &mut Wakes) -> Destroying {
        if self.close_tcp(wakes) {
            self.core.drop_partial();
        }
        if self.is_away() {
            return Destroying::NotYet;
        }
        if self.rdma.queue.qp().is_none() {
            return Destroying::Gone;
        }
        if !self.may_destroy() && !by_force {
            return Destroying::NotYet;
        }
        self.rdma.is_destroying = true;
        let queue = std::mem::replace(&mut self.rdma.queue, SendQueue::none());
        Destroying::Queue(Box::new(queue))
    }

    /// Second step of the end. Either the queue pair was destroyed with these requests in flight,
    /// or the device refused to destroy it and the queue pair is back in `queue`.
    pub(crate) fn end_destroy(
        &mut self,
        queue: SendQueue<RequestContext>,
        in_flight: Vec<InFlight<RequestContext>>,
        wakes: &mut Wakes,
    ) {
        self.rdma.queue = queue;
        self.rdma.is_destroying = false;
        self.give_up(in_flight, wakes);
        if self.rdma.queue.qp().is_none() {
            self.core.drop_partial();
        }
    }

    /// Destroys the queue pair at once, and closes the connection, because the fabric ends. Returns
    /// whether there is no queue pair any more.
    pub(crate) fn destroy(&mut self, wakes: &mut Wakes) -> bool {
        if self.close_tcp(wakes) {
            self.core.drop_partial();
        }
        if self.rdma.queue.qp().is_none() {
            return true;
        }
        let mut in_flight = Vec::new();
        let is_gone = self.rdma.queue.destroy(|it| in_flight.push(it)).is_ok();
        self.give_up(in_flight, wakes);
        if is_gone {
            self.core.drop_partial();
        }
        is_gone
    }

    /// Fails the requests that were in flight on a destroyed queue pair.
    fn give_up(&mut self, in_flight: Vec<InFlight<RequestContext>>, wakes: &mut Wakes) {
        self.rdma.release(in_flight.len());
        let error = self.core.failure_or_gone();
        for InFlight { held, request } in in_flight {
            self.core.finish(request, held, Err(error.clone()), wakes);
        }
    }
}
