//! Services links that are closing, that are down, or that need a step that only the driver can
//! take. Also registers and forgets links.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_verbs::Access;

use super::Poller;
use crate::device::shared_device::SharedDevice;
use crate::device::slots::{InFlight, SendQueue};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::timers::Timer;
use crate::link::core::RequestContext;
use crate::link::shared::LinkShared;
use crate::link::state::Destroying;
use crate::source::Source;

/// A send queue with the requests that were in flight when it was destroyed.
pub(super) type Destroyed = (SendQueue<RequestContext>, Vec<InFlight<RequestContext>>);

/// How long to wait until the requests of a failed link are flushed. After that, its queue pair is
/// destroyed with requests in flight.
const DRAIN: Duration = Duration::from_secs(2);
/// How long to wait for the cause after requests were flushed. The device's event and the peer's
/// disconnect take some milliseconds, and about a hundred on a busy host.
const FLUSHED: Duration = Duration::from_millis(500);
/// Maximum number of links that one pass services, because servicing a link needs system calls. The
/// next pass services the rest.
const LINKS_PER_PASS: usize = 64;

impl Poller {
    #[cold]
    pub(super) fn service_some(&mut self, shared: &Shared) -> usize {
        let count = self.pending_links.len().min(LINKS_PER_PASS);
        for _ in 0..count {
            let Some(link) = self.pending_links.pop_front() else { break };
            self.service_link(shared, link);
        }
        count
    }

    /// Services a link that asked for it, for example because it is closing or down, or because a
    /// grant was released.
    pub(crate) fn service_link(&mut self, shared: &Shared, index: u32) {
        let Some(link) = self.link(shared, index) else { return };
        let now = self.now;
        let (steps, lost, unread, starved, probe) =
            link.with_wakes(&mut self.wakes, |state, _, _| {
                let starved = std::mem::take(&mut state.is_starved);
                let lost = state.core.is_to_be_detached();
                let probe = state.core.begin_probing(now);
                (state.core.take_steps(), lost, state.has_left_over(), starved, probe)
            });
        if let Some(at) = probe {
            self.timers.add(at, Timer::Probe(link.name));
        }
        if starved {
            self.starved_links.insert(link.name);
            self.refill_later();
        }
        if let Some(socket) = link.route().socket {
            self.sockets.on_credit(socket);
            if unread {
                self.sockets.on_ready(socket);
            }
        }
        if lost {
            self.downgrade_when_drained(shared, &link);
        }
        for step in steps {
            self.migration_step(shared, &link, step);
        }
        let (released, closing, flushed, down) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let down = state.failure().cloned();
            let first =
                down.is_some() && !std::mem::replace(&mut state.is_announced, down.is_some());
            let (closing, flushed) = (state.core.take_close_request(), state.take_flushed());
            (state.core.take_released(), closing, flushed, down.map(|error| (error, first)))
        });
        for grant in released {
            shared.regions.on_released(grant, Some(index), &mut self.wakes);
        }
        let Some((error, first)) = down else {
            if closing {
                self.timers.add(self.now + shared.config.close_timeout, Timer::Close(link.name));
            }
            if flushed {
                self.timers.add(self.now + FLUSHED, Timer::Flushed(link.name));
            }
            return;
        };
        if first {
            link.with_wakes(&mut self.wakes, |state, _, _| state.post_last());
            if error.kind() != ErrorKind::Closed {
                shared.counters.failed_links.fetch_add(1, Ordering::Relaxed);
            }
            shared.regions.on_link_down(index, &mut self.wakes);
            if let Some(key) = link.route().cm_key {
                self.handshakes.hang_up(key);
            }
            self.wait_for_last_receive(&link);
            self.timers.add(self.now + DRAIN, Timer::Drain(link.name));
        }
        self.tear_down(shared, &link, false);
    }

    /// Handles a request of the peer that the device refused, which also ended the link. Counts it
    /// once for each link. Records a strike against the source if `is_certain`, unless the peer had
    /// a grant. Does nothing if this side is closing the link, because its memory may be gone
    /// before the peer knows.
    #[cold]
    pub(crate) fn peer_was_refused(
        &mut self,
        shared: &Shared,
        link: &LinkShared,
        is_certain: bool,
    ) {
        let (first, had_grants) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let first =
                !state.core.is_closing() && !std::mem::replace(&mut state.peer_was_refused, true);
            (first, !state.is_raw() && state.rights() != Access::LOCAL)
        });
        if !first {
            return;
        }
        let errors = shared.counters.remote_access_errors.fetch_add(1, Ordering::Relaxed) + 1;
        // A peer that had a grant may not know yet that the grant was revoked.
        let Some(peer) = link.route().peer.filter(|_| is_certain && !had_grants) else { return };
        if let Some(wait) = self.strikes.record(Source::of(peer), self.now) {
            let wait = wait.as_secs();
            tracing::debug!(
                "{peer} requested memory or an operation that it had no right to; RDMA from its \
                 address is refused for {wait} s; all peers together have sent {errors} such \
                 requests"
            );
        }
    }

    /// Destroys the queue pair of a link that is down and forgets the link, once nothing is in
    /// flight and the queue pair has taken its last receive. With `by_force`, does not wait for
    /// these.
    pub(super) fn tear_down(&mut self, shared: &Shared, link: &Arc<LinkShared>, by_force: bool) {
        let ready = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.failure().is_some() && state.may_destroy()
        });
        if ready || by_force {
            self.reap_all(shared); // destroying would discard these completions
        }
        let destroying =
            link.with_wakes(&mut self.wakes, |state, _, wakes| match state.failure() {
                Some(_) => state.begin_destroy(by_force, wakes),
                None => Destroying::NotYet,
            });
        match destroying {
            Destroying::Gone => self.forget(shared, link),
            Destroying::Queue(queue) => self.destroy(shared, link, *queue),
            // A command owns the queue pair, so the timer has to try again.
            Destroying::NotYet if by_force => {
                self.timers.add(self.now + DRAIN, Timer::Drain(link.name));
            }
            // The driver calls this again when the link needs service, or by force when
            // `Timer::Drain` expires.
            Destroying::NotYet => {}
        }
    }

    /// Destroys the queue pair of a link that is down, then forgets the link.
    fn destroy(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        queue: SendQueue<RequestContext>,
    ) {
        let destroyed = Arc::clone(link);
        self.destroy_queue(shared, link, queue, move |poller, shared, (queue, in_flight), gone| {
            destroyed.with_wakes(&mut poller.wakes, |state, _, wakes| {
                state.end_destroy(queue, in_flight, wakes);
            });
            if gone.is_ok() {
                poller.forget(shared, &destroyed);
            } else {
                // Try again later.
                poller.timers.add(poller.now + DRAIN, Timer::Drain(destroyed.name));
            }
        });
    }

    /// Destroys the queue pair of a link in a command, because that may block. Then calls `then`
    /// with the queue, the requests that were in flight, and whether the queue pair is gone.
    pub(super) fn destroy_queue(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        queue: SendQueue<RequestContext>,
        then: impl FnOnce(&mut Self, &Shared, Destroyed, Result<(), Error>) + Send + 'static,
    ) {
        let work = |(queue, in_flight): &mut Destroyed| Ok(queue.destroy(|it| in_flight.push(it))?);
        self.command(shared, link.source(), (queue, Vec::new()), work, then);
    }

    /// Removes a link whose queue pair is gone from all tables.
    fn forget(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let route = link.route();
        if let Some(device) = &route.device {
            self.forget_qp(device, route.qp_num, link.index);
        }
        self.end_upgrade(link);
        let session = link.with_wakes(&mut self.wakes, |state, _, _| state.core.session());
        self.sessions.remove(&session);
        if let Some(error) =
            link.with_wakes(&mut self.wakes, |state, _, _| state.failure().cloned())
        {
            self.first_upgrade_failed(shared, link, error);
        }
        if let Some(key) = route.cm_key {
            self.remove_handshake(shared, key, link.source());
        }
        if let Some(socket) = route.socket {
            self.sockets.forget(socket);
        }
        self.sockets.stop_waiting_for(link.name);
        shared.links.write().unwrap_or_else(std::sync::PoisonError::into_inner).remove(link.index);
        if let Some(device) = route.device {
            self.retire_if_unused(shared, device.index);
        }
    }

    /// Registers the queue pair of a link, so that completions find the link.
    pub(crate) fn register_qp(&mut self, device: &SharedDevice, number: u32, link: u32) {
        self.by_qp.insert(device.index, number, link);
    }

    /// Unregisters a queue pair that is gone, and replaces the receives that may be lost with it.
    pub(crate) fn forget_qp(&mut self, device: &SharedDevice, number: u32, link: u32) {
        self.by_qp.remove(device.index, number, link);
        self.replace_missing_receives(device, number);
        if let Some(objects) = &mut self.device_objects[device.index] {
            objects.stock.reclaim();
        }
    }

    /// Registers a link and its queue pair, so that completions find the link.
    pub(crate) fn register_link(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let route = link.route();
        if let Some(device) = route.device {
            self.register_qp(&device, route.qp_num, link.index);
        }
        let session = link.with_wakes(&mut self.wakes, |state, _, _| state.core.session());
        if session != 0 {
            self.sessions.insert(session, link.name);
        }
        shared
            .links
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .put(link.index, Arc::clone(link));
    }
}
