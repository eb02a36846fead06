//! How the queue pair and the connection of a link end.

use super::LinkState;
use crate::device::slots::{InFlight, SendQueue};
use crate::error::{Error, ErrorKind};
use crate::link::core::{RequestContext, Wakes};
use crate::link::tcp::TcpPath;

/// How far the end of a link's queue pair is.
pub(crate) enum Destroying {
    /// Something is in flight, or a command has it.
    NotYet,
    /// There is none.
    Gone,
    /// To be destroyed.
    Queue(Box<SendQueue<RequestContext>>),
}

impl LinkState {
    /// Returns whether a queue pair carries the link.
    pub(crate) fn is_carried_by(&self, number: u32) -> bool {
        self.rdma.queue.is_of(number)
    }

    /// A queue pair took a receive; returns whether it is the link's, or is about to be.
    pub(crate) fn on_taken(&self, qp: u32, receive: u64) -> bool {
        let own = self.is_carried_by(qp).then_some(&self.rdma.queue);
        own.or_else(|| self.next_queue(qp)).map(|queue| queue.on_taken(receive)).is_some()
    }

    /// First step of the way down: gives away the queue pair of a lost path, to be destroyed. The
    /// caller has reaped the completion queue. `None` if there is none to give, or a command has
    /// it.
    pub(crate) fn begin_detach(&mut self) -> Option<SendQueue<RequestContext>> {
        if self.is_away() || !self.core.is_to_be_detached() {
            return None;
        }
        self.rdma.is_destroying = true;
        Some(std::mem::replace(&mut self.rdma.queue, SendQueue::none()))
    }

    /// Second step: the queue pair is gone, with what was in flight. Nothing of it comes, or lands,
    /// any more.
    ///
    /// # Errors
    /// The device did not let go, and the link cannot go on with that memory; or the link has ended
    /// meanwhile.
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

    /// Returns whether a command has the queue pair, so that the fabric has to wait for it.
    pub(crate) fn is_away(&self) -> bool {
        self.rdma.queue.is_away() || self.rdma.is_destroying
    }

    /// Returns where the generations of the next queue pair with the link's number begin.
    pub(crate) fn next_generation(&self) -> u32 {
        match self.rdma.device {
            Some(_) => self.rdma.queue.next_generation(),
            None => self.rdma.generation,
        }
    }

    /// Returns whether the fabric is to look at the link: it went down, or nothing of it is in
    /// flight any more, or a grant came back.
    pub(crate) fn wants_attention(&self) -> bool {
        if self.is_away() {
            return false; // when it is back
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

    /// Returns whether something was read from the connection that the fabric has to look at.
    pub(crate) fn has_left_over(&self) -> bool {
        self.tcp.as_ref().is_some_and(TcpPath::has_left_over)
    }

    /// Returns whether requests were flushed and nobody has said why, for the first time.
    pub(crate) fn take_flushed(&mut self) -> bool {
        self.has_flushed() && !std::mem::replace(&mut self.rdma.flush_called, true)
    }

    /// Returns whether requests were flushed, and it is not known why.
    pub(crate) fn has_flushed(&self) -> bool {
        !self.rdma.flushed.is_empty()
    }

    /// The device says that a queue pair of the link has taken its last receive.
    pub(crate) fn on_last_receive(&mut self, qp: u32) {
        if self.is_carried_by(qp) {
            self.rdma.queue.on_last_receive();
        }
    }

    /// The device has not said so in time: it never will.
    pub(crate) fn stop_waiting_for_last_receive(&mut self) {
        if self.failure().is_some() || self.core.is_to_be_detached() {
            self.rdma.queue.on_last_receive();
        }
    }

    /// Returns whether the queue pair takes no more receives. That of a device that is gone takes
    /// none.
    pub(crate) fn took_last(&self) -> bool {
        self.rdma.queue.took_last()
            || self.rdma.device.as_ref().is_none_or(|device| device.is_gone())
    }

    /// Returns whether nothing of the queue pair is under way any more: what the device did with it
    /// is in its completion queue.
    pub(crate) fn may_destroy(&self) -> bool {
        self.rdma.queue.in_flight() == 0 && self.took_last()
    }

    /// First step of the end: closes the connection, and gives away the queue pair to be destroyed,
    /// if nothing is under way or `by_force`. The caller has reaped the completion queue.
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

    /// Second step: the queue pair is gone, with what was in flight, or did not go and is back.
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

    /// Destroys the queue pair at once, and closes the connection: the fabric ends. Returns whether
    /// the queue pair is gone.
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

    /// Requests that were in flight on a queue pair that is gone get the link's failure.
    fn give_up(&mut self, in_flight: Vec<InFlight<RequestContext>>, wakes: &mut Wakes) {
        self.rdma.release(in_flight.len());
        let error = self.core.failure_or_gone();
        for InFlight { held, request } in in_flight {
            self.core.finish(request, held, Err(error.clone()), wakes);
        }
    }
}
