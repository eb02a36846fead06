//! Links that go from RDMA to TCP and back: what the engine has to do for them. The rules are in `link/state/moving.rs`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_verbs::{GidEntry, GidType, Path, PeerAddress, Port, QueuePairAttributes};

use super::calling::Reply;
use super::sockets::{Dial, Wants};
use super::{RNR_RETRIES, RNR_TIMER, access, reads};
use crate::engine::Shared;
use crate::engine::lane::Lane;
use crate::engine::poller::Poller;
use crate::engine::slots::SendQueue;
use crate::engine::timers::{LinkName, Timer};
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::link::state::{Carrier, Step};
use crate::link::tcp::TcpPath;
use crate::policy::{Fallback, Rdma};
use crate::wire::{Address, ParcelKind, Resume};

/// Between calls to a peer that does not answer.
const REDIAL: Duration = Duration::from_millis(250);
/// Between tries to go up to RDMA, at most.
const CLIMB_MAX: Duration = Duration::from_secs(30);
/// Who waits for a link that is on TCP already and is to be on RDMA.
pub(crate) struct Opening {
    reply: Reply,
    policy: Rdma,
}

/// A connection that a link goes on over.
pub(crate) struct Place {
    pub(crate) socket: u64,
    pub(crate) encrypted: bool,
    pub(crate) local: Option<SocketAddr>,
    pub(crate) peer: SocketAddr,
}

/// The first packet number: any.
const PSN: u32 = 1;

impl Poller {
    /// A link has lost its RDMA path: takes the queue pair away, and looks for another path.
    pub(crate) fn fall(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        self.reap_all(shared); // what came is counted, and not sent again
        let route = link.route();
        if let Some((lane, number)) = link.with_wakes(&mut self.wakes, |state, _, _| state.end_climb()) {
            self.forget_qp(&lane, number, link.index);
        }
        let deadline = self.now + shared.config.move_timeout;
        let detached = link.with_wakes(&mut self.wakes, |state, around, wakes| match state.detach(around) {
            Ok(()) => state.lost.as_mut().map(|lost| {
                lost.deadline = Some(deadline);
                (lost.error.clone(), state.is_caller)
            }),
            Err(error) => {
                state.end(error, wakes);
                None
            }
        });
        let Some((error, is_caller)) = detached else { return };
        if let Some(lane) = &route.lane {
            self.forget_qp(lane, route.qp_num, link.index);
        }
        if let Some(key) = route.cm_key {
            self.meetings.hang_up(key);
            self.meetings.remove(key);
        }
        link.set_route(|route| {
            (route.lane, route.qp_num, route.mtu, route.cm_key) = (None, 0, None, None);
        });
        shared.fell_back(link, Fallback::new(error));
        self.timers.add(deadline, Timer::Move(link.name));
        match route.socket {
            Some(socket) => {
                self.sockets.carries(socket, true);
                self.sockets.on_ready(socket);
                link.with_wakes(&mut self.wakes, |state, around, wakes| {
                    state.resume(wakes);
                    state.flush_connection(wakes);
                    state.pump(around, wakes);
                });
            }
            None if is_caller => self.redial(shared, link.name),
            None => {} // the peer calls
        }
        if is_caller {
            self.climb_in(link, shared.config.climb_after);
        }
        if let Some(lane) = route.lane {
            self.retire_if_unused(shared, lane.index);
        }
    }

    pub(crate) fn move_timed_out(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let now = self.now;
        link.with_wakes(&mut self.wakes, |state, _, wakes| {
            // Not one that was lost later.
            if let Some(lost) = state.lost.as_ref().filter(|lost| lost.deadline.is_some_and(|by| by <= now)) {
                let what = format!("{}; and no other path was found in time", lost.error);
                let error = Error::new(lost.error.kind(), what).with_causes(lost.error.causes().to_vec());
                state.end(error, wakes);
            }
        });
        self.attend(shared, name.index);
    }

    /// Calls the peer of a link without a path, over TCP.
    pub(crate) fn redial(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let resume = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.lost.as_ref().filter(|_| state.tcp.is_none())?;
            let (mine, yours) = (state.session(), state.peer().session);
            Some(Resume { yours, mine, received: state.received() })
        });
        let (Some(resume), Some(peer)) = (resume, link.next_address()) else { return };
        let tls = link.tls();
        let deadline = self.now + shared.config.connection_timeout.min(shared.config.move_timeout);
        self.dial(shared, Dial { peer, local: None, deadline, tls, wants: Wants::Resume(name, resume) });
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
            // It is there, and knows nothing of the link: it was started again, or has given the link up.
            link.with_wakes(&mut self.wakes, |state, _, wakes| {
                if let Some(lost) = &state.lost {
                    let what = format!("{}; and the peer does not know the link any more", lost.error);
                    let error = Error::new(lost.error.kind(), what).with_causes(lost.error.causes().to_vec());
                    state.end(error, wakes);
                }
            });
            self.attend(shared, name.index);
        } else {
            self.timers.add(self.now + REDIAL, Timer::Redial(name));
        }
    }

    /// A peer calls for a link that it has lost: which, and what came of it.
    pub(crate) fn find_lost(&mut self, shared: &Shared, resume: &Resume) -> Option<(Arc<LinkShared>, u64)> {
        let name = *self.sessions.get(&resume.yours)?;
        let link = self.link_named(shared, name)?;
        let known = link.with_wakes(&mut self.wakes, |state, _, _| {
            let other = state.peer().session != resume.mine;
            if other || state.carrier == Carrier::Tcp || state.tcp.is_some() {
                return false;
            }
            // It may know before us.
            state.lose_for_peer()
        });
        if !known {
            return None;
        }
        if link.with_wakes(&mut self.wakes, |state, _, _| state.is_to_be_detached()) {
            self.fall(shared, &link);
        }
        let received = link.with_wakes(&mut self.wakes, |state, _, _| {
            state
                .lost
                .as_ref()
                .map(|lost| lost.detached)
                .filter(|detached| *detached)
                .map(|_| state.received())
        })?;
        Some((link, received))
    }

    /// Both have said what they have: the link goes on over this connection.
    pub(crate) fn go_on(&mut self, link: &Arc<LinkShared>, at: &Place, tcp: TcpPath, received: u64) {
        let goes_on = link.with_wakes(&mut self.wakes, |state, around, wakes| {
            let goes_on = state.resume_over(tcp, received, wakes);
            state.pump(around, wakes);
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

    // ---- up ----

    /// Peers have met over TCP: the link goes up to RDMA before anyone has it.
    pub(crate) fn open_on_rdma(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        reply: Reply,
        policy: Rdma,
    ) {
        self.openings.insert(link.name, Opening { reply, policy });
        let moves = link.with_wakes(&mut self.wakes, |state, _, _| state.moves);
        let offered = if moves {
            self.offer(shared, link)
        } else {
            Err(Error::new(ErrorKind::Refused, format!("{} takes no RDMA", link.peer_name())))
        };
        match offered {
            Ok(()) => self.climb_in(link, shared.config.connection_timeout),
            Err(error) => self.opening_failed(shared, link, error),
        }
    }

    /// RDMA does not carry a link that somebody waits for.
    pub(crate) fn opening_failed(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: Error) {
        let Some(Opening { reply, policy }) = self.openings.remove(&link.name) else { return };
        if policy == Rdma::Require || link.failure_known() {
            link.with_wakes(&mut self.wakes, |state, _, wakes| state.end(error.clone(), wakes));
            let _ = reply.send(Err(error));
            return;
        }
        shared.fell_back(link, Fallback::new(error));
        if link.with_wakes(&mut self.wakes, |state, _, _| state.moves) {
            self.climb_in(link, shared.config.climb_after);
        }
        if let Err(Ok(link)) = reply.send(Ok(Arc::clone(link))) {
            link.close();
        }
    }

    /// Looks after `wait` whether the link is still on TCP, and not before: whatever was said earlier is forgotten.
    pub(crate) fn climb_in(&mut self, link: &Arc<LinkShared>, wait: Duration) {
        let at = self.now + wait;
        link.with_wakes(&mut self.wakes, |state, _, _| state.climb_at = Some(at));
        self.timers.add(at, Timer::Climb(link.name));
    }

    /// A link on TCP that would rather be on RDMA.
    pub(crate) fn climb_due(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let now = self.now;
        let is_due =
            link.with_wakes(&mut self.wakes, |state, _, _| state.climb_at.is_some_and(|at| at <= now));
        if !is_due {
            return;
        }
        let (carrier, climbing, switched, wait) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let wait = state.next_climb(shared.config.climb_after, CLIMB_MAX);
            (state.carrier, state.climb.is_some(), state.has_switched(), wait)
        });
        if carrier == Carrier::Rdma || link.failure_known() {
            return;
        }
        if switched {
            self.climb_in(&link, wait); // the peer may still withdraw
            return;
        }
        if climbing {
            self.withdraw(&link);
            if self.openings.contains_key(&name) {
                let what = format!("{} did not go on over RDMA in time", link.peer_name());
                self.opening_failed(shared, &link, Error::new(ErrorKind::Timeout, what));
                return; // which has said when to try again
            }
        }
        if carrier == Carrier::Tcp
            && let Err(error) = self.offer(shared, &link)
        {
            tracing::debug!("link to {} stays on TCP: {error}", link.peer_name());
        }
        self.climb_in(&link, wait);
    }

    /// First step: a queue pair of ours, and where it is.
    fn offer(&mut self, shared: &Shared, link: &Arc<LinkShared>) -> Result<(), Error> {
        let way = Way::find(shared, link)?;
        self.make_way(shared, link, &way)?;
        link.with_wakes(&mut self.wakes, |state, around, wakes| {
            let address = state.climb_qp().map(|qp| way.address(shared, qp.number()));
            state.say(ParcelKind::Offer, address.as_ref());
            state.pump(around, wakes);
        });
        Ok(())
    }

    /// A queue pair in its first state, on the way.
    fn make_way(&mut self, shared: &Shared, link: &Arc<LinkShared>, way: &Way) -> Result<(), Error> {
        let gear = self.gears[way.lane.index].as_mut().ok_or_else(|| way.lane.absence())?;
        let (qp, taker) = gear.create_queue_pair(&way.lane, &shared.config)?;
        qp.modify(&QueuePairAttributes::init(way.port.number, access()))?;
        let (number, inline) = (qp.number(), qp.capacity().max_inline.min(way.lane.inline()) as usize);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            let queue = SendQueue::new(qp, taker, link.index, way.lane.index, state.generation);
            state.begin_climb(queue, Arc::clone(&way.lane), inline);
        });
        self.know_qp(&way.lane, number, link.index);
        Ok(())
    }

    pub(crate) fn move_step(&mut self, shared: &Shared, link: &Arc<LinkShared>, step: Step) {
        let stepped = match step {
            Step::Offered(address) => self.take_offer(shared, link, &address),
            Step::Answered(address) => self.take_answer(shared, link, &address),
            Step::Probed => {
                self.tell_keys(shared, link);
                link.with_wakes(&mut self.wakes, |state, around, wakes| {
                    state.switch();
                    state.pump(around, wakes);
                });
                Ok(())
            }
            Step::Withdrawn => {
                self.end_climb(link);
                let what = format!(
                    "{} does not go on over RDMA: it has none for this address, or its packets do not get through \
                     (UDP port 4791)",
                    link.peer_name()
                );
                self.opening_failed(shared, link, Error::new(ErrorKind::Unreachable, what));
                Ok(())
            }
            Step::Arrived => {
                self.arrived(shared, link);
                Ok(())
            }
        };
        if let Err(error) = stepped {
            tracing::debug!("link to {} stays on TCP: {error}", link.peer_name());
            self.withdraw(link);
            self.opening_failed(shared, link, error);
        }
    }

    /// The peer offers to go on over RDMA.
    fn take_offer(&mut self, shared: &Shared, link: &Arc<LinkShared>, peer: &Address) -> Result<(), Error> {
        self.end_climb(link);
        let way = Way::find(shared, link)?;
        self.make_way(shared, link, &way)?;
        self.bring_up(shared, link, &way, peer)?;
        self.tell_keys(shared, link);
        link.with_wakes(&mut self.wakes, |state, around, wakes| {
            let address = state.climb_qp().map(|qp| way.address(shared, qp.number()));
            state.say(ParcelKind::Answer, address.as_ref());
            state.pump(around, wakes);
        });
        Ok(())
    }

    fn take_answer(&mut self, shared: &Shared, link: &Arc<LinkShared>, peer: &Address) -> Result<(), Error> {
        let way = Way::find(shared, link)?;
        if !link.with_wakes(&mut self.wakes, |state, _, _| state.climbs_on(&way.lane)) {
            return Err(Error::new(ErrorKind::DeviceGone, "another device would carry it by now"));
        }
        self.bring_up(shared, link, &way, peer)?;
        link.with_wakes(&mut self.wakes, |state, _, _| state.probe())
    }

    fn bring_up(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        way: &Way,
        peer: &Address,
    ) -> Result<(), Error> {
        let config = &shared.config;
        let path = Path {
            mtu: way.port.active_mtu.min(ferrite_verbs::Mtu::from_code(peer.mtu)),
            ack_timeout: config.ack_timeout,
            retries: config.retries,
            rnr_retries: RNR_RETRIES,
            rnr_timer: RNR_TIMER,
        };
        let ours = way.address(shared, 0);
        let (reads_in, reads_out) = (ours.reads_in.min(peer.reads_out), ours.reads_out.min(peer.reads_in));
        let to = PeerAddress {
            qp_num: peer.qp_num,
            psn: peer.psn,
            gid: ferrite_verbs::Gid(peer.gid),
            lid: peer.lid,
        };
        let (port, gid) = (way.port.number, u8::try_from(way.gid.index).unwrap_or(0));
        link.with_wakes(&mut self.wakes, |state, _, _| {
            let Some(qp) = state.climb_qp() else {
                return Err(Error::new(ErrorKind::LinkDown, "the way up is gone"));
            };
            qp.modify(&QueuePairAttributes::connect_to(&to, port, gid, &path, reads_in).access(access()))?;
            Ok(qp.modify(&QueuePairAttributes::ready_to_send(PSN, &path, reads_out))?)
        })?;
        link.set_route(|route| (route.mtu, route.port) = (Some(path.mtu), port));
        Ok(())
    }

    /// Says where the grants of this link are on the device that will carry it.
    fn tell_keys(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let lane = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.climb.as_ref().map(|climb| Arc::clone(&climb.lane))
        });
        let Some(lane) = lane else { return };
        let keys = shared.regions.keys_for(shared, link, &lane);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            for (grant, remote) in keys {
                state.say_key(grant, remote.addr, remote.rkey);
            }
        });
    }

    fn withdraw(&mut self, link: &Arc<LinkShared>) {
        link.with_wakes(&mut self.wakes, |state, around, wakes| {
            state.say(ParcelKind::Withdraw, None);
            state.pump(around, wakes);
        });
        self.end_climb(link);
    }

    fn end_climb(&mut self, link: &Arc<LinkShared>) {
        if let Some((lane, number)) = link.with_wakes(&mut self.wakes, |state, _, _| state.end_climb()) {
            self.forget_qp(&lane, number, link.index);
        }
    }

    /// RDMA carries the link.
    fn arrived(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let carried = link.with_wakes(&mut self.wakes, |state, around, wakes| {
            state.reset_climb();
            state.pump(around, wakes);
            Some((state.lane.clone()?, state.queue.qp()?.number()))
        });
        let Some((lane, number)) = carried else { return };
        let name = lane.name.clone();
        link.set_route(|route| (route.lane, route.qp_num) = (Some(lane), number));
        if let Some(socket) = link.route().socket {
            self.sockets.carries(socket, false);
        }
        link.is_well();
        link.set_fallback(None);
        shared.counters.climbs.fetch_add(1, Ordering::Relaxed);
        if let Some(Opening { reply, policy }) = self.openings.remove(&link.name) {
            if policy == Rdma::Require {
                link.with_wakes(&mut self.wakes, |state, _, _| state.moves = false);
            }
            if let Err(Ok(link)) = reply.send(Ok(Arc::clone(link))) {
                link.close(); // nobody wanted it any more
            }
        }
        tracing::info!("link to {} is on RDMA ({name})", link.peer_name());
    }

    /// A device goes: so do the ways up that use it.
    pub(crate) fn end_climbs_on(&mut self, shared: &Shared, lane: &Lane) {
        let links: Vec<_> = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            links.iter().filter(|link| link.with(|state, _, _| state.climbs_on(lane))).cloned().collect()
        };
        for link in links {
            self.withdraw(&link);
        }
    }
}

/// From where a link can go up to RDMA.
struct Way {
    lane: Arc<Lane>,
    port: Port,
    gid: GidEntry,
}

impl Way {
    /// The device with the address that the connection has, else one that could work: routable before not.
    fn find(shared: &Shared, link: &LinkShared) -> Result<Self, Error> {
        let local = link.route().local.map(|local| local.ip());
        let mut best: Option<(u32, Self)> = None;
        let mut why = None;
        for lane in shared.lanes.iter().filter(|lane| !lane.is_gone()) {
            let Some(context) = lane.context() else { continue };
            let found = context.active_port().and_then(|port| Ok((port, context.gids()?)));
            let (port, gids) = match found {
                Ok(found) => found,
                Err(error) => {
                    why = Some(Error::from(error));
                    continue;
                }
            };
            for gid in gids.into_iter().filter(|gid| gid.port == port.number) {
                let mut rank = 0;
                rank += if Some(gid.gid.ip()) == local { 8 } else { 0 };
                rank += if gid.kind == GidType::ROCE_V2 { 4 } else { 0 };
                rank += if gid.gid.is_link_local() { 0 } else { 2 };
                if best.as_ref().is_none_or(|(least, _)| rank > *least) {
                    best = Some((rank, Self { lane: Arc::clone(lane), port: port.clone(), gid }));
                }
            }
        }
        best.map(|(_, way)| way).ok_or_else(|| why.unwrap_or_else(|| shared.no_rdma()))
    }

    fn address(&self, shared: &Shared, qp_num: u32) -> Address {
        let (reads_in, reads_out) = reads(shared, &self.lane);
        Address {
            qp_num,
            psn: PSN,
            lid: self.port.lid,
            mtu: self.port.active_mtu.code(),
            reads_in,
            reads_out,
            gid: self.gid.gid.0,
        }
    }
}
