//! Links that this side opens.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEvent, CmEventKind, CmId, ConnectParams, Mtu, QueuePair};

use super::calling::{Opened, OverTcp, Reply};
use super::{Handshake, bring_up, device_of, initialise, params, since};
use crate::diagnose::{self, Failure, Subject};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::device_objects::NewQueuePair;
use crate::fabric::poller::Poller;
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::timers::Timer;
use crate::link::shared::LinkShared;
use crate::policy::{Fallback, Rdma};
use crate::source::Source;
use crate::wire::{Hello, HelloError, Refusal, RefusalCode};

/// The kernel can miss the moment when a neighbour's address becomes known, and then looks again
/// only when its time is over. So it is asked with a short time first, and again with a longer one.
const FIRST_RESOLVE: Duration = Duration::from_millis(250);

/// A handshake that this side began.
pub(crate) struct Outgoing {
    /// `None` while it waits for its turn.
    id: Option<CmId>,
    peer: SocketAddr,
    local: Option<SocketAddr>,
    deadline: Instant,
    /// For the next try at finding the peer's address, and when that began.
    patience: Duration,
    asked: Instant,
    link: Option<(Arc<LinkShared>, ConnectedBy)>,
    reply: Reply,
    /// The way to take when this one fails.
    pub(super) otherwise: Option<OverTcp>,
    /// Why the last try failed, for the case that time runs out.
    last: Option<Error>,
    pub(super) speaks: Speaks,
    /// How long each try may take, and how many more there may be.
    timeout: Duration,
    pub(super) retries: u32,
}

/// What the peer is expected to speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaks {
    Ferrite,
    /// Another protocol: nothing of ours is said.
    Other,
    /// What its answer says.
    Either,
}

/// What was agreed when the request was sent.
#[derive(Clone, Copy)]
struct ConnectedBy {
    reads_in: u8,
    reads_out: u8,
}

impl Outgoing {
    /// By RDMA alone, unless it is told otherwise.
    pub(super) fn new(
        peer: SocketAddr,
        local: Option<SocketAddr>,
        now: Instant,
        timeout: Duration,
        reply: Reply,
    ) -> Self {
        Self {
            id: None,
            peer,
            local,
            deadline: now + timeout,
            patience: FIRST_RESOLVE,
            asked: now,
            link: None,
            reply,
            otherwise: None,
            last: None,
            speaks: Speaks::Ferrite,
            timeout,
            retries: 0,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether nobody waits any more, or not longer.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.deadline || self.reply.is_canceled()
    }
}

impl Poller {
    /// Begins handshakes that wait, as many as may be under way.
    pub(super) fn start_waiting(&mut self, shared: &Shared) {
        while self.handshakes.outgoing < shared.config.max_half_open {
            let Some(outgoing) = self.handshakes.waiting.pop_front() else { return };
            if outgoing.is_over(self.now) {
                self.outgoing_timed_out(shared, *outgoing);
            } else {
                self.resolve(shared, outgoing);
            }
        }
        // Those that wait longer than they may are told by the clock.
        if let Some(next) = self.handshakes.waiting.front() {
            self.timers.add(next.deadline, Timer::Retry(u64::MAX));
        }
    }

    /// First step, with a new identifier.
    fn resolve(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>) {
        let patience = outgoing.patience.min(since(outgoing.deadline, self.now));
        outgoing.asked = self.now;
        let id = self.cm(shared).and_then(|channel| Ok(channel.create_id()?));
        match id {
            Ok(id) => {
                self.timers.add(outgoing.deadline, Timer::Handshake(id.key()));
                let (local, peer) = (outgoing.local, outgoing.peer);
                self.ask(
                    shared,
                    outgoing,
                    id,
                    move |id| Ok(id.resolve_address(local, peer, patience)?),
                    Self::asked,
                );
            }
            Err(error) => self.finish(shared, *outgoing, Err(error)),
        }
    }

    /// Has `work` done with the identifier where it may wait, then goes on.
    fn ask<T: Send + 'static>(
        &mut self,
        shared: &Shared,
        outgoing: Box<Outgoing>,
        id: CmId,
        work: impl FnOnce(&CmId) -> Result<T, Error> + Send + 'static,
        then: impl FnOnce(&mut Self, &Shared, Box<Outgoing>, Result<T, Error>) + Send + 'static,
    ) {
        let work = move |id: &CmId, (): &mut ()| work(id);
        self.ask_with(
            shared,
            outgoing,
            (id, ()),
            work,
            move |poller, shared, outgoing, (), result| {
                then(poller, shared, outgoing, result);
            },
        );
    }

    /// The same with something else that the command owns meanwhile.
    fn ask_with<O: Send + 'static, T: Send + 'static>(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        (id, own): (CmId, O),
        work: impl FnOnce(&CmId, &mut O) -> Result<T, Error> + Send + 'static,
        then: impl FnOnce(&mut Self, &Shared, Box<Outgoing>, O, Result<T, Error>) + Send + 'static,
    ) {
        self.handshakes.command(id.key(), false);
        let source = Source::of(outgoing.peer);
        let work = move |(id, own): &mut (CmId, O)| work(id, own);
        self.command(shared, source, (id, own), work, move |poller, shared, (id, own), result| {
            outgoing.id = Some(id);
            then(poller, shared, outgoing, own, result);
        });
    }

    /// Something was asked of the connection manager: waits for its answer.
    fn asked(&mut self, shared: &Shared, outgoing: Box<Outgoing>, asked: Result<(), Error>) {
        let Some(key) = outgoing.id.as_ref().map(CmId::key) else { return };
        match asked {
            Ok(()) if outgoing.is_over(self.now) => {
                self.resume(shared, key, None);
                self.outgoing_timed_out(shared, *outgoing);
            }
            Ok(()) => self.resume(shared, key, Some(Handshake::Outgoing(outgoing))),
            Err(error) => {
                self.resume(shared, key, None);
                self.finish(shared, *outgoing, Err(error));
            }
        }
    }

    pub(super) fn on_outgoing_event(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        event: CmEvent,
    ) {
        if outgoing.is_over(self.now) {
            self.outgoing_timed_out(shared, *outgoing);
            return;
        }
        match event.kind {
            CmEventKind::ADDRESS_ERROR | CmEventKind::ROUTE_ERROR => {
                // Whatever else it says (no device, no route), it would say again.
                let timed_out = event.status.abs() == rustix::io::Errno::TIMEDOUT.raw_os_error();
                let error = Error::from(event.into_error(outgoing.peer));
                if timed_out {
                    // At once, unless it did not take its time.
                    let rest = outgoing.patience.saturating_sub(since(self.now, outgoing.asked));
                    outgoing.patience = outgoing.patience.saturating_mul(2);
                    self.try_again(shared, outgoing, error, rest);
                } else {
                    self.finish(shared, *outgoing, Err(error));
                }
            }
            CmEventKind::UNREACHABLE | CmEventKind::CONNECT_ERROR => {
                let error = Error::from(event.into_error(outgoing.peer));
                self.try_again(shared, outgoing, error, Duration::from_millis(50));
            }
            CmEventKind::REJECTED => match Refusal::decode(&event.private_data) {
                Some(refusal) => {
                    let wait = Duration::from_millis(refusal.retry_after_ms.into());
                    let again = refusal.code == RefusalCode::BUSY;
                    let error = Error::refused(&outgoing.peer.to_string(), refusal);
                    if again {
                        self.try_again(shared, outgoing, error, wait.max(Duration::from_millis(1)));
                    } else {
                        self.finish(shared, *outgoing, Err(error));
                    }
                }
                None => {
                    let error = Error::from(event.into_error(outgoing.peer));
                    self.finish(shared, *outgoing, Err(error));
                }
            },
            CmEventKind::ADDRESS_RESOLVED
            | CmEventKind::ROUTE_RESOLVED
            | CmEventKind::CONNECT_RESPONSE => match outgoing.id.take() {
                Some(id) => self.step(shared, outgoing, id, &event),
                None => {
                    let error = Error::new(ErrorKind::System, "no identifier");
                    self.finish(shared, *outgoing, Err(error));
                }
            },
            _ => {
                let error = Error::from(event.into_error(outgoing.peer));
                self.finish(shared, *outgoing, Err(error));
            }
        }
    }

    /// The next step.
    fn step(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>, id: CmId, event: &CmEvent) {
        match event.kind {
            CmEventKind::ADDRESS_RESOLVED => {
                // That it could not be found before is over.
                outgoing.last =
                    outgoing.last.take().filter(|last| last.kind() != ErrorKind::Unreachable);
                let timeout = since(outgoing.deadline, self.now);
                self.ask(
                    shared,
                    outgoing,
                    id,
                    move |id| Ok(id.resolve_route(timeout)?),
                    Self::asked,
                );
            }
            CmEventKind::ROUTE_RESOLVED => self.make_outgoing(shared, outgoing, id),
            _ => self.answered(shared, outgoing, id, event),
        }
    }

    /// The way is known: a queue pair, then the request.
    fn make_outgoing(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>, id: CmId) {
        let begun = device_of(shared, &id).cloned();
        let begun = begun.and_then(|device| Ok((self.begin_making(shared, &device)?, device)));
        let (builder, device) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                outgoing.id = Some(id);
                return self.finish(shared, *outgoing, Err(error));
            }
        };
        let ack_timeout = shared.config.ack_timeout;
        let work = move |id: &CmId| {
            let _ = id.set_ack_timeout(ack_timeout); // kernels before 5.1 have none
            let made = builder.build()?;
            initialise(id, &made.qp)?;
            Ok(made)
        };
        self.ask(shared, outgoing, id, work, move |poller, shared, outgoing, made| {
            poller.request(shared, outgoing, &device, made);
        });
    }

    /// Asks the peer.
    fn request(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        device: &Arc<SharedDevice>,
        made: Result<NewQueuePair, Error>,
    ) {
        let moves = outgoing.otherwise.as_ref().is_some_and(|tcp| tcp.policy == Rdma::Prefer);
        let linked = match made {
            Ok(made) => self.make_link(shared, device, made, Some(outgoing.peer), moves),
            Err(error) => {
                self.end_making(shared, device);
                Err(error)
            }
        };
        let (link, hello) = match linked {
            Ok(linked) => linked,
            Err(error) => return self.asked(shared, outgoing, Err(error)),
        };
        let speaks = outgoing.speaks;
        link.with_wakes(&mut self.wakes, |state, _, _| {
            state.is_caller = true;
            if speaks == Speaks::Other {
                state.make_raw();
            }
        });
        link.set_tls(outgoing.otherwise.as_ref().and_then(|tcp| tcp.tls.clone()));
        let params = params(shared, device, &link, &[]);
        let by = ConnectedBy { reads_in: params.reads_in, reads_out: params.reads_out };
        outgoing.link = Some((link, by));
        let Some(id) = outgoing.id.take() else { return };
        let work = move |id: &CmId| {
            let encoded = hello.encode();
            let private_data = if speaks == Speaks::Other { &[] } else { &encoded[..] };
            Ok(id.connect(&ConnectParams { private_data, ..params })?)
        };
        self.ask(shared, outgoing, id, work, Self::asked);
    }

    /// The peer has accepted: brings the queue pair up and tells it so.
    fn answered(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        id: CmId,
        event: &CmEvent,
    ) {
        let heard = self.heard(&outgoing, event);
        let (link, by, hello, qp) = match heard {
            Ok(heard) => heard,
            Err(error) => {
                outgoing.id = Some(id);
                return self.finish(shared, *outgoing, Err(error));
            }
        };
        let peer = outgoing.peer;
        let rights = link.with_wakes(&mut self.wakes, |state, _, _| state.rights());
        let work = move |id: &CmId, qp: &mut QueuePair| {
            let up = bring_up(id, qp, rights, (by.reads_in, by.reads_out));
            let up = up.and_then(|mtu| id.establish().map(|()| mtu).map_err(Error::from));
            up.map_err(|error| hung_up(peer, error))
        };
        self.ask_with(shared, outgoing, (id, qp), work, move |poller, shared, outgoing, qp, up| {
            link.with_wakes(&mut poller.wakes, |state, _, _| state.take_back(qp));
            poller.is_up(shared, outgoing, &link, hello, up);
        });
    }

    /// What the peer's answer says, and the queue pair to be brought up.
    fn heard(
        &mut self,
        outgoing: &Outgoing,
        event: &CmEvent,
    ) -> Result<(Arc<LinkShared>, ConnectedBy, Hello, QueuePair), Error> {
        let Some((link, by)) = outgoing.link.clone() else {
            return Err(Error::new(ErrorKind::System, "a response to nothing"));
        };
        let ours = link.with_wakes(&mut self.wakes, |state, _, _| *state.peer());
        let hello = match (outgoing.speaks, Hello::decode(&event.private_data)) {
            (Speaks::Other, _) => ours,
            (_, Ok(hello)) => hello,
            // It took the connection and has nothing to say of itself.
            (Speaks::Either, Err(HelloError::ForeignPeer | HelloError::Short { .. })) => {
                link.with_wakes(&mut self.wakes, |state, _, _| state.make_raw());
                ours
            }
            (_, Err(error)) => return Err(not_ours(outgoing.peer, error)),
        };
        // Before the peer hears that it may send.
        let qp = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.set_peer(hello);
            state.queue.lend()
        });
        let qp = qp.ok_or_else(|| Error::new(ErrorKind::Closed, "the link is gone"))?;
        Ok((link, by, hello, qp))
    }

    /// The queue pair is up, and the peer knows, or not.
    fn is_up(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        link: &Arc<LinkShared>,
        hello: Hello,
        up: Result<Option<Mtu>, Error>,
    ) {
        let up = up.and_then(|mtu| {
            match link.with_wakes(&mut self.wakes, |state, _, _| state.failure().cloned()) {
                Some(error) => Err(error), // meanwhile
                None => Ok(mtu),
            }
        });
        let mtu = match up {
            Ok(mtu) if !outgoing.is_over(self.now) => mtu,
            // which finds that nobody waits any more
            Ok(_) => return self.asked(shared, outgoing, Ok(())),
            Err(error) => return self.asked(shared, outgoing, Err(error)),
        };
        let Some(id) = outgoing.id.take() else { return };
        let key = id.key();
        let meanwhile = self.handshakes.take(key);
        self.establish(shared, id, link, hello, mtu);
        outgoing.link = None;
        self.finish(shared, *outgoing, Ok(Arc::clone(link)));
        if let Some(Handshake::Commanded { events, .. }) = meanwhile {
            events.into_iter().for_each(|event| self.on_cm_event(shared, event));
        }
    }

    fn try_again(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        error: Error,
        wait: Duration,
    ) {
        if self.now + wait >= outgoing.deadline {
            let error = explain(shared, &outgoing, error);
            self.finish(shared, *outgoing, Err(error));
            return;
        }
        shared.counters.connect_retries.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if let Some((link, _)) = outgoing.link.take() {
            self.unmake_link(shared, &link, &error);
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
            // Their time may be over before their turn has come.
            let waiting = std::mem::take(&mut self.handshakes.waiting);
            let (over, waiting): (VecDeque<_>, _) =
                waiting.into_iter().partition(|outgoing| outgoing.is_over(self.now));
            self.handshakes.waiting = waiting;
            over.into_iter().for_each(|outgoing| self.outgoing_timed_out(shared, *outgoing));
        }
        self.start_waiting(shared);
    }

    pub(super) fn outgoing_timed_out(&mut self, shared: &Shared, mut outgoing: Outgoing) {
        let error = outgoing.last.take().unwrap_or_else(|| {
            let what = format!("{} did not answer the handshake in time", outgoing.peer);
            Error::new(ErrorKind::Timeout, what)
        });
        let error = explain(shared, &outgoing, error);
        self.finish(shared, outgoing, Err(error));
    }

    fn finish(&mut self, shared: &Shared, mut outgoing: Outgoing, opened: Opened) {
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
            outgoing.patience = FIRST_RESOLVE;
            self.try_again(
                shared,
                Box::new(outgoing),
                error.clone(),
                delay.max(Duration::from_millis(1)),
            );
            return;
        }
        let Outgoing { id, peer, link, reply, otherwise, .. } = outgoing;
        match (&opened, link) {
            (Err(error), Some((link, _))) => self.unmake_link(shared, &link, error),
            (Ok(_), _) => {
                shared.counters.connected.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            _ => {}
        }
        shared.commands.discard(Source::of(peer), id);
        match (opened, otherwise) {
            (Err(error), Some(otherwise)) if !reply.is_canceled() => {
                let fallback = Some(Fallback::new(error));
                self.dial(shared, otherwise.dial(self.now, reply, fallback));
            }
            (opened, _) => {
                if let Err(Ok(link)) = reply.send(opened) {
                    link.close(); // nobody wanted it any more
                }
            }
        }
        self.start_waiting(shared);
    }
}

/// Adds the likely causes of silence, if that is what the handshake ended in.
fn explain(shared: &Shared, outgoing: &Outgoing, error: Error) -> Error {
    if ![ErrorKind::Timeout, ErrorKind::Unreachable].contains(&error.kind()) {
        return error;
    }
    // Without a device the address says which; the diagnosis must not look at another.
    let device = outgoing.id.as_ref().and_then(|id| device_of(shared, id).ok());
    let local = device.and_then(|_| outgoing.id.as_ref().and_then(CmId::local_addr));
    let context = device.or(shared.devices.first()).and_then(|device| device.context());
    let Some(context) = context else { return error };
    let (peer, told) = (Some(outgoing.peer), error.clone());
    let port = outgoing.id.as_ref().and_then(CmId::device).map_or(1, |(_, port)| port);
    // Where it may wait: who has the error sees them when they are found.
    shared.commands.run(Source::of_any(peer), move || {
        let failure = Failure::ConnectTimeout;
        let subject = Subject { context: &context, port, local, peer, baseline: None, failure };
        told.set_causes(diagnose::causes(&subject));
    });
    error
}

/// A peer that went after it had answered makes the next steps wrong: that is nobody's mistake
/// here.
fn hung_up(peer: SocketAddr, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Misuse => Error::new(
            ErrorKind::LinkDown,
            format!("{peer} hung up during the handshake ({error})"),
        ),
        _ => error,
    }
}

fn not_ours(peer: SocketAddr, error: HelloError) -> Error {
    Error::new(ErrorKind::Protocol, format!("{peer} is not a Ferrite peer of our version: {error}"))
}
