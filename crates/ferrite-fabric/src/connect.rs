//! Handshake a peer, by RDMA CM or over TCP (`sockets.rs`): handshakes under way, and what keeps an
//! established link's identifier.
//!
//! Everything here runs in the poller's pass and never waits: each event of the connection manager
//! moves a handshake one step, and the clock ends those that get nowhere. What a step asks of the
//! kernel or the device is a command (`fabric/commands.rs`), which has the identifier meanwhile;
//! events that come before its result wait for that.
//!
//! ```text
//!   outgoing   resolve address ─► resolve route ─► connect (hello) ─► response (hello) ─► establish ─► link
//!   incoming   request (hello) ─► queue pair up, accept (hello) ─► established ─► link in the listener's queue
//!              request without hello ─► the listener's queue of foreign peers
//! ```

mod admission;
mod calling;
mod greeting;
mod incoming;
mod migration;
mod outgoing;
mod several;
mod sockets;
mod upgrading;
mod way;

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
use crate::link::keepalive::Keepalive;
use crate::link::shared::LinkShared;
use crate::link::state::{LinkState, OwnLimits};
use crate::listener::ListenerShared;
use crate::source::Source;
use crate::wire::Hello;
use admission::{AdmissionQueue, Limits, Place};
pub use calling::{ConnectOptions, Connecting, ConnectingEither, ConnectingRaw, Met};
use incoming::Expecting;
pub(crate) use outgoing::Outgoing;
pub use several::ConnectingAny;
pub(crate) use sockets::Sockets;
pub(crate) use upgrading::Opening;

/// An identifier of the connection manager, and what it is for.
pub(crate) enum Handshake {
    Listening {
        id: CmId,
        /// Its address, and whether `[::]` is IPv6 alone.
        at: (SocketAddr, bool),
        listener: Arc<ListenerShared>,
    },
    Outgoing(Box<Outgoing>),
    Incoming {
        id: CmId,
        link: Arc<LinkShared>,
        hello: Hello,
        mtu: Option<Mtu>,
        who: Expecting,
    },
    /// By name: a number may be another link's by the time that something comes for this one.
    Linked {
        id: CmId,
        link: LinkName,
    },
    /// Bound to a device's address and nothing else: how a device without links is heard to go.
    Watching {
        id: CmId,
        device: usize,
    },
    /// A command has the identifier of a handshake. What comes for it meanwhile.
    Commanded {
        is_incoming: bool,
        events: Vec<CmEvent>,
    },
}

#[derive(Default)]
pub(crate) struct Handshakes {
    by_key: HashMap<CmKey, Handshake>,
    /// Connects that wait until fewer are under way.
    waiting: VecDeque<Box<Outgoing>>,
    /// Connects that wait before they try again.
    retrying: HashMap<u64, Box<Outgoing>>,
    next_retry: u64,
    /// Handshakes of peers.
    incoming: AdmissionQueue<CmKey>,
    /// Those of which a command is under way.
    commanded: usize,
    outgoing: usize,
}

impl Handshakes {
    fn put(&mut self, key: CmKey, handshake: Handshake) {
        match handshake {
            Handshake::Outgoing(_) | Handshake::Commanded { is_incoming: false, .. } => {
                self.outgoing += 1
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
                self.outgoing -= 1
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

    /// Hears of the device of `device` by `id`, and not any more by the one before, whose device
    /// has gone.
    pub(crate) fn watch(&mut self, id: CmId, device: usize) {
        self.by_key.retain(
            |_, handshake| !matches!(handshake, Handshake::Watching { device: of, .. } if *of == device),
        );
        self.put(id.key(), Handshake::Watching { id, device });
    }

    /// A command gets the identifier.
    fn command(&mut self, key: CmKey, is_incoming: bool) {
        if !self.by_key.contains_key(&key) {
            self.put(key, Handshake::Commanded { is_incoming, events: Vec::new() });
        }
    }

    /// Tells the peer that the link is over.
    pub(crate) fn hang_up(&mut self, key: CmKey) {
        if let Some(Handshake::Linked { id, .. } | Handshake::Incoming { id, .. }) =
            self.by_key.get(&key)
        {
            let _ = id.disconnect(); // there may be no connection any more
        }
    }
}

/// RNR timer: a peer that meets no receive waits 640 µs (the CM's own choice would be 655 ms).
const RNR_TIMER: u8 = 12;
/// Repeats for ever to a peer without receives: it has stopped taking, which is back-pressure, not
/// failure.
const RNR_RETRIES: u8 = 7;
pub(crate) const UNKNOWN_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

impl Poller {
    /// The channel to the connection manager, opened when it is first needed.
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
            Handshake::Incoming { id, link, hello, mtu, who } => {
                self.on_incoming_event(shared, event, id, link, (hello, mtu), who);
            }
            Handshake::Linked { id, link } => {
                self.on_link_event(shared, &event, link);
                // Until the link is torn down, unless its device must be let go of.
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
                // What came before the farewell is delivered before it.
                self.reap_all(shared);
                if failed_silently(&link) {
                    self.peer_was_refused(shared, &link, true);
                }
                link.with_wakes(&mut self.wakes, |state, _, wakes| {
                    state.on_disconnected(wakes, || {
                        let what = format!(
                            "link to {}: the peer hung up without closing (its process ended, or aborted the link)",
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

    /// A command that had the identifier of a handshake has ended: goes on with `handshake`, and
    /// with what came meanwhile.
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

    /// Ends a handshake or the identifier of a link. Its identifier goes where that may wait.
    pub(crate) fn remove_handshake(&mut self, shared: &Shared, key: CmKey, source: Source) {
        match self.handshakes.take(key) {
            // Its link is over before the peer has finished the handshake.
            Some(Handshake::Incoming { id, who, .. }) => {
                shared.commands.discard(source, id);
                who.tell(Error::new(ErrorKind::LinkDown, "the peer broke off the handshake"));
            }
            Some(handshake) => shared.commands.discard(source, handshake),
            None => {}
        }
    }

    /// What makes a queue pair on `device`; [`Poller::end_making`] when it has, or has not.
    fn begin_making(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
    ) -> Result<QueuePairBuilder, Error> {
        let objects = self.device_objects[device.index].as_mut().filter(|_| !device.is_gone());
        let Some(objects) = objects else {
            return Err(device.absence());
        };
        objects.under_way += 1;
        Ok(objects.queue_pair_builder(device, &shared.config))
    }

    pub(crate) fn end_making(&mut self, shared: &Shared, device: &SharedDevice) {
        if let Some(objects) = &mut self.device_objects[device.index] {
            objects.under_way -= 1;
        }
        self.retire_if_unused(shared, device.index);
    }

    /// Lets go of a queue pair that nobody needs any more.
    fn unmake(&mut self, shared: &Shared, device: &Arc<SharedDevice>, source: Source, made: NewQueuePair) {
        let device = Arc::clone(device);
        let work = |made: &mut Option<NewQueuePair>| {
            drop(made.take());
            Ok(())
        };
        self.command(shared, source, Some(made), work, move |poller, shared, _, _| {
            poller.end_making(shared, &device);
        });
    }

    /// A link on `device` over a queue pair that was made for it, entered where completions find
    /// it.
    fn make_link(
        &mut self,
        shared: &Shared,
        device: &Arc<SharedDevice>,
        made: NewQueuePair,
        peer: Option<SocketAddr>,
        moves: bool,
    ) -> Result<(Arc<LinkShared>, Hello), Error> {
        let source = Source::of_any(peer);
        if device.is_gone() {
            self.unmake(shared, device, source, made);
            return Err(device.absence());
        }
        let inline = made.qp.capacity().max_inline.min(device.inline()) as usize;
        let (links, vacancy) = {
            let mut links = shared.links.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            (links.len(), links.reserve())
        };
        let Some((name, generation)) = vacancy else {
            self.unmake(shared, device, source, made);
            return Err(Error::new(ErrorKind::Resources, "no number is left for another link"));
        };
        let hello = shared.hello(links, moves);
        let limits = own_limits(shared, hello, name);
        let queue = SendQueue::new(made.qp, made.taker, name.index, device.index, generation);
        let state = LinkState::new(queue, Arc::clone(device), inline, limits);
        let (pool, mailbox) = (shared.pool.clone(), Arc::clone(&shared.mailbox));
        let link = Arc::new(LinkShared::new(name, state, pool, mailbox));
        link.set_route(|route| route.peer = peer); // who pays for it, also if it comes to nothing
        self.register_link(shared, &link);
        self.end_making(shared, device);
        Ok((link, hello))
    }

    /// The handshake is done.
    fn establish(
        &mut self,
        shared: &Shared,
        id: CmId,
        link: &Arc<LinkShared>,
        hello: Hello,
        mtu: Option<Mtu>,
    ) {
        let (key, port) = (id.key(), id.device().map_or(1, |(_, port)| port));
        link.with_wakes(&mut self.wakes, |state, _, _| state.open(hello, self.now));
        link.set_route(|route| {
            (route.cm_key, route.port, route.mtu) = (Some(key), port, mtu);
            (route.local, route.peer) = (id.local_addr(), id.peer_addr());
        });
        shared.is_well(link);
        self.handshakes.put(key, Handshake::Linked { id, link: link.name });
        self.timers.add(self.now, Timer::Keepalive(link.name)); // it says when the next is
        // What came in meanwhile may wait for an answer.
        link.with_wakes(&mut self.wakes, LinkState::pump);
    }

    /// Takes back a link whose handshake failed.
    fn unmake_link(&mut self, shared: &Shared, link: &Arc<LinkShared>, error: &Error) {
        link.with_wakes(&mut self.wakes, |state, _, wakes| state.fail(error.clone(), wakes));
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
            Some(Handshake::Incoming { id, link, who, .. }) => {
                let error = Error::new(ErrorKind::Timeout, "the peer did not finish the handshake");
                shared.commands.discard(link.source(), id);
                self.unmake_link(shared, &link, &error);
                who.tell(error);
            }
            Some(other) => self.handshakes.put(key, other),
            None => {}
        }
    }
}

/// Handshakes under way that peers began.
fn door_limits(shared: &Shared) -> Limits {
    let all = shared.config.max_half_open;
    Limits { all, each: all.div_ceil(2), grace: shared.config.connection_timeout / 20 }
}

/// What this side allows itself and its peer on a link.
fn own_limits(shared: &Shared, hello: Hello, name: LinkName) -> OwnLimits {
    let config = &shared.config;
    OwnLimits {
        hello,
        queue_messages: config.send_queue_messages,
        queue_bytes: config.send_queue_bytes,
        patience: Keepalive::new(config.keepalive, name.serial),
        peer_timeout: config.peer_timeout,
        latencies: Arc::clone(&shared.latencies),
        clock: shared.clock.clone(),
    }
}

/// An identifier on a device, if the device has an address.
pub(crate) fn watch(channel: &EventChannel, context: &Context, device: &str) -> Option<CmId> {
    let gids = context.gids().ok()?;
    gids.iter().find_map(|entry| {
        let id = channel.create_id().ok()?;
        id.bind(SocketAddr::new(entry.gid.ip(), 0)).ok()?;
        id.device().is_some_and(|(bound, _)| bound == device).then_some(id)
    })
}

/// The device of the device that an identifier is bound to.
pub(crate) fn device_of<'a>(shared: &'a Shared, id: &CmId) -> Result<&'a Arc<SharedDevice>, Error> {
    let Some((device, _)) = id.device() else {
        return Err(Error::new(ErrorKind::System, "the connection manager names no device"));
    };
    shared.devices.iter().find(|shared| shared.name == device).ok_or_else(|| {
        let what = format!("the address is that of {device}, which this fabric does not use");
        Error::new(ErrorKind::Misuse, what)
    })
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

/// Reads of a peer's that a queue pair of this device serves at a time, and that it may have
/// outstanding.
fn reads(shared: &Shared, device: &SharedDevice) -> (u8, u8) {
    let limits = device.limits();
    let max =
        |device: u32| u8::try_from(device).unwrap_or(u8::MAX).min(shared.config.max_reads).max(1);
    (max(limits.max_qp_rd_atom), max(limits.max_qp_init_rd_atom))
}

fn initialise(id: &CmId, qp: &QueuePair) -> Result<(), Error> {
    Ok(qp.modify(&id.queue_pair_attributes(State::INIT)?.access(Access::LOCAL))?)
}

/// Ready to receive, then to send, as the connection manager agreed; the largest packet of the
/// path. `rights` is what the peer may do to our memory.
fn bring_up(
    id: &CmId,
    qp: &QueuePair,
    rights: Access,
    (reads_in, reads_out): (u8, u8),
) -> Result<Option<Mtu>, Error> {
    let receive = id.queue_pair_attributes(State::READY_TO_RECEIVE)?;
    qp.modify(&receive.access(rights).reads_in(reads_in).rnr_timer(RNR_TIMER))?;
    // The peer's settings would decide how often it is repeated that it has no receives; some say
    // never.
    let send = id.queue_pair_attributes(State::READY_TO_SEND)?.reads_out(reads_out);
    qp.modify(&send.rnr_retries(RNR_RETRIES))?;
    Ok(qp.path().ok().map(|path| path.mtu))
}

/// Whether the queue pair of a link that is up has failed, and not by anything that this side did:
/// a request of the peer's was refused. Soft-RoCE does not always tell.
fn failed_silently(link: &LinkShared) -> bool {
    let is_soft = || {
        let context = link.device().and_then(|device| device.context());
        context.is_some_and(|context| context.device().driver().as_deref() == Some("rxe"))
    };
    let failed = |state: &mut LinkState| {
        state.failure().is_none()
            && state.queue.qp().is_some_and(|qp| qp.state().is_ok_and(|it| it == State::ERROR))
    };
    is_soft() && link.with(|state, _, _| failed(state))
}

fn since(deadline: Instant, now: Instant) -> Duration {
    deadline.saturating_duration_since(now)
}
