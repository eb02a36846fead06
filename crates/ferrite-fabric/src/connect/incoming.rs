//! Links that peers open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use ferrite_verbs::{CmEvent, CmEventKind, CmId, ConnectParams, ConnectionRequest};

use super::calling::Reply;
use super::{Meeting, UNKNOWN_PEER, bring_up, initialise, lane_of, params};
use crate::engine::Shared;
use crate::engine::poller::Poller;
use crate::engine::timers::Timer;
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::listener::ListenerShared;
use crate::wire::{Hello, HelloError, Refusal, RefusalCode, Version};

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

impl Poller {
    pub(super) fn on_request(&mut self, shared: &Shared, event: CmEvent) {
        let Some(request) = event.request else { return };
        let listener = match self.meetings.by_key.get(&event.id) {
            Some(Meeting::Listening { listener, .. }) => Arc::clone(listener),
            _ => return, // the listener is gone; dropping the request refuses it
        };
        let hello = match listener.strangers_only {
            true => Err(HelloError::Stranger),
            false => Hello::decode(&request.private_data),
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(HelloError::Stranger | HelloError::Short { .. }) => {
                shared.counters.strangers.fetch_add(1, Ordering::Relaxed);
                if let Err(request) = listener.stranger(request, &mut self.wakes) {
                    refuse(
                        shared,
                        &request,
                        RefusalCode::STRANGER,
                        0,
                        "this listener takes Ferrite peers only",
                    );
                }
                return;
            }
            Err(HelloError::Version { theirs }) => {
                let text = format!("we speak {}, you {theirs}", Version::CURRENT);
                refuse(shared, &request, RefusalCode::VERSION, 0, &text);
                return;
            }
            Err(error) => {
                refuse(shared, &request, RefusalCode::PROTOCOL, 0, &error.to_string());
                return;
            }
        };
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        if links >= shared.config.max_connections {
            refuse(shared, &request, RefusalCode::LIMIT, 1000, "max_connections is reached");
            return;
        }
        if self.meetings.incoming >= shared.config.max_half_open || listener.is_full() {
            refuse(shared, &request, RefusalCode::BUSY, 20, "too many handshakes at a time");
            return;
        }
        match self.accept(shared, &request, Some(hello), listener.moves) {
            Ok((link, _)) => {
                let who = Expecting::Listener(Arc::downgrade(&listener));
                self.expect(shared, request.id, link, hello, who);
            }
            Err(error) => {
                let code = match error.kind() {
                    ErrorKind::Resources | ErrorKind::Full => RefusalCode::MEMORY,
                    _ => RefusalCode::POLICY,
                };
                refuse(shared, &request, code, 0, &error.to_string());
            }
        }
    }

    /// Takes a peer that says nothing of itself.
    pub(crate) fn accept_stranger(&mut self, shared: &Shared, request: ConnectionRequest, reply: Reply) {
        let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner).len();
        let accepted = if links >= shared.config.max_connections {
            Err(Error::new(ErrorKind::Resources, "max_connections is reached"))
        } else if self.meetings.incoming >= shared.config.max_half_open {
            Err(Error::new(ErrorKind::Full, "too many handshakes at a time"))
        } else {
            self.accept(shared, &request, None, false)
        };
        match accepted {
            Ok((link, hello)) => {
                self.expect(shared, request.id, link, hello, Expecting::Caller(reply));
            }
            Err(error) => {
                shared.counters.refused.fetch_add(1, Ordering::Relaxed);
                let _ = reply.send(Err(error)); // the request is dropped, which refuses it
            }
        }
    }

    /// Waits until the peer has heard of it.
    fn expect(&mut self, shared: &Shared, id: CmId, link: Arc<LinkShared>, hello: Hello, who: Expecting) {
        let key = id.key();
        self.meetings.put(key, Meeting::Incoming { id, link, hello, who });
        self.timers.add(self.now + shared.config.connection_timeout, Timer::Meeting(key));
    }

    /// The link, and the hello that goes with it: ours if the peer has none.
    fn accept(
        &mut self,
        shared: &Shared,
        request: &ConnectionRequest,
        hello: Option<Hello>,
        moves: bool,
    ) -> Result<(Arc<LinkShared>, Hello), Error> {
        let id = &request.id;
        let lane = lane_of(shared, id)?;
        let _ = id.set_ack_timeout(shared.config.ack_timeout); // kernels before 5.1 have none
        let (link, ours) = self.make_link(shared, lane, moves)?;
        // The peer may send as soon as it hears of us.
        link.with_wakes(&mut self.wakes, |state, _, _| match hello {
            Some(hello) => state.set_peer(hello),
            None => state.make_bare(),
        });
        let private_data = ours.encode();
        let private_data = if hello.is_some() { &private_data[..] } else { &[] };
        let params = params(shared, lane, &link, private_data);
        let reads_in = params.reads_in.min(request.reads_in_wanted);
        let reads_out = params.reads_out.min(request.reads_out_max);
        let accepted = initialise(id, &link)
            .and_then(|()| bring_up(id, &link, reads_in, reads_out))
            .and_then(|()| Ok(id.accept(&ConnectParams { reads_in, reads_out, ..params })?));
        if let Err(error) = accepted {
            self.unmake_link(shared, &link, &error);
            return Err(error);
        }
        Ok((link, hello.unwrap_or(ours)))
    }

    pub(super) fn on_incoming_event(
        &mut self,
        shared: &Shared,
        event: CmEvent,
        id: CmId,
        link: Arc<LinkShared>,
        hello: Hello,
        who: Expecting,
    ) {
        if event.kind == CmEventKind::ESTABLISHED {
            self.establish(id, &link, hello);
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
        drop(id);
        self.unmake_link(shared, &link, &error);
        who.tell(error);
    }
}

fn refuse(shared: &Shared, request: &ConnectionRequest, code: RefusalCode, retry_after_ms: u32, text: &str) {
    shared.counters.refused.fetch_add(1, Ordering::Relaxed);
    let refusal = Refusal { version: Version::CURRENT, code, retry_after_ms, text: text.into() };
    let _ = request.id.reject(&refusal.encode()); // else it is refused by being dropped, without a reason
}
