//! Greetings over TCP: two peers say hello, or one of them is told no; who says something else is a
//! foreign peer.

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

use super::admission::{Limits, Place};
use super::door_limits;
use super::migration::Sought;
use super::sockets::{Use, Wants, failed};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::shared::LinkShared;
use crate::link::tcp::{receive, send};
use crate::link::tls::Tls;
use crate::listener::{ForeignTcpPeer, ListenerShared};
use crate::policy::Fallback;
use crate::source::Source;
use crate::wire::{
    self, GREETING_BYTES, Hello, HelloError, MAGIC, REFUSAL_BYTES_MAX, REFUSAL_MAGIC, Refusal,
    RefusalCode, Resume, Version,
};

/// A connection whose peers are not acquainted yet.
pub(super) struct Greeting {
    pub(super) socket: OwnedFd,
    pub(super) tls: Option<Box<Tls>>,
    /// How the peer can be called again.
    pub(super) trusted: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    /// What is to be said, and how much of it has gone.
    pub(super) saying: Vec<u8>,
    pub(super) said: usize,
    pub(super) heard: Vec<u8>,
    /// Ours; the answering side makes it when it has heard the peer's.
    pub(super) ours: Option<Hello>,
    pub(super) side: Side,
    pub(super) peer: SocketAddr,
    /// Since when there is a connection, or an attempt at one.
    pub(super) since: Instant,
    /// Said no: it ends when that is written.
    pub(super) refusing: bool,
}

pub(super) enum Side {
    Dialing {
        connected: bool,
        wants: Wants,
    },
    /// `resumes` is the link that goes on here, and the frames of ours that its peer has.
    Answering {
        listener: Weak<ListenerShared>,
        resumes: Option<(Arc<LinkShared>, u64)>,
    },
}

/// What a peer turned out to be.
enum Heard {
    Hello(wire::Greeting),
    ForeignPeer,
}

impl Poller {
    pub(super) fn greet(&mut self, shared: &Shared, id: u64) {
        if !self.may_begin(shared, id) {
            return;
        }
        let Some(mut greeting) = self.sockets.take_greeting(id) else { return };
        match self.step_greeting(shared, id, &mut greeting) {
            Ok(None) => {
                let (peer, has_begun) = (greeting.peer, !greeting.heard.is_empty());
                self.sockets.put(id, Use::Greeting(greeting));
                if has_begun && self.sockets.silent.contains(id) {
                    // Half a hello, which nobody sends who means it: none of them waits for
                    // another.
                    let limits = Limits { grace: Duration::ZERO, ..door_limits(shared) };
                    self.enter_half_open(shared, id, peer, limits);
                }
            }
            Ok(Some(Heard::Hello(theirs))) => {
                self.sockets.leave_door(id);
                self.become_link(shared, id, *greeting, theirs);
            }
            Ok(Some(Heard::ForeignPeer)) => {
                self.sockets.leave_door(id);
                self.hand_over(shared, *greeting);
            }
            Err(error) => {
                self.sockets.leave_door(id);
                if let Side::Dialing { wants, .. } = greeting.side {
                    self.dial_failed(shared, wants, error);
                }
            }
        }
    }

    /// Whether a greeting may be looked at. One with TLS that has something to say costs a
    /// handshake, and waits for its place.
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
            _ => self.enter_half_open(shared, id, peer, door_limits(shared)),
        }
    }

    /// Makes a silent connection a handshake, if there is a place for it; else it waits.
    fn enter_half_open(
        &mut self,
        shared: &Shared,
        id: u64,
        peer: SocketAddr,
        limits: Limits,
    ) -> bool {
        let source = Source::of(peer);
        match self.sockets.half_open.place(source, self.now, limits) {
            Place::Free => {}
            Place::Of(oldest) => self.crowd_out(shared, oldest),
            Place::Later(at) => {
                if !self.sockets.waiting.contains(&id) {
                    self.sockets.waiting.push_back(id);
                }
                if !std::mem::replace(&mut self.sockets.door_timer, true) {
                    self.timers.add(at, Timer::Admission);
                }
                return false;
            }
        }
        self.sockets.leave_the_silent(id);
        self.sockets.half_open.enter(id, source, self.now);
        true
    }

    /// Handshakes may be old enough to make place for those that wait.
    pub(crate) fn admit_waiting(&mut self, shared: &Shared) {
        self.sockets.door_timer = false;
        for _ in 0..shared.config.max_half_open {
            let Some(id) = self.sockets.waiting.pop_back() else { break };
            self.sockets.on_ready(id);
        }
    }

    /// Ends a connection that has not got anywhere, so that another can come. A silent one may be a
    /// client of a pool: it goes to whoever takes those, earlier than it would have otherwise.
    pub(super) fn crowd_out(&mut self, shared: &Shared, id: u64) {
        self.sockets.leave_door(id);
        let Some(greeting) = self.sockets.take_greeting(id) else { return };
        shared.counters.handshakes_displaced.fetch_add(1, Ordering::Relaxed);
        if greeting.heard.is_empty() && greeting.accepts_foreign_peers() {
            self.hand_over(shared, *greeting);
        }
    }

    /// Gives a connection to whoever takes foreign peers.
    fn hand_over(&mut self, shared: &Shared, greeting: Greeting) {
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

    pub(super) fn dial_failed(&mut self, shared: &Shared, wants: Wants, error: Error) {
        match wants {
            Wants::Link(reply, fallback) => drop(reply.send(Err(both(error, fallback)))),
            Wants::Rdma(reply, _) => drop(reply.send(Err(error))),
            Wants::Resume(name, _) => self.redial_failed(shared, name, &error),
        }
    }

    /// Ends a link without a path: whoever answered for its peer named another link, or none. That
    /// is not its peer, or one that has lost its way, and nothing that it says may reach the link.
    pub(super) fn resume_misanswered(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        link.with_wakes(&mut self.wakes, |state, _, wakes| {
            let Some(lost) = &state.lost else { return };
            let what =
                format!("{}; and the answer at the peer's address names another link", lost.error);
            let error =
                Error::new(lost.error.kind(), what).with_causes(lost.error.causes().to_vec());
            state.end(error, wakes);
        });
        self.attend(shared, link.index);
    }

    pub(crate) fn greeting_timed_out(&mut self, shared: &Shared, id: u64) {
        let Some(greeting) = self.sockets.take_greeting(id) else { return };
        self.sockets.leave_door(id);
        if greeting.heard.is_empty() && greeting.accepts_foreign_peers() {
            // A client of a pool, perhaps, that has nothing to say yet. Ferrite peers speak at
            // once.
            self.hand_over(shared, *greeting);
            return;
        }
        if let Side::Dialing { connected, wants } = greeting.side {
            let what = if connected {
                format!("{} accepted a TCP connection and did not say hello in time", greeting.peer)
            } else {
                format!("{} did not answer over TCP in time", greeting.peer)
            };
            self.dial_failed(shared, wants, Error::new(ErrorKind::Timeout, what));
        }
    }

    /// One step; the peer's hello when both have said theirs, or that it has none.
    fn step_greeting(
        &mut self,
        shared: &Shared,
        id: u64,
        greeting: &mut Greeting,
    ) -> Result<Option<Heard>, Error> {
        let peer = greeting.peer;
        if let Side::Dialing { connected, .. } = &mut greeting.side
            && !*connected
        {
            match sockopt::socket_error(&greeting.socket) {
                Ok(Ok(())) => {}
                Ok(Err(errno)) | Err(errno) => return Err(failed("connect", peer)(errno)),
            }
            if rustix::net::getpeername(&greeting.socket).is_err() {
                return Ok(None); // not yet
            }
            *connected = true;
            let _ = sockopt::set_tcp_nodelay(&greeting.socket, true);
        }
        greeting.speak().map_err(|error| broken(peer, &error))?;
        if greeting.refusing {
            // Once it is said, the connection ends.
            return match greeting.said == greeting.saying.len() {
                true => Err(Error::new(ErrorKind::Refused, "refused")),
                false => Ok(None),
            };
        }
        let ended = greeting.listen().map_err(|error| broken(peer, &error))?;
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
                    let what = format!("{peer} is not a Ferrite peer of our version: {error}");
                    return Err(Error::new(ErrorKind::Protocol, what));
                };
                let (code, text) = match error {
                    HelloError::Version { theirs } => (
                        RefusalCode::VERSION,
                        format!("we speak {}, you {theirs}", Version::CURRENT),
                    ),
                    HelloError::ForeignPeer if greeting.accepts_foreign_peers() => {
                        return Ok(Some(Heard::ForeignPeer));
                    }
                    HelloError::ForeignPeer | HelloError::Short { .. } => {
                        shared.counters.foreign_peers.fetch_add(1, Ordering::Relaxed);
                        (RefusalCode::FOREIGN_PEER, "this listener takes Ferrite peers only".into())
                    }
                    error => (RefusalCode::PROTOCOL, error.to_string()),
                };
                greeting.refuse(shared, code, 0, &text).map_err(|error| broken(peer, &error))?;
                return Ok(None);
            }
        };
        if greeting.ours.is_none() {
            let links =
                shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
            let full = match &greeting.side {
                Side::Answering { listener, .. } => {
                    listener.upgrade().is_none_or(|listener| listener.is_full())
                }
                Side::Dialing { .. } => false,
            };
            let sought = theirs.resume.map(|resume| self.find_lost(shared, id, &resume));
            let no = if let Some(sought) = &sought {
                match sought {
                    Sought::NotYet => return Ok(None),
                    Sought::Unknown => {
                        Some((RefusalCode::PROTOCOL, 0, "no such link is without a path"))
                    }
                    Sought::Found(..) => None,
                }
            } else if links >= shared.config.max_connections {
                Some((RefusalCode::LIMIT, 1000, "max_connections is reached"))
            } else if full {
                Some((RefusalCode::BUSY, 20, "too many links that nobody has accepted"))
            } else {
                None
            };
            if let Some((code, later, text)) = no {
                greeting.refuse(shared, code, later, text).map_err(|error| broken(peer, &error))?;
                return Ok(None);
            }
            let moves = match &greeting.side {
                Side::Answering { listener, .. } => {
                    listener.upgrade().is_some_and(|listener| listener.can_migrate)
                }
                Side::Dialing { .. } => false,
            };
            let ours = shared.hello(links, moves);
            let mut resume = None;
            if let (Some(Sought::Found(link, received)), Some(theirs)) = (sought, theirs.resume) {
                resume = Some(Resume { yours: theirs.mine, mine: theirs.yours, received });
                if let Side::Answering { resumes, .. } = &mut greeting.side {
                    *resumes = Some((link, theirs.received));
                }
            }
            greeting.ours = Some(ours);
            greeting.saying = wire::Greeting { hello: ours, resume }.encode().to_vec();
            greeting.speak().map_err(|error| broken(peer, &error))?;
        }
        Ok((greeting.said == greeting.saying.len()).then_some(Heard::Hello(theirs)))
    }
}

impl Greeting {
    /// Whether a peer without a hello would be welcome. With TLS what it says is not what came.
    fn accepts_foreign_peers(&self) -> bool {
        let Side::Answering { listener, .. } = &self.side else { return false };
        self.tls.is_none()
            && listener.upgrade().is_some_and(|listener| listener.accepts_foreign_tcp_peers())
    }

    /// Says what is left to say.
    fn speak(&mut self) -> io::Result<()> {
        loop {
            let rest = &self.saying[self.said..];
            let wants = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
            if rest.is_empty() && !wants {
                return Ok(());
            }
            let slices = [IoSlice::new(rest)];
            let sent = match &mut self.tls {
                None => send(&self.socket, &slices)?,
                Some(tls) => tls.write(&self.socket, &slices)?,
            };
            match sent {
                Some(sent) => self.said += sent,
                None => return Ok(()),
            }
        }
    }

    /// Hears what there is, up to a hello and what came with it; whether the peer has ended.
    fn listen(&mut self) -> io::Result<bool> {
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

    fn refuse(
        &mut self,
        shared: &Shared,
        code: RefusalCode,
        later_ms: u32,
        text: &str,
    ) -> io::Result<()> {
        shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.saying = refusal(code, later_ms, text);
        (self.said, self.refusing) = (0, true);
        self.speak()
    }
}

/// Whether these are the first bytes of a hello, or of a refusal, before its magic is whole.
fn may_become_greeting(heard: &[u8]) -> bool {
    [MAGIC, REFUSAL_MAGIC].iter().any(|magic| magic.starts_with(heard))
}

fn refusal(code: RefusalCode, retry_after_ms: u32, text: &str) -> Vec<u8> {
    Refusal { version: Version::CURRENT, code, retry_after_ms, text: text.into() }.encode()
}

fn broken(peer: SocketAddr, error: &io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::InvalidData => ErrorKind::Protocol,
        _ => ErrorKind::LinkDown,
    };
    Error::new(kind, format!("{peer} during the handshake over TCP: {error}"))
}

/// How both ways failed. The first is told as what it is: it is the one that was wanted.
fn both(error: Error, fallback: Option<Fallback>) -> Error {
    match fallback {
        None => error,
        Some(Fallback { error: first, .. }) => {
            let what = format!("{first}; and over TCP: {error}");
            Error::new(first.kind(), what).with_causes(first.causes().to_vec())
        }
    }
}
