//! Links that peers open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use ferrite_verbs::{CmEvent, CmEventKind, CmId, ConnectParams, ConnectionRequest};

use super::{Meeting, UNKNOWN_PEER, bring_up, initialise, lane_of, params};
use crate::engine::Shared;
use crate::engine::poller::Poller;
use crate::engine::timers::Timer;
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::listener::ListenerShared;
use crate::wire::{Hello, HelloError, Refusal, RefusalCode, Version};

impl Poller {
    pub(super) fn on_request(&mut self, shared: &Shared, event: CmEvent) {
        let Some(request) = event.request else { return };
        let listener = match self.meetings.by_key.get(&event.id) {
            Some(Meeting::Listening { listener, .. }) => Arc::clone(listener),
            _ => return, // the listener is gone; dropping the request refuses it
        };
        let hello = match Hello::decode(&request.private_data) {
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
        match self.accept(shared, &request, hello, listener.moves) {
            Ok(link) => {
                let (key, listener) = (request.id.key(), Arc::downgrade(&listener));
                self.meetings.put(key, Meeting::Incoming { id: request.id, link, hello, listener });
                self.timers.add(self.now + shared.config.connection_timeout, Timer::Meeting(key));
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

    fn accept(
        &mut self,
        shared: &Shared,
        request: &ConnectionRequest,
        hello: Hello,
        moves: bool,
    ) -> Result<Arc<LinkShared>, Error> {
        let id = &request.id;
        let lane = lane_of(shared, id)?;
        let _ = id.set_ack_timeout(shared.config.ack_timeout); // kernels before 5.1 have none
        let (link, ours) = self.make_link(shared, lane, moves)?;
        // The peer may send as soon as it hears of us.
        link.with_wakes(&mut self.wakes, |state, _, _| state.set_peer(hello));
        let private_data = ours.encode();
        let params = params(shared, lane, &link, &private_data);
        let reads_in = params.reads_in.min(request.reads_in_wanted);
        let reads_out = params.reads_out.min(request.reads_out_max);
        let accepted = initialise(id, &link)
            .and_then(|()| bring_up(id, &link, reads_in, reads_out))
            .and_then(|()| Ok(id.accept(&ConnectParams { reads_in, reads_out, ..params })?));
        if let Err(error) = accepted {
            self.unmake_link(shared, &link, &error);
            return Err(error);
        }
        Ok(link)
    }

    pub(super) fn on_incoming_event(
        &mut self,
        shared: &Shared,
        event: CmEvent,
        id: CmId,
        link: Arc<LinkShared>,
        hello: Hello,
        listener: &Weak<ListenerShared>,
    ) {
        if event.kind == CmEventKind::ESTABLISHED {
            self.establish(id, &link, hello);
            shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
            match listener.upgrade() {
                Some(listener) => listener.arrived(link, &mut self.wakes),
                None => link.close(), // the listener is gone
            }
            return;
        }
        let peer = id.peer_addr().unwrap_or(UNKNOWN_PEER);
        let error = Error::from(event.into_error(peer));
        drop(id);
        self.unmake_link(shared, &link, &error);
    }
}

fn refuse(shared: &Shared, request: &ConnectionRequest, code: RefusalCode, retry_after_ms: u32, text: &str) {
    shared.counters.refused.fetch_add(1, Ordering::Relaxed);
    let refusal = Refusal { version: Version::CURRENT, code, retry_after_ms, text: text.into() };
    let _ = request.id.reject(&refusal.encode()); // else it is refused by being dropped, without a reason
}
