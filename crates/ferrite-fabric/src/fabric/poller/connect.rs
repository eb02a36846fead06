//! Handshakes with peers, by RDMA CM or over TCP (`sockets.rs`), and the connection-manager
//! identifiers of established links.
//!
//! Everything here runs while the caller holds the poller, and must not block. Each event of the
//! connection manager advances a handshake by one step, and a timer ends handshakes that make no
//! progress. Calls to the kernel or the device that may block run as commands
//! (`fabric/commands.rs`). A command owns the identifier while it runs. Events that arrive
//! meanwhile are handled after the command's result.
//!
//! ```text
//!   outgoing   resolve address ─► resolve route ─► connect (hello) ─► response (hello)
//!              ─► establish ─► link
//!   incoming   request (hello) ─► queue pair up, accept (hello) ─► established
//!              ─► link in the listener's queue
//!              request without hello ─► the listener's queue of foreign peers
//! ```

mod accepting;
mod admission;
mod dialing;
mod greeting;
mod incoming;
mod migration;
mod outgoing;
mod rdma_endpoint;
mod rdma_link;
mod refusing;
mod socket_calls;
mod sockets;
mod tcp_link;
mod tls_failure;
mod upgrade_schedule;
mod upgrade_turns;
mod upgrade_waiter;
mod upgrading;

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmEvent, CmEventKind, CmId, CmKey, Context, EventChannel, Mtu, State};

use super::Poller;
use crate::device::shared_device::SharedDevice;
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::listener::ListenerShared;
use crate::fabric::timers::Timer;
use crate::link::core::{OwnLimits, PeerTimeouts};
use crate::link::keepalive::Keepalive;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;
use crate::link::state::LinkState;
use crate::source::Source;
use crate::wake::wait_set::Ready;
use crate::wire::Hello;
use admission::{AdmissionQueue, Limits};
pub(crate) use dialing::{Opened, OverTcp};
use incoming::Recipient;
pub(crate) use outgoing::{Outgoing, PeerProtocol};
pub(crate) use sockets::Sockets;
pub(crate) use upgrade_schedule::UpgradeSchedule;
pub(crate) use upgrade_waiter::UpgradeWaiter;

/// An identifier of the connection manager, and its purpose.
pub(crate) enum Handshake {
    Listening {
        id: CmId,
        /// The listener's address, and whether `[::]` means only IPv6.
        at: (SocketAddr, bool),
        listener: Arc<ListenerShared>,
    },
    Outgoing(Box<Outgoing>),
    Incoming {
        id: CmId,
        link: Arc<LinkShared>,
        hello: Hello,
        mtu: Mtu,
        recipient: Recipient,
    },
    /// An established link. It is stored by name, because its index may be reused before an event
    /// arrives.
    Linked {
        id: CmId,
        link: LinkName,
    },
    /// An identifier that is bound to an address of a device, only to learn when a device without
    /// links is removed.
    Watching {
        id: CmId,
        device: usize,
    },
    /// A command owns the identifier of a handshake. `events` have arrived meanwhile.
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
    /// Handshakes that peers started and that wait for the peer to finish.
    incoming: AdmissionQueue<CmKey>,
    /// Number of incoming handshakes that have a running command.
    commanded: usize,
    outgoing: usize,
    /// The devices that were ever watched.
    watched: HashSet<usize>,
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

    /// Watches `device` through `id`. Returns the identifiers that watched the device before.
    pub(crate) fn watch(&mut self, id: CmId, device: usize) -> Vec<Handshake> {
        let is_earlier = |_: &CmKey, handshake: &mut Handshake| match handshake {
            Handshake::Watching { device: of, .. } => *of == device,
            _ => false,
        };
        let earlier = self.by_key.extract_if(is_earlier).map(|(_, handshake)| handshake).collect();
        self.put(id.key(), Handshake::Watching { id, device });
        self.watched.insert(device);
        earlier
    }

    /// Returns whether the device was ever watched.
    pub(crate) fn was_watched(&self, device: usize) -> bool {
        self.watched.contains(&device)
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
            let _ = id.disconnect(); // fails if the connection is already gone
        }
    }
}

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
                shared.commands.discard(None, self.handshakes.watch(id, device.index));
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
                // Keep the identifier until the link is torn down, unless the device must be
                // released.
                if event.kind != CmEventKind::DEVICE_REMOVAL
                    && self.link_named(shared, link).is_some()
                {
                    self.handshakes.put(key, Handshake::Linked { id, link });
                } else {
                    // Destroying the identifier may block, especially while the device is being
                    // removed.
                    shared.commands.discard(None, id);
                }
            }
            Handshake::Watching { id, device } => {
                if event.kind == CmEventKind::DEVICE_REMOVAL {
                    self.device_gone(shared, device, "the device is being removed");
                    shared.commands.discard(None, id);
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
                // First deliver the messages that arrived before the disconnect.
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
                recipient.send_error(Error::new(ErrorKind::LinkDown, "the handshake was aborted"));
            }
            Some(handshake) => shared.commands.discard(source, handshake),
            None => {}
        }
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

/// Number of silent connections that are allowed for each possible handshake. A connection that has
/// sent nothing is cheap.
const SILENT_PER_HANDSHAKE: usize = 16;

/// Returns the limits of incoming handshakes over TCP that have started.
fn tcp_handshake_limits(shared: &Shared) -> Limits {
    let limits = handshake_limits(shared);
    limits.at_most(shared.unfinished_tcp_max.load(Ordering::Relaxed) / 2)
}

/// Returns the limits of incoming TCP connections that have sent nothing.
fn silent_limits(shared: &Shared) -> Limits {
    let all = shared.config.max_half_open.saturating_mul(SILENT_PER_HANDSHAKE);
    let limits = Limits { all, each: all.div_ceil(2), grace: Duration::ZERO };
    limits.at_most(shared.unfinished_tcp_max.load(Ordering::Relaxed) / 2)
}

/// Returns this side's limits for a link.
fn own_limits(shared: &Shared, hello: Hello, name: LinkName) -> OwnLimits {
    let config = &shared.config;
    OwnLimits {
        hello,
        queue_messages: config.send_queue_messages,
        queue_bytes: config.send_queue_bytes,
        keepalive: Keepalive::new(config.keepalive, name.serial),
        timeouts: PeerTimeouts {
            answer: config.peer_timeout,
            silence: config.tcp_silence_timeout.unwrap_or(config.peer_timeout),
        },
        latencies: Arc::clone(&shared.latencies),
        clock: shared.clock.clone(),
    }
}

/// Binds an identifier to an address of the device. Returns `None` if no address can be bound.
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
    let found = shared.devices.iter().find(|shared| shared.name == device);
    let found =
        found.ok_or_else(|| match shared.unused.iter().find(|(name, _)| *name == device) {
            // The error says why the device was left out, for example the locked-memory limit.
            Some((_, error)) => error.clone(),
            None => {
                let what =
                    format!("the address belongs to {device}, which this fabric does not use");
                Error::new(ErrorKind::Misuse, what)
            }
        })?;
    let local = id.local_addr().map(|local| local.ip());
    shared.device_choice.check(found, port, local)?;
    Ok(found)
}

/// Returns whether a link's queue pair is in ERROR although this side has no failure, on a device
/// that does not report refused requests. This means that the device refused a request of the peer.
/// On other devices, returns false.
fn failed_silently(link: &LinkShared) -> bool {
    let hides = link.device().is_some_and(|device| device.quirks().hides_refused_requests);
    let failed = |state: &mut LinkState| {
        state.failure().is_none()
            && state.rdma.queue.qp().is_some_and(|qp| qp.state().is_ok_and(|it| it == State::ERROR))
    };
    hides && link.with(|state, _, _| failed(state))
}

fn duration_between(later: Instant, earlier: Instant) -> Duration {
    later.saturating_duration_since(earlier)
}
