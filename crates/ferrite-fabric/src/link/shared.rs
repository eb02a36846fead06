//! A link as the fabric and its users share it: the state behind the link's lock, and data outside
//! of that lock.

mod sending;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Poll, Wake, Waker};
use std::time::Instant;

use ferrite_verbs::{CmKey, Mtu, Status};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};
#[cfg(feature = "tokio")]
use tokio::io::ReadBuf;

use super::core::{Silence, Wakes};
use super::message::Message;
use super::state::{LinkEnv, LinkState};
use super::tickets::{Outcome, Ticket};
use crate::device::shared_device::SharedDevice;
use crate::device::slots::Held;
use crate::diagnose::{self, Baseline, Failure, Subject};
use crate::error::{Error, ErrorKind};
use crate::link::name::LinkName;
use crate::mem::{BufMut, Pool, lock};
use crate::policy::Fallback;
use crate::source::Source;
use crate::wake::mailbox::Mailbox;

pub(crate) struct LinkShared {
    // Declared first, so that the queue pair is dropped before the device whose queues it uses.
    state: Mutex<LinkState>,
    pub(crate) index: u32,
    pub(crate) name: LinkName,
    pub(crate) pool: Pool,
    mailbox: Arc<Mailbox>,
    /// Makes the fabric process the link.
    waker: Waker,
    route: Mutex<Route>,
    /// The reason why the link uses TCP although RDMA was wanted.
    fallback: Mutex<Option<Fallback>>,
    tls: Mutex<Option<(Arc<ClientConfig>, ServerName<'static>)>>,
    /// The peer's certificates, if the link has begun with TLS and the peer has presented some.
    pub(crate) peer_certificates: OnceLock<Vec<CertificateDer<'static>>>,
    /// The state of the port when the link was last healthy.
    baseline: Mutex<Option<Baseline>>,
}

/// Makes the fabric process a link. If another link has reused the index since, the fabric
/// processes that link once more, which is harmless.
struct Caller {
    mailbox: Arc<Mailbox>,
    index: u32,
}

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        self.mailbox.request_service(self.index);
    }
}

/// The transport of a link and its destination.
#[derive(Clone, Default)]
pub(crate) struct Route {
    /// On RDMA: the device and the queue pair.
    pub(crate) device: Option<Arc<SharedDevice>>,
    pub(crate) qp_num: u32,
    pub(crate) port: u8,
    pub(crate) mtu: Option<Mtu>,
    /// The connection manager's identifier, if it created the link.
    pub(crate) cm_key: Option<CmKey>,
    /// On TCP: the fabric's number of the connection, and whether the connection is encrypted.
    pub(crate) socket: Option<u64>,
    pub(crate) encrypted: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    /// The local and the peer's address of the first path, if the link was resumed over another.
    pub(crate) first: Option<(Option<SocketAddr>, Option<SocketAddr>)>,
}

impl Route {
    /// Returns the local address of the first path.
    pub(crate) fn first_local(&self) -> Option<SocketAddr> {
        self.first.map_or(self.local, |(local, _)| local)
    }

    /// Returns the peer's address of the first path.
    pub(crate) fn first_peer(&self) -> Option<SocketAddr> {
        self.first.map_or(self.peer, |(_, peer)| peer)
    }
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
            peer_certificates: OnceLock::new(),
            baseline: Mutex::new(None),
        }
    }

    /// Returns the transport that the link uses now, and its destination.
    pub(crate) fn route(&self) -> Route {
        lock(&self.route).clone()
    }

    pub(crate) fn set_route(&self, set: impl FnOnce(&mut Route)) {
        set(&mut lock(&self.route));
    }

    /// Returns the settings and the peer's name for TLS; `None` without TLS.
    pub(crate) fn tls(&self) -> Option<(Arc<ClientConfig>, ServerName<'static>)> {
        lock(&self.tls).clone()
    }

    pub(crate) fn set_tls(&self, tls: Option<(Arc<ClientConfig>, ServerName<'static>)>) {
        *lock(&self.tls) = tls;
    }

    /// Returns whether the peer speaks another protocol.
    pub(crate) fn is_raw(&self) -> bool {
        lock(&self.state).is_raw()
    }

    pub(crate) fn failure_known(&self) -> bool {
        lock(&self.state).failure().is_some()
    }

    pub(crate) fn fallback(&self) -> Option<Fallback> {
        // A path on RDMA ends the fallback, even if the reason is not removed yet.
        if self.device().is_some() { None } else { lock(&self.fallback).clone() }
    }

    pub(crate) fn set_fallback(&self, fallback: Option<Fallback>) {
        *lock(&self.fallback) = fallback;
    }

    /// Returns the device that the link uses; `None` on TCP.
    pub(crate) fn device(&self) -> Option<Arc<SharedDevice>> {
        lock(&self.route).device.clone()
    }

    pub(crate) fn is_on(&self, device: &SharedDevice) -> bool {
        lock(&self.route).device.as_ref().is_some_and(|on| on.index == device.index)
    }

    /// Runs `act` under the lock, without the follow-up work of [`LinkShared::with`]. So `act` may
    /// only read, take arrived data, or register a waker. It must not create work for the fabric.
    pub(crate) fn peek<R>(&self, act: impl FnOnce(&mut LinkState) -> R) -> R {
        act(&mut lock(&self.state))
    }

    /// Runs `act` under the lock. Then, without the lock, wakes tasks and, if necessary, asks the
    /// fabric to process the link.
    pub(crate) fn with<R>(
        &self,
        act: impl FnOnce(&mut LinkState, &LinkEnv<'_>, &mut Wakes) -> R,
    ) -> R {
        let mut wakes = Wakes::new();
        let result = self.with_wakes(&mut wakes, act);
        if !wakes.is_empty() {
            wakes.into_iter().for_each(Waker::wake);
        }
        result
    }

    /// Like [`LinkShared::with`], for callers that wake the tasks themselves, later.
    pub(crate) fn with_wakes<R>(
        &self,
        wakes: &mut Wakes,
        act: impl FnOnce(&mut LinkState, &LinkEnv<'_>, &mut Wakes) -> R,
    ) -> R {
        let mut state = lock(&self.state);
        let env = LinkEnv { index: self.index, pool: &self.pool };
        let result = act(&mut state, &env, wakes);
        state.stop_if_over();
        let attention = state.core.take_probe_request() | state.wants_attention();
        if attention {
            state.complete_flushed(&env, wakes);
        }
        drop(state);
        if attention {
            self.mailbox.request_service(self.index);
        }
        result
    }

    /// Returns the error for a failed request.
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

    /// Returns a function that finds the likely causes of a failure in the link's current state;
    /// `None` on TCP.
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

    /// Notes that the link is healthy. A later diagnosis compares with this moment.
    pub(crate) fn is_well(&self) {
        let Route { device, port, .. } = self.route();
        let context = device.and_then(|device| device.context());
        *lock(&self.baseline) = context.map(|context| Baseline::take(&context, port));
    }

    /// Makes the fabric process the link when the account for received TCP data gets memory back.
    pub(crate) fn call_on_credit(&self) {
        if let Some(tcp) = &lock(&self.state).tcp {
            tcp.wake_on_credit(&self.waker);
        }
    }

    /// Returns the peer to whom the link's commands are attributed.
    pub(crate) fn source(&self) -> Source {
        Source::of_any(lock(&self.route).peer)
    }

    pub(crate) fn peer_name(&self) -> String {
        lock(&self.route).peer.map_or_else(|| "a peer".into(), |peer| peer.to_string())
    }

    /// Returns the transport as text for people.
    pub(crate) fn transport(&self) -> String {
        match self.route() {
            Route { device: Some(device), qp_num, .. } => {
                format!("queue pair {qp_num:#x} on {}", device.name)
            }
            Route { encrypted: true, .. } => "TCP with TLS".into(),
            _ => "TCP".into(),
        }
    }

    /// Returns the next message. If there is none, `waker` is called when one has arrived or the
    /// link has ended.
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

    /// Reads bytes for a stream on `channel` from the TCP socket straight into `out`. Returns false
    /// if nothing could be read in this way.
    #[cfg(feature = "tokio")]
    pub(crate) fn read_through(&self, channel: u16, out: &mut ReadBuf<'_>) -> Result<bool, Error> {
        self.with(|state, env, wakes| {
            let read = state.read_through(env.pool, channel, out);
            match &read {
                // the peer may have returned credits, or be waiting for some
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

    /// Returns why the link is down. If it is not down, `waker` is called when it is.
    pub(crate) fn ended(&self, waker: &Waker) -> Option<Error> {
        let mut state = lock(&self.state);
        let over = state.failure().cloned();
        if over.is_none() {
            state.core.wake_on_end(waker);
        }
        over
    }

    /// Ends the link after everything queued was delivered.
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

    /// Checks the timers. Returns when to check again, and whether the peer was heard from
    /// recently.
    ///
    /// # Errors
    /// The peer has not answered a keepalive in time, so its path or the link must fail.
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

/// Returns the buffer of a read.
pub(crate) fn unique(held: Held) -> Option<BufMut> {
    match held {
        Held::Unique(buf) => Some(buf),
        _ => None,
    }
}
