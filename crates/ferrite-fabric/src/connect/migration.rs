//! Links that go from RDMA to TCP: what the fabric has to do for them. The rules are in
//! `link/state/moving.rs`; the way back up is in [`upgrading`](super::upgrading).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::sockets::{Dial, Wants};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::slots::{InFlight, SendQueue};
use crate::fabric::timers::{LinkName, Timer};
use crate::link::shared::LinkShared;
use crate::link::state::{ActiveTransport, RequestContext};
use crate::link::tcp::TcpPath;
use crate::policy::Fallback;
use crate::wire::Resume;

/// Between calls to a peer that does not answer.
const REDIAL: Duration = Duration::from_millis(250);
/// A connection that a link goes on over.
pub(crate) struct Place {
    pub(crate) socket: u64,
    pub(crate) encrypted: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: SocketAddr,
}

/// What a peer asks for that has lost its path.
pub(super) enum Sought {
    Unknown,
    /// The device has yet to say that nothing more comes over the path that was lost: the greeting
    /// is looked at again then.
    NotYet,
    /// The link, and how many frames of the peer's have come.
    Found(Arc<LinkShared>, u64),
}

impl Poller {
    /// A link has lost its RDMA path: has the queue pair destroyed, then looks for another path.
    pub(crate) fn downgrade(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        self.reap_all(shared); // what came is counted, and not sent again
        self.end_upgrade(link);
        let queue = link.with_wakes(&mut self.wakes, |state, _, _| state.begin_detach());
        let Some(queue) = queue else { return };
        let (link, own) = (Arc::clone(link), (queue, Vec::new()));
        let work = |(queue, in_flight): &mut (SendQueue<RequestContext>, Vec<_>)| {
            Ok(queue.destroy(|it| in_flight.push(it))?)
        };
        self.command(
            shared,
            link.source(),
            own,
            work,
            move |poller, shared, (queue, in_flight), gone| {
                poller.finish_downgrade(shared, &link, queue, in_flight, gone);
            },
        );
    }

    /// The queue pair of a path that was lost is gone, or did not go.
    fn finish_downgrade(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        queue: SendQueue<RequestContext>,
        in_flight: Vec<InFlight<RequestContext>>,
        gone: Result<(), Error>,
    ) {
        let route = link.route();
        let deadline = self.now + shared.config.move_timeout;
        let detached = link.with_wakes(&mut self.wakes, |state, env, wakes| {
            match state.end_detach(env, queue, in_flight, gone, wakes) {
                Ok(()) => state.lost.as_mut().map(|lost| {
                    lost.deadline = Some(deadline);
                    (lost.error.clone(), state.is_caller)
                }),
                Err(error) => {
                    state.end(error, wakes); // unless it has ended meanwhile
                    None
                }
            }
        });
        let Some((error, is_caller)) = detached else {
            // and not at once: whoever has called may be about to
            shared.mailbox.attend(link.index);
            return;
        };
        if let Some(device) = &route.device {
            self.forget_qp(device, route.qp_num, link.index);
        }
        if let Some(key) = route.cm_key {
            self.handshakes.hang_up(key);
            self.remove_handshake(shared, key, link.source());
        }
        link.set_route(|route| {
            (route.device, route.qp_num, route.mtu, route.cm_key) = (None, 0, None, None);
        });
        shared.fell_back(link, Fallback::new(error));
        self.timers.add(deadline, Timer::Migration(link.name));
        match route.socket {
            Some(socket) => {
                self.sockets.carries(socket, true);
                self.sockets.on_ready(socket);
                link.with_wakes(&mut self.wakes, |state, env, wakes| {
                    state.resume(wakes);
                    state.flush_connection(wakes);
                    state.pump(env, wakes);
                });
            }
            None if is_caller => self.redial(shared, link.name),
            None => {} // the peer calls
        }
        if is_caller {
            self.upgrade_in(link, shared.config.upgrade_after);
        }
        self.sockets.stop_waiting_for(link.name);
        if let Some(device) = route.device {
            self.retire_if_unused(shared, device.index);
        }
    }

    pub(crate) fn migration_timed_out(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let now = self.now;
        link.with_wakes(&mut self.wakes, |state, _, wakes| {
            // Not one that was lost later.
            if let Some(lost) =
                state.lost.as_ref().filter(|lost| lost.deadline.is_some_and(|by| by <= now))
            {
                let what = format!("{}; and no other path was found in time", lost.error);
                let error =
                    Error::new(lost.error.kind(), what).with_causes(lost.error.causes().to_vec());
                state.end(error, wakes);
            }
        });
        self.attend(shared, name.index);
    }

    /// Calls the peer of a link without a path, over TCP.
    pub(crate) fn redial(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let resume = link.with_wakes(&mut self.wakes, |state, _, _| {
            let (mine, yours, received) = (state.session(), state.peer().session, state.received());
            let lost = state.lost.as_mut().filter(|_| state.tcp.is_none())?;
            Some((Resume { yours, mine, received }, lost.next_dial()))
        });
        let (Some((resume, number)), Some(peer)) = (resume, link.next_address()) else { return };
        // From where it was: only that address may go up to RDMA again. It may be gone, so every
        // other call is from any.
        let local = link.route().local.map(|local| SocketAddr::new(local.ip(), 0));
        let local = local.filter(|local| number % 2 == 0 && local.is_ipv4() == peer.is_ipv4());
        let tls = link.tls();
        let deadline = self.now + shared.config.connection_timeout.min(shared.config.move_timeout);
        self.dial(shared, Dial { peer, local, deadline, tls, wants: Wants::Resume(name, resume) });
    }

    /// The peer did not take the call for a link without a path.
    pub(crate) fn redial_failed(&mut self, shared: &Shared, name: LinkName, error: &Error) {
        let Some(link) = self.link_named(shared, name) else { return };
        let is_unknown = error.refusal().is_some() || error.kind() == ErrorKind::Protocol;
        let is_gone = is_unknown || error.kind() == ErrorKind::Refused;
        if is_gone && link.with_wakes(&mut self.wakes, |state, _, _| state.peer_has_everything()) {
            link.with_wakes(&mut self.wakes, |state, _, wakes| {
                state.end(Error::new(ErrorKind::Closed, "the peer has closed the link"), wakes);
            });
            self.attend(shared, name.index);
        } else if is_unknown {
            // It is there, and knows nothing of the link: it was started again, or has given the
            // link up.
            link.with_wakes(&mut self.wakes, |state, _, wakes| {
                if let Some(lost) = &state.lost {
                    let what =
                        format!("{}; and the peer does not know the link any more", lost.error);
                    let error = Error::new(lost.error.kind(), what)
                        .with_causes(lost.error.causes().to_vec());
                    state.end(error, wakes);
                }
            });
            self.attend(shared, name.index);
        } else {
            self.timers.add(self.now + REDIAL, Timer::Redial(name));
        }
    }

    /// A peer calls by `socket` for a link that it has lost: which, and what came of it.
    pub(super) fn find_lost(&mut self, shared: &Shared, socket: u64, resume: &Resume) -> Sought {
        let name = self.sessions.get(&resume.yours).copied();
        let Some(link) = name.and_then(|name| self.link_named(shared, name)) else {
            return Sought::Unknown;
        };
        let known = link.with_wakes(&mut self.wakes, |state, _, _| {
            let other = state.peer().session != resume.mine;
            if other || state.transport == ActiveTransport::Tcp || state.tcp.is_some() {
                return false;
            }
            // It may know before us.
            state.lose_for_peer()
        });
        if !known {
            return Sought::Unknown;
        }
        if link.with_wakes(&mut self.wakes, |state, _, _| state.is_to_be_detached()) {
            self.downgrade_when_drained(shared, &link);
        }
        let (detached, received) = link.with_wakes(&mut self.wakes, |state, _, _| {
            (state.lost.as_ref().map(|lost| lost.detached), state.received())
        });
        match detached {
            None => Sought::Unknown, // it could not go on
            Some(true) => Sought::Found(link, received),
            Some(false) => {
                self.sockets.wait_for(link.name, socket);
                Sought::NotYet
            }
        }
    }

    /// Both have said what they have: the link goes on over this connection.
    pub(crate) fn go_on(
        &mut self,
        link: &Arc<LinkShared>,
        at: &Place,
        tcp: TcpPath,
        received: u64,
    ) {
        let goes_on = link.with_wakes(&mut self.wakes, |state, env, wakes| {
            let goes_on = state.resume_over(tcp, received, wakes);
            state.pump(env, wakes);
            goes_on
        });
        if !goes_on {
            self.sockets.forget(at.socket);
            return;
        }
        link.set_route(|route| {
            (route.socket, route.encrypted) = (Some(at.socket), at.encrypted);
            (route.local, route.peer) = (at.local, Some(at.peer));
        });
    }
}
