//! The fabric's part of migrating links from RDMA to TCP. The rules are in
//! `link/core/migration.rs`. The way back to RDMA is in [`upgrading`](super::upgrading).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::dialing::{Dial, Purpose};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::poller::link_lifecycle::Destroyed;
use crate::fabric::timers::Timer;
use crate::link::core::ActiveTransport;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;
use crate::link::tcp::TcpPath;
use crate::policy::Fallback;
use crate::wire::Resume;

/// The delay between attempts to connect to a peer that does not answer.
const REDIAL: Duration = Duration::from_millis(250);

/// How long this side waits for the peer to reconnect, if the peer opened the link and its
/// connection manager has disconnected. If the peer has lost the path, it reconnects at once.
/// Otherwise its process has ended, and this side must not keep the link for long.
const DISCONNECTED: Duration = Duration::from_secs(3);

/// A TCP connection over which a link continues.
pub(crate) struct TcpConnection {
    pub(crate) socket: u64,
    pub(crate) encrypted: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: SocketAddr,
}

/// The result of a peer's request to resume a link that has lost its path.
pub(super) enum LostLink {
    Unknown,
    /// The device has not yet reported that nothing more arrives over the lost path. The greeting
    /// is handled again after that.
    NotYet,
    /// The link, and the number of frames that it has received from the peer.
    Found(Arc<LinkShared>, u64),
}

impl Poller {
    /// Destroys the queue pair of a link that has lost its RDMA path, and then searches for another
    /// path.
    pub(crate) fn downgrade(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        self.reap_all(shared); // count received frames, so that the peer does not resend them
        self.end_upgrade(link);
        let queue = link.with_wakes(&mut self.wakes, |state, _, _| state.begin_detach());
        let Some(queue) = queue else { return };
        let detached = Arc::clone(link);
        self.destroy_queue(shared, link, queue, move |poller, shared, destroyed, gone| {
            poller.finish_downgrade(shared, &detached, destroyed, gone);
        });
    }

    /// Second step of a downgrade, after the attempt to destroy the queue pair.
    fn finish_downgrade(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        (queue, in_flight): Destroyed,
        gone: Result<(), Error>,
    ) {
        let route = link.route();
        let (is_caller, has_peer_disconnected) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let lost = state.core.lost();
            (state.core.is_caller(), lost.is_some_and(|lost| lost.has_peer_disconnected))
        });
        let move_timeout = shared.config.move_timeout;
        let deadline = self.now
            + match (is_caller, has_peer_disconnected) {
                (true, _) => move_timeout,
                (false, true) => move_timeout.min(DISCONNECTED),
                // The peer opened the link, so it reconnects. If it waits for no reply, it notices
                // the loss only by its keepalive.
                (false, false) => move_timeout + shared.config.keepalive,
            };
        let detached = link.with_wakes(&mut self.wakes, |state, _, wakes| {
            match state.end_detach(queue, in_flight, gone, wakes) {
                Ok(()) => state.core.lost_mut().map(|lost| {
                    lost.deadline = Some(deadline);
                    lost.error.clone()
                }),
                Err(error) => {
                    state.core.end(error, wakes); // no effect if the link has ended meanwhile
                    None
                }
            }
        });
        let Some(error) = detached else {
            // Do not service the link here: the caller of this function may be about to service it.
            shared.mailbox.request_service(link.index);
            return;
        };
        if let Some(device) = &route.device {
            self.forget_qp(device, route.qp_num, link.index);
        }
        if let Some(key) = route.cm_key {
            self.handshakes.hang_up(key);
            self.remove_handshake(shared, key, link.source().unwaited());
        }
        // Set the reason before the route changes, so that a link that reports TCP reports it.
        shared.fell_back(link, Fallback::new(error));
        link.set_route(|route| {
            (route.device, route.qp_num, route.mtu, route.cm_key) = (None, 0, None, None);
        });
        self.timers.add(deadline, Timer::Migration(link.name));
        match route.socket {
            Some(socket) => {
                self.sockets.set_carrying(socket, true);
                self.sockets.on_ready(socket);
                link.with_wakes(&mut self.wakes, |state, env, wakes| {
                    state.resume(wakes);
                    state.flush_connection(wakes);
                    state.pump(env, wakes);
                });
            }
            None if is_caller => self.redial(shared, link.name),
            None => {} // the peer reconnects
        }
        self.upgrade_after_loss(shared, link);
        self.sockets.stop_waiting_for(link.name);
        if let Some(device) = route.device {
            self.retire_if_unused(shared, device.index);
        }
    }

    pub(crate) fn migration_timed_out(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let now = self.now;
        link.with_wakes(&mut self.wakes, |state, _, wakes| {
            // The timer may belong to an earlier loss. The link may have found another path
            // meanwhile and lost that path, too, with a later deadline.
            if let Some(lost) =
                state.core.lost().filter(|lost| lost.deadline.is_some_and(|by| by <= now))
            {
                let what = format!("{}; and no other path was found in time", lost.error);
                let error =
                    Error::new(lost.error.kind(), what).with_causes(lost.error.causes().to_vec());
                state.core.end(error, wakes);
            }
        });
        self.service_link(shared, name.index);
    }

    /// Connects to the peer of a link without a path, over TCP.
    pub(crate) fn redial(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let resume = link.with_wakes(&mut self.wakes, |state, _, _| {
            let (mine, yours, received) =
                (state.core.session(), state.core.peer().session, state.core.credits.received());
            let lost = state.core.lost_mut().filter(|_| state.tcp.is_none())?;
            Some((Resume { yours, mine, received }, lost.redial.is_from_any()))
        });
        let route = link.route();
        let (Some((resume, is_from_any)), Some(peer)) = (resume, route.peer) else { return };
        // Dial from the local address of the first path, because the link can be upgraded to RDMA
        // only from that address.
        let local = route.first_local().map(|local| SocketAddr::new(local.ip(), 0));
        let local = local.filter(|local| !is_from_any && local.is_ipv4() == peer.is_ipv4());
        let tls = link.tls();
        let deadline = self.now + shared.config.connection_timeout.min(shared.config.move_timeout);
        self.dial(
            shared,
            Dial { peer, local, deadline, tls, purpose: Purpose::Resume(name, resume) },
        );
    }

    /// Handles a failed attempt to reconnect a link without a path.
    pub(crate) fn redial_failed(&mut self, shared: &Shared, name: LinkName, error: &Error) {
        let Some(link) = self.link_named(shared, name) else { return };
        let is_unknown = error.refusal().is_some() || error.kind() == ErrorKind::Protocol;
        let is_gone = is_unknown || error.kind() == ErrorKind::Refused;
        if is_gone
            && link.with_wakes(&mut self.wakes, |state, _, _| state.core.peer_has_everything())
        {
            link.with_wakes(&mut self.wakes, |state, _, wakes| {
                state
                    .core
                    .end(Error::new(ErrorKind::Closed, "the peer has closed the link"), wakes);
            });
            self.service_link(shared, name.index);
        } else if is_gone {
            // The peer is there but does not know the link: it was restarted, or has given the link
            // up. Or nothing listens at its port: its process has ended.
            link.with_wakes(&mut self.wakes, |state, _, wakes| {
                if let Some(lost) = state.core.lost() {
                    let what = format!(
                        "{}; and the peer has ended, or does not know the link",
                        lost.error
                    );
                    let error = Error::new(lost.error.kind(), what)
                        .with_causes(lost.error.causes().to_vec());
                    state.core.end(error, wakes);
                }
            });
            self.service_link(shared, name.index);
        } else {
            let is_at_once = link.with_wakes(&mut self.wakes, |state, _, _| {
                state.core.lost_mut().is_some_and(|lost| lost.redial.on_failed(error.kind()))
            });
            let wait = if is_at_once { Duration::ZERO } else { REDIAL };
            self.timers.add(self.now + wait, Timer::Redial(name));
        }
    }

    /// Finds the link that a peer wants to resume over `socket`.
    pub(super) fn find_lost(
        &mut self,
        shared: &Shared,
        socket: u64,
        resume: &Resume,
        is_from_peer_of: impl FnOnce(&LinkShared) -> bool,
    ) -> LostLink {
        let name = self.sessions.get(&resume.yours).copied();
        let Some(link) = name.and_then(|name| self.link_named(shared, name)) else {
            return LostLink::Unknown;
        };
        if !is_from_peer_of(&link) {
            return LostLink::Unknown; // before the link's own path is given up
        }
        let known = link.with_wakes(&mut self.wakes, |state, _, _| {
            let other = state.core.peer().session != resume.mine;
            if other || state.core.transport() == ActiveTransport::Tcp || state.tcp.is_some() {
                return false;
            }
            // The peer may notice the loss before we do.
            state.core.lose_for_peer()
        });
        if !known {
            return LostLink::Unknown;
        }
        if link.with_wakes(&mut self.wakes, |state, _, _| state.core.is_to_be_detached()) {
            self.downgrade_when_drained(shared, &link);
        }
        let (detached, received) = link.with_wakes(&mut self.wakes, |state, _, _| {
            (state.core.lost().map(|lost| lost.is_detached), state.core.credits.received())
        });
        match detached {
            None => LostLink::Unknown, // the link could not continue
            Some(true) => LostLink::Found(link, received),
            Some(false) => {
                self.sockets.wait_for(link.name, socket);
                LostLink::NotYet
            }
        }
    }

    /// Continues the link over this connection, after both sides have announced how many frames
    /// they have received.
    pub(crate) fn resume_link(
        &mut self,
        link: &Arc<LinkShared>,
        at: &TcpConnection,
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
            // The connection may come from another address. The devices that can carry the link
            // again belong to the first addresses.
            route.first.get_or_insert((route.local, route.peer));
            (route.local, route.peer) = (at.local, Some(at.peer));
        });
    }
}
