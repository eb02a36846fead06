//! Creates or resumes links over TCP after both hellos were exchanged.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::dialing::Purpose;
use super::greeting::{Greeting, Side};
use super::migration::TcpConnection;
use super::own_limits;
use super::socket_calls::address;
use super::sockets::Use;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::core::SEGMENT_BYTES;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;
use crate::link::state::LinkState;
use crate::link::tcp::TcpPath;
use crate::mem::Account;
use crate::source::Source;
use crate::wire::{self, GREETING_BYTES, Hello};

impl Poller {
    /// Creates a link over a connection, or resumes a link, after both hellos.
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
        // Reserve the number only now. A number that is reserved for a link that never opens would
        // be lost.
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
        let certificates = tls.as_ref().map(|tls| tls.peer_certificates()).unwrap_or_default();
        let account = match &side {
            Side::Answering { .. } => Some(self.account_of(shared, peer, &ours)),
            Side::Dialing { .. } => None, // only peers that connect to this side are limited
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
        let _ = link.peer_certificates.set(certificates); // once, because the link is new
        self.timers.add(self.now, Timer::Keepalive(name)); // its handler restarts the timer
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

    /// Returns the account for memory that a peer's link receives over TCP. The link has its own
    /// limit. Only memory beyond what the largest message needs also counts against the limit of
    /// its source. So a message that has started can always be completed, and links of one source
    /// do not wait for each other's memory.
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
