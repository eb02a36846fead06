//! Links that go up from TCP to RDMA: what the engine has to do for them. The rules are in `link/state/climbing.rs`.
//!
//! Each step that asks something of a device is a command (`engine/commands.rs`). The link knows by a number which one it
//! waits for: what others come to, because it has withdrawn meanwhile, is let go of.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_verbs::{Access, Mtu, QueuePair, QueuePairAttributes};

use super::calling::Reply;
use super::way::{Search, Up, Way, check_peer};
use crate::engine::Shared;
use crate::engine::gear::{Made, Maker};
use crate::engine::lane::Lane;
use crate::engine::poller::Poller;
use crate::engine::slots::SendQueue;
use crate::engine::timers::{LinkName, Timer};
use crate::error::{Error, ErrorKind};
use crate::link::shared::LinkShared;
use crate::link::state::{Carrier, Step};
use crate::log_limit::LogLimit;
use crate::one_sided::Door;
use crate::policy::{Fallback, Rdma};
use crate::random::random_psn;
use crate::wire::{Address, ParcelKind};

/// Between tries to go up to RDMA, at most.
const CLIMB_MAX: Duration = Duration::from_secs(30);

/// Who waits for a link that is on TCP already and is to be on RDMA.
pub(crate) struct Opening {
    reply: Reply,
    policy: Rdma,
}

impl Poller {
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
        if moves {
            // First, since what fails says when to try again.
            self.climb_in(link, shared.config.connection_timeout);
            self.offer(shared, link);
        } else {
            let error = Error::new(ErrorKind::Refused, format!("{} takes no RDMA", link.peer_name()));
            self.opening_failed(shared, link, error);
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
            (state.carrier, state.is_climbing(), state.has_switched(), wait)
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
        self.climb_in(&link, wait);
        if carrier == Carrier::Tcp {
            self.offer(shared, &link);
        }
    }

    /// First step: a queue pair of ours, and where it is.
    fn offer(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        self.find_way(shared, link, None);
    }

    /// Looks for the device that carries the way, where that may wait; then goes on there, up to `peer` if that is known.
    fn find_way(&mut self, shared: &Shared, link: &Arc<LinkShared>, peer: Option<Address>) {
        let attempt = link.with_wakes(&mut self.wakes, |state, _, _| state.begin_attempt());
        let (search, local) = (Search::new(shared), link.route().local);
        let link = Arc::clone(link);
        self.command(
            shared,
            link.source(),
            search,
            move |search| search.find(local),
            move |poller, shared, _, way| {
                let is_current = link.with_wakes(&mut poller.wakes, |state, _, _| state.is_at(attempt));
                let begun = match way {
                    _ if !is_current => return,
                    Ok(way) => random_psn().and_then(|psn| {
                        poller.begin_making(shared, &way.lane).map(|maker| (way, maker, psn))
                    }),
                    Err(error) => Err(error),
                };
                match begun {
                    Ok(begun) => poller.make_way(shared, &link, attempt, begun, peer),
                    Err(error) => poller.climb_failed(shared, &link, error),
                }
            },
        );
    }

    /// Makes the queue pair, in its first state, or up to the peer's.
    fn make_way(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        attempt: u64,
        (way, maker, psn): (Way, Maker, u32),
        peer: Option<Address>,
    ) {
        let rights = link.with_wakes(&mut self.wakes, |state, _, _| state.rights());
        let up = peer.map(|peer| Up::new(shared, &way, &peer, psn, rights));
        let (port, link, source) = (way.port.number, Arc::clone(link), link.source());
        let work = move |(): &mut ()| {
            let made = maker.make()?;
            made.qp.modify(&QueuePairAttributes::init(port, Access::LOCAL))?;
            if let Some(up) = &up {
                up.bring(&made.qp)?;
            }
            Ok((made, up.map(|up| up.path.mtu)))
        };
        self.command(shared, source, (), work, move |poller, shared, (), made| {
            let is_current = link.with_wakes(&mut poller.wakes, |state, _, _| state.is_at(attempt));
            match made {
                Ok((made, mtu)) if is_current && !way.lane.is_gone() => {
                    poller.way_made(shared, &link, &way, (made, psn), mtu);
                    poller.end_making(shared, &way.lane);
                }
                Ok((made, _)) => {
                    poller.unmake(shared, &way.lane, source, made);
                    if is_current {
                        poller.climb_failed(shared, &link, way.lane.absence());
                    }
                }
                Err(error) => {
                    poller.end_making(shared, &way.lane);
                    if is_current {
                        poller.climb_failed(shared, &link, error);
                    }
                }
            }
        });
    }

    /// Tells the peer of the queue pair: by an offer, or as the answer to one if it is up already.
    fn way_made(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        way: &Way,
        (made, psn): (Made, u32),
        mtu: Option<Mtu>,
    ) {
        let (number, inline) =
            (made.qp.number(), made.qp.capacity().max_inline.min(way.lane.inline()) as usize);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            let queue = SendQueue::new(made.qp, made.taker, link.index, way.lane.index, state.generation);
            state.begin_climb(queue, Arc::clone(&way.lane), inline, psn);
        });
        self.know_qp(&way.lane, number, link.index);
        let kind = match mtu {
            None => ParcelKind::Offer,
            Some(mtu) => {
                link.set_route(|route| (route.mtu, route.port) = (Some(mtu), way.port.number));
                self.tell_keys(shared, link);
                ParcelKind::Answer
            }
        };
        let address = way.address(shared, number, psn);
        link.with_wakes(&mut self.wakes, |state, around, wakes| {
            state.say(kind, Some(&address));
            state.pump(around, wakes);
        });
    }

    /// A way up came to nothing: the link stays on TCP.
    fn climb_failed(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: Error) {
        tracing::debug!("link to {} stays on TCP: {error}", link.peer_name());
        self.withdraw(link);
        self.opening_failed(shared, link, error);
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
            Step::Withdrawn | Step::Failed => {
                match step {
                    Step::Failed => self.withdraw(link), // the peer is to destroy its queue pair, too
                    _ => self.end_climb(link),
                }
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
            self.climb_failed(shared, link, error);
        }
    }

    /// The peer offers to go on over RDMA.
    fn take_offer(&mut self, shared: &Shared, link: &Arc<LinkShared>, peer: &Address) -> Result<(), Error> {
        self.end_climb(link);
        check_offer(shared, link, peer)?;
        if !shared.commands.has_room(link.source()) {
            return Err(Error::new(ErrorKind::Full, "the address has too many handshakes at a time"));
        }
        self.find_way(shared, link, Some(*peer));
        Ok(())
    }

    /// The peer has a queue pair for ours: brings it up, and asks whether the way works.
    fn take_answer(&mut self, shared: &Shared, link: &Arc<LinkShared>, peer: &Address) -> Result<(), Error> {
        check_offer(shared, link, peer)?;
        let attempt = link.with_wakes(&mut self.wakes, |state, _, _| {
            state
                .climb
                .as_ref()
                .map(|climb| Arc::clone(&climb.lane))
                .map(|lane| (state.begin_attempt(), lane))
        });
        let Some((attempt, lane)) = attempt else {
            return Err(Error::new(ErrorKind::LinkDown, "the way up is gone"));
        };
        let (search, local) = (Search::new(shared), link.route().local);
        let (link, peer) = (Arc::clone(link), *peer);
        self.command(
            shared,
            link.source(),
            search,
            move |search| search.find(local),
            move |poller, shared, _, way| {
                let is_current = link.with_wakes(&mut poller.wakes, |state, _, _| state.is_at(attempt));
                match way {
                    _ if !is_current => {}
                    Ok(way) if way.lane.index == lane.index => {
                        poller.bring_up_way(shared, &link, attempt, &way, &peer);
                    }
                    Ok(_) => {
                        let what = "another device would carry it by now";
                        poller.climb_failed(shared, &link, Error::new(ErrorKind::DeviceGone, what));
                    }
                    Err(error) => poller.climb_failed(shared, &link, error),
                }
            },
        );
        Ok(())
    }

    fn bring_up_way(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        attempt: u64,
        way: &Way,
        peer: &Address,
    ) {
        let (qp, psn, rights) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let qp = state.climb.as_mut().and_then(|climb| climb.queue.lend());
            (qp, state.climb_psn(), state.rights())
        });
        let Some(qp) = qp else { return };
        if let Some(gear) = &mut self.gears[way.lane.index] {
            gear.under_way += 1;
        }
        let up = Up::new(shared, way, peer, psn, rights);
        let (lane, port, link) = (Arc::clone(&way.lane), way.port.number, Arc::clone(link));
        let work = move |qp: &mut QueuePair| up.bring(qp).map(|()| up.path.mtu);
        self.command(shared, link.source(), qp, work, move |poller, shared, qp, brought| {
            let number = qp.number();
            let back = link.with_wakes(&mut poller.wakes, |state, _, _| match &mut state.climb {
                Some(climb) if climb.queue.is_of(number) => {
                    climb.queue.take_back(qp);
                    Ok(state.is_at(attempt))
                }
                _ => Err(qp),
            });
            let probed = match (back, brought) {
                (Err(qp), _) => {
                    // Withdrawn meanwhile: its end was left to us.
                    if let Some(mut queue) = poller.orphans.remove(&(lane.index, number)) {
                        let _ = qp.stop(); // as `end_climb` would have
                        queue.take_back(qp);
                        poller.let_leave(&lane, queue, &link);
                    }
                    poller.end_making(shared, &lane);
                    return;
                }
                (Ok(true), Ok(mtu)) => {
                    link.set_route(|route| (route.mtu, route.port) = (Some(mtu), port));
                    link.with_wakes(&mut poller.wakes, |state, _, _| state.probe())
                }
                (Ok(true), Err(error)) => Err(error),
                (Ok(false), _) => Ok(()),
            };
            poller.end_making(shared, &lane);
            if let Err(error) = probed {
                poller.climb_failed(shared, &link, error);
            }
        });
    }

    /// Says where the grants of this link are on the device that will carry it.
    fn tell_keys(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let lane = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.climb.as_ref().map(|climb| Arc::clone(&climb.lane))
        });
        let Some(lane) = lane else { return };
        let doors = shared.regions.doors_for(shared, link, &lane);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            if !doors.is_empty() {
                state.allow_ahead(); // there may be more than when it was brought up
            }
            for (grant, door) in doors {
                // Without a key the peer is refused by the device when it uses the grant.
                let remote = match &door {
                    Door::Shared(remote) => Some(*remote),
                    Door::Window(window) => state.bind_ahead(&lane, window),
                };
                if let Some(remote) = remote {
                    state.say_key(grant, remote.addr, remote.rkey);
                }
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

    /// Gives up a way up. Its queue pair is destroyed when the device is done with it.
    pub(crate) fn end_climb(&mut self, link: &Arc<LinkShared>) {
        let ended = link.with_wakes(&mut self.wakes, |state, _, _| state.end_climb());
        let Some((lane, queue)) = ended else { return };
        if queue.is_away() {
            // A command has the queue pair, and finds that nobody wants it. Until then it may have a receive.
            self.orphans.insert((lane.index, queue.number()), queue);
        } else {
            self.let_leave(&lane, queue, link);
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
        // Before the route: whoever sees RDMA sees no reason for TCP any more.
        shared.is_well(link);
        link.set_fallback(None);
        shared.counters.climbs.fetch_add(1, Ordering::Relaxed);
        link.set_route(|route| (route.lane, route.qp_num) = (Some(lane), number));
        if let Some(socket) = link.route().socket {
            self.sockets.carries(socket, false);
        }
        if let Some(Opening { reply, policy }) = self.openings.remove(&link.name) {
            if policy == Rdma::Require {
                link.with_wakes(&mut self.wakes, |state, _, _| state.moves = false);
            }
            if let Err(Ok(link)) = reply.send(Ok(Arc::clone(link))) {
                link.close(); // nobody wanted it any more
            }
        }
        static LINES: LogLimit = LogLimit::new();
        if let Some(others) = LINES.pass() {
            tracing::info!("link to {} is on RDMA ({name}){others}", link.peer_name());
        }
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

/// Refuses an address that is not the peer's before a queue pair is made for it, or the kernel looks for it.
fn check_offer(shared: &Shared, link: &LinkShared, peer: &Address) -> Result<(), Error> {
    check_peer(peer, link.route().peer).inspect_err(|_| {
        shared.counters.offers_refused.fetch_add(1, Ordering::Relaxed);
    })
}
