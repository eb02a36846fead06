//! Links that go up from TCP to RDMA: what the fabric has to do for them. The rules are in
//! `link/state/upgrading.rs`.
//!
//! Each step that asks something of a device is a command (`fabric/commands.rs`). The link knows by
//! a number which one it waits for: what others come to, because it has withdrawn meanwhile, is let
//! go of.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_verbs::{Access, Mtu, QueuePair, QueuePairAttributes};

use super::calling::Reply;
use super::way::{Search, Up, Way, check_peer};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::device_objects::{NewQueuePair, QueuePairBuilder};
use crate::fabric::poller::Poller;
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::slots::SendQueue;
use crate::fabric::timers::{LinkName, Timer};
use crate::link::shared::LinkShared;
use crate::link::state::{ActiveTransport, Step};
use crate::log_limit::LogLimit;
use crate::one_sided::RegionAccess;
use crate::policy::{Fallback, Rdma};
use crate::random::random_psn;
use crate::wire::{Address, TcpFrameKind};

/// Between tries to go up to RDMA, at most.
const UPGRADE_MAX: Duration = Duration::from_secs(30);

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
        self.upgrade_waiters.insert(link.name, Opening { reply, policy });
        let moves = link.with_wakes(&mut self.wakes, |state, _, _| state.moves);
        if moves {
            // First, since what fails says when to try again.
            self.upgrade_in(link, shared.config.connection_timeout);
            self.offer(shared, link);
        } else {
            let error =
                Error::new(ErrorKind::Refused, format!("{} takes no RDMA", link.peer_name()));
            self.first_upgrade_failed(shared, link, error);
        }
    }

    /// RDMA does not carry a link that somebody waits for.
    pub(crate) fn first_upgrade_failed(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        error: Error,
    ) {
        let Some(Opening { reply, policy }) = self.upgrade_waiters.remove(&link.name) else {
            return;
        };
        if policy == Rdma::Require || link.failure_known() {
            link.with_wakes(&mut self.wakes, |state, _, wakes| state.end(error.clone(), wakes));
            let _ = reply.send(Err(error));
            return;
        }
        shared.fell_back(link, Fallback::new(error));
        if link.with_wakes(&mut self.wakes, |state, _, _| state.moves) {
            self.upgrade_in(link, shared.config.upgrade_after);
        }
        if let Err(Ok(link)) = reply.send(Ok(Arc::clone(link))) {
            link.close();
        }
    }

    /// Looks after `wait` whether the link is still on TCP, and not before: whatever was said
    /// earlier is forgotten.
    pub(crate) fn upgrade_in(&mut self, link: &Arc<LinkShared>, wait: Duration) {
        let at = self.now + wait;
        link.with_wakes(&mut self.wakes, |state, _, _| state.upgrade_at = Some(at));
        self.timers.add(at, Timer::Upgrade(link.name));
    }

    /// A link on TCP that would rather be on RDMA.
    pub(crate) fn upgrade_due(&mut self, shared: &Shared, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        let now = self.now;
        let is_due = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.upgrade_at.is_some_and(|at| at <= now)
        });
        if !is_due {
            return;
        }
        let (transport, upgrading, switched, wait) =
            link.with_wakes(&mut self.wakes, |state, _, _| {
                let wait = state.next_upgrade(shared.config.upgrade_after, UPGRADE_MAX);
                (state.transport, state.is_upgrading(), state.has_switched(), wait)
            });
        if transport == ActiveTransport::Rdma || link.failure_known() {
            return;
        }
        if switched {
            self.upgrade_in(&link, wait); // the peer may still withdraw
            return;
        }
        if upgrading {
            self.withdraw(&link);
            if self.upgrade_waiters.contains_key(&name) {
                let what = format!("{} did not go on over RDMA in time", link.peer_name());
                self.first_upgrade_failed(shared, &link, Error::new(ErrorKind::Timeout, what));
                return; // which has said when to try again
            }
        }
        self.upgrade_in(&link, wait);
        if transport == ActiveTransport::Tcp {
            self.offer(shared, &link);
        }
    }

    /// First step: a queue pair of ours, and where it is.
    fn offer(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        self.find_way(shared, link, None);
    }

    /// Looks for the device that carries the way, where that may wait; then goes on there, up to
    /// `peer` if that is known.
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
                let is_current =
                    link.with_wakes(&mut poller.wakes, |state, _, _| state.is_at(attempt));
                let begun = match way {
                    _ if !is_current => return,
                    Ok(way) => random_psn().and_then(|psn| {
                        poller.begin_making(shared, &way.device).map(|builder| (way, builder, psn))
                    }),
                    Err(error) => Err(error),
                };
                match begun {
                    Ok(begun) => poller.make_way(shared, &link, attempt, begun, peer),
                    Err(error) => poller.upgrade_failed(shared, &link, error),
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
        (way, builder, psn): (Way, QueuePairBuilder, u32),
        peer: Option<Address>,
    ) {
        let rights = link.with_wakes(&mut self.wakes, |state, _, _| state.rights());
        let up = peer.map(|peer| Up::new(shared, &way, &peer, psn, rights));
        let (port, link, source) = (way.port.number, Arc::clone(link), link.source());
        let work = move |(): &mut ()| {
            let made = builder.build()?;
            made.qp.modify(&QueuePairAttributes::init(port, Access::LOCAL))?;
            if let Some(up) = &up {
                up.bring(&made.qp)?;
            }
            Ok((made, up.map(|up| up.path.mtu)))
        };
        self.command(shared, source, (), work, move |poller, shared, (), made| {
            let is_current = link.with_wakes(&mut poller.wakes, |state, _, _| state.is_at(attempt));
            match made {
                Ok((made, mtu)) if is_current && !way.device.is_gone() => {
                    poller.way_made(shared, &link, &way, (made, psn), mtu);
                    poller.end_making(shared, &way.device);
                }
                Ok((made, _)) => {
                    poller.unmake(shared, &way.device, source, made);
                    if is_current {
                        poller.upgrade_failed(shared, &link, way.device.absence());
                    }
                }
                Err(error) => {
                    poller.end_making(shared, &way.device);
                    if is_current {
                        poller.upgrade_failed(shared, &link, error);
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
        (made, psn): (NewQueuePair, u32),
        mtu: Option<Mtu>,
    ) {
        let (number, inline) =
            (made.qp.number(), made.qp.capacity().max_inline.min(way.device.inline()) as usize);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            let queue =
                SendQueue::new(made.qp, made.taker, link.index, way.device.index, state.generation);
            state.begin_upgrade(queue, Arc::clone(&way.device), inline, psn);
        });
        self.register_qp(&way.device, number, link.index);
        let kind = match mtu {
            None => TcpFrameKind::Offer,
            Some(mtu) => {
                link.set_route(|route| (route.mtu, route.port) = (Some(mtu), way.port.number));
                self.tell_keys(shared, link);
                TcpFrameKind::Answer
            }
        };
        let address = way.address(shared, number, psn);
        link.with_wakes(&mut self.wakes, |state, env, wakes| {
            state.say(kind, Some(&address));
            state.pump(env, wakes);
        });
    }

    /// A way up came to nothing: the link stays on TCP.
    fn upgrade_failed(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: Error) {
        tracing::debug!("link to {} stays on TCP: {error}", link.peer_name());
        self.withdraw(link);
        self.first_upgrade_failed(shared, link, error);
    }

    pub(crate) fn migration_step(&mut self, shared: &Shared, link: &Arc<LinkShared>, step: Step) {
        let stepped = match step {
            Step::Offered(address) => self.take_offer(shared, link, &address),
            Step::Answered(address) => self.take_answer(shared, link, &address),
            Step::Probed => {
                self.tell_keys(shared, link);
                link.with_wakes(&mut self.wakes, |state, env, wakes| {
                    state.switch();
                    state.pump(env, wakes);
                });
                Ok(())
            }
            Step::Withdrawn | Step::Failed => {
                match step {
                    // the peer is to destroy its queue pair, too
                    Step::Failed => self.withdraw(link),
                    _ => self.end_upgrade(link),
                }
                let what = format!(
                    "{} does not go on over RDMA: it has none for this address, or its packets do not get through \
                     (UDP port 4791)",
                    link.peer_name()
                );
                self.first_upgrade_failed(shared, link, Error::new(ErrorKind::Unreachable, what));
                Ok(())
            }
            Step::Arrived => {
                self.arrived(shared, link);
                Ok(())
            }
        };
        if let Err(error) = stepped {
            self.upgrade_failed(shared, link, error);
        }
    }

    /// The peer offers to go on over RDMA.
    fn take_offer(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        peer: &Address,
    ) -> Result<(), Error> {
        self.end_upgrade(link);
        check_offer(shared, link, peer)?;
        if !shared.commands.has_room(link.source()) {
            return Err(Error::new(
                ErrorKind::Full,
                "the address has too many handshakes at a time",
            ));
        }
        self.find_way(shared, link, Some(*peer));
        Ok(())
    }

    /// The peer has a queue pair for ours: brings it up, and asks whether the way works.
    fn take_answer(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        peer: &Address,
    ) -> Result<(), Error> {
        check_offer(shared, link, peer)?;
        let attempt = link.with_wakes(&mut self.wakes, |state, _, _| {
            state
                .upgrade
                .as_ref()
                .map(|upgrade| Arc::clone(&upgrade.device))
                .map(|device| (state.begin_attempt(), device))
        });
        let Some((attempt, device)) = attempt else {
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
                let is_current =
                    link.with_wakes(&mut poller.wakes, |state, _, _| state.is_at(attempt));
                match way {
                    _ if !is_current => {}
                    Ok(way) if way.device.index == device.index => {
                        poller.bring_up_way(shared, &link, attempt, &way, &peer);
                    }
                    Ok(_) => {
                        let what = "another device would carry it by now";
                        poller.upgrade_failed(
                            shared,
                            &link,
                            Error::new(ErrorKind::DeviceGone, what),
                        );
                    }
                    Err(error) => poller.upgrade_failed(shared, &link, error),
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
            let qp = state.upgrade.as_mut().and_then(|upgrade| upgrade.queue.lend());
            (qp, state.upgrade_psn(), state.rights())
        });
        let Some(qp) = qp else { return };
        if let Some(objects) = &mut self.device_objects[way.device.index] {
            objects.under_way += 1;
        }
        let up = Up::new(shared, way, peer, psn, rights);
        let (device, port, link) = (Arc::clone(&way.device), way.port.number, Arc::clone(link));
        let work = move |qp: &mut QueuePair| up.bring(qp).map(|()| up.path.mtu);
        self.command(shared, link.source(), qp, work, move |poller, shared, qp, brought| {
            let number = qp.number();
            let back = link.with_wakes(&mut poller.wakes, |state, _, _| match &mut state.upgrade {
                Some(upgrade) if upgrade.queue.is_of(number) => {
                    upgrade.queue.take_back(qp);
                    Ok(state.is_at(attempt))
                }
                _ => Err(qp),
            });
            let probed = match (back, brought) {
                (Err(qp), _) => {
                    // Withdrawn meanwhile: its end was left to us.
                    if let Some(mut queue) = poller.orphans.remove(&(device.index, number)) {
                        let _ = qp.stop(); // as `end_upgrade` would have
                        queue.take_back(qp);
                        poller.destroy_when_drained(&device, queue, &link);
                    }
                    poller.end_making(shared, &device);
                    return;
                }
                (Ok(true), Ok(mtu)) => {
                    link.set_route(|route| (route.mtu, route.port) = (Some(mtu), port));
                    link.with_wakes(&mut poller.wakes, |state, _, _| state.probe())
                }
                (Ok(true), Err(error)) => Err(error),
                (Ok(false), _) => Ok(()),
            };
            poller.end_making(shared, &device);
            if let Err(error) = probed {
                poller.upgrade_failed(shared, &link, error);
            }
        });
    }

    /// Says where the grants of this link are on the device that will carry it.
    fn tell_keys(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let device = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.upgrade.as_ref().map(|upgrade| Arc::clone(&upgrade.device))
        });
        let Some(device) = device else { return };
        let regions = shared.regions.access_for(shared, link, &device);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            if !regions.is_empty() {
                state.allow_ahead(); // there may be more than when it was brought up
            }
            for (grant, access) in regions {
                // Without a key the peer is refused by the device when it uses the grant.
                let remote = match &access {
                    RegionAccess::Shared(remote) => Some(*remote),
                    RegionAccess::Window(window) => state.bind_ahead(&device, window),
                };
                if let Some(remote) = remote {
                    state.say_key(grant, remote.addr, remote.rkey);
                }
            }
        });
    }

    fn withdraw(&mut self, link: &Arc<LinkShared>) {
        link.with_wakes(&mut self.wakes, |state, env, wakes| {
            state.say(TcpFrameKind::Withdraw, None);
            state.pump(env, wakes);
        });
        self.end_upgrade(link);
    }

    /// Gives up a way up. Its queue pair is destroyed when the device is done with it.
    pub(crate) fn end_upgrade(&mut self, link: &Arc<LinkShared>) {
        let ended = link.with_wakes(&mut self.wakes, |state, _, _| state.end_upgrade());
        let Some((device, queue)) = ended else { return };
        if queue.is_away() {
            // A command has the queue pair, and finds that nobody wants it. Until then it may have
            // a receive.
            self.orphans.insert((device.index, queue.number()), queue);
        } else {
            self.destroy_when_drained(&device, queue, link);
        }
    }

    /// RDMA carries the link.
    fn arrived(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let carried = link.with_wakes(&mut self.wakes, |state, env, wakes| {
            state.reset_upgrade();
            state.pump(env, wakes);
            Some((state.device.clone()?, state.queue.qp()?.number()))
        });
        let Some((device, number)) = carried else { return };
        let name = device.name.clone();
        link.set_route(|route| (route.device, route.qp_num) = (Some(device), number));
        if let Some(socket) = link.route().socket {
            self.sockets.carries(socket, false);
        }
        shared.is_well(link);
        link.set_fallback(None);
        shared.counters.upgrades.fetch_add(1, Ordering::Relaxed);
        if let Some(Opening { reply, policy }) = self.upgrade_waiters.remove(&link.name) {
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
    pub(crate) fn end_upgrades_on(&mut self, shared: &Shared, device: &SharedDevice) {
        let links: Vec<_> = {
            let links = shared.links.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            links
                .iter()
                .filter(|link| link.with(|state, _, _| state.upgrades_on(device)))
                .cloned()
                .collect()
        };
        for link in links {
            self.withdraw(&link);
        }
    }
}

/// Refuses an address that is not the peer's before a queue pair is made for it, or the kernel
/// looks for it.
fn check_offer(shared: &Shared, link: &LinkShared, peer: &Address) -> Result<(), Error> {
    check_peer(peer, link.route().peer).inspect_err(|_| {
        shared.counters.offers_refused.fetch_add(1, Ordering::Relaxed);
    })
}
