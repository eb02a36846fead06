//! Handles expired timers.

use ferrite_verbs::Status;

use super::Poller;
use crate::diagnose::Failure;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::timers::Timer;

impl Poller {
    /// Handles an expired timer.
    pub(super) fn on_timer(&mut self, shared: &Shared, timer: Timer) {
        match timer {
            Timer::Keepalive(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                if link.with(|state, _, _| state.core.is_overdue(self.now)) {
                    // This side may have been too busy to poll, and the answer may already have
                    // arrived.
                    self.reap_all(shared);
                }
                match link.on_timer(self.now) {
                    Ok(Some((next, well))) => {
                        self.timers.add(next, timer);
                        if well {
                            shared.is_well(&link);
                        }
                    }
                    Ok(None) => {}
                    Err((error, failure)) => link.fail(shared.diagnose(&link, error, failure)),
                }
            }
            Timer::Probe(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                let now = self.now;
                let next = link.with_wakes(&mut self.wakes, |state, env, wakes| {
                    let next = state.core.on_probe_timer(now);
                    state.pump(env, wakes);
                    next
                });
                if let Some(next) = next {
                    self.timers.add(next, timer);
                }
            }
            Timer::Close(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                let what = format!(
                    "the peer did not accept all sent data within {} ms of closing",
                    shared.config.close_timeout.as_millis()
                );
                link.fail(Error::new(ErrorKind::Timeout, what));
                self.service_link(shared, name.index);
            }
            Timer::Drain(name) => {
                if let Some(link) = self.link_named(shared, name) {
                    self.expect_missing_receives(shared, &link);
                    self.tear_down(shared, &link, true);
                }
            }
            Timer::LastReceive(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                self.last_receive_timed_out(shared, &link);
            }
            Timer::Leaving(device, number) => self.leaving_timed_out(shared, device, number),
            Timer::Flushed(name) => {
                let Some(link) = self.link_named(shared, name) else { return };
                if !link.with(|state, _, _| state.has_flushed()) {
                    return; // the link has found another path
                }
                // No request of this side failed first. Probably the device refused a request of
                // the peer, which not every device reports. Soft-RoCE also fails queue pairs of
                // correct peers in this way, on a host with too little CPU. So the failure is
                // counted, but the peer is not excluded for it.
                self.peer_was_refused(shared, &link, false);
                let what = format!(
                    "link to {} ({}): the queue pair failed; no cause reported",
                    link.peer_name(),
                    link.transport()
                );
                let error = Error::new(ErrorKind::LinkDown, what);
                link.fail(shared.diagnose(&link, error, Failure::Completion(Status::FLUSHED)));
                self.service_link(shared, name.index);
            }
            Timer::Refill => {
                self.starved = false; // the rest of this pass refills
                self.sockets.retry_starved();
                self.retry_starved_links(shared);
            }
            Timer::Shrink => self.shrink(shared),
            Timer::Migration(name) => self.migration_timed_out(shared, name),
            Timer::Upgrade(name) => self.upgrade_due(shared, name),
            Timer::Redial(name) => self.redial(shared, name),
            Timer::Greeting(id) => self.greeting_timed_out(shared, id),
            Timer::Connect(id) => self.connect_timed_out(shared, id),
            Timer::Admission => self.admit_waiting(shared),
            Timer::Accept(id) => self.sockets.on_ready(id),
            Timer::Listen(number) => self.listen_again(shared, number),
            Timer::Handshake(key) => self.handshake_timed_out(shared, key),
            Timer::Retry(ticket) => self.retry_handshake(shared, ticket),
            Timer::Expiry(region) => self.region_expired(shared, region),
            Timer::Revocation(region) => shared.regions.revocation_due(region, &mut self.wakes),
            Timer::FindDevice(device) => self.find_device(shared, device),
        }
    }
}
