//! Handshakes over TCP: two peers exchange hellos, or one refuses the other. A peer that sends
//! other data than a hello is a foreign peer. If the listener accepts foreign peers, so is a peer
//! that sends nothing in time.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, sockopt};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use super::admission::{Admission, Limits};
use super::dialing::Purpose;
use super::migration::LostLink;
use super::socket_calls::tcp_error;
use super::{refusing, tcp_handshake_limits, tls_failure};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::listener::{ForeignTcpPeer, LinkRequest, ListenerShared};
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::shared::LinkShared;
use crate::link::socket::{receive, send};
use crate::link::tls::Tls;
use crate::policy::Fallback;
use crate::source::Source;
use crate::wire::{
    self, GREETING_BYTES, Hello, HelloError, MAGIC, REFUSAL_BYTES_MAX, REFUSAL_MAGIC, Refusal,
    RefusalCode, Resume,
};

/// A connection whose handshake is in progress.
pub(super) struct Greeting {
    pub(super) socket: OwnedFd,
    pub(super) tls: Option<Box<Tls>>,
    /// The TLS settings with which to reconnect to the peer.
    pub(super) trusted: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    /// The bytes to send, and how many of them were sent.
    pub(super) to_send: Vec<u8>,
    pub(super) sent: usize,
    pub(super) heard: Vec<u8>,
    /// Our hello. The accepting side creates it after it has received the peer's hello.
    pub(super) ours: Option<Hello>,
    pub(super) side: Side,
    pub(super) peer: SocketAddr,
    /// When the connection was started or accepted.
    pub(super) since: Instant,
    /// Whether the peer is refused. The connection then ends when the refusal is sent.
    pub(super) refusing: bool,
}

pub(super) enum Side {
    Dialing {
        connected: bool,
        purpose: Purpose,
    },
    /// `resumes` is the link that continues over this connection, and the number of our frames that
    /// the peer has received on that link.
    Answering {
        listener: Weak<ListenerShared>,
        resumes: Option<(Arc<LinkShared>, u64)>,
    },
}

/// The kind of a peer, once it is known.
enum PeerKind {
    Ferrite(wire::Greeting),
    Foreign,
}

impl Poller {
    pub(super) fn handle_greeting(&mut self, shared: &Shared, id: u64) {
        if !self.may_begin(shared, id) {
            return;
        }
        let Some(mut greeting) = self.sockets.take_greeting(id) else { return };
        match self.step_greeting(shared, id, &mut greeting) {
            Ok(None) => {
                let (peer, has_begun) = (greeting.peer, !greeting.heard.is_empty());
                self.sockets.put_greeting(id, greeting);
                if has_begun && self.sockets.silent.contains(id) {
                    // A correct peer sends its whole hello at once. So connections that have sent
                    // only a part of a hello have no grace period, and this connection may displace
                    // them.
                    let limits = Limits { grace: Duration::ZERO, ..tcp_handshake_limits(shared) };
                    self.enter_half_open(shared, id, peer, limits);
                }
            }
            Ok(Some(PeerKind::Ferrite(theirs))) => {
                self.sockets.leave_admission(id);
                self.become_link(shared, id, *greeting, theirs);
            }
            Ok(Some(PeerKind::Foreign)) => {
                self.sockets.leave_admission(id);
                self.hand_to_listener(shared, *greeting);
            }
            Err(error) => {
                self.sockets.leave_admission(id);
                match greeting.side {
                    Side::Dialing { purpose, .. } => self.dial_failed(shared, purpose, error),
                    // With TLS, a protocol error here is a failure of TLS itself. An invalid hello
                    // within TLS is no error here: the peer gets a refusal.
                    Side::Answering { .. }
                        if greeting.tls.is_some() && error.kind() == ErrorKind::Protocol =>
                    {
                        shared.counters.tls_failures.fetch_add(1, Ordering::Relaxed);
                        tls_failure::warn(&error);
                    }
                    Side::Answering { .. } => {}
                }
            }
        }
    }

    /// Returns whether to process a connection that has become ready. With TLS, the first bytes
    /// start an expensive handshake, so the connection must be admitted first.
    fn may_begin(&mut self, shared: &Shared, id: u64) -> bool {
        if !self.sockets.silent.contains(id) {
            return true;
        }
        let Some(greeting) = self.sockets.greeting(id) else { return false };
        if greeting.tls.is_none() {
            return true;
        }
        let peer = greeting.peer;
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        match rustix::net::recv(greeting.socket.as_fd(), &mut [0; 1], flags) {
            Err(Errno::AGAIN | Errno::INTR) => false,
            _ => self.enter_half_open(shared, id, peer, tcp_handshake_limits(shared)),
        }
    }

    /// Turns a silent connection into a handshake if it is admitted. Otherwise the connection
    /// waits.
    fn enter_half_open(
        &mut self,
        shared: &Shared,
        id: u64,
        peer: SocketAddr,
        limits: Limits,
    ) -> bool {
        let source = Source::of(peer);
        match self.sockets.half_open.admit(source, self.now, limits) {
            Admission::Granted => {}
            Admission::Displaces(oldest) => self.displace(shared, oldest),
            Admission::Wait(at) => {
                if !self.sockets.waiting.contains(&id) {
                    self.sockets.waiting.push_back(id);
                }
                if !std::mem::replace(&mut self.sockets.admission_timer, true) {
                    self.timers.add(at, Timer::Admission);
                }
                return false;
            }
        }
        self.sockets.leave_silent(id);
        self.sockets.half_open.enter(id, source, self.now);
        true
    }

    /// Lets waiting connections try again, because handshakes may now be old enough to be
    /// displaced.
    pub(crate) fn admit_waiting(&mut self, shared: &Shared) {
        self.sockets.admission_timer = false;
        for _ in 0..shared.config.max_half_open {
            let Some(id) = self.sockets.waiting.pop_back() else { break };
            self.sockets.on_ready(id);
        }
    }

    /// Ends an unfinished handshake, so that another connection can be admitted. A silent
    /// connection may be a pooled client of another protocol. If the listener accepts foreign
    /// peers, the silent connection goes to them, earlier than after the timeout. Other connections
    /// are closed.
    pub(super) fn displace(&mut self, shared: &Shared, id: u64) {
        self.sockets.leave_admission(id);
        let Some(greeting) = self.sockets.take_greeting(id) else { return };
        shared.counters.handshakes_displaced.fetch_add(1, Ordering::Relaxed);
        if greeting.heard.is_empty() && greeting.accepts_foreign_peers() {
            self.hand_to_listener(shared, *greeting);
        }
    }

    /// Hands a connection to the listener's queue of foreign peers.
    fn hand_to_listener(&mut self, shared: &Shared, greeting: Greeting) {
        let Greeting { socket, heard, side: Side::Answering { listener, .. }, peer, since, .. } =
            greeting
        else {
            return;
        };
        shared.counters.foreign_peers.fetch_add(1, Ordering::Relaxed);
        shared.waits.remove(socket.as_fd());
        if let Some(listener) = listener.upgrade() {
            let socket = socket.into();
            let foreign_peer = ForeignTcpPeer {
                socket,
                heard,
                peer,
                accepted: since,
                handed_over: Instant::now(),
            };
            listener.foreign_tcp_peer(foreign_peer, &mut self.wakes);
        }
    }

    pub(super) fn dial_failed(&mut self, shared: &Shared, purpose: Purpose, error: Error) {
        match purpose {
            Purpose::Link(reply, fallback) => {
                drop(reply.send(Err(combine_errors(error, fallback))));
            }
            Purpose::Rdma(reply, _) => drop(reply.send(Err(error))),
            Purpose::Resume(name, _) => self.redial_failed(shared, name, &error),
        }
    }

    /// Ends a link without a path, because its peer's address answered for another link or for no
    /// link. The sender is not the link's peer, or is a peer with a wrong state. No data of that
    /// sender may reach the link.
    pub(super) fn reject_resume_answer(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        link.with_wakes(&mut self.wakes, |state, _, wakes| {
            let Some(lost) = state.core.lost() else { return };
            let what =
                format!("{}; the answer from the peer's address was not for this link", lost.error);
            let error =
                Error::new(lost.error.kind(), what).with_causes(lost.error.causes().to_vec());
            state.core.end(error, wakes);
        });
        self.service_link(shared, link.index);
    }

    /// Ends an attempt to reconnect a link if the TCP connection is not established yet. The next
    /// attempt may succeed from another local address.
    pub(crate) fn connect_timed_out(&mut self, shared: &Shared, id: u64) {
        let is_waiting = self.sockets.greeting(id).is_some_and(|greeting| {
            matches!(greeting.side, Side::Dialing { connected: false, .. })
        });
        if is_waiting {
            self.greeting_timed_out(shared, id);
        }
    }

    pub(crate) fn greeting_timed_out(&mut self, shared: &Shared, id: u64) {
        let Some(greeting) = self.sockets.take_greeting(id) else { return };
        self.sockets.leave_admission(id);
        if greeting.heard.is_empty() && greeting.accepts_foreign_peers() {
            // The peer may be a pooled client that has nothing to send yet. Ferrite peers send at
            // once.
            self.hand_to_listener(shared, *greeting);
            return;
        }
        if let Side::Dialing { connected, purpose } = greeting.side {
            let what = if connected {
                format!(
                    "{} accepted a TCP connection but did not send a hello in time",
                    greeting.peer
                )
            } else {
                format!("{} did not answer over TCP in time", greeting.peer)
            };
            self.dial_failed(shared, purpose, Error::new(ErrorKind::Timeout, what));
        }
    }

    /// Advances the handshake by one step. Returns the kind of the peer, once it is known and (for
    /// a Ferrite peer) our hello was sent.
    fn step_greeting(
        &mut self,
        shared: &Shared,
        id: u64,
        greeting: &mut Greeting,
    ) -> Result<Option<PeerKind>, Error> {
        let peer = greeting.peer;
        if let Side::Dialing { connected, .. } = &mut greeting.side
            && !*connected
        {
            match sockopt::socket_error(&greeting.socket) {
                Ok(Ok(())) => {}
                Ok(Err(errno)) | Err(errno) => return Err(tcp_error("connect", peer)(errno)),
            }
            if rustix::net::getpeername(&greeting.socket).is_err() {
                return Ok(None); // not yet
            }
            *connected = true;
            let _ = sockopt::set_tcp_nodelay(&greeting.socket, true);
        }
        greeting.flush().map_err(|error| handshake_error(peer, &error))?;
        if greeting.refusing {
            // Once the refusal is sent, the connection ends.
            return match greeting.sent == greeting.to_send.len() {
                true => Err(Error::new(ErrorKind::Refused, "refused")),
                false => Ok(None),
            };
        }
        let ended = greeting.read().map_err(|error| handshake_error(peer, &error))?;
        if ended && greeting.heard.is_empty() {
            return Err(Error::new(
                ErrorKind::LinkDown,
                format!("{peer} hung up during the handshake over TCP"),
            ));
        }
        if greeting.heard.starts_with(&REFUSAL_MAGIC) {
            return match Refusal::decode(&greeting.heard) {
                Some(refusal)
                    if ended || greeting.heard.len() >= 13 + usize::from(greeting.heard[12]) =>
                {
                    Err(Error::refused(&peer.to_string(), refusal))
                }
                _ => Ok(None),
            };
        }
        let heard = &greeting.heard[..greeting.heard.len().min(GREETING_BYTES)];
        let theirs = match wire::Greeting::decode(heard) {
            Ok(theirs) => theirs,
            Err(HelloError::Short { .. }) if !ended => return Ok(None),
            Err(HelloError::ForeignPeer) if may_become_greeting(heard) && !ended => {
                return Ok(None);
            }
            Err(error) => {
                let Side::Answering { .. } = greeting.side else {
                    let what = match greeting.tls.is_none() && tls_failure::is_alert(heard) {
                        true => format!("{peer} requires TLS, and this side has no TLS for it"),
                        false => format!("{peer} is not a compatible Ferrite peer: {error}"),
                    };
                    return Err(Error::new(ErrorKind::Protocol, what));
                };
                if error == HelloError::ForeignPeer && greeting.accepts_foreign_peers() {
                    return Ok(Some(PeerKind::Foreign));
                }
                if matches!(error, HelloError::ForeignPeer | HelloError::Short { .. }) {
                    shared.counters.foreign_peers.fetch_add(1, Ordering::Relaxed);
                }
                greeting
                    .refuse(shared, &refusing::without_hello(error))
                    .map_err(|error| handshake_error(peer, &error))?;
                return Ok(None);
            }
        };
        if greeting.ours.is_none() {
            if ended && theirs.resume.is_some() {
                // The peer has given this connection up, and resumes its link over another.
                let what = format!("{peer} hung up before its link was resumed");
                return Err(Error::new(ErrorKind::LinkDown, what));
            }
            let sought = theirs.resume.map(|resume| {
                self.find_lost(shared, id, &resume, |link| greeting.is_from_peer_of(link))
            });
            let no = if let Some(sought) = &sought {
                match sought {
                    LostLink::NotYet => return Ok(None),
                    LostLink::Unknown => {
                        let text = "there is no such link to resume";
                        Some(refusing::refusal(RefusalCode::PROTOCOL, 0, text))
                    }
                    LostLink::Found(..) => None,
                }
            } else if let Side::Answering { listener, .. } = &greeting.side {
                let certificates = greeting.tls.as_ref().map(|tls| tls.peer_certificates());
                let certificates = certificates.unwrap_or_default();
                let wanted = LinkRequest { peer: Some(peer), certificates: &certificates };
                refusing::of_new_link(shared, listener.upgrade().as_deref(), &wanted)
            } else {
                None
            };
            if let Some(refusal) = no {
                greeting.refuse(shared, &refusal).map_err(|error| handshake_error(peer, &error))?;
                return Ok(None);
            }
            let moves = match &greeting.side {
                Side::Answering { listener, .. } => {
                    listener.upgrade().is_some_and(|listener| listener.can_migrate)
                }
                Side::Dialing { .. } => false,
            };
            let links =
                shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
            let ours = shared.hello(links, moves);
            let mut resume = None;
            if let (Some(LostLink::Found(link, received)), Some(theirs)) = (sought, theirs.resume) {
                resume = Some(Resume { yours: theirs.mine, mine: theirs.yours, received });
                if let Side::Answering { resumes, .. } = &mut greeting.side {
                    *resumes = Some((link, theirs.received));
                }
            }
            greeting.ours = Some(ours);
            greeting.to_send = wire::Greeting { hello: ours, resume }.encode().to_vec();
            greeting.flush().map_err(|error| handshake_error(peer, &error))?;
        }
        Ok((greeting.sent == greeting.to_send.len()).then_some(PeerKind::Ferrite(theirs)))
    }
}

impl Greeting {
    /// Returns whether the listener accepts foreign peers on this connection. A connection with TLS
    /// has no foreign peers: the program that serves them gets the plain socket and cannot decrypt
    /// its data.
    fn accepts_foreign_peers(&self) -> bool {
        let Side::Answering { listener, .. } = &self.side else { return false };
        self.tls.is_none()
            && listener.upgrade().is_some_and(|listener| listener.accepts_foreign_tcp_peers())
    }

    /// Returns whether a connection that resumes a link presents the certificate with which the
    /// link has begun.
    fn is_from_peer_of(&self, link: &LinkShared) -> bool {
        let certificates = self.tls.as_ref().map(|tls| tls.peer_certificates());
        let first = link.peer_certificates.get().and_then(|certificates| certificates.first());
        first.is_none() || certificates.as_ref().and_then(|them| them.first()) == first
    }

    /// Sends the rest of `to_send`, and the data that TLS has to send.
    fn flush(&mut self) -> io::Result<()> {
        loop {
            let rest = &self.to_send[self.sent..];
            let tls_wants_write = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
            if rest.is_empty() && !tls_wants_write {
                return Ok(());
            }
            let slices = [IoSlice::new(rest)];
            let sent = match &mut self.tls {
                None => send(&self.socket, &slices)?,
                Some(tls) => tls.write(&self.socket, &slices)?,
            };
            match sent {
                Some(sent) => self.sent += sent,
                None => return Ok(()),
            }
        }
    }

    /// Reads what has arrived, until it is at least as long as the longest greeting or refusal.
    /// Returns whether the peer has ended the connection.
    fn read(&mut self) -> io::Result<bool> {
        while self.heard.len() < GREETING_BYTES.max(REFUSAL_BYTES_MAX) {
            let mut bytes = [0; 256];
            let slices = &mut [IoSliceMut::new(&mut bytes)];
            let heard = match &mut self.tls {
                None => receive(&self.socket, slices)?,
                Some(tls) => tls.read(&self.socket, slices)?,
            };
            match heard {
                Some(0) => return Ok(true),
                Some(len) => self.heard.extend_from_slice(&bytes[..len]),
                None => break,
            }
        }
        Ok(false)
    }

    fn refuse(&mut self, shared: &Shared, refusal: &Refusal) -> io::Result<()> {
        shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.to_send = refusal.encode();
        (self.sent, self.refusing) = (0, true);
        self.flush()
    }
}

/// Returns whether `heard` may be the start of a hello or of a refusal.
fn may_become_greeting(heard: &[u8]) -> bool {
    [MAGIC, REFUSAL_MAGIC].iter().any(|magic| magic.starts_with(heard))
}

fn handshake_error(peer: SocketAddr, error: &io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::InvalidData => ErrorKind::Protocol,
        _ => ErrorKind::LinkDown,
    };
    let why = tls_failure::describe(error).unwrap_or_else(|| error.to_string());
    Error::new(kind, format!("the handshake with {peer} over TCP failed: {why}"))
}

/// Combines the errors of both transports. The kind is that of the RDMA error, because RDMA was
/// preferred.
fn combine_errors(error: Error, fallback: Option<Fallback>) -> Error {
    match fallback {
        None => error,
        Some(Fallback { error: first, .. }) => {
            let what = format!("{first}; and over TCP: {error}");
            Error::new(first.kind(), what).with_causes(first.causes().to_vec())
        }
    }
}
