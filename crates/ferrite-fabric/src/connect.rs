//! Handshakes with peers, by RDMA CM or over TCP (`sockets.rs`), and the connection-manager
//! identifiers of established links.
//!
//! Everything here runs in the poller's pass and never blocks. Each event of the connection manager
//! advances a handshake by one step, and a timer ends those that make no progress. Calls to the
//! kernel or the device are commands (`fabric/commands.rs`). A command owns the identifier while it
//! runs; events that arrive before its result wait for it.
//!
//! ```text
//!   outgoing   resolve address ─► resolve route ─► connect (hello) ─► response (hello)
//!              ─► establish ─► link
//!   incoming   request (hello) ─► queue pair up, accept (hello) ─► established
//!              ─► link in the listener's queue
//!              request without hello ─► the listener's queue of foreign peers
//! ```

mod admission;
mod calling;
mod greeting;
mod incoming;
mod migration;
mod outgoing;
mod rdma_endpoint;
mod several;
mod sockets;
mod upgrading;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::{
    Access, CmEvent, CmEventKind, CmId, CmKey, ConnectParams, Context, EventChannel, Mtu,
    QueuePair, State,
};

use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::device_objects::{NewQueuePair, QueuePairBuilder};
use crate::fabric::poller::Poller;
use crate::fabric::shared_device::SharedDevice;
use crate::fabric::slots::SendQueue;
use crate::fabric::timers::{LinkName, Timer};
use crate::fabric::wait_set::Ready;
use crate::link::core::OwnLimits;
use crate::link::keepalive::Keepalive;
use crate::link::shared::LinkShared;
use crate::link::state::LinkState;
use crate::listener::ListenerShared;
use crate::source::Source;
use crate::wire::Hello;
use admission::{Admission, AdmissionQueue, Limits};
pub use calling::{ConnectOptions, Connecting, ConnectingEither, ConnectingRaw, Met};
use incoming::Recipient;
pub(crate) use outgoing::Outgoing;
pub use several::ConnectingAny;
pub(crate) use sockets::Sockets;
pub(crate) use upgrading::UpgradeWaiter;

/// An identifier of the connection manager, and its purpose.
pub(crate) enum Handshake {
    Listening {
        id: CmId,
        /// Its address, and whether `[::]` means only IPv6.
        at: (SocketAddr, bool),
        listener: Arc<ListenerShared>,
    },
    Outgoing(Box<Outgoing>),
    Incoming {
        id: CmId,
        link: Arc<LinkShared>,
        hello: Hello,
        mtu: Option<Mtu>,
        recipient: Recipient,
    },
    /// The link by its name, because its number may be reused before an event arrives.
    Linked {
        id: CmId,
        link: LinkName,
    },
    /// Bound to an address of a device, only to learn when a device without links is removed.
    Watching {
        id: CmId,
        device: usize,
    },
    /// A command owns the identifier of a handshake. The events that arrived meanwhile.
    Commanded {
        is_incoming: bool,
        events: Vec<CmEvent>,
    },
}

#[derive(Default)]
pub(crate) struct Handshakes {
    by_key: HashMap<CmKey, Handshake>,
    /// Connects that wait until fewer are in progress.
    waiting: VecDeque<Box<Outgoing>>,
    /// Connects that wait before a retry.
    retrying: HashMap<u64, Box<Outgoing>>,
    next_retry: u64,
    /// Handshakes that peers started.
    incoming: AdmissionQueue<CmKey>,
    /// Number of incoming handshakes that have a running command.
    commanded: usize,
    outgoing: usize,
}

impl Handshakes {
    fn put(&mut self, key: CmKey, handshake: Handshake) {
        match handshake {
            Handshake::Outgoing(_) | Handshake::Commanded { is_incoming: false, .. } => {
                self.outgoing += 1;
            }
            Handshake::Commanded { is_incoming: true, .. } => self.commanded += 1,
            _ => {}
        }
        self.by_key.insert(key, handshake);
    }

    pub(crate) fn take(&mut self, key: CmKey) -> Option<Handshake> {
        let handshake = self.by_key.remove(&key)?;
        match handshake {
            Handshake::Outgoing(_) | Handshake::Commanded { is_incoming: false, .. } => {
                self.outgoing -= 1;
            }
            Handshake::Incoming { .. } => drop(self.incoming.leave(key)),
            Handshake::Commanded { is_incoming: true, .. } => self.commanded -= 1,
            _ => {}
        }
        Some(handshake)
    }

    pub(crate) fn listen(&mut self, key: CmKey, listening: Handshake) {
        self.put(key, listening);
    }

    /// Watches `device` through `id`, instead of through an earlier identifier of the device.
    pub(crate) fn watch(&mut self, id: CmId, device: usize) {
        self.by_key.retain(|_, handshake| match handshake {
            Handshake::Watching { device: of, .. } => *of != device,
            _ => true,
        });
        self.put(id.key(), Handshake::Watching { id, device });
    }

    /// Records that a command owns the identifier.
    fn command(&mut self, key: CmKey, is_incoming: bool) {
        if !self.by_key.contains_key(&key) {
            self.put(key, Handshake::Commanded { is_incoming, events: Vec::new() });
        }
    }

    /// Disconnects, so that the peer learns that the link is over.
    pub(crate) fn hang_up(&mut self, key: CmKey) {
        if let Some(Handshake::Linked { id, .. } | Handshake::Incoming { id, .. }) =
            self.by_key.get(&key)
        {
            let _ = id.disconnect(); // it fails if there is no connection any more
        }
    }
}

/// RNR timer: a peer that finds no posted receive waits 640 µs (the CM would choose 655 ms).
const RNR_TIMER: u8 = 12;
/// Unlimited retries to a peer without posted receives: it has stopped consuming, which is
/// back-pressure and not a failure.
const RNR_RETRIES: u8 = 7;
pub(crate) const UNKNOWN_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

impl Poller {
    /// Returns the channel to the connection manager; opens it when it is first needed.
    pub(crate) fn cm(&mut self, shared: &Shared) -> Result<EventChannel, Error> {
        if let Some(channel) = &self.cm {
            return Ok(channel.clone());
        }
        let Some(verbs) = &shared.verbs else { return Err(shared.no_rdma()) };
        let channel = verbs.open_event_channel()?;
        shared.waits.add(std::os::fd::AsFd::as_fd(&channel), Ready::Cm)?;
        self.cm = Some(channel.clone());
        for device in &shared.devices {
            let context = device.context();
            if let Some(id) = context.and_then(|context| watch(&channel, &context, &device.name)) {
                self.handshakes.watch(id, device.index);
            }
        }
        Ok(channel)
    }

    pub(crate) fn on_cm_event(&mut self, shared: &Shared, event: CmEvent) {
        let key = event.id;
        if event.request.is_some() {
            self.on_request(shared, event);
            return;
        }
        let Some(handshake) = self.handshake(key) else { return };
        match handshake {
            Handshake::Outgoing(outgoing) => self.on_outgoing_event(shared, outgoing, event),
            Handshake::Incoming { id, link, hello, mtu, recipient } => {
                self.on_incoming_event(shared, event, id, link, (hello, mtu), recipient);
            }
            Handshake::Linked { id, link } => {
                self.on_link_event(shared, &event, link);
                // Keep it until the link is torn down, unless the device must be released.
                if event.kind != CmEventKind::DEVICE_REMOVAL
                    && self.link_named(shared, link).is_some()
                {
                    self.handshakes.put(key, Handshake::Linked { id, link });
                }
            }
            Handshake::Watching { id, device } => {
                if event.kind == CmEventKind::DEVICE_REMOVAL {
                    self.device_gone(shared, device, "the device is being removed");
                } else {
                    self.handshakes.put(key, Handshake::Watching { id, device });
                }
            }
            Handshake::Commanded { is_incoming, mut events } => {
                events.push(event);
                self.handshakes.put(key, Handshake::Commanded { is_incoming, events });
            }
            Handshake::Listening { id, at, listener } => {
                if event.kind == CmEventKind::DEVICE_REMOVAL {
                    self.lose_listener(shared, id, at, listener);
                } else {
                    self.handshakes.put(key, Handshake::Listening { id, at, listener });
                }
            }
        }
    }

    fn on_link_event(&mut self, shared: &Shared, event: &CmEvent, name: LinkName) {
        let Some(link) = self.link_named(shared, name) else { return };
        match event.kind {
            CmEventKind::DISCONNECTED => {
                // Deliver what arrived before the disconnect first.
                self.reap_all(shared);
                if failed_silently(&link) {
                    self.peer_was_refused(shared, &link, true);
                }
                link.with_wakes(&mut self.wakes, |state, _, wakes| {
                    state.on_disconnected(wakes, || {
                        let what = format!(
                            "link to {}: the peer hung up without closing (its process ended, \
                             or aborted the link)",
                            link.peer_name()
                        );
                        Error::new(ErrorKind::LinkDown, what)
                    });
                });
            }
            CmEventKind::DEVICE_REMOVAL => {
                if let Some(device) = link.device() {
                    self.device_gone(shared, device.index, "the device is being removed");
                }
            }
            _ => {}
        }
    }

    /// Continues with `handshake` after the command that owned its identifier, and handles the
    /// events that arrived meanwhile.
    fn resume(&mut self, shared: &Shared, key: CmKey, handshake: Option<Handshake>) {
        let events = match self.handshakes.take(key) {
            Some(Handshake::Commanded { events, .. }) => events,
            Some(other) => {
                self.handshakes.put(key, other);
                Vec::new()
            }
            None => Vec::new(),
        };
        if let Some(handshake) = handshake {
            self.handshakes.put(key, handshake);
        }
        for event in events {
            self.on_cm_event(shared, event);
        }
    }

    /// Ends a handshake, or releases the identifier of a link. A command destroys the identifier,
    /// because that may block.
    pub(crate) fn remove_handshake(&mut self, shared: &Shared, key: CmKey, source: Source) {
        match self.handshakes.take(key) {
            // The link ended before the peer had finished the handshake.
            Some(Handshake::Incoming { id, recipient, .. }) => {
                shared.commands.discard(source, id);
                recipient
                    .send_error(Error::new(ErrorKind::LinkDown, "the peer aborted the handshake"));
            }
            Some(handshake) => shared.commands.discard(source, handshake),
            None => {}
        }
    }

    /// Returns a builder for a queue pair on `device`. Call [`Poller::end_queue_pair`] when it has
    /// finished or failed.
    fn begin_queue_pair(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
    ) -> Result<QueuePairBuilder, Error> {
        let objects = self.device_objects[device.index].as_mut().filter(|_| !device.is_gone());
        let Some(objects) = objects else {
            return Err(device.absence());
        };
        objects.under_way += 1;
        let builder = objects.queue_pair_builder(device, &shared.config);
        self.prepare_queue_pairs(shared, device);
        Ok(builder)
    }

    pub(crate) fn end_queue_pair(&mut self, shared: &Shared, device: &SharedDevice) {
        if let Some(objects) = &mut self.device_objects[device.index] {
            objects.under_way -= 1;
        }
        self.retire_if_unused(shared, device.index);
    }

    /// Destroys a queue pair that nobody needs any more.
    fn destroy_new_queue_pair(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
        source: Source,
        made: NewQueuePair,
    ) {
        let device = Arc::clone(device);
        let work = |made: &mut Option<NewQueuePair>| {
            drop(made.take());
            Ok(())
        };
        self.command(shared, source, Some(made), work, move |poller, shared, _, _| {
            poller.end_queue_pair(shared, &device);
        });
    }

    /// Creates and registers a link on `device` over a new queue pair.
    fn create_link(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
        made: NewQueuePair,
        peer: Option<SocketAddr>,
        moves: bool,
    ) -> Result<(Arc<LinkShared>, Hello), Error> {
        let source = Source::of_any(peer);
        if device.is_gone() {
            self.destroy_new_queue_pair(shared, device, source, made);
            return Err(device.absence());
        }
        let inline = made.qp.capacity().max_inline.min(device.inline()) as usize;
        let (links, reserved) = {
            let mut links = shared.links.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            (links.len(), links.reserve())
        };
        let Some((name, generation)) = reserved else {
            self.destroy_new_queue_pair(shared, device, source, made);
            return Err(Error::new(ErrorKind::Resources, "too many links: no link number is free"));
        };
        let hello = shared.hello(links, moves);
        let limits = own_limits(shared, hello, name);
        let queue = SendQueue::new(made.qp, made.taker, name.index, device.index, generation);
        let state = LinkState::new(queue, Arc::clone(device), inline, limits);
        let (pool, mailbox) = (shared.pool.clone(), Arc::clone(&shared.mailbox));
        let link = Arc::new(LinkShared::new(name, state, pool, mailbox));
        // The peer's address also decides which source pays for the link if it fails.
        link.set_route(|route| route.peer = peer);
        self.register_link(shared, &link);
        self.end_queue_pair(shared, device);
        Ok((link, hello))
    }

    /// Opens the link: the handshake is complete.
    fn establish(
        &mut self,
        shared: &Shared,
        id: CmId,
        link: &Arc<LinkShared>,
        hello: Hello,
        mtu: Option<Mtu>,
    ) {
        let (key, port) = (id.key(), id.device().map_or(1, |(_, port)| port));
        link.with_wakes(&mut self.wakes, |state, _, _| state.core.open(hello, self.now));
        link.set_route(|route| {
            (route.cm_key, route.port, route.mtu) = (Some(key), port, mtu);
            (route.local, route.peer) = (id.local_addr(), id.peer_addr());
        });
        shared.is_well(link);
        shared.trace(link);
        self.handshakes.put(key, Handshake::Linked { id, link: link.name });
        self.timers.add(self.now, Timer::Keepalive(link.name)); // its handler sets the next one
        // Messages that arrived meanwhile may need a reply.
        link.with_wakes(&mut self.wakes, LinkState::pump);
    }

    /// Ends a link whose handshake failed.
    fn abandon_link(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: &Error) {
        link.with_wakes(&mut self.wakes, |state, _, wakes| state.core.fail(error.clone(), wakes));
        self.attend(shared, link.index);
    }

    pub(crate) fn handshake_timed_out(&mut self, shared: &Shared, key: CmKey) {
        match self.handshake(key) {
            Some(Handshake::Outgoing(outgoing)) => {
                if outgoing.is_over(self.now) {
                    self.outgoing_timed_out(shared, *outgoing);
                } else {
                    let at = outgoing.deadline();
                    self.handshakes.put(key, Handshake::Outgoing(outgoing));
                    self.timers.add(at, Timer::Handshake(key));
                }
            }
            Some(Handshake::Incoming { id, link, recipient, .. }) => {
                let error = Error::new(ErrorKind::Timeout, "the peer did not finish the handshake");
                shared.commands.discard(link.source(), id);
                self.abandon_link(shared, &link, &error);
                recipient.send_error(error);
            }
            Some(other) => self.handshakes.put(key, other),
            None => {}
        }
    }
}

/// Returns the limits for handshakes that peers started.
fn handshake_limits(shared: &Shared) -> Limits {
    let all = shared.config.max_half_open;
    Limits { all, each: all.div_ceil(2), grace: shared.config.connection_timeout / 20 }
}

/// Returns the limits of this side for a link.
fn own_limits(shared: &Shared, hello: Hello, name: LinkName) -> OwnLimits {
    let config = &shared.config;
    OwnLimits {
        hello,
        queue_messages: config.send_queue_messages,
        queue_bytes: config.send_queue_bytes,
        keepalive: Keepalive::new(config.keepalive, name.serial),
        peer_timeout: config.peer_timeout,
        latencies: Arc::clone(&shared.latencies),
        clock: shared.clock.clone(),
    }
}

/// Binds an identifier to an address of the device; `None` if the device has none.
pub(crate) fn watch(channel: &EventChannel, context: &Context, device: &str) -> Option<CmId> {
    let gids = context.gids().ok()?;
    gids.iter().find_map(|entry| {
        let id = channel.create_id().ok()?;
        id.bind(SocketAddr::new(entry.gid.ip(), 0)).ok()?;
        id.device().is_some_and(|(bound, _)| bound == device).then_some(id)
    })
}

/// Returns the fabric's device that an identifier is bound to.
pub(crate) fn device_of<'a>(shared: &'a Shared, id: &CmId) -> Result<&'a Arc<SharedDevice>, Error> {
    let Some((device, port)) = id.device() else {
        return Err(Error::new(ErrorKind::System, "the connection manager reported no device"));
    };
    let found = shared.devices.iter().find(|shared| shared.name == device).ok_or_else(|| {
        let what = format!("the address belongs to {device}, which this fabric does not use");
        Error::new(ErrorKind::Misuse, what)
    })?;
    let local = id.local_addr().map(|local| local.ip());
    shared.device_choice.check(found, port, local)?;
    Ok(found)
}

fn params<'a>(
    shared: &Shared,
    device: &SharedDevice,
    link: &LinkShared,
    hello: &'a [u8],
) -> ConnectParams<'a> {
    let (reads_in, reads_out) = reads(shared, device);
    ConnectParams {
        qp_num: link.route().qp_num,
        srq: true,
        private_data: hello,
        reads_in,
        reads_out,
        retries: shared.config.retries,
        rnr_retries: RNR_RETRIES,
    }
}

/// Returns how many reads of the peer a queue pair of this device serves at a time, and how many of
/// its own it may have outstanding.
fn reads(shared: &Shared, device: &SharedDevice) -> (u8, u8) {
    let limits = device.limits();
    let max =
        |device: u32| u8::try_from(device).unwrap_or(u8::MAX).min(shared.config.max_reads).max(1);
    (max(limits.max_qp_rd_atom), max(limits.max_qp_init_rd_atom))
}

fn initialise(id: &CmId, qp: &QueuePair) -> Result<(), Error> {
    Ok(qp.modify(&id.queue_pair_attributes(State::INIT)?.access(Access::LOCAL))?)
}

/// Moves the queue pair to ready-to-receive and then ready-to-send, as agreed with the connection
/// manager. Returns the path's MTU. `rights` is what the peer may do to our memory.
fn bring_up(
    id: &CmId,
    qp: &QueuePair,
    rights: Access,
    (reads_in, reads_out): (u8, u8),
) -> Result<Option<Mtu>, Error> {
    let receive = id.queue_pair_attributes(State::READY_TO_RECEIVE)?;
    qp.modify(&receive.access(rights).reads_in(reads_in).rnr_timer(RNR_TIMER))?;
    // Otherwise the peer's settings would decide how often to retry while it has no receives; some
    // peers ask for no retries.
    let send = id.queue_pair_attributes(State::READY_TO_SEND)?.reads_out(reads_out);
    qp.modify(&send.rnr_retries(RNR_RETRIES))?;
    Ok(qp.path().ok().map(|path| path.mtu))
}

/// Returns whether the queue pair of a working link has failed without a failure on this side: then
/// a request of the peer was refused. Soft-RoCE does not always report that.
fn failed_silently(link: &LinkShared) -> bool {
    let is_soft = || {
        let context = link.device().and_then(|device| device.context());
        context.is_some_and(|context| context.device().driver().as_deref() == Some("rxe"))
    };
    let failed = |state: &mut LinkState| {
        state.failure().is_none()
            && state.rdma.queue.qp().is_some_and(|qp| qp.state().is_ok_and(|it| it == State::ERROR))
    };
    is_soft() && link.with(|state, _, _| failed(state))
}

fn duration_between(later: Instant, earlier: Instant) -> Duration {
    later.saturating_duration_since(earlier)
}
