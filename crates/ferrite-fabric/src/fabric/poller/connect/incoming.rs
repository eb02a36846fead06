//! Incoming links: handshakes that peers start by RDMA CM.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use ferrite_verbs::{Access, CmEvent, CmEventKind, CmId, ConnectParams, ConnectionRequest, Mtu};

use super::admission::Admission;
use super::dialing::Reply;
use super::rdma_link::{Connection, bring_up, initialise, params, reads};
use super::refusing::{self, refusal};
use super::{Handshake, device_of, handshake_limits};
use crate::device::device_objects::NewQueuePair;
use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::listener::{LinkRequest, ListenerShared};
use crate::fabric::poller::Poller;
use crate::fabric::timers::Timer;
use crate::link::shared::LinkShared;
use crate::source::{Source, UNKNOWN_PEER};
use crate::wire::{Hello, HelloError, Refusal, RefusalCode};

const NO_WINDOWS: &str = "the server's RDMA device lacks type 2 memory windows, and the server's \
                          setting `rdma-shared-windows no` rejects clients in that case; connect \
                          over TCP";

/// The recipient of a link when the handshake is done.
pub(crate) enum Recipient {
    Listener(Weak<ListenerShared>),
    /// The caller that accepted the request of a foreign peer.
    Caller(Reply),
}

impl Recipient {
    /// Reports that the handshake failed. A listener is not informed.
    pub(super) fn send_error(self, error: Error) {
        if let Self::Caller(reply) = self {
            let _ = reply.send(Err(error));
        }
    }
}

/// A peer's request that is being accepted.
struct Accepting {
    request: ConnectionRequest,
    /// `None` for a foreign peer, which gets no hello from this side.
    hello: Option<Hello>,
    moves: bool,
    recipient: Recipient,
}

impl Accepting {
    fn source(&self) -> Source {
        source(&self.request)
    }

    /// Reports the failure to the caller, if there is one, and to the peer.
    fn fail(self, shared: &Shared, error: Error) {
        let Self { request, recipient, .. } = self;
        match recipient {
            Recipient::Listener(_) => {
                let code = match error.kind() {
                    ErrorKind::Resources | ErrorKind::Full => RefusalCode::MEMORY,
                    _ => RefusalCode::POLICY,
                };
                refuse(shared, request, &refusal(code, 0, error.to_string()));
            }
            Recipient::Caller(reply) => {
                shared.counters.refused.fetch_add(1, Ordering::Relaxed);
                shared.commands.discard(source(&request), request); // dropping it refuses the peer
                let _ = reply.send(Err(error));
            }
        }
    }
}

fn source(request: &ConnectionRequest) -> Source {
    of(&request.id)
}

/// Maximum number of incoming handshakes with a running command, of all peers together.
const COMMANDED_MAX: usize = 1024;

impl Poller {
    pub(super) fn on_request(&mut self, shared: &Shared, event: CmEvent) {
        let Some(request) = event.request else { return };
        let listener = match self.handshakes.by_key.get(&event.id) {
            Some(Handshake::Listening { listener, .. }) => Arc::clone(listener),
            _ => return, // the listener is gone; dropping the request refuses the peer
        };
        if let Some(wait) = self.strikes.wait(source(&request), self.now) {
            shared.counters.refused_after_access_errors.fetch_add(1, Ordering::Relaxed);
            let ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
            let text = "a client at this address tried to access memory that is not its own";
            refuse(shared, request, &refusal(RefusalCode::POLICY, ms, text));
            return;
        }
        if !listener.is_at(request.id.local_addr()) {
            shared.counters.misdirected.fetch_add(1, Ordering::Relaxed);
            let text = "no RDMA listener on this address";
            refuse(shared, request, &refusal(RefusalCode::POLICY, 0, text));
            return;
        }
        if listener.refuses_cm {
            shared.counters.cm_requests_refused.fetch_add(1, Ordering::Relaxed);
            refusing::warn_of_cm_request(request.id.peer_addr());
            refuse(shared, request, &refusal(RefusalCode::POLICY, 0, refusing::TCP_FIRST_ONLY));
            return;
        }
        let hello = match listener.foreign_peers_only {
            true => Err(HelloError::ForeignPeer),
            false => Hello::decode(&request.private_data),
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(error @ (HelloError::ForeignPeer | HelloError::Short { .. })) => {
                shared.counters.foreign_peers.fetch_add(1, Ordering::Relaxed);
                if !shared.config.shared_windows
                    && device_of(shared, &request.id).is_ok_and(|device| !device.has_windows())
                {
                    shared.counters.refused_without_windows.fetch_add(1, Ordering::Relaxed);
                    refuse(shared, request, &refusal(RefusalCode::POLICY, 0, NO_WINDOWS));
                    return;
                }
                if let Err(request) = listener.foreign_peer(request, &mut self.wakes) {
                    refuse(shared, *request, &refusing::without_hello(error));
                }
                return;
            }
            Err(error) => {
                refuse(shared, request, &refusing::without_hello(error));
                return;
            }
        };
        let wanted = LinkRequest { peer: request.id.peer_addr(), certificates: &[] };
        if let Some(refusal) = refusing::of_new_link(shared, Some(&listener), &wanted) {
            refuse(shared, request, &refusal);
            return;
        }
        if !self.may_start(shared, &request.id) {
            let text = "too many concurrent handshakes";
            refuse(shared, request, &refusal(RefusalCode::BUSY, 20, text));
            return;
        }
        if !shared.commands.has_room(source(&request)) {
            let text = "too many concurrent handshakes from this address";
            refuse(shared, request, &refusal(RefusalCode::BUSY, 20, text));
            return;
        }
        let recipient = Recipient::Listener(Arc::downgrade(&listener));
        self.accept(
            shared,
            Accepting { request, hello: Some(hello), moves: listener.can_migrate, recipient },
        );
    }

    /// Accepts a foreign peer.
    pub(crate) fn accept_foreign_peer(
        &mut self,
        shared: &Shared,
        request: ConnectionRequest,
        reply: Reply,
    ) {
        let wrong = if refusing::too_many_links(shared) {
            Some(Error::new(ErrorKind::Resources, refusing::MAX_CONNECTIONS))
        } else if !shared.commands.has_room(source(&request))
            || !self.may_start(shared, &request.id)
        {
            Some(Error::new(ErrorKind::Full, "too many concurrent handshakes"))
        } else {
            None
        };
        let accepting =
            Accepting { request, hello: None, moves: false, recipient: Recipient::Caller(reply) };
        match wrong {
            None => self.accept(shared, accepting),
            Some(error) => accepting.fail(shared, error),
        }
    }

    /// Returns whether this peer may start a handshake. If there are too many handshakes, in total
    /// or of the peer's source, first ends an older one, if the rules in `admission.rs` allow that.
    /// A correct peer finishes long before its handshake is the oldest.
    fn may_start(&mut self, shared: &Shared, id: &CmId) -> bool {
        // Each source has its own limit for commands; this limit is for all sources together.
        if self.handshakes.commanded >= COMMANDED_MAX {
            return false;
        }
        // The age of handshakes is measured up to `heard_all`, not up to now. If this loop was
        // delayed, the event that completes a handshake may be queued behind this request.
        match self.handshakes.incoming.admit(of(id), self.heard_all, handshake_limits(shared)) {
            Admission::Granted => true,
            Admission::Wait(_) => false,
            Admission::Displaces(oldest) => {
                shared.counters.handshakes_displaced.fetch_add(1, Ordering::Relaxed);
                self.handshake_timed_out(shared, oldest);
                true
            }
        }
    }

    /// First step: creates a queue pair and connects it to the peer's queue pair.
    fn accept(&mut self, shared: &Shared, accepting: Accepting) {
        let begun = device_of(shared, &accepting.request.id).cloned();
        let begun = begun.and_then(|device| Ok((self.begin_queue_pair(shared, &device)?, device)));
        let (builder, device) = match begun {
            Ok(begun) => begun,
            Err(error) => return accepting.fail(shared, error),
        };
        let (reads_in, reads_out) = reads(shared, &device);
        let reads_in = reads_in.min(accepting.request.reads_in_wanted);
        let reads_out = reads_out.min(accepting.request.reads_out_max);
        let (ack_timeout, source) = (shared.config.ack_timeout, accepting.source());
        // These are the rights that `make_raw` sets.
        let rights = if accepting.hello.is_none() { Access::REMOTE_WRITE } else { Access::LOCAL };
        self.handshakes.command(accepting.request.id.key(), true);
        let peer_mtu = accepting.hello.map(|hello| hello.mtu);
        let rnr_timer = device.quirks().rnr_timer;
        let with = Connection { rights, reads_in, reads_out, ack_timeout, rnr_timer, peer_mtu };
        let work = move |accepting: &mut Accepting| {
            let id = &accepting.request.id;
            let _ = id.set_ack_timeout(ack_timeout); // kernels before 5.1 do not support it
            let made = builder.build()?;
            initialise(id, &made.qp)?;
            let mtu = bring_up(id, &made.qp, with)?;
            Ok((made, mtu))
        };
        self.command(shared, source, accepting, work, move |poller, shared, accepting, made| {
            poller.accept_over(shared, accepting, &device, made, (reads_in, reads_out));
        });
    }

    /// Second step: creates the link, then accepts. The link comes first because the peer may send
    /// as soon as it has the response.
    fn accept_over(
        &mut self,
        shared: &Shared,
        accepting: Accepting,
        device: &Arc<SharedDevice>,
        made: Result<(NewQueuePair, Mtu), Error>,
        (reads_in, reads_out): (u8, u8),
    ) {
        let (key, source) = (accepting.request.id.key(), accepting.source());
        let linked = match made {
            Ok((made, mtu)) => {
                let linked = self.create_link(
                    shared,
                    device,
                    made,
                    accepting.request.id.peer_addr(),
                    accepting.moves,
                );
                linked.map(|(link, ours)| (link, ours, mtu))
            }
            Err(error) => {
                self.end_queue_pair(shared, device);
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
            Some(hello) => state.core.set_peer(hello),
            None => state.make_raw(),
        });
        let params = ConnectParams { reads_in, reads_out, ..params(shared, device, &link, &[]) };
        let ours = Hello { mtu: mtu.code(), ..ours };
        let work = move |accepting: &mut Accepting| {
            let private_data = ours.encode();
            let private_data = if accepting.hello.is_some() { &private_data[..] } else { &[] };
            Ok(accepting.request.id.accept(&ConnectParams { private_data, ..params })?)
        };
        self.command(
            shared,
            source,
            accepting,
            work,
            move |poller, shared, accepting, accepted| {
                match accepted {
                    Ok(()) => {
                        let Accepting { request, hello, recipient, .. } = accepting;
                        let hello = hello.unwrap_or(ours);
                        poller.timers.add(
                            poller.now + shared.config.connection_timeout,
                            Timer::Handshake(key),
                        );
                        // The peer may already have violated the protocol, which ended the link.
                        // Then the handshake ends, too.
                        if let Some(error) = failure(&link) {
                            poller.resume(shared, key, None);
                            shared.commands.discard(source, request.id);
                            return recipient.send_error(error);
                        }
                        link.set_route(|route| {
                            route.cm_key = Some(key);
                            (route.local, route.peer) =
                                (request.id.local_addr(), request.id.peer_addr());
                        });
                        poller.handshakes.incoming.enter(key, source, poller.now);
                        let handshake =
                            Handshake::Incoming { id: request.id, link, hello, mtu, recipient };
                        poller.resume(shared, key, Some(handshake));
                    }
                    Err(error) => {
                        poller.abandon_link(shared, &link, &error);
                        poller.resume(shared, key, None);
                        accepting.fail(shared, error);
                    }
                }
            },
        );
    }

    pub(super) fn on_incoming_event(
        &mut self,
        shared: &Shared,
        event: CmEvent,
        id: CmId,
        link: Arc<LinkShared>,
        (hello, mtu): (Hello, Mtu),
        recipient: Recipient,
    ) {
        if let Some(error) = failure(&link) {
            shared.commands.discard(link.source(), id);
            return recipient.send_error(error);
        }
        if event.kind == CmEventKind::ESTABLISHED {
            self.establish(shared, id, &link, hello, mtu);
            shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
            match recipient {
                Recipient::Listener(listener) => match listener.upgrade() {
                    Some(listener) => listener.arrived(link, &mut self.wakes),
                    None => link.close(), // the listener is gone
                },
                Recipient::Caller(reply) => {
                    if let Err(Ok(link)) = reply.send(Ok(link)) {
                        link.close(); // the caller is gone
                    }
                }
            }
            return;
        }
        let peer = id.peer_addr().unwrap_or(UNKNOWN_PEER);
        let error = Error::from(event.into_error(peer));
        shared.commands.discard(link.source(), id);
        self.abandon_link(shared, &link, &error);
        recipient.send_error(error);
    }
}

/// Returns why a link ended, or `None` if it has not.
fn failure(link: &LinkShared) -> Option<Error> {
    link.with(|state, _, _| state.failure().cloned())
}

fn of(id: &CmId) -> Source {
    Source::of_any(id.peer_addr())
}

fn refuse(shared: &Shared, request: ConnectionRequest, refusal: &Refusal) {
    shared.counters.refused.fetch_add(1, Ordering::Relaxed);
    let refusal = refusal.encode();
    shared.commands.run(source(&request), move || {
        // If this fails, dropping the request refuses the peer without a reason.
        let _ = request.id.reject(&refusal);
    });
}
