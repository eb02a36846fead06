//! The objects of a world, as plain data. The other files of this folder implement their behaviour.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicU8;

use super::DeviceSpec;
use super::object::{self, Events, Id, Ptr, id_of};
use crate::sys;

pub(super) const LOCAL_WRITE: u32 = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
pub(super) const REMOTE_WRITE: u32 = sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
pub(super) const REMOTE_READ: u32 = sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;

/// The part of a key that is the tag; the rest is an index. The tag tells local keys from remote
/// keys, so that a peer cannot use a local key, and a local request cannot use a remote key.
pub(super) const KEY_TAG: u32 = 0xff;
pub(super) const LOCAL_TAG: u32 = 0x01;
pub(super) const REMOTE_TAG: u32 = 0x02;

pub(super) const RESET: sys::ibv_qp_state = sys::ibv_qp_state::IBV_QPS_RESET;
pub(super) const INIT: sys::ibv_qp_state = sys::ibv_qp_state::IBV_QPS_INIT;
pub(super) const RTR: sys::ibv_qp_state = sys::ibv_qp_state::IBV_QPS_RTR;
pub(super) const RTS: sys::ibv_qp_state = sys::ibv_qp_state::IBV_QPS_RTS;
pub(super) const ERROR: sys::ibv_qp_state = sys::ibv_qp_state::IBV_QPS_ERR;

pub(super) struct Device {
    pub(super) id: Id,
    pub(super) spec: DeviceSpec,
    pub(super) guid: u64,
    pub(super) up: bool,
    pub(super) removed: bool,
    pub(super) raw: Ptr<sys::ibv_device>,
    /// The context that RDMA CM shows as the device of an identifier.
    pub(super) cm_context: Ptr<sys::verbs_context>,
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: `add_device` created the objects for this device alone. Every holder of these
        // pointers also holds the world. The world is being dropped, so there is no holder.
        unsafe {
            object::free(self.cm_context);
            object::free(self.raw);
        }
    }
}

impl Device {
    pub(super) fn link_local(&self) -> [u8; 16] {
        let prefix = 0xfe80_u128 << 112;
        (prefix | u128::from(self.guid)).to_be_bytes()
    }

    pub(super) fn gid(&self, index: usize) -> Option<[u8; 16]> {
        match index {
            0 => Some(self.link_local()),
            _ => self.spec.addresses.get(index - 1).map(|ip| gid_of(*ip)),
        }
    }

    /// Returns the index of `gid` in the table.
    pub(super) fn gid_index(&self, gid: [u8; 16]) -> Option<u8> {
        (0..=self.spec.addresses.len())
            .find(|index| self.gid(*index) == Some(gid))
            .and_then(|index| u8::try_from(index).ok())
    }

    /// Returns whether packets can leave and arrive.
    pub(super) fn is_alive(&self) -> bool {
        self.up && !self.removed
    }
}

/// Returns the RoCE form of an IP address.
pub(super) fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
    .octets()
}

pub(super) struct Context {
    pub(super) device: Id,
    pub(super) events: Events<AsyncEvent>,
    pub(super) raw: Ptr<sys::verbs_context>,
}

pub(super) struct AsyncEvent {
    pub(super) kind: sys::ibv_event_type,
    pub(super) subject: Subject,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Subject {
    QueuePair(Id),
    Queue(Id),
    SharedQueue(Id),
    Port(u8),
    Device,
}

pub(super) struct Domain {
    pub(super) context: Id,
    pub(super) raw: Ptr<sys::ibv_pd>,
}

pub(super) struct Region {
    pub(super) domain: Id,
    /// The address in memory. Work requests use `iova` instead.
    pub(super) at: usize,
    pub(super) iova: u64,
    pub(super) len: u64,
    pub(super) access: u32,
    pub(super) index: u32,
    pub(super) raw: Ptr<sys::ibv_mr>,
}

/// A piece of local memory in a work request.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) lkey: u32,
}

/// Memory that a key gives access to, or inline data that the fake has copied.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub(super) at: usize,
    pub(super) len: usize,
}

impl Span {
    /// Creates a span of the fake's own copy of inline data.
    pub(super) fn of(bytes: &[AtomicU8]) -> Self {
        Self { at: bytes.as_ptr().expose_provenance(), len: bytes.len() }
    }
}

impl Region {
    /// Returns `len` bytes of the region from `addr`; `None` if they are not within the region.
    pub(super) fn part(&self, addr: u64, len: u64) -> Option<Span> {
        let offset = addr.checked_sub(self.iova)?;
        (offset.checked_add(len)? <= self.len).then_some(())?;
        Some(Span { at: self.at + usize::try_from(offset).ok()?, len: usize::try_from(len).ok()? })
    }

    /// Returns whether `lkey` is the local key of the region.
    pub(super) fn has_local_key(&self, lkey: u32) -> bool {
        lkey == self.index << 8 | LOCAL_TAG
    }
}

pub(super) struct Window {
    pub(super) domain: Id,
    pub(super) rkey: u32,
    pub(super) bound: Option<Bound>,
    pub(super) raw: Ptr<sys::ibv_mw>,
}

/// The queue pair and the region that a window is bound to, and the range that it covers.
pub(super) struct Bound {
    pub(super) qp: Id,
    pub(super) region: Id,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: u32,
}

/// The contents of a bind request.
#[derive(Clone, Copy)]
pub(super) struct Binding {
    pub(super) window: Option<Id>,
    /// The window's key when the request was posted.
    pub(super) rkey_before: u32,
    pub(super) rkey: u32,
    pub(super) region: Option<Id>,
    pub(super) lkey: u32,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: u32,
}

impl Binding {
    /// Reads a bind request.
    ///
    /// # Safety
    /// The window that `raw` names is alive; the region is null or alive.
    pub(super) unsafe fn from_raw(raw: &sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1) -> Self {
        let info = raw.bind_info;
        // SAFETY: the caller guarantees that window and region are alive.
        unsafe {
            Self {
                window: id_of(raw.mw),
                rkey_before: (*raw.mw).rkey,
                rkey: raw.rkey,
                region: id_of(info.mr),
                lkey: if info.mr.is_null() { 0 } else { (*info.mr).lkey },
                addr: info.addr,
                len: info.length,
                access: info.mw_access_flags,
            }
        }
    }
}

impl Window {
    /// Returns the region behind the window, if the window allows this access to the peer of `qp`.
    pub(super) fn allows(&self, qp: Id, rkey: u32, addr: u64, len: u64, access: u32) -> Option<Id> {
        let bound = self.bound.as_ref().filter(|bound| bound.qp == qp && self.rkey == rkey)?;
        let offset = addr.checked_sub(bound.addr)?;
        let within = offset.checked_add(len)? <= bound.len;
        (within && bound.access & access == access).then_some(bound.region)
    }

    /// Returns whether the window is bound to `region`.
    pub(super) fn is_bound_to_region(&self, region: Id) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.region == region)
    }

    /// Returns whether the window is bound to `qp`.
    pub(super) fn is_bound_to_queue_pair(&self, qp: Id) -> bool {
        self.bound.as_ref().is_some_and(|bound| bound.qp == qp)
    }
}

pub(super) struct Channel {
    pub(super) context: Id,
    /// Queues that have an event.
    pub(super) events: Events<Id>,
    pub(super) raw: Ptr<sys::ibv_comp_channel>,
}

pub(super) struct Queue {
    pub(super) context: Id,
    pub(super) channel: Option<Id>,
    pub(super) entries: VecDeque<Entry>,
    pub(super) depth: usize,
    pub(super) armed: Armed,
    pub(super) overrun: bool,
    /// Completion events and async events that were fetched, but not acknowledged.
    pub(super) unacked: usize,
    pub(super) raw: Ptr<sys::ibv_cq>,
}

/// A completion, and the work queue entries that it frees when it is polled.
pub(super) struct Entry {
    pub(super) wc: sys::ibv_wc,
    pub(super) freed: FreedEntries,
    pub(super) solicited: bool,
}

/// Work queue entries that a polled completion frees. It frees no entries of a queue pair that was
/// reset since `epoch`.
#[derive(Clone, Copy)]
pub(super) enum FreedEntries {
    /// `count` entries of the send queue.
    Sends {
        qp: Id,
        epoch: u32,
        count: u32,
    },
    Receive {
        qp: Id,
        epoch: u32,
    },
    Shared(Id),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Armed {
    No,
    Solicited,
    Any,
}

pub(super) struct SharedQueue {
    pub(super) context: Id,
    pub(super) domain: Id,
    pub(super) waiting: VecDeque<Receive>,
    /// Number of receives that were posted and are not yet freed by a polled completion.
    pub(super) used: u32,
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) limit: u32,
    pub(super) unacked: usize,
    pub(super) raw: Ptr<sys::ibv_srq>,
}

/// A posted receive.
pub(super) struct Receive {
    pub(super) wr_id: u64,
    pub(super) pieces: Vec<Piece>,
    pub(super) freed: FreedEntries,
}

impl Receive {
    /// Returns how many bytes fit.
    pub(super) fn capacity(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.len)).sum()
    }
}

pub(super) struct QueuePair {
    pub(super) number: u32,
    pub(super) device: Id,
    pub(super) context: Id,
    pub(super) domain: Id,
    pub(super) send_cq: Id,
    pub(super) recv_cq: Id,
    pub(super) srq: Option<Id>,
    pub(super) cap: sys::ibv_qp_cap,
    pub(super) all_signaled: bool,
    pub(super) state: sys::ibv_qp_state,
    /// The values that `ibv_modify_qp` set, field by field.
    pub(super) attr: sys::ibv_qp_attr,
    /// Counts resets. Completions from an earlier epoch free no entries.
    pub(super) epoch: u32,
    pub(super) sends: VecDeque<Send>,
    pub(super) receives: VecDeque<Receive>,
    /// Number of entries of the send queue that were posted and are not yet freed by a polled
    /// completion. `receives_used` is the same for the receive queue.
    pub(super) sends_used: u32,
    pub(super) receives_used: u32,
    /// Number of sends since the last completion. All of them succeeded without a completion.
    pub(super) unsignaled: u32,
    pub(super) unacked: usize,
    pub(super) raw: Ptr<sys::ibv_qp>,
}

/// A posted entry of the send queue.
pub(super) struct Send {
    pub(super) wr_id: u64,
    pub(super) kind: Kind,
    pub(super) signaled: bool,
    pub(super) solicited: bool,
    pub(super) payload: Payload,
    pub(super) len: u64,
    /// In network byte order, as posted.
    pub(super) imm: Option<u32>,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    /// Set for a request that binds a window.
    pub(super) binding: Option<Binding>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Send,
    Write,
    Read,
    Bind,
    Invalidate,
}

pub(super) enum Payload {
    Inline(Vec<AtomicU8>),
    Pieces(Vec<Piece>),
}

pub(super) struct CmChannel {
    pub(super) events: Events<CmEvent>,
    pub(super) raw: Ptr<sys::rdma_event_channel>,
}

pub(super) struct CmEvent {
    pub(super) id: Id,
    pub(super) listener: Option<Id>,
    pub(super) kind: sys::rdma_cm_event_type,
    pub(super) status: i32,
    pub(super) params: Params,
    pub(super) data: Vec<u8>,
}

/// The connection parameters that one side sends to the other.
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
    /// Whether the identifier owns its local port. An accepted connection does not: it shares the
    /// listener's port.
    pub(super) owns_port: bool,
    /// Whether a connection request created the identifier.
    pub(super) is_passive: bool,
    pub(super) reuse: bool,
    pub(super) tos: u8,
    pub(super) ack_timeout: Option<u8>,
    /// Maximum number of connection requests that wait to be fetched.
    pub(super) backlog: usize,
    pub(super) sent: Params,
    pub(super) received: Params,
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
    Disconnecting,
    PeerDisconnected,
    Disconnected,
    Closed,
}

impl Params {
    /// Returns the parameters as the peer sees them. The reads that one side serves are the reads
    /// that its peer may have outstanding.
    pub(super) fn seen_by_peer(self) -> Self {
        Self {
            responder_resources: self.initiator_depth,
            initiator_depth: self.responder_resources,
            ..self
        }
    }
}

/// Reports that devices hold back during [`super::World::delay_completions`].
#[derive(Default)]
pub(super) struct Late {
    pub(super) is_on: bool,
    pub(super) completions: Vec<(Id, Entry)>,
    /// The context and the id of each queue pair that has taken its last receive.
    pub(super) last_receives: Vec<(Id, Id)>,
}
