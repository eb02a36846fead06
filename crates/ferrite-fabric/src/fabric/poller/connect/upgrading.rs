//! The fabric's part of upgrading links from TCP to RDMA. The rules are in `link/core/upgrade.rs`.
//!
//! Each step that needs a device is a command (`fabric/commands.rs`). The link knows the number of
//! the attempt that it waits for. The results of other attempts are discarded, because the link has
//! withdrawn from them meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrite_verbs::{Access, Mtu, QueuePair, QueuePairAttributes};

use super::rdma_endpoint::{EndpointSearch, QueuePairSetup, RdmaEndpoint, check_peer};
use crate::device::device_objects::{NewQueuePair, QueuePairBuilder};
use crate::device::shared_device::SharedDevice;
use crate::device::slots::SendQueue;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::poller::Poller;
use crate::fabric::regions::RegionAccess;
use crate::link::core::Step;
use crate::link::shared::LinkShared;
use crate::log_limit::LogLimit;
use crate::random::random_psn;
use crate::wire::{Address, TcpFrameKind};

impl Poller {
    /// First step: creates a queue pair and offers it to the peer.
    pub(super) fn offer(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        self.begin_upgrade(shared, link, None);
    }

    /// Creates a queue pair on the device for the path, and connects it to `peer` if `peer` is
    /// known.
    fn begin_upgrade(&mut self, shared: &Shared, link: &Arc<LinkShared>, peer: Option<Address>) {
        let attempt = link.with_wakes(&mut self.wakes, |state, _, _| state.core.begin_attempt());
        self.find_endpoint(shared, link, attempt, move |poller, shared, link, endpoint| {
            let psn = random_psn()?;
            let builder = poller.begin_queue_pair(shared, &endpoint.device)?;
            let begun = (endpoint, builder, psn);
            poller.create_upgrade_queue_pair(shared, link, attempt, begun, peer);
            Ok(())
        });
    }

    /// Finds the device for the path, in a command because the search may block. Then continues
    /// with `next`, unless the link has withdrawn from the attempt. An error ends the attempt.
    fn find_endpoint(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        attempt: u64,
        next: impl FnOnce(&mut Self, &Shared, &Arc<LinkShared>, RdmaEndpoint) -> Result<(), Error>
        + Send
        + 'static,
    ) {
        let (search, route) = (EndpointSearch::new(shared), link.route());
        let (local, first) = (route.local, route.first_local());
        let link = Arc::clone(link);
        self.command(
            shared,
            link.source(),
            search,
            move |search| {
                search.find(local).or_else(|error| match first == local {
                    true => Err(error),
                    false => search.find(first).map_err(|_| error),
                })
            },
            move |poller, shared, _, endpoint| {
                if !poller.is_current(&link, attempt) {
                    return;
                }
                match endpoint.map(|endpoint| next(poller, shared, &link, endpoint)) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => poller.upgrade_failed(shared, &link, error),
                    Err(error) => {
                        // The path may work for links with another local address.
                        poller.pass_turn(&link);
                        poller.stay_on_tcp(shared, &link, error);
                    }
                }
            },
        );
    }

    /// Returns whether the link still waits for this attempt.
    fn is_current(&mut self, link: &LinkShared, attempt: u64) -> bool {
        link.with_wakes(&mut self.wakes, |state, _, _| state.core.is_at(attempt))
    }

    /// Creates the queue pair. Leaves it in the INIT state, or connects it to the peer's queue
    /// pair.
    fn create_upgrade_queue_pair(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        attempt: u64,
        (endpoint, builder, psn): (RdmaEndpoint, QueuePairBuilder, u32),
        peer: Option<Address>,
    ) {
        let rights = link.with_wakes(&mut self.wakes, |state, _, _| state.rights());
        let setup = peer.map(|peer| QueuePairSetup::new(shared, &endpoint, &peer, psn, rights));
        let (port, link, source) = (endpoint.port.number, Arc::clone(link), link.source());
        let work = move |(): &mut ()| {
            let made = builder.build()?;
            made.qp.modify(&QueuePairAttributes::init(port, Access::LOCAL))?;
            if let Some(setup) = &setup {
                setup.apply(&made.qp)?;
            }
            Ok((made, setup.map(|setup| setup.path.mtu)))
        };
        self.command(shared, source, (), work, move |poller, shared, (), made| {
            let is_current = poller.is_current(&link, attempt);
            match made {
                Ok((made, mtu)) if is_current && !endpoint.device.is_gone() => {
                    poller.announce_queue_pair(shared, &link, &endpoint, (made, psn), mtu);
                    poller.end_queue_pair(shared, &endpoint.device);
                }
                Ok((made, _)) => {
                    poller.destroy_new_queue_pair(shared, &endpoint.device, source, made);
                    if is_current {
                        poller.upgrade_failed(shared, &link, endpoint.device.absence());
                    }
                }
                Err(error) => {
                    poller.end_queue_pair(shared, &endpoint.device);
                    if is_current {
                        poller.upgrade_failed(shared, &link, error);
                    }
                }
            }
        });
    }

    /// Announces the queue pair to the peer. A connected queue pair is announced as the answer to
    /// an offer, any other as an offer.
    fn announce_queue_pair(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        endpoint: &RdmaEndpoint,
        (made, psn): (NewQueuePair, u32),
        mtu: Option<Mtu>,
    ) {
        let (number, inline) = (
            made.qp.number(),
            made.qp.capacity().max_inline.min(endpoint.device.inline()) as usize,
        );
        link.with_wakes(&mut self.wakes, |state, _, _| {
            let queue = SendQueue::new(
                made.qp,
                made.taker,
                link.index,
                endpoint.device.index,
                state.rdma.generation,
            );
            state.begin_upgrade(queue, Arc::clone(&endpoint.device), inline, psn);
        });
        self.register_qp(&endpoint.device, number, link.index);
        let kind = match mtu {
            None => TcpFrameKind::Offer,
            Some(mtu) => {
                link.set_route(|route| (route.mtu, route.port) = (Some(mtu), endpoint.port.number));
                self.announce_keys(shared, link);
                TcpFrameKind::Answer
            }
        };
        let address = endpoint.address(shared, number, psn);
        link.with_wakes(&mut self.wakes, |state, env, wakes| {
            state.core.say(kind, Some(&address));
            state.pump(env, wakes);
        });
    }

    /// Handles a failed upgrade: the link stays on TCP.
    fn upgrade_failed(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: Error) {
        self.take_turns(shared, link);
        self.stay_on_tcp(shared, link, error);
    }

    fn stay_on_tcp(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: Error) {
        tracing::debug!("link to {} stays on TCP: {error}", link.peer_name());
        self.withdraw(link);
        self.first_upgrade_failed(shared, link, error);
    }

    pub(crate) fn migration_step(&mut self, shared: &Shared, link: &Arc<LinkShared>, step: Step) {
        let stepped = match step {
            Step::Offered(address) => self.accept_offer(shared, link, &address),
            Step::Answered(address) => self.accept_answer(shared, link, &address),
            Step::Probed => {
                self.announce_keys(shared, link);
                link.with_wakes(&mut self.wakes, |state, env, wakes| {
                    state.core.switch();
                    state.pump(env, wakes);
                });
                Ok(())
            }
            Step::Withdrawn | Step::Failed => {
                match step {
                    // The peer must destroy its queue pair, too.
                    Step::Failed => self.withdraw(link),
                    _ => self.end_upgrade(link),
                }
                self.take_turns(shared, link);
                let what = format!(
                    "{} does not upgrade to RDMA: probably it has no RDMA device for this address, \
                     or RDMA packets do not get through (RoCE v2: UDP port 4791)",
                    link.peer_name()
                );
                self.first_upgrade_failed(shared, link, Error::new(ErrorKind::Unreachable, what));
                Ok(())
            }
            Step::Arrived => {
                self.finish_upgrade(shared, link);
                Ok(())
            }
        };
        if let Err(error) = stepped {
            self.upgrade_failed(shared, link, error);
        }
    }

    /// Handles the peer's offer to upgrade to RDMA.
    fn accept_offer(
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
                "too many concurrent handshakes from this address",
            ));
        }
        self.begin_upgrade(shared, link, Some(*peer));
        Ok(())
    }

    /// Handles the peer's answer, which names the peer's queue pair. Connects our queue pair to it
    /// and probes the path.
    fn accept_answer(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        peer: &Address,
    ) -> Result<(), Error> {
        check_offer(shared, link, peer)?;
        let attempt = link.with_wakes(&mut self.wakes, |state, _, _| {
            state
                .next
                .as_ref()
                .map(|upgrade| Arc::clone(&upgrade.device))
                .map(|device| (state.core.begin_attempt(), device))
        });
        let Some((attempt, device)) = attempt else {
            return Err(Error::new(ErrorKind::LinkDown, "the upgrade has ended"));
        };
        let peer = *peer;
        self.find_endpoint(shared, link, attempt, move |poller, shared, link, endpoint| {
            if endpoint.device.index != device.index {
                let what = "the local address now belongs to another RDMA device";
                return Err(Error::new(ErrorKind::DeviceGone, what));
            }
            poller.connect_queue_pair(shared, link, attempt, &endpoint, &peer);
            Ok(())
        });
        Ok(())
    }

    fn connect_queue_pair(
        &mut self,
        shared: &Shared,
        link: &Arc<LinkShared>,
        attempt: u64,
        endpoint: &RdmaEndpoint,
        peer: &Address,
    ) {
        let (qp, psn, rights) = link.with_wakes(&mut self.wakes, |state, _, _| {
            let qp = state.next.as_mut().and_then(|upgrade| upgrade.queue.lend());
            (qp, state.next_psn(), state.rights())
        });
        let Some(qp) = qp else { return };
        if let Some(objects) = &mut self.device_objects[endpoint.device.index] {
            objects.under_way += 1;
        }
        let setup = QueuePairSetup::new(shared, endpoint, peer, psn, rights);
        let (device, port, link) =
            (Arc::clone(&endpoint.device), endpoint.port.number, Arc::clone(link));
        let work = move |qp: &mut QueuePair| setup.apply(qp).map(|()| setup.path.mtu);
        self.command(shared, link.source(), qp, work, move |poller, shared, qp, brought| {
            let number = qp.number();
            let back = link.with_wakes(&mut poller.wakes, |state, _, _| match &mut state.next {
                Some(upgrade) if upgrade.queue.is_of(number) => {
                    upgrade.queue.take_back(qp);
                    Ok(state.core.is_at(attempt))
                }
                _ => Err(qp),
            });
            let probed = match (back, brought) {
                (Err(qp), _) => {
                    // The upgrade was withdrawn meanwhile. Its queue pair must be destroyed here.
                    if let Some(mut queue) = poller.orphans.remove(&(device.index, number)) {
                        let _ = qp.stop(); // `end_upgrade` could not stop it
                        queue.take_back(qp);
                        poller.destroy_when_drained(&device, queue, &link);
                    }
                    poller.end_queue_pair(shared, &device);
                    return;
                }
                (Ok(true), Ok(mtu)) => {
                    link.set_route(|route| (route.mtu, route.port) = (Some(mtu), port));
                    link.with_wakes(&mut poller.wakes, |state, _, _| state.probe())
                }
                (Ok(true), Err(error)) => Err(error),
                (Ok(false), _) => Ok(()),
            };
            poller.end_queue_pair(shared, &device);
            if let Err(error) = probed {
                poller.upgrade_failed(shared, &link, error);
            }
        });
    }

    /// Tells the peer the keys of its grants on the device that will carry the link.
    fn announce_keys(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let device = link.with_wakes(&mut self.wakes, |state, _, _| {
            state.next.as_ref().map(|upgrade| Arc::clone(&upgrade.device))
        });
        let Some(device) = device else { return };
        let regions = shared.regions.access_for(&shared.pool, link, &device);
        link.with_wakes(&mut self.wakes, |state, _, _| {
            if !regions.is_empty() {
                state.allow_ahead(); // the queue pair may be older than these grants
            }
            for (grant, access) in regions {
                // If there is no key to announce, the device will refuse the peer's use of the
                // grant.
                let remote = match &access {
                    RegionAccess::Shared(remote) => Some(*remote),
                    RegionAccess::Window(window) => state.bind_ahead(&device, window),
                };
                if let Some(remote) = remote {
                    state.core.say_key(grant, remote.addr, remote.rkey);
                }
            }
        });
    }

    pub(super) fn withdraw(&mut self, link: &Arc<LinkShared>) {
        link.with_wakes(&mut self.wakes, |state, env, wakes| {
            state.core.say(TcpFrameKind::Withdraw, None);
            state.pump(env, wakes);
        });
        self.end_upgrade(link);
    }

    /// Ends an upgrade. Its queue pair is destroyed when the device has finished with it.
    pub(crate) fn end_upgrade(&mut self, link: &Arc<LinkShared>) {
        let ended = link.with_wakes(&mut self.wakes, |state, _, _| state.end_upgrade());
        let Some((device, queue)) = ended else { return };
        if queue.is_away() {
            // A command owns the queue pair. When the command returns it, the poller destroys it.
            // Until then the queue pair may hold a receive.
            self.orphans.insert((device.index, queue.number()), queue);
        } else {
            self.destroy_when_drained(&device, queue, link);
        }
    }

    /// Completes an upgrade: RDMA now carries the link.
    fn finish_upgrade(&mut self, shared: &Shared, link: &Arc<LinkShared>) {
        let carried = link.with_wakes(&mut self.wakes, |state, env, wakes| {
            state.core.reset_backoff();
            state.pump(env, wakes);
            Some((state.rdma.device.clone()?, state.rdma.queue.qp()?.number()))
        });
        let Some((device, number)) = carried else { return };
        let name = device.name.clone();
        shared.counters.upgrades.fetch_add(1, Ordering::Relaxed);
        link.set_route(|route| (route.device, route.qp_num) = (Some(device), number));
        link.set_fallback(None);
        shared.is_well(link);
        shared.trace(link);
        if let Some(socket) = link.route().socket {
            self.sockets.set_carrying(socket, false);
        }
        self.first_upgrade_done(link);
        self.end_turns(shared, link);
        static LINES: LogLimit = LogLimit::new();
        if let Some(others) = LINES.pass() {
            tracing::info!("link to {} was upgraded to RDMA ({name}){others}", link.peer_name());
        }
    }

    /// Ends all upgrades that use a device that is gone.
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

/// Refuses an address that is not the peer's, on this connection or on its first path. Must be
/// called before a queue pair is created for the address and before the kernel resolves it.
fn check_offer(shared: &Shared, link: &LinkShared, peer: &Address) -> Result<(), Error> {
    let route = link.route();
    check_peer(peer, route.peer)
        .or_else(|error| check_peer(peer, route.first_peer()).map_err(|_| error))
        .inspect_err(|_| {
            shared.counters.offers_refused.fetch_add(1, Ordering::Relaxed);
        })
}
