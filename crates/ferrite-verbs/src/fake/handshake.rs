//! The connection manager's state machine: who may do what when, and what the other side hears.
//!
//! ```text
//! active   Idle ─► Bound ─► AddressResolved ─► RouteResolved ─► Connecting ─► Responded ─┐
//!                    └─► Listening                                                       ├─► Connected
//! passive                                                     Requested ─► Accepted ─────┘
//! both     Connected ─► Leaving (disconnect called) ─► Left        Connected ─► LeftAlone (heard it) ─► Left
//! anywhere ─► Over: refused, or the device went
//! ```
//!
//! As with the kernel, whoever disconnects hears of its own disconnect only when the peer has
//! answered, by disconnecting or by destroying its identifier. Messages arrive at once or, in a
//! black hole, never.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;

use super::device::gid_of;
use super::object::{Events, Id, Ptr};
use super::state::State;
use crate::error::RejectReason;
use crate::sys;
use crate::sys::rdma_cm_event_type as Kind;

const REQUEST_DATA: usize = crate::cm::REQUEST_PRIVATE_DATA_MAX;
const ACCEPT_DATA: usize = crate::cm::ACCEPT_PRIVATE_DATA_MAX;
const REJECT_DATA: usize = crate::cm::REJECT_PRIVATE_DATA_MAX;
/// IB_CM_REJ_TIMEOUT: what a peer hears when the asker has given up.
const GAVE_UP: RejectReason = RejectReason(4);

pub(super) struct CmChannel {
    pub(super) events: Events<CmEvent>,
    pub(super) raw: Ptr<sys::rdma_event_channel>,
}

pub(super) struct CmEvent {
    pub(super) id: Id,
    pub(super) listener: Option<Id>,
    pub(super) kind: Kind,
    pub(super) status: i32,
    pub(super) params: Params,
    pub(super) data: Vec<u8>,
}

/// What one side tells the other.
#[derive(Clone, Copy, Default)]
pub(super) struct Params {
    pub(super) qp_num: u32,
    pub(super) srq: u8,
    pub(super) flow_control: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
}

pub(super) struct Identifier {
    pub(super) channel: Id,
    pub(super) phase: Phase,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    pub(super) device: Option<Id>,
    pub(super) peer: Option<Id>,
    /// Whether it owns its local port; an accepted connection shares the listener's.
    pub(super) owns_port: bool,
    /// Whether it came with a request.
    pub(super) is_passive: bool,
    pub(super) reuse: bool,
    pub(super) tos: u8,
    pub(super) ack_timeout: Option<u8>,
    /// Requests that may wait to be fetched.
    pub(super) backlog: usize,
    pub(super) sent: Params,
    pub(super) heard: Params,
    pub(super) unacked: usize,
    pub(super) raw: Ptr<sys::rdma_cm_id>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    Connecting,
    Responded,
    Requested,
    Accepted,
    Connected,
    Leaving,
    LeftAlone,
    Left,
    Over,
}

impl State {
    pub(super) fn tell(&mut self, id: Id, kind: Kind, status: i32, params: Params, data: Vec<u8>) {
        let event = CmEvent { id, listener: None, kind, status, params, data };
        if let Some(channel) = self.identifiers.get(&id).map(|id| id.channel)
            && let Some(channel) = self.cm_channels.get_mut(&channel)
        {
            channel.events.push(event);
        }
    }

    fn tell_plainly(&mut self, id: Id, kind: Kind, status: i32) {
        self.tell(id, kind, status, Params::default(), Vec::new());
    }

    fn at_phase(&mut self, id: Id, allowed: &[Phase]) -> Result<&mut Identifier, Errno> {
        self.identifiers
            .get_mut(&id)
            .filter(|found| allowed.contains(&found.phase))
            .ok_or(Errno::INVAL)
    }

    fn set_phase(&mut self, id: Id, phase: Phase) {
        if let Some(found) = self.identifiers.get_mut(&id) {
            found.phase = phase;
        }
    }

    pub(super) fn device_with(&self, ip: IpAddr) -> Option<Id> {
        self.device_at(gid_of(ip))
    }

    pub(super) fn bind(&mut self, id: Id, addr: SocketAddr) -> Result<(), Errno> {
        let reuse = self.at_phase(id, &[Phase::Idle])?.reuse;
        let device = if addr.ip().is_unspecified() {
            None
        } else {
            Some(self.device_with(addr.ip()).ok_or(Errno::NODEV)?)
        };
        let port = match addr.port() {
            0 => self.free_port(addr.ip()).ok_or(Errno::ADDRNOTAVAIL)?,
            port if self.is_taken(addr.ip(), port, reuse) => return Err(Errno::ADDRINUSE),
            port => port,
        };
        let found = self.at_phase(id, &[Phase::Idle])?;
        found.local = Some(SocketAddr::new(addr.ip(), port));
        (found.device, found.phase, found.owns_port) = (device, Phase::Bound, true);
        self.show(id);
        Ok(())
    }

    fn is_taken(&self, ip: IpAddr, port: u16, reuse: bool) -> bool {
        self.identifiers.values().filter(|other| other.owns_port).any(|other| {
            let Some(local) = other.local else { return false };
            let overlaps = local.ip() == ip || local.ip().is_unspecified() || ip.is_unspecified();
            let shares = reuse && other.reuse && other.phase != Phase::Listening;
            local.port() == port && overlaps && !shares
        })
    }

    fn free_port(&mut self, ip: IpAddr) -> Option<u16> {
        (0..16_384).find_map(|_| {
            let port = self.next_port;
            self.next_port = if port == u16::MAX { 49_152 } else { port + 1 };
            (!self.is_taken(ip, port, false)).then_some(port)
        })
    }

    pub(super) fn listen(&mut self, id: Id, backlog: usize) -> Result<(), Errno> {
        if self.at_phase(id, &[Phase::Idle]).is_ok() {
            self.bind(id, SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0))?;
        }
        let found = self.at_phase(id, &[Phase::Bound])?;
        (found.phase, found.backlog) = (Phase::Listening, backlog);
        Ok(())
    }

    /// Starts from `source`, or from a device of its own choice: the first other one that reaches
    /// the target.
    pub(super) fn resolve_address(
        &mut self,
        id: Id,
        source: Option<SocketAddr>,
        target: SocketAddr,
    ) -> Result<(), Errno> {
        let found = self.at_phase(id, &[Phase::Idle, Phase::Bound])?;
        let bound = found.device.zip(found.local);
        let to = self.device_with(target.ip()).filter(|to| self.devices[to].is_alive());
        if bound.is_none() {
            let source = match source.filter(|source| !source.ip().is_unspecified()) {
                Some(source) => source,
                None => SocketAddr::new(self.source_for(to).ok_or(Errno::NODEV)?, 0),
            };
            // A listener on all addresses was bound before: it keeps its port.
            self.set_phase(id, Phase::Idle);
            self.bind(id, source)?;
        }
        let found = self.at_phase(id, &[Phase::Bound])?;
        found.remote = Some(target);
        let from = found.device;
        if to.is_some() && from.is_some_and(|from| self.devices[&from].is_alive()) {
            self.set_phase(id, Phase::AddressResolved);
            self.tell_plainly(id, Kind::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        } else {
            self.tell_plainly(id, Kind::RDMA_CM_EVENT_ADDR_ERROR, -Errno::TIMEDOUT.raw_os_error());
        }
        self.show(id);
        Ok(())
    }

    fn source_for(&self, target: Option<Id>) -> Option<IpAddr> {
        let other =
            self.devices.values().find(|device| device.is_alive() && Some(device.id) != target);
        let device = other.or_else(|| self.devices.get(&target?))?;
        device.spec.addresses.first().copied()
    }

    pub(super) fn resolve_route(&mut self, id: Id) -> Result<(), Errno> {
        self.at_phase(id, &[Phase::AddressResolved])?.phase = Phase::RouteResolved;
        self.tell_plainly(id, Kind::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
        Ok(())
    }

    pub(super) fn connect(&mut self, id: Id, params: Params, data: Vec<u8>) -> Result<(), Errno> {
        let found = self.at_phase(id, &[Phase::RouteResolved])?;
        let data = padded(data, REQUEST_DATA)?;
        (found.phase, found.sent) = (Phase::Connecting, params);
        let (Some(from), Some(local), Some(target)) = (found.device, found.local, found.remote)
        else {
            return Err(Errno::INVAL);
        };
        let Some(to) = self.device_with(target.ip()).filter(|to| self.reaches(from, *to)) else {
            // Nobody answers: the caller's deadline comes first.
            return Ok(());
        };
        let listener = self.identifiers.iter().find(|(_, other)| {
            other.phase == Phase::Listening
                && other.local.is_some_and(|at| {
                    at.port() == target.port()
                        && (at.ip() == target.ip() || at.ip().is_unspecified())
                })
        });
        let Some((listener_id, listener)) = listener.map(|(id, found)| (*id, found)) else {
            self.refuse(id, RejectReason::NO_LISTENER, Vec::new());
            return Ok(());
        };
        let (channel, waiting, backlog) =
            (listener.channel, self.unfetched(listener_id), listener.backlog);
        if waiting >= backlog {
            self.refuse(id, RejectReason::BY_APPLICATION, Vec::new());
            return Ok(());
        }
        let new = self.add_identifier(channel, std::ptr::null_mut())?;
        if let Some(passive) = self.identifiers.get_mut(&new) {
            (passive.phase, passive.is_passive) = (Phase::Requested, true);
            (passive.local, passive.remote, passive.device) = (Some(target), Some(local), Some(to));
            (passive.peer, passive.heard) = (Some(id), params);
        }
        self.show(new);
        if let Some(active) = self.identifiers.get_mut(&id) {
            active.peer = Some(new);
        }
        let event = CmEvent {
            id: new,
            listener: Some(listener_id),
            kind: Kind::RDMA_CM_EVENT_CONNECT_REQUEST,
            status: 0,
            params: params.as_heard(),
            data,
        };
        if let Some(channel) = self.cm_channels.get_mut(&channel) {
            channel.events.push(event);
        }
        Ok(())
    }

    fn unfetched(&self, listener: Id) -> usize {
        let Some(found) = self.identifiers.get(&listener) else { return 0 };
        let Some(channel) = self.cm_channels.get(&found.channel) else { return 0 };
        channel.events.count(|event| event.listener == Some(listener))
    }

    /// The peer of `id`, if a message can get there.
    fn reachable_peer(&self, id: Id) -> Option<Id> {
        let (mine, peer_id) =
            self.identifiers.get(&id).and_then(|found| Some((found.device?, found.peer?)))?;
        let theirs = self.identifiers.get(&peer_id)?.device?;
        self.reaches(mine, theirs).then_some(peer_id)
    }

    /// Ends `id` with a refusal.
    fn refuse(&mut self, id: Id, reason: RejectReason, data: Vec<u8>) {
        self.set_phase(id, Phase::Over);
        let data = padded(data, REJECT_DATA).unwrap_or_default();
        self.tell(
            id,
            Kind::RDMA_CM_EVENT_REJECTED,
            reason.code().cast_signed(),
            Params::default(),
            data,
        );
    }

    pub(super) fn accept(&mut self, id: Id, params: Params, data: Vec<u8>) -> Result<(), Errno> {
        let data = padded(data, ACCEPT_DATA)?;
        let found = self.at_phase(id, &[Phase::Requested])?;
        (found.phase, found.sent) = (Phase::Accepted, params);
        if let Some(peer) = self.reachable_peer(id)
            && let Ok(active) = self.at_phase(peer, &[Phase::Connecting])
        {
            (active.phase, active.heard) = (Phase::Responded, params);
            self.tell(peer, Kind::RDMA_CM_EVENT_CONNECT_RESPONSE, 0, params.as_heard(), data);
        }
        Ok(())
    }

    pub(super) fn establish(&mut self, id: Id) -> Result<(), Errno> {
        self.at_phase(id, &[Phase::Responded])?.phase = Phase::Connected;
        if let Some(peer) = self.reachable_peer(id)
            && let Ok(passive) = self.at_phase(peer, &[Phase::Accepted])
        {
            passive.phase = Phase::Connected;
            self.tell_plainly(peer, Kind::RDMA_CM_EVENT_ESTABLISHED, 0);
        }
        Ok(())
    }

    pub(super) fn reject(&mut self, id: Id, data: Vec<u8>) -> Result<(), Errno> {
        if data.len() > REJECT_DATA {
            return Err(Errno::INVAL);
        }
        self.at_phase(id, &[Phase::Requested, Phase::Responded])?.phase = Phase::Over;
        self.refuse_peer(id, RejectReason::BY_APPLICATION, data);
        Ok(())
    }

    fn refuse_peer(&mut self, id: Id, reason: RejectReason, data: Vec<u8>) {
        let waits = [Phase::Connecting, Phase::Responded, Phase::Requested, Phase::Accepted];
        if let Some(peer) = self.reachable_peer(id)
            && self.at_phase(peer, &waits).is_ok()
        {
            self.refuse(peer, reason, data);
        }
    }

    pub(super) fn disconnect(&mut self, id: Id) -> Result<(), Errno> {
        let phase = self.identifiers.get(&id).ok_or(Errno::INVAL)?.phase;
        match phase {
            Phase::Connected => {
                self.set_phase(id, Phase::Leaving);
                if !self.leave(id) {
                    // The request to part is resent until the kernel gives up.
                    self.set_phase(id, Phase::Left);
                    let status = -Errno::TIMEDOUT.raw_os_error();
                    self.tell_plainly(id, Kind::RDMA_CM_EVENT_DISCONNECTED, status);
                }
            }
            Phase::LeftAlone => {
                self.set_phase(id, Phase::Left);
                self.answer_leaving(id);
            }
            Phase::Idle
            | Phase::Bound
            | Phase::AddressResolved
            | Phase::RouteResolved
            | Phase::Listening => {
                return Err(Errno::INVAL);
            }
            // The kernel answers 0 to every other.
            _ => {}
        }
        Ok(())
    }

    /// Tells the peer that `id` leaves; `false` if it cannot be reached. Both may leave at once.
    fn leave(&mut self, id: Id) -> bool {
        let Some(peer) = self.reachable_peer(id) else { return false };
        match self.identifiers.get(&peer).map(|peer| peer.phase) {
            Some(Phase::Connected | Phase::Accepted) => {
                self.set_phase(peer, Phase::LeftAlone);
                self.tell_plainly(peer, Kind::RDMA_CM_EVENT_DISCONNECTED, 0);
                true
            }
            _ => false,
        }
    }

    fn answer_leaving(&mut self, id: Id) {
        if let Some(peer) = self.reachable_peer(id)
            && let Ok(peer_found) = self.at_phase(peer, &[Phase::Leaving])
        {
            peer_found.phase = Phase::Left;
            self.tell_plainly(peer, Kind::RDMA_CM_EVENT_DISCONNECTED, 0);
        }
    }

    /// What the peer hears when `id` is destroyed as it is.
    pub(super) fn say_goodbye(&mut self, id: Id) {
        match self.identifiers.get(&id).map(|found| found.phase) {
            Some(Phase::Connecting) => self.refuse_peer(id, GAVE_UP, Vec::new()),
            Some(Phase::Requested | Phase::Accepted | Phase::Responded) => {
                self.refuse_peer(id, RejectReason::BY_APPLICATION, Vec::new());
            }
            Some(Phase::Connected) => {
                self.leave(id);
            }
            Some(Phase::LeftAlone) => self.answer_leaving(id),
            _ => {}
        }
    }

    /// A device went: its identifiers hear it, and so do their peers.
    pub(super) fn leave_device(&mut self, device: Id) {
        let here: Vec<Id> = self
            .identifiers
            .iter()
            .filter(|(_, id)| id.device == Some(device))
            .map(|(id, _)| *id)
            .collect();
        for id in here {
            let connected = [Phase::Connected, Phase::Accepted, Phase::Leaving];
            let peer = self.identifiers.get(&id).and_then(|found| found.peer);
            if let Some(peer) = peer
                && self.at_phase(peer, &connected).is_ok_and(|found| found.device != Some(device))
            {
                self.set_phase(peer, Phase::LeftAlone);
                self.tell_plainly(peer, Kind::RDMA_CM_EVENT_DISCONNECTED, 0);
            }
            self.set_phase(id, Phase::Over);
            self.tell_plainly(id, Kind::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
        }
    }
}

impl Params {
    /// The same numbers from the other side: what one serves is what the other may ask.
    fn as_heard(self) -> Self {
        Self {
            responder_resources: self.initiator_depth,
            initiator_depth: self.responder_resources,
            ..self
        }
    }
}

/// Private data as it arrives: with zeros up to the size of the message.
fn padded(mut data: Vec<u8>, len: usize) -> Result<Vec<u8>, Errno> {
    if data.len() > len {
        return Err(Errno::INVAL);
    }
    data.resize(len, 0);
    Ok(data)
}
