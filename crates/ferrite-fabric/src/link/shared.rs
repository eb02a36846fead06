//! A link as the fabric and its users share it: the state behind its lock, and what never changes.

use std::collections::VecDeque;
use std::fmt;
#[cfg(feature = "tokio")]
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Wake, Waker};
use std::time::Instant;

use ferrite_verbs::{CmKey, Mtu, Status};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
#[cfg(feature = "tokio")]
use tokio::io::ReadBuf;

use super::core::{Kind, Silence, Wakes};
use super::message::Message;
use super::outbox::OneSided;
use super::state::{LinkEnv, LinkState};
use super::tickets::{Outcome, Ticket};
use crate::diagnose::{self, Baseline, Failure, Subject};
use crate::error::{Error, ErrorKind};
use crate::fabric::mailbox::Mailbox;
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::slots::Held;
use crate::fabric::timers::LinkName;
use crate::mem::{Buf, BufMut, Pool, lock};
use crate::policy::Fallback;
use crate::source::Source;
use crate::wire::{GrantToken, Rights};

pub(crate) struct LinkShared {
    // First: the queue pair goes before the device whose queues it uses.
    state: Mutex<LinkState>,
    pub(crate) index: u32,
    pub(crate) name: LinkName,
    pub(crate) pool: Pool,
    mailbox: Arc<Mailbox>,
    /// Has the fabric look at the link.
    waker: Waker,
    route: Mutex<Route>,
    /// Why it is on TCP, if it should not be.
    fallback: Mutex<Option<Fallback>>,
    tls: Mutex<Option<(Arc<ClientConfig>, ServerName<'static>)>>,
    /// Where the peer may be found, if not only where it was; the one that is tried next is the
    /// first.
    addresses: Mutex<VecDeque<SocketAddr>>,
    /// The port when the link was last known to be well.
    baseline: Mutex<Option<Baseline>>,
}

/// Has the fabric look at a link, or at another that has its number by then, which is of no
/// consequence.
struct Caller {
    mailbox: Arc<Mailbox>,
    index: u32,
}

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        self.mailbox.request_service(self.index);
    }
}

/// What carries a link, and where it goes.
#[derive(Clone, Default)]
pub(crate) struct Route {
    /// The device and the queue pair, on RDMA.
    pub(crate) device: Option<Arc<SharedDevice>>,
    pub(crate) qp_num: u32,
    pub(crate) port: u8,
    pub(crate) mtu: Option<Mtu>,
    /// The connection manager's name for it, if it made the link.
    pub(crate) cm_key: Option<CmKey>,
    /// The fabric's number of the connection, and whether it is encrypted, on TCP.
    pub(crate) socket: Option<u64>,
    pub(crate) encrypted: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
}

impl LinkShared {
    pub(crate) fn new(name: LinkName, state: LinkState, pool: Pool, mailbox: Arc<Mailbox>) -> Self {
        let route = Route {
            device: state.rdma.device.clone(),
            qp_num: state.rdma.queue.qp().map_or(0, ferrite_verbs::QueuePair::number),
            port: 1,
            ..Route::default()
        };
        Self {
            state: Mutex::new(state),
            index: name.index,
            name,
            pool,
            waker: Waker::from(Arc::new(Caller {
                mailbox: Arc::clone(&mailbox),
                index: name.index,
            })),
            mailbox,
            route: Mutex::new(route),
            fallback: Mutex::new(None),
            tls: Mutex::new(None),
            addresses: Mutex::default(),
            baseline: Mutex::new(None),
        }
    }

    /// What carries it now.
    pub(crate) fn route(&self) -> Route {
        lock(&self.route).clone()
    }

    pub(crate) fn set_route(&self, set: impl FnOnce(&mut Route)) {
        set(&mut lock(&self.route));
    }

    /// How the peer is called over TCP, if with TLS.
    pub(crate) fn tls(&self) -> Option<(Arc<ClientConfig>, ServerName<'static>)> {
        lock(&self.tls).clone()
    }

    pub(crate) fn set_tls(&self, tls: Option<(Arc<ClientConfig>, ServerName<'static>)>) {
        *lock(&self.tls) = tls;
    }

    pub(crate) fn set_addresses(&self, addresses: VecDeque<SocketAddr>) {
        *lock(&self.addresses) = addresses;
    }

    /// Where to look for the peer next: each address in its turn.
    pub(crate) fn next_address(&self) -> Option<SocketAddr> {
        let mut addresses = lock(&self.addresses);
        let next = addresses.pop_front();
        addresses.extend(next);
        drop(addresses);
        next.or_else(|| self.route().peer)
    }

    /// Whether its peer speaks another protocol.
    pub(crate) fn is_raw(&self) -> bool {
        lock(&self.state).is_raw()
    }

    pub(crate) fn failure_known(&self) -> bool {
        lock(&self.state).failure().is_some()
    }

    pub(crate) fn fallback(&self) -> Option<Fallback> {
        lock(&self.fallback).clone()
    }

    pub(crate) fn set_fallback(&self, fallback: Option<Fallback>) {
        *lock(&self.fallback) = fallback;
    }

    /// The device that carries it; `None` on TCP.
    pub(crate) fn device(&self) -> Option<Arc<SharedDevice>> {
        lock(&self.route).device.clone()
    }

    pub(crate) fn is_on(&self, device: &SharedDevice) -> bool {
        lock(&self.route).device.as_ref().is_some_and(|on| on.index == device.index)
    }

    /// Runs `act` under the lock, then whatever must happen outside of it.
    pub(crate) fn with<R>(
        &self,
        act: impl FnOnce(&mut LinkState, &LinkEnv<'_>, &mut Wakes) -> R,
    ) -> R {
        let mut wakes = Wakes::new();
        let result = self.with_wakes(&mut wakes, act);
        wakes.into_iter().for_each(Waker::wake);
        result
    }

    /// As [`LinkShared::with`], for callers that wake later.
    pub(crate) fn with_wakes<R>(
        &self,
        wakes: &mut Wakes,
        act: impl FnOnce(&mut LinkState, &LinkEnv<'_>, &mut Wakes) -> R,
    ) -> R {
        let mut state = lock(&self.state);
        let env =
            LinkEnv { index: self.index, device: state.rdma.device.clone(), pool: &self.pool };
        let result = act(&mut state, &env, wakes);
        state.stop_if_over();
        let attention = state.wants_attention();
        if attention {
            state.complete_flushed(&env, wakes);
        }
        drop(state);
        if attention {
            self.mailbox.request_service(self.index);
        }
        result
    }

    /// The error for a request that failed first.
    #[cold]
    pub(crate) fn completion_error(&self, status: Status) -> Error {
        let peer = self.peer_name();
        let kind = match status {
            Status::REMOTE_ACCESS | Status::REMOTE_INVALID_REQUEST => ErrorKind::Denied,
            _ => ErrorKind::LinkDown,
        };
        let what = format!("link to {peer} ({}): {status}", self.transport());
        Error::completion(kind, what, status)
    }

    /// Finds the likely causes of a failure, of the link as it is now; `None` on TCP.
    pub(crate) fn diagnosis(
        &self,
        failure: Failure,
    ) -> Option<impl FnOnce() -> Vec<diagnose::Cause> + use<>> {
        let Route { device, port, local, peer, .. } = self.route();
        let baseline = lock(&self.baseline).clone();
        let context = device?.context()?;
        Some(move || {
            let baseline = baseline.as_ref();
            diagnose::causes(&Subject { context: &context, port, local, peer, baseline, failure })
        })
    }

    /// The link is well: from here on a diagnosis counts what changed.
    pub(crate) fn is_well(&self) {
        let Route { device, port, .. } = self.route();
        let context = device.and_then(|device| device.context());
        *lock(&self.baseline) = context.map(|context| Baseline::take(&context, port));
    }

    /// Has the fabric look at the link when some of the memory came back that its peer holds.
    pub(crate) fn call_on_credit(&self) {
        if let Some(tcp) = &lock(&self.state).tcp {
            tcp.wake_on_credit(&self.waker);
        }
    }

    /// Who causes commands for it.
    pub(crate) fn source(&self) -> Source {
        Source::of_any(lock(&self.route).peer)
    }

    pub(crate) fn peer_name(&self) -> String {
        lock(&self.route).peer.map_or_else(|| "a peer".into(), |peer| peer.to_string())
    }

    /// What carries it, for people.
    pub(crate) fn transport(&self) -> String {
        match self.route() {
            Route { device: Some(device), qp_num, .. } => {
                format!("queue pair {qp_num:#x} on {}", device.name)
            }
            Route { encrypted: true, .. } => "TCP with TLS".into(),
            _ => "TCP".into(),
        }
    }

    /// Queues a message and posts what may go. Without room, `waker` is called when there is some.
    pub(crate) fn submit(
        &self,
        channel: u16,
        parts: Vec<Buf>,
        waker: Option<&Waker>,
    ) -> Result<Ticket, (Vec<Buf>, Error)> {
        self.queue(channel, parts, waker, true)
            .map(|ticket| ticket.expect("a ticket was asked for"))
    }

    pub(crate) fn queue(
        &self,
        channel: u16,
        parts: Vec<Buf>,
        waker: Option<&Waker>,
        wait: bool,
    ) -> Result<Option<Ticket>, (Vec<Buf>, Error)> {
        if !parts.iter().all(|part| self.pool.owns(part)) {
            return Err((parts, foreign()));
        }
        let bytes = parts.iter().map(|part| part.len() as u64).sum();
        self.with(|state, env, wakes| {
            let checked =
                state.core.check_open().and_then(|()| state.core.check_message(channel, bytes));
            if let Err(error) = checked.and_then(|()| state.core.check_parts(&parts)) {
                return Err((parts, error));
            }
            if !state.core.has_room(bytes) {
                if let Some(waker) = waker {
                    state.core.wake_on_room(waker);
                }
                return Err((parts, full()));
            }
            let ticket = state.core.push(channel, parts, wait);
            state.pump(env, wakes);
            Ok(ticket)
        })
    }

    /// Ready when another message of `bytes` may be queued.
    pub(crate) fn poll_room(&self, bytes: u64, waker: &Waker) -> Poll<Result<(), Error>> {
        let mut state = lock(&self.state);
        if let Err(error) = state.core.check_open() {
            return Poll::Ready(Err(error));
        }
        if state.core.has_room(bytes) {
            return Poll::Ready(Ok(()));
        }
        state.core.wake_on_room(waker);
        Poll::Pending
    }

    /// Whether something of the link is queued or under way that holds memory; then `waker` is
    /// called when some of it has gone.
    #[cfg(feature = "tokio")]
    pub(crate) fn poll_progress(&self, waker: &Waker) -> bool {
        let mut state = lock(&self.state);
        let holds = state.holds_memory();
        if holds {
            state.core.wake_on_room(waker);
        }
        holds
    }

    /// Sends an empty message, room or not: it holds no memory, and whoever says that it was the
    /// last does not wait.
    #[cfg(feature = "tokio")]
    pub(crate) fn post_end(&self, channel: u16) -> Result<(), Error> {
        self.with(|state, env, wakes| {
            state.core.check_open()?;
            state.core.push(channel, [], false);
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Whether the peer said farewell: what it sent is all there.
    #[cfg(feature = "tokio")]
    pub(crate) fn peer_has_closed(&self) -> bool {
        lock(&self.state).core.peer_has_closed()
    }

    /// Sends one buffer without an answer: nothing is allocated.
    pub(crate) fn post(&self, channel: u16, buf: Buf) -> Result<(), (Buf, Error)> {
        if !self.pool.owns(&buf) {
            return Err((buf, foreign()));
        }
        self.with(|state, env, wakes| {
            let bytes = buf.len() as u64;
            if let Err(error) =
                state.core.check_open().and_then(|()| state.core.check_message(channel, bytes))
            {
                return Err((buf, error));
            }
            if !state.core.has_room(bytes) {
                return Err((buf, full()));
            }
            state.core.push(channel, [buf], false);
            state.pump(env, wakes);
            Ok(())
        })
    }

    /// Sends a small message from the caller's memory; `Ok(false)` if it cannot go at once.
    pub(crate) fn send_now(&self, channel: u16, bytes: &[u8]) -> Result<bool, Error> {
        self.with(|state, env, wakes| {
            state.core.check_open()?;
            state.core.check_message(channel, bytes.len() as u64)?;
            let sent = state.send_now(env, channel, bytes);
            sent.inspect_err(|error| state.core.fail(error.clone(), wakes))
        })
    }

    /// Sends the first `len` bytes of the slices, or some of them, from where they are, if TCP
    /// carries the link; `None` if they have to be queued. While nothing more goes, `waker` is
    /// called when something may: what would wait here can wait where it is.
    #[cfg(feature = "tokio")]
    pub(crate) fn poll_send_through(
        &self,
        channel: u16,
        slices: &[IoSlice<'_>],
        len: usize,
        waker: &Waker,
    ) -> Poll<Result<Option<usize>, Error>> {
        self.with(|state, _, wakes| {
            if !state.writes_through() {
                return Poll::Ready(Ok(None));
            }
            let checked =
                state.core.check_open().and_then(|()| state.core.check_message(channel, 1));
            if let Err(error) = checked {
                return Poll::Ready(Err(error));
            }
            match state.write_slices(channel, slices, len) {
                Ok(Some(sent)) => Poll::Ready(Ok(Some(sent))),
                Ok(None) if state.is_held_up() => {
                    state.core.wake_on_room(waker);
                    Poll::Pending
                }
                Ok(None) => Poll::Ready(Ok(None)),
                Err(error) => {
                    state.core.fail(error.clone(), wakes);
                    Poll::Ready(Err(error))
                }
            }
        })
    }

    /// Queues a one-sided operation on `len` bytes at `offset` of what was granted.
    pub(crate) fn one_sided(
        &self,
        grant: &GrantToken,
        rights: Rights,
        offset: u64,
        mut held: Held,
        (kind, imm): (Kind, u32),
    ) -> Result<Ticket, (Held, Error)> {
        let (len, ours) = match &mut held {
            Held::Shared(buf) => (buf.len(), self.pool.owns(buf)),
            Held::Unique(buf) => (buf.len(), self.pool.owns_mut(buf)),
            Held::Nothing | Held::Copied(_) | Held::Passing(_) | Held::Binding(_) => (0, true),
        };
        let wrong = if !ours {
            Some(foreign())
        } else if !grant.rights.contains(rights) {
            Some(Error::new(
                ErrorKind::Denied,
                format!("the grant is for {}, not {rights}", grant.rights),
            ))
        } else if grant.range(offset, len as u64).is_none() {
            let what = format!("{len} bytes at {offset} of a grant of {}", grant.len);
            Some(Error::new(ErrorKind::Denied, what))
        } else {
            None
        };
        if let Some(error) = wrong {
            return Err((held, error));
        }
        self.with(|state, env, wakes| {
            if let Err(error) = state.core.check_open() {
                return Err((held, error));
            }
            if state.core.is_revoked(grant.grant) {
                return Err((held, Error::new(ErrorKind::Denied, "the peer took its grant back")));
            }
            if !state.core.has_room(len as u64) {
                return Err((held, full()));
            }
            let GrantToken { grant, addr: base, rkey, .. } = *grant;
            let bytes = len as u32;
            let operation =
                OneSided { kind, held, ticket: None, grant, base, rkey, offset, bytes, imm };
            let ticket = state.core.push_one_sided(operation, true);
            state.pump(env, wakes);
            Ok(ticket.expect("a ticket was asked for"))
        })
    }

    /// The next message; if there is none, `waker` is called when one has come.
    pub(crate) fn receive(&self, waker: Option<&Waker>) -> Result<Option<Message>, Error> {
        self.with(|state, env, wakes| {
            let message = state.core.pop()?;
            match (&message, waker) {
                (Some(_), _) if state.core.credits.is_announcement_due() => state.pump(env, wakes),
                (None, Some(waker)) => state.core.wake_on_message(waker),
                _ => {}
            }
            Ok(message)
        })
    }

    /// Reads into `out` what TCP has for a stream on `channel`, if it lies in the kernel; `false`
    /// if it does not.
    #[cfg(feature = "tokio")]
    pub(crate) fn read_through(&self, channel: u16, out: &mut ReadBuf<'_>) -> Result<bool, Error> {
        self.with(|state, env, wakes| {
            let read = state.read_through(env.pool, channel, out);
            match &read {
                // the peer may have told of credits, or be owed some
                Ok(true) => state.pump(env, wakes),
                Ok(false) => {}
                Err(error) => state.core.fail(error.clone(), wakes),
            }
            read
        })
    }

    pub(crate) fn poll_ticket(&self, ticket: Ticket, waker: &Waker) -> Poll<Outcome> {
        lock(&self.state).core.poll_ticket(ticket, waker)
    }

    pub(crate) fn abandon(&self, ticket: Ticket) {
        lock(&self.state).core.abandon(ticket);
    }

    /// Why the link is down, once it is and nothing of it is in flight any more.
    pub(crate) fn ended(&self, waker: &Waker) -> Option<Error> {
        let mut state = lock(&self.state);
        let over = state.failure().cloned();
        if over.is_none() {
            state.core.wake_on_end(waker);
        }
        over
    }

    /// Delivers what was sent, then ends the link.
    pub(crate) fn close(&self) {
        self.with(|state, env, wakes| {
            state.core.close();
            state.pump(env, wakes);
        });
        self.mailbox.request_service(self.index); // the fabric sets the deadline
    }

    pub(crate) fn fail(&self, error: Error) {
        self.with(|state, _, wakes| state.core.fail(error, wakes));
    }

    /// Looks at the clock: when to do so again, and whether the link is well.
    ///
    /// # Errors
    /// The peer has not answered: the link is to fail.
    pub(crate) fn on_timer(
        &self,
        now: Instant,
    ) -> Result<Option<(Instant, bool)>, (Error, Failure)> {
        let next = self.with(|state, env, wakes| {
            let next = state.on_timer(now);
            state.pump(env, wakes);
            next
        });
        next.map_err(|Silence { after, acknowledged }| {
            let failure =
                if acknowledged { Failure::NoKeepalive } else { Failure::NoAcknowledgement };
            let (peer, ms) = (self.peer_name(), after.as_millis());
            let what = format!("link to {peer}: the peer has not answered for {ms} ms");
            (Error::new(ErrorKind::PeerStalled, what), failure)
        })
    }
}

impl fmt::Debug for LinkShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("peer", &lock(&self.route).peer)
            .field("over", &self.transport())
            .finish_non_exhaustive()
    }
}

/// What a buffer became that could not be sent.
pub(crate) fn full() -> Error {
    Error::new(
        ErrorKind::Full,
        "the link's queue is full: the peer does not take what was sent as fast",
    )
}

fn foreign() -> Error {
    Error::new(ErrorKind::Misuse, "the buffer is of another fabric's pool")
}

/// The buffer of a read, back from where it was put.
pub(crate) fn unique(held: Held) -> Option<BufMut> {
    match held {
        Held::Unique(buf) => Some(buf),
        _ => None,
    }
}
