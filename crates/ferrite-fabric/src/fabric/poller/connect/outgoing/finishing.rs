//! The end of an outgoing handshake: its result, another attempt, or the fallback to TCP.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use ferrite_verbs::CmId;

use super::{FIRST_RESOLVE, Outgoing};
use crate::diagnose::{self, Failure, Subject};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::poller::connect::device_of;
use crate::fabric::poller::connect::dialing::Opened;
use crate::fabric::timers::Timer;
use crate::policy::Fallback;
use crate::source::Source;
use crate::wire::HelloError;

impl Poller {
    pub(super) fn retry(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        error: Error,
        wait: Duration,
    ) {
        if self.now + wait >= outgoing.deadline {
            let error = add_causes(shared, &outgoing, error);
            self.finish(shared, *outgoing, Err(error));
            return;
        }
        shared.counters.connect_retries.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if let Some((link, _)) = outgoing.link.take() {
            self.abandon_link(shared, &link, &error);
        }
        shared.commands.discard(Source::of(outgoing.peer), outgoing.id.take());
        outgoing.last = Some(error);
        if wait.is_zero() {
            self.resolve(shared, outgoing);
            return;
        }
        let ticket = self.handshakes.next_retry;
        self.handshakes.next_retry += 1;
        self.handshakes.retrying.insert(ticket, outgoing);
        self.timers.add(self.now + wait, Timer::Retry(ticket));
        self.start_waiting(shared);
    }

    pub(crate) fn retry_handshake(&mut self, shared: &Shared, ticket: u64) {
        if let Some(outgoing) = self.handshakes.retrying.remove(&ticket) {
            self.handshakes.waiting.push_front(outgoing);
        } else {
            // Some handshakes may have reached their deadline before they could start.
            let waiting = std::mem::take(&mut self.handshakes.waiting);
            let (over, waiting): (VecDeque<_>, _) =
                waiting.into_iter().partition(|outgoing| outgoing.is_over(self.now));
            self.handshakes.waiting = waiting;
            over.into_iter().for_each(|outgoing| self.outgoing_timed_out(shared, *outgoing));
        }
        self.start_waiting(shared);
    }

    pub(in super::super) fn outgoing_timed_out(&mut self, shared: &Shared, mut outgoing: Outgoing) {
        let error = outgoing.last.take().unwrap_or_else(|| {
            let what = format!("{} did not answer the handshake in time", outgoing.peer);
            Error::new(ErrorKind::Timeout, what)
        });
        let error = add_causes(shared, &outgoing, error);
        self.finish(shared, outgoing, Err(error));
    }

    pub(super) fn finish(&mut self, shared: &Shared, mut outgoing: Outgoing, opened: Opened) {
        if let Err(error) = &opened
            && outgoing.retries > 0
            && !outgoing.reply.is_canceled()
            && matches!(
                error.kind(),
                ErrorKind::Refused
                    | ErrorKind::Unreachable
                    | ErrorKind::Timeout
                    | ErrorKind::LinkDown
            )
        {
            outgoing.retries -= 1;
            let delay = shared.config.retry_delay;
            outgoing.deadline = self.now + delay + outgoing.timeout;
            outgoing.resolve_timeout = FIRST_RESOLVE;
            self.retry(
                shared,
                Box::new(outgoing),
                error.clone(),
                delay.max(Duration::from_millis(1)),
            );
            return;
        }
        let Outgoing { id, peer, link, reply, tcp_fallback, .. } = outgoing;
        match (&opened, link) {
            (Err(error), Some((link, _))) => self.abandon_link(shared, &link, error),
            (Ok(_), _) => {
                shared.counters.connected.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            _ => {}
        }
        shared.commands.discard(Source::of(peer), id);
        match (opened, tcp_fallback) {
            (Err(error), Some(tcp_fallback)) if !reply.is_canceled() => {
                let fallback = Some(Fallback::new(error));
                self.dial(shared, tcp_fallback.dial(self.now, reply, fallback));
            }
            (opened, _) => {
                if let Err(Ok(link)) = reply.send(opened) {
                    link.close(); // the caller is gone
                }
            }
        }
        self.start_waiting(shared);
    }
}

/// Adds the likely causes if the handshake ended because the peer did not answer or could not be
/// reached.
fn add_causes(shared: &Shared, outgoing: &Outgoing, error: Error) -> Error {
    if ![ErrorKind::Timeout, ErrorKind::Unreachable].contains(&error.kind()) {
        return error;
    }
    // If the handshake has no device, the diagnosis uses the first device. It then gets no local
    // address, because that address could belong to another device.
    let device = outgoing.id.as_ref().and_then(|id| device_of(shared, id).ok());
    let local = device.and_then(|_| outgoing.id.as_ref().and_then(CmId::local_addr));
    let context = device.or(shared.devices.first()).and_then(|device| device.context());
    let Some(context) = context else { return error };
    let (peer, shown) = (Some(outgoing.peer), error.clone());
    let port = outgoing.id.as_ref().and_then(CmId::device).map_or(1, |(_, port)| port);
    // The diagnosis runs in a command, because it may block. Every holder of the error sees the
    // causes once they are found.
    shared.commands.run(Source::of_any(peer), move || {
        let failure = Failure::ConnectTimeout;
        let subject = Subject { context: &context, port, local, peer, baseline: None, failure };
        shown.set_causes(diagnose::causes(&subject));
    });
    error
}

pub(super) fn not_a_ferrite_peer(peer: SocketAddr, error: HelloError) -> Error {
    Error::new(ErrorKind::Protocol, format!("{peer} is not a compatible Ferrite peer: {error}"))
}
