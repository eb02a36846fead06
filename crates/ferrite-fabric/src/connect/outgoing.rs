//! Links that this side opens.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEvent, CmEventKind, CmId, ConnectParams};
use futures_channel::oneshot;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use super::sockets::{Dial, Wants};
use super::{Meeting, bring_up, initialise, lane_of, params, since};
use crate::diagnose::{self, Failure, Subject};
use crate::engine::poller::Poller;
use crate::engine::timers::Timer;
use crate::engine::{Engine, Shared};
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::link::{Bare, Link};
use crate::policy::{Fallback, Meet, Rdma};
use crate::wire::{Hello, HelloError, Refusal, RefusalCode};

/// The kernel can miss the moment when a neighbour's address becomes known, and then looks again only when its time is
/// over. So it is asked with a short time first, and again with a longer one.
const FIRST_RESOLVE: Duration = Duration::from_millis(250);

/// How to open a link.
///
/// ```
/// use ferrite_fabric::ConnectOptions;
/// use std::time::Duration;
///
/// let options = ConnectOptions::new().local("127.0.0.1:0".parse()?).timeout(Duration::from_secs(1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct ConnectOptions {
    local: Option<SocketAddr>,
    timeout: Option<Duration>,
    rdma: Option<Rdma>,
    meet: Option<Meet>,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    require_encryption: bool,
}

impl ConnectOptions {
    /// From any local address, with the engine's `connection_timeout`.
    pub fn new() -> Self {
        Self::default()
    }

    /// The local address, which chooses the device. Say it on hosts with several: by itself the kernel may pick
    /// another one that reaches the peer.
    pub fn local(mut self, addr: SocketAddr) -> Self {
        self.local = Some(addr);
        self
    }

    /// Whether RDMA may carry it; without this, what the engine's settings say.
    pub fn rdma(mut self, rdma: Rdma) -> Self {
        self.rdma = Some(rdma);
        self
    }

    /// How the peer is met on RDMA; without this, what the engine's settings say.
    pub fn meet(mut self, meet: Meet) -> Self {
        self.meet = Some(meet);
        self
    }

    /// TLS for the case that TCP carries it: what to trust, and what the peer's certificate must be for.
    pub fn tls(mut self, config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        self.tls = Some((config, name));
        self
    }

    /// Nothing in clear text. RDMA payload is, so TCP with TLS carries the link: see [`ConnectOptions::tls`].
    pub fn require_encryption(mut self) -> Self {
        self.require_encryption = true;
        self
    }

    /// How long the handshake may take on each way, waiting for its turn included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// Who waits for a link.
pub(crate) type Reply = oneshot::Sender<Opened>;
pub(crate) type Opened = Result<Arc<LinkShared>, Error>;

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
    otherwise: Option<OverTcp>,
    /// Why the last try failed, for the case that time runs out.
    last: Option<Error>,
    /// The peer speaks another protocol.
    bare: bool,
    /// How long each try may take, and how many more there may be.
    timeout: Duration,
    retries: u32,
}

/// What was agreed when the request was sent.
#[derive(Clone, Copy)]
struct ConnectedBy {
    reads_in: u8,
    reads_out: u8,
}

impl Outgoing {
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether nobody waits any more, or not longer.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.deadline || self.reply.is_canceled()
    }
}

/// A link that is being opened.
#[must_use = "futures do nothing unless awaited"]
pub struct Connecting {
    engine: Engine,
    reply: oneshot::Receiver<Opened>,
}

impl Future for Connecting {
    type Output = Result<Link, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_opened(cx).map_ok(|link| Link::new(link, self.engine.clone()))
    }
}

impl Connecting {
    pub(crate) fn new(engine: Engine, reply: oneshot::Receiver<Opened>) -> Self {
        Self { engine, reply }
    }

    fn poll_opened(&mut self, cx: &mut Context<'_>) -> Poll<Opened> {
        Pin::new(&mut self.reply)
            .poll(cx)
            .map(|reply| reply.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, "the engine is gone"))))
    }
}

impl ConnectingBare {
    pub(crate) fn new(engine: Engine, reply: oneshot::Receiver<Opened>) -> Self {
        Self(Connecting::new(engine, reply))
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        // A link that was made, and that nobody will ask for any more.
        self.reply.close();
        if let Ok(Some(Ok(link))) = self.reply.try_recv() {
            link.close();
        }
    }
}

/// See [`Engine::connect_bare`].
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct ConnectingBare(Connecting);

impl Future for ConnectingBare {
    type Output = Result<Bare, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let engine = self.0.engine.clone();
        self.0.poll_opened(cx).map_ok(|link| Bare::new(link, engine))
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting").finish_non_exhaustive()
    }
}

impl Engine {
    /// Opens a link to a peer. Begins at once; dropping the future gives it up.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Refused`], [`ErrorKind::Timeout`]: with likely causes.
    pub fn connect(&self, peer: SocketAddr) -> Connecting {
        self.connect_with(peer, &ConnectOptions::new())
    }

    /// The same, with options.
    pub fn connect_with(&self, peer: SocketAddr, options: &ConnectOptions) -> Connecting {
        let (reply, receiver) = oneshot::channel();
        let connecting = Connecting::new(self.clone(), receiver);
        let now = Instant::now();
        let timeout = options.timeout.unwrap_or(self.config().connection_timeout);
        let (rdma, over_tcp) = match self.ways(peer, options, timeout) {
            Ok(ways) => ways,
            Err(error) => {
                let _ = reply.send(Err(error));
                return connecting;
            }
        };
        if !rdma {
            if let Some(over_tcp) = over_tcp {
                self.shared().with_poller(|poller, shared| {
                    poller.now = now;
                    poller.dial(shared, over_tcp.dial(now, reply, None));
                });
            }
            return connecting;
        }
        let lacks = self.shared().lanes.is_empty().then(|| self.shared().no_rdma());
        if let (Some(error), Some(Rdma::Prefer)) = (lacks, over_tcp.as_ref().map(|tcp| tcp.policy)) {
            // Nothing to wait for.
            if let Some(over_tcp) = over_tcp {
                self.shared().with_poller(|poller, shared| {
                    poller.now = now;
                    poller.dial(shared, over_tcp.dial(now, reply, Some(Fallback::new(error))));
                });
            }
            return connecting;
        }
        self.call(Outgoing {
            id: None,
            peer,
            local: options.local,
            deadline: now + timeout,
            patience: FIRST_RESOLVE,
            asked: now,
            link: None,
            reply,
            otherwise: over_tcp,
            last: None,
            bare: false,
            timeout,
            retries: self.config().connection_retries,
        });
        connecting
    }

    /// Connects to a peer that speaks another protocol, by RDMA CM. Begins at once; dropping the future gives it up. Of the
    /// options, the local address and the time count.
    ///
    /// # Errors
    /// As [`Engine::connect`].
    pub fn connect_bare(&self, peer: SocketAddr, options: &ConnectOptions) -> ConnectingBare {
        let (reply, receiver) = oneshot::channel();
        let connecting = ConnectingBare::new(self.clone(), receiver);
        let now = Instant::now();
        let timeout = options.timeout.unwrap_or(self.config().connection_timeout);
        if self.shared().lanes.is_empty() {
            let _ = reply.send(Err(self.shared().no_rdma()));
            return connecting;
        }
        self.call(Outgoing {
            id: None,
            peer,
            local: options.local,
            deadline: now + timeout,
            patience: FIRST_RESOLVE,
            asked: now,
            link: None,
            reply,
            otherwise: None,
            last: None,
            bare: true,
            timeout,
            retries: self.config().connection_retries,
        });
        connecting
    }

    fn call(&self, outgoing: Outgoing) {
        self.shared().with_poller(|poller, shared| {
            poller.now = outgoing.asked;
            poller.meetings.waiting.push_back(Box::new(outgoing));
            poller.start_waiting(shared);
        });
    }

    /// Whether RDMA is tried, and how TCP is, if it may be.
    fn ways(
        &self,
        peer: SocketAddr,
        options: &ConnectOptions,
        timeout: Duration,
    ) -> Result<(bool, Option<OverTcp>), Error> {
        let policy = options.rdma.unwrap_or(self.config().rdma);
        if options.require_encryption && policy == Rdma::Require {
            let what = "encryption and RDMA are both required: RDMA payload is clear text";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        let name = || ServerName::IpAddress(peer.ip().into());
        let meet = options.meet.unwrap_or(self.config().connect);
        let tls = options.tls.clone().or_else(|| Some((self.shared().tls.client.clone()?, name())));
        if options.require_encryption && tls.is_none() {
            let what = "encryption is required, and there is no TLS configuration (ConnectOptions::tls)";
            return Err(Error::new(ErrorKind::Misuse, what));
        }
        let upgrade = policy != Rdma::Forbid && !options.require_encryption;
        let over_tcp = OverTcp { peer, local: options.local, timeout, tls, policy, upgrade };
        Ok(match (policy, meet) {
            (Rdma::Forbid, _) | (_, Meet::TcpFirst) => (false, Some(over_tcp)),
            (Rdma::Require, Meet::Cm | Meet::Auto) => (true, None),
            (Rdma::Prefer, _) => (!options.require_encryption, Some(over_tcp)),
        })
    }
}

/// How to connect over TCP.
struct OverTcp {
    peer: SocketAddr,
    local: Option<SocketAddr>,
    timeout: Duration,
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    policy: Rdma,
    /// To RDMA, as soon as the peers have met.
    upgrade: bool,
}

impl OverTcp {
    fn dial(self, now: Instant, reply: Reply, fallback: Option<Fallback>) -> Dial {
        let Self { peer, local, timeout, tls, policy, upgrade } = self;
        let wants = match fallback {
            None if upgrade => Wants::Rdma(reply, policy),
            fallback => Wants::Link(reply, fallback), // by CM it did not work: over TCP it is tried later
        };
        Dial { peer, local, deadline: now + timeout, tls, wants }
    }
}

impl Poller {
    /// Begins handshakes that wait, as many as may be under way.
    fn start_waiting(&mut self, shared: &Shared) {
        while self.meetings.outgoing < shared.config.max_half_open {
            let Some(outgoing) = self.meetings.waiting.pop_front() else { return };
            if outgoing.is_over(self.now) {
                self.outgoing_timed_out(shared, *outgoing);
            } else {
                self.resolve(shared, outgoing);
            }
        }
        // Those that wait longer than they may are told by the clock.
        if let Some(next) = self.meetings.waiting.front() {
            self.timers.add(next.deadline, Timer::Retry(u64::MAX));
        }
    }

    /// First step, with a new identifier.
    fn resolve(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>) {
        let patience = outgoing.patience.min(since(outgoing.deadline, self.now));
        outgoing.asked = self.now;
        let begun = self.cm(shared).and_then(|channel| {
            let id = channel.create_id()?;
            id.resolve_address(outgoing.local, outgoing.peer, patience)?;
            Ok(id)
        });
        match begun {
            Ok(id) => {
                let key = id.key();
                outgoing.id = Some(id);
                self.timers.add(outgoing.deadline, Timer::Meeting(key));
                self.meetings.put(key, Meeting::Outgoing(outgoing));
            }
            Err(error) => self.finish(shared, *outgoing, Err(error)),
        }
    }

    pub(super) fn on_outgoing_event(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>, event: CmEvent) {
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
            CmEventKind::ADDRESS_RESOLVED | CmEventKind::ROUTE_RESOLVED | CmEventKind::CONNECT_RESPONSE => {
                match self.step(shared, &mut outgoing, &event) {
                    Ok(false) => {
                        if let Some(key) = outgoing.id.as_ref().map(CmId::key) {
                            self.meetings.put(key, Meeting::Outgoing(outgoing));
                        }
                    }
                    Ok(true) => {
                        let link = outgoing.link.take().map(|(link, _)| link);
                        let link = link.ok_or_else(|| Error::new(ErrorKind::System, "no link"));
                        self.finish(shared, *outgoing, link);
                    }
                    Err(error) => self.finish(shared, *outgoing, Err(error)),
                }
            }
            _ => {
                let error = Error::from(event.into_error(outgoing.peer));
                self.finish(shared, *outgoing, Err(error));
            }
        }
    }

    /// The next step; `true` when the link is up.
    fn step(&mut self, shared: &Shared, outgoing: &mut Outgoing, event: &CmEvent) -> Result<bool, Error> {
        let Some(id) = &outgoing.id else { return Err(Error::new(ErrorKind::System, "no identifier")) };
        match event.kind {
            CmEventKind::ADDRESS_RESOLVED => {
                // That it could not be found before is over.
                outgoing.last = outgoing.last.take().filter(|last| last.kind() != ErrorKind::Unreachable);
                id.resolve_route(since(outgoing.deadline, self.now))?;
                Ok(false)
            }
            CmEventKind::ROUTE_RESOLVED => {
                let lane = lane_of(shared, id)?;
                let _ = id.set_ack_timeout(shared.config.ack_timeout); // kernels before 5.1 have none
                let moves = outgoing.otherwise.as_ref().is_some_and(|tcp| tcp.policy == Rdma::Prefer);
                let (link, hello) = self.make_link(shared, lane, moves)?;
                link.with_wakes(&mut self.wakes, |state, _, _| {
                    state.is_caller = true;
                    if outgoing.bare {
                        state.make_bare();
                    }
                });
                link.set_tls(outgoing.otherwise.as_ref().and_then(|tcp| tcp.tls.clone()));
                let encoded = hello.encode();
                let private_data = if outgoing.bare { &[] } else { &encoded[..] };
                let params = params(shared, lane, &link, private_data);
                let by = ConnectedBy { reads_in: params.reads_in, reads_out: params.reads_out };
                outgoing.link = Some((Arc::clone(&link), by));
                initialise(id, &link)?;
                id.connect(&ConnectParams { ..params })?;
                Ok(false)
            }
            _ => {
                let Some((link, by)) = outgoing.link.clone() else {
                    return Err(Error::new(ErrorKind::System, "a response to nothing"));
                };
                let hello = match outgoing.bare {
                    true => link.with_wakes(&mut self.wakes, |state, _, _| *state.peer()),
                    false => {
                        Hello::decode(&event.private_data).map_err(|error| not_ours(outgoing.peer, error))?
                    }
                };
                // Before the peer hears that it may send.
                link.with_wakes(&mut self.wakes, |state, _, _| state.set_peer(hello));
                let up = bring_up(id, &link, by.reads_in, by.reads_out).and_then(|()| Ok(id.establish()?));
                up.map_err(|error| hung_up(outgoing.peer, error))?;
                if let Some(id) = outgoing.id.take() {
                    self.establish(id, &link, hello);
                }
                Ok(true)
            }
        }
    }

    fn try_again(&mut self, shared: &Shared, mut outgoing: Box<Outgoing>, error: Error, wait: Duration) {
        if self.now + wait >= outgoing.deadline {
            let error = explain(shared, &outgoing, error);
            self.finish(shared, *outgoing, Err(error));
            return;
        }
        shared.counters.connect_retries.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if let Some((link, _)) = outgoing.link.take() {
            self.unmake_link(shared, &link, &error);
        }
        outgoing.id = None;
        outgoing.last = Some(error);
        if wait.is_zero() {
            self.resolve(shared, outgoing);
            return;
        }
        let ticket = self.meetings.next_retry;
        self.meetings.next_retry += 1;
        self.meetings.retrying.insert(ticket, outgoing);
        self.timers.add(self.now + wait, Timer::Retry(ticket));
        self.start_waiting(shared);
    }

    pub(crate) fn retry_meeting(&mut self, shared: &Shared, ticket: u64) {
        if let Some(outgoing) = self.meetings.retrying.remove(&ticket) {
            self.meetings.waiting.push_front(outgoing);
        } else {
            // Their time may be over before their turn has come.
            let waiting = std::mem::take(&mut self.meetings.waiting);
            let (over, waiting): (VecDeque<_>, _) =
                waiting.into_iter().partition(|outgoing| outgoing.is_over(self.now));
            self.meetings.waiting = waiting;
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
                ErrorKind::Refused | ErrorKind::Unreachable | ErrorKind::Timeout | ErrorKind::LinkDown
            )
        {
            outgoing.retries -= 1;
            let delay = shared.config.retry_delay;
            outgoing.deadline = self.now + delay + outgoing.timeout;
            outgoing.patience = FIRST_RESOLVE;
            self.try_again(shared, Box::new(outgoing), error.clone(), delay.max(Duration::from_millis(1)));
            return;
        }
        let Outgoing { id, link, reply, otherwise, .. } = outgoing;
        match (&opened, link) {
            (Err(error), Some((link, _))) => self.unmake_link(shared, &link, error),
            (Ok(_), _) => {
                shared.counters.connected.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            _ => {}
        }
        drop(id);
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
    let lane = outgoing.id.as_ref().and_then(|id| lane_of(shared, id).ok());
    let local = lane.and_then(|_| outgoing.id.as_ref().and_then(CmId::local_addr));
    let context = lane.or(shared.lanes.first()).and_then(|lane| lane.context());
    let Some(context) = context else { return error };
    error.with_causes(diagnose::causes(&Subject {
        context: &context,
        port: outgoing.id.as_ref().and_then(CmId::device).map_or(1, |(_, port)| port),
        local,
        peer: Some(outgoing.peer),
        baseline: None,
        failure: Failure::ConnectTimeout,
    }))
}

/// A peer that went after it had answered makes the next steps wrong: that is nobody's mistake here.
fn hung_up(peer: SocketAddr, error: Error) -> Error {
    match error.kind() {
        ErrorKind::Misuse => {
            Error::new(ErrorKind::LinkDown, format!("{peer} hung up during the handshake ({error})"))
        }
        _ => error,
    }
}

fn not_ours(peer: SocketAddr, error: HelloError) -> Error {
    Error::new(ErrorKind::Protocol, format!("{peer} is not a Ferrite peer of our version: {error}"))
}
