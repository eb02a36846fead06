//! The state machine of the connection manager: which calls each phase allows, and which events the
//! other side gets.
//!
//! ```text
//! active    Idle ─► Bound ─► AddressResolved ─► RouteResolved ─► Connecting ─► Responded ─┐
//!                     └─► Listening                                           Connected ◄─┤
//! passive                                                  Requested ─► Accepted ─────────┘
//!
//! this side disconnects     Connected ─► Disconnecting ─► Disconnected
//! the peer disconnects      Connected ─► PeerDisconnected ─► Disconnected
//! any phase ─► Closed: rejected, or the device was removed
//! ```
//!
//! As in the kernel, the side that disconnects gets its own DISCONNECTED event only when the peer
//! has answered, or if the peer is unreachable. The peer answers by disconnecting or by destroying
//! its identifier. Messages arrive at once or, in a black hole or if a port is down, never.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;

use super::object::Id;
use super::records::{CmEvent, Identifier, Params, Phase, gid_of};
use super::state::State;
use crate::error::RejectReason;
use crate::sys::rdma_cm_event_type as Kind;

const REQUEST_DATA: usize = crate::cm_abi::REQUEST_PRIVATE_DATA_MAX;
const ACCEPT_DATA: usize = crate::cm_abi::ACCEPT_PRIVATE_DATA_MAX;
const REJECT_DATA: usize = crate::cm_abi::REJECT_PRIVATE_DATA_MAX;
/// IB_CM_REJ_TIMEOUT: the reason that a peer gets when the connecting side has given up.
const REJECT_TIMEOUT: RejectReason = RejectReason(4);

impl State {
    pub(super) fn send_event(
        &mut self,
        id: Id,
        kind: Kind,
        status: i32,
        params: Params,
        data: Vec<u8>,
    ) {
        let event = CmEvent { id, listener: None, kind, status, params, data };
        if let Some(channel) = self.identifiers.get(&id).map(|id| id.channel)
            && let Some(channel) = self.cm_channels.get_mut(&channel)
        {
            channel.events.push(event);
        }
    }

    fn send_plain_event(&mut self, id: Id, kind: Kind, status: i32) {
        self.send_event(id, kind, status, Params::default(), Vec::new());
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

    pub(super) fn device_with_ip(&self, ip: IpAddr) -> Option<Id> {
        self.device_at(gid_of(ip))
    }

    pub(super) fn bind(&mut self, id: Id, addr: SocketAddr) -> Result<(), Errno> {
        let reuse = self.at_phase(id, &[Phase::Idle])?.reuse;
        // The kernel refuses a link-local address without its interface (`cma_check_linklocal` in
        // `drivers/infiniband/core/cma.c`).
        if let SocketAddr::V6(at) = addr
            && at.ip().is_unicast_link_local()
            && at.scope_id() == 0
        {
            return Err(Errno::INVAL);
        }
        let device = if addr.ip().is_unspecified() {
            None
        } else {
            Some(self.device_with_ip(addr.ip()).ok_or(Errno::NODEV)?)
        };
        let port = match addr.port() {
            0 => self.free_port(addr.ip()).ok_or(Errno::ADDRNOTAVAIL)?,
            port if self.is_port_taken(addr.ip(), port, reuse) => return Err(Errno::ADDRINUSE),
            port => port,
        };
        let found = self.at_phase(id, &[Phase::Idle])?;
        found.local = Some(SocketAddr::new(addr.ip(), port));
        (found.device, found.phase, found.owns_port) = (device, Phase::Bound, true);
        self.publish_addresses(id);
        Ok(())
    }

    fn is_port_taken(&self, ip: IpAddr, port: u16, reuse: bool) -> bool {
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
            (!self.is_port_taken(ip, port, false)).then_some(port)
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

    /// Resolves `target` from the address that the identifier is bound to, or else from `source`.
    /// Without either, this uses the first device that is up and does not have the target address.
    /// If there is none, it uses the target's own device.
    pub(super) fn resolve_address(
        &mut self,
        id: Id,
        source: Option<SocketAddr>,
        target: SocketAddr,
    ) -> Result<(), Errno> {
        let found = self.at_phase(id, &[Phase::Idle, Phase::Bound])?;
        let bound = found.device.zip(found.local);
        let to = self.device_with_ip(target.ip()).filter(|to| self.devices[to].is_alive());
        if bound.is_none() {
            let source = match source.filter(|source| !source.ip().is_unspecified()) {
                Some(source) => source,
                None => SocketAddr::new(self.source_for(to).ok_or(Errno::NODEV)?, 0),
            };
            // An identifier that is bound to all addresses is bound again, now to the source.
            self.set_phase(id, Phase::Idle);
            self.bind(id, source)?;
        }
        let found = self.at_phase(id, &[Phase::Bound])?;
        found.remote = Some(target);
        let from = found.device;
        if to.is_some() && from.is_some_and(|from| self.devices[&from].is_alive()) {
            self.set_phase(id, Phase::AddressResolved);
            self.send_plain_event(id, Kind::RDMA_CM_EVENT_ADDR_RESOLVED, 0);
        } else {
            self.send_plain_event(
                id,
                Kind::RDMA_CM_EVENT_ADDR_ERROR,
                -Errno::TIMEDOUT.raw_os_error(),
            );
        }
        self.publish_addresses(id);
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
        self.send_plain_event(id, Kind::RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
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
        let Some(to) = self.device_with_ip(target.ip()).filter(|to| self.reaches(from, *to)) else {
            // The peer does not answer. The caller's deadline ends the attempt.
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
            self.reject_identifier(id, RejectReason::NO_LISTENER, Vec::new());
            return Ok(());
        };
        let (channel, waiting, backlog) =
            (listener.channel, self.unfetched(listener_id), listener.backlog);
        if waiting >= backlog {
            self.reject_identifier(id, RejectReason::BY_APPLICATION, Vec::new());
            return Ok(());
        }
        let new = self.add_identifier(channel, std::ptr::null_mut())?;
        if let Some(passive) = self.identifiers.get_mut(&new) {
            (passive.phase, passive.is_passive) = (Phase::Requested, true);
            (passive.local, passive.remote, passive.device) = (Some(target), Some(local), Some(to));
            (passive.peer, passive.received) = (Some(id), params);
        }
        self.publish_addresses(new);
        if let Some(active) = self.identifiers.get_mut(&id) {
            active.peer = Some(new);
        }
        let event = CmEvent {
            id: new,
            listener: Some(listener_id),
            kind: Kind::RDMA_CM_EVENT_CONNECT_REQUEST,
            status: 0,
            params: params.seen_by_peer(),
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

    /// Returns the peer of `id`, if a message can reach it.
    fn reachable_peer(&self, id: Id) -> Option<Id> {
        let (mine, peer_id) =
            self.identifiers.get(&id).and_then(|found| Some((found.device?, found.peer?)))?;
        let theirs = self.identifiers.get(&peer_id)?.device?;
        self.reaches(mine, theirs).then_some(peer_id)
    }

    /// Ends the handshake of `id` with a rejection.
    fn reject_identifier(&mut self, id: Id, reason: RejectReason, data: Vec<u8>) {
        self.set_phase(id, Phase::Closed);
        let data = padded(data, REJECT_DATA).unwrap_or_default();
        self.send_event(
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
            (active.phase, active.received) = (Phase::Responded, params);
            self.send_event(
                peer,
                Kind::RDMA_CM_EVENT_CONNECT_RESPONSE,
                0,
                params.seen_by_peer(),
                data,
            );
        }
        Ok(())
    }

    pub(super) fn establish(&mut self, id: Id) -> Result<(), Errno> {
        self.at_phase(id, &[Phase::Responded])?.phase = Phase::Connected;
        if let Some(peer) = self.reachable_peer(id)
            && let Ok(passive) = self.at_phase(peer, &[Phase::Accepted])
        {
            passive.phase = Phase::Connected;
            self.send_plain_event(peer, Kind::RDMA_CM_EVENT_ESTABLISHED, 0);
        }
        Ok(())
    }

    pub(super) fn reject(&mut self, id: Id, data: Vec<u8>) -> Result<(), Errno> {
        if data.len() > REJECT_DATA {
            return Err(Errno::INVAL);
        }
        self.at_phase(id, &[Phase::Requested, Phase::Responded])?.phase = Phase::Closed;
        self.reject_peer(id, RejectReason::BY_APPLICATION, data);
        Ok(())
    }

    fn reject_peer(&mut self, id: Id, reason: RejectReason, data: Vec<u8>) {
        let waits = [Phase::Connecting, Phase::Responded, Phase::Requested, Phase::Accepted];
        if let Some(peer) = self.reachable_peer(id)
            && self.at_phase(peer, &waits).is_ok()
        {
            self.reject_identifier(peer, reason, data);
        }
    }

    pub(super) fn disconnect(&mut self, id: Id) -> Result<(), Errno> {
        let phase = self.identifiers.get(&id).ok_or(Errno::INVAL)?.phase;
        match phase {
            Phase::Connected => {
                self.set_phase(id, Phase::Disconnecting);
                if !self.send_disconnect(id) {
                    // A real kernel resends the disconnect request before it gives up; the fake
                    // gives up at once.
                    self.set_phase(id, Phase::Disconnected);
                    let status = -Errno::TIMEDOUT.raw_os_error();
                    self.send_plain_event(id, Kind::RDMA_CM_EVENT_DISCONNECTED, status);
                }
            }
            Phase::PeerDisconnected => {
                self.set_phase(id, Phase::Disconnected);
                self.answer_disconnect(id);
            }
            Phase::Idle
            | Phase::Bound
            | Phase::AddressResolved
            | Phase::RouteResolved
            | Phase::Listening => {
                return Err(Errno::INVAL);
            }
            // The kernel returns 0 in every other phase.
            _ => {}
        }
        Ok(())
    }

    /// Sends a disconnect to the peer of `id`; returns `false` if the peer is unreachable or no
    /// longer connected.
    fn send_disconnect(&mut self, id: Id) -> bool {
        let Some(peer) = self.reachable_peer(id) else { return false };
        match self.identifiers.get(&peer).map(|peer| peer.phase) {
            Some(Phase::Connected | Phase::Accepted) => {
                self.set_phase(peer, Phase::PeerDisconnected);
                self.send_plain_event(peer, Kind::RDMA_CM_EVENT_DISCONNECTED, 0);
                true
            }
            _ => false,
        }
    }

    fn answer_disconnect(&mut self, id: Id) {
        if let Some(peer) = self.reachable_peer(id)
            && let Ok(peer_found) = self.at_phase(peer, &[Phase::Disconnecting])
        {
            peer_found.phase = Phase::Disconnected;
            self.send_plain_event(peer, Kind::RDMA_CM_EVENT_DISCONNECTED, 0);
        }
    }

    /// Notifies the peer that `id` is being destroyed.
    pub(super) fn notify_peer_of_destroy(&mut self, id: Id) {
        match self.identifiers.get(&id).map(|found| found.phase) {
            Some(Phase::Connecting) => self.reject_peer(id, REJECT_TIMEOUT, Vec::new()),
            Some(Phase::Requested | Phase::Accepted | Phase::Responded) => {
                self.reject_peer(id, RejectReason::BY_APPLICATION, Vec::new());
            }
            Some(Phase::Connected) => {
                self.send_disconnect(id);
            }
            Some(Phase::PeerDisconnected) => self.answer_disconnect(id),
            _ => {}
        }
    }

    /// Notifies the identifiers of a removed device, and their peers.
    pub(super) fn notify_device_removal(&mut self, device: Id) {
        let here: Vec<Id> = self
            .identifiers
            .iter()
            .filter(|(_, id)| id.device == Some(device))
            .map(|(id, _)| *id)
            .collect();
        for id in here {
            let connected = [Phase::Connected, Phase::Accepted, Phase::Disconnecting];
            let peer = self.identifiers.get(&id).and_then(|found| found.peer);
            if let Some(peer) = peer
                && self.at_phase(peer, &connected).is_ok_and(|found| found.device != Some(device))
            {
                self.set_phase(peer, Phase::PeerDisconnected);
                self.send_plain_event(peer, Kind::RDMA_CM_EVENT_DISCONNECTED, 0);
            }
            self.set_phase(id, Phase::Closed);
            self.send_plain_event(id, Kind::RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
        }
    }
}

/// Pads private data with zeros to the size of the message, as the peer receives it.
fn padded(mut data: Vec<u8>, len: usize) -> Result<Vec<u8>, Errno> {
    if data.len() > len {
        return Err(Errno::INVAL);
    }
    data.resize(len, 0);
    Ok(data)
}
