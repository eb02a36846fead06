//! Links that peers open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use ferrite_verbs::{Access, CmEvent, CmEventKind, CmId, ConnectParams, ConnectionRequest, Mtu};

use super::calling::Reply;
use super::{Meeting, Place, UNKNOWN_PEER, bring_up, door_limits, initialise, lane_of, params, reads};
use crate::engine::Shared;
use crate::engine::gear::Made;
use crate::engine::lane::Lane;
use crate::engine::poller::Poller;
use crate::engine::timers::Timer;
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::listener::ListenerShared;
use crate::source::Source;
use crate::wire::{Hello, HelloError, Refusal, RefusalCode, Version};

const NO_WINDOWS: &str =
    "the server's device cannot keep clients' memory apart (rdma-shared-windows); use TCP";

/// Who gets a link when the handshake is done.
pub(crate) enum Expecting {
    Listener(Weak<ListenerShared>),
    /// Who took the request of a stranger.
    Caller(Reply),
}

impl Expecting {
    /// It came to nothing. A listener does not hear of that.
    pub(super) fn tell(self, error: Error) {
        if let Self::Caller(reply) = self {
            let _ = reply.send(Err(error));
        }
    }
}

/// A peer's request that is being accepted.
struct Accepting {
    request: ConnectionRequest,
    /// `None`: it said none, and hears none.
    hello: Option<Hello>,
    moves: bool,
    who: Expecting,
}

impl Accepting {
    fn source(&self) -> Source {
        source(&self.request)
    }

    /// Tells whoever asked, and the peer, that it comes to nothing.
    fn fail(self, shared: &Shared, error: Error) {
        let Self { request, who, .. } = self;
        match who {
            Expecting::Listener(_) => {
                let code = match error.kind() {
                    ErrorKind::Resources | ErrorKind::Full => RefusalCode::MEMORY,
                    _ => RefusalCode::POLICY,
                };
                refuse(shared, request, code, 0, &error.to_string());
            }
            Expecting::Caller(reply) => {
                shared.counters.refused.fetch_add(1, Ordering::Relaxed);
                shared.commands.discard(source(&request), request); // which refuses it
                let _ = reply.send(Err(error));
            }
        }
    }
}

fn source(request: &ConnectionRequest) -> Source {
    of(&request.id)
}

/// Handshakes of all peers together of which a command is under way.
const COMMANDED_MAX: usize = 1024;

impl Poller {
    pub(super) fn on_request(&mut self, shared: &Shared, event: CmEvent) {
        let Some(request) = event.request else { return };
        let listener = match self.meetings.by_key.get(&event.id) {
            Some(Meeting::Listening { listener, .. }) => Arc::clone(listener),
            _ => return, // the listener is gone; dropping the request refuses it
        };
        if let Some(wait) = self.strikes.wait(source(&request), self.now) {
            shared.counters.refused_after_access_errors.fetch_add(1, Ordering::Relaxed);
            let ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
            refuse(
                shared,
                request,
                RefusalCode::POLICY,
                ms,
                "this address asked for memory that is not its own",
            );
            return;
        }
        if !listener.is_at(request.id.local_addr()) {
            shared.counters.misdirected.fetch_add(1, Ordering::Relaxed);
            refuse(shared, request, RefusalCode::POLICY, 0, "nobody listens at this address over RDMA");
            return;
        }
        let hello = match listener.strangers_only {
            true => Err(HelloError::Stranger),
            false => Hello::decode(&request.private_data),
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(HelloError::Stranger | HelloError::Short { .. }) => {
                shared.counters.strangers.fetch_add(1, Ordering::Relaxed);
                if !shared.config.shared_windows
                    && lane_of(shared, &request.id).is_ok_and(|lane| !lane.has_windows())
                {
                    shared.counters.refused_without_windows.fetch_add(1, Ordering::Relaxed);
                    refuse(shared, request, RefusalCode::POLICY, 0, NO_WINDOWS);
                    return;
                }
                if let Err(request) = listener.stranger(request, &mut self.wakes) {
                    refuse(
                        shared,
                        *request,
                        RefusalCode::STRANGER,
                        0,
                        "this listener takes Ferrite peers only",
                    );
                }
                return;
            }
            Err(HelloError::Version { theirs }) => {
                let text = format!("we speak {}, you {theirs}", Version::CURRENT);
                refuse(shared, request, RefusalCode::VERSION, 0, &text);
                return;
            }
            Err(error) => {
                refuse(shared, request, RefusalCode::PROTOCOL, 0, &error.to_string());
                return;
            }
        };
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        if links >= shared.config.max_connections {
            refuse(shared, request, RefusalCode::LIMIT, 1000, "max_connections is reached");
            return;
        }
        if listener.is_full() || !self.make_place(shared, &request.id) {
            refuse(shared, request, RefusalCode::BUSY, 20, "too many handshakes at a time");
            return;
        }
        if !shared.commands.has_room(source(&request)) {
            refuse(shared, request, RefusalCode::BUSY, 20, "too many handshakes of this address at a time");
            return;
        }
        let who = Expecting::Listener(Arc::downgrade(&listener));
        self.accept(shared, Accepting { request, hello: Some(hello), moves: listener.moves, who });
    }

    /// Takes a peer that says nothing of itself.
    pub(crate) fn accept_stranger(&mut self, shared: &Shared, request: ConnectionRequest, reply: Reply) {
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        let wrong = if links >= shared.config.max_connections {
            Some(Error::new(ErrorKind::Resources, "max_connections is reached"))
        } else if !shared.commands.has_room(source(&request)) || !self.make_place(shared, &request.id) {
            Some(Error::new(ErrorKind::Full, "too many handshakes at a time"))
        } else {
            None
        };
        let accepting = Accepting { request, hello: None, moves: false, who: Expecting::Caller(reply) };
        match wrong {
            None => self.accept(shared, accepting),
            Some(error) => accepting.fail(shared, error),
        }
    }

    /// Whether this peer may begin a handshake. If there are too many, the oldest of the busiest source makes place: a peer
    /// that means it is done long before.
    fn make_place(&mut self, shared: &Shared, id: &CmId) -> bool {
        // Each source has a limit of its own for commands; this one is for all of them together.
        if self.meetings.commanded >= COMMANDED_MAX {
            return false;
        }
        // By the time up to which we have heard all: a handshake is not old because this side was away for long, and what
        // it said meanwhile may be behind this request.
        match self.meetings.incoming.place(of(id), self.heard_all, door_limits(shared)) {
            Place::Free => true,
            Place::Later(_) => false,
            Place::Of(oldest) => {
                shared.counters.crowded_out.fetch_add(1, Ordering::Relaxed);
                self.meeting_timed_out(shared, oldest);
                true
            }
        }
    }

    /// First step: a queue pair, brought up to the peer's.
    fn accept(&mut self, shared: &Shared, accepting: Accepting) {
        let begun = lane_of(shared, &accepting.request.id).cloned();
        let begun = begun.and_then(|lane| Ok((self.begin_making(shared, &lane)?, lane)));
        let (maker, lane) = match begun {
            Ok(begun) => begun,
            Err(error) => return accepting.fail(shared, error),
        };
        let (reads_in, reads_out) = reads(shared, &lane);
        let reads_in = reads_in.min(accepting.request.reads_in_wanted);
        let reads_out = reads_out.min(accepting.request.reads_out_max);
        let (ack_timeout, source) = (shared.config.ack_timeout, accepting.source());
        // As `make_bare` will have it.
        let rights = if accepting.hello.is_none() { Access::REMOTE_WRITE } else { Access::LOCAL };
        self.meetings.command(accepting.request.id.key(), true);
        let work = move |accepting: &mut Accepting| {
            let id = &accepting.request.id;
            let _ = id.set_ack_timeout(ack_timeout); // kernels before 5.1 have none
            let made = maker.make()?;
            initialise(id, &made.qp)?;
            let mtu = bring_up(id, &made.qp, rights, (reads_in, reads_out))?;
            Ok((made, mtu))
        };
        self.command(shared, source, accepting, work, move |poller, shared, accepting, made| {
            poller.accept_over(shared, accepting, &lane, made, (reads_in, reads_out));
        });
    }

    /// Second step: the link, then the answer to the peer, which may send as soon as it hears of us.
    fn accept_over(
        &mut self,
        shared: &Shared,
        accepting: Accepting,
        lane: &Arc<Lane>,
        made: Result<(Made, Option<Mtu>), Error>,
        (reads_in, reads_out): (u8, u8),
    ) {
        let (key, source) = (accepting.request.id.key(), accepting.source());
        let linked = match made {
            Ok((made, mtu)) => {
                let linked =
                    self.make_link(shared, lane, made, accepting.request.id.peer_addr(), accepting.moves);
                linked.map(|(link, ours)| (link, ours, mtu))
            }
            Err(error) => {
                self.end_making(shared, lane);
                Err(error)
            }
        };
        let (link, ours, mtu) = match linked {
            Ok(linked) => linked,
            Err(error) => {
                self.resume(shared, key, None);
                return accepting.fail(shared, error);
            }
        };
        link.with_wakes(&mut self.wakes, |state, _, _| match accepting.hello {
            Some(hello) => state.set_peer(hello),
            None => state.make_bare(),
        });
        let params = ConnectParams { reads_in, reads_out, ..params(shared, lane, &link, &[]) };
        let work = move |accepting: &mut Accepting| {
            let private_data = ours.encode();
            let private_data = if accepting.hello.is_some() { &private_data[..] } else { &[] };
            Ok(accepting.request.id.accept(&ConnectParams { private_data, ..params })?)
        };
        self.command(shared, source, accepting, work, move |poller, shared, accepting, accepted| {
            match accepted {
                Ok(()) => {
                    let Accepting { request, hello, who, .. } = accepting;
                    let hello = hello.unwrap_or(ours);
                    poller.timers.add(poller.now + shared.config.connection_timeout, Timer::Meeting(key));
                    // The peer may have broken a rule already: then the link is over, and with it the handshake.
                    if let Some(error) = failure(&link) {
                        poller.resume(shared, key, None);
                        shared.commands.discard(source, request.id);
                        return who.tell(error);
                    }
                    link.set_route(|route| {
                        route.cm_key = Some(key);
                        (route.local, route.peer) = (request.id.local_addr(), request.id.peer_addr());
                    });
                    poller.meetings.incoming.enter(key, source, poller.now);
                    let meeting = Meeting::Incoming { id: request.id, link, hello, mtu, who };
                    poller.resume(shared, key, Some(meeting));
                }
                Err(error) => {
                    poller.unmake_link(shared, &link, &error);
                    poller.resume(shared, key, None);
                    accepting.fail(shared, error);
                }
            }
        });
    }

    pub(super) fn on_incoming_event(
        &mut self,
        shared: &Shared,
        event: CmEvent,
        id: CmId,
        link: Arc<LinkShared>,
        (hello, mtu): (Hello, Option<Mtu>),
        who: Expecting,
    ) {
        if let Some(error) = failure(&link) {
            shared.commands.discard(link.source(), id);
            return who.tell(error);
        }
        if event.kind == CmEventKind::ESTABLISHED {
            self.establish(shared, id, &link, hello, mtu);
            shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
            match who {
                Expecting::Listener(listener) => match listener.upgrade() {
                    Some(listener) => listener.arrived(link, &mut self.wakes),
                    None => link.close(), // the listener is gone
                },
                Expecting::Caller(reply) => {
                    if let Err(Ok(link)) = reply.send(Ok(link)) {
                        link.close(); // nobody wanted it any more
                    }
                }
            }
            return;
        }
        let peer = id.peer_addr().unwrap_or(UNKNOWN_PEER);
        let error = Error::from(event.into_error(peer));
        shared.commands.discard(link.source(), id);
        self.unmake_link(shared, &link, &error);
        who.tell(error);
    }
}

/// Why a link is over, if it is.
fn failure(link: &LinkShared) -> Option<Error> {
    link.with(|state, _, _| state.failure().cloned())
}

fn of(id: &CmId) -> Source {
    Source::of_any(id.peer_addr())
}

fn refuse(shared: &Shared, request: ConnectionRequest, code: RefusalCode, retry_after_ms: u32, text: &str) {
    shared.counters.refused.fetch_add(1, Ordering::Relaxed);
    let refusal = Refusal { version: Version::CURRENT, code, retry_after_ms, text: text.into() };
    shared.commands.run(source(&request), move || {
        let _ = request.id.reject(&refusal.encode()); // else it is refused by being dropped, without a reason
    });
}
