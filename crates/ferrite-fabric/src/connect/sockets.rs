//! TCP connections of a fabric: listeners, greetings under way, and which link has which.
//!
//! ```text
//!   outgoing   connect ─► our hello ─► the peer's hello ─► link
//!   incoming   accept ─► the peer's hello ─► our hello ─► link in the listener's queue
//!                                         └► or a refusal, in words; foreign peers get one too, unless somebody takes them
//! ```
//!
//! As with RDMA CM, everything runs in the poller's pass and never waits.

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

use super::admission::{AdmissionQueue, Limits, Place as AtTheDoor};
use super::calling::Reply;
use super::greeting::{Greeting, Side};
use super::migration::Place;
use super::{UNKNOWN_PEER, own_limits};
use crate::descriptors;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::{LinkName, Timer};
use crate::fabric::wait_set::Ready;
use crate::link::shared::LinkShared;
use crate::link::state::{LinkState, Reading};
use crate::link::tcp::{SEGMENT_BYTES, TcpPath};
use crate::link::tls::Tls;
use crate::listener::ListenerShared;
use crate::log_limit::LogLimit;
use crate::mem::Account;
use crate::policy::{Fallback, Rdma};
use crate::source::Source;
use crate::wire::{self, GREETING_BYTES, Hello, Resume};

/// Connections that are looked at in one pass, and that are accepted.
const TURNS: usize = 16;
/// Where bytes go that have no buffer yet. Shared by all connections.
const SCRATCH_BYTES: usize = 64 << 10;
/// Connections that have said nothing are cheap: so many for each handshake that there may be.
const SILENT: usize = 16;
/// Until a listener that ran out of descriptors or memory tries again. Nobody tells it when there
/// are some.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The connections of a fabric, by number.
#[derive(Default)]
pub(crate) struct Sockets {
    uses: HashMap<u64, Use>,
    next: u64,
    /// Those with something to do.
    ready: VecDeque<u64>,
    /// Greetings of peers that have said nothing yet. They take no place among the handshakes.
    pub(super) silent: AdmissionQueue<u64>,
    /// Those that have begun, and not ended.
    pub(super) half_open: AdmissionQueue<u64>,
    /// Greetings with TLS that wait until fewer are half open, and whether the clock was told of
    /// them.
    pub(super) waiting: VecDeque<u64>,
    pub(super) door_timer: bool,
    /// Greetings of peers that want a link back, until that is possible or it is gone.
    seeking: HashMap<LinkName, Vec<u64>>,
    /// Those that wait for memory, of which nobody tells, and those that wait for some of their
    /// own, of which they are told.
    starved: HashSet<u64>,
    over_budget: HashSet<u64>,
    scratch: Vec<u8>,
    /// Those that carry a link, and are not only its way back: then each pass has to look.
    carrying: HashSet<u64>,
    /// Receive memory of the links of each source.
    sources: HashMap<Source, Account>,
}

pub(super) enum Use {
    Listening { socket: OwnedFd, listener: Weak<ListenerShared>, tls: Option<Arc<ServerConfig>> },
    Greeting(Box<Greeting>),
    Link(LinkName),
}

/// What a connection is wanted for.
pub(crate) enum Wants {
    /// A new link; why not over RDMA, if that was preferred.
    Link(Reply, Option<Fallback>),
    /// A new link that is to go up to RDMA at once.
    Rdma(Reply, Rdma),
    /// A link that has lost its path.
    Resume(LinkName, Resume),
}

impl Sockets {
    /// Whether links are carried: then looking is not left to the clock.
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

    /// The link that had it is gone.
    pub(crate) fn forget(&mut self, id: u64) {
        self.uses.remove(&id);
        self.carrying.remove(&id);
        self.over_budget.remove(&id);
    }

    /// Whether it carries its link, or is its way back.
    pub(crate) fn carries(&mut self, id: u64, does: bool) {
        if does {
            self.carrying.insert(id);
        } else {
            self.carrying.remove(&id);
        }
    }

    /// Some of the memory of one that was over its budget may have come back.
    pub(crate) fn on_credit(&mut self, id: u64) {
        if self.over_budget.remove(&id) {
            self.on_ready(id);
        }
    }

    /// There may be memory again.
    pub(crate) fn unstarve(&mut self) {
        self.ready.extend(self.starved.drain());
    }

    /// A greeting goes on when the link can be had, or is gone.
    pub(super) fn wait_for(&mut self, link: LinkName, id: u64) {
        let seeking = self.seeking.entry(link).or_default();
        if !seeking.contains(&id) {
            seeking.push(id);
        }
    }

    pub(crate) fn stop_waiting_for(&mut self, link: LinkName) {
        self.ready.extend(self.seeking.remove(&link).into_iter().flatten());
    }

    pub(super) fn put(&mut self, id: u64, entry: Use) {
        self.uses.insert(id, entry);
    }

    /// A greeting that is over leaves its place to the next.
    pub(super) fn leave_door(&mut self, id: u64) {
        self.leave_the_silent(id);
        if self.half_open.leave(id) {
            // the latest: it is the least likely to be held up on purpose
            self.ready.extend(self.waiting.pop_back());
        }
    }

    /// A greeting is silent no longer, and waits for no place: it has one, or is over.
    pub(super) fn leave_the_silent(&mut self, id: u64) {
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

/// What a dial needs to know.
pub(crate) struct Dial {
    pub(crate) peer: SocketAddr,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) deadline: Instant,
    pub(crate) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    pub(crate) wants: Wants,
}

impl Poller {
    /// Listens; the number and where.
    pub(crate) fn listen_tcp(
        &mut self,
        shared: &Shared,
        (local, one_family): (SocketAddr, bool),
        tls: Option<Arc<ServerConfig>>,
        listener: &Arc<ListenerShared>,
    ) -> Result<(u64, SocketAddr), Error> {
        let socket = open(local).map_err(failed("socket", local))?;
        sockopt::set_socket_reuseaddr(&socket, true).map_err(failed("SO_REUSEADDR", local))?;
        if one_family {
            sockopt::set_ipv6_v6only(&socket, true).map_err(failed("IPV6_V6ONLY", local))?;
        }
        rustix::net::bind(&socket, &local).map_err(failed("bind", local))?;
        rustix::net::listen(&socket, 1024).map_err(failed("listen", local))?;
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

    /// Begins a connection.
    pub(crate) fn dial(&mut self, shared: &Shared, dial: Dial) {
        let Dial { peer, local, deadline, tls, wants } = dial;
        let trusted = tls.clone();
        let tls = match tls.map(|(config, name)| Tls::client(config, name)).transpose() {
            Ok(tls) => tls.map(Box::new),
            Err(error) => {
                self.dial_failed(
                    shared,
                    wants,
                    Error::new(ErrorKind::Misuse, format!("TLS to {peer}: {error}")),
                );
                return;
            }
        };
        let begun = open(peer).and_then(|socket| {
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
                self.dial_failed(shared, wants, failed("connect", peer)(errno));
                return;
            }
        };
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        let moves = matches!(&wants, Wants::Link(_, Some(_)) | Wants::Rdma(..) | Wants::Resume(..));
        let ours = shared.hello(links, moves);
        let resume = match &wants {
            Wants::Link(..) | Wants::Rdma(..) => None,
            Wants::Resume(_, resume) => Some(*resume),
        };
        let id = self.sockets.next;
        self.sockets.next += 1;
        if let Err(error) = shared.waits.add_socket(socket.as_fd(), Ready::Socket(id)) {
            self.dial_failed(shared, wants, error);
            return;
        }
        let side = Side::Dialing { connected: false, wants };
        let greeting = Greeting {
            socket,
            tls,
            trusted,
            saying: wire::Greeting { hello: ours, resume }.encode().to_vec(),
            said: 0,
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

    /// Looks at connections that have something; how many there were.
    pub(crate) fn serve_sockets(&mut self, shared: &Shared) -> usize {
        let turns = self.sockets.ready.len().min(TURNS);
        for _ in 0..turns {
            let Some(id) = self.sockets.ready.pop_front() else { break };
            match self.sockets.uses.get(&id) {
                Some(Use::Link(name)) => {
                    let name = *name;
                    self.serve_link(shared, id, name);
                }
                Some(Use::Listening { .. }) => self.accept_some(shared, id),
                Some(Use::Greeting(_)) => self.greet(shared, id),
                None => {}
            }
        }
        turns
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
                    self.sockets.on_ready(id); // once more: some may have come back before that
                }
            }
        }
    }

    fn accept_some(&mut self, shared: &Shared, id: u64) {
        let Some(Use::Listening { socket, listener, tls }) = self.sockets.uses.get(&id) else {
            return;
        };
        let (listener, tls) = (listener.clone(), tls.clone());
        let (mut taken, mut turns) = (Vec::new(), 0);
        while turns < TURNS {
            match rustix::net::acceptfrom_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
            {
                Ok((socket, peer)) => {
                    turns += 1;
                    match descriptors::lift(socket) {
                        Ok(socket) => taken.push((socket, address(peer.ok_or(Errno::INVAL)))),
                        Err(error) => {
                            not_accepted(
                                shared,
                                &format!("{error}; raise LimitNOFILE= or ulimit -n"),
                            );
                        }
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                // Those who wait are not told of again.
                Err(errno) => {
                    not_accepted(shared, &format!("{errno}; it is tried again"));
                    self.timers.add(self.now + ACCEPT_AGAIN, Timer::Accept(id));
                    break;
                }
            }
        }
        if turns == TURNS {
            self.sockets.on_ready(id); // there may be more
        }
        for (socket, peer) in taken {
            self.answer(shared, socket, peer.unwrap_or(UNKNOWN_PEER), &listener, tls.clone());
        }
    }

    /// A peer has connected: what it says comes next.
    fn answer(
        &mut self,
        shared: &Shared,
        socket: OwnedFd,
        peer: SocketAddr,
        listener: &Weak<ListenerShared>,
        tls: Option<Arc<ServerConfig>>,
    ) {
        let tls = match tls.map(Tls::server).transpose() {
            Ok(tls) => tls.map(Box::new),
            Err(_) => return, // a configuration without a certificate: no peer can be answered
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
            saying: Vec::new(),
            said: 0,
            heard: Vec::new(),
            ours: None,
            side: Side::Answering { listener: listener.clone(), resumes: None },
            peer,
            since: Instant::now(),
            refusing: false,
        };
        let all = shared.config.max_half_open.saturating_mul(SILENT);
        let limits = Limits { all, each: all.div_ceil(2), grace: Duration::ZERO };
        if let AtTheDoor::Of(oldest) = self.sockets.silent.place(Source::of(peer), self.now, limits)
        {
            self.crowd_out(shared, oldest);
        }
        self.sockets.silent.enter(id, Source::of(peer), self.now);
        self.sockets.put(id, Use::Greeting(Box::new(greeting)));
        self.timers.add(deadline, Timer::Greeting(id));
        self.sockets.on_ready(id);
    }

    /// Both have said hello.
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
        let place = Place { socket: id, encrypted: tls.is_some(), local, peer };
        let side = match side {
            Side::Answering { resumes: Some((link, received)), .. } => {
                self.carry(id, link.name);
                let account =
                    self.account_of(shared, peer, &link.with(|state, _, _| *state.hello()));
                let path = TcpPath::new(socket, tls, early).charged_to(Some(account));
                self.go_on(&link, &place, path, received);
                return;
            }
            Side::Dialing { wants: Wants::Resume(name, asked), .. } => {
                let Some(link) = self.link_named(shared, name) else { return };
                let answered = theirs.resume.filter(|answer| answer.answers(&asked));
                let Some(resume) = answered else {
                    self.resume_misanswered(shared, &link);
                    return;
                };
                self.carry(id, name);
                self.go_on(&link, &place, TcpPath::new(socket, tls, early), resume.received);
                return;
            }
            side => side,
        };
        let theirs = theirs.hello;
        // A number that is taken is a link's: nobody would give it back for one that does not come
        // to be.
        let vacant = |ours| Some((vacancy(shared)?, ours));
        let Some((name, ours)) = ours.and_then(vacant) else {
            if let Side::Dialing { wants: Wants::Link(reply, _) | Wants::Rdma(reply, _), .. } = side
            {
                let what = "no number is left for another link";
                let _ = reply.send(Err(Error::new(ErrorKind::Resources, what)));
            }
            return;
        };
        let encrypted = tls.is_some();
        let account = match &side {
            Side::Answering { .. } => Some(self.account_of(shared, peer, &ours)),
            Side::Dialing { .. } => None, // this side has chosen it
        };
        let path = TcpPath::new(socket, tls, early).charged_to(account);
        let mut state = LinkState::over_tcp(path, own_limits(shared, ours, name));
        state.open(theirs, self.now);
        state.is_caller = matches!(side, Side::Dialing { .. });
        let (pool, mailbox) = (shared.pool.clone(), Arc::clone(&shared.mailbox));
        let link = Arc::new(LinkShared::new(name, state, pool, mailbox));
        link.set_route(|route| {
            (route.socket, route.encrypted) = (Some(id), encrypted);
            (route.local, route.peer) = (local, Some(peer));
        });
        self.register_link(shared, &link);
        self.carry(id, name);
        link.set_tls(trusted);
        self.timers.add(self.now, Timer::Keepalive(name)); // it says when the next is
        match side {
            Side::Dialing { wants: Wants::Resume(..), .. } => {}
            Side::Dialing { wants: Wants::Rdma(reply, policy), .. } => {
                shared.counters.connected.fetch_add(1, Ordering::Relaxed);
                self.open_on_rdma(shared, &link, reply, policy);
            }
            Side::Dialing { wants: Wants::Link(reply, fallback), .. } => {
                shared.counters.connected.fetch_add(1, Ordering::Relaxed);
                if let Some(fallback) = fallback {
                    shared.fell_back(&link, fallback);
                    let moves = link.with_wakes(&mut self.wakes, |state, _, _| state.moves);
                    if moves {
                        self.upgrade_in(&link, shared.config.upgrade_after);
                    }
                }
                if let Err(Ok(link)) = reply.send(Ok(link)) {
                    link.close(); // nobody wanted it any more
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
    /// Who is charged for what a peer's link has come in over TCP: the link, and for what it need
    /// not have to go on, all links of its source. A message that has begun can always end, or
    /// links would wait for each other.
    fn account_of(&mut self, shared: &Shared, peer: SocketAddr, hello: &Hello) -> Account {
        let frame = u64::from(hello.segment_bytes).max(SEGMENT_BYTES as u64);
        // Blocks are up to eight times as large as what lies in them.
        let most =
            frame * (u64::from(hello.window) + 1) + hello.max_message_bytes.saturating_mul(8);
        self.sockets.sources.retain(|_, account| !account.is_last());
        let all = shared.config.memory.receive_reserve as u64 / 8;
        let source = self.sockets.sources.entry(Source::of(peer));
        let source = source.or_insert_with(|| Account::new(peer.ip().to_string(), all));
        source.part(peer.to_string(), most, frame + hello.max_message_bytes.saturating_mul(2))
    }

    /// A connection carries a link from here on.
    fn carry(&mut self, id: u64, name: LinkName) {
        self.sockets.put(id, Use::Link(name));
        self.sockets.carries(id, true);
        self.sockets.on_ready(id); // something may have come along with the greeting
    }
}

fn vacancy(shared: &Shared) -> Option<LinkName> {
    let mut links = shared.links.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    links.reserve().map(|(name, _)| name)
}

fn not_accepted(shared: &Shared, why: &str) {
    static LINES: LogLimit = LogLimit::new();
    shared.counters.accept_failures.fetch_add(1, Ordering::Relaxed);
    if let Some(others) = LINES.pass() {
        tracing::warn!("a connection could not be accepted: {why}{others}");
    }
}

fn open(of: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if of.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

fn address(found: Result<rustix::net::SocketAddrAny, Errno>) -> Option<SocketAddr> {
    found.ok().and_then(|found| SocketAddr::try_from(found).ok())
}

pub(super) fn failed(call: &'static str, addr: SocketAddr) -> impl Fn(Errno) -> Error {
    move |errno| {
        let kind = match errno {
            Errno::CONNREFUSED => ErrorKind::Refused,
            Errno::CONNRESET | Errno::PIPE => ErrorKind::LinkDown,
            Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NETDOWN
            | Errno::HOSTDOWN
            | Errno::ADDRNOTAVAIL
            | Errno::INVAL => ErrorKind::Unreachable, // the last two: not from this address
            Errno::TIMEDOUT => ErrorKind::Timeout,
            Errno::ADDRINUSE | Errno::ACCESS => ErrorKind::Misuse,
            Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM => ErrorKind::Resources,
            _ => ErrorKind::System,
        };
        let hint = match errno {
            Errno::ADDRINUSE => {
                "; choose another port, or stop the program that has it (`ss -ltnp` names it)"
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

    /// Else those that wait would be looked for among all that ever did, and called in vain.
    #[test]
    fn a_greeting_that_is_over_waits_for_no_place() {
        let (mut sockets, peer, now) = (Sockets::default(), source("10.0.0.1"), Instant::now());
        sockets.half_open.enter(0, peer, now);
        for id in 1..=3 {
            sockets.silent.enter(id, peer, now);
            sockets.waiting.push_back(id);
        }
        sockets.leave_door(3);
        assert_eq!(sockets.waiting, [1, 2]);
        sockets.leave_door(0);
        assert_eq!(
            (&sockets.waiting, &sockets.ready),
            (&[1].into(), &[2].into()),
            "the next one has the place"
        );
    }
}
