//! The TCP connections of a fabric: listeners, handshakes in progress, and which connection belongs
//! to which link.
//!
//! ```text
//!   outgoing   connect ─► our hello ─► the peer's hello ─► link
//!   incoming   accept ─► the peer's hello ─► our hello ─► link in the listener's queue
//!                     └► a refusal, with the reason; also for foreign peers that nobody accepts
//! ```
//!
//! As with RDMA CM, everything runs in the poller's pass and never blocks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};

use super::admission::{Admission, AdmissionQueue, Limits};
use super::calling::Reply;
use super::greeting::{Greeting, Side};
use super::migration::TcpConnection;
use super::{UNKNOWN_PEER, own_limits};
use crate::descriptors;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::{LinkName, Timer};
use crate::fabric::wait_set::Ready;
use crate::link::core::SEGMENT_BYTES;
use crate::link::shared::LinkShared;
use crate::link::state::{LinkState, Reading};
use crate::link::tcp::TcpPath;
use crate::link::tls::Tls;
use crate::listener::ListenerShared;
use crate::log_limit::LogLimit;
use crate::mem::Account;
use crate::policy::{Fallback, Rdma};
use crate::source::Source;
use crate::wire::{self, GREETING_BYTES, Hello, Resume};

/// Maximum number of connections that one pass handles, and that it accepts from a listener.
const SOCKETS_PER_PASS: usize = 16;
/// Size of the buffer for bytes that have no other buffer yet. All connections share it.
const SCRATCH_BYTES: usize = 64 << 10;
/// Connections that have sent nothing are cheap: this many are allowed for each possible handshake.
const SILENT_PER_HANDSHAKE: usize = 16;
/// The delay after which a listener that ran out of descriptors or memory tries again. Nothing
/// reports when there are some.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The connections of a fabric, by number.
#[derive(Default)]
pub(crate) struct Sockets {
    uses: HashMap<u64, Use>,
    next: u64,
    /// Connections that need to be handled.
    ready: VecDeque<u64>,
    /// Handshakes of peers that have sent nothing yet. They are not counted as half open.
    pub(super) silent: AdmissionQueue<u64>,
    /// Handshakes that have started and not finished.
    pub(super) half_open: AdmissionQueue<u64>,
    /// TLS handshakes that wait until fewer are half open, and whether the timer for them is
    /// running.
    pub(super) waiting: VecDeque<u64>,
    pub(super) admission_timer: bool,
    /// Handshakes of peers that want to resume a link, until that is possible or the link is gone.
    waiting_for_link: HashMap<LinkName, Vec<u64>>,
    /// Connections that wait for pool memory, which nothing reports, and those over their own
    /// budget, which are notified.
    starved: HashSet<u64>,
    over_budget: HashSet<u64>,
    scratch: Vec<u8>,
    /// Connections that carry a link, as opposed to being only its fallback. They are handled in
    /// every pass.
    carrying: HashSet<u64>,
    /// Receive memory of the links of each source.
    sources: HashMap<Source, Account>,
}

/// The current use of a connection.
pub(super) enum Use {
    Listening { socket: OwnedFd, listener: Weak<ListenerShared>, tls: Option<Arc<ServerConfig>> },
    Greeting(Box<Greeting>),
    Link(LinkName),
}

/// The purpose of an outgoing connection.
pub(crate) enum Purpose {
    /// A new link; with the reason if RDMA was preferred and failed.
    Link(Reply, Option<Fallback>),
    /// A new link that is to be upgraded to RDMA at once.
    Rdma(Reply, Rdma),
    /// Resuming a link that has lost its path.
    Resume(LinkName, Resume),
}

impl Sockets {
    /// Returns whether any connection carries a link: then every pass checks the descriptors.
    pub(crate) fn are_in_use(&self) -> bool {
        !self.carrying.is_empty()
    }

    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(crate) fn on_ready(&mut self, id: u64) {
        if !self.ready.contains(&id) {
            self.ready.push_back(id);
        }
    }

    /// Removes a connection whose link is gone.
    pub(crate) fn forget(&mut self, id: u64) {
        self.uses.remove(&id);
        self.carrying.remove(&id);
        self.over_budget.remove(&id);
    }

    /// Sets whether a connection carries its link, or is only its fallback.
    pub(crate) fn set_carrying(&mut self, id: u64, does: bool) {
        if does {
            self.carrying.insert(id);
        } else {
            self.carrying.remove(&id);
        }
    }

    /// Handles a connection again that was over its budget: some of its memory may have been
    /// released.
    pub(crate) fn on_credit(&mut self, id: u64) {
        if self.over_budget.remove(&id) {
            self.on_ready(id);
        }
    }

    /// Handles connections again that waited for pool memory.
    pub(crate) fn retry_starved(&mut self) {
        self.ready.extend(self.starved.drain());
    }

    /// Makes a handshake wait until the link can be resumed, or is gone.
    pub(super) fn wait_for(&mut self, link: LinkName, id: u64) {
        let waiting_for_link = self.waiting_for_link.entry(link).or_default();
        if !waiting_for_link.contains(&id) {
            waiting_for_link.push(id);
        }
    }

    pub(crate) fn stop_waiting_for(&mut self, link: LinkName) {
        self.ready.extend(self.waiting_for_link.remove(&link).into_iter().flatten());
    }

    pub(super) fn put(&mut self, id: u64, entry: Use) {
        self.uses.insert(id, entry);
    }

    /// Removes a handshake that has ended, and lets the next one start.
    pub(super) fn leave_admission(&mut self, id: u64) {
        self.leave_silent(id);
        if self.half_open.leave(id) {
            // The latest one, because it is the least likely to be slow on purpose.
            self.ready.extend(self.waiting.pop_back());
        }
    }

    /// Removes a connection from the silent ones. It also stops waiting: it was admitted or has
    /// ended.
    pub(super) fn leave_silent(&mut self, id: u64) {
        if self.silent.leave(id) {
            self.waiting.retain(|waiting| *waiting != id);
        }
    }

    pub(super) fn greeting(&self, id: u64) -> Option<&Greeting> {
        match self.uses.get(&id)? {
            Use::Greeting(greeting) => Some(greeting),
            _ => None,
        }
    }

    pub(super) fn take_greeting(&mut self, id: u64) -> Option<Box<Greeting>> {
        match self.uses.remove(&id)? {
            Use::Greeting(greeting) => Some(greeting),
            other => {
                self.uses.insert(id, other);
                None
            }
        }
    }
}

/// The parameters of an outgoing connection.
pub(crate) struct Dial {
    pub(crate) peer: SocketAddr,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) deadline: Instant,
    pub(crate) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    pub(crate) purpose: Purpose,
}

impl Poller {
    /// Starts to listen; returns the connection's number and its address.
    pub(crate) fn listen_tcp(
        &mut self,
        shared: &Shared,
        (local, one_family): (SocketAddr, bool),
        tls: Option<Arc<ServerConfig>>,
        listener: &Arc<ListenerShared>,
    ) -> Result<(u64, SocketAddr), Error> {
        let socket = open_socket(local).map_err(tcp_error("socket", local))?;
        sockopt::set_socket_reuseaddr(&socket, true).map_err(tcp_error("SO_REUSEADDR", local))?;
        if one_family {
            sockopt::set_ipv6_v6only(&socket, true).map_err(tcp_error("IPV6_V6ONLY", local))?;
        }
        rustix::net::bind(&socket, &local).map_err(tcp_error("bind", local))?;
        rustix::net::listen(&socket, 1024).map_err(tcp_error("listen", local))?;
        let bound = address(rustix::net::getsockname(&socket)).unwrap_or(local);
        let id = self.sockets.next;
        self.sockets.next += 1;
        shared.waits.add_socket(socket.as_fd(), Ready::Socket(id))?;
        self.sockets.put(id, Use::Listening { socket, listener: Arc::downgrade(listener), tls });
        Ok((id, bound))
    }

    pub(crate) fn listening_descriptor(&self, id: u64) -> Option<RawFd> {
        match self.sockets.uses.get(&id)? {
            Use::Listening { socket, .. } => Some(socket.as_raw_fd()),
            _ => None,
        }
    }

    pub(crate) fn stop_listening_tcp(&mut self, id: u64) {
        self.sockets.uses.remove(&id);
    }

    /// Starts an outgoing connection.
    pub(crate) fn dial(&mut self, shared: &Shared, dial: Dial) {
        let Dial { peer, local, deadline, tls, purpose } = dial;
        let trusted = tls.clone();
        let tls = match tls.map(|(config, name)| Tls::client(config, name)).transpose() {
            Ok(tls) => tls.map(Box::new),
            Err(error) => {
                self.dial_failed(
                    shared,
                    purpose,
                    Error::new(ErrorKind::Misuse, format!("TLS to {peer}: {error}")),
                );
                return;
            }
        };
        let begun = open_socket(peer).and_then(|socket| {
            if let Some(local) = local {
                rustix::net::bind(&socket, &local)?;
            }
            match rustix::net::connect(&socket, &peer) {
                Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
                Err(errno) => Err(errno),
            }
        });
        let socket = match begun {
            Ok(socket) => socket,
            Err(errno) => {
                self.dial_failed(shared, purpose, tcp_error("connect", peer)(errno));
                return;
            }
        };
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        let moves =
            matches!(&purpose, Purpose::Link(_, Some(_)) | Purpose::Rdma(..) | Purpose::Resume(..));
        let ours = shared.hello(links, moves);
        let resume = match &purpose {
            Purpose::Link(..) | Purpose::Rdma(..) => None,
            Purpose::Resume(_, resume) => Some(*resume),
        };
        let id = self.sockets.next;
        self.sockets.next += 1;
        if let Err(error) = shared.waits.add_socket(socket.as_fd(), Ready::Socket(id)) {
            self.dial_failed(shared, purpose, error);
            return;
        }
        let side = Side::Dialing { connected: false, purpose };
        let greeting = Greeting {
            socket,
            tls,
            trusted,
            to_send: wire::Greeting { hello: ours, resume }.encode().to_vec(),
            sent: 0,
            heard: Vec::new(),
            ours: Some(ours),
            side,
            peer,
            since: Instant::now(),
            refusing: false,
        };
        self.sockets.put(id, Use::Greeting(Box::new(greeting)));
        self.timers.add(deadline, Timer::Greeting(id));
    }

    /// Handles the connections that are ready; returns how many.
    pub(crate) fn serve_sockets(&mut self, shared: &Shared) -> usize {
        let count = self.sockets.ready.len().min(SOCKETS_PER_PASS);
        for _ in 0..count {
            let Some(id) = self.sockets.ready.pop_front() else { break };
            match self.sockets.uses.get(&id) {
                Some(Use::Link(name)) => {
                    let name = *name;
                    self.serve_link(shared, id, name);
                }
                Some(Use::Listening { .. }) => self.accept_some(shared, id),
                Some(Use::Greeting(_)) => self.handle_greeting(shared, id),
                None => {}
            }
        }
        count
    }

    fn serve_link(&mut self, shared: &Shared, id: u64, name: LinkName) {
        let Some(link) = self.link(shared, name.index).filter(|link| link.name == name) else {
            return;
        };
        let mut scratch = std::mem::take(&mut self.sockets.scratch);
        scratch.resize(SCRATCH_BYTES, 0);
        let now = self.now;
        let read = link.with_wakes(&mut self.wakes, |state, env, wakes| {
            if let Some(tcp) = &mut state.tcp {
                tcp.unblock();
            }
            state.on_socket(env, &mut scratch, now, wakes, &mut |request| {
                shared.regions.serve(&link, request)
            })
        });
        self.sockets.scratch = scratch;
        match read {
            Reading::Done => {}
            Reading::More => self.sockets.ready.push_back(id),
            Reading::NoMemory => {
                self.sockets.starved.insert(id);
                self.refill_later();
            }
            Reading::OverBudget => {
                if self.sockets.over_budget.insert(id) {
                    link.call_on_credit();
                    // Once more: some memory may have been released before that.
                    self.sockets.on_ready(id);
                }
            }
        }
    }

    fn accept_some(&mut self, shared: &Shared, id: u64) {
        let Some(Use::Listening { socket, listener, tls }) = self.sockets.uses.get(&id) else {
            return;
        };
        let (listener, tls) = (listener.clone(), tls.clone());
        let (mut taken, mut count) = (Vec::new(), 0);
        while count < SOCKETS_PER_PASS {
            match rustix::net::acceptfrom_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            {
                Ok((socket, peer)) => {
                    count += 1;
                    match descriptors::lift(socket) {
                        Ok(socket) => taken.push((socket, address(peer.ok_or(Errno::INVAL)))),
                        Err(error) => {
                            accept_failed(
                                shared,
                                &format!("{error}; raise LimitNOFILE= or ulimit -n"),
                            );
                        }
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                // Edge-triggered epoll does not report waiting connections again, so try later.
                Err(errno) => {
                    accept_failed(shared, &format!("{errno}; trying again soon"));
                    self.timers.add(self.now + ACCEPT_AGAIN, Timer::Accept(id));
                    break;
                }
            }
        }
        if count == SOCKETS_PER_PASS {
            self.sockets.on_ready(id); // there may be more
        }
        for (socket, peer) in taken {
            self.start_greeting(
                shared,
                socket,
                peer.unwrap_or(UNKNOWN_PEER),
                &listener,
                tls.clone(),
            );
        }
    }

    /// Starts the handshake with a peer that has connected.
    fn start_greeting(
        &mut self,
        shared: &Shared,
        socket: OwnedFd,
        peer: SocketAddr,
        listener: &Weak<ListenerShared>,
        tls: Option<Arc<ServerConfig>>,
    ) {
        let tls = match tls.map(Tls::server).transpose() {
            Ok(tls) => tls.map(Box::new),
            Err(_) => return, // a configuration without a certificate: no handshake is possible
        };
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let id = self.sockets.next;
        self.sockets.next += 1;
        if shared.waits.add_socket(socket.as_fd(), Ready::Socket(id)).is_err() {
            return;
        }
        let deadline = self.now + shared.config.connection_timeout;
        let greeting = Greeting {
            socket,
            tls,
            trusted: None,
            to_send: Vec::new(),
            sent: 0,
            heard: Vec::new(),
            ours: None,
            side: Side::Answering { listener: listener.clone(), resumes: None },
            peer,
            since: Instant::now(),
            refusing: false,
        };
        let all = shared.config.max_half_open.saturating_mul(SILENT_PER_HANDSHAKE);
        let limits = Limits { all, each: all.div_ceil(2), grace: Duration::ZERO };
        let admission = self.sockets.silent.admit(Source::of(peer), self.now, limits);
        if let Admission::Displaces(oldest) = admission {
            self.displace(shared, oldest);
        }
        self.sockets.silent.enter(id, Source::of(peer), self.now);
        self.sockets.put(id, Use::Greeting(Box::new(greeting)));
        self.timers.add(deadline, Timer::Greeting(id));
        self.sockets.on_ready(id);
    }

    /// Turns a connection into a link, or resumes one, after both hellos.
    pub(super) fn become_link(
        &mut self,
        shared: &Shared,
        id: u64,
        greeting: Greeting,
        theirs: wire::Greeting,
    ) {
        let Greeting { socket, tls, trusted, mut heard, ours, side, peer, .. } = greeting;
        let early = heard.split_off(GREETING_BYTES.min(heard.len()));
        let local = address(rustix::net::getsockname(&socket));
        let connection = TcpConnection { socket: id, encrypted: tls.is_some(), local, peer };
        let side = match side {
            Side::Answering { resumes: Some((link, received)), .. } => {
                self.assign_to_link(id, link.name);
                let account =
                    self.account_of(shared, peer, &link.with(|state, _, _| *state.core.hello()));
                let path = TcpPath::new(socket, tls, early).charged_to(Some(account));
                self.resume_link(&link, &connection, path, received);
                return;
            }
            Side::Dialing { purpose: Purpose::Resume(name, asked), .. } => {
                let Some(link) = self.link_named(shared, name) else { return };
                let answered = theirs.resume.filter(|answer| answer.answers(&asked));
                let Some(resume) = answered else {
                    self.reject_resume_answer(shared, &link);
                    return;
                };
                self.assign_to_link(id, name);
                self.resume_link(
                    &link,
                    &connection,
                    TcpPath::new(socket, tls, early),
                    resume.received,
                );
                return;
            }
            side => side,
        };
        let theirs = theirs.hello;
        // Reserved only now: a number that is reserved for a link that never opens would be lost.
        let with_name = |ours| Some((reserve_name(shared)?, ours));
        let Some((name, ours)) = ours.and_then(with_name) else {
            if let Side::Dialing {
                purpose: Purpose::Link(reply, _) | Purpose::Rdma(reply, _),
                ..
            } = side
            {
                let what = "too many links: no link number is free";
                let _ = reply.send(Err(Error::new(ErrorKind::Resources, what)));
            }
            return;
        };
        let encrypted = tls.is_some();
        let account = match &side {
            Side::Answering { .. } => Some(self.account_of(shared, peer, &ours)),
            Side::Dialing { .. } => None, // this side chose to connect
        };
        let path = TcpPath::new(socket, tls, early).charged_to(account);
        let mut state = LinkState::over_tcp(path, own_limits(shared, ours, name));
        state.core.open(theirs, self.now);
        state.core.set_caller(matches!(side, Side::Dialing { .. }));
        let (pool, mailbox) = (shared.pool.clone(), Arc::clone(&shared.mailbox));
        let link = Arc::new(LinkShared::new(name, state, pool, mailbox));
        link.set_route(|route| {
            (route.socket, route.encrypted) = (Some(id), encrypted);
            (route.local, route.peer) = (local, Some(peer));
        });
        self.register_link(shared, &link);
        self.assign_to_link(id, name);
        link.set_tls(trusted);
        self.timers.add(self.now, Timer::Keepalive(name)); // its handler sets the next one
        match side {
            Side::Dialing { purpose: Purpose::Resume(..), .. } => {}
            Side::Dialing { purpose: Purpose::Rdma(reply, policy), .. } => {
                shared.counters.connected.fetch_add(1, Ordering::Relaxed);
                self.open_on_rdma(shared, &link, reply, policy);
            }
            Side::Dialing { purpose: Purpose::Link(reply, fallback), .. } => {
                shared.counters.connected.fetch_add(1, Ordering::Relaxed);
                if let Some(fallback) = fallback {
                    shared.fell_back(&link, fallback);
                    let moves =
                        link.with_wakes(&mut self.wakes, |state, _, _| state.core.can_migrate());
                    if moves {
                        self.upgrade_in(&link, shared.config.upgrade_after);
                    }
                }
                if let Err(Ok(link)) = reply.send(Ok(link)) {
                    link.close(); // the caller is gone
                }
            }
            Side::Answering { listener, .. } => {
                shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
                match listener.upgrade() {
                    Some(listener) => listener.arrived(link, &mut self.wakes),
                    None => link.close(),
                }
            }
        }
    }
}

impl Poller {
    /// Returns the account for memory that a peer's link receives over TCP. The link has a limit of
    /// its own; what it does not need to make progress counts against the limit of its source. A
    /// message that has started can always be completed, otherwise links would wait for each other.
    fn account_of(&mut self, shared: &Shared, peer: SocketAddr, hello: &Hello) -> Account {
        let frame = u64::from(hello.segment_bytes).max(SEGMENT_BYTES as u64);
        // Memory blocks are up to eight times as large as their contents.
        let most =
            frame * (u64::from(hello.window) + 1) + hello.max_message_bytes.saturating_mul(8);
        self.sockets.sources.retain(|_, account| !account.is_last());
        let all = shared.config.memory.receive_reserve as u64 / 8;
        let source = self.sockets.sources.entry(Source::of(peer));
        let source = source.or_insert_with(|| Account::new(peer.ip().to_string(), all));
        source.part(peer.to_string(), most, frame + hello.max_message_bytes.saturating_mul(2))
    }

    /// Assigns a connection to the link that it carries from now on.
    fn assign_to_link(&mut self, id: u64, name: LinkName) {
        self.sockets.put(id, Use::Link(name));
        self.sockets.set_carrying(id, true);
        self.sockets.on_ready(id); // data may have arrived with the greeting
    }
}

fn reserve_name(shared: &Shared) -> Option<LinkName> {
    let mut links = shared.links.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    links.reserve().map(|(name, _)| name)
}

fn accept_failed(shared: &Shared, why: &str) {
    static LINES: LogLimit = LogLimit::new();
    shared.counters.accept_failures.fetch_add(1, Ordering::Relaxed);
    if let Some(others) = LINES.pass() {
        tracing::warn!("cannot accept a connection: {why}{others}");
    }
}

fn open_socket(of: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if of.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

fn address(found: Result<rustix::net::SocketAddrAny, Errno>) -> Option<SocketAddr> {
    found.ok().and_then(|found| SocketAddr::try_from(found).ok())
}

pub(super) fn tcp_error(call: &'static str, addr: SocketAddr) -> impl Fn(Errno) -> Error {
    move |errno| {
        let kind = match errno {
            Errno::CONNREFUSED => ErrorKind::Refused,
            Errno::CONNRESET | Errno::PIPE => ErrorKind::LinkDown,
            Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::ADDRNOTAVAIL
            // From this local address, the peer is not reachable.
            | Errno::INVAL => ErrorKind::Unreachable,
            Errno::TIMEDOUT => ErrorKind::Timeout,
            Errno::ADDRINUSE | Errno::ACCESS => ErrorKind::Misuse,
            Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM => ErrorKind::Resources,
            _ => ErrorKind::System,
        };
        let hint = match errno {
            Errno::ADDRINUSE => {
                "; choose another port, or stop the program that has it (`ss -ltnp` lists it)"
            }
            Errno::ADDRNOTAVAIL if call == "bind" => {
                "; this host has no such address (`ip addr` lists those it has)"
            }
            _ => "",
        };
        Error::new(kind, format!("{call} {addr} over TCP: {errno}{hint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::source;

    /// Otherwise the queue would grow with every connection that ever waited.
    #[test]
    fn connections_that_ended_do_not_wait_for_admission() {
        let (mut sockets, peer, now) = (Sockets::default(), source("10.0.0.1"), Instant::now());
        sockets.half_open.enter(0, peer, now);
        for id in 1..=3 {
            sockets.silent.enter(id, peer, now);
            sockets.waiting.push_back(id);
        }
        sockets.leave_admission(3);
        assert_eq!(sockets.waiting, [1, 2]);
        sockets.leave_admission(0);
        assert_eq!(
            (&sockets.waiting, &sockets.ready),
            (&[1].into(), &[2].into()),
            "the next one may start"
        );
    }
}
