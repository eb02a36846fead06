//! Outgoing links: handshakes that this side starts by RDMA CM.

mod finishing;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEvent, CmEventKind, CmId, ConnectParams, Mtu, QueuePair};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use self::finishing::not_a_ferrite_peer;
use super::dialing::{OverTcp, Reply};
use super::rdma_link::{Connection, bring_up, initialise, params, port_mtu};
use super::{Handshake, device_of, duration_between};
use crate::device::device_objects::NewQueuePair;
use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::shared::LinkShared;
use crate::source::Source;
use crate::wire::{Hello, HelloError, Refusal, RefusalCode};

/// The timeout of the first attempt to resolve the peer's address. The kernel can miss the moment
/// when a neighbour's address becomes known, and then checks again only when the timeout expires.
/// So the first timeout is short, and each later one is longer.
const FIRST_RESOLVE: Duration = Duration::from_millis(250);

/// A handshake that this side started.
pub(crate) struct Outgoing {
    /// `None` while the handshake waits to start.
    id: Option<CmId>,
    peer: SocketAddr,
    local: Option<SocketAddr>,
    deadline: Instant,
    /// The timeout for the next attempt to resolve the peer's address, and the start of the last
    /// attempt.
    resolve_timeout: Duration,
    resolve_started: Instant,
    link: Option<(Arc<LinkShared>, ConnectedBy)>,
    reply: Reply,
    /// How to connect over TCP if RDMA fails; `None` if TCP must not be used.
    pub(crate) tcp_fallback: Option<OverTcp>,
    /// Whether the link may migrate to TCP later.
    pub(crate) may_migrate: bool,
    /// TLS for a migration to TCP.
    pub(crate) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    /// Why the last attempt failed. The caller gets this error if the deadline passes.
    last: Option<Error>,
    pub(crate) protocol: PeerProtocol,
    /// The timeout of each attempt, and how many more there may be.
    timeout: Duration,
    pub(crate) retries: u32,
}

/// The protocol that the peer is expected to speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerProtocol {
    Ferrite,
    /// Another protocol. No hello is sent.
    Other,
    /// Unknown. The peer's response decides.
    Unknown,
}

/// The parameters of the request, and the device's RNR timer.
#[derive(Clone, Copy)]
struct ConnectedBy {
    reads_in: u8,
    reads_out: u8,
    rnr_timer: u8,
}

impl Outgoing {
    /// Creates a handshake over RDMA only; the caller may add a fallback.
    pub(crate) fn new(
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
            resolve_timeout: FIRST_RESOLVE,
            resolve_started: now,
            link: None,
            reply,
            tcp_fallback: None,
            may_migrate: false,
            tls: None,
            last: None,
            protocol: PeerProtocol::Ferrite,
            timeout,
            retries: 0,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns whether the caller has stopped waiting, or the deadline has passed.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.deadline || self.reply.is_canceled()
    }
}

impl Poller {
    /// Starts a handshake, or queues it if too many are in progress.
    pub(crate) fn call(&mut self, shared: &Shared, outgoing: Outgoing) {
        self.handshakes.waiting.push_back(Box::new(outgoing));
        self.start_waiting(shared);
    }

    /// Starts waiting handshakes, up to the maximum.
    pub(super) fn start_waiting(&mut self, shared: &Shared) {
        while self.handshakes.outgoing < shared.config.max_half_open {
            let Some(outgoing) = self.handshakes.waiting.pop_front() else { return };
            if outgoing.is_over(self.now) {
                self.outgoing_timed_out(shared, *outgoing);
            } else {
                self.resolve(shared, outgoing);
            }
        }
        // This timer ends the handshakes that wait too long.
        if let Some(next) = self.handshakes.waiting.front() {
            self.timers.add(next.deadline, Timer::Retry(u64::MAX));
        }
    }

    /// First step: resolves the address, with a new identifier.
    fn resolve(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>) {
        let resolve_timeout =
            outgoing.resolve_timeout.min(duration_between(outgoing.deadline, self.now));
        outgoing.resolve_started = self.now;
        let id = self.cm(shared).and_then(|channel| Ok(channel.create_id()?));
        match id {
            Ok(id) => {
                self.timers.add(outgoing.deadline, Timer::Handshake(id.key()));
                let (local, peer) = (outgoing.local, outgoing.peer);
                self.run_on_id(
                    shared,
                    outgoing,
                    id,
                    move |id| Ok(id.resolve_address(local, peer, resolve_timeout)?),
                    Self::wait_for_event,
                );
            }
            Err(error) => self.finish(shared, *outgoing, Err(error)),
        }
    }

    /// Runs `work` on the identifier in a command, because `work` may block. Then continues with
    /// `then`.
    fn run_on_id<T: Send + 'static>(
        &mut self,
        shared: &Shared,
        outgoing: Box<Outgoing>,
        id: CmId,
        work: impl FnOnce(&CmId) -> Result<T, Error> + Send + 'static,
        then: impl FnOnce(&mut Self, &Shared, Box<Outgoing>, Result<T, Error>) + Send + 'static,
    ) {
        let work = move |id: &CmId, (): &mut ()| work(id);
        self.run_on_id_with(
            shared,
            outgoing,
            (id, ()),
            work,
            move |poller, shared, outgoing, (), result| {
                then(poller, shared, outgoing, result);
            },
        );
    }

    /// Like [`Poller::run_on_id`], but the command also owns `own` meanwhile.
    fn run_on_id_with<O: Send + 'static, T: Send + 'static>(
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

    /// Waits for the next event of the connection manager, if the call that causes the event has
    /// succeeded.
    fn wait_for_event(
        &mut self,
        shared: &Shared,
        outgoing: Box<Outgoing>,
        called: Result<(), Error>,
    ) {
        let Some(key) = outgoing.id.as_ref().map(CmId::key) else { return };
        match called {
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
                // Only a timeout is retried. Any other error (no device, no route) would occur
                // again.
                let timed_out = event.status.abs() == rustix::io::Errno::TIMEDOUT.raw_os_error();
                let error = Error::from(event.into_error(outgoing.peer));
                if timed_out {
                    // Retry at once, unless the attempt ended before its timeout.
                    let rest = outgoing
                        .resolve_timeout
                        .saturating_sub(duration_between(self.now, outgoing.resolve_started));
                    outgoing.resolve_timeout = outgoing.resolve_timeout.saturating_mul(2);
                    self.retry(shared, outgoing, error, rest);
                } else {
                    self.finish(shared, *outgoing, Err(error));
                }
            }
            CmEventKind::UNREACHABLE | CmEventKind::CONNECT_ERROR => {
                let error = Error::from(event.into_error(outgoing.peer));
                self.retry(shared, outgoing, error, Duration::from_millis(50));
            }
            CmEventKind::REJECTED => match Refusal::decode(&event.private_data) {
                Some(refusal) => {
                    let wait = Duration::from_millis(refusal.retry_after_ms.into());
                    let again = refusal.code == RefusalCode::BUSY;
                    let error = Error::refused(&outgoing.peer.to_string(), refusal);
                    if again {
                        self.retry(shared, outgoing, error, wait.max(Duration::from_millis(1)));
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
                    let error = Error::new(ErrorKind::System, "the handshake has no CM identifier");
                    self.finish(shared, *outgoing, Err(error));
                }
            },
            _ => {
                let error = Error::from(event.into_error(outgoing.peer));
                self.finish(shared, *outgoing, Err(error));
            }
        }
    }

    /// Takes the next step of a handshake.
    fn step(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>, id: CmId, event: &CmEvent) {
        match event.kind {
            CmEventKind::ADDRESS_RESOLVED => {
                // An earlier failure to resolve the address no longer matters.
                outgoing.last =
                    outgoing.last.take().filter(|last| last.kind() != ErrorKind::Unreachable);
                let timeout = duration_between(outgoing.deadline, self.now);
                self.run_on_id(
                    shared,
                    outgoing,
                    id,
                    move |id| Ok(id.resolve_route(timeout)?),
                    Self::wait_for_event,
                );
            }
            CmEventKind::ROUTE_RESOLVED => self.create_outgoing_queue_pair(shared, outgoing, id),
            _ => self.on_response(shared, outgoing, id, event),
        }
    }

    /// Creates the queue pair when the route is known, and then sends the request.
    fn create_outgoing_queue_pair(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        id: CmId,
    ) {
        let begun = device_of(shared, &id).cloned();
        let begun = begun.and_then(|device| Ok((self.begin_queue_pair(shared, &device)?, device)));
        let (builder, device) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                outgoing.id = Some(id);
                return self.finish(shared, *outgoing, Err(error));
            }
        };
        let ack_timeout = shared.config.ack_timeout;
        let work = move |id: &CmId| {
            let _ = id.set_ack_timeout(ack_timeout); // kernels before 5.1 do not support it
            let made = builder.build()?;
            initialise(id, &made.qp)?;
            Ok(made)
        };
        self.run_on_id(shared, outgoing, id, work, move |poller, shared, outgoing, made| {
            poller.send_request(shared, outgoing, &device, made);
        });
    }

    /// Creates the link and sends the request to the peer.
    fn send_request(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        device: &Arc<SharedDevice>,
        made: Result<NewQueuePair, Error>,
    ) {
        let moves = outgoing.may_migrate;
        let linked = match made {
            Ok(made) => self.create_link(shared, device, made, Some(outgoing.peer), moves),
            Err(error) => {
                self.end_queue_pair(shared, device);
                Err(error)
            }
        };
        let (link, hello) = match linked {
            Ok(linked) => linked,
            Err(error) => return self.wait_for_event(shared, outgoing, Err(error)),
        };
        let protocol = outgoing.protocol;
        link.with_wakes(&mut self.wakes, |state, _, _| {
            state.core.set_caller(true);
            if protocol == PeerProtocol::Other {
                state.make_raw();
            }
        });
        link.set_tls(outgoing.tls.clone());
        let params = params(shared, device, &link, &[]);
        let ConnectParams { reads_in, reads_out, .. } = params;
        let by = ConnectedBy { reads_in, reads_out, rnr_timer: device.quirks().rnr_timer };
        outgoing.link = Some((link, by));
        let Some(id) = outgoing.id.take() else { return };
        let context = device.context();
        let work = move |id: &CmId| {
            let mtu = context.as_ref().and_then(|context| port_mtu(id, context).ok());
            let encoded = Hello { mtu: mtu.map_or(0, Mtu::code), ..hello }.encode();
            let private_data = if protocol == PeerProtocol::Other { &[] } else { &encoded[..] };
            Ok(id.connect(&ConnectParams { private_data, ..params })?)
        };
        self.run_on_id(shared, outgoing, id, work, Self::wait_for_event);
    }

    /// Handles the peer's response: connects the queue pair and confirms.
    fn on_response(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        id: CmId,
        event: &CmEvent,
    ) {
        let response = self.read_response(&outgoing, event);
        let (link, by, hello, qp) = match response {
            Ok(response) => response,
            Err(error) => {
                outgoing.id = Some(id);
                return self.finish(shared, *outgoing, Err(error));
            }
        };
        let peer = outgoing.peer;
        let (rights, is_raw) =
            link.with_wakes(&mut self.wakes, |state, _, _| (state.rights(), state.is_raw()));
        let with = Connection {
            rights,
            reads_in: by.reads_in,
            reads_out: by.reads_out,
            ack_timeout: shared.config.ack_timeout,
            rnr_timer: by.rnr_timer,
            peer_mtu: (!is_raw).then_some(hello.mtu),
        };
        let work = move |id: &CmId, qp: &mut QueuePair| {
            let up = bring_up(id, qp, with);
            let up = up.and_then(|mtu| id.establish().map(|()| mtu).map_err(Error::from));
            up.map_err(|error| as_disconnect(peer, error))
        };
        self.run_on_id_with(
            shared,
            outgoing,
            (id, qp),
            work,
            move |poller, shared, outgoing, qp, up| {
                link.with_wakes(&mut poller.wakes, |state, _, _| state.rdma.take_back(qp));
                poller.open_link(shared, outgoing, &link, hello, up);
            },
        );
    }

    /// Evaluates the peer's response. Also returns the queue pair that must be connected.
    fn read_response(
        &mut self,
        outgoing: &Outgoing,
        event: &CmEvent,
    ) -> Result<(Arc<LinkShared>, ConnectedBy, Hello, QueuePair), Error> {
        let Some((link, by)) = outgoing.link.clone() else {
            return Err(Error::new(
                ErrorKind::System,
                "the peer answered a request that was never sent",
            ));
        };
        let ours = link.with_wakes(&mut self.wakes, |state, _, _| *state.core.peer());
        let hello = match (outgoing.protocol, Hello::decode(&event.private_data)) {
            (PeerProtocol::Other, _) => ours,
            (_, Ok(hello)) => hello,
            // The peer accepted the connection but sent no hello. Without a session number, the
            // connection cannot migrate.
            (PeerProtocol::Unknown, Err(HelloError::ForeignPeer | HelloError::Short { .. })) => {
                link.with_wakes(&mut self.wakes, |state, _, _| state.make_raw());
                Hello { session: 0, ..ours }
            }
            (_, Err(error)) => return Err(not_a_ferrite_peer(outgoing.peer, error)),
        };
        // The link knows the peer's hello before the peer learns that it may send.
        let qp = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.core.set_peer(hello);
            state.rdma.queue.lend()
        });
        let qp = qp.ok_or_else(|| Error::new(ErrorKind::Closed, "the link is gone"))?;
        Ok((link, by, hello, qp))
    }

    /// Opens the link after the queue pair was connected, or handles the failure.
    fn open_link(
        &mut self,
        shared: &Shared,
        mut outgoing: Box<Outgoing>,
        link: &Arc<LinkShared>,
        hello: Hello,
        up: Result<Mtu, Error>,
    ) {
        let up = up.and_then(|mtu| {
            match link.with_wakes(&mut self.wakes, |state, _, _| state.failure().cloned()) {
                Some(error) => Err(error), // the link failed meanwhile
                None => Ok(mtu),
            }
        });
        let mtu = match up {
            Ok(mtu) if !outgoing.is_over(self.now) => mtu,
            // The deadline has passed, or the caller no longer waits. `wait_for_event` ends the
            // handshake.
            Ok(_) => return self.wait_for_event(shared, outgoing, Ok(())),
            Err(error) => return self.wait_for_event(shared, outgoing, Err(error)),
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
}

/// Corrects the error after a peer has disconnected after its response. The next steps then fail
/// with `Misuse`, although this side made no mistake.
fn as_disconnect(peer: SocketAddr, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Misuse => Error::new(
            ErrorKind::LinkDown,
            format!("{peer} hung up during the handshake ({error})"),
        ),
        _ => error,
    }
}
